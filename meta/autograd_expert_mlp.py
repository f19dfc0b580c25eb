"""Autograd of `fp8fn::expert_mlp`: one function, which saves the tensors between its two products once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8fn.meta import levels
from fp8fn.ops import expert_mlp as mlp
from fp8fn.ops.gemm import default_out_dtype, quantize_again
from fp8fn.ops.layout import is_column_major
from fp8fn.ops.operands import Quantized
from fp8fn.ops.recipe import Recipe, check_grouped, parse_recipe
from fp8fn.ops.torch_private.core import SingleLevelFunction


def expert_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: str = "blockwise") -> Tensor:
    """`fp8fn::expert_mlp` at one level; two `grouped_gemm`s if a tangent or a second derivative may follow."""
    parsed = parse_recipe(recipe)
    check_grouped("expert_mlp", parsed)
    mlp.check_expert_mlp(x, w_gate_up, w_down, offsets, parsed)
    tensors = (x, w_gate_up, w_down)
    out_dtype = default_out_dtype(x)
    out: Tensor
    if levels.is_tracked(*tensors):
        if parsed.second_order or levels.has_forward_mode() or levels.is_tracked_below(*tensors):
            return _composed(*tensors, offsets, recipe)
        out = levels.apply(ExpertMlp, *tensors, offsets, parsed, out_dtype)
    elif levels.inside_transform():
        out = levels.below(torch.ops.fp8fn.expert_mlp, *tensors, offsets, recipe)
    else:
        out = levels.below(mlp.forward, *tensors, offsets, parsed, out_dtype)[0]
    return out


def _composed(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: str) -> Tensor:
    gate, up = torch.ops.fp8fn.grouped_gemm(x, w_gate_up, offsets, None, recipe).chunk(2, -1)
    out: Tensor = torch.ops.fp8fn.grouped_gemm(F.silu(gate) * up, w_down, offsets, None, recipe)
    return out


class ExpertMlp(SingleLevelFunction):
    """Saves FP8 forms of `x` and of `silu(gate) * up`, and the unquantized `gate` and `up`.

    It saves each weight as the parameter, which the backward quantizes again, or as an FP8 form, as `Gemm` does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: Recipe, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, w_gate_up.dtype, w_down.dtype)
        ctx.column_major = is_column_major(w_gate_up), is_column_major(w_down)
        ctx.inside_transform = levels.inside_transform()
        weights = (w_gate_up, w_down)
        ctx.quantizes_again = not recipe.keep_weights and all(map(levels.outlives_forward, weights))
        needs = mlp.MlpNeeds(*ctx.needs_input_grad[:3])._replace(fp8_weights=not ctx.quantizes_again)
        out, kept = levels.below(mlp.forward, x, *weights, offsets, recipe, out_dtype, needs)
        tensors: list[Tensor | None] = [offsets, kept.hidden]
        if ctx.quantizes_again:
            tensors += [w_gate_up if needs.x else None, w_down if needs.x or needs.w_gate_up else None]
        else:
            tensors += [None, None]
        ctx.blocks = []
        for q in (kept.x_col, kept.gate_up_row, kept.inner_col, kept.down_row):
            ctx.blocks.append(None if q is None else q.block)
            tensors.extend((q or (None, None))[:2])
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not ctx.inside_transform:
            raise NotImplementedError(SECOND_ORDER)
        offsets, hidden, w_gate_up, w_down, *parts = ctx.saved_tensors
        x_col, gate_up_row, inner_col, down_row = (
            None if block is None else Quantized(parts[2 * i], parts[2 * i + 1], block)
            for i, block in enumerate(ctx.blocks)
        )
        if w_gate_up is not None:
            gate_up_row = quantize_again(w_gate_up.detach(), ctx.recipe)
        if w_down is not None:
            down_row = quantize_again(w_down.detach(), ctx.recipe)
        kept = mlp.Kept(x_col, gate_up_row, hidden, inner_col, down_row)
        return *mlp.backward(grad, offsets, kept, ctx.recipe, ctx.dtypes, ctx.column_major), None, None, None


SECOND_ORDER = (
    "fp8fn.expert_mlp: a second derivative needs the operands, and only their FP8 forms were kept; use "
    "Recipe(second_order=True), or nest torch.func transforms, torch.func.grad(torch.func.grad(f)) for one"
)
