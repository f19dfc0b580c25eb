"""Matrices of bytes in the other memory layout: rows become contiguous along the other axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.views import batched, ceil_div, is_wide


@dataclass(frozen=True)
class TurnTile:
    """The part of a matrix that one program turns."""

    rows: int = 128
    columns: int = 128
    num_warps: int = 8


@triton.jit
def turn(
    x, out, M, N, x_b, x_m, out_b, out_n, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of `x`, whose rows are contiguous, to `out`, whose columns are."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * tiles_n)
    rows = (pid % (tiles_m * tiles_n) // tiles_n * BM + tl.arange(0, BM))[:, None]
    columns = (pid % tiles_n * BN + tl.arange(0, BN))[None, :]
    inside = (rows < M) & (columns < N)
    values = tl.load(x + batch * x_b + rows * x_m + columns, mask=inside, other=0)
    tl.store(out + batch * out_b + columns * out_n + rows, values, mask=inside)


def plan_turn(x: Tensor, out: Tensor, target: Target, tile: TurnTile | None = None) -> tuple[TritonLaunch]:
    """The launch that copies `x (B?, M, N)` with contiguous rows to `out`, whose columns are contiguous."""
    tile = tile or TurnTile()
    source, copy = (batched(matrix.view(torch.uint8)) for matrix in (x, out))
    batch, m, n = source.shape
    tiles_m, tiles_n = ceil_div(m, tile.rows), ceil_div(n, tile.columns)
    launch = TritonLaunch(
        kernel=turn,
        grid=(batch * tiles_m * tiles_n, 1, 1),
        args={
            "x": source, "out": copy, "M": m, "N": n, "x_b": source.stride(0), "x_m": source.stride(1),
            "out_b": copy.stride(0), "out_n": copy.stride(2), "tiles_m": tiles_m, "tiles_n": tiles_n,
        },
        constexprs={"BM": tile.rows, "BN": tile.columns, "WIDE": is_wide(source, copy)},
        options={"num_warps": tile.num_warps},
        target=target,
    )  # fmt: skip
    return (launch,)
