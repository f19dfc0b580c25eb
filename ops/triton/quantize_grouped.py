"""Quantization of grouped tokens: 128 or 32 tokens of a group, alone or beside row blocks, and whole groups.

A program takes one block of the spread layout (`fp8fn.ops.groups`) and a tile of columns. It finds its tokens from the
offsets, which stay on the device. So groups of any sizes make programs of one size, and each group has at least one
block. The last block of a group writes up to where the next group begins. Tokens past the last offset take the rows
that the spread layout leaves behind the last group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.groups import ROWS, spread_blocks, spread_unit
from fp8fn.ops.layout import WHOLE, is_square
from fp8fn.ops.operands import Quantization
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import cast, magnitude_bits, scale_constants, scale_of, storage
from fp8fn.ops.triton.views import ceil_div, is_wide
from fp8fn.ops.tuning.amd_kernels import QUANTIZE_WARPS

# The op's tensors behind the pointers of a launch.
_BINDS: Final = {"scales": "scale"}
_DUAL_BINDS: Final = {"row_data": "data", "row_scales": "scale", "data": "dual_data", "scales": "dual_scale"}


@dataclass(frozen=True)
class GroupedTile:
    """The columns of one block of tokens that one program takes: for the dual kernel a multiple of the block's rows."""

    columns: int
    num_warps: int


# 64 elements a thread spill on no target, also for ragged sizes and a column-major `x`; twice as many spill on sm90.
TILE: Final = GroupedTile(64, 4)
DUAL_TILE: Final = GroupedTile(128, 8)
# For the scales of whole groups. Rows of other lengths than multiples of 16 spill by it, 14 to 72 registers; matrices
# of more than 2**31 elements 2 to 44; and float32 on sm120 14.
WHOLE_TILE: Final = GroupedTile(128, 4)
# Squares have a tile of their columns, or of several.
SQUARE_TILE: Final = GroupedTile(128, 8)
# The tile for blocks of 32 tokens.
MX_TILE: Final = GroupedTile(128, 4)


@triton.jit
def clamped(offset, M):
    return tl.minimum(tl.maximum(offset, 0), M)


@triton.jit
def start_of(offsets, group, M, o_e):
    """The first token of a group."""
    return clamped(tl.load(offsets + (group - 1) * o_e, mask=group > 0, other=0), M)


@triton.jit
def tokens_of(offsets, block, M, E, o_e, BM: tl.constexpr, GROUPS: tl.constexpr):
    """A block of the spread layout: its first token, the end of its group, the group, and the group's first block."""
    index = tl.arange(0, GROUPS)
    begins = start_of(offsets, tl.where(index < E, index, 0), M, o_e) // BM + index
    group = tl.max(tl.where((index < E) & (begins <= block), index, 0), axis=0)
    start = start_of(offsets, group, M, o_e)
    end = clamped(tl.load(offsets + group * o_e), M)
    first = start // BM + group
    return start + (block - first) * BM, end, group, first


