"""Hopper's kernels for groups of tokens in CUDA C++: quantizers emulated, machine code, plans; values on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops import groups, reference
from fp8fn.ops.cuda.gemm import scaled_mm as products
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block, empty_data, empty_scale, is_square, swap
from fp8fn.ops.operands import PLAIN, SILU_MUL, SILU_MUL_GRAD, Quantized, ScaledProduct, Source
from fp8fn.ops.quantize import SQUARE
from fp8fn.ops.quantize_grouped import quantize_grouped_dual_kernel, quantize_grouped_kernel
from fp8fn.ops.quantize_grouped_fused import (
    quantize_silu_mul_grad_grouped_dual_kernel,
    quantize_silu_mul_grouped_dual_kernel,
    quantize_silu_mul_grouped_kernel,
)
from fp8fn.ops.targets import GFX942, SM90, Target
from fp8fn.ops.tuning.model import SMALLEST, W, X, grouped_config, grouped_tiles, tiles
from fp8fn.ops.tuning.problem import Problem, problem_of
from support.accuracy import relative_error, same_bits
from support.compilers import needs_nvrtc
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.gpu import FEW
from support.operands.groups import GROUPS, ends
from support.products import Parts
from support.quantizers import quantization, silu_mul_grad_of_groups, silu_mul_of_groups

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


COLUMN: Final[Block] = (128, 1)
# Blocks of tokens that are summed over.
COLUMNS: Final[tuple[Block, ...]] = (COLUMN, SQUARE)

every_grouping = pytest.mark.parametrize(("sizes", "rest"), GROUPS.values(), ids=GROUPS)


# ---- quantizers, in the emulator ------------------------------------------------------------------------------------


@needs_compiler
@every_grouping
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_quantizers_have_the_references_bits(sizes: list[int], rest: int, backwards: bool) -> None:
    offsets = ends(sizes)
    tokens = sum(sizes) + rest
    cases = [(BF16, 136, "fp32", E4M3), (FP32, 129, "pow2", E5M2), (FP16, 40, "e8m0", E4M3), (BF16, 256, "fp32", E4M3)]
    with hopper_on_cpu(backwards=backwards) as launches:
        for dtype, columns, scale, fp8 in cases:
            x = torch.randn(tokens, columns, dtype=dtype)
            x[sum(sizes) :] = torch.nan  # of no group's business
            assert quantize.accepts(quantization(x, (128, 1), dtype=fp8, scale=scale, offsets=offsets)) is None
            for block in COLUMNS:
                one = quantize_grouped_kernel(x, offsets, block, fp8, scale)
                both = quantize_grouped_dual_kernel(x, offsets, (1, 128), fp8, scale, block)
                assert same_bits(one, reference.quantize_grouped(x, offsets, block, fp8, scale))
                assert same_bits(both, reference.quantize_grouped_dual(x, offsets, (1, 128), fp8, scale, block))
    assert len(launches) == 2 * len(COLUMNS) * len(cases)  # one each


@needs_compiler
def test_hard_values_stay_in_their_blocks() -> None:
    offsets = ends([130, 0, 70])
    x = torch.randn(200, 48, dtype=BF16)
    x[3, 5], x[129, 6], x[140, 7] = torch.nan, torch.inf, -torch.inf
    x[:, 8:16] = 0
    x[:, 16:24] *= 1e-39
    x[:, 24:32] *= 1e38
    for block, hit in ((COLUMN, 3), (SQUARE, 3)):
        with hopper_on_cpu():
            found = quantize_grouped_dual_kernel(x, offsets, (1, 128), E4M3, dual_block=block)
        assert same_bits(found, reference.quantize_grouped_dual(x, offsets, (1, 128), E4M3, "fp32", block))
        scales = found[3]
        assert scales.isfinite().sum() == scales.numel() - hit


@needs_compiler
def test_a_square_without_tokens_has_the_scale_of_zeros_and_a_nan_stays_in_its_square() -> None:
    """An expert has none of the tokens; the NaN is in one of two squares beside each other."""
    sizes = [1, 0, 127, 128, 129]
    x, offsets = torch.randn(sum(sizes) + 40, 200, dtype=BF16), ends(sizes)
    clean = reference.quantize_grouped(x, offsets, SQUARE, E4M3, "fp32")
    x[300, 140] = torch.nan
    x[sum(sizes) :] = torch.nan
    x[1:128] = 0
    with hopper_on_cpu():
        data, scales = quantize_grouped_kernel(x, offsets, SQUARE, E4M3)
    of_zeros = reference.quantize(torch.zeros(1, 1), (128, 128), E4M3, "fp32")[1].item()
    blocks = groups.block_of(offsets, sum(sizes))
    used = blocks.unique()
    assert used.tolist() == [0, 2, 4, 6, 7]
    empty = torch.ones(scales.shape[0], dtype=torch.bool)
    empty[used] = False
    empty[blocks[1]] = True  # a group of zeros
    assert scales[empty].unique().tolist() == [pytest.approx(of_zeros)]
    struck = int(blocks[300])
    assert scales.isnan().nonzero().tolist() == [[struck, 1]]
    others = [int(block) for block in used if int(block) not in (struck, int(blocks[1]))]
    assert torch.equal(scales[others], clean[1][others])
    assert data.float().isnan().nonzero()[:, 1].unique().tolist() == list(range(128, 200))


@needs_compiler
@pytest.mark.parametrize("block", COLUMNS, ids=str)
@pytest.mark.parametrize("scale", ["fp32", "e8m0"])
@pytest.mark.parametrize("rest", [70, 2260], ids=["small", "large"])
def test_rows_without_a_token_are_zero_bytes_also_beside_a_nan(rest: int, scale: str, block: Block) -> None:
    """Rows lie between a group's tokens and the next group, and past the last group."""
    sizes = [5, 128, 0, 130, 37]
    offsets = ends(sizes)
    x = torch.randn(sum(sizes) + rest, 40, dtype=BF16)
    x[:, 3], x[:, 4] = torch.nan, torch.inf
    with hopper_on_cpu():
        one = quantize_grouped_kernel(x, offsets, block, E4M3, scale)
        both = quantize_grouped_dual_kernel(x, offsets, (1, 128), E4M3, scale, block)
    filled = torch.zeros(one[0].shape[0], dtype=torch.bool)
    filled[groups.spread_place(offsets, x.shape[0])[: sum(sizes)]] = True
    for data in (one[0], both[2]):
        assert data.float()[filled, 3].isnan().all()
        assert not data.view(torch.uint8)[~filled].any()


