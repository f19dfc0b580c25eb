"""Fixtures of the tests of launches and tuning: an empty cache, a stub of the driver, an empty store of calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from support.stub_driver import StubDriver

# The modules of launches need Triton, and these fixtures only where their tests do: they are imported inside.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels and tuned tables."""
    from fp8fn.ops.tuning import measured, table

    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    table.forget()
    measured.forget()
    return tmp_path / "cache"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    """Launches of tensors on the CPU go to a stub of the driver."""
    from fp8fn.ops.cuda.runtime import driver, graph_capture, launch
    from fp8fn.ops.cuda.runtime.nvrtc import Compiled
    from fp8fn.ops.torch_private import core
    from support.stub_driver import StubDriver

    found = StubDriver()
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(launch, "compile_kernel", lambda kernel, arch: Compiled(b"cubin", ""))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(graph_capture, "capturing", lambda: False)
    monkeypatch.setattr(core, "stream_handle", lambda index: 77)
    monkeypatch.setattr(core, "current_gpu", lambda: None)  # the index of the CPU
    launch.function_of.cache_clear()
    yield found
    launch.function_of.cache_clear()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, Any]:
    """An empty store of kept calls."""
    from fp8fn.ops.cuda.runtime import call_cache

    store: OrderedDict[Any, Any] = OrderedDict()
    monkeypatch.setattr(call_cache, "_kept", store)
    return store


@pytest.fixture
def hopper_starts_nothing(kept: OrderedDict[Any, Any], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU pass for a Hopper GPU's: launches are planned, prepared and kept, and start nothing."""
    from fp8fn.ops import targets
    from fp8fn.ops.cuda.runtime import call_cache, nvrtc
    from fp8fn.ops.cuda.runtime.launch import CudaLaunch

    loaded = SimpleNamespace(device=torch.device("cpu"), settles=True)
    monkeypatch.setattr(targets, "target_of", lambda device: targets.SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(CudaLaunch, "prepare", lambda launch: loaded)
    monkeypatch.setattr(call_cache, "start", lambda launch, addresses: None)
