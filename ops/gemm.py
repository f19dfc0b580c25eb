"""The op `fp8fn::gemm`: `a @ b` of two 16- or 32-bit tensors in FP8, written with the ops below it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime.call_cache import chained, kind
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.layout import WHOLE, Block, is_column_major, is_mx, is_square, swap, unguarded
from fp8fn.ops.operands import Quantized
from fp8fn.ops.quantize import BESIDE_SQUARE, SQUARE
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.scaled_mm import check_product
from fp8fn.ops.sharded import sharded_amax, splits_block

GEMM_SCHEMA: Final = (
    'gemm(Tensor a, Tensor b, Tensor? bias=None, str recipe="blockwise", ScalarType? out_dtype=None) -> Tensor'
)


def check_gemm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in INPUT_DTYPES:
            raise TypeError(f"gemm: {name} has dtype {operand.dtype}; use bfloat16, float16 or float32")
        if operand.ndim < 2:
            raise ValueError(f"gemm: {name} has shape {tuple(operand.shape)}; it needs at least two dimensions")
    check_product("gemm", a, b, bias, out_dtype)


def default_out_dtype(a: Tensor) -> torch.dtype:
    """The type of `torch.matmul`'s result: under autocast the one that autocast names, else that of `a`."""
    kind = a.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # which raises for `meta`
    return torch.get_autocast_dtype(kind) if autocast else a.dtype


def as_autocast(x: Tensor) -> Tensor:
    """`x` in autocast's type if autocast is enabled, as in `torch.matmul`."""
    return x.to(default_out_dtype(x)) if x.dtype in INPUT_DTYPES else x


def quantize(x: Tensor, block: Block, dtype: torch.dtype | None, scale: str, *, sums_rows: bool = False) -> Quantized:
    """`x` in `block`, for a product that sums over its columns' axis, or with `sums_rows` over its rows' axis."""
    amax = sharded_amax(x, block) if WHOLE in block else None
    if _on_hopper(x, block) and is_column_major(x) != sums_rows:  # a third launch would turn the data
        data, scales = torch.ops.fp8fn.quantize(x, block, dtype, scale, amax, sums_rows)
    else:
        data, scales = torch.ops.fp8fn.quantize(x, block, dtype, scale, amax)
    return Quantized(data, scales, block)


def quantize_both(
    x: Tensor, block: Block, dtype: torch.dtype | None, scale: str, *, sums_rows: bool = False,
    dual_block: Block | None = None,
) -> tuple[Quantized, Quantized]:  # fmt: skip
    """`quantize(x, ...)`, and the same in `dual_block` for the other axis: one read where `x` fits on chip.

    By default `dual_block` is the transposed block. One result of a square block serves both axes, but on Hopper, whose
    matrix instructions read FP8 along the contraction only: there the same values are stored along either axis.
    """
    other_block = dual_block or swap(block)
    if other_block == swap(block):
        at_once = is_square(block) or not (splits_block(x, block) or splits_block(x, other_block))
    else:
        at_once = not sums_rows and block in BESIDE_SQUARE and other_block == SQUARE
    if not at_once:
        other = quantize(x, other_block, dtype, scale, sums_rows=not sums_rows)
        return quantize(x, block, dtype, scale, sums_rows=sums_rows), other
    if other_block != swap(block):
        row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_dual(x, block, dtype, scale, None, other_block)
        return Quantized(row, row_scale, block), Quantized(col, col_scale, other_block)
    if is_square(block) and not _on_hopper(x, block):
        one = quantize(x, block, dtype, scale)
        return one, one
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_dual(x, block, dtype, scale, sharded_amax(x, block))
    first, second = Quantized(row, row_scale, block), Quantized(col, col_scale, swap(block))
    return (second, first) if sums_rows and is_square(block) else (first, second)


def _on_hopper(x: Tensor, block: Block) -> bool:
    """Whether a square block is read along the contraction only, and one launch stores it along both axes."""
    return is_square(block) and targets.target_of(x.device).name == "sm90"


def product(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, batch_invariant: bool = False,
    *, fast: bool = False,
) -> Tensor:  # fmt: skip
    flags = (batch_invariant, True) if fast else (True,) * batch_invariant
    if not flags and is_mx(a.scale, a.block, b.scale, b.block):
        out: Tensor = torch.ops.fp8fn.mx_mm(a.data, a.scale, b.data, b.scale, bias, out_dtype)
    else:
        out = torch.ops.fp8fn.scaled_mm(*a, *b, bias, out_dtype, *flags)
    return out