@needs_compiler
@pytest.mark.parametrize("tokens", [200, 1600])
def test_offsets_that_sink_or_pass_the_tokens_touch_nothing_outside(tokens: int) -> None:
    x = torch.randn(tokens, 40, dtype=BF16)
    with hopper_on_cpu():
        for values in ([150, 50, 300], [-5, 10, 2**31 - 1], [200, 0, 0], [1000, 1000, 1000]):
            offsets = torch.tensor(values, dtype=torch.int32)
            for block in COLUMNS:
                quantize_grouped_dual_kernel(x, offsets, (1, 128), E4M3, dual_block=block)


@needs_compiler
@every_grouping
def test_the_gated_activation_and_its_gradient(sizes: list[int], rest: int) -> None:
    """Exactly those of float32 but for `silu`: a step of FP8, or of a scale, where it falls on a border."""
    offsets = ends(sizes)
    tokens = sum(sizes) + rest
    for dtype, inner in ((BF16, 136), (FP32, 64), (FP16, 1000)):
        hidden = torch.randn(tokens, 2 * inner, dtype=dtype)
        gate, up = hidden.chunk(2, -1)
        grad = torch.randn(tokens, inner, dtype=dtype)
        with hopper_on_cpu() as launches:
            assert quantize.accepts(silu_mul_of_groups(gate, up, offsets)) is None
            assert quantize.accepts(silu_mul_grad_of_groups(grad, hidden, offsets)) is None
            forward = quantize_silu_mul_grouped_dual_kernel(gate, up, offsets, (1, 128), E4M3)
            backward = quantize_silu_mul_grad_grouped_dual_kernel(grad, hidden, offsets, (1, 128), E4M3)
            columns = quantize_silu_mul_grouped_kernel(gate, up, offsets, (128, 1), E4M3)
            squares = quantize_silu_mul_grouped_dual_kernel(gate, up, offsets, (1, 128), E4M3, dual_block=SQUARE)
            alone = quantize_silu_mul_grouped_kernel(gate, up, offsets, SQUARE, E4M3)
        assert len(launches) == 5
        assert same_bits(columns, forward[2:])
        assert same_bits(squares[:2], forward[:2])
        assert same_bits(squares[2:], alone)
        for found, produced, block in (
            (forward, reference.silu_mul(gate, up), COLUMN),
            (squares, reference.silu_mul(gate, up), SQUARE),
            (backward, reference.silu_mul_grad(grad, hidden), COLUMN),
        ):
            wanted = reference.quantize_grouped_dual(produced, offsets, (1, 128), E4M3, "fp32", block)
            for got, want in zip(found, wanted, strict=True):
                assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
                if want.dtype == FP32:
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)  # 1 + gate * (1 - sigmoid) cancels
                else:
                    differ = got.float() != want.float()
                    assert differ.float().mean() < 2e-3
                    torch.testing.assert_close(got.float(), want.float(), rtol=0.15, atol=0.02)


