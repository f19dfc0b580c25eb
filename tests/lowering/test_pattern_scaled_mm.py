"""torch's own scaled products: which become fp8fn's, with what scales, the same values, and why the others stay."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

import fp8fn
from fp8fn.lowering import joint_pass
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.patterns import scaled_mm
from fp8fn.lowering.patterns.scaled_mm import why_slower
from fp8fn.ops import targets
from fp8fn.ops.targets import SM89, SM90, Chip
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import Entry, Table, lookup, tables
from support.accuracy import assert_close
from support.graphs import code, graphs

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
M, N, K = 128, 256, 384
WHOLE, ROW, COLUMN, ROWS, COLUMNS, SQUARE = (-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128)
PAIRS = {
    "tensorwise": (WHOLE, WHOLE), "rowwise": (ROW, COLUMN), "1x128 and 128x128": (ROWS, SQUARE),
    "1x128 and 128x1": (ROWS, COLUMNS), "128x128 and 128x1": (SQUARE, COLUMNS),
}  # fmt: skip
# torch.nn.functional.ScalingType
KINDS = {WHOLE: 0, ROW: 1, COLUMN: 1, ROWS: 4, COLUMNS: 4, SQUARE: 5}


def operands(pair: str, m: int = M) -> tuple[fp8fn.ScaledTensor, fp8fn.ScaledTensor]:
    torch.manual_seed(0)
    a_block, b_block = PAIRS[pair]
    return fp8fn.quantize(torch.randn(m, K), a_block), fp8fn.quantize(torch.randn(N, K), b_block[::-1]).mT


def expected(a: fp8fn.ScaledTensor, b: fp8fn.ScaledTensor) -> Tensor:
    return (fp8fn.dequantize(a, torch.float32) @ fp8fn.dequantize(b, torch.float32)).to(BF16)


def lines(scale: Tensor) -> Tensor:
    """Contiguous along the rows' axis, as blocks lie."""
    return scale.mT.contiguous().mT


def for_v1(a: fp8fn.ScaledTensor, b: fp8fn.ScaledTensor) -> tuple[Tensor, Tensor]:
    if a.block == WHOLE:
        return a.scale.reshape(()), b.scale.reshape(())
    if a.block == ROW:
        return torch.empty(a.shape[0], 1).copy_(a.scale), b.scale.contiguous()
    a_scale = a.scale.contiguous() if a.block == SQUARE else lines(a.scale)
    return a_scale, lines(b.scale) if b.block == SQUARE else b.scale.contiguous()


def for_v2(a: fp8fn.ScaledTensor, b: fp8fn.ScaledTensor) -> tuple[Tensor, Tensor]:
    """Blocks of 128x128 described along K first and padded to 4 there, those of 128x1 as `(N, K / 128)`."""
    if WHOLE in (a.block, b.block) or a.block == ROW:
        return for_v1(a, b)
    a_scale = F.pad(a.scale, (0, 1)).contiguous().mT if a.block == SQUARE else lines(a.scale)
    return a_scale, F.pad(b.scale.mT, (0, 1)).contiguous().mT if b.block == SQUARE else lines(b.scale.mT)


def v1(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, pair: str, **options: Any) -> Tensor:
    return torch._scaled_mm(a, b, a_scale, b_scale, **{"out_dtype": BF16, **options})


def v2(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, pair: str, **options: Any) -> Tensor:
    """The op below `F.scaled_mm`, which Dynamo traces since PyTorch 2.13."""
    left, right = ([KINDS[block]] for block in PAIRS[pair])
    given = (options.get("bias"), options.get("out_dtype", BF16), [], options.get("use_fast_accum", False))
    return torch.ops.aten._scaled_mm_v2.default(a, b, [a_scale], left, [], [b_scale], right, [], *given)


def compiled(function: Callable[..., Tensor], *inputs: Any, **options: Any) -> tuple[Tensor, list[Substitution], str]:
    torch._dynamo.reset()
    with graphs() as found, joint_pass.recorded() as record:
        out = torch.compile(function, fullgraph=True, **options)(*inputs)
    return out, record, re.sub(r"\w+ (?=\[)", "", code(found[0]))


