"""Autograd of `gemm` and `mm_a16w8`, and an error for ops on FP8 data, whose gradient would be lost silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8fn.meta import bypass, levels
from fp8fn.ops import gemm as gemm_op
from fp8fn.ops.grouped_gemm import bias_rows, sum_groups
from fp8fn.ops.layout import Block, is_column_major, swap
from fp8fn.ops.operands import Quantized
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.scaled_mm import broadcast_batch
from fp8fn.ops.torch_private.core import DispatchKeySet, SingleLevelFunction


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    recipe: str = "blockwise",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`fp8fn::gemm` at one level: flattens the leading dimensions into M or into one batch, and applies `Gemm`."""
    gemm_op.check_gemm(a, b, bias, out_dtype)
    parsed = parse_recipe(recipe)
    if out_dtype is None:
        out_dtype = gemm_op.default_out_dtype(a)
    lead: tuple[int, ...] | None = None if a.ndim == b.ndim == 2 else a.shape[:-1]
    if b.ndim > 2:
        batch = broadcast_batch("gemm", a, b)
        lead = (*batch, a.shape[-2])
        a = a.expand(*batch, *a.shape[-2:]).flatten(0, -3)  # reshape(-1, …) is ambiguous for an empty matrix
        b = b.expand(*batch, *b.shape[-2:]).flatten(0, -3)
    elif a.ndim > 2:
        a = a.flatten(0, -2)
    out: Tensor
    if levels.is_tracked(a, b, bias):
        out = levels.apply(Gemm, a, b, bias, parsed, out_dtype)
    elif levels.inside_transform():
        out = levels.below(torch.ops.fp8fn.gemm, a, b, bias, recipe, out_dtype)
    else:
        out = levels.below(_forward(a, b, bias), a, b, bias, parsed, out_dtype, dgrad=False, wgrad=False)[0]
    return out if lead is None else out.reshape(*lead, b.shape[-1])


class Gemm(SingleLevelFunction):
    """`C = A B + bias`; `dA = dC Bᵀ`, `dB = Aᵀ dC`, `dbias = Σ dC`, with the products in FP8 by the recipe.

    Saves the quantized operands, but of a parameter `b` the parameter, which the backward quantizes again. Other 16-bit
    operands are saved only if a second derivative may follow.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> Tensor:
        ctx.recipe, ctx.dtypes = recipe, (a.dtype, b.dtype, None if bias is None else bias.dtype)
        ctx.b_column_major = is_column_major(b)
        ctx.out_dtype, ctx.out_shape = out_dtype, (*a.shape[:-1], b.shape[-1])
        ctx.inside_transform = levels.inside_transform()
        ctx.keeps_operands = recipe.second_order or levels.is_tracked_below(a, b, bias)
        if levels.has_forward_mode():
            ctx.save_for_forward(a, b)
        dgrad, wgrad = ctx.needs_input_grad[:2]
        args = (a, b, bias, recipe, out_dtype)
        out: Tensor
        if ctx.keeps_operands:
            ctx.save_for_backward(a, b)
            if ctx.inside_transform:
                out = levels.below(torch.ops.fp8fn.gemm, a, b, bias, recipe.key, out_dtype)
            else:
                out = levels.below(_forward(a, b, bias), *args, dgrad=False, wgrad=False)[0]
            return out
        ctx.quantizes_again = dgrad and not recipe.keep_weights and levels.outlives_forward(b)
        needed = dgrad and not ctx.quantizes_again
        out, a_col, b_row = levels.below(_forward(a, b, bias), *args, dgrad=needed, wgrad=wgrad)
        kept = (b, None) if ctx.quantizes_again else (b_row or (None, None))[:2]
        ctx.save_for_backward(*(a_col or (None, None))[:2], *kept)
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
        a_col = None if a_data is None else Quantized(a_data, a_scale, ctx.recipe.wgrad_block)
        b_row: Quantized | Tensor | None
        if ctx.quantizes_again:
            b_row = b_data.detach() if ctx.inside_transform else b_data
        else:
            b_row = None if b_data is None else Quantized(b_data, b_scale, swap(ctx.recipe.weight_block))
        backward = bypass.shortest(gemm_op.backward, gemm_op.backward_at_once, grad, b_data, below_autograd=True)
        grad_a, grad_b = backward(grad, a_col, b_row, ctx.recipe, a_dtype, b_dtype, ctx.b_column_major)
        return grad_a, grad_b, grad_bias, None, None

    @staticmethod
    def jvp(
        ctx: Any, a_tangent: Tensor | None, b_tangent: Tensor | None, bias_tangent: Tensor | None, *_: None
    ) -> Tensor | None:
        if levels.forward_mode_depth() > 1:
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


def _forward(a: Tensor, b: Tensor, bias: Tensor | None) -> Callable[..., Any]:
    return bypass.shortest(gemm_op.forward, gemm_op.forward_at_once, a, b, bias, below_autograd=True)


SECOND_ORDER = (
    "fp8fn.gemm: a second derivative needs the operands, and only their FP8 forms were kept; use "
    "Recipe(second_order=True), or nest torch.func transforms, torch.func.grad(torch.func.grad(f)) for one"
)


def _backward_of_operands(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same two products, computed from the unquantized operands, so that each is differentiable again."""
    a, b = ctx.saved_tensors
    a_dtype, b_dtype, _ = ctx.dtypes
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.fp8fn.gemm(grad, b.mT, None, ctx.recipe.dgrad.key, a_dtype)
    if ctx.needs_input_grad[1]:
        grad_b = torch.ops.fp8fn.gemm(a.mT, grad, None, ctx.recipe.wgrad.key, b_dtype)
    return grad_a, grad_b


