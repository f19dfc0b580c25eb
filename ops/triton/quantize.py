"""Quantization in one block format: kernels for finite blocks, for whole rows and for whole matrices.

The kernels know only blocks `(r, c)` with `r <= c`. For other blocks they take transposed views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.layout import WHOLE, as_batch, contracts_rows, is_column_major, is_square
from fp8fn.ops.operands import Quantization, Quantized
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.amax import plan_partial_amax, plan_partial_amax_rows
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import cast, magnitude_bits, scale_constants, scale_of, storage
from fp8fn.ops.triton.views import batched, ceil_div, is_wide, strides
from fp8fn.ops.tuning.amd_kernels import QUANTIZE_WARPS

# The op's tensors behind the pointers of a launch.
_BINDS: Final = {"scales": "scale"}
# The longest row that one program keeps in registers, 64 elements a thread. A longer row is read again, from the L2.
_LONGEST_ROW: Final = 16384
# Elements of a column-major matrix from which two launches of tiles are faster than one of whole rows (H200).
_LEAST_IN_PARTS: Final = 2**24
# Columns of such a matrix that one program takes at a time; rows of no more are read once.
_TURNED_COLUMNS: Final = 256


@dataclass(frozen=True)
class BlockTile:
    """The part of the matrix that one program takes at a time."""

    rows: int
    columns: int
    num_warps: int


_PART_TILE: Final = BlockTile(rows=64, columns=128, num_warps=4)


@triton.jit
def quantize_blocks(
    x, amax, data, scales, M, N, x_b, x_m, x_n, a_b, a_m, a_n, d_b, d_m, d_n, s_b, s_m, s_n, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    GIVEN: tl.constexpr, LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of blocks `R x C`, which divide the tile; `amax` is read where it is `GIVEN`."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * tiles_n)
    tile_m = pid % (tiles_m * tiles_n) // tiles_n
    tile_n = pid % tiles_n
    rows = (tile_m * BM + tl.arange(0, BM))[:, None]
    columns = (tile_n * BN + tl.arange(0, BN))[None, :]
    inside = (rows < M) & (columns < N)
    source = x + batch * x_b + rows * x_m + columns * x_n
    if EVEN:
        values = tl.load(source).to(tl.float32)
    else:
        values = tl.load(source, mask=inside, other=0.0).to(tl.float32)

    block_rows = (tile_m * (BM // R) + tl.arange(0, BM // R))[:, None]
    block_columns = (tile_n * (BN // C) + tl.arange(0, BN // C))[None, :]
    inside_blocks = (block_rows * R < M) & (block_columns * C < N)
    blocks = tl.reshape(values, (BM // R, R, BN // C, C))
    if GIVEN:
        bits = magnitude_bits(
            tl.load(amax + batch * a_b + block_rows * a_m + block_columns * a_n, mask=inside_blocks, other=0.0)
        )
    else:
        bits = tl.max(tl.max(magnitude_bits(blocks), axis=3), axis=1)
    stored, inverse = scale_of(bits, LARGEST, EMAX, FLOOR, FORMAT)
    inverse = tl.expand_dims(tl.expand_dims(inverse, 1), 3)
    quantized = tl.reshape(cast(blocks * inverse, LARGEST, data.dtype.element_ty), (BM, BN))

    target = data + batch * d_b + rows * d_m + columns * d_n
    scale_target = scales + batch * s_b + block_rows * s_m + block_columns * s_n
    if EVEN:
        tl.store(target, quantized)
        tl.store(scale_target, stored)
    else:
        tl.store(target, quantized, mask=inside)
        tl.store(scale_target, stored, mask=inside_blocks)


@triton.jit
def quantize_rows(
    x, amax, data, scales, M, N, x_b, x_m, x_n, a_b, a_m, a_n, d_b, d_m, d_n, s_b, s_m, tiles_m,
    BM: tl.constexpr, BN: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    GIVEN: tl.constexpr, LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """`BM` whole rows: read once where `BN >= N` or `amax` is `GIVEN`, else for the maximum and again for the data."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // tiles_m
    row = pid % tiles_m * BM + tl.arange(0, BM)
    rows = row[:, None]
    source = x + batch * x_b + rows * x_m
    target = data + batch * d_b + rows * d_m
    scale_target = scales + batch * s_b + row * s_m
    columns = tl.arange(0, BN)[None, :]
    if WIDE:
        columns = columns.to(tl.int64)
    bits = tl.zeros((BM, BN), tl.int32)
    if GIVEN:
        bits += magnitude_bits(tl.load(amax + batch * a_b + row * a_m, mask=row < M, other=0.0))[:, None]
    if ONCE:
        inside = (rows < M) & (columns < N)
        values = tl.load(source + columns * x_n, mask=inside, other=0.0).to(tl.float32)
        if not GIVEN:
            bits = magnitude_bits(values)
        stored, inverse = scale_of(tl.max(bits, axis=1), LARGEST, EMAX, FLOOR, FORMAT)
        quantized = cast(values * inverse[:, None], LARGEST, data.dtype.element_ty)
        tl.store(target + columns * d_n, quantized, mask=inside)
    else:
        if not GIVEN:
            for start in range(0, N, BN):
                inside = (rows < M) & (start + columns < N)
                if EVEN:
                    values = tl.load(source + (start + columns) * x_n)
                else:
                    values = tl.load(source + (start + columns) * x_n, mask=inside, other=0.0)
                bits = tl.maximum(bits, magnitude_bits(values))
        stored, inverse = scale_of(tl.max(bits, axis=1), LARGEST, EMAX, FLOOR, FORMAT)
        for start in range(0, N, BN):
            inside = (rows < M) & (start + columns < N)
            if EVEN:
                values = tl.load(source + (start + columns) * x_n).to(tl.float32)
            else:
                values = tl.load(source + (start + columns) * x_n, mask=inside, other=0.0).to(tl.float32)
            quantized = cast(values * inverse[:, None], LARGEST, data.dtype.element_ty)
            if EVEN:
                tl.store(target + (start + columns) * d_n, quantized)
            else:
                tl.store(target + (start + columns) * d_n, quantized, mask=inside)
    tl.store(scale_target, stored, mask=row < M)


