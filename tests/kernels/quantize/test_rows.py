"""Whole rows quantized in CUDA C++: bits in the emulator and on a GPU, refusals, machine code."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize_rows as rows
from fp8fn.ops.cuda.quantize.quantize_rows import default_config
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.quantize import quantize_kernel
from fp8fn.ops.targets import SM100
from support.accuracy import same_bits
from support.compilers import needs_nvrtc
from support.cuda_emulator import hopper_on_cpu, needs_compiler
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


@pytest.mark.gpu
def test_rows_have_the_references_bits_on_a_gpu() -> None:
    if targets.target_of(torch.device("cuda")).name != "sm90" or nvrtc.unavailable() is not None:
        pytest.skip("the kernel is Hopper's, compiled by NVRTC")
    check("cuda")
    x: Tensor = torch.randn(3, 777, 5120, device="cuda", dtype=BF16)
    assert same_bits(quantize_kernel(x, (1, -1)), reference.quantize(x, (1, -1), E4M3, "fp32"))
