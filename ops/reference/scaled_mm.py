"""The definition of the scaled product, in plain PyTorch: dequantize in float32, multiply, add the bias, round once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fp8fn.ops.layout import Block, is_column_major
from fp8fn.ops.operand import Quantized
from fp8fn.ops.reference.quantize import spread


def scaled_mm(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`a (..., M, K) @ b (..., K, N) + bias (N)` → `(..., M, N)`, row-major."""
    with torch.autocast(a.data.device.type, enabled=False):  # which would multiply in 16 bits
        out = _dequantized(*a) @ _dequantized(*b)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _dequantized(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    return _widened(data) * spread(scale.float(), data.shape, block)


def _widened(data: Tensor) -> Tensor:
    """`data.float()`; on the CPU by a table of the 256 values, where PyTorch's conversion takes three times as long."""
    if data.device.type != "cpu":
        return data.float()
    if is_column_major(data):
        return _widened(data.mT).mT
    return _values(data.dtype).index_select(0, data.reshape(-1).view(torch.uint8).int()).view(data.shape)


@cache
def _values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()