@pytest.mark.parametrize("spelling", [v1, v2])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_scaling(pair: str, spelling: Callable[..., Tensor], fresh_dynamo: None) -> None:
    a, b = operands(pair)
    scales = (for_v1 if spelling is v1 else for_v2)(a, b)

    def function(*tensors: Tensor) -> Tensor:
        return spelling(*tensors, pair)

    out, record, _ = compiled(function, a.data, b.data, *scales)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"], record
    assert record[0].shape == (M, N, K)
    assert_close((out,), (expected(a, b),))
    with contextlib.suppress(RuntimeError, ValueError):  # no blocks on a CPU, rows since PyTorch 2.13
        assert_close((out,), (function(a.data, b.data, *scales),), 1e-3)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("spelling", [v1, v2])
def test_bias_and_output(spelling: Callable[..., Tensor], dtype: torch.dtype, fresh_dynamo: None) -> None:
    a, b = operands("tensorwise")
    bias = torch.randn(N).to(dtype)

    options = {"bias": bias, "out_dtype": dtype, "use_fast_accum": True}
    inputs = (a.data, b.data, *for_v1(a, b))
    out, record, _ = compiled(lambda *tensors: spelling(*tensors, "tensorwise", **options), *inputs)
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"]
    assert_close((out,), (v1(*inputs, "tensorwise", **options),), 1e-3)