def test_the_gradient_is_autograds() -> None:
    hidden = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(9, 16, dtype=torch.float64)
    gate, up = hidden.chunk(2, -1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, hidden, grad)
    torch.testing.assert_close(reference.silu_mul_grad(grad, hidden.detach()), want.float())


def test_refusals_of_the_quantizers() -> None:
    x, offsets = torch.empty(64, 64, device="meta", dtype=BF16), torch.empty(3, device="meta", dtype=torch.int32)

    def refuse(x: Tensor, offsets: Tensor = offsets, **form: Any) -> str | None:
        return quantize.accepts(quantization(x, (128, 1), offsets=offsets, **form))

    assert "not sm90" in str(refuse(x, target=GFX942))
    assert "no type" in str(refuse(x, dtype=torch.float8_e4m3fnuz))
    assert "strides" in str(refuse(x.mT))
    assert "stride 2" in str(refuse(x, torch.empty(6, device="meta", dtype=torch.int32)[::2]))
    assert "one scale" in str(quantize.accepts(silu_mul_of_groups(x, x, offsets, (1, -1))))
    many = torch.empty(128 * 65534, 8, device="meta", dtype=BF16)
    assert "blocks of rows" in str(refuse(many))
    odd = torch.empty(64, 12, device="meta", dtype=BF16), torch.empty(64, 24, device="meta", dtype=BF16)
    assert "multiple of 8" in str(quantize.accepts(silu_mul_grad_of_groups(*odd, offsets)))


# ---- products over tokens, in the emulator ---------------------------------------------------------------------------


# The blocks of both sides, tokens first.
SUMMED: Final[dict[str, tuple[Block, Block]]] = {
    "columns": (COLUMN, COLUMN), "squares of b": (COLUMN, SQUARE), "squares of a": (SQUARE, COLUMN),
}  # fmt: skip


def summed(x: Tensor, y: Tensor, offsets: Tensor, kind: str = "columns") -> tuple[Any, ...]:
    """Operands of `x.mT @ y` by groups."""
    blocks = SUMMED[kind]
    a, b = (
        reference.quantize_grouped(side, offsets, block, E4M3, "fp32")
        for side, block in zip((x, y), blocks, strict=True)
    )
    return a[0].mT, a[1].mT, swap(blocks[0]), *b, blocks[1], offsets


