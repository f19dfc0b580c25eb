"""The largest magnitude of each block, without a quantizer: for blocks whose parts lie on several processes.

The kernels know only blocks `(r, c)` with `r <= c`. For other blocks they take transposed views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.layout import WHOLE, Block, as_batch, contracts_rows, is_column_major, is_square
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import magnitude_bits
from fp8fn.ops.triton.views import batched, ceil_div, is_wide, strides

# Partial maxima of a matrix: enough programs for 132 to 304 cores, few enough for one program to reduce.
_PARTIALS: Final = 512
# Columns that a program takes of its rows, where that makes programs enough.
_STRIP: Final = 1024
# Parts of a row at most: with 1024 the programs that reduce them spill 1444 registers on sm90.
_ROW_PARTS: Final = 128


@triton.jit
def amax_blocks(
    x, amax, M, N, x_b, x_m, x_n, a_b, a_m, a_n, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of blocks `R x C`, which divide the tile."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * tiles_n)
    tile_m = pid % (tiles_m * tiles_n) // tiles_n
    tile_n = pid % tiles_n
    rows = (tile_m * BM + tl.arange(0, BM))[:, None]
    columns = (tile_n * BN + tl.arange(0, BN))[None, :]
    values = tl.load(x + batch * x_b + rows * x_m + columns * x_n, mask=(rows < M) & (columns < N), other=0.0)
    bits = tl.reshape(magnitude_bits(values), (BM // R, R, BN // C, C))
    largest = tl.max(tl.max(bits, axis=3), axis=1).to(tl.float32, bitcast=True)
    block_rows = (tile_m * (BM // R) + tl.arange(0, BM // R))[:, None]
    block_columns = (tile_n * (BN // C) + tl.arange(0, BN // C))[None, :]
    inside = (block_rows * R < M) & (block_columns * C < N)
    tl.store(amax + batch * a_b + block_rows * a_m + block_columns * a_n, largest, mask=inside)


@triton.jit
def amax_rows(x, amax, M, N, x_b, x_m, x_n, a_b, a_m, tiles_m, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr):
    """`BM` whole rows."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // tiles_m
    row = pid % tiles_m * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)[None, :]
    if WIDE:
        columns = columns.to(tl.int64)
    source = x + batch * x_b + row[:, None] * x_m
    bits = tl.zeros((BM, BN), tl.int32)
    for start in range(0, N, BN):
        inside = (row[:, None] < M) & (start + columns < N)
        bits = tl.maximum(bits, magnitude_bits(tl.load(source + (start + columns) * x_n, mask=inside, other=0.0)))
    tl.store(amax + batch * a_b + row * a_m, tl.max(bits, axis=1).to(tl.float32, bitcast=True), mask=row < M)


