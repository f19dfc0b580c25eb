"""Products of two tensors in eager mode on a GPU, from the public function to the launches in one step.

The dispatcher, an autograd node for `weight.mT`, checks that the key of a kept call answers, and one allocation for
each tensor take the host 100 µs of a layer's step. `product` leaves them out where nothing but autograd sees the call,
and computes the bits and the gradients of `fp8fn::gemm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8fn.meta import bypass, levels
from fp8fn.meta.autograd import SECOND_ORDER
from fp8fn.ops import gemm as gemm_op
from fp8fn.ops.cuda.runtime import call_cache, graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Program, Results, is_recording, keep, kind, recall
from fp8fn.ops.layout import is_column_major, swap
from fp8fn.ops.operands import Quantized
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.torch_private.core import SingleLevelFunction


def product(
    a: Any, b: Any, bias: Any, recipe: str, out_dtype: torch.dtype | None, *, transposed: bool
) -> Tensor | None:  # fmt: skip
    """`a @ b + bias`, or `a @ b.mT + bias` if `transposed`; None where `fp8fn::gemm` has to compute it.

    `recipe` is a recipe's key.
    """
    if torch.compiler.is_compiling() or not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.is_cuda:
        return None
    if a.ndim < 2 or b.ndim != 2 or not bypass.nothing_watches(a, b, bias) or forward_ad._current_level >= 0:
        return None
    if is_recording() or graph_capture.capturing():
        return None
    if out_dtype is None:
        out_dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else a.dtype
    dgrad = wgrad = tracked = again = False
    if torch.is_grad_enabled():
        dgrad, wgrad = a.requires_grad, b.requires_grad
        tracked = dgrad or wgrad or (bias is not None and bias.requires_grad)
        again = dgrad and levels.outlives_forward(b)
    key = (product, recipe, out_dtype, transposed, dgrad, wgrad, again, kind(a), kind(b), kind(bias))
    plan: Plan | None = recall(key)
    if plan is None:
        parsed = parse_recipe(recipe)
        if parsed.second_order:
            return None
        gemm_op.check_gemm(a, b.mT if transposed else b, bias, out_dtype)
        again = again and not parsed.keep_weights
        plan = Plan(
            recipe=parsed, out_dtype=out_dtype, transposed=transposed, dgrad=dgrad, wgrad=wgrad, again=again,
            a_shape=a.shape, dtypes=(a.dtype, b.dtype), b_column_major=is_column_major(b.mT if transposed else b),
        )  # fmt: skip
        plan = keep(key, plan)
        assert plan is not None
    if tracked:
        out: Tensor = levels.apply(Product, a, b, bias, plan)
        return out
    return plan.forward(a, b, bias)[0]


class Product(SingleLevelFunction):
    """`meta.autograd.Gemm` with a plan: it saves what that function saves, but of a parameter `b` not its transpose."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        out, a_data, a_scale, b_data, b_scale = plan.forward(a, b, bias)
        ctx.plan, ctx.bias_dtype = plan, None if bias is None else bias.dtype
        ctx.save_for_backward(a_data, a_scale, b if plan.again else b_data, b_scale)
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(SECOND_ORDER)
        needs_a, needs_b, needs_bias, _ = ctx.needs_input_grad
        grad_a, grad_b = ctx.plan.backward(grad, ctx.saved_tensors, needs_a, needs_b)
        grad_bias = None
        if needs_bias:
            grad_bias = grad.sum(tuple(range(grad.ndim - 1)), dtype=torch.float32).to(ctx.bias_dtype)
        return grad_a, grad_b, grad_bias, None


@dataclass(eq=False, kw_only=True)
class Plan:
    """The launches of a product of operands of some kinds, and of its backward.

    Args:
        transposed: whether the second operand is `bᵀ`.
        dgrad: whether the backward may need the gradient of `a`.
        wgrad: whether the backward may need the gradient of `b`.
        again: whether the backward quantizes `b` again, so that `b` itself is saved.
        dtypes: of `a` and `b`.
        b_column_major: whether the second operand, `(K, N)`, is column-major.
    """

    recipe: Recipe
    out_dtype: torch.dtype
    transposed: bool
    dgrad: bool
    wgrad: bool
    again: bool
    a_shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]
    b_column_major: bool
    _program: Program | None = None
    _settled: bool = False
    """Whether it is known if the forward is a program."""

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Results:
        """The product; data and scales of `a` for wgrad; data and scales of `b` for dgrad, unless quantized again."""
        inputs = (a, b) if bias is None else (a, b, bias)
        if self._program is not None:
            return self._program(*inputs)
        if self._settled:
            return self._forward(a, b, bias)
        results, program = call_cache.recorded(inputs, lambda: self._forward(a, b, bias))
        if call_cache.distinct(inputs):
            self._program, self._settled = program, True
        return results

    def backward(self, grad: Tensor, saved: tuple[Tensor | None, ...], needs_a: bool, needs_b: bool) -> Results:
        """The gradients of `a` and `b`, or None where one is not needed."""
        dgrad, wgrad = self.dgrad and needs_a, self.wgrad and needs_b
        if not (dgrad or wgrad):
            return None, None
        a_data, a_scale, b, b_scale = saved
        used = (grad, a_data, a_scale, b, b_scale) if dgrad and wgrad else (grad, b, b_scale)
        if not dgrad:
            used = grad, a_data, a_scale
        inputs = [x for x in used if x is not None]

        def run() -> Results:
            return self._backward(grad, saved, dgrad=dgrad, wgrad=wgrad)

        if not bypass.nothing_watches(*inputs) or is_recording():
            return run()
        return call_cache.chained((self, dgrad, wgrad, *map(kind, inputs)), inputs, run)

    def _forward(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Results:
        rows, columns = a if a.ndim == 2 else a.flatten(0, -2), b.mT if self.transposed else b
        dgrad = self.dgrad and not self.again
        with levels.below_autograd():
            out, a_col, b_row = gemm_op.forward(
                rows, columns, bias, self.recipe, self.out_dtype, dgrad=dgrad, wgrad=self.wgrad
            )
            return out.reshape(*a.shape[:-1], out.shape[-1]), *gemm_op.parts(a_col), *gemm_op.parts(b_row)

    def _backward(self, grad: Tensor, saved: tuple[Tensor | None, ...], *, dgrad: bool, wgrad: bool) -> Results:
        a_data, a_scale, b, b_scale = saved
        a_col = gemm_op.quantized(a_data, a_scale, self.recipe.wgrad_block) if wgrad else None
        b_row: Quantized | Tensor | None = None
        if dgrad and self.again:
            b_row = b.mT if self.transposed and b is not None else b
        elif dgrad:
            b_row = gemm_op.quantized(b, b_scale, swap(self.recipe.weight_block))
        grad_a, grad_b = gemm_op.backward(
            grad if grad.ndim == 2 else grad.flatten(0, -2), a_col, b_row, self.recipe, *self.dtypes,
            self.b_column_major,
        )  # fmt: skip
        grad_a = grad_a if grad_a is None else grad_a.reshape(self.a_shape)
        return grad_a, grad_b.mT if grad_b is not None and self.transposed else grad_b
