"""Quantizers of an x that outgrows the L2, whose lines are told when to leave it: which do so, bits, machine code."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from fp8fn.ops import reference, targets
from fp8fn.ops.cuda import operands
from fp8fn.ops.cuda.quantize import quantize, quantize_rows
from fp8fn.ops.cuda.quantize.walk_columns import WalkConfig
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.operands import Quantization
from support.accuracy import same_bits
from support.compilers import needs_nvrtc
from support.cuda_emulator import hopper_on_cpu, needs_compiler
from support.operands.columns import planned, run
from support.quantizers import marked, quantization, tensors

BF16, FP32 = torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn
ROW: Final = (1, 128)
COLUMN: Final = (128, 1)
LARGE: Final = (16640, 5120)  # 170 MB


def planned_blocks(q: Quantization) -> CudaLaunch:
    (launch,) = quantize.plan(q, quantize.configure(q))
    return launch


def by_blocks(x: Tensor, block: Block = ROW) -> CudaLaunch:
    return planned_blocks(quantization(x, block))


def both(x: Tensor) -> CudaLaunch:
    return planned_blocks(quantization(x, ROW, dual=True))


def of_groups(x: Tensor) -> CudaLaunch:
    return planned_blocks(quantization(x, COLUMN, offsets=torch.empty(4, device=x.device, dtype=torch.int32)))


def by_rows(x: Tensor) -> CudaLaunch:
    q = quantization(x, (1, -1))
    (launch,) = quantize_rows.plan(q, quantize_rows.configure(q))
    return launch


def by_columns(x: Tensor, groups: int = 0) -> tuple[CudaLaunch, ...]:
    offsets = torch.empty(groups, device=x.device, dtype=torch.int32) if groups else None
    return planned(quantization(x, (-1, 1), offsets=offsets))


def large(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_what_outgrows_the_l2() -> None:
    """50 MB; by how much, depends on the kernel."""
    huge, middle, small = large(16384, 8192), large(8192, 4096), large(4096, 4096)  # 268, 67 and 34 MB
    for launch in (by_blocks, both):
        assert launch(huge).options["LOAD"] == "Load::LAST_OUT"
        assert {launch(x).options["LOAD"] for x in (large(*LARGE), middle, small)} == {"Load::CACHED"}
    assert [by_rows(x).options["LOAD"] for x in (large(*LARGE), middle)] == ["Load::LAST_OUT", "Load::PAST_L1"]
    assert [of_groups(x).options["LOAD"] for x in (middle, small)] == ["Load::LAST_OUT", "Load::CACHED"]
    assert by_blocks(large(16384, 8192, dtype=FP32)).options["LOAD"] == "Load::CACHED"  # for which there is no hint
    assert by_rows(large(*LARGE, dtype=FP32)).options["LOAD"] == "Load::PAST_L1"
    assert by_blocks(large(16384, 16384)[:, 1:]).options["LOAD"] == "Load::CACHED"
    for x, groups, kernel, leaves in (
        (middle, 0, "stream_columns", "FIRST"),
        (large(*LARGE), 0, "stream_columns", "ANY"),
        (large(*LARGE), 16, "stream_columns", "LAST"),
        (large(*LARGE), 64, "walk_columns", "LAST"),  # which has no smaller ones
        (large(16640, 1024), 0, "stream_columns", "ANY"),
        (large(16640, 1024), 16, "stream_columns", "ANY"),
    ):
        launches = by_columns(x, groups)
        assert {(launch.name, launch.options["X_LEAVES"]) for launch in launches} == {(kernel, f"Leaves::{leaves}")}


@needs_nvrtc
def test_machine_code() -> None:
    x, middle = large(16384, 8192), large(8192, 5120)
    launches = [by_blocks(x), by_blocks(x, COLUMN), by_blocks(x, (128, 128)), both(x), by_rows(x), of_groups(middle)]
    launches += by_columns(middle)
    for launch in (*launches, *(launch for groups in (0, 1, 16, 64) for launch in by_columns(x, groups))):
        used = launch.resources()
        assert used.spills == 0, launch.describe()


def check(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "L2_BYTES", 0)
    x = torch.randn(800, 264, device=device, dtype=BF16)  # rows enough for whole columns to stream
    for block in (ROW, COLUMN, (128, 128), (1, -1), (-1, 1)):
        q = quantization(x, block)
        launches = planned(q)
        if block == (-1, 1):
            monkeypatch.setattr(operands, "L2_BYTES", 300_000)  # x has 422,400
            launches = planned(q)
            assert {launch.options["X_LEAVES"] for launch in launches} == {"Leaves::FIRST"}
        else:
            assert launches[0].options["LOAD"] == "Load::LAST_OUT"
        run(launches)
        assert same_bits(tensors(q), reference.quantize(x, block, E4M3, "fp32")), block
    offsets = torch.tensor([0, 130, 131, 750], device=device, dtype=torch.int32)
    q = marked(quantization(x, (-1, 1), offsets=offsets))
    launches = planned(q, WalkConfig(4, BOX=128))
    assert launches[0].options["X_LEAVES"] == "Leaves::LAST"
    run(launches)
    assert same_bits(tensors(q), reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32"))


@needs_compiler
def test_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with hopper_on_cpu():
        check("cpu", monkeypatch)


@pytest.mark.gpu
def test_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if targets.target_of(torch.device("cuda")).name != "sm90" or nvrtc.unavailable() is not None:
        pytest.skip("the kernels are Hopper's, compiled by NVRTC")
    check("cuda", monkeypatch)