@triton.jit
def partial_amax(
    x, partials, M, N, x_b, x_m, x_n, tiles_m, tiles_n, parts, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr
):
    """The largest magnitude of every `parts`-th tile, as bits."""
    part = tl.program_id(0) % parts
    batch = tl.program_id(0) // parts
    if WIDE:
        batch = batch.to(tl.int64)
    bits = tl.zeros((BM, BN), tl.int32)
    for tile in range(part, tiles_m * tiles_n, parts):
        rows = (tile // tiles_n * BM + tl.arange(0, BM))[:, None]
        columns = (tile % tiles_n * BN + tl.arange(0, BN))[None, :]
        if WIDE:
            rows = rows.to(tl.int64)
            columns = columns.to(tl.int64)
        inside = (rows < M) & (columns < N)
        values = tl.load(x + batch * x_b + rows * x_m + columns * x_n, mask=inside, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(values))
    tl.store(partials + tl.program_id(0), tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit
def partial_amax_rows(
    x, partials, M, N, x_b, x_m, x_n, p_b, p_strip, tiles_m, strips,
    BM: tl.constexpr, BN: tl.constexpr, STRIP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of `BM` rows in one strip of `STRIP` columns, as bits."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * strips)
    strip = pid % (tiles_m * strips) // tiles_m
    row = pid % tiles_m * BM + tl.arange(0, BM)
    source = x + batch * x_b + row[:, None] * x_m
    bits = tl.zeros((BM, BN), tl.int32)
    for start in range(0, STRIP, BN):
        columns = strip * STRIP + start + tl.arange(0, BN)[None, :]
        values = tl.load(source + columns * x_n, mask=(row[:, None] < M) & (columns < N), other=0.0)
        bits = tl.maximum(bits, magnitude_bits(values))
    tl.store(partials + batch * p_b + strip * p_strip + row, tl.max(bits, axis=1), mask=row < M)


def plan_amax(x: Tensor, block: Block, amax: Tensor, target: Target) -> tuple[TritonLaunch, ...]:
    """Launches, in order, that fill `amax` from a non-empty `x` of any strides.

    A whole matrix is reduced to the maxima of parts of it first.
    """
    x, amax = batched(as_batch(x)), batched(as_batch(amax))
    if block == (WHOLE, WHOLE):
        first = plan_partial_amax(x.mT if is_column_major(x) else x, target, 32, 128, 4, wide=is_wide(x))
        partials = first.args["partials"]
        assert isinstance(partials, Tensor)
        rows = partials.view(torch.float32)[:, None]
        return first, _plan_rows(rows, amax, target, {"x": "partials"})
    if contracts_rows(block) or (is_square(block) and is_column_major(x)):
        x, amax, block = x.mT, amax.mT, (block[1], block[0])
    if block[1] == WHOLE:
        return (_plan_rows(x, amax, target),)
    return (_plan_blocks(x, block, amax, target),)


def plan_partial_amax(
    x: Tensor, target: Target, rows: int, columns: int, num_warps: int, *, wide: bool
) -> TritonLaunch:
    """The launch that finds the maxima of parts of each matrix of a batch, `partials (B, parts)`, as bits."""
    batch, m, n = x.shape
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, columns)
    parts = min(tiles_m * tiles_n, _PARTIALS)
    return TritonLaunch(
        kernel=partial_amax,
        grid=(batch * parts, 1, 1),
        args={
            "x": x, "partials": torch.empty((batch, parts), dtype=torch.int32, device=x.device), "M": m, "N": n,
            **strides("x", x), "tiles_m": tiles_m, "tiles_n": tiles_n, "parts": parts,
        },
        constexprs={"BM": rows, "BN": columns, "WIDE": wide},
        options={"num_warps": num_warps},
        target=target,
        scratch=("partials",),
    )  # fmt: skip


def plan_partial_amax_rows(x: Tensor, target: Target, *, wide: bool) -> TritonLaunch:
    """The launch that finds the largest magnitudes of parts of each row, `partials (B, parts, M)`, as bits."""
    (batch, m, n), rows, columns = x.shape, 128, 128
    tiles_m = ceil_div(m, rows)
    strip = _STRIP if batch * tiles_m * ceil_div(n, _STRIP) >= 2 * target.cores else _STRIP // 2
    strip = max(strip, triton.next_power_of_2(ceil_div(n, _ROW_PARTS)))
    strips = ceil_div(n, strip)
    partials = torch.empty((batch, strips, m), dtype=torch.int32, device=x.device)
    return TritonLaunch(
        kernel=partial_amax_rows,
        grid=(batch * tiles_m * strips, 1, 1),
        args={
            "x": x, "partials": partials, "M": m, "N": n, **strides("x", x), "p_b": partials.stride(0),
            "p_strip": partials.stride(1), "tiles_m": tiles_m, "strips": strips,
        },
        constexprs={"BM": rows, "BN": columns, "STRIP": strip, "WIDE": wide},
        options={"num_warps": 8},
        target=target,
        scratch=("partials",),
    )  # fmt: skip


def _plan_rows(x: Tensor, amax: Tensor, target: Target, binds: Mapping[str, str] | None = None) -> TritonLaunch:
    (batch, m, n), rows = x.shape, 32 if is_column_major(x) else 4
    return TritonLaunch(
        kernel=amax_rows,
        grid=(batch * ceil_div(m, rows), 1, 1),
        args={
            "x": x, "amax": amax, "M": m, "N": n, **strides("x", x), "a_b": amax.stride(0), "a_m": amax.stride(1),
            "tiles_m": ceil_div(m, rows),
        },
        constexprs={"BM": rows, "BN": 8192 // rows, "WIDE": is_wide(x)},
        options={"num_warps": 4},
        target=target,
        binds=binds or {},
    )  # fmt: skip


def _plan_blocks(x: Tensor, block: Block, amax: Tensor, target: Target) -> TritonLaunch:
    (batch, m, n), rows = x.shape, 128 if block[0] > 1 or is_column_major(x) else 32
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, 128)
    return TritonLaunch(
        kernel=amax_blocks,
        grid=(batch * tiles_m * tiles_n, 1, 1),
        args={
            "x": x, "amax": amax, "M": m, "N": n, **strides("x", x), **strides("a", amax),
            "tiles_m": tiles_m, "tiles_n": tiles_n,
        },
        constexprs={"BM": rows, "BN": 128, "R": block[0], "C": block[1], "WIDE": is_wide(x)},
        options={"num_warps": 8 if rows == 128 else 4},
        target=target,
    )  # fmt: skip
