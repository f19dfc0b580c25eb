"""Autograd of the ops: the formula of `gemm`, and an error where a quantized value would lose its gradient silently."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8fn.meta import single_level
from fp8fn.ops import gemm as gemm_op
from fp8fn.ops.gemm import Quantized
from fp8fn.ops.layout import is_column_major, swap
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.scaled_mm import broadcast_batch


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    recipe: str = "blockwise",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`fp8fn::gemm` at one level: leading dimensions become M or one batch, `Gemm` does the rest."""
    gemm_op.check_gemm(a, b, bias, out_dtype)
    parsed = parse_recipe(recipe)
    if out_dtype is None:
        out_dtype = gemm_op.default_out_dtype(a)
    lead: tuple[int, ...] | None = None if a.ndim == b.ndim == 2 else a.shape[:-1]
    if b.ndim > 2:
        batch = broadcast_batch("gemm", a, b)
        lead = (*batch, a.shape[-2])
        a = a.expand(*batch, *a.shape[-2:]).flatten(0, -3)  # not reshape(-1, …), which an empty matrix leaves open
        b = b.expand(*batch, *b.shape[-2:]).flatten(0, -3)
    elif a.ndim > 2:
        a = a.flatten(0, -2)
    out: Tensor
    if single_level.is_tracked(a, b, bias):
        out = single_level.apply(Gemm, a, b, bias, parsed, out_dtype)
    elif single_level.inside_transform():
        out = single_level.below(torch.ops.fp8fn.gemm, a, b, bias, recipe, out_dtype)
    else:
        out = single_level.below(gemm_op.forward, a, b, bias, parsed, out_dtype, dgrad=False, wgrad=False)[0]
    return out if lead is None else out.reshape(*lead, b.shape[-1])


class Gemm(single_level.SingleLevelFunction):
    """`C = A B + bias`; `dA = dC Bᵀ`, `dB = Aᵀ dC`, `dbias = Σ dC`, the products in FP8 by the recipe.

    Saves the operands that the forward quantized, never the 16-bit ones, but where a second derivative may follow.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        ctx.recipe, ctx.dtypes = recipe, (a.dtype, b.dtype, None if bias is None else bias.dtype)
        ctx.b_column_major = is_column_major(b)
        ctx.out_dtype, ctx.out_shape = out_dtype, (*a.shape[:-1], b.shape[-1])
        ctx.inside_transform = single_level.inside_transform()
        ctx.keeps_operands = recipe.second_order or single_level.is_tracked_below(a, b, bias)
        if single_level.has_forward_mode():
            ctx.save_for_forward(a, b)
        dgrad, wgrad = ctx.needs_input_grad[:2]
        out: Tensor
        if ctx.keeps_operands:
            ctx.save_for_backward(a, b)
            if ctx.inside_transform:
                out = single_level.below(torch.ops.fp8fn.gemm, a, b, bias, recipe.key, out_dtype)
            else:
                out = single_level.below(gemm_op.forward, a, b, bias, recipe, out_dtype, dgrad=False, wgrad=False)[0]
            return out
        out, a_col, b_row = single_level.below(gemm_op.forward, a, b, bias, recipe, out_dtype, dgrad=dgrad, wgrad=wgrad)
        ctx.save_for_backward(*(a_col or (None, None))[:2], *(b_row or (None, None))[:2])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a_dtype, b_dtype, bias_dtype = ctx.dtypes
        grad_bias = None
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(tuple(range(grad.ndim - 1)), dtype=torch.float32).to(bias_dtype)
        if ctx.keeps_operands:
            return *_backward_of_operands(ctx, grad), grad_bias, None, None
        if torch.is_grad_enabled() and not ctx.inside_transform:
            raise NotImplementedError(SECOND_ORDER)
        a_data, a_scale, b_data, b_scale = ctx.saved_tensors
        a_col = None if a_data is None else Quantized(a_data, a_scale, swap(ctx.recipe.activation_block))
        b_row = None if b_data is None else Quantized(b_data, b_scale, swap(ctx.recipe.weight_block))
        grad_a, grad_b = gemm_op.backward(grad, a_col, b_row, ctx.recipe, a_dtype, b_dtype, ctx.b_column_major)
        return grad_a, grad_b, grad_bias, None, None

    @staticmethod
    def jvp(
        ctx: Any, a_tangent: Tensor | None, b_tangent: Tensor | None, bias_tangent: Tensor | None, *_: None
    ) -> Tensor | None:
        if single_level.forward_mode_depth() > 1:
            raise NotImplementedError("fp8fn.gemm: jvp of jvp is not supported; use jvp of grad, or grad of grad")
        a, b = ctx.saved_tensors
        key, terms = ctx.recipe.key, []
        if a_tangent is not None:
            terms.append(torch.ops.fp8fn.gemm(a_tangent, b, None, key, ctx.out_dtype))
        if b_tangent is not None:
            terms.append(torch.ops.fp8fn.gemm(a, b_tangent, None, key, ctx.out_dtype))
        tangent: Tensor | None = sum(terms[1:], terms[0]) if terms else None
        if bias_tangent is not None:
            bias_rows = bias_tangent.to(ctx.out_dtype)
            tangent = tangent + bias_rows if tangent is not None else bias_rows.expand(ctx.out_shape)
        return tangent


SECOND_ORDER = (
    "fp8fn.gemm: a second derivative needs the operands, and only their FP8 forms were kept; use "
    "Recipe(second_order=True), or nest torch.func transforms, torch.func.grad(torch.func.grad(f)) for one"
)


def _backward_of_operands(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same two products, from the unquantized operands, each differentiable again."""
    a, b = ctx.saved_tensors
    a_dtype, b_dtype, _ = ctx.dtypes
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.fp8fn.gemm(grad, b.mT, None, ctx.recipe.dgrad.key, a_dtype)
    if ctx.needs_input_grad[1]:
        grad_b = torch.ops.fp8fn.gemm(a.mT, grad, None, ctx.recipe.wgrad.key, b_dtype)
    return grad_a, grad_b


def not_differentiable(name: str, remedy: str, on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Any:
    """An Autograd kernel for an op on FP8: cheap where nothing is tracked, else an error in the backward.

    `on_cpu` and `on_cuda` are the op's implementations, called directly where no other part of PyTorch listens: a
    second pass of the dispatcher would cost 2 µs of the 10 that a call may.
    """
    message = f"fp8fn.{name} has no derivative: {remedy}"

    @cache
    def overload() -> Any:
        return getattr(torch.ops.fp8fn, name).default

    def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if single_level.is_tracked(x, *[arg for arg in args if isinstance(arg, Tensor)]):
            return single_level.apply(NotDifferentiable, overload(), message, kwargs, x, *args)
        if single_level.nothing_listens(x, *args):
            if x.is_cuda:
                return on_cuda(x, *args, **kwargs)
            if x.is_cpu:
                return on_cpu(x, *args, **kwargs)
        return single_level.below(overload(), x, *args, **kwargs)

    return kernel


class NotDifferentiable(single_level.SingleLevelFunction):
    """Runs an op, and raises where a derivative of it is asked for: zeros would be a wrong answer."""

    @staticmethod
    def forward(ctx: Any, op: Any, message: str, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.message = message
        ctx.set_materialize_grads(False)
        return single_level.below(op, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ctx.message)
