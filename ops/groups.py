"""How the tokens of a grouped product lie in memory: group `g` is rows `offsets[g-1]` to `offsets[g]` of `(M, N)`.

Where a product sums over the tokens (the gradient of the experts' weights), blocks of 128 tokens with one scale must
not hold tokens of two groups. There the tokens are *spread*: each group begins at a multiple of `ROWS`, and the rest of
its last block is zeros. Group `g` begins at row `ROWS * (start_g // ROWS + g)`, with `start_g = offsets[g-1]`, which
needs no sum over the groups before it, and leaves room enough: `⌊(s + n) / R⌋ + 1 - ⌊s / R⌋ ≥ ⌈n / R⌉` for all `s` and
`n`. So the spread extent depends on the number of tokens and of groups alone, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.formats import scale_dtype
from fp8fn.ops.layout import WHOLE, Block, matrix_strides

ROWS: Final = 128


def check_offsets(op: str, offsets: Tensor, name: str, tokens: Tensor) -> None:
    """The type and shape of END offsets of `tokens`, the argument `name`; their values stay on the device."""
    if offsets.dtype != torch.int32:
        raise TypeError(f"{op}: offsets has dtype {offsets.dtype}; use int32, offsets.to(torch.int32) for one")
    if offsets.ndim != 1 or offsets.shape[0] == 0:
        given = tuple(offsets.shape)
        raise ValueError(f"{op}: offsets has shape {given}; it must be (E,), the end of each of E >= 1 groups")
    if offsets.device != tokens.device:
        raise ValueError(f"{op}: {name} is on {tokens.device} and offsets on {offsets.device}; move them to one device")


def spread_rows(rows: int, groups: int) -> int:
    """The extent of `rows` tokens in `groups` groups once they are spread."""
    return ROWS * (rows // ROWS + groups)


def most_tokens(spread: int, groups: int) -> int:
    """The largest number of tokens in `groups` groups whose spread extent is `spread`."""
    return spread - ROWS * groups + ROWS - 1


def group_of(offsets: Tensor, rows: int) -> Tensor:
    """`(rows,)`: the group of each token; the number of groups for tokens past the last one's end."""
    tokens = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, tokens, right=True)


def spread_index(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`(spread_rows,)` each: the token that lies in each row of the spread layout, and whether one does."""
    starts, first = _beginnings(offsets)
    place = torch.arange(spread_rows(rows, offsets.shape[0]), device=offsets.device)
    group = (torch.searchsorted(first, place, right=True) - 1).clamp_min(0)
    token = place - first[group] + starts[group]
    return token.clamp_max(max(rows - 1, 0)), token < offsets[group]


def spread_place(offsets: Tensor, rows: int) -> Tensor:
    """`(rows,)`: the row of the spread layout in which each token lies; those past the last group's end follow it."""
    starts, first = _beginnings(offsets)
    group = group_of(offsets, rows).clamp_max(offsets.shape[0] - 1)
    return torch.arange(rows, device=offsets.device) - starts[group] + first[group]


def empty_grouped(x: Tensor, groups: int, block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    """Uninitialised data and scales of the tokens `x (M, N)` in blocks `(ROWS, 1)`, spread, or `(-1, 1)`, as they are.

    They lie as those of `quantize` in the same block do; of `(-1, 1)` there is one row of scales a group.
    """
    rows, columns = x.shape
    scale_rows = groups
    if block[0] != WHOLE:
        rows = spread_rows(rows, groups)
        scale_rows = rows // ROWS
    stored = scale_dtype(scale)
    strides = matrix_strides((rows, columns), True, 16)
    scale_strides = matrix_strides((scale_rows, columns), False, 16 // stored.itemsize)
    return (
        torch.empty_strided((rows, columns), strides, dtype=dtype, device=x.device),
        torch.empty_strided((scale_rows, columns), scale_strides, dtype=stored, device=x.device),
    )


def _beginnings(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """`(E,)` each: the first token of each group, and the row of the spread layout in which it lies."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]]).long()
    return starts, ROWS * (starts // ROWS + torch.arange(offsets.shape[0], device=offsets.device))
