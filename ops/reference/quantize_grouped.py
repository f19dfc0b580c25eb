"""The definition of quantization by groups of tokens: what `quantize` makes of each group's rows alone.

An offset outside of `[0, M]` is taken as the nearer of the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.formats import fp8_max
from fp8fn.ops.groups import block_of, empty_grouped, group_of, spread_place
from fp8fn.ops.layout import WHOLE, Block, swap
from fp8fn.ops.reference.quantize import quantize, spread


def quantize_grouped(x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    """`x (M, N)` in groups of rows → data and scales, spread; in `(-1, 1)` in place, with one row of scales a group."""
    rows, groups = x.shape[0], offsets.shape[0]
    offsets = offsets.clamp(0, rows)
    data, scales = empty_grouped(x, groups, block, dtype, scale)
    whole, parts = block[0] == WHOLE, scales.shape[0]
    group = group_of(offsets, rows)
    part = torch.where(group == groups, parts, group if whole else block_of(offsets, rows, block[0]))
    values = x.float()
    # As bits, which order as magnitudes do with NaN above Inf: a maximum of integers is the same in any order.
    bits = values.view(torch.int32) & 0x7FFFFFFF
    amax = bits.new_zeros(parts + 1, x.shape[1])
    amax.scatter_reduce_(0, part[:, None].expand_as(bits), bits, "amax")
    # A part has the scales of a matrix of one row, its largest magnitudes.
    scales.copy_(quantize(amax[:parts, None].view(torch.float32), block, dtype, scale)[1].squeeze(1))
    inverse = (1.0 / spread(scales.float(), (parts, x.shape[1]), (1, block[1]))).index_select(
        0, part.clamp_max(parts - 1)
    )
    largest = fp8_max(dtype)
    quantized = (values * inverse).clamp_(-largest, largest).to(dtype).view(torch.uint8)
    quantized.masked_fill_(group[:, None] == groups, 0)
    if whole:
        data.view(torch.uint8).copy_(quantized)
    else:
        data.view(torch.uint8).zero_().index_copy_(0, spread_place(offsets, rows, block[0]), quantized)
    return data, scales


def quantize_grouped_dual(
    x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, scale: str, dual_block: Block | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize(x, (1, c))` of all rows, and `quantize_grouped(x, offsets, dual_block)`, by default in `(c, 1)`."""
    columns = quantize_grouped(x, offsets, dual_block or swap(block), dtype, scale)
    return *quantize(x, block, dtype, scale), *columns


def dequantize_grouped(data: Tensor, scale: Tensor, offsets: Tensor, block: Block, rows: int) -> Tensor:
    """`(rows, N)` in float32, tokens in the order they had before they were spread; zeros past the last offset."""
    offsets = offsets.clamp(0, rows)
    group, groups = group_of(offsets, rows), offsets.shape[0]
    if block[0] == WHOLE:
        values = data.float() * scale.float().index_select(0, group.clamp_max(groups - 1))
    else:
        scales = spread(scale.float(), data.shape, (1, block[1])).index_select(0, block_of(offsets, rows, block[0]))
        values = data.float().index_select(0, spread_place(offsets, rows, block[0])) * scales
    return values.masked_fill(group[:, None] == groups, 0)
