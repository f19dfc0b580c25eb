"""Autograd of `fp8fn::grouped_gemm` at one level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8fn.meta import levels
from fp8fn.ops import grouped_gemm as grouped
from fp8fn.ops.gemm import default_out_dtype, quantize_again
from fp8fn.ops.groups import counted
from fp8fn.ops.layout import is_column_major
from fp8fn.ops.operands import Quantized
from fp8fn.ops.recipe import Recipe, check_grouped, parse_recipe
from fp8fn.ops.torch_private.core import SingleLevelFunction


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    recipe: str = "blockwise",
    out_dtype: torch.dtype | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """`fp8fn::grouped_gemm` at one level; without offsets and counts, a batched `fp8fn::gemm`."""
    parsed = parse_recipe(recipe)
    if offsets is not None or counts is not None:
        check_grouped("grouped_gemm", parsed)
    grouped.check_grouped_gemm(a, b, offsets, bias, parsed, out_dtype, counts)
    if out_dtype is None:
        out_dtype = default_out_dtype(a)
    out: Tensor
    if counts is not None:
        if levels.is_tracked(a, b, bias):
            out = _padded(a, b, counts, bias, replace(parsed, accumulate="promoted").key, out_dtype)
        elif levels.inside_transform():
            args = (a, b, None, bias, recipe, out_dtype, counts)
            out = levels.below(torch.ops.fp8fn.grouped_gemm, *args)
        else:
            out = levels.below(grouped.masked_forward, a, b, counts, bias, parsed, out_dtype)
        return out
    if offsets is None:
        out = torch.ops.fp8fn.gemm(a, b, None, recipe, out_dtype if bias is None else torch.float32)
        return out if bias is None else (out + bias.float()[:, None]).to(out_dtype)
    if levels.is_tracked(a, b, bias):
        out = levels.apply(GroupedGemm, a, b, offsets, bias, parsed, out_dtype)
    elif levels.inside_transform():
        out = levels.below(torch.ops.fp8fn.grouped_gemm, a, b, offsets, bias, recipe, out_dtype)
    else:
        out = levels.below(_forward(b), a, b, offsets, bias, parsed, out_dtype)[0]
    return out


def _padded(a: Tensor, b: Tensor, counts: Tensor, bias: Tensor | None, recipe: str, out_dtype: torch.dtype) -> Tensor:
    """The product of each expert's first rows, `counts` of them, by the batched product, which has derivatives.

    All rows are multiplied, those past a count as zeros: the derivatives are those of the first rows, since zeros add
    nothing to a sum over rows and change no block's largest magnitude. The recipe is promoted, as groups are without
    derivatives.
    """
    inside = counted(counts, a.shape[1])[..., None]
    out = torch.ops.fp8fn.grouped_gemm(torch.where(inside, a, 0), b, None, bias, recipe, out_dtype)
    return torch.where(inside, out, 0)


def _forward(b: Tensor) -> Callable[..., tuple[Tensor, Quantized | None, Quantized | None]]:
    """The forward of groups of rows by a batch of matrices, or of groups of K by one matrix."""
    return grouped.rows_forward if b.ndim == 3 else grouped.k_forward


class GroupedGemm(SingleLevelFunction):
    """`C = A B + bias` of each group, with the gradients of `Gemm` for each group.

    For groups of rows, `dA` has groups of rows and `dB` has groups of K (the tokens). For groups of K, both gradients
    have groups of rows. Saves the quantized operands, or parameters, as `Gemm` does.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.recipe, ctx.dtypes = recipe, (a.dtype, b.dtype, None if bias is None else bias.dtype)
        ctx.rows, ctx.b_column_major, ctx.out_dtype = b.ndim == 3, is_column_major(b), out_dtype
        ctx.out_shape = (*(() if ctx.rows else offsets.shape), a.shape[0], b.shape[-1])
        ctx.inside_transform = levels.inside_transform()
        ctx.keeps_operands = recipe.second_order or levels.is_tracked_below(a, b, bias)
        if levels.has_forward_mode():
            ctx.save_for_forward(a, b, offsets)
        needs = grouped.Needs(*ctx.needs_input_grad[:2])
        out: Tensor
        if ctx.keeps_operands:
            ctx.save_for_backward(a, b, offsets)
            if ctx.inside_transform:
                args = (a, b, offsets, bias, recipe.key, out_dtype)
                out = levels.below(torch.ops.fp8fn.grouped_gemm, *args)
            else:
                out = levels.below(_forward(b), a, b, offsets, bias, recipe, out_dtype)[0]
            return out
        again = needs.dgrad and ctx.rows and not recipe.keep_weights and levels.outlives_forward(b)
        needs = needs._replace(dgrad=needs.dgrad and not again)
        out, a_kept, b_kept = levels.below(_forward(b), a, b, offsets, bias, recipe, out_dtype, needs)
        ctx.quantizes_again = again
        ctx.blocks = [None if q is None else q.block for q in (a_kept, b_kept)]
        ctx.save_for_backward(
            offsets, *(a_kept or (None, None))[:2], *((b, None) if again else (b_kept or (None, None))[:2])
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a_dtype, b_dtype, bias_dtype = ctx.dtypes
        saved = ctx.saved_tensors  # once: `checkpoint` unpacks each only once
        offsets = saved[2 if ctx.keeps_operands else 0]
        grad_bias = None
        if bias_dtype is not None and ctx.needs_input_grad[3]:
            sums = grouped.sum_groups(grad, offsets) if ctx.rows else grad.sum(1, dtype=torch.float32)
            grad_bias = sums.to(bias_dtype)
        if ctx.keeps_operands:
            return *_backward_of_operands(ctx, grad, saved), None, grad_bias, None, None
        if torch.is_grad_enabled() and not ctx.inside_transform:
            raise NotImplementedError(SECOND_ORDER)
        _, *parts = saved
        a_kept, b_kept = (
            None if block is None else Quantized(parts[2 * i], parts[2 * i + 1], block)
            for i, block in enumerate(ctx.blocks)
        )
        if ctx.quantizes_again:
            b_kept = quantize_again(parts[2].detach(), ctx.recipe)
        backward = grouped.rows_backward if ctx.rows else grouped.k_backward
        stored = grouped.Gradients(a_dtype, b_dtype, ctx.b_column_major)
        grad_a, grad_b = backward(grad, offsets, a_kept, b_kept, ctx.recipe, stored)
        return grad_a, grad_b, None, grad_bias, None, None

    @staticmethod
    def jvp(
        ctx: Any, a_tangent: Tensor | None, b_tangent: Tensor | None, offsets_tangent: None,
        bias_tangent: Tensor | None, *_: None,
    ) -> Tensor | None:  # fmt: skip
        if levels.forward_mode_depth() > 1:
            raise NotImplementedError("fp8fn.grouped_gemm: jvp of jvp is not supported; use jvp of grad")
        a, b, offsets = ctx.saved_tensors
        key, terms = ctx.recipe.key, []
        if a_tangent is not None:
            terms.append(torch.ops.fp8fn.grouped_gemm(a_tangent, b, offsets, None, key, ctx.out_dtype))
        if b_tangent is not None:
            terms.append(torch.ops.fp8fn.grouped_gemm(a, b_tangent, offsets, None, key, ctx.out_dtype))
        if bias_tangent is not None:
            terms.append(_bias_rows(ctx, bias_tangent.to(ctx.out_dtype), offsets))
        return sum(terms[1:], terms[0]) if terms else None


SECOND_ORDER = (
    "fp8fn.grouped_gemm: a second derivative needs the operands, and only their FP8 forms were kept; use "
    "Recipe(second_order=True), or nest torch.func transforms, torch.func.grad(torch.func.grad(f)) for one"
)


def _bias_rows(ctx: Any, bias: Tensor, offsets: Tensor) -> Tensor:
    """The rows that `bias (E, N)` adds to the output."""
    if not ctx.rows:
        return bias[:, None].expand(ctx.out_shape)
    return grouped.bias_rows(bias, offsets, ctx.out_shape[0])


def _backward_of_operands(ctx: Any, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The same two products, computed from the unquantized operands, so that each is differentiable again."""
    a, b, offsets = saved
    a_dtype, b_dtype, _ = ctx.dtypes
    op, recipe = torch.ops.fp8fn.grouped_gemm, ctx.recipe
    # A product of groups of K quantizes both sides alike, in one-sided blocks.
    wgrad = replace(recipe, wgrad_activation_block=None).wgrad
    grad_a = grad_b = None
    if ctx.rows:
        if ctx.needs_input_grad[0]:
            grad_a = op(grad, b.mT, offsets, None, recipe.dgrad.key, a_dtype)
        if ctx.needs_input_grad[1]:
            grad_b = op(a.mT, grad, offsets, None, wgrad.key, b_dtype)
        return grad_a, grad_b
    by_gradient = wgrad  # its right operand is the gradient
    if ctx.needs_input_grad[0]:
        dgrad = replace(by_gradient, activation_dtype=recipe.weight_dtype)
        grad_a = op(b, grad.mT, offsets, None, dgrad.key, a_dtype).mT
    if ctx.needs_input_grad[1]:
        grad_b = op(a.mT, grad, offsets, None, by_gradient.key, b_dtype)
    return grad_a, grad_b