@unguarded
def forward(
    a: Tensor, b: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype, *, dgrad: bool, wgrad: bool
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """`a @ b + bias`, and what the backward needs: `b` for dgrad and `a` for wgrad, in the block of that product."""
    a_args = (a, recipe.activation_block, recipe.activation_dtype, recipe.scale)
    b_args = (b, recipe.weight_block, recipe.weight_dtype, recipe.scale)
    a_row, a_col = quantize_both(*a_args, dual_block=recipe.wgrad_block) if wgrad else (quantize(*a_args), None)
    b_col, b_row = quantize_both(*b_args, sums_rows=True) if dgrad else (quantize(*b_args, sums_rows=True), None)
    fast = recipe.accumulate == "fast"
    return product(a_row, b_col, bias, out_dtype, recipe.batch_invariant, fast=fast), a_col, b_row


def quantize_again(b: Quantized | Tensor | None, recipe: Recipe) -> Quantized | None:
    """`b` for dgrad, with the bits that `forward` gives for it; a weight is not kept in FP8, but quantized again."""
    if isinstance(b, Tensor):
        return quantize(b, swap(recipe.weight_block), recipe.weight_dtype, recipe.scale)
    return b


def backward(
    grad: Tensor, a_col: Quantized | None, b_row: Quantized | Tensor | None, recipe: Recipe,
    a_dtype: torch.dtype, b_dtype: torch.dtype, b_column_major: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`grad @ bᵀ` and `aᵀ @ grad`; the second is stored as `b` is, so that a weight's gradient is never transposed.

    `b_row` is `b` for dgrad, or `b` itself, which is then quantized here.
    """
    grad_a, grad_b = _backward(grad, a_col, b_row, recipe, a_dtype, b_dtype, b_column_major)
    return grad_a, grad_b.mT if grad_b is not None and b_column_major else grad_b


@unguarded
def _backward(
    grad: Tensor, a_col: Quantized | None, b: Quantized | Tensor | None, recipe: Recipe,
    a_dtype: torch.dtype, b_dtype: torch.dtype, b_column_major: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`backward`, and of a column-major `b` the transpose of its gradient."""
    args = (grad, recipe.gradient_block, recipe.gradient_dtype, recipe.scale)
    b_row = quantize_again(b, recipe)
    grad_row: Quantized | None = None
    grad_col: Quantized | None = None
    if b_row is not None and a_col is not None:
        grad_row, grad_col = quantize_both(*args)
    elif b_row is not None:
        grad_row = quantize(*args)
    elif a_col is not None:
        grad_col = quantize(grad, swap(recipe.gradient_block), recipe.gradient_dtype, recipe.scale, sums_rows=True)
    grad_a = grad_b = None
    if b_row is not None and grad_row is not None:
        grad_a = product(grad_row, b_row.mT, None, a_dtype, recipe.batch_invariant)
    if a_col is not None and grad_col is not None:
        left, right = (grad_col, a_col) if b_column_major else (a_col, grad_col)
        grad_b = product(left.mT, right, None, b_dtype)
    return grad_a, grad_b


def forward_at_once(
    a: Tensor, b: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype, *, dgrad: bool, wgrad: bool
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """`forward` where nothing but the GPU sees its ops, which are then started together."""

    def run() -> list[Tensor | None]:
        out, a_col, b_row = forward(a, b, bias, recipe, out_dtype, dgrad=dgrad, wgrad=wgrad)
        return [out, *parts(a_col), *parts(b_row)]

    inputs = (a, b) if bias is None else (a, b, bias)
    key = ("forward", recipe.key, out_dtype, dgrad, wgrad, *map(kind, inputs))
    out, *kept = chained(key, inputs, run)
    assert out is not None
    a_col = quantized(kept[0], kept[1], recipe.wgrad_block)
    return out, a_col, quantized(kept[2], kept[3], swap(recipe.weight_block))


def backward_at_once(
    grad: Tensor, a_col: Quantized | None, b_row: Quantized | Tensor | None, recipe: Recipe,
    a_dtype: torch.dtype, b_dtype: torch.dtype, b_column_major: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`backward`, like `forward_at_once`."""

    def run() -> tuple[Tensor | None, Tensor | None]:
        return _backward(grad, a_col, b_row, recipe, a_dtype, b_dtype, b_column_major)

    again = isinstance(b_row, Tensor)
    b_parts: tuple[Tensor | None, ...] = (b_row,) if isinstance(b_row, Tensor) else parts(b_row)
    inputs = [x for x in (grad, *parts(a_col), *b_parts) if x is not None]
    key = (
        "backward", recipe.key, a_dtype, b_dtype, b_column_major, a_col is None, b_row is None, again,
        *map(kind, inputs),
    )  # fmt: skip
    grad_a, grad_b = chained(key, inputs, run)
    return grad_a, grad_b.mT if grad_b is not None and b_column_major else grad_b


def parts(q: Quantized | None) -> tuple[Tensor | None, Tensor | None]:
    """Data and scales, or twice None."""
    return (None, None) if q is None else (q.data, q.scale)


def quantized(data: Tensor | None, scale: Tensor | None, block: Block) -> Quantized | None:
    """The operand of these parts, or None if they are None."""
    return None if data is None or scale is None else Quantized(data, scale, block)
