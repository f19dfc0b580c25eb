"""What every test shares: a seed, one thread, what is skipped where it cannot run, fresh caches, opcheck for FP8."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.formats import FP8_DTYPES, SCALE_DTYPES
from support import emulated, shuffle


def pytest_addoption(parser: pytest.Parser) -> None:
    shuffle.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    # Inductor's caches know an op by its name: none that other sources have filled, unless one is given.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="fp8fn-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # The tensors are small: on two busy cores, a second thread made 288 tests take 57 s in place of 2.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)  # what another plugin orders is shuffled, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    reasons = {"emulated": emulated.missing()}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA or HIP device, and torch.cuda.is_available() is False"
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    yield
    shuffle.shuffle(items)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def hopper() -> targets.Target:
    """The GPU, for a test of kernels that are Hopper's."""
    from fp8fn.ops.cuda.runtime import nvrtc

    target = targets.target_of(torch.device("cuda"))
    if target.name != "sm90" or nvrtc.unavailable():
        pytest.skip(nvrtc.unavailable() or f"the kernels are Hopper's, and this device is {target.name}")
    return target


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """For a test that compiles: no graph of another test counts towards the recompile limit or its counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For a test that asks what Inductor finds in its caches: nothing that another test compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def fp8_opcheck(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """`torch.library.opcheck`, which compares its inputs before and after by an allclose that has no FP8 kernel."""
    narrow = {*FP8_DTYPES, *SCALE_DTYPES} - {torch.float32}
    allclose = torch.allclose

    def widened(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> bool:
        if a.dtype == b.dtype and a.dtype in narrow:
            return allclose(a.float(), b.float(), *args, **kwargs)
        return allclose(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", widened)
    return torch.library.opcheck