@triton.jit
def rows_of(token, end, group, M, E, UNIT: tl.constexpr):
    """The rows of a block in the spread layout: its first one, and the first one of the next group, or the end."""
    return (token // UNIT + group) * UNIT, (tl.where(group == E - 1, M, end) // UNIT + group + 1) * UNIT


@triton.jit
def column_scales(
    bits, BM: tl.constexpr, BN: tl.constexpr, SQUARE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The scales of `BN` columns from the bits of their largest magnitudes, or of their squares, and the inverses."""
    if SQUARE:
        stored, of_squares = scale_of(tl.max(tl.reshape(bits, (BN // BM, BM)), axis=1), LARGEST, EMAX, FLOOR, FORMAT)
        inverse = tl.reshape(tl.broadcast_to(of_squares[:, None], (BN // BM, BM)), (BN,))
    else:
        stored, inverse = scale_of(bits, LARGEST, EMAX, FLOOR, FORMAT)
    return stored, inverse


@triton.jit
def store_squares(scales, stored, tile_n, N, s_n, BM: tl.constexpr, BN: tl.constexpr):
    """The scales of a tile's squares that have columns; `scales` points at those of the tile's tokens."""
    squares = tile_n * (BN // BM) + tl.arange(0, BN // BM)
    tl.store(scales + squares * s_n, stored, mask=squares * BM < N)


@triton.jit
def quantize_spread(
    x, offsets, data, scales, M, N, E, x_m, x_n, o_e, d_m, d_n, s_m, s_n, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, SQUARE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One block of `BM` tokens and `BN` columns, in `BM x 1` or if SQUARE `BM x BM`; rows without a token are zeros."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    block = pid // tiles_n
    token, end, group, _ = tokens_of(offsets, block, M, E, o_e, BM, GROUPS)
    first, limit = rows_of(token, end, group, M, E, UNIT)
    row = tl.arange(0, BM)[:, None]
    column = pid % tiles_n * BN + tl.arange(0, BN)
    columns = column[None, :]
    taken = token + row < end
    source = x + (token + row) * x_m + columns * x_n
    if EVEN:
        values = tl.load(source, mask=taken, other=0.0).to(tl.float32)
    else:
        values = tl.load(source, mask=taken & (columns < N), other=0.0).to(tl.float32)

    bits = tl.max(magnitude_bits(values), axis=0)
    stored, inverse = column_scales(bits, BM, BN, SQUARE, LARGEST, EMAX, FLOOR, FORMAT)
    # If the scale is NaN, the zeros of rows without a token would become NaN.
    scaled = tl.where(taken, values * inverse[None, :], 0.0)
    quantized = cast(scaled, LARGEST, data.dtype.element_ty)
    target = data + (first + row) * d_m + columns * d_n
    scale_target = scales + block * s_m + column * s_n
    written = first + row < limit
    if EVEN:
        tl.store(target, quantized, mask=written)
    else:
        tl.store(target, quantized, mask=written & (columns < N))
    if SQUARE:
        store_squares(scales + block * s_m, stored, pid % tiles_n, N, s_n, BM, BN)
    elif EVEN:
        tl.store(scale_target, stored)
    else:
        tl.store(scale_target, stored, mask=column < N)


@triton.jit
def quantize_spread_dual(
    x, offsets, row_data, row_scales, data, scales, M, N, E, x_m, x_n, o_e, row_m, row_n, rs_m, rs_n,
    d_m, d_n, s_m, s_n, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, SQUARE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """As `quantize_spread`, and the same tokens in blocks `1 x BM` at their own rows of `row_data`."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    block = pid // tiles_n
    tile_n = pid % tiles_n
    token, end, group, _ = tokens_of(offsets, block, M, E, o_e, BM, GROUPS)
    first, limit = rows_of(token, end, group, M, E, UNIT)
    row = tl.arange(0, BM)[:, None]
    rows = token + row
    column = tile_n * BN + tl.arange(0, BN)
    columns = column[None, :]
    row_columns = (tile_n * (BN // BM) + tl.arange(0, BN // BM))[None, :]
    taken = rows < end
    inside = rows < tl.where(group == E - 1, M, end)  # tokens past the last offset lie behind the last group's
    source = x + rows * x_m + columns * x_n
    if EVEN:
        values = tl.load(source, mask=inside, other=0.0)
    else:
        values = tl.load(source, mask=inside & (columns < N), other=0.0)

    # Store the rows before computing the columns, which need the same registers.
    by_row = tl.reshape(values, (BM, BN // BM, BM)).to(tl.float32)
    row_stored, inverse = scale_of(tl.max(magnitude_bits(by_row), axis=2), LARGEST, EMAX, FLOOR, FORMAT)
    row_values = tl.reshape(cast(by_row * inverse[:, :, None], LARGEST, row_data.dtype.element_ty), (BM, BN))
    row_target = row_data + rows * row_m + columns * row_n
    tl.store(row_scales + rows * rs_m + row_columns * rs_n, row_stored, mask=inside & (row_columns * BM < N))
    if EVEN:
        tl.store(row_target, row_values, mask=inside)
    else:
        tl.store(row_target, row_values, mask=inside & (columns < N))

    by_column = tl.where(taken, values, 0.0).to(tl.float32)
    bits = tl.max(magnitude_bits(by_column), axis=0)
    stored, inverse = column_scales(bits, BM, BN, SQUARE, LARGEST, EMAX, FLOOR, FORMAT)
    quantized = cast(tl.where(taken, by_column * inverse[None, :], 0.0), LARGEST, data.dtype.element_ty)
    target = data + (first + row) * d_m + columns * d_n
    scale_target = scales + block * s_m + column * s_n
    written = first + row < limit
    if EVEN:
        tl.store(target, quantized, mask=written)
    else:
        tl.store(target, quantized, mask=written & (columns < N))
    if SQUARE:
        store_squares(scales + block * s_m, stored, tile_n, N, s_n, BM, BN)
    elif EVEN:
        tl.store(scale_target, stored)
    else:
        tl.store(scale_target, stored, mask=column < N)


@triton.jit
def block_amax(
    x, offsets, partials, M, N, E, x_m, x_n, o_e, p_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each column in one block of tokens, as bits."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    block = pid // tiles_n
    token, end, _, _ = tokens_of(offsets, block, M, E, o_e, BM, GROUPS)
    rows = token + tl.arange(0, BM)[:, None]
    column = pid % tiles_n * BN + tl.arange(0, BN)
    columns = column[None, :]
    values = tl.load(x + rows * x_m + columns * x_n, mask=(rows < end) & (columns < N), other=0.0)
    tl.store(partials + block * p_m + column, tl.max(magnitude_bits(values), axis=0), mask=column < N)


@triton.jit
def group_scales(
    offsets, partials, scales, M, N, o_e, p_m, s_m, s_n, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The scales of one group; its largest magnitudes replace those of its first block."""
    group = tl.program_id(0) // tiles_n
    if WIDE:
        group = group.to(tl.int64)
    start = start_of(offsets, group, M, o_e)
    blocks = tl.cdiv(clamped(tl.load(offsets + group * o_e), M) - start, BM)
    column = tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    columns = column[None, :]
    source = partials + (start // BM + group) * p_m + columns
    bits = tl.zeros((BLOCKS, BN), tl.int32)
    for begin in range(0, blocks, BLOCKS):
        rows = begin + tl.arange(0, BLOCKS)[:, None]
        if WIDE:
            rows = rows.to(tl.int64)
        bits = tl.maximum(bits, tl.load(source + rows * p_m, mask=(rows < blocks) & (columns < N), other=0))
    largest = tl.max(bits, axis=0)
    stored, _ = scale_of(largest, LARGEST, EMAX, FLOOR, FORMAT)
    tl.store(scales + group * s_m + column * s_n, stored, mask=column < N)
    tl.store(partials + (start // BM + group) * p_m + column, largest, mask=column < N)


@triton.jit
def quantize_by_group(
    x, offsets, partials, data, M, N, E, x_m, x_n, o_e, p_m, d_m, d_n, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One block of tokens with the scales of its group, at the tokens' own rows; zeros past the last offset."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    token, end, group, first = tokens_of(offsets, pid // tiles_n, M, E, o_e, BM, GROUPS)
    rows = token + tl.arange(0, BM)[:, None]
    column = pid % tiles_n * BN + tl.arange(0, BN)
    columns = column[None, :]
    taken = rows < end
    inside = (rows < tl.where(group == E - 1, M, end)) & (columns < N)
    bits = tl.load(partials + first * p_m + column, mask=column < N, other=0)
    _, inverse = scale_of(bits, LARGEST, EMAX, FLOOR, FORMAT)
    values = tl.load(x + rows * x_m + columns * x_n, mask=taken & (columns < N), other=0.0).to(tl.float32)
    scaled = tl.where(taken, values * inverse[None, :], 0.0)
    tl.store(data + rows * d_m + columns * d_n, cast(scaled, LARGEST, data.dtype.element_ty), mask=inside)


def default_tile(q: Quantization) -> GroupedTile:
    """The tile that serves where no table has the tokens."""
    if 32 in q.block:
        return MX_TILE
    if not q.dual:
        tile = SQUARE_TILE if _is_square(q) else TILE
        if q.block[0] == WHOLE and _fits_whole_tile(q):
            return WHOLE_TILE
        # With 4 warps the scales of whole groups spill 18 registers on sm120.
        return replace(tile, num_warps=8) if q.block[0] == WHOLE and q.target.arch in (120, 121) else tile
    even = q.n % DUAL_TILE.columns == 0
    return replace(DUAL_TILE, num_warps=QUANTIZE_WARPS) if q.target.backend == "hip" and even else DUAL_TILE


def _fits_whole_tile(q: Quantization) -> bool:
    x, target = q.x, q.target
    large = is_wide(x) or (x.dtype == torch.float32 and target.arch in (120, 121))
    return target.backend == "cuda" and q.n % 16 == 0 and not large


def plan_quantize_grouped(q: Quantization, tile: GroupedTile | None = None) -> tuple[TritonLaunch, ...]:
    """Launches, in order, that fill the output from `x (M, N)` and `offsets (E,)` of any strides.

    No launch for an empty `x`: the caller fills both.
    """
    if q.x.numel() == 0:
        return ()
    tile = tile or default_tile(q)
    if q.block[0] == WHOLE:
        return _plan_by_group(q, tile)
    data, scales = q.out.data, storage(q.out.scale)
    programs, args, constexprs = _grouped(q, data, tile)
    launch = TritonLaunch(
        kernel=quantize_spread,
        grid=(programs, 1, 1),
        args={
            "x": q.x, "offsets": q.offsets, "data": data, "scales": scales, **args, **_strides("d", data),
            **_strides("s", scales), "tiles_n": ceil_div(q.n, tile.columns),
        },
        constexprs={**constexprs, **_spread(q, tile), **scale_constants(q.dtype, q.scale)},
        options={"num_warps": tile.num_warps},
        target=q.target,
        binds=_BINDS,
    )  # fmt: skip
    return (launch,)


def plan_quantize_grouped_dual(q: Quantization, tile: GroupedTile | None = None) -> tuple[TritonLaunch]:
    """The launch that fills rows in `(1, c)` and spread columns in `(c, 1)` or `(c, c)` from `x (M, N)`, not empty."""
    if q.x.numel() == 0:
        raise ValueError(f"x has shape {tuple(q.x.shape)}: nothing to launch")
    tile = tile or default_tile(q)
    (row, row_scales, _), (data, scales, _) = q.outs
    programs, args, constexprs = _grouped(q, data, tile)
    row_scales, scales = storage(row_scales), storage(scales)
    launch = TritonLaunch(
        kernel=quantize_spread_dual,
        grid=(programs, 1, 1),
        args={
            "x": q.x, "offsets": q.offsets, "row_data": row, "row_scales": row_scales, "data": data, "scales": scales,
            **args, **_strides("row", row), **_strides("rs", row_scales), **_strides("d", data),
            **_strides("s", scales), "tiles_n": ceil_div(q.n, tile.columns),
        },
        constexprs={**constexprs, **_spread(q, tile), **scale_constants(q.dtype, q.scale)},
        options={"num_warps": tile.num_warps},
        target=q.target,
        binds=_DUAL_BINDS,
    )  # fmt: skip
    return (launch,)


def _plan_by_group(q: Quantization, tile: GroupedTile) -> tuple[TritonLaunch, ...]:
    x, offsets, data, scales = q.x, q.offsets, q.out.data, storage(q.out.scale)
    assert offsets is not None
    tiles_n = ceil_div(q.n, tile.columns)
    partials = torch.empty((spread_blocks(q.m, q.groups), q.n), dtype=torch.int32, device=x.device)
    programs, args, constexprs = _grouped(q, data, tile)
    constants = scale_constants(q.dtype, q.scale)
    options = {"num_warps": tile.num_warps}
    reach = {"p_m": partials.stride(0)}
    amax = TritonLaunch(
        kernel=block_amax,
        grid=(programs, 1, 1),
        args={"x": x, "offsets": offsets, "partials": partials, **args, **reach, "tiles_n": tiles_n},
        constexprs=constexprs,
        options=options,
        target=q.target,
        binds=_BINDS,
        scratch=("partials",),
    )
    reduce = TritonLaunch(
        kernel=group_scales,
        grid=(q.groups * tiles_n, 1, 1),
        args={
            "offsets": offsets, "partials": partials, "scales": scales, "M": q.m, "N": q.n, "o_e": offsets.stride(0),
            **reach, **_strides("s", scales), "tiles_n": tiles_n,
        },
        constexprs={"BM": ROWS, "BN": tile.columns, "BLOCKS": 32, "WIDE": constexprs["WIDE"], **constants},
        options=options,
        target=q.target,
        binds=_BINDS,
        scratch=("partials",),
    )  # fmt: skip
    quantize = TritonLaunch(
        kernel=quantize_by_group,
        grid=(programs, 1, 1),
        args={
            "x": x, "offsets": offsets, "partials": partials, "data": data, **args, **reach, **_strides("d", data),
            "tiles_n": tiles_n,
        },
        constexprs={**constexprs, **constants},
        options=options,
        target=q.target,
        binds=_BINDS,
        scratch=("partials",),
    )  # fmt: skip
    return amax, reduce, quantize


def _grouped(q: Quantization, data: Tensor, tile: GroupedTile) -> tuple[int, dict[str, int], dict[str, Any]]:
    """The number of programs, and the arguments of every kernel over the blocks of the spread layout."""
    assert q.offsets is not None
    rows = _block_rows(q)
    programs = spread_blocks(q.m, q.groups, rows) * ceil_div(q.n, tile.columns)
    args = {"M": q.m, "N": q.n, "E": q.groups, **_strides("x", q.x), "o_e": q.offsets.stride(0)}
    constexprs = {
        "BM": rows,
        "BN": tile.columns,
        "GROUPS": triton.next_power_of_2(q.groups),
        "WIDE": is_wide(q.x, data),
    }
    return programs, args, constexprs


def _spread(q: Quantization, tile: GroupedTile) -> dict[str, Any]:
    """The further arguments of the kernels that write spread tokens."""
    unit = spread_unit(q.m, q.groups, _block_rows(q))
    return {"EVEN": q.n % tile.columns == 0, "UNIT": unit, "SQUARE": _is_square(q)}


def _is_square(q: Quantization) -> bool:
    """Whether the output by groups has squares."""
    return is_square(q.blocks[-1])


def _block_rows(q: Quantization) -> int:
    """The tokens that one program takes: those of a block, or for the scales of whole groups as many."""
    return ROWS if WHOLE in q.block else max(q.block)


def _strides(prefix: str, x: Tensor) -> dict[str, int]:
    return {f"{prefix}_m": x.stride(0), f"{prefix}_n": x.stride(1)}
