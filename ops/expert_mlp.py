"""The op `fp8fn::expert_mlp`, the gated MLP of each expert on its tokens, written with the grouped products."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.grouped_gemm import (
    Gradients,
    Needs,
    check_recipe,
    product,
    quantize_experts,
    rows_backward,
    rows_forward,
    rows_products,
    wgrad_block,
)
from fp8fn.ops.layout import swap, unguarded
from fp8fn.ops.operands import Quantized
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.scaled_grouped_mm import check_grouping

EXPERT_MLP_SCHEMA: Final = (
    'expert_mlp(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor offsets, str recipe="blockwise") -> Tensor'
)

_NAME: Final = "expert_mlp"


class Kept(NamedTuple):
    """Tensors that the backward reads: FP8 forms of the operands, and `hidden (T, 2I)` in the type of the output."""

    x_col: Quantized | None
    gate_up_row: Quantized | None
    hidden: Tensor | None
    inner_col: Quantized | None
    down_row: Quantized | None


class MlpNeeds(NamedTuple):
    """The operands that want a gradient, and whether to keep FP8 forms of the weights for it."""

    x: bool = False
    w_gate_up: bool = False
    w_down: bool = False
    fp8_weights: bool = True


NO_GRADIENTS: Final = MlpNeeds()


def check_expert_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: Recipe) -> None:
    for name, tensor in (("x", x), ("w_gate_up", w_gate_up), ("w_down", w_down)):
        if tensor.dtype not in INPUT_DTYPES:
            raise TypeError(f"{_NAME}: {name} has dtype {tensor.dtype}; use bfloat16, float16 or float32")
        if tensor.device != x.device:
            raise ValueError(f"{_NAME}: x is on {x.device} and {name} on {tensor.device}; move them to one device")
    shapes = f"x has shape {tuple(x.shape)}, w_gate_up {tuple(w_gate_up.shape)} and w_down {tuple(w_down.shape)}"
    if (x.ndim, w_gate_up.ndim, w_down.ndim) != (2, 3, 3):
        raise ValueError(f"{_NAME}: {shapes}; use (T, H), (E, H, 2I) and (E, I, H)")
    experts, width, both = w_gate_up.shape
    if width != x.shape[1] or w_down.shape[0] != experts or both != 2 * w_down.shape[1]:
        raise ValueError(
            f"{_NAME}: {shapes}; they must be (T, H), (E, H, 2I) and (E, I, H), the gate in the first half of w_gate_up"
        )
    check_grouping(_NAME, x, w_gate_up, offsets)
    check_recipe(_NAME, recipe)


@unguarded
def forward(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: Recipe, out_dtype: torch.dtype,
    needs: MlpNeeds = NO_GRADIENTS,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """`(silu(gate) * up) @ w_down` with `gate, up = x @ w_gate_up`."""
    dgrad, wgrad = needs.x, needs.w_gate_up
    products = Needs(dgrad and needs.fp8_weights, wgrad)
    hidden, x_col, gate_up_row = rows_forward(x, w_gate_up, offsets, None, recipe, out_dtype, products)
    gate, up = hidden.chunk(2, -1)
    block, *args = (recipe.activation_block, recipe.activation_dtype, recipe.scale)
    inner_col = None
    if needs.w_down:
        beside = wgrad_block(recipe)
        inner, inner_scale, col, col_scale = torch.ops.fp8fn.quantize_silu_mul_grouped_dual(
            gate, up, offsets, block, *args, *(() if beside is None else (beside,))
        )
        inner_col = Quantized(col, col_scale, beside or swap(block))
    else:
        inner, inner_scale = torch.ops.fp8fn.quantize_silu_mul(gate, up, block, *args)
    down_col, down_row = quantize_experts(w_down, recipe, both=needs.fp8_weights and (dgrad or wgrad))
    out = product(Quantized(inner, inner_scale, block), down_col, offsets, None, out_dtype)
    return out, Kept(x_col, gate_up_row, hidden if dgrad or wgrad else None, inner_col, down_row)


@unguarded
def backward(
    grad: Tensor, offsets: Tensor, kept: Kept, recipe: Recipe, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    column_major: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of `x`, `w_gate_up` and `w_down`; `dtypes` are theirs, `column_major` says how the weights lie."""
    x_dtype, gate_up_dtype, down_dtype = dtypes
    inner_dtype = grad.dtype if kept.hidden is None else kept.hidden.dtype
    grad_inner, grad_down = rows_backward(
        grad, offsets, kept.inner_col, kept.down_row, recipe, Gradients(inner_dtype, down_dtype, column_major[1])
    )
    if grad_inner is None or kept.hidden is None:
        return None, None, grad_down
    block = recipe.gradient_block
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_silu_mul_grad_grouped_dual(
        grad_inner, kept.hidden, offsets, block, recipe.gradient_dtype, recipe.scale
    )
    hidden_grad = Quantized(row, row_scale, block), Quantized(col, col_scale, swap(block))
    stored = Gradients(x_dtype, gate_up_dtype, column_major[0])
    grad_x, grad_gate_up = rows_products(hidden_grad, offsets, kept.x_col, kept.gate_up_row, stored)
    return grad_x, grad_gate_up, grad_down
