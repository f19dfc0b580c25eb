"""Autograd of `gemm(x, w, prequant=True)`: a product of two FP8 operands that is differentiable in the 16-bit one."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops.activations import ACTIVATION_BLOCKS
from fp8fn.ops.gemm import product, quantize
from fp8fn.ops.operands import Quantized


def quantized_by_weight(
    x: Tensor, w: Tensor, w_scale: Tensor, rows: int, columns: int, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`x (B?, M, K) @ w (B?, K, N) + bias (N)`, differentiable in `x` and `bias`; `w` has blocks `(rows, columns)`."""
    rows, columns = int(rows), int(columns)  # Dynamo may have made them symbolic
    out: Tensor = QuantizedByWeight.apply(x, w, w_scale, rows, columns, bias, out_dtype)  # type: ignore[no-untyped-call]
    return out


def leave_to_aotautograd() -> None:
    """Makes Dynamo leave `quantized_by_weight` as one call, which AOTAutograd traces later.

    Dynamo cannot trace a Function that has a `jvp`, or a Function under a transform. This is not done when the module
    is imported, because `allow_in_graph` imports all of Dynamo.
    """
    torch.compiler.allow_in_graph(quantized_by_weight)


# The effect of `torch.compiler.assume_constant_result`, which imports Dynamo: Dynamo calls the function as it traces.
leave_to_aotautograd._dynamo_marked_constant = True  # type: ignore[attr-defined]


class QuantizedByWeight(torch.autograd.Function):
    """`C = quantize(x) W + bias`; `dx = dC Wᵀ` by the same function, which is differentiable again, and `dbias = Σ dC`.

    If `Wᵀ` has a scale for each element of the contraction, `mm_a16w8` computes its product.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, w_scale: Tensor, rows: int, columns: int, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        block = ACTIVATION_BLOCKS.get((rows, columns))
        if block is None:
            out: Tensor = torch.ops.fp8fn.mm_a16w8(x, w, w_scale, (rows, columns), bias, out_dtype)
            return out
        scale = "fp32" if w_scale.dtype == torch.float32 else "e8m0"
        return product(quantize(x, block, None, scale), Quantized(w, w_scale, (rows, columns)), bias, out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, w_scale, rows, columns, bias, out_dtype = inputs
        ctx.set_materialize_grads(False)  # otherwise PyTorch fills in zeros for the weight's undefined tangent
        ctx.save_for_backward(w, w_scale)
        ctx.save_for_forward(w, w_scale)
        ctx.rows, ctx.columns, ctx.x_ndim, ctx.x_dtype = rows, columns, x.ndim, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.out_shape, ctx.out_dtype = output.shape, out_dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(ctx.needs_input_grad[1:3]):
            raise NotImplementedError(_CONSTANT_WEIGHT)
        if grad is None:
            return (None,) * 7
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            w, w_scale = ctx.saved_tensors
            summed = grad.ndim > ctx.x_ndim  # one x was multiplied by a batch of weights
            dtype = torch.float32 if summed else ctx.x_dtype
            grad_x = quantized_by_weight(grad, w.mT, w_scale.mT, ctx.columns, ctx.rows, None, dtype)
            grad_x = grad_x.sum(0).to(ctx.x_dtype) if summed else grad_x
        if ctx.needs_input_grad[5]:
            grad_bias = grad.sum(tuple(range(grad.ndim - 1)), dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, None, None, None, None, grad_bias, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        x_tangent, w_tangent, scale_tangent, _, _, bias_tangent, _ = tangents
        if w_tangent is not None or scale_tangent is not None:
            raise NotImplementedError(_CONSTANT_WEIGHT)
        if x_tangent is not None:
            w, w_scale = ctx.saved_tensors
            return quantized_by_weight(x_tangent, w, w_scale, ctx.rows, ctx.columns, bias_tangent, ctx.out_dtype)
        return None if bias_tangent is None else bias_tangent.to(ctx.out_dtype).expand(ctx.out_shape)


_CONSTANT_WEIGHT: Final = (
    "fp8fn.gemm: prequant=True has no derivative in the weight's data and scale: detach them (a Parameter in FP8 has "
    "requires_grad=False), or use fp8fn.gemm(a, b) on the unquantized tensors, which is differentiable"
)