def test_tokens_of_any_number(fresh_dynamo: None) -> None:
    pair = "1x128 and 128x128"

    def product(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        torch._check(a.shape[0] == s.shape[0])  # PyTorch 2.11 checks it of a GPU's tensors alone
        return v1(a, b, s, t, pair)

    function = torch.compile(product, fullgraph=True)
    with graphs(), joint_pass.recorded() as record, torch._dynamo.config.patch(error_on_recompile=True):
        for m in (4096, 100, 33):
            a, b = operands(pair, m)
            inputs = (a.data, b.data, *for_v1(a, b))
            if m == 4096:
                torch._dynamo.mark_dynamic(inputs[0], 0)
                torch._dynamo.mark_dynamic(inputs[2], 0)
            assert_close((function(*inputs),), (expected(a, b),))
    assert [made.made for made in record] == ["fp8fn.scaled_mm.default"]


@pytest.mark.skipif(not torch.__version__ >= "2.13", reason="Dynamo does not trace F.scaled_mm in this PyTorch")
def test_the_graph_of_blocks(fresh_dynamo: None) -> None:
    a, b = operands("1x128 and 128x128")
    left, right = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    *_, text = compiled(lambda a, b, s, t: F.scaled_mm(a, b, s, left, t, right), a.data, b.data, *for_v2(a, b))
    assert_expected_inline(
        text,
        """\
fp8fn.scaled_mm.default(
    [128, 384],
    [128, 3],
    (1, 128),
    [384, 256],
    [3, 2],
    (128, 128),
    None,
    torch.bfloat16)""",
    )


def test_the_graph_of_rows(fresh_dynamo: None) -> None:
    a, b = operands("rowwise")
    bias = torch.ones(1, N, dtype=BF16)
    *_, text = compiled(lambda *t: v1(*t[:4], "rowwise", bias=t[4]), a.data, b.data, *for_v1(a, b), bias)
    assert_expected_inline(
        text,
        """\
fp8fn.scaled_mm.default(
    [128, 384],
    [128, 1],
    (1, -1),
    [384, 256],
    [1, 256],
    (-1, 1),
    [256],
    torch.bfloat16)""",
    )


REASONS = {
    "out_dtype": (None, "the output is e4m3fn: pass out_dtype=torch.bfloat16, float16 or float32"),
    "scale_result": (torch.ones(()), "scale_result is for outputs in FP8, which fp8fn does not write: leave it out"),
}


@pytest.mark.parametrize("option", REASONS)
def test_what_fp8fn_does_not_have_is_left_alone(option: str, fresh_dynamo: None) -> None:
    given, reason = REASONS[option]
    a, b = operands("tensorwise")
    inputs = (a.data, b.data, *for_v1(a, b))
    out, record, _ = compiled(lambda *tensors: v1(*tensors, "tensorwise", **{option: given}), *inputs)
    assert [made.reason for made in record] == [reason]
    assert_close((out.float(),), (v1(*inputs, "tensorwise", **{option: given}).float(),), 0.05)


def test_microscaling_is_left_alone(fresh_dynamo: None) -> None:
    """Traced alone: PyTorch has no such product for a CPU."""
    a, b = torch.zeros(128, 128, dtype=E4M3), torch.zeros(128, 128, dtype=E4M3).t()
    scale = torch.ones(512, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with joint_pass.recorded() as record, graphs(), pytest.raises((RuntimeError, ValueError)):
        torch.compile(lambda *tensors: v1(*tensors, "tensorwise"), fullgraph=True)(a, b, scale, scale)
    assert [made.reason for made in record] == [
        "its scales are MX or NVFP4 ones, in PyTorch's order; fp8fn takes what fp8fn.quantize(x, (1, 32)) makes"
    ]


def test_where_a_gpu_is_faster_without_us(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Table] = []
    monkeypatch.setattr(targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(scaled_mm, "tables", lambda chip: tuple(known))
    a, b = operands("tensorwise")
    inputs = (a.data, b.data, *for_v1(a, b))
    problem = Problem(M, N, K, "WHOLE", "WHOLE")
    for ours, reason in ((5.0, None), (12.0, "cuBLASLt is faster here by mine.json: 10.0 against 12.0 µs")):
        known[:] = [Table(Chip("a", 132), {problem: Entry("128x64d2", {"128x64d2": ours}, 0.5, 10.0)}, {}, "mine.json")]
        with graphs(), joint_pass.recorded() as record:
            torch._dynamo.reset()
            torch.compile(lambda *tensors: v1(*tensors, "tensorwise"), fullgraph=True)(*inputs)
        assert [made.reason for made in record] == [reason]


H200 = tables(Chip("NVIDIA H200", 132))[-1:]


def verdict(kinds: tuple[str, str], sizes: tuple[int, int, int], target: Any = SM90, fast: bool = False) -> str | None:
    m, n, k = sizes
    a, b = torch.empty(m, k, dtype=E4M3, device="meta"), torch.empty(k, n, dtype=E4M3, device="meta")
    return why_slower(a, b, torch.empty(m, n, dtype=BF16, device="meta"), kinds, fast, target, H200)


@pytest.mark.parametrize("kinds", [("WHOLE", "WHOLE"), ("LINE", "LINE"), ("VECTOR", "BLOCK"), ("VECTOR", "VECTOR")])
def test_the_shipped_table_decides(kinds: tuple[str, str]) -> None:
    faster = 0
    for problem in H200[0].entries:
        if problem.kinds == kinds and problem.batch == 1 and (found := lookup(problem, H200)) is not None:
            wins = found.entry.peer_us is None or found.entry.us < found.entry.peer_us
            reason = verdict(kinds, (problem.m, problem.n, problem.k))
            assert (reason is None) == wins
            assert wins or str(reason).startswith("cuBLASLt is faster here by h200.json: ")
            faster += wins
    assert faster


def test_without_an_entry() -> None:
    sizes = (640, 640, 640)
    assert verdict(("VECTOR", "BLOCK"), sizes) is verdict(("BLOCK", "VECTOR"), sizes, SM89) is None
    assert str(verdict(("BLOCK", "VECTOR"), sizes)).startswith("fp8fn multiplies 128x128 by 128x1 without")
    assert verdict(("LINE", "LINE"), sizes) == (
        "no tuning table of this device has this rowwise product: "
        "`python -m fp8fn tune --shapes 640,640,640 --recipe rowwise` measures it"
    )
    assert verdict(("WHOLE", "WHOLE"), (4096, 4096, 4096), fast=True) == (
        "PyTorch's tensorwise product with fast accumulation is faster; fp8fn's is as use_fast_accum=False"
    )
