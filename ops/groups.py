"""How the tokens of a grouped product lie in memory: group `g` is rows `offsets[g-1]` to `offsets[g]` of `(M, N)`.

Where a product sums over the tokens (the gradient of the experts' weights), neither what one instruction multiplies nor
what has one scale may hold tokens of two groups. There the tokens are *spread*: each group begins at a multiple of a
`unit` of rows, and zeros follow its tokens up to where the next begins, in its last token's unit and at most one more.
A group's first `block` tokens have one scale, the next have another. Where the unit is less than the block, a group's
last block ends with the `STEP` rows of its last token: what follows is the next group's, and a product must not
multiply it.

Squares of 128 tokens and 128 columns begin at a group's first token too, and lie as blocks of 128 tokens do.

In blocks of `ROWS` the unit is `ROWS` for groups of 4 blocks or more in the mean, `M // ROWS >= 4 * E`, and `STEP` for
smaller ones. In multiples of 128 rows 64 groups of 260 tokens would take 24,576, in those of 32 they take 18,688; of
large groups that is little, and a block that begins at a whole line of memory is read faster. In MX's blocks of `STEP`
the unit is always `STEP`, so that the scales of row `r` are in row `r // STEP`, as they are in a plain matrix.

With `start_g = offsets[g-1]`, group `g` begins at row `unit * (start_g // unit + g)`, and at row `start_g // block + g`
of the scales. That needs no sum over the groups before it, and leaves room enough, with `R` for either:
`⌊(s + n) / R⌋ + 1 - ⌊s / R⌋ ≥ ⌈n / R⌉` for all `s` and `n`. So the unit and the extents depend on the number of tokens
and of groups alone, and nothing waits for the device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE, Block, blocks_along, is_square, matrix_strides, scale_dtype
from fp8fn.ops.values import can_be_read

# Tokens with one scale, and the bytes of a line of memory.
ROWS: Final = 128
# Tokens with one scale in MX, the K of one FP8 product of a tensor core, and the bytes of a sector of memory.
STEP: Final = 32
# The blocks of a group, in the mean, from which on it begins at a multiple of `ROWS`.
LARGE: Final = 4


def check_offsets(op: str, offsets: Tensor, name: str, tokens: Tensor) -> None:
    """The type and shape of END offsets of `tokens`, the argument `name`; their values stay on the device."""
    if offsets.dtype != torch.int32:
        raise TypeError(f"{op}: offsets has dtype {offsets.dtype}; use int32, offsets.to(torch.int32) for one")
    if offsets.ndim != 1 or offsets.shape[0] == 0:
        given = tuple(offsets.shape)
        raise ValueError(f"{op}: offsets has shape {given}; it must be (E,), the end of each of E >= 1 groups")
    if offsets.device != tokens.device:
        raise ValueError(f"{op}: {name} is on {tokens.device} and offsets on {offsets.device}; move them to one device")


def check_counts(op: str, counts: Tensor, rows: Tensor) -> None:
    """The type and shape of the counts of `rows (E, M, K)` that belong to each expert; their values stay on the device.

    Nothing reads them here: the kernels take a negative count as 0, and one past M as M.
    """
    if counts.dtype != torch.int32:
        raise TypeError(f"{op}: counts has dtype {counts.dtype}; use int32, counts.to(torch.int32) for one")
    if counts.ndim != 1 or counts.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{op}: counts has shape {tuple(counts.shape)} and a {tuple(rows.shape)} has {rows.shape[0]} experts; it "
            f"must be ({rows.shape[0]},), the number of rows of each expert"
        )
    if counts.device != rows.device:
        raise ValueError(f"{op}: a is on {rows.device} and counts on {counts.device}; move them to one device")


def check_ends(op: str, offsets: Tensor) -> None:
    """ValueError where the ends descend, or one is negative. On the CPU only: a GPU would have to be waited for."""
    if not offsets.is_cpu or offsets.ndim != 1 or not can_be_read(offsets):
        return
    ends = offsets.tolist()
    if ends[0] < 0:
        raise ValueError(f"{op}: offsets has {ends[0]} for group 0; give where each group ends, ascending from 0")
    for group, (before, end) in enumerate(pairwise(ends), 1):
        if end < before:
            raise ValueError(
                f"{op}: offsets descends: group {group} ends at {end}, and group {group - 1} at {before}; give where "
                "each group ends, equal to the end before it for an empty group"
            )


def spread_unit(rows: int, groups: int, block: int = ROWS) -> int:
    """At multiples of how many rows the groups of `rows` tokens in blocks of `block` begin: the one place that decides.

    No branch, hence no guard on symbolic sizes: what is compiled for one unit serves the other. No `min` and no `max`
    either: where a graph comes from a cache, torch evaluates its guards by Python's own, which branch.
    """
    return STEP if block == STEP else _unit_for(rows // (ROWS * LARGE * groups))


def unit_of(spread: int, groups: int, block: int = ROWS) -> int:
    """The unit of a layout whose extent is `spread`: below 17/4 blocks a group it is `STEP`, from 5 on it is `ROWS`."""
    return STEP if block == STEP else _unit_for(spread // (ROWS * (LARGE + 1) * groups))


def _unit_for(times: int) -> int:
    """`ROWS` if there are as many rows as large groups have, `times >= 1`; `STEP` for 0."""
    return ROWS - (ROWS - STEP) * (1 // (1 + times))


def spread_rows(rows: int, groups: int, block: int = ROWS) -> int:
    """The extent of `rows` tokens in `groups` groups once they are spread."""
    unit = spread_unit(rows, groups, block)
    return unit * (rows // unit + groups)


def spread_blocks(rows: int, groups: int, block: int = ROWS) -> int:
    """The number of blocks, each with its scales, of `rows` tokens in `groups` groups; some may be of no token."""
    return rows // block + groups


def most_tokens(spread: int, groups: int, block: int = ROWS) -> int:
    """The largest number of tokens in `groups` groups whose spread extent is `spread`."""
    unit = unit_of(spread, groups, block)
    return spread - unit * groups + unit - 1


def counted(counts: Tensor, rows: int) -> Tensor:
    """`(E, rows)`: which of the `rows` of each expert come before its count."""
    return torch.arange(rows, device=counts.device) < counts[:, None]


def group_of(offsets: Tensor, rows: int) -> Tensor:
    """`(rows,)`: the group of each token; the number of groups for tokens past the last one's end."""
    tokens = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, tokens, right=True)


