"""The machine code of every Triton kernel for gfx950 and gfx942, executed in the emulator, against the definition.

At the end, a sample of what `tune` may time: 200 candidates and more, drawn once for all.

Quantizers give the same bytes. A product is computed again in float64 from the same bits: before it is rounded to the
output's type, an element is within 1e-6 of the sum of its terms' magnitudes, whatever the order of the sum.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from fp8fn.ops import moe_gemm as moe
from fp8fn.ops import mx_mm, reference
from fp8fn.ops.formats import SCALE_FORMATS
from fp8fn.ops.groups import ROWS, empty_grouped
from fp8fn.ops.layout import BLOCKS, Block, empty_data, empty_scale, swap, turned
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing, WeightProduct
from fp8fn.ops.reference.quantize import spread
from fp8fn.ops.scaled_grouped_mm import empty_grouped_output
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.targets import GFX942, GFX950, Target, fp8_dtypes, native_e4m3
from fp8fn.ops.triton import mm_a16w8, moe_gemm, scaled_grouped_mm, scaled_mm
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.quantize import BlockTile
from fp8fn.ops.triton.quantize_dual import DualTile
from fp8fn.ops.triton.quantize_grouped import GroupedTile
from fp8fn.ops.tuning import amd, grouped_table, mx, mx_table, weight_table
from fp8fn.ops.tuning.tile_space import LAYOUTS, TileProblem, space
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import assert_same_bits
from support.emulated import run, untouched, with_nan_between
from support.products import Parts, mx_product
from support.quantizers import (
    plan_quantize,
    plan_quantize_dual,
    plan_quantize_grouped,
    plan_quantize_grouped_dual,
)

pytestmark = pytest.mark.emulated

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# In this order: Triton 3.6 converts FP8 as the first processor of a process does, and gfx942 does it for both.
BY_TARGET: Final = pytest.mark.parametrize("target", [GFX942, GFX950], ids=lambda target: target.name)
# Two empty groups, one over a block's border, and tokens past the last offset.
ENDS: Final = (0, 5, 5, 151, 160)
TOKENS: Final = 165


class Operand(NamedTuple):
    """A matrix in FP8 or wider, with the scales of its blocks where it has any."""

    data: Tensor
    scale: Tensor | None = None
    block: Block = (1, 1)

    def values(self) -> Tensor:
        """In float64, where the product of an FP8 value and a scale is exact."""
        values = self.data.float().double()
        if self.scale is None:
            return values
        return values * spread(self.scale.float(), self.data.shape, self.block).double()


# ---- the support itself ----


@triton.jit
def fill(out, size):
    tl.store(out + tl.arange(0, 64), 1.0, mask=tl.arange(0, 64) < size)


def filled(out: Tensor, size: int, *, inputs: bool = False) -> None:
    launch = TritonLaunch(fill, (1, 1, 1), {"out": out, "size": size}, {}, {"num_warps": 1}, target=GFX950)
    run([launch], [out] if inputs else [])


def test_what_lies_around_an_output_is_watched() -> None:
    out = torch.zeros(4, 16)
    filled(out, 33)
    assert (out.flatten()[:33] == 1).all()
    assert untouched(out.flatten()[33:])
    with pytest.raises(AssertionError, match="fill wrote beside its output"):
        filled(out[:2], 33)
    with pytest.raises(RuntimeError, match="SIGSEGV: an address outside of every argument"):
        filled(torch.zeros(32), 33)
    with pytest.raises(AssertionError, match="fill wrote an input"):
        filled(torch.zeros(64), 33, inputs=True)


# ---- quantizers ----


def hard_values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`(6, rows, columns)`: each matrix hard in a way of its own, but nowhere so that it hides in another's scale."""
    x = torch.randn(6, rows, columns) * torch.exp2(10 * torch.rand(6, rows, columns) - 5)
    x[0, 1] = 0
    x[0, 2] *= 2.0**-12
    x[1] *= 2.0**-140 if dtype != FP16 else 2.0**-18  # subnormals
    x[2, 3, columns // 2] = float("nan")
    x[3, 4, columns - 1] = -float("inf")
    x[4, 5] *= torch.finfo(dtype).max / 2**9
    x[5] = 0
    return x.to(dtype)


def check_quantize(
    x: Tensor, block: Block, scale: str, target: Target, dtype: torch.dtype | None = None,
    tile: BlockTile | None = None, in_parts: bool | None = None,
) -> None:  # fmt: skip
    dtype = dtype or native_e4m3(target)
    data, scales = empty_data(x, block, dtype), empty_scale(x, block, scale)
    run(plan_quantize(x, data, scales, block, scale, target, tile, in_parts), [x])
    for actual, expected in zip((data, scales), reference.quantize(x, block, dtype, scale), strict=True):
        assert_same_bits(actual, expected)


@BY_TARGET
@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_quantize(block: Block, scale: str, target: Target) -> None:
    check_quantize(hard_values(37, 144, BF16), block, scale, target)


@BY_TARGET
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("block", [(1, 128), (-1, 1), (-1, -1)], ids=str)
def test_quantize_wider_types(block: Block, dtype: torch.dtype, target: Target) -> None:
    """A column-major matrix is quantized to e5m2."""
    x = hard_values(144, 37, dtype).mT
    check_quantize(x, block, "fp32", target, fp8_dtypes(target)[1])


@BY_TARGET
@pytest.mark.parametrize("scale", SCALE_FORMATS)
def test_quantize_columns_in_parts(scale: str, target: Target) -> None:
    check_quantize(hard_values(1030, 72, BF16), (-1, 1), scale, target, in_parts=True)


OTHER_TILES: Final[tuple[tuple[Block, BlockTile], ...]] = (
    ((1, 128), BlockTile(8, 256, 8)), ((128, 1), BlockTile(16, 128, 2)), ((128, 128), BlockTile(128, 128, 4)),
    ((1, -1), BlockTile(4, 64, 4)), ((-1, 1), BlockTile(16, 32, 4)), ((-1, -1), BlockTile(16, 64, 4)),
    ((1, 32), BlockTile(16, 64, 4)), ((32, 1), BlockTile(64, 32, 4)),
)  # fmt: skip


@BY_TARGET
@pytest.mark.parametrize(("block", "tile"), OTHER_TILES, ids=str)
def test_quantize_in_another_tile(block: Block, tile: BlockTile, target: Target) -> None:
    check_quantize(hard_values(37, 144, BF16), block, "fp32", target, tile=tile)


@BY_TARGET
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, -1), (1, 32)], ids=str)
def test_quantize_without_masks(block: Block, target: Target) -> None:
    check_quantize(hard_values(128, 256, BF16)[[0, 2]], block, "pow2", target)
    if block == (1, -1):
        check_quantize(hard_values(8, 256, BF16)[[0, 2]], block, "pow2", target, tile=BlockTile(4, 128, 4))


