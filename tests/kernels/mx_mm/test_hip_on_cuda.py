"""The portable part of the HIP kernels on an NVIDIA GPU: `mxfp8_gemv`, by a header that maps it to CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import Argument, CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch, Wide
from fp8fn.ops.targets import target_of
from support.compilers import needs_nvrtc
from support.hip_on_host import source_of
from support.mx_decode import BF16, FP16, FP32, Dense, dense

HEADER: Final = Path(__file__).parents[2] / "support" / "hip_cuda" / "wave.h"
ROWS: Final = (1, 2, 4, 8, 16)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP's in the place of CUDA's."""
    monkeypatch.setattr(nvrtc, "_headers", lambda: {"wave.h": HEADER.read_text(encoding="utf-8")})
    monkeypatch.setattr(nvrtc, "_text", source_of)


def cuda_kernel(launch: HipLaunch) -> CudaKernel:
    return CudaKernel(launch.kernel.source, launch.kernel.entry, launch.kernel.macros)


def cases() -> Iterator[Dense]:
    """All numbers of rows, in the smallest kernel that has them; lines of K that end within a step, and long ones."""
    for m in range(1, 17):
        config = HipConfig(rows=next(rows for rows in ROWS if rows >= m))
        yield Dense("gemv", m, 37, 6144 if m % 2 else 1056, config, bias=FP32)
    yield Dense("gemv", 3, 37, 160, HipConfig(rows=4), BF16, FP16, ((2,), ()))
    yield Dense("gemv", 9, 37, 160, HipConfig(rows=16), FP16, BF16, ((2,), (2,)))


@needs_nvrtc
@pytest.mark.parametrize("rows", ROWS)
def test_compiles_for_cuda(rows: int) -> None:
    for types in ((BF16, None), (FP16, BF16), (FP32, FP16)):
        (launch,) = dense(Dense("gemv", rows, 8, 64, HipConfig(rows=rows), *types)).launches
        assert nvrtc.compile_kernel(cuda_kernel(launch), "sm_90a").cubin[:4] == b"\x7fELF"


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_values_on_a_gpu(case: Dense) -> None:
    if (name := target_of(torch.device("cuda")).name) != "sm90":
        pytest.skip(f"NVRTC compiles for sm90 here, and this device is {name}")
    product = dense(case)
    (launch,) = product.launches
    args: dict[str, Argument] = {}
    for name, value in launch.args.items():
        if isinstance(value, Tensor):
            storage = value.untyped_storage().cuda()
            memory = torch.empty(0, dtype=value.dtype, device="cuda").set_(storage)  # type: ignore[call-overload]
            args[name] = memory.as_strided(value.shape, value.stride(), value.storage_offset())
        else:
            args[name] = (value & 0xFFFFFFFF, value >> 32) if isinstance(value, Wide) else value
    threads = launch.threads // 2  # of as many warps as there were waves
    CudaLaunch(cuda_kernel(launch), launch.grid, threads, 0, args, target=target_of(torch.device("cuda"))).run()
    found = args["out"]
    assert isinstance(found, Tensor)
    replace(product, out=found.cpu()).check()
