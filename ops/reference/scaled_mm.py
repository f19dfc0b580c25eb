"""The definition of the scaled product, in plain PyTorch: dequantize in float32, multiply, add the bias, round once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fp8fn.ops.layout import Block, is_column_major
from fp8fn.ops.operands import Quantized
from fp8fn.ops.reference.quantize import spread


def scaled_mm(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, batch_invariant: bool = False
) -> Tensor:
    """`a (..., M, K) @ b (..., K, N) + bias (N)` → `(..., M, N)`, row-major."""
    with torch.autocast(a.data.device.type, enabled=False):  # which would multiply in 16 bits
        out = matmul(_dequantized(*a), _dequantized(*b), batch_invariant)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def matmul(a: Tensor, b: Tensor, by_rows: bool) -> Tensor:
    """`a @ b`; with `by_rows` each row alone, since PyTorch orders the sums of a product by its number of rows."""
    if not by_rows or a.numel() == 0 or b.numel() == 0:
        return a @ b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    out = a.new_empty(*batch, a.shape[-2], b.shape[-1])
    for at in torch.cartesian_prod(*map(torch.arange, (*batch, a.shape[-2]))).reshape(out[..., 0].numel(), -1).tolist():
        row = a[tuple(at)].clone()[None]  # memory of its own, aligned alike
        out[tuple(at)] = (row @ b[tuple(at[:-1])])[0]
    return out


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