def check_quantize_dual(x: Tensor, block: Block, scale: str, target: Target, tile: DualTile | None = None) -> None:
    dtype = native_e4m3(target)
    row, row_scales = empty_data(x, block, dtype), empty_scale(x, block, scale)
    col, col_scales = empty_data(x, swap(block), dtype), empty_scale(x, swap(block), scale)
    run([plan_quantize_dual(x, (row, row_scales, col, col_scales), block, scale, target, tile)], [x])
    expected = reference.quantize_dual(x, block, dtype, scale)
    for actual, wanted in zip((row, row_scales, col, col_scales), expected, strict=True):
        assert_same_bits(actual, wanted)


@BY_TARGET
@pytest.mark.parametrize("tile", ["default", "other"])
@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", [(1, 128), (1, 32)], ids=str)
def test_quantize_dual(block: Block, scale: str, tile: str, target: Target) -> None:
    other = DualTile(128, 128, 4) if block == (1, 128) else DualTile(32, 64, 4)
    check_quantize_dual(hard_values(37, 144, BF16), block, scale, target, other if tile == "other" else None)


@BY_TARGET
@pytest.mark.parametrize("block", [(1, 128), (1, 32)], ids=str)
def test_quantize_dual_without_masks(block: Block, target: Target) -> None:
    check_quantize_dual(hard_values(128, 256, BF16)[[0, 2]], block, "fp32", target)