def not_differentiable(name: str, remedy: str, on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Any:
    """An Autograd kernel for an op on FP8 data, whose backward raises an error."""
    message = f"fp8fn.{name} has no derivative: {remedy}"

    def track(*args: Any, **kwargs: Any) -> Any:
        return levels.apply(NotDifferentiable, getattr(torch.ops.fp8fn, name).default, message, kwargs, *args)

    return _leaf(name, track, on_cpu, on_cuda)


def _leaf(name: str, track: Callable[..., Any], on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Any:
    """An Autograd kernel that calls `track` if autograd must record the call, else the op below autograd.

    The kernel calls the implementations `on_cpu` and `on_cuda` directly if the dispatcher would call them next. A
    second pass through the dispatcher would cost 2 µs, of a budget of 10 µs for the call.
    """

    @cache
    def overload() -> Any:
        return getattr(torch.ops.fp8fn, name).default

    def kernel(keys: DispatchKeySet, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if levels.is_tracked(x, *[arg for arg in args if isinstance(arg, Tensor)]):
            return track(x, *args, **kwargs)
        if bypass.is_last(keys):
            if x.is_cuda:
                return on_cuda(x, *args, **kwargs)
            if x.is_cpu:
                return on_cpu(x, *args, **kwargs)
        return levels.below(overload(), x, *args, **kwargs)

    return kernel


class NotDifferentiable(SingleLevelFunction):
    """Runs an op, and raises an error when the user asks for its derivative: zeros would be a wrong answer."""

    @staticmethod
    def forward(ctx: Any, op: Any, message: str, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.message = message
        ctx.set_materialize_grads(False)
        return levels.below(op, *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ctx.message)


def mm_a16w8(on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Any:
    """The Autograd kernel of `fp8fn::mm_a16w8`."""

    def track(  # noqa: PLR0913  an op's signature
        x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None, constant: bool = False, activations: str = "16bit",
        batch_invariant: bool = False,
    ) -> Any:  # fmt: skip
        options = constant, activations, batch_invariant
        return levels.apply(MmA16W8, x, w, w_scale, w_block, None, bias, out_dtype, *options)

    return _leaf("mm_a16w8", track, on_cpu, on_cuda)


def grouped_mm_a16w8(on_cpu: Callable[..., Any], on_cuda: Callable[..., Any]) -> Any:
    """The Autograd kernel of `fp8fn::grouped_mm_a16w8`."""

    def track(  # noqa: PLR0913  an op's signature
        x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, offsets: Tensor, bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None, activations: str = "16bit",
    ) -> Any:  # fmt: skip
        return levels.apply(MmA16W8, x, w, w_scale, w_block, offsets, bias, out_dtype, activations)

    return _leaf("grouped_mm_a16w8", track, on_cpu, on_cuda)


def _weight_product(
    x: Tensor, w: tuple[Tensor, Tensor, Block], offsets: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype | None, options: Sequence[Any],
) -> Tensor:  # fmt: skip
    """`fp8fn::mm_a16w8`, or of groups of rows `fp8fn::grouped_mm_a16w8`."""
    out: Tensor
    if offsets is None:
        out = torch.ops.fp8fn.mm_a16w8(x, *w, bias, out_dtype, *options)
    else:
        out = torch.ops.fp8fn.grouped_mm_a16w8(x, *w, offsets, bias, out_dtype, *options)
    return out


class MmA16W8(SingleLevelFunction):
    """`C = x W + bias` with `W` in FP8; `dx = dC Wᵀ` by the same op, which is differentiable again, and `dbias = Σ dC`.

    `W` and its scales are constants: the backward raises an error when the user asks for their gradient. With offsets,
    each group of rows has its own `W` and its own row of `bias`.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, w, w_scale, w_block, offsets, bias, out_dtype, *ctx.options = args
        ctx.set_materialize_grads(False)  # otherwise PyTorch fills in zeros for the weight's undefined tangent
        ctx.save_for_backward(w, w_scale, offsets)
        if levels.has_forward_mode():
            ctx.save_for_forward(w, w_scale, offsets)
        ctx.w_block, ctx.x_ndim, ctx.x_dtype = w_block, x.ndim, x.dtype
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        out: Tensor = levels.below(_weight_product, x, (w, w_scale, w_block), offsets, bias, out_dtype, ctx.options)
        ctx.out_shape, ctx.out_dtype = out.shape, out.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        w, w_scale, offsets = ctx.saved_tensors
        if any(ctx.needs_input_grad[1:3]):
            raise NotImplementedError(_constant_weight(offsets))
        if grad is None:
            return (None,) * (7 + len(ctx.options))
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            summed = grad.ndim > ctx.x_ndim  # one x was multiplied by a batch of weights
            dtype = torch.float32 if summed else ctx.x_dtype
            turned = w.mT, w_scale.mT, swap(ctx.w_block)
            grad_x = _weight_product(grad, turned, offsets, None, dtype, ctx.options)
            grad_x = grad_x.sum(0).to(ctx.x_dtype) if summed else grad_x
        if ctx.needs_input_grad[5]:
            shape, bias_dtype = ctx.bias
            if offsets is None:
                sums = grad.sum(tuple(range(grad.ndim - 1)) if len(shape) == 1 else (1,), dtype=torch.float32)
            else:
                sums = sum_groups(grad, offsets)
            grad_bias = sums.to(bias_dtype).reshape(shape)
        return grad_x, None, None, None, None, grad_bias, None, *(None for _ in ctx.options)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        x_tangent, w_tangent, scale_tangent, _, _, bias_tangent, *_ = tangents
        w, w_scale, offsets = ctx.saved_tensors
        if levels.forward_mode_depth() > 1:
            name = _weight_op(offsets)
            raise NotImplementedError(f"fp8fn.{name}: jvp of jvp is not supported; use jvp of grad, or grad of grad")
        if w_tangent is not None or scale_tangent is not None:
            raise NotImplementedError(_constant_weight(offsets))
        if x_tangent is not None:
            weight = w, w_scale, ctx.w_block
            return _weight_product(x_tangent, weight, offsets, bias_tangent, ctx.out_dtype, ctx.options)
        if bias_tangent is None:
            return None
        if offsets is not None:
            return bias_rows(bias_tangent.to(ctx.out_dtype), offsets, ctx.out_shape[0])
        rows = bias_tangent.unsqueeze(1) if bias_tangent.ndim == 2 else bias_tangent
        return rows.to(ctx.out_dtype).expand(ctx.out_shape)


def _weight_op(offsets: Tensor | None) -> str:
    return "mm_a16w8" if offsets is None else "grouped_mm_a16w8"


def _constant_weight(offsets: Tensor | None) -> str:
    """The error for a derivative in the weight."""
    differentiable = "gemm(a, b)" if offsets is None else "grouped_gemm(a, b, offsets)"
    return (
        f"fp8fn.{_weight_op(offsets)} has no derivative in w and w_scale: detach them (a Parameter in FP8 has "
        f"requires_grad=False), or use fp8fn.{differentiable} on the unquantized tensors, which is differentiable"
    )
