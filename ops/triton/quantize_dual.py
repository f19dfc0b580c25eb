"""Quantization along both axes from one read, in one launch: row blocks for one product, column blocks for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from fp8fn.ops.layout import BLOCKS, WHOLE, Block, as_batch, contracts_rows, is_square
from fp8fn.ops.operands import Quantization
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import cast, magnitude_bits, scale_constants, scale_of, storage
from fp8fn.ops.triton.views import batched, ceil_div, is_wide
from fp8fn.ops.tuning.amd_kernels import QUANTIZE_DUAL, QUANTIZE_WARPS

DUAL_BLOCKS: Final[tuple[Block, ...]] = tuple(block for block in BLOCKS if block[0] == 1 and block[1] != WHOLE)


@dataclass(frozen=True)
class DualTile:
    """The part of the matrix that one program takes; both sides are multiples of the block."""

    rows: int = 128
    columns: int = 128
    num_warps: int = 8
    options: tuple[tuple[str, int], ...] = ()


@triton.jit
def quantize_dual(
    x, row, row_scales, col, col_scales, M, N, x_b, x_m, x_n, row_b, row_m, row_n, rs_b, rs_m, rs_n,
    col_b, col_m, col_n, cs_b, cs_m, cs_n, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, SQUARE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile, in blocks `1 x C` into `row` and in blocks `C x 1`, or if SQUARE `C x C`, into `col`."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    batch = pid // (tiles_m * tiles_n)
    tile_m = pid % (tiles_m * tiles_n) // tiles_n
    tile_n = pid % tiles_n
    rows = (tile_m * BM + tl.arange(0, BM))[:, None]
    columns = (tile_n * BN + tl.arange(0, BN))[None, :]
    block_rows = (tile_m * (BM // C) + tl.arange(0, BM // C))[:, None]
    block_columns = (tile_n * (BN // C) + tl.arange(0, BN // C))[None, :]
    inside = (rows < M) & (columns < N)
    source = x + batch * x_b + rows * x_m + columns * x_n
    if EVEN:
        values = tl.load(source)
    else:
        values = tl.load(source, mask=inside, other=0.0)

    # Store the rows before computing the columns, which need the same registers.
    by_row = tl.reshape(values, (BM, BN // C, C)).to(tl.float32)
    row_stored, inverse = scale_of(tl.max(magnitude_bits(by_row), axis=2), LARGEST, EMAX, FLOOR, FORMAT)
    row_values = tl.reshape(cast(by_row * inverse[:, :, None], LARGEST, row.dtype.element_ty), (BM, BN))
    row_target = row + batch * row_b + rows * row_m + columns * row_n
    rs_target = row_scales + batch * rs_b + rows * rs_m + block_columns * rs_n
    if EVEN:
        tl.store(row_target, row_values)
        tl.store(rs_target, row_stored)
    else:
        tl.store(row_target, row_values, mask=inside)
        tl.store(rs_target, row_stored, mask=(rows < M) & (block_columns * C < N))

    if SQUARE:
        by_square = tl.reshape(values, (BM // C, C, BN // C, C)).to(tl.float32)
        bits = tl.max(tl.max(magnitude_bits(by_square), axis=3), axis=1)
        col_stored, inverse = scale_of(bits, LARGEST, EMAX, FLOOR, FORMAT)
        inverse = tl.expand_dims(tl.expand_dims(inverse, 1), 3)
        col_values = tl.reshape(cast(by_square * inverse, LARGEST, col.dtype.element_ty), (BM, BN))
        cs_target = col_scales + batch * cs_b + block_rows * cs_m + block_columns * cs_n
        scaled = (block_rows * C < M) & (block_columns * C < N)
    else:
        by_column = tl.reshape(values, (BM // C, C, BN)).to(tl.float32)
        col_stored, inverse = scale_of(tl.max(magnitude_bits(by_column), axis=1), LARGEST, EMAX, FLOOR, FORMAT)
        col_values = tl.reshape(cast(by_column * inverse[:, None, :], LARGEST, col.dtype.element_ty), (BM, BN))
        cs_target = col_scales + batch * cs_b + block_rows * cs_m + columns * cs_n
        scaled = (block_rows * C < M) & (columns < N)
    col_target = col + batch * col_b + rows * col_m + columns * col_n
    if EVEN:
        tl.store(col_target, col_values)
        tl.store(cs_target, col_stored)
    else:
        tl.store(col_target, col_values, mask=inside)
        tl.store(cs_target, col_stored, mask=scaled)


def plan_quantize_dual(q: Quantization, tile: DualTile | None = None) -> tuple[TritonLaunch]:
    """The launch that fills outputs in blocks `(1, c)` and `(c, 1)`, or `(c, c)`, from a non-empty `x`.

    For blocks `(c, 1)` and `(c, c)` the kernel reads the transposed views.
    """
    source, outs, square = q.x, q.outs, is_square(q.blocks[-1])
    if contracts_rows(q.block) and square:
        source, outs = source.mT, tuple(out.mT for out in outs)
    elif contracts_rows(q.block):
        outs = outs[::-1]
    (row, row_scales, block), (col, col_scales, _) = outs
    if block not in DUAL_BLOCKS:
        raise ValueError(f"block is {block}; one read gives both formats for {DUAL_BLOCKS} only: quantize twice")
    if q.x.numel() == 0:
        raise ValueError(f"x has shape {tuple(q.x.shape)}: nothing to launch")
    tile = tile or _tile(q)
    names = ("row", "row_scales", "col", "col_scales")
    if contracts_rows(q.block) and not square:
        names = (*names[2:], *names[:2])
    x, row, col = (batched(as_batch(matrix)) for matrix in (source, row, col))
    row_scales, col_scales = (batched(storage(as_batch(scales))) for scales in (row_scales, col_scales))
    batch, m, n = x.shape
    tiles_m, tiles_n = ceil_div(m, tile.rows), ceil_div(n, tile.columns)
    tensors = {"x": x, "row": row, "rs": row_scales, "col": col, "cs": col_scales}
    strides = {f"{name}_{axis}": t.stride(i) for name, t in tensors.items() for i, axis in enumerate("bmn")}
    launch = TritonLaunch(
        kernel=quantize_dual,
        grid=(batch * tiles_m * tiles_n, 1, 1),
        args={
            "x": x, "row": row, "row_scales": row_scales, "col": col, "col_scales": col_scales, "M": m, "N": n,
            **strides, "tiles_m": tiles_m, "tiles_n": tiles_n,
        },
        constexprs={
            "BM": tile.rows, "BN": tile.columns, "C": block[1], "SQUARE": int(square),
            "EVEN": m % tile.rows == 0 and n % tile.columns == 0, "WIDE": is_wide(x, row, col),
            **scale_constants(q.dtype, q.scale),
        },
        options={"num_warps": tile.num_warps, **dict(tile.options)},
        target=q.target,
        binds=dict(zip(names, ("data", "scale", "dual_data", "dual_scale"), strict=True)),
    )  # fmt: skip
    return (launch,)


def _tile(q: Quantization) -> DualTile:
    # (16384, 8192) on an H200: 2.47 TB/s with 4 warps, 1.65 with 8, 1.34 with 16. With masks, and on sm89, 4 spill.
    even = q.m % 128 == 0 and q.n % 128 == 0
    if q.target.arch in QUANTIZE_DUAL and even and 128 in q.block:  # 86 registers spill with blocks of 32
        return DualTile(num_warps=QUANTIZE_WARPS, options=QUANTIZE_DUAL[str(q.target.arch)])
    return DualTile(num_warps=4 if q.target.name == "sm90" and even else 8)
