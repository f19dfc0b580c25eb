"""The definition of the grouped products, in plain PyTorch: dequantize in float32, multiply, round once.

Nothing waits for the device, and no shape depends on a value: each group is cut into pieces of `⌈M / E⌉` tokens, of
which there are at most `2E` whatever the offsets, so at most twice the multiplications that are needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.groups import counted, most_tokens, unit_of
from fp8fn.ops.layout import WHOLE, is_column_major
from fp8fn.ops.operands import Quantized
from fp8fn.ops.reference.quantize import spread as repeated
from fp8fn.ops.reference.scaled_mm import _dequantized, _widened


class Pieces(NamedTuple):
    """`group (pieces,)`, and `(pieces, size)` each: the token at a place, whether one is, its rank in the group."""

    group: Tensor
    token: Tensor
    inside: Tensor
    rank: Tensor


def scaled_grouped_mm(
    a: Quantized, b: Quantized, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`a (M, K) @ b (E, K, N)` → `(M, N)`, or `a (R, P) @ b (P, N)` summed over each group → `(E, R, N)`."""
    if b.data.ndim == 3:
        return grouped_mm_a16w8(_dequantized(*a), b, offsets, bias, out_dtype)
    with torch.autocast(a.data.device.type, enabled=False):  # which would multiply in 16 bits
        # A copy, for an op's result is no view: forward-mode differentiation fails inside PyTorch on one.
        return _by_k(a, b, offsets, bias).to(out_dtype, copy=True)


def scaled_masked_mm(a: Quantized, b: Quantized, counts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`a (E, M, K) @ b (E, K, N)` → `(E, M, N)`; rows past an expert's count are zeros, whatever `a` has there."""
    with torch.autocast(a.data.device.type, enabled=False):  # which would multiply in 16 bits
        out = _dequantized(*a) @ _dequantized(*b)
    if bias is not None:
        out = out + bias.float()[:, None]
    return torch.where(counted(counts, out.shape[1])[..., None], out, 0.0).to(out_dtype)


def grouped_mm_a16w8(x: Tensor, w: Quantized, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`x (M, K) @ w (E, K, N)` of each group → `(M, N)`."""
    with torch.autocast(x.device.type, enabled=False):
        return _by_rows(x.float(), w, offsets, bias).to(out_dtype, copy=True)


def _by_rows(values: Tensor, experts: Quantized, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Tokens past the last group's end belong to no piece: their rows are zeros."""
    b, b_scale, b_block = experts
    rows = values.shape[0]
    # One row more than there are tokens, for the places of a piece where none lies.
    out = values.new_zeros((rows + 1, b.shape[-1]), dtype=torch.float32)
    if rows == 0:
        return out[:rows]
    pieces = _pieces(offsets, rows)
    scales = b_scale.float()
    target = torch.where(pieces.inside, pieces.token, rows)
    for i in range(pieces.group.shape[0]):
        group = pieces.group[i : i + 1]
        weight = _dequantized(_selected(b, group), scales.index_select(0, group), b_block)[0]
        product = values.index_select(0, pieces.token[i]) @ weight
        if bias is not None:
            product = product + bias.index_select(0, group).float()
        out.index_copy_(0, target[i], product)
    return out[:rows]


def _by_k(left: Quantized, right: Quantized, offsets: Tensor, bias: Tensor | None) -> Tensor:
    (a, a_scale, a_block), (b, b_scale, b_block) = left, right
    (rows, summed), columns, groups = a.shape, b.shape[1], offsets.shape[0]
    out = a.new_zeros((groups, rows, columns), dtype=torch.float32)
    size = a_block[1]
    spread = size != WHOLE
    tokens = most_tokens(summed, groups, size) if spread else summed
    if tokens > 0:
        pieces = _pieces(offsets, tokens)
        # The place of each token, and the place of its scales.
        place, block = pieces.token, pieces.group[:, None].expand_as(pieces.token)
        if spread:
            starts, _ = _borders(offsets, tokens)
            start, group = starts[pieces.group][:, None], pieces.group[:, None]
            unit = unit_of(summed, groups, size)
            place = (unit * (start // unit + group) + pieces.rank).clamp_max(summed - 1)
            block = (start // size + group + pieces.rank // size).clamp_max(a_scale.shape[1] - 1)
        wide_a, wide_b = _widened(a), _widened(b)
        a_scale = repeated(a_scale.float(), a.shape, (a_block[0], 1))
        b_scale = repeated(b_scale.float(), b.shape, (1, b_block[1]))
        for i in range(pieces.group.shape[0]):
            # Not a product with zeros: the tokens of another group may be NaN.
            part = wide_a.index_select(1, place[i]) * a_scale.index_select(1, block[i])
            other = wide_b.index_select(0, place[i]) * b_scale.index_select(0, block[i])
            inside = pieces.inside[i]
            product = torch.where(inside, part, 0.0) @ torch.where(inside[:, None], other, 0.0)
            out.index_add_(0, pieces.group[i : i + 1], product[None])  # one row at a time: no order is left open
    return out if bias is None else out + bias.float()[:, None]


def _pieces(offsets: Tensor, rows: int) -> Pieces:
    """Group `g` takes the pieces from `starts[g] // size + g` on, which leaves room enough (ops/groups.py)."""
    groups, device = offsets.shape[0], offsets.device
    size = max(-(-rows // groups), 1)
    starts, ends = _borders(offsets, rows)
    first = starts // size + torch.arange(groups, device=device)
    piece = torch.arange(rows // size + groups, device=device)
    group = (torch.searchsorted(first, piece, right=True) - 1).clamp_min(0)
    rank = ((piece - first[group]) * size)[:, None] + torch.arange(size, device=device)
    token = starts[group][:, None] + rank
    return Pieces(group, token.clamp(0, rows - 1), token < ends[group][:, None], rank.clamp_min(0))


def _borders(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """First token of each group and the one behind its last, within the tokens there are."""
    ends = offsets.long().clamp(0, rows)
    return torch.cat([ends.new_zeros(1), ends[:-1]]), ends


def _selected(b: Tensor, index: Tensor) -> Tensor:
    """`b.index_select(0, index)` stored as `b` is; as bytes, for FP8 has no such kernel everywhere."""
    if is_column_major(b):
        return _selected(b.mT, index).mT
    return b.view(torch.uint8).index_select(0, index).view(b.dtype)
