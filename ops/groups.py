"""How the tokens of a grouped product lie in memory: group `g` is rows `offsets[g-1]` to `offsets[g]` of `(M, N)`.

Where a product sums over the tokens (the gradient of the experts' weights), blocks of 128 tokens with one scale must not
hold tokens of two groups. There the tokens are *spread*: each group begins at a multiple of `ROWS`, and what is left of
its last block is zeros. Group `g` begins at row `ROWS * (start_g // ROWS + g)`, with `start_g = offsets[g-1]`, which
needs no sum over the groups before it, and leaves room enough: `⌊(s + n) / R⌋ + 1 - ⌊s / R⌋ ≥ ⌈n / R⌉` for all `s`, `n`.
So the spread extent depends on the number of tokens and of groups alone, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

ROWS: Final = 128


def spread_rows(rows: int, groups: int) -> int:
    """The extent of `rows` tokens in `groups` groups once they are spread."""
    return ROWS * (rows // ROWS + groups)


def group_of(offsets: Tensor, rows: int) -> Tensor:
    """`(rows,)`: the group of each token; the number of groups for tokens past the last one's end."""
    tokens = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, tokens, right=True)


def spread_index(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`(spread_rows,)` each: the token that lies in each row of the spread layout, and whether one does."""
    groups = offsets.shape[0]
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]]).long()
    first = ROWS * (starts // ROWS + torch.arange(groups, device=offsets.device))
    place = torch.arange(spread_rows(rows, groups), device=offsets.device)
    group = (torch.searchsorted(first, place, right=True) - 1).clamp_min(0)
    token = place - first[group] + starts[group]
    return token.clamp_max(max(rows - 1, 0)), token < offsets[group]