def spread_place(offsets: Tensor, rows: int, block: int = ROWS) -> Tensor:
    """`(rows,)`: the row of the spread layout in which each token lies; those past the last group's end follow it."""
    return _place(offsets, rows, spread_unit(rows, offsets.shape[0], block))


def block_of(offsets: Tensor, rows: int, block: int = ROWS) -> Tensor:
    """`(rows,)`: the block, of `spread_blocks`, whose scales hold for each token."""
    return _place(offsets, rows, block) // block


def _place(offsets: Tensor, rows: int, unit: int) -> Tensor:
    """`spread_place` in multiples of `unit`."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]]).long()
    first = unit * (starts // unit + torch.arange(offsets.shape[0], device=offsets.device))
    group = group_of(offsets, rows).clamp_max(offsets.shape[0] - 1)
    return torch.arange(rows, device=offsets.device) - starts[group] + first[group]


def empty_grouped(x: Tensor, groups: int, block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    """Empty data and scales of `x (M, N)`: spread in `(128, 1)`, `(32, 1)`, `(128, 128)`; in `(-1, 1)` in place.

    They lie as those of `quantize` in the same block do, in squares column-major; of `(-1, 1)` there is one row of
    scales a group.
    """
    rows, columns = x.shape
    scale_rows = groups
    if block[0] != WHOLE:
        rows, scale_rows = spread_rows(rows, groups, block[0]), spread_blocks(rows, groups, block[0])
    stored = scale_dtype(scale)
    strides = matrix_strides((rows, columns), True, 16)
    scale_shape = (scale_rows, blocks_along(columns, block[1]))
    scale_strides = matrix_strides(scale_shape, is_square(block), 16 // stored.itemsize)
    return (
        torch.empty_strided((rows, columns), strides, dtype=dtype, device=x.device),
        torch.empty_strided(scale_shape, scale_strides, dtype=stored, device=x.device),
    )
