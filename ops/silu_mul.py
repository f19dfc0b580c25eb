"""Operands and outputs of the ops that quantize `silu(gate) * up` in training: `SavedSiluMul`, `SiluMulBackward`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operands import Quantization, Quantized, empty_dual
from fp8fn.ops.targets import Target

# The forward keeps gate and up in this block, with float32 scales.
SAVED_BLOCK: Final[Block] = (1, 128)
# The names of the ops' outputs, in order.
SAVED_OUTPUTS: Final = ("data", "scale", "gate_data", "gate_scale", "up_data", "up_scale")
BACKWARD_OUTPUTS: Final = (
    *(f"grad_{name}{part}" for name in ("gate", "up") for part in ("", "_scale", "_columns", "_columns_scale")),
    "product", "product_scale",
)  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedSiluMul:
    """`silu(gate) * up`, to be quantized as `product` says, and `gate` and `up`, to be quantized in `SAVED_BLOCK`."""

    product: Quantization
    gate: Quantization
    up: Quantization

    @property
    def target(self) -> Target:
        return self.product.target

    @cached_property
    def outputs(self) -> Outputs:
        tensors = [part for q in (self.product, self.gate, self.up) for part in q.out[:2]]
        return Outputs(dict(zip(SAVED_OUTPUTS, tensors, strict=True)), len(tensors))


@dataclass(frozen=True, eq=False, kw_only=True)
class SiluMulBackward:
    """Gradients of `gate` and `up`, and `silu(gate) * up`, to be computed from `gate` and `up` and quantized.

    Args:
        grad: the gradient `(..., M, N)` of `silu(gate) * up`.
        gate: `(..., M, N)`, the values or FP8 in `SAVED_BLOCK`.
        up: the same, in the same form.
        block: the first block of each gradient; the second one is its transpose.
        dtype: the gradients' element type.
        scale: the format of all scales that are written.
        product_block: the block of `silu(gate) * up`, whose data is column-major.
        product_dtype: its element type.
        into: the ten outputs to fill, in the order of `BACKWARD_OUTPUTS`; by default new ones.
    """

    grad: Tensor
    gate: Quantized | Tensor
    up: Quantized | Tensor
    block: Block
    dtype: torch.dtype
    scale: str
    product_block: Block
    product_dtype: torch.dtype
    target: Target
    into: tuple[Tensor, ...] = ()

    @cached_property
    def outputs(self) -> Outputs:
        tensors = self.into or empty_backward(
            self.grad, self.block, self.dtype, self.scale, self.product_block, self.product_dtype
        )
        return Outputs(dict(zip(BACKWARD_OUTPUTS, tensors, strict=True)), len(tensors))


def empty_backward(
    grad: Tensor, block: Block, dtype: torch.dtype, scale: str, product_block: Block, product_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `quantize_silu_mul_backward`."""
    return (
        *empty_dual(grad, block, dtype, scale),
        *empty_dual(grad, block, dtype, scale),
        empty_data(grad, product_block, product_dtype, column_major=True),
        empty_scale(grad, product_block, scale, column_major=True),
    )
