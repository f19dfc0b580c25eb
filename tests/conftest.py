"""The setting of every test: a seed, one thread, skips where it cannot run, fresh caches, opcheck for FP8."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import call_cache, nvrtc
from fp8fn.ops.formats import FP8_DTYPES, SCALE_DTYPES
from support import build_cache, emulated, quick, shuffle
from support.file_order import FileOrder


def pytest_addoption(parser: pytest.Parser) -> None:
    shuffle.add_option(parser)
    quick.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit what is set here
        build_cache.prune()
        _set_caches(config)
    _keep_machine_code(config)
    config.pluginmanager.register(FileOrder(config), "fp8fn-file-order")
    # The tensors are small: on two busy cores, a second thread made 288 tests take 57 s in place of 2.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)  # what another plugin orders is shuffled, too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    quick.select(config, items)
    reasons = {"emulated": emulated.missing()}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA or HIP device, and torch.cuda.is_available() is False"
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    yield
    shuffle.shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skips what an old Triton compiles for a second AMD architecture: the workers of one run have different firsts."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "SecondArchitectureError":  # of a module that needs Triton
            raise
        pytest.skip(str(error))


def pytest_collection_finish() -> None:
    """Leaves what the imports made out of garbage collection, which took 0.5 s each time that a test asked for it."""
    gc.collect()
    gc.freeze()


def _set_caches(config: pytest.Config) -> None:
    """Names the caches of this run and its child processes, where the environment does not."""
    fp8fn_cache = tempfile.mkdtemp(prefix="fp8fn-tests-")
    config.add_cleanup(lambda: shutil.rmtree(fp8fn_cache, ignore_errors=True))
    inductor = (
        build_cache.folder()
        / "inductor"
        / build_cache.digest((torch.__version__, torch.version.git_version, sys.version, build_cache.host_compiler()))
    )
    caches = {
        "FP8FN_CACHE_DIR": fp8fn_cache,
        # An installed fp8fn-cubins would serve the kernels whose compilation tests count.
        "FP8FN_CUBINS": "0",
        # Triton finds a kernel by the contents of the sources and of the compiler.
        "TRITON_CACHE_DIR": str(build_cache.folder() / "triton"),
        # Inductor finds C++ by its text and by the command that compiles it; graphs by their nodes, which name an op
        # and not its sources. The tag, new in every run, keeps this run from graphs that other sources made.
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "TORCH_COMPILE_CACHE_KEY_TAG": secrets.token_hex(8),
        # More threads are processes, which each process that compiles starts: 4 s of a core, for kernels of GPUs only.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a process of a test that crashes says where
    }
    for name, value in caches.items():
        os.environ.setdefault(name, value)
    torch.compiler.config.cache_key_tag = os.environ["TORCH_COMPILE_CACHE_KEY_TAG"]


def _keep_machine_code(config: pytest.Config) -> None:
    """Keeps NVRTC's results below fp8fn's own cache, so that the tests of that cache still judge it."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        nvrtc, "_compile", build_cache.by_content(nvrtc._compile, lambda: build_cache.loaded_library("nvrtc"))
    )
    config.add_cleanup(patch.undo)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    """Each test plans anew: tests let the CPU pass for several GPUs, which a kept call does not tell apart."""
    call_cache._kept.clear()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def hopper() -> targets.Target:
    """The GPU, for a test of kernels that are Hopper's."""
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
def fresh_caches() -> Iterator[None]:
    """For a test that asks which graphs Inductor finds in its caches: none that another test compiled."""
    with torch.compiler.config.patch(cache_key_tag=secrets.token_hex(8)):
        yield


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