def beside_nan(x: Tensor, sizes: list[int]) -> Tensor:
    """`x` with NaN in the first token of each second group, and in all past the last."""
    bad = x.clone()
    for start, size in list(zip(accumulate(sizes, initial=0), sizes, strict=False))[1::2]:
        bad[start : start + min(size, 1)] = torch.nan
    bad[sum(sizes) :] = torch.nan
    return bad


def grouped_product(
    operands: tuple[Any, ...], bias: Tensor | None, out: Tensor, target: Target = SM90
) -> ScaledProduct:
    *parts, offsets = operands
    return Parts(*parts, bias, out).product(target, offsets=offsets)


def emulated(operands: tuple[Any, ...], config: ScaledMmConfig, *, backwards: bool = False) -> Tensor:
    a, _, _, b, _, _, offsets = operands
    out = torch.full((offsets.shape[0], a.shape[0], b.shape[1]), 7.0)
    product = grouped_product(operands, None, out)
    assert products.accepts(product) is None
    emulate(products.plan(product, config)[0], backwards=backwards)
    return out


every_loop = pytest.mark.parametrize(
    "config", [SMALLEST, ScaledMmConfig(BN=64), X, ScaledMmConfig(MATH=1, BN=256, SLICES_N=2, DEPTH=1)], ids=str
)


