"""The op `fp8fn::grouped_gemm`: products of groups of 16- or 32-bit tokens in FP8, written with the ops below it."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.gemm import quantize, quantize_both
from fp8fn.ops.groups import group_of
from fp8fn.ops.layout import Block, swap, unguarded
from fp8fn.ops.operands import Quantized
from fp8fn.ops.quantize import BESIDE_SQUARE, SQUARE
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.scaled_grouped_mm import (
    EXPERT_BLOCKS,
    SUMMED_BLOCKS,
    _holds,
    check_group_bias,
    check_grouping,
    check_masked,
)
from fp8fn.ops.scaled_mm import check_product

GROUPED_GEMM_SCHEMA: Final = (
    'grouped_gemm(Tensor a, Tensor b, Tensor? offsets=None, Tensor? bias=None, str recipe="blockwise",'
    " ScalarType? out_dtype=None, Tensor? counts=None) -> Tensor"
)


def check_grouped_gemm(
    a: Tensor, b: Tensor, offsets: Tensor | None, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype | None,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in INPUT_DTYPES:
            raise TypeError(f"grouped_gemm: {name} has dtype {operand.dtype}; use bfloat16, float16 or float32")
    if counts is not None:
        check_masked("grouped_gemm", a, b, offsets, counts)
        check_group_bias("grouped_gemm", b, b.shape[0], bias)
        check_recipe("grouped_gemm", recipe)
    elif offsets is None:
        check_batch("grouped_gemm", a, b, bias)
    else:
        check_grouping("grouped_gemm", a, b, offsets)
        check_group_bias("grouped_gemm", b, offsets.shape[0], bias)
        check_recipe("grouped_gemm", recipe)
    check_product("grouped_gemm", a, b, None, out_dtype)


def check_batch(op: str, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """Checks that `a (E, M, K)` and `b (E, K, N)` are batches, as operands without offsets are."""
    if a.ndim != 3 or b.ndim != 3:
        raise ValueError(
            f"{op}: a has shape {tuple(a.shape)} and b {tuple(b.shape)}, and offsets is None; without offsets both are "
            "batches, a (E, M, K) and b (E, K, N)"
        )
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"{op}: a has batch {a.shape[0]} and b {b.shape[0]}; they must be equal")
    check_group_bias(op, b, b.shape[0], bias)


def check_recipe(op: str, recipe: Recipe) -> None:
    """A wgrad sums over tokens that lie as `activation_block` and as `gradient_block` say: one way for both.

    Squares of `wgrad_activation_block` begin at each group's first token, beside `(128, 1)` of the gradient; beside
    other blocks they are read as the transpose of `activation_block`.
    """
    for name, block, allowed in (
        ("activation_block", recipe.activation_block, SUMMED_BLOCKS),
        ("gradient_block", recipe.gradient_block, (recipe.activation_block,)),
        ("weight_block", recipe.weight_block, EXPERT_BLOCKS),
        ("wgrad_activation_block", recipe.wgrad_block, (swap(recipe.activation_block), SQUARE)),
    ):
        if block not in allowed:
            raise ValueError(
                f"{op}: the recipe's {name}={block} does not fit groups of tokens; use one of {allowed}, as "
                "fp8fn.BLOCKWISE or fp8fn.ROWWISE do"
            )


class Needs(NamedTuple):
    """The products that the backward will make: `grad @ bᵀ`, and `aᵀ @ grad`."""

    dgrad: bool = False
    wgrad: bool = False


class Gradients(NamedTuple):
    """The storage of both operands' gradients: their types, and whether `b`'s is column-major, as `b` is."""

    a_dtype: torch.dtype
    b_dtype: torch.dtype
    b_column_major: bool = False


NO_GRADIENTS: Final = Needs()


@unguarded
def rows_forward(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype,
    needs: Needs = NO_GRADIENTS,
) -> tuple[Tensor, Quantized | None, Quantized | None]:  # fmt: skip
    """`a (M, K) @ b (E, K, N) + bias`, and what the backward needs: `b` for dgrad and `a`, by groups, for wgrad."""
    a_args = (recipe.activation_block, recipe.activation_dtype, recipe.scale)
    if needs.wgrad:
        a_row, a_col = quantize_grouped_both(a, offsets, *a_args, dual_block=wgrad_block(recipe))
    else:
        a_row, a_col = quantize(a, *a_args), None
    b_col, b_row = quantize_experts(b, recipe, both=needs.dgrad)
    return product(a_row, b_col, offsets, bias, out_dtype), a_col, b_row


@unguarded
def masked_forward(
    a: Tensor, b: Tensor, counts: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype
) -> Tensor:
    """`a (E, M, K) @ b (E, K, N) + bias` of each expert's first rows, and zeros. All rows of `a` are quantized."""
    a_row = quantize(a, recipe.activation_block, recipe.activation_dtype, recipe.scale)
    b_col, _ = quantize_experts(b, recipe, both=False)
    out: Tensor = torch.ops.fp8fn.scaled_grouped_mm(*a_row, *b_col, None, bias, out_dtype, counts)
    return out


