"""Norms of rows and of sums quantized in one launch: bits in the emulator and on a GPU, refusals, machine code."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import rms_norm
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.layout import Block
from fp8fn.ops.operands import RMS_NORM
from fp8fn.ops.quantize_fused import (
    quantize_add_rms_norm_kernel,
    quantize_add_rms_norm_reference,
    quantize_rms_norm_kernel,
    quantize_rms_norm_reference,
)
from fp8fn.ops.targets import SM100
from support.accuracy import same_bits
from support.compilers import needs_nvrtc
from support.cuda_emulator import hopper_on_cpu, needs_compiler
from support.operands.values import random
from support.quantizers import quantization

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WHOLE: Final = (1, -1)
BLOCKS: Final[tuple[Block, ...]] = ((1, 128), WHOLE)
SHAPES: Final = (((1, 8), BF16), ((9, 2048), BF16), ((5, 4096), BF16), ((2, 3, 7, 136), FP16), ((2, 5, 2056), FP32))


def rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, others and a weight; some rows have a NaN, an Inf, a sum that overflows, zeros and tiny values."""
    x, residual = (random(*shape, dtype=dtype, seed=seed) for seed in range(2))
    if shape == (9, 2048):
        x[1, 7], x[2, 3], residual[3, 2000] = torch.nan, torch.inf, -torch.inf
        x[4, 9] = residual[4, 9] = 3e38
        x[5:7] = residual[5:7] = 0
        residual[7] = -x[7]
        x[8], residual[8] = x[8] * 1e-39, residual[8] * 1e-39
    return x.to(device), residual.to(device), random(shape[-1], dtype=dtype, seed=2).to(device)


def check(device: str) -> None:
    """The reference's bits, and torch's own sum."""
    formats = cycle((("fp32", E4M3), ("pow2", E5M2), ("e8m0", E4M3)))
    for (shape, dtype), (scale, fp8) in zip(SHAPES, formats, strict=False):
        x, residual, weight = rows(shape, dtype, device)
        for block in BLOCKS:
            form = (1e-5, block, fp8, scale)
            found = quantize_rms_norm_kernel(x, weight, *form)
            assert same_bits(found, quantize_rms_norm_reference(x, weight, *form)), (shape, block)
            *found, total = quantize_add_rms_norm_kernel(x, residual, weight, *form)
            *expected, wanted = quantize_add_rms_norm_reference(x, residual, weight, *form)
            assert same_bits(found, expected), (shape, block)
            torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)
            assert total.is_contiguous()


@needs_compiler
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_bits(backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards) as launches:
        check("cpu")
    assert [launch.name for launch in launches] == ["quantize_rms_norm"] * 4 * len(SHAPES)


@needs_compiler
def test_rows_that_do_not_follow_each_other() -> None:
    wide, weight = random(9, 768), random(640, seed=2)
    with hopper_on_cpu() as launches:
        for x, residual in ((wide[:, :640], wide[:, 128:]), (wide[::2, 8:648], wide[:5, :640])):
            found = quantize_add_rms_norm_kernel(x, residual, weight, 1e-5, WHOLE)
            assert same_bits(found, quantize_add_rms_norm_reference(x, residual, weight, 1e-5, WHOLE))
    assert len(launches) == 2


@needs_compiler
def test_rows_that_the_kernel_refuses_are_added_by_pytorch() -> None:
    x, residual, weight = random(3, 100), random(3, 100, seed=1), random(100, seed=2)
    with hopper_on_cpu() as launches:
        for block in ((1, 128), WHOLE, (128, 1)):
            found = quantize_add_rms_norm_kernel(x, residual, weight, 1e-5, block)
            assert same_bits(found, quantize_add_rms_norm_reference(x, residual, weight, 1e-5, block))
    assert "quantize_rms_norm" not in [launch.name for launch in launches]


def test_what_is_refused() -> None:
    x = torch.empty(4, 4096, device="meta", dtype=BF16)
    made = partial(quantization, source=RMS_NORM, eps=1e-5, other=x[0])
    for block in BLOCKS:
        assert rms_norm.accepts(made(x, block)) is None
        assert rms_norm.accepts(made(x, block, residual=x)) is None
    turned = torch.empty(4096, 4, device="meta", dtype=BF16).mT
    for given, reason in (
        (made(x, (128, 128)), "block (128, 128) is none of"),
        (made(x, WHOLE, dual=True), "and its transpose"),
        (made(x, WHOLE, rstd=x[:, 0].float()), "the statistics are given"),
        (made(x, WHOLE, target=SM100), "not sm90"),
        (made(turned, WHOLE), "x has strides (1, 4)"),
        (made(x, WHOLE, residual=turned), "residual has strides (1, 4)"),
        (made(x, WHOLE, residual=torch.empty(4, 8192, device="meta", dtype=BF16)[:, ::2]), "residual has strides"),
        (made(x, WHOLE, residual=torch.empty(4, 4100, device="meta", dtype=BF16)[:, :4096]), "multiples of 16 bytes"),
    ):
        assert reason in str(rms_norm.accepts(given))
    long = torch.empty(4, 16392, device="meta", dtype=BF16)
    assert "x has 16392 columns" in str(rms_norm.accepts(made(long, WHOLE, other=long[0])))


def test_a_residual_is_like_the_rows() -> None:
    x, weight = random(4, 64), random(64)
    add = torch.ops.fp8fn.quantize_add_rms_norm
    with pytest.raises(ValueError, match=r"x has shape \(4, 64\) and residual \(3, 64\); they must be equal"):
        add(x, x[:3], weight)
    with pytest.raises(TypeError, match=r"residual torch\.float32; residual\.to\(torch\.bfloat16\) for one"):
        add(x, x.float(), weight)
    with pytest.raises(ValueError, match=r"eps=-1\.0 is not finite and at least 0"):
        add(x, x, weight, -1.0)


@needs_nvrtc
@pytest.mark.parametrize("width", [2048, 2880, 4096, 5000, 5120, 7168, 8192, 10240, 14336, 16384])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_machine_code(dtype: torch.dtype, width: int) -> None:
    """Nothing spills but for two forms in blocks of 128 without a residual, which test_blocks.py names."""
    x = torch.empty(4096 if width % 2048 == 0 else 4095, width, device="meta", dtype=dtype)
    for block, residual in ((WHOLE, None), (WHOLE, x), ((1, 128), x)):
        q = quantization(x, block, source=RMS_NORM, other=x[0], eps=1e-5, residual=residual)
        (launch,) = rms_norm.plan(q, rms_norm.configure(q))
        assert launch.resources().spills == 0, (block, residual is None)


@pytest.mark.gpu
def test_bits_on_a_gpu() -> None:
    if targets.target_of(torch.device("cuda")).name != "sm90" or nvrtc.unavailable() is not None:
        pytest.skip("the kernel is Hopper's, compiled by NVRTC")
    check("cuda")
    x, residual = (torch.randn(3, 777, 5120, device="cuda", dtype=BF16) for _ in range(2))
    for block in BLOCKS:
        found = quantize_add_rms_norm_kernel(x, residual, x[0, 0], 1e-5, block)
        assert same_bits(found, quantize_add_rms_norm_reference(x, residual, x[0, 0], 1e-5, block))