@needs_compiler
@every_loop
@pytest.mark.parametrize(
    ("sizes", "rest"),
    [
        ([0, 1, 31, 32, 33], 40),
        ([127, 128, 129, 260], 70),
        ([128, 128, 96, 32], 0),
        ([0, 300, 0], 0),
        ([3] * 12, 5),
        ([673, 352], 15),
        ([384, 640], 0),
        ([0, 1500, 0], 40),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", SUMMED)
def test_no_token_of_the_next_group_is_multiplied(
    kind: str, sizes: list[int], rest: int, config: ScaledMmConfig
) -> None:
    """Groups are those of a loop in float64, and each second one is the same beside NaN in the first token after it."""
    offsets, tokens = ends(sizes), sum(sizes) + rest
    # Squares of several columns, and more than one tile of them.
    x, y = (
        torch.randn(tokens, 300 if is_square(block) else width)
        for block, width in zip(SUMMED[kind], (72, 68), strict=True)
    )
    outs = []
    for given in ((x, y), (beside_nan(x, sizes), beside_nan(y, sizes))):
        operands = summed(*given, offsets, kind)
        outs.append(emulated(operands, config, backwards=bool(outs)))
        want = reference.scaled_grouped_mm(Quantized(*operands[:3]), Quantized(*operands[3:6]), operands[6], None, FP32)
        torch.testing.assert_close(outs[-1], want, rtol=1e-4, atol=1e-4, equal_nan=True)
        left, right = (operands[0].mT, operands[1].mT), operands[3:5]
        rows, columns = (
            reference.dequantize_grouped(*side, offsets, block, tokens).double()
            for side, block in zip((left, right), SUMMED[kind], strict=True)
        )
        for group, (start, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False)):
            want = rows[start : start + size].mT @ columns[start : start + size]
            torch.testing.assert_close(outs[-1][group].double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(outs[0][::2], outs[1][::2])


@needs_compiler
@every_loop
@pytest.mark.parametrize("tokens", [200, 1600])
def test_offsets_that_are_none_read_nothing_outside(tokens: int, config: ScaledMmConfig) -> None:
    x, y = torch.randn(tokens, 72), torch.randn(tokens, 68)
    *operands, _ = summed(x, y, ends([100, 60, 40]))
    for values in ([150, 50, 300], [-5, 10, 2**31 - 1], [200, 0, 0], [1000, 1000, 1000]):
        assert emulated((*operands, torch.tensor(values, dtype=torch.int32)), config).isfinite().all()


# ---- products: machine code and plans --------------------------------------------------------------------------------

PAIRS: Final[dict[str, tuple[Block, Block]]] = {
    "rows": ((1, 128), (128, 128)),
    "rows, columns' scales": ((1, 128), (128, 1)),
    "rowwise": ((1, -1), (-1, 1)),
    "tensorwise": ((-1, -1), (-1, -1)),
    "summed": ((1, 128), (128, 1)),
    "summed, large groups": ((1, 128), (128, 1)),
    "summed, squares of b": ((1, 128), (128, 128)),
    "summed, squares of a": ((128, 128), (128, 1)),
}


def operands(kind: str, m: int, n: int, k: int, experts: int) -> tuple[Any, ...]:
    """Unwritten operands of a product; for the "summed" kinds k is the number of tokens."""
    a_block, b_block = PAIRS[kind]

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    a, b = meta(m, k), meta(experts, k, n)
    if kind.startswith("summed"):
        k = groups.spread_rows(k, experts)
        a, b = meta(m, k), meta(k, n)
    offsets = torch.empty(experts, device="meta", dtype=torch.int32)
    return (
        empty_data(a, a_block, E4M3), empty_scale(a, a_block, "fp32"), a_block,
        empty_data(b, b_block, E4M3, True), empty_scale(b, b_block, "fp32"), b_block, offsets,
    )  # fmt: skip


def planned(
    kind: str, config: ScaledMmConfig, out_dtype: torch.dtype = BF16, bias: bool = False, n: int = 512
) -> CudaLaunch:
    m, k, experts = 1000, 2048 if kind == "summed, large groups" else 1024, 4
    ops = operands(kind, m, n, k, experts)
    out = torch.empty((experts, m, n) if kind.startswith("summed") else (m, n), device="meta", dtype=out_dtype)
    biases = torch.empty(experts, n, device="meta", dtype=BF16) if bias else None
    product = grouped_product(ops, biases, out)
    assert products.accepts(product) is None
    return products.plan(product, config)[0]


def problem(kind: str) -> Problem:
    out = torch.empty(1000, 512, device="meta", dtype=BF16)
    return problem_of(grouped_product(operands(kind, 1000, 512, 1024, 4), None, out))


@needs_nvrtc
@pytest.mark.parametrize("kind", PAIRS)
def test_no_tile_that_may_be_chosen_spills(kind: str) -> None:
    for config in grouped_tiles(problem(kind), jagged_m=not kind.startswith("summed")):
        for out_dtype, bias, n in ((BF16, False, 512), (FP32, True, 500)):
            used = planned(kind, config, out_dtype, bias, n).resources()
            assert used.spills == 0, (config, out_dtype)
            assert used.shared <= 227 << 10


@needs_nvrtc
@pytest.mark.parametrize("source", [PLAIN, SILU_MUL, SILU_MUL_GRAD], ids=lambda source: source.macro)
@pytest.mark.parametrize("tokens", [1000, 2048])
def test_no_quantizer_spills(tokens: int, source: Source) -> None:
    for dtype in (BF16, FP32):
        x = torch.empty(tokens, 512, device="meta", dtype=dtype)
        offsets = torch.empty(4, device="meta", dtype=torch.int32)
        other = {PLAIN: None, SILU_MUL: x, SILU_MUL_GRAD: x[:, :256]}[source]
        for block in COLUMNS if source is not SILU_MUL_GRAD else (COLUMN,):  # a gradient has no squares
            q = quantization(x, (1, 128), source=source, other=other, offsets=offsets, dual=True, dual_block=block)
            (launch,) = quantize.plan(q, quantize.configure(q))
            assert launch.resources().spills == 0, (dtype, block)


def test_the_grid_is_no_larger_than_the_tiles() -> None:
    config = ScaledMmConfig(MATH=3, DEPTH=1)
    assert planned("rows", config).grid == (4 * (1000 // 192 + 4 + 1), 1, 1)
    assert planned("summed", config).grid == (4 * 6 * 4, 1, 1)
    out = torch.empty(32768, 7168, device="meta", dtype=BF16)
    (many,) = products.plan(grouped_product(operands("rows", 32768, 7168, 2048, 8), None, out), config)
    assert many.grid == (132, 1, 1)


def test_refusals_of_the_products() -> None:
    def refusal(kind: str = "rows", target: Target = SM90, **changed: Any) -> str:
        names = ("a", "a_scale", "a_block", "b", "b_scale", "b_block", "offsets")
        ops = {**dict(zip(names, operands(kind, 64, 64, 256, 4), strict=True)), "bias": None, **changed}
        *parts, offsets, bias = ops.values()
        out = torch.empty(64, 64, device="meta", dtype=BF16)
        return str(products.accepts(grouped_product((*parts, offsets), bias, out, target)))

    assert refusal() == "None"
    assert "not sm90" in refusal(target=GFX942)
    assert "e8m0" in refusal(a_scale=torch.empty(64, 2, device="meta", dtype=torch.float8_e8m0fnu))
    assert "no pair" in refusal(b_block=(-1, 1))
    assert "stride 2" in refusal(offsets=torch.empty(8, device="meta", dtype=torch.int32)[::2])
    assert "not 1" in refusal(b=torch.empty(4, 256, 64, device="meta", dtype=E4M3))
    assert "bias" in refusal(bias=torch.empty(64, 4, device="meta", dtype=BF16).mT)
    a, *_ = operands("summed", 64, 64, 256, 4)
    whole = {"a": a, "a_block": (1, -1), "a_scale": torch.empty(64, 4, device="meta")}
    assert "spread" in refusal("summed", **whole, b_block=(-1, 1), b_scale=torch.empty(4, 64, device="meta"))


def test_few_tokens_take_low_tiles_and_many_take_high_ones() -> None:
    few, many = Problem(64, 4096, 4096, batch=64), Problem(32768, 4096, 4096, batch=8)
    assert grouped_config(few, 132, jagged_m=True).BM == 64
    assert grouped_config(many, 132, jagged_m=True).BM >= 128
    summed = Problem(4096, 4096, 32768, b_scale="VECTOR", batch=8)
    assert grouped_config(summed, 132, jagged_m=False) in tiles(summed)


# ---- products of rows, in the emulator -------------------------------------------------------------------------------


def loop(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`x (M, K) @ w (E, K, N)` by groups, in float64; zeros past the last."""
    out = torch.zeros(x.shape[0], w.shape[-1], dtype=torch.float64, device=x.device)
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        out[start:stop] = x[start:stop].double() @ w[expert].double()
        start = stop
    return out


class Rows:
    """Operands of products of rows, those of no group NaN; a bias for each group; products without it and with."""

    def __init__(self, kind: str, sizes: list[int], rest: int, n: int, k: int, device: str = "cpu") -> None:
        a_block, b_block = PAIRS[kind]
        self.shape, self.grouped = (sum(sizes) + rest, n), sum(sizes)
        x = torch.randn(self.shape[0], k, device=device, dtype=BF16)
        x[self.grouped :] = torch.nan
        w = torch.randn(len(sizes), n, k, device=device, dtype=BF16).mT
        a, b, offsets = fp8fn.quantize(x, a_block), fp8fn.quantize(w, b_block), ends(sizes, device)
        self.operands = (a.data, a.scale, a_block, b.data, b.scale, b_block, offsets)
        self.bias = torch.randn(len(sizes), n, device=device, dtype=BF16)
        self.want = loop(fp8fn.dequantize(a, FP32), fp8fn.dequantize(b, FP32), offsets)
        self.biased = self.want.clone()
        self.biased[: self.grouped] += self.bias.double().repeat_interleave(torch.tensor(sizes, device=device), 0)

    def product(
        self,
        bias: Tensor | None,
        config: ScaledMmConfig,
        dtype: torch.dtype,
        target: Target,
        *,
        backwards: bool = False,
    ) -> Tensor:
        """Into memory that was NaN before; rows of no group must be zeros. On the CPU it is emulated."""
        out = torch.full(self.shape, torch.nan, device=self.bias.device, dtype=dtype)
        (launch,) = products.plan(grouped_product(self.operands, bias, out, target), config)
        if out.device.type == "cpu":
            emulate(launch, backwards=backwards)
        else:
            launch.run()
        assert not out[self.grouped :].any()
        return out


@needs_compiler
@pytest.mark.parametrize("kind", ["rows", "rows, columns' scales", "rowwise"])
def test_products_of_rows_emulated(kind: str) -> None:
    """Groups of no, one, some and many rows; in two orders of the threads."""
    for i, config in enumerate(grouped_tiles(problem(kind), jagged_m=True)):
        sizes, rest, n, out_dtype = [([0, 1, 64, 65, 130], 40, 136, BF16), ([100, 0, 300], 7, 77, FP32)][i % 2]
        rows = Rows(kind, sizes, rest, n, 200)
        out = rows.product(rows.bias, config, out_dtype, FEW)
        assert relative_error(out, rows.biased) < (1e-6 if out_dtype == FP32 else 2e-3), config
        assert torch.equal(rows.product(rows.bias, config, out_dtype, FEW, backwards=True), out), config


@needs_compiler
@pytest.mark.parametrize("kind", ["rows", "rows, columns' scales"])
def test_a_tiles_first_product_starts_before_the_epilogue_of_the_one_before_emulated(kind: str) -> None:
    """One block's tiles: of several groups and, last, of rows of no group, or of these alone: nothing is multiplied."""
    one = replace(FEW, multiprocessors=1)
    for sizes, rest, k in (([3, 0, 130], 7, 300), ([2], 150, 128), ([0, 0], 70, 200)):
        rows = Rows(kind, sizes, rest, 264, k)
        out = rows.product(rows.bias, W, BF16, one)
        assert not sum(sizes) or relative_error(out, rows.biased) < 2e-3
        assert torch.equal(rows.product(rows.bias, W, BF16, one, backwards=True), out)


# ---- values, on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_grouping
@pytest.mark.parametrize("kind", ["rows", "rows, columns' scales", "rowwise"])
def test_products_of_rows(kind: str, sizes: list[int], rest: int, hopper: Target) -> None:
    for k, n, out_dtype in ((300, 136, BF16), (256, 131, FP32), (1000, 512, FP16)):
        rows = Rows(kind, sizes, rest, n, k, "cuda")
        for config in grouped_tiles(problem(kind), jagged_m=True):
            for bias, want in ((None, rows.want), (rows.bias, rows.biased)):
                assert relative_error(rows.product(bias, config, out_dtype, hopper), want) < 4e-3, (config, out_dtype)


@pytest.mark.gpu
@every_grouping
def test_products_over_tokens(sizes: list[int], rest: int, hopper: Target) -> None:
    offsets, tokens = ends(sizes, "cuda"), sum(sizes) + rest
    for m, n, out_dtype in ((300, 136, BF16), (256, 131, FP32)):
        x, g = (torch.randn(tokens, columns, device="cuda", dtype=BF16) for columns in (m, n))
        x[sum(sizes) :] = torch.nan
        a = torch.ops.fp8fn.quantize_grouped(x, offsets)
        b = torch.ops.fp8fn.quantize_grouped(g, offsets)
        ops = (a[0].mT, a[1].mT, (1, 128), *b, (128, 1), offsets)
        want = reference.scaled_grouped_mm(Quantized(*ops[:3]), Quantized(*ops[3:6]), ops[6], None, FP32).double()
        for config in grouped_tiles(problem("summed"), jagged_m=False):
            out = torch.full((len(sizes), m, n), torch.nan, device="cuda", dtype=out_dtype)
            products.plan(grouped_product(ops, None, out, hopper), config)[0].run()
            assert relative_error(out, want) < 4e-3, config
            assert not any(out[expert].any() for expert, size in enumerate(sizes) if size == 0)


@pytest.mark.gpu
@every_grouping
def test_no_token_of_the_next_group_is_multiplied_on_the_device(sizes: list[int], rest: int, hopper: Target) -> None:
    offsets, tokens = ends(sizes, "cuda"), sum(sizes) + rest
    x, y = torch.randn(tokens, 300, device="cuda"), torch.randn(tokens, 136, device="cuda")
    clean, bad = summed(x, y, offsets), summed(beside_nan(x, sizes), beside_nan(y, sizes), offsets)
    for config in grouped_tiles(problem("summed"), jagged_m=False):
        outs = torch.full((2, len(sizes), 300, 136), torch.nan, device="cuda", dtype=BF16)
        for operands, out in zip((clean, bad), outs, strict=True):
            products.plan(grouped_product(operands, None, out, hopper), config)[0].run()
        assert torch.equal(outs[0, ::2], outs[1, ::2]), config


@pytest.mark.gpu
def test_the_ops_take_the_kernels_in_cuda(hopper: Target, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    x = torch.randn(512, 256, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(4, 256, 384, device="cuda", dtype=BF16, requires_grad=True)
    with caplog.at_level(logging.DEBUG, "fp8fn"):
        out = fp8fn.grouped_gemm(x, w, ends([100, 0, 300, 50], "cuda"))
        torch.autograd.grad(out, (x, w), torch.randn_like(out))
    lines = [record.getMessage() for record in caplog.records]
    assert sum("JAGGED_M" in line for line in lines) == 2
    assert sum("JAGGED_K" in line for line in lines) == 1
    assert not any("Triton" in line for line in lines)


@pytest.mark.gpu
def test_a_graph_replays_with_other_offsets(hopper: Target) -> None:
    """Tokens are regrouped between replays; nothing about their groups is in the graph."""
    x = torch.randn(1000, 256, device="cuda", dtype=BF16)
    w = torch.randn(5, 256, 384, device="cuda", dtype=BF16)
    g = torch.randn(1000, 384, device="cuda", dtype=BF16)
    offsets = ends([200] * 5, "cuda")
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()

    def step(offsets: Tensor) -> list[Tensor]:
        out = fp8fn.grouped_gemm(*leaves, offsets)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(offsets)
    random = Random(0)
    for _ in range(20):
        cuts = sorted(random.randrange(1001) for _ in range(5))
        offsets.copy_(torch.tensor(cuts, dtype=torch.int32))
        graph.replay()
        for got, want in zip(captured, step(offsets.clone()), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["grouped_gemm", "expert_mlp"])
def test_100_runs_give_one_bit_pattern(run: str, hopper: Target) -> None:
    x = torch.randn(1000, 256, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(5, 256, 512, device="cuda", dtype=BF16, requires_grad=True)
    down = torch.randn(5, 256, 256, device="cuda", dtype=BF16, requires_grad=True)
    offsets = ends([1, 0, 500, 300, 99], "cuda")
    calls: dict[str, Callable[[], Tensor]] = {
        "grouped_gemm": lambda: fp8fn.grouped_gemm(x, w, offsets),
        "expert_mlp": lambda: fp8fn.expert_mlp(x, w, down, offsets),
    }
    leaves = (x, w) if run == "grouped_gemm" else (x, w, down)
    first: list[Tensor] = []
    for _ in range(100):
        out = calls[run]()
        found = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        first = first or found
        assert all(torch.equal(got, want) for got, want in zip(found, first, strict=True))
