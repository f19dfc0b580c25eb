"""Whole rows quantized in CUDA C++: bits in the emulator and on a GPU, refusals, machine code."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize_rows as rows
from fp8fn.ops.cuda.quantize.quantize_rows import default_config
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.operands import SILU_MUL
from fp8fn.ops.quantize import quantize_kernel
from fp8fn.ops.quantize_fused import quantize_silu_mul_kernel
from fp8fn.ops.targets import SM100
from support.accuracy import same_bits
from support.compilers import needs_nvrtc
from support.cuda_emulator import hopper_on_cpu, needs_compiler
from support.kernel_info import assert_near_bits
from support.operands.values import random
from support.quantizers import quantization

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES: Final = (
    ((1, 1), BF16, "fp32", E4M3),
    ((3, 520), BF16, "fp32", E4M3),
    ((5, 4096), BF16, "pow2", E4M3),
    ((2, 3, 7, 99), FP16, "e8m0", E5M2),
    ((4, 1030), FP32, "fp32", E4M3),
    ((2, 4, 3001), BF16, "fp32", E4M3),
)


def check(device: str) -> None:
    for shape, dtype, scale, fp8 in CASES:
        x = torch.randn(shape, device=device, dtype=dtype)
        assert same_bits(quantize_kernel(x, (1, -1), fp8, scale), reference.quantize(x, (1, -1), fp8, scale)), shape
        assert same_bits(quantize_kernel(x.mT, (-1, 1), fp8, scale), reference.quantize(x.mT, (-1, 1), fp8, scale)), (
            shape
        )


@needs_compiler
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_rows_have_the_references_bits(backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards) as launches:
        check("cpu")
    names = [launch.name for launch in launches]
    assert names.count("quantize_rows") == 2 * len(CASES) - 2  # a row of one element is a column, too


@needs_compiler
def test_hard_values_stay_in_their_rows() -> None:
    x = torch.randn(48, 600, dtype=BF16)
    x[5, 3], x[6, 599], x[7, 40] = torch.nan, torch.inf, -torch.inf
    x[8:16] = 0
    x[16:24] *= 1e-39
    x[24:32] *= 3e37
    with hopper_on_cpu():
        found = quantize_kernel(x, (1, -1))
    assert same_bits(found, reference.quantize(x, (1, -1), E4M3, "fp32"))
    assert found[1].isfinite().sum() == 45


@needs_compiler
def test_rows_that_do_not_follow_each_other() -> None:
    wide = torch.randn(9, 700, dtype=BF16)
    with hopper_on_cpu() as launches:
        for x in (wide[:, :640], wide[:, 3:600], wide[::2], wide.repeat(1, 1)[None, 1:]):
            assert same_bits(quantize_kernel(x, (1, -1)), reference.quantize(x, (1, -1), E4M3, "fp32"))
    assert [launch.options["ALIGNED"] for launch in launches] == [0, 0, 1, 0]


PRODUCTS: Final = (((1, 8), BF16), ((5, 4096), BF16), ((3, 14336), BF16), ((2, 3, 7, 99), FP16), ((4, 1030), FP32))


def check_products(device: str) -> None:
    """Rows of the wanted scales and bytes, as far as an approximate SiLU has them; those with a NaN or an Inf too."""
    for (shape, dtype), (scale, fp8) in zip(PRODUCTS, cycle((("fp32", E4M3), ("pow2", E5M2), ("e8m0", E4M3)))):
        gate, up = (random(*shape, dtype=dtype, seed=seed).to(device) for seed in range(2))
        if shape == (5, 4096):
            gate[1, 7], gate[2, 3], up[3, 4000] = torch.nan, torch.inf, -torch.inf
        found = quantize_silu_mul_kernel(gate, up, (1, -1), fp8, scale)
        expected = reference.quantize(reference.silu_mul(gate, up), (1, -1), fp8, scale)
        for name, part, wanted in zip(("data", "scale"), found, expected, strict=True):
            assert_near_bits(f"{name} of {shape}", part, wanted)


@needs_compiler
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_rows_of_silu_mul(backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards) as launches:
        check_products("cpu")
    assert [launch.name for launch in launches] == ["quantize_rows"] * len(PRODUCTS)


def test_what_rows_of_silu_mul_are_refused() -> None:
    gate = torch.empty(4, 4096, device="meta", dtype=BF16)
    made = partial(quantization, source=SILU_MUL)
    assert rows.accepts(made(gate, (1, -1), other=gate)) is None
    assert "SILU_MUL has no kernel for whole columns" in str(rows.accepts(made(gate, (-1, 1), other=gate)))
    assert "its transpose" in str(rows.accepts(made(gate, (1, -1), other=gate, dual=True)))
    turned = torch.empty(4096, 4, device="meta", dtype=BF16).mT
    assert "up has strides (1, 4)" in str(rows.accepts(made(gate, (1, -1), other=turned)))
    assert "gate has strides (1, 4)" in str(rows.accepts(made(turned, (1, -1), other=gate)))
    long = torch.empty(4, 16392, device="meta", dtype=BF16)
    assert "gate has rows of 16392, more than 16384" in str(rows.accepts(made(long, (1, -1), other=long)))
    assert rows.configure(made(gate[:, :1000], (1, -1), other=gate[:, :1000])).ROW_WARPS == 1


def test_the_fewest_warps_hold_a_row() -> None:
    found = [default_config(columns, 2).ROW_WARPS for columns in (1, 2048, 2049, 5120, 8192, 8193, 32768)]
    assert found == [1, 1, 2, 4, 4, 8, 16]
    assert [default_config(columns, 4).ROW_WARPS for columns in (1024, 1025, 16384)] == [1, 2, 16]
    x = torch.empty(4, 32769, device="meta", dtype=BF16)
    assert "more than 32768" in str(rows.accepts(quantization(x, (1, -1))))
    assert "not sm90" in str(rows.accepts(quantization(x, (1, -1), target=SM100)))
    assert rows.accepts(quantization(x[:, 1:], (1, -1))) is None


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "width"), [(BF16, 5120), (BF16, 8192), (FP32, 16384), (FP16, 3001)], ids=str)
def test_machine_code(dtype: torch.dtype, width: int) -> None:
    x = torch.empty(64, width, device="meta", dtype=dtype)
    q = quantization(x, (1, -1))
    (launch,) = rows.plan(q, rows.configure(q))
    used = launch.resources()
    assert used.spills == 0
    assert used.registers <= 64


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "width"), [(BF16, 14336), (BF16, 16384), (FP32, 8192), (FP16, 3001)], ids=str)
def test_machine_code_of_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate = torch.empty(64, width, device="meta", dtype=dtype)
    q = quantization(gate, (1, -1), other=gate, source=SILU_MUL)
    (launch,) = rows.plan(q, rows.configure(q))
    used = launch.resources()
    assert used.spills == 0
    assert used.registers <= 72


@pytest.mark.gpu
def test_rows_have_the_references_bits_on_a_gpu() -> None:
    if targets.target_of(torch.device("cuda")).name != "sm90" or nvrtc.unavailable() is not None:
        pytest.skip("the kernel is Hopper's, compiled by NVRTC")
    check("cuda")
    check_products("cuda")
    x: Tensor = torch.randn(3, 777, 5120, device="cuda", dtype=BF16)
    assert same_bits(quantize_kernel(x, (1, -1)), reference.quantize(x, (1, -1), E4M3, "fp32"))