@triton.jit
def quantize_parts_of_rows(
    x, partials, data, scales, M, N, x_b, x_m, x_n, d_b, d_m, d_n, s_b, s_m, p_b, p_part, tiles_m, tiles_n, parts,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One tile of rows with one scale each, which a program reduces from the maxima of their parts."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * tiles_n)
    tile_n = pid % (tiles_m * tiles_n) // tiles_m
    row = pid % tiles_m * BM + tl.arange(0, BM)
    rows = row[:, None]
    part = tl.arange(0, PARTS)[None, :]
    maxima = tl.load(partials + batch * p_b + part * p_part + rows, mask=(part < parts) & (rows < M), other=0)
    stored, inverse = scale_of(tl.max(maxima, axis=1), LARGEST, EMAX, FLOOR, FORMAT)
    columns = (tile_n * BN + tl.arange(0, BN))[None, :]
    inside = (rows < M) & (columns < N)
    values = tl.load(x + batch * x_b + rows * x_m + columns * x_n, mask=inside, other=0.0).to(tl.float32)
    quantized = cast(values * inverse[:, None], LARGEST, data.dtype.element_ty)
    tl.store(data + batch * d_b + rows * d_m + columns * d_n, quantized, mask=inside)
    if tile_n == 0:
        tl.store(scales + batch * s_b + row * s_m, stored, mask=row < M)


@triton.jit
def quantize_whole(
    x, partials, data, scales, M, N, x_b, x_m, x_n, d_b, d_m, d_n, s_b, tiles_m, tiles_n, parts,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One tile of a matrix with one scale, which every program reduces from the partial maxima."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * tiles_n)
    tile = pid % (tiles_m * tiles_n)
    index = tl.arange(0, PARTS)
    magnitudes = tl.load(partials + batch * parts + index, mask=index < parts, other=0) & 0x7FFFFFFF
    bits = tl.max(magnitudes, axis=0)
    stored, inverse = scale_of(bits, LARGEST, EMAX, FLOOR, FORMAT)
    rows = (tile // tiles_n * BM + tl.arange(0, BM))[:, None]
    columns = (tile % tiles_n * BN + tl.arange(0, BN))[None, :]
    inside = (rows < M) & (columns < N)
    values = tl.load(x + batch * x_b + rows * x_m + columns * x_n, mask=inside, other=0.0).to(tl.float32)
    quantized = cast(values * inverse, LARGEST, data.dtype.element_ty)
    tl.store(data + batch * d_b + rows * d_m + columns * d_n, quantized, mask=inside)
    if tile == 0:
        tl.store(scales + batch * s_b, stored)


@dataclass(frozen=True, eq=False)
class _Batch:
    """A quantization as the kernels read it: batches of matrices, turned so that blocks `(r, c)` have `r <= c`."""

    x: Tensor
    out: Quantized
    target: Target
    constants: dict[str, Any]
    amax: Tensor | None

    @property
    def wide(self) -> bool:
        return is_wide(self.x, self.out.data)

    @property
    def amax_strides(self) -> dict[str, int]:
        return dict.fromkeys(("a_b", "a_m", "a_n"), 0) if self.amax is None else strides("a", self.amax)


def plan_quantize(
    q: Quantization, tile: BlockTile | None = None, *, in_parts: bool | None = None
) -> tuple[TritonLaunch, ...]:
    """Launches, in order, that fill the output in `block` from an `x` of any strides.

    No launch for an empty `x`: then there is no data, and the caller fills the scales. `in_parts`: whether programs
    take parts of whole rows that do not lie in lines; None, by the size of `x`.
    """
    if q.x.numel() == 0:
        return ()
    x, out = as_batch(q.x), q.out._replace(data=as_batch(q.out.data), scale=as_batch(q.out.scale))
    amax = None if q.amax is None else batched(as_batch(q.amax))
    if contracts_rows(q.block) or (is_square(q.block) and is_column_major(out.data)):
        x, out, amax = x.mT, out.mT, None if amax is None else amax.mT
    out = out._replace(data=batched(out.data), scale=batched(storage(out.scale)))
    batch = _Batch(batched(x), out, q.target, scale_constants(q.dtype, q.scale), amax)
    if out.block == (WHOLE, WHOLE):
        return _plan_whole(batch, tile or _tile(batch))
    if out.block[1] == WHOLE:
        if in_parts is None:
            in_parts = tile is None and batch.x.numel() >= _LEAST_IN_PARTS and batch.x.shape[2] > _TURNED_COLUMNS
        if in_parts and is_column_major(batch.x) and amax is None:
            return _plan_parts_of_rows(batch)
        return (_plan_rows(batch, tile or _row_tile(batch.x)),)
    return (_plan_blocks(batch, tile or _tile(batch)),)


def _tile(q: _Batch) -> BlockTile:
    # 256 bytes of bfloat16 along the contiguous axis, and 64 elements a thread, or a lane on AMD.
    if q.out.block[0] > 1 or is_column_major(q.x):
        return BlockTile(128, 128, QUANTIZE_WARPS if q.target.backend == "hip" else 8)
    return BlockTile(32, 128, 4)


def _row_tile(x: Tensor) -> BlockTile:
    if is_column_major(x):
        # 64 bytes of bfloat16 along the contiguous axis; more rows would leave too few programs.
        return BlockTile(32, _TURNED_COLUMNS, 8)
    width = triton.next_power_of_2(x.shape[2])
    if width <= _LONGEST_ROW:
        rows = max(1, 4096 // width)
        return BlockTile(rows, width, 8 if rows * width > 4096 else 4)
    return BlockTile(1, 8192, 8)


def _plan_blocks(q: _Batch, tile: BlockTile) -> TritonLaunch:
    (batch, m, n), (data, scales, block) = q.x.shape, q.out
    tiles_m, tiles_n = ceil_div(m, tile.rows), ceil_div(n, tile.columns)
    return TritonLaunch(
        kernel=quantize_blocks,
        grid=(batch * tiles_m * tiles_n, 1, 1),
        args={
            "x": q.x, "amax": q.amax, "data": data, "scales": scales, "M": m, "N": n,
            **strides("x", q.x), **q.amax_strides, **strides("d", data), **strides("s", scales),
            "tiles_m": tiles_m, "tiles_n": tiles_n,
        },
        constexprs={
            "BM": tile.rows, "BN": tile.columns, "R": block[0], "C": block[1],
            "EVEN": m % tile.rows == 0 and n % tile.columns == 0, "WIDE": q.wide, "GIVEN": q.amax is not None,
            **q.constants,
        },
        options={"num_warps": tile.num_warps},
        target=q.target,
        binds=_BINDS,
    )  # fmt: skip


def _plan_rows(q: _Batch, tile: BlockTile) -> TritonLaunch:
    (batch, m, n), (data, scales, _) = q.x.shape, q.out
    tiles_m = ceil_div(m, tile.rows)
    return TritonLaunch(
        kernel=quantize_rows,
        grid=(batch * tiles_m, 1, 1),
        args={
            "x": q.x, "amax": q.amax, "data": data, "scales": scales, "M": m, "N": n,
            **strides("x", q.x), **q.amax_strides, **strides("d", data),
            "s_b": scales.stride(0), "s_m": scales.stride(1), "tiles_m": tiles_m,
        },
        constexprs={
            "BM": tile.rows, "BN": tile.columns, "ONCE": tile.columns >= n,
            "EVEN": m % tile.rows == 0 and n % tile.columns == 0, "WIDE": q.wide, "GIVEN": q.amax is not None,
            **q.constants,
        },
        options={"num_warps": tile.num_warps},
        target=q.target,
        binds=_BINDS,
    )  # fmt: skip


def _plan_parts_of_rows(q: _Batch) -> tuple[TritonLaunch, TritonLaunch]:
    """The launch that finds the largest magnitudes of parts of the rows, and the one that quantizes tile by tile."""
    (batch, m, n), (data, scales, _) = q.x.shape, q.out
    tile = _PART_TILE
    amax = plan_partial_amax_rows(q.x, q.target, wide=q.wide)
    partials, parts = amax.args["partials"], amax.args["strips"]
    assert isinstance(partials, Tensor)
    assert isinstance(parts, int)
    tiles_m, tiles_n = ceil_div(m, tile.rows), ceil_div(n, tile.columns)
    quantize = TritonLaunch(
        kernel=quantize_parts_of_rows,
        grid=(batch * tiles_m * tiles_n, 1, 1),
        args={
            "x": q.x, "partials": partials, "data": data, "scales": scales, "M": m, "N": n,
            **strides("x", q.x), **strides("d", data), "s_b": scales.stride(0), "s_m": scales.stride(1),
            "p_b": partials.stride(0), "p_part": partials.stride(1), "tiles_m": tiles_m, "tiles_n": tiles_n,
            "parts": parts,
        },
        constexprs={
            "PARTS": triton.next_power_of_2(parts), "BM": tile.rows, "BN": tile.columns, "WIDE": q.wide, **q.constants,
        },
        options={"num_warps": tile.num_warps},
        target=q.target,
        binds=_BINDS,
        scratch=amax.scratch,
    )  # fmt: skip
    return amax, quantize


def _plan_whole(q: _Batch, tile: BlockTile) -> tuple[TritonLaunch, ...]:
    """The launch that finds the largest magnitude in parts, unless it is given, and the launch that quantizes."""
    (batch, m, n), (data, scales, _) = q.x.shape, q.out
    tiles_m, tiles_n = ceil_div(m, tile.rows), ceil_div(n, tile.columns)
    amax: tuple[TritonLaunch, ...] = ()
    scratch: tuple[str, ...] = ()
    binds = {**_BINDS, "partials": "amax"}
    if q.amax is None:
        amax = (plan_partial_amax(q.x, q.target, tile.rows, tile.columns, tile.num_warps, wide=q.wide),)
        partials, parts, binds, scratch = amax[0].args["partials"], amax[0].args["parts"], _BINDS, amax[0].scratch
    else:
        parts, partials = 1, q.amax.float().view(torch.int32)
    quantize = TritonLaunch(
        kernel=quantize_whole,
        grid=(batch * tiles_m * tiles_n, 1, 1),
        args={
            "x": q.x, "partials": partials, "data": data, "scales": scales, "M": m, "N": n,
            **strides("x", q.x), **strides("d", data), "s_b": scales.stride(0),
            "tiles_m": tiles_m, "tiles_n": tiles_n, "parts": parts,
        },
        constexprs={
            "PARTS": triton.next_power_of_2(parts), "BM": tile.rows, "BN": tile.columns, "WIDE": q.wide, **q.constants,
        },
        options={"num_warps": tile.num_warps},
        target=q.target,
        binds=binds,
        scratch=scratch,
    )  # fmt: skip
    return (*amax, quantize)