@unguarded
def rows_backward(
    grad: Tensor, offsets: Tensor, a_col: Quantized | None, b_row: Quantized | None, recipe: Recipe, stored: Gradients
) -> tuple[Tensor | None, Tensor | None]:
    """`grad @ bᵀ` and `aᵀ @ grad` of each group."""
    args = (recipe.gradient_block, recipe.gradient_dtype, recipe.scale)
    grad_row: Quantized | None = None
    grad_col: Quantized | None = None
    if b_row is not None and a_col is not None:
        grad_row, grad_col = quantize_grouped_both(grad, offsets, *args)
    elif b_row is not None:
        grad_row = quantize(grad, *args)
    elif a_col is not None:
        grad_col = quantize_grouped(grad, offsets, *args)
    return rows_products((grad_row, grad_col), offsets, a_col, b_row, stored)


def rows_products(
    grad: tuple[Quantized | None, Quantized | None],
    offsets: Tensor,
    a_col: Quantized | None,
    b_row: Quantized | None,
    stored: Gradients,
) -> tuple[Tensor | None, Tensor | None]:
    """`rows_backward` of a gradient in FP8, by rows and by groups of its rows."""
    grad_row, grad_col = grad
    grad_a = grad_b = None
    if b_row is not None and grad_row is not None:
        grad_a = product(grad_row, b_row.mT, offsets, None, stored.a_dtype)
    if a_col is not None and grad_col is not None:
        if stored.b_column_major:
            grad_b = product(grad_col.mT, a_col, offsets, None, stored.b_dtype).mT
        else:
            grad_b = product(a_col.mT, grad_col, offsets, None, stored.b_dtype)
    return grad_a, grad_b


@unguarded
def k_forward(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype,
    needs: Needs = NO_GRADIENTS,
) -> tuple[Tensor, Quantized | None, Quantized | None]:  # fmt: skip
    """`a (M, K) @ b (K, N) + bias` of each group of K, and `aᵀ` for wgrad and `b` for dgrad, by rows.

    Both operands have the blocks of an activation: a block of `weight_block` would hold elements of two groups.
    """
    a_args = (a.mT, offsets, recipe.activation_block, recipe.activation_dtype, recipe.scale)
    b_args = (b, offsets, recipe.activation_block, recipe.weight_dtype, recipe.scale)
    a_row, a_col = quantize_grouped_both(*a_args) if needs.wgrad else (None, quantize_grouped(*a_args))
    b_row, b_col = quantize_grouped_both(*b_args) if needs.dgrad else (None, quantize_grouped(*b_args))
    return product(a_col.mT, b_col, offsets, bias, out_dtype), a_row, b_row


@unguarded
def k_backward(
    grad: Tensor, offsets: Tensor, a_row: Quantized | None, b_row: Quantized | None, recipe: Recipe, stored: Gradients
) -> tuple[Tensor | None, Tensor | None]:
    """`(b @ gradᵀ)ᵀ` and `aᵀ @ grad`, whose groups are rows of `b` and of `aᵀ`.

    The first is column-major and the second row-major, however the operands lie.
    """
    args = (grad, recipe.gradient_block, recipe.gradient_dtype, recipe.scale)
    grad_row: Quantized | None = None
    grad_col: Quantized | None = None
    if a_row is not None and b_row is not None:
        grad_row, grad_col = quantize_both(*args)
    elif b_row is not None:
        grad_row = quantize(*args)
    elif a_row is not None:
        grad_col = quantize(grad, swap(recipe.gradient_block), *args[2:], sums_rows=True)
    grad_a = grad_b = None
    if b_row is not None and grad_row is not None:
        grad_a = product(b_row, grad_row.mT, offsets, None, stored.a_dtype).mT
    if a_row is not None and grad_col is not None:
        grad_b = product(a_row, grad_col, offsets, None, stored.b_dtype)
    return grad_a, grad_b


