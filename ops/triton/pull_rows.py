"""Rows out of the memory of several GPUs, each from the place that the device has computed for it, in one launch."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import scale_value
from fp8fn.ops.triton.views import ceil_div, is_wide

_BLOCK: Final = 128
_TYPES: Final = {
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8, torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16, torch.float32: tl.float32,
}  # fmt: skip


class Places(NamedTuple):
    """Where each row lies.

    Args:
        rank: Rank of each row, int32; -1 for none.
        row: Its number there, int64.
        absent: The value of rows of rank -1, a float32 of no dimension.
    """

    rank: Tensor
    row: Tensor
    absent: Tensor


class Source(NamedTuple):
    """Matrices of equal type and width in the memory of all ranks, whose rows follow each other without a gap.

    Args:
        addresses: Address of each rank's matrix, int64.
        dtype: Their type. FP8 data is multiplied by its scales.
        scales_at: How many bytes after the data its scales lie: a byte for each (1, 128) block, as e8m0.
    """

    addresses: Tensor
    dtype: torch.dtype
    scales_at: int = 0


@triton.jit
def pull_rows(
    out, rank, row, absent, addresses, N, blocks, scales_at,
    BLOCKS: tl.constexpr, TYPE: tl.constexpr, LARGEST: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A row's `BLOCKS` blocks of 128 elements, from one rank. Scaled ones are at most `LARGEST`."""
    at = tl.program_id(0)
    source = tl.load(rank + at)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < N
    if source < 0:
        value = tl.full((BLOCKS, 128), 0, tl.float32) + tl.load(absent)
    else:
        address = tl.load(addresses + source)
        there = tl.load(row + at)
        data = tl.cast(address, tl.pointer_type(TYPE)) + there * N
        if ALIGNED:
            data = tl.multiple_of(data, 16)
        value = tl.load(data + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            scales = tl.cast(address + scales_at, tl.pointer_type(tl.uint8)) + there * blocks
            value *= scale_value(tl.load(scales + block, mask=block < blocks, other=127))[:, None]
            # FP8 rounds a type's largest numbers beyond it. A NaN is neither larger nor smaller, and stays.
            value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    if WIDE:
        at = at.to(tl.int64)
    tl.store(out + at * N + column, value.to(out.dtype.element_ty), mask=inside)


def plan_pull_rows(source: Source, places: Places, out: Tensor, target: Target) -> TritonLaunch:
    """The launch that fills `out (R, N)` with the rows at `places`."""
    rows, n = out.shape
    blocks = ceil_div(n, _BLOCK)
    scaled = source.dtype.itemsize == 1
    here = min(triton.next_power_of_2(blocks), 32)
    constexprs: dict[str, Any] = {
        "BLOCKS": here, "TYPE": _TYPES[source.dtype], "LARGEST": torch.finfo(out.dtype).max, "SCALED": scaled,
        "ALIGNED": n * source.dtype.itemsize % 16 == 0, "WIDE": is_wide(out),
    }  # fmt: skip
    return TritonLaunch(
        kernel=pull_rows,
        grid=(rows, ceil_div(blocks, here), 1),
        args={
            "out": out, "rank": places.rank, "row": places.row, "absent": places.absent, "addresses": source.addresses,
            "N": n, "blocks": blocks, "scales_at": source.scales_at,
        },
        constexprs=constexprs,
        options={"num_warps": 4 if here * _BLOCK >= 2048 else 2},
        target=target,
    )  # fmt: skip