def tokens(columns: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Tokens with a NaN, an Inf, zeros and tiny values, each in a column of its own, and the ends of their groups."""
    x = torch.randn(TOKENS, columns) * torch.exp2(10 * torch.rand(TOKENS, columns) - 5)
    x[20, 3] = float("nan")
    x[140, 4] = float("inf")
    x[:, 5] = 0
    x[:, 6] *= 2.0**-130
    x[TOKENS - 1] = float("nan")  # past the last offset
    return x.to(dtype), torch.tensor(ENDS, dtype=torch.int32)


@BY_TARGET
@pytest.mark.parametrize(("columns", "tile"), [(72, None), (128, None), (72, GroupedTile(32, 8))], ids=str)
@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", [(ROWS, 1), (ROWS, ROWS), (-1, 1), (32, 1)], ids=str)
def test_quantize_grouped(block: Block, scale: str, columns: int, tile: GroupedTile | None, target: Target) -> None:
    (x, offsets), dtype = tokens(columns), native_e4m3(target)
    if tile is not None and block == (ROWS, ROWS):
        tile = GroupedTile(ROWS, 8)  # squares are not divided
    data, scales = empty_grouped(x, len(ENDS), block, dtype, scale)
    run(plan_quantize_grouped(x, offsets, (data, scales), block, scale, target, tile), [x, offsets])
    expected = reference.quantize_grouped(x, offsets, block, dtype, scale)
    for actual, wanted in zip((data, scales), expected, strict=True):
        assert_same_bits(actual, wanted)


@BY_TARGET
@pytest.mark.parametrize(("columns", "tile"), [(144, None), (256, None), (144, GroupedTile(128, 4))], ids=str)
@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("dual_block", [None, (ROWS, ROWS)], ids=str)
def test_quantize_grouped_dual(
    dual_block: Block | None, scale: str, columns: int, tile: GroupedTile | None, target: Target
) -> None:
    (x, offsets), dtype = tokens(columns), native_e4m3(target)
    row, row_scales = empty_data(x, (1, ROWS), dtype), empty_scale(x, (1, ROWS), scale)
    data, scales = empty_grouped(x, len(ENDS), dual_block or (ROWS, 1), dtype, scale)
    outs = (row, row_scales, data, scales)
    launch = plan_quantize_grouped_dual(x, offsets, outs, scale, target, dual_block=dual_block, tile=tile)
    run([launch], [x, offsets])
    expected = reference.quantize_grouped_dual(x, offsets, (1, ROWS), dtype, scale, dual_block=dual_block)
    for actual, wanted in zip((row, row_scales, data, scales), expected, strict=True):
        assert_same_bits(actual, wanted)


# ---- products ----


def operand(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str = "fp32", *, column_major: bool | None = None
) -> Operand:
    """`x` quantized, its data stored by columns or by rows where that is asked for, with NaNs between its lines."""
    data, scales = reference.quantize(x, block, dtype, scale)
    if column_major is not None:
        data = turned(data, column_major)
    return Operand(with_nan_between(data), with_nan_between(scales), block)


def assert_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, factor: Tensor | None = None) -> None:
    """`out` is `factor * (a @ b) + bias` in float64, with an error of 1e-6 of the magnitudes, rounded to its type."""
    value, terms = a @ b, a.abs() @ b.abs()
    if factor is not None:
        value, terms = value * factor.double(), terms * factor.double().abs()
    if bias is not None:
        value, terms = value + bias.double(), terms + bias.double().abs()
    low, high = ((value + sign * 1e-6 * terms).to(out.dtype) for sign in (-1, 1))
    outside = ~((low <= out) & (out <= high))
    assert not outside.any(), f"{int(outside.sum())} of {out.numel()}, first at {outside.nonzero()[0].tolist()}"


# The products of a Linear: forward, dgrad with the weight as it was quantized for the forward, wgrad, and the rest.
PRODUCTS: Final[dict[str, tuple[Block, Block, str, str, str]]] = {
    "forward": ((1, 128), (128, 128), "K", "K", "fp32"),
    "dgrad": ((1, 128), (128, 128), "K", "N", "fp32"),
    "wgrad": ((1, 128), (128, 1), "K", "K", "pow2"),
    "TN": ((1, 128), (128, 1), "M", "N", "fp32"),
    "rowwise": ((1, -1), (-1, 1), "K", "K", "fp32"),
    "tensorwise": ((-1, -1), (-1, -1), "K", "N", "fp32"),
    "MX": ((1, 32), (32, 1), "K", "K", "e8m0"),
    "mixed": ((1, -1), (128, 128), "K", "K", "fp32"),
}


def check_scaled_mm(
    kind: str, m: int, target: Target, config: GemmConfig | None = None, *, n: int = 72, k: int = 208,
    out_dtype: torch.dtype = BF16, batch: bool = False, column_major_out: bool = False,
) -> None:  # fmt: skip
    a_block, b_block, a_along, b_along, scale = PRODUCTS[kind]
    lead = (2,) if batch else ()
    a = operand(torch.randn(*lead, m, k), a_block, native_e4m3(target), scale, column_major=a_along == "M")
    dtype = native_e4m3(target) if kind != "dgrad" else fp8_dtypes(target)[1]
    b = operand(torch.randn(*lead, k, n), b_block, dtype, scale, column_major=b_along == "K")
    bias = None if kind in ("dgrad", "wgrad", "TN") else torch.randn(n).to(BF16)
    out = (
        torch.empty(*lead, n, m, dtype=out_dtype).mT if column_major_out else torch.empty(*lead, m, n, dtype=out_dtype)
    )
    (launch,) = scaled_mm.plan_scaled_mm(Parts(*a, *b, bias, out).product(target), config)
    run([launch], [*a[:2], *b[:2], bias])
    assert_product(out, a.values(), b.values(), bias)


@BY_TARGET
@pytest.mark.parametrize("m", [9, 37, 131])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_scaled_mm(kind: str, m: int, target: Target) -> None:
    check_scaled_mm(kind, m, target, out_dtype=FP32 if m == 37 else BF16)


@BY_TARGET
@pytest.mark.parametrize("kind", PRODUCTS)
def test_scaled_mm_of_another_configuration(kind: str, target: Target) -> None:
    """32x32 products, 8 warps; tiles in the order of chiplets; a batch."""
    config = GemmConfig(64, 64, 8, 1, GROUP=2, XCDS=8, options=(("matrix_instr_nonkdim", 32),))
    check_scaled_mm(kind, 131, target, config, out_dtype=FP32, batch=True)


@BY_TARGET
@pytest.mark.parametrize("kind", ["wgrad", "TN"])
def test_scaled_mm_into_columns(kind: str, target: Target) -> None:
    """The gradient is stored as its weight is, by a transpose in LDS."""
    config = GemmConfig(64, 64, 4, 2, XCDS=4, WGRAD_TRANS_STORE=True, options=(("matrix_instr_nonkdim", 16),))
    check_scaled_mm(kind, 131, target, config, column_major_out=True)


CANDIDATES: Final = [
    (target, kind, name)
    for target in (GFX942, GFX950)
    for kind, names in amd.CANDIDATES[target.name].items()
    for name in names
]


@pytest.mark.parametrize(
    ("target", "kind", "name"), CANDIDATES, ids=lambda part: part.name if isinstance(part, Target) else part
)
def test_scaled_mm_of_every_candidate(target: Target, kind: str, name: str) -> None:
    """Every candidate of the choice for AMD, without masks and in the order of chiplets."""
    check_scaled_mm(kind, 256, target, amd.config_of(f"{name}g4x8"), n=256, k=256)


ROW_PRODUCTS: Final = ("forward", "dgrad", "rowwise", "tensorwise", "MX")


# Ragged and not.
BY_SHAPE: Final = pytest.mark.parametrize(("n", "k"), [(72, 208), (128, 256)])


@BY_TARGET
@BY_SHAPE
@pytest.mark.parametrize("config", [None, GemmConfig(32, 64, 8, 1, GROUP=2)], ids=["default", "other"])
@pytest.mark.parametrize("kind", ROW_PRODUCTS)
def test_scaled_grouped_mm_of_rows(kind: str, config: GemmConfig | None, n: int, k: int, target: Target) -> None:
    a_block, b_block, _, b_along, scale = PRODUCTS[kind]
    dtype = native_e4m3(target)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    a = operand(torch.randn(TOKENS, k), a_block, dtype, scale)
    b = operand(torch.randn(len(ENDS), k, n), b_block, dtype, scale, column_major=b_along == "K")
    bias = None if kind == "dgrad" else torch.randn(len(ENDS), n).to(BF16)
    out = empty_grouped_output(a.data, b.data, offsets, FP32 if config is None else BF16)
    product = Parts(*a, *b, bias, out).product(target, offsets=offsets)
    (launch,) = scaled_grouped_mm.plan_scaled_grouped_mm(product, config)
    run([launch], [*a[:2], *b[:2], offsets, bias])
    rows, weights, start = a.values(), b.values(), 0
    for group, end in enumerate(ENDS):
        assert_product(out[start:end], rows[start:end], weights[group], None if bias is None else bias[group])
        start = end
    assert not out[start:].any()


@BY_TARGET
@pytest.mark.parametrize(("m", "n"), [(37, 72), (128, 128)])
@pytest.mark.parametrize("config", [None, GemmConfig(32, 64, 8, 1, GROUP=2)], ids=["default", "other"])
@pytest.mark.parametrize("blocks", [((ROWS, 1), (ROWS, 1)), ((ROWS, ROWS), (ROWS, 1)), ((-1, 1), (-1, 1))], ids=str)
def test_scaled_grouped_mm_over_tokens(
    blocks: tuple[Block, Block], config: GemmConfig | None, m: int, n: int, target: Target
) -> None:
    dtype = native_e4m3(target)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    x, grad = torch.randn(TOKENS, m), torch.randn(TOKENS, n)
    left, right = (
        tuple(map(with_nan_between, reference.quantize_grouped(part, offsets, block, dtype, "fp32")))
        for part, block in zip((x, grad), blocks, strict=True)
    )
    a, b = (left[0].mT, left[1].mT, swap(blocks[0])), (*right, blocks[1])
    out = empty_grouped_output(a[0], b[0], offsets, FP32 if config is None else BF16)
    product = Parts(*a, *b, None, out).product(target, offsets=offsets)
    (launch,) = scaled_grouped_mm.plan_scaled_grouped_mm(product, config)
    run([launch], [*left, *right, offsets])
    rows, columns = (
        reference.dequantize_grouped(*side, offsets, block, TOKENS).double()
        for side, block in zip((left, right), blocks, strict=True)
    )
    start = 0
    for group, end in enumerate(ENDS):
        assert_product(out[group], rows[start:end].mT, columns[start:end])
        start = end


WEIGHTS: Final[tuple[tuple[Block, str], ...]] = (
    ((128, 128), "fp32"), ((-1, 1), "fp32"), ((-1, -1), "fp32"), ((32, 1), "e8m0"), ((128, 1), "fp32"),
    ((1, -1), "fp32"), ((1, 128), "pow2"),
)  # fmt: skip


def check_mm_a16w8(
    w_block: Block, scale: str, m: int, dtype: torch.dtype, target: Target, config: mm_a16w8.A16W8Config | None = None,
    *, n: int = 72, k: int = 208, out_dtype: torch.dtype = FP32,
) -> None:  # fmt: skip
    x = Operand(torch.randn(m, k).to(dtype))
    w = operand(torch.randn(k, n), w_block, native_e4m3(target), scale, column_major=w_block[0] != 1)
    bias, out = torch.randn(n).to(dtype), torch.empty(m, n, dtype=out_dtype)
    given = WeightProduct(x=x.data, w=Quantized(*w), bias=bias, out=out, target=target)
    run(mm_a16w8.plan_mm_a16w8(given, config or mm_a16w8.configure(given)), [x.data, *w[:2], bias])
    values = w.values()
    if w_block[0] == 1 and dtype != FP32:
        # A scale for each element of K multiplies the weight, in the type of x; here none leaves the range of float16.
        values = (w.data.float() * spread(w.scale.float(), w.data.shape, w_block)).to(dtype).double()
    assert_product(out, x.values(), values, bias)


@BY_TARGET
@pytest.mark.parametrize("m", [5, 37, 131])
@pytest.mark.parametrize(("w_block", "scale"), WEIGHTS, ids=str)
def test_mm_a16w8(w_block: Block, scale: str, m: int, target: Target) -> None:
    check_mm_a16w8(w_block, scale, m, BF16, target)


@BY_TARGET
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize(("w_block", "scale"), [((128, 128), "fp32"), ((-1, 1), "fp32"), ((1, -1), "fp32")], ids=str)
def test_mm_a16w8_of_other_types(w_block: Block, scale: str, dtype: torch.dtype, target: Target) -> None:
    check_mm_a16w8(w_block, scale, 19, dtype, target)


@BY_TARGET
@pytest.mark.parametrize(("w_block", "scale"), WEIGHTS, ids=str)
def test_mm_a16w8_of_another_configuration(w_block: Block, scale: str, target: Target) -> None:
    config = mm_a16w8.A16W8Config(32, 64, 32, 8, 1, GROUP=2, options=(("matrix_instr_nonkdim", 32),))
    check_mm_a16w8(w_block, scale, 37, BF16, target, config)


@BY_TARGET
@pytest.mark.parametrize("m", [16, 128])
@pytest.mark.parametrize(("w_block", "scale"), [((128, 128), "fp32"), ((-1, 1), "fp32"), ((1, -1), "fp32")], ids=str)
def test_mm_a16w8_without_masks(w_block: Block, scale: str, m: int, target: Target) -> None:
    check_mm_a16w8(w_block, scale, m, BF16, target, n=128, k=256, out_dtype=BF16)


def check_mx_mm(
    name: str, m: int, k: int, target: Target, config: mx.MxConfig | None = None, *, n: int = 72, batch: int = 0,
    scale: str = "e8m0", out_dtype: torch.dtype = BF16,
) -> None:  # fmt: skip
    kernel = next(kernel for kernel in mx_mm.KERNELS if kernel.name == name)
    lead = (batch,) if batch else ()
    e4m3, e5m2 = fp8_dtypes(target)
    a = operand(torch.randn(*lead, m, k), (1, 32), e4m3, scale)
    b = operand(torch.randn(*lead, k, n), (32, 1), e5m2 if batch else e4m3, scale)
    bias, out = torch.randn(n).to(BF16), torch.empty(*lead, m, n, dtype=out_dtype)
    problem = mx_mm.problem_of(a.data, b.data, target)
    assert kernel.accepts(problem) is None
    product = mx_product((a.data, b.data), (a.scale, b.scale), out, target, bias=bias)
    launches = kernel.plan(product, config or kernel.configure(problem))
    assert len(launches) == (1 if config is None or config.SPLITS == 1 else 2)
    run(launches, [*a[:2], *b[:2], bias])
    assert_product(out, a.values(), b.values(), bias)


@BY_TARGET
@pytest.mark.parametrize("scale", ["e8m0", "rceil"])
@pytest.mark.parametrize(("name", "m"), [("triton_few", 9), ("triton_widened", 37), ("triton_widened", 131)])
def test_mx_mm(name: str, m: int, scale: str, target: Target) -> None:
    check_mx_mm(name, m, 272, target, scale=scale)


@BY_TARGET
@pytest.mark.parametrize(("name", "m"), [("triton_few", 16), ("triton_widened", 128)])
def test_mx_mm_without_masks(name: str, m: int, target: Target) -> None:
    check_mx_mm(name, m, 256, target, n=128)


@BY_TARGET
def test_mx_mm_of_another_configuration(target: Target) -> None:
    """A sum over K in two parts, and a batch of 32x32 products."""
    options = (("matrix_instr_nonkdim", 16),)
    check_mx_mm("triton_few", 9, 272, target, mx.MxConfig(16, 32, 128, 4, 2, SPLITS=2, options=options), out_dtype=FP32)
    config = mx.MxConfig(64, 64, 64, 4, 1, GROUP=2, options=(("matrix_instr_nonkdim", 32),))
    check_mx_mm("triton_widened", 37, 144, target, config, batch=2, out_dtype=FP32)


@pytest.mark.parametrize(("m", "n", "k"), [(19, 72, 272), (37, 72, 272), (131, 72, 272), (128, 128, 256)])
def test_mx_mm_scaled(m: int, n: int, k: int) -> None:
    check_mx_mm("triton_scaled", m, k, GFX950, n=n)


def test_mx_mm_scaled_of_another_configuration() -> None:
    config = mx.MxConfig(64, 64, 128, 4, 1, GROUP=2, options=(("matrix_instr_nonkdim", 32),))
    check_mx_mm("triton_scaled", 37, 160, GFX950, config, batch=2, out_dtype=FP32)


MOE: Final[dict[str, tuple[Block, Block, str]]] = {
    "MX": ((1, 32), (32, 1), "e8m0"), "blockwise": ((1, 128), (128, 128), "fp32"),
}  # fmt: skip


@BY_TARGET
@BY_SHAPE
@pytest.mark.parametrize("block_m", [16, 48])
@pytest.mark.parametrize("config", ["default", "other"])
@pytest.mark.parametrize("kind", MOE)
def test_moe_gemm(kind: str, config: str, block_m: int, n: int, k: int, target: Target) -> None:
    (a_block, w_block, scale), dtype = MOE[kind], native_e4m3(target)
    tokens, experts, top_k = 23, 5, 2
    chosen = torch.randint(0, experts - 1, (tokens, top_k))
    chosen[3, 1] = experts  # of none here
    layout = sort_tokens(chosen, experts, block_m)
    a = operand(torch.randn(tokens, k), a_block, dtype, scale)
    w = operand(torch.randn(experts, k, n), w_block, dtype, scale, column_major=True)
    weights = torch.rand(tokens * top_k) if config == "default" else None
    out = torch.empty(tokens * top_k, n, dtype=FP32)
    other = mx.MxConfig(32, 64, 128, 8, 1, options=(("matrix_instr_nonkdim", 32),)) if config == "other" else None
    given = RoutedProduct(
        a=Quantized(*a), w=Quantized(*w), routing=Routing(*layout), a_div=top_k, out=out, target=target,
        token_weights=weights,
    )  # fmt: skip
    chosen_config = other or moe_gemm.configure(moe.problem_of(given))
    run(moe_gemm.plan_moe_gemm(given, chosen_config), [*a[:2], *w[:2], *layout, weights])
    values, matrices = a.values(), w.values()
    for row, expert in enumerate(chosen.flatten().tolist()):
        if expert == experts:
            assert untouched(out[row])
        else:
            factor = None if weights is None else weights[row]
            assert_product(out[row], values[row // top_k], matrices[expert], factor=factor)


# ---- a sample of the candidates of `tune` ----


def drawn(candidates: Iterable[Any], count: int) -> list[Any]:
    """As many of the candidates, the same in each run."""
    found = sorted(set(candidates), key=str)
    return random.Random(0).sample(found, min(count, len(found)))


def tiles(layout: str, target: Target) -> list[Any]:
    """The candidates of `scaled_mm` that run, also where the model of the chip takes them for slow."""
    found = space(TileProblem(layout, 4096, 4096, 4096, target))
    runs = (each for each in found if each.pruned is None or each.pruned.startswith("modelled"))
    return [each.config for each in runs]


def mx_tiles(kernel: str, target: Target) -> list[mx.MxConfig]:
    problems = [mx.Problem(m, 4096, 7168, target) for m in (16, 64, 256)]
    return [config for problem in problems for config in mx_table.MX_FORM.candidates(problem).get(kernel, ())]


SAMPLE: Final = [
    (target, kind, candidate)
    for target in (GFX942, GFX950)
    for kind, candidates, count in (
        *((layout, tiles(layout, target), 16) for layout in LAYOUTS),
        *(
            (
                f"quantize_grouped {form}",
                grouped_table.FORM.candidates(grouped_table.GroupedProblem(form, 4096, 4096, 8, target))[kernel],
                6,
            )
            for form, kernel in (("columns", "triton_blocks"), ("groups", "triton_blocks"), ("dual", "triton_dual"))
        ),
        *(
            (f"mm_a16w8 {m}", weight_table.candidates(WeightProblem(m, 4096, 4096, target=target))["triton_mm"], 6)
            for m in (8, 64)
        ),
        *((kernel, mx_tiles(kernel, target), 8) for kernel in ("triton_few", "triton_scaled", "triton_widened")),
    )
    for candidate in drawn(candidates, count)
]


def test_the_sample_is_large() -> None:
    assert len(SAMPLE) >= 200
    for target in (GFX942, GFX950):
        assert {kind for of, kind, _ in SAMPLE if of == target} >= {*LAYOUTS, "quantize_grouped dual", "mm_a16w8 8"}


@pytest.mark.parametrize(
    ("target", "kind", "config"), SAMPLE, ids=lambda part: part.name if isinstance(part, Target) else str(part)
)
def test_a_candidate_of_tune(target: Target, kind: str, config: Any) -> None:
    """With ragged edges along every axis; a tile that is larger than the matrix is all edge."""
    op, _, form = kind.partition(" ")
    if kind in LAYOUTS:
        turned_out = config.WGRAD_TRANS_STORE
        check_scaled_mm(kind, 2 * config.BM + 5, target, config, n=config.BN + 8, k=272, column_major_out=turned_out)
    elif op == "mm_a16w8":
        check_mm_a16w8((128, 128), "fp32", int(form) - 3, BF16, target, config)
    elif op == "quantize_grouped":
        (x, offsets), dtype = tokens(200), native_e4m3(target)
        block, rows_too = grouped_table.FORMS[form]
        data, scales = empty_grouped(x, len(ENDS), (ROWS, 1) if rows_too else block, dtype, "fp32")
        if rows_too:
            row, row_scales = empty_data(x, block, dtype), empty_scale(x, block, "fp32")
            outs = (row, row_scales, data, scales)
            launches = [plan_quantize_grouped_dual(x, offsets, outs, "fp32", target, tile=config)]
            expected: Any = reference.quantize_grouped_dual(x, offsets, block, dtype, "fp32")
        else:
            outs = (data, scales)
            launches = plan_quantize_grouped(x, offsets, outs, block, "fp32", target, config)
            expected = reference.quantize_grouped(x, offsets, block, dtype, "fp32")
        run(launches, [x, offsets])
        for actual, wanted in zip(outs, expected, strict=True):
            assert_same_bits(actual, wanted)
    else:
        check_mx_mm(kind, 9 if kind == "triton_few" else 37, 2 * config.SPLITS * config.BK + 32, target, config)