def quantize_grouped(x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype | None, scale: str) -> Quantized:
    """`x (M, N)` for a product that sums over its tokens, in the transposed `block`."""
    data, scales = torch.ops.fp8fn.quantize_grouped(x, offsets, swap(block), dtype, scale)
    return Quantized(data, scales, swap(block))


def quantize_grouped_both(
    x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype | None, scale: str, dual_block: Block | None = None
) -> tuple[Quantized, Quantized]:
    """`x (M, N)` in `block`, and by groups in `dual_block`, by default the transpose: one read if it fits on chip."""
    beside = () if dual_block is None else (dual_block,)
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_grouped_dual(x, offsets, block, dtype, scale, *beside)
    return Quantized(row, row_scale, block), Quantized(col, col_scale, dual_block or swap(block))


def wgrad_block(recipe: Recipe) -> Block | None:
    """The block of a wgrad's activation by groups; None is the transpose of `activation_block`."""
    square = recipe.wgrad_block == SQUARE and recipe.activation_block in BESIDE_SQUARE
    return SQUARE if square else None


def quantize_experts(b: Tensor, recipe: Recipe, *, both: bool) -> tuple[Quantized, Quantized | None]:
    """`b (E, K, N)` for the forward, and with `both` for dgrad."""
    args = (b, recipe.weight_block, recipe.weight_dtype, recipe.scale)
    return quantize_both(*args, sums_rows=True) if both else (quantize(*args, sums_rows=True), None)


def product(a: Quantized, b: Quantized, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.ops.fp8fn.scaled_grouped_mm(*a, *b, offsets, bias, out_dtype)
    return out


def sum_groups(x: Tensor, offsets: Tensor) -> Tensor:
    """`x (M, N)` → the float32 sum of each group's rows, `(E, N)`, in one order and without atomics.

    Each group is cut into pieces of `⌊M / E⌋ + 1` rows, `2E` of them at most and one at least, as ops/groups.py lays
    them. The pieces of a group follow one another, so a scan in `⌈log2(2E)⌉` steps that stops at borders adds them.
    """
    rows, groups = x.shape[0], offsets.shape[0]
    if _holds(rows == 0):
        return x.new_zeros((groups, x.shape[1]), dtype=torch.float32)
    if not _holds(rows > 0):  # traced, and a number that is data may be 0: then there is one row to select
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    size = rows // groups + 1
    ends = offsets.long().clamp(0, rows)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    first = starts // size + torch.arange(groups, device=x.device)
    piece = torch.arange(2 * groups, device=x.device)
    group = (piece[:, None] >= first).sum(1) - 1
    rank = ((piece - first[group]) * size)[:, None] + torch.arange(size, device=x.device)
    token = starts[group][:, None] + rank
    inside = token < ends[group][:, None]
    # A selection and not a product with zeros: the rows of another group may be NaN.
    values = torch.where(inside[..., None], x[token.clamp(0, x.shape[0] - 1)], 0)
    sums = values.sum(1, dtype=torch.float32)
    step = 1
    while step < 2 * groups:
        same = group[step:] == group[:-step]
        sums = torch.cat([sums[:step], torch.where(same[:, None], sums[step:] + sums[:-step], sums[step:])])
        step *= 2
    last = torch.cat([first[1:] - 1, torch.full_like(first[:1], 2 * groups - 1)])
    return sums[last]


def bias_rows(bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """`bias (E, N)` → `(rows, N)`: the row of each token's group, zeros past the end of the last group."""
    group, groups = group_of(offsets, rows), offsets.shape[0]
    return torch.where((group < groups)[:, None], bias[group.clamp_max(groups - 1)], 0)
