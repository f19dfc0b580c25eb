"""The definition of the scaled product, in plain PyTorch: dequantize in float32, multiply, add the bias, round once."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.layout import Block
from fp8fn.ops.reference.quantize import dequantize


def scaled_mm(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`a (..., M, K) @ b (..., K, N) + bias (N)` → `(..., M, N)`, row-major."""
    out = dequantize(a, a_scale, a_block) @ dequantize(b, b_scale, b_block)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
