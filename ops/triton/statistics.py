"""Statistics of a quantized operand in one launch: every program sums its tiles, and the last one to end sums these.

The launch returns at once unless the row is due, so that a captured graph may hold it in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.formats import fp8_max
from fp8fn.ops.layout import WHOLE, as_batch, is_column_major
from fp8fn.ops.operands import Quantized
from fp8fn.ops.statistics import TOLERANCE, Column, Watched, least_exponent, mantissa_bits
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import magnitude_bits, scale_value, storage
from fp8fn.ops.triton.views import batched, ceil_div, is_wide, strides

# Three to four programs for each of the 132 cores of an H100 or H200; a power of two, as `tl.arange` needs.
PROGRAMS: Final = 512
SUMS: Final = 8
_COLUMNS: Final = {column.name: int(column) for column in Column}


@dataclass(frozen=True, eq=False)
class Row:
    """A row of statistics, and the memory that one launch at a time uses.

    Args:
        row: Row of `statistics.WIDTH` columns, float64.
        sums: Sums of each program, `(PROGRAMS, SUMS)` in float64.
        ended: How many programs have ended, int32; 0 before and after a launch.
    """

    row: Tensor
    sums: Tensor
    ended: Tensor


@triton.jit
def statistics(
    data, scales, x, other, rstd, row, sums, ended, M, N, elements,
    d_b, d_m, d_n, s_b, s_m, s_n, x_b, x_m, x_n, o_b, o_m, o_n, r_b, r_m, r_n, tiles_m, tiles_n, tiles, programs,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, SOURCE: tl.constexpr, WIDE: tl.constexpr,
    LARGEST: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr, SATURATES: tl.constexpr,
    PROGRAMS: tl.constexpr, SUMS: tl.constexpr,
    ELEMENTS: tl.constexpr, SATURATED: tl.constexpr, FLUSHED: tl.constexpr, AMAX: tl.constexpr, SIGNAL: tl.constexpr,
    NOISE: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr, BEGUN: tl.constexpr, DUE: tl.constexpr,
):  # fmt: skip
    """The columns of `row`, from the tiles `BM x BN` of the operand."""
    pid = tl.program_id(0)
    if tl.load(row + DUE) != 0:
        saturated = tl.zeros((BM, BN), tl.int32)
        flushed = tl.zeros((BM, BN), tl.int32)
        bits = tl.zeros((BM, BN), tl.int32)
        signal = tl.zeros((BM, BN), tl.float64)
        noise = tl.zeros((BM, BN), tl.float64)
        for tile in range(pid, tiles, programs):
            batch = tile // (tiles_m * tiles_n)
            rows = (tile % (tiles_m * tiles_n) // tiles_n * BM + tl.arange(0, BM))[:, None]
            columns = (tile % tiles_n * BN + tl.arange(0, BN))[None, :]
            if WIDE:
                batch = batch.to(tl.int64)
                rows = rows.to(tl.int64)
                columns = columns.to(tl.int64)
            inside = (rows < M) & (columns < N)
            code = tl.load(data + batch * d_b + rows * d_m + columns * d_n, mask=inside, other=0.0).to(tl.float32)
            stored = tl.load(scales + batch * s_b + rows // R * s_m + columns // C * s_n, mask=inside, other=0)
            scale = scale_value(stored)
            value = code.to(tl.float64) * scale.to(tl.float64)
            if SOURCE == "codes":
                exact = value
                if SATURATES:
                    saturated += (inside & (tl.abs(code) == LARGEST)).to(tl.int32)
                flushed += (inside & (code == 0)).to(tl.int32)
                exponent = tl.maximum((magnitude_bits(code) >> 23) - 127, LEAST) - MANTISSA
                spacing = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
                error = spacing.to(tl.float64) * scale.to(tl.float64)
                noise += tl.where(inside, error * error / 12, 0)
            else:
                at = batch * x_b + rows * x_m + columns * x_n
                given = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
                if SOURCE != "x":
                    beside = tl.load(other + batch * o_b + rows * o_m + columns * o_n, mask=inside, other=0.0)
                    if SOURCE == "silu_mul":
                        given = given / (1 + tl.exp(-given)) * beside.to(tl.float32)
                    else:
                        factor = tl.load(rstd + batch * r_b + rows * r_m + columns * r_n, mask=inside, other=0.0)
                        given = given * factor * beside.to(tl.float32)
                exact = given.to(tl.float64)
                saturated += (inside & (tl.abs(exact) > scale.to(tl.float64) * LIMIT)).to(tl.int32)
                flushed += (inside & (given != 0) & (code == 0)).to(tl.int32)
                error = exact - value
                noise += tl.where(inside, error * error, 0)
            bits = tl.maximum(bits, tl.where(inside, magnitude_bits(exact), 0))
            signal += tl.where(inside, exact * exact, 0)
        mine = sums + pid * SUMS
        tl.store(mine + SATURATED, tl.sum(tl.sum(saturated, axis=1), axis=0).to(tl.float64))
        tl.store(mine + FLUSHED, tl.sum(tl.sum(flushed, axis=1), axis=0).to(tl.float64))
        tl.store(mine + AMAX, tl.max(tl.max(bits, axis=1), axis=0).to(tl.float64))
        tl.store(mine + SIGNAL, tl.sum(tl.sum(signal, axis=1), axis=0))
        tl.store(mine + NOISE, tl.sum(tl.sum(noise, axis=1), axis=0))
        # The stores of all threads come before the count, and the last program reads them after it.
        tl.debug_barrier()
        before = tl.atomic_add(ended, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == programs - 1:
            program = tl.arange(0, PROGRAMS)
            all_sums = sums + program * SUMS
            own = program < programs
            total = tl.sum(tl.load(all_sums + SATURATED, mask=own, other=0.0, cache_modifier=".cg"), axis=0)
            tl.store(row + SATURATED, total)
            total = tl.sum(tl.load(all_sums + FLUSHED, mask=own, other=0.0, cache_modifier=".cg"), axis=0)
            tl.store(row + FLUSHED, total)
            most = tl.max(tl.load(all_sums + AMAX, mask=own, other=0.0, cache_modifier=".cg"), axis=0)
            tl.store(row + AMAX, most.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64))
            total = tl.sum(tl.load(all_sums + SIGNAL, mask=own, other=0.0, cache_modifier=".cg"), axis=0)
            tl.store(row + SIGNAL, total)
            total = tl.sum(tl.load(all_sums + NOISE, mask=own, other=0.0, cache_modifier=".cg"), axis=0)
            tl.store(row + NOISE, total)
            tl.store(row + ELEMENTS, tl.full((), 0, tl.float64) + elements)
            tl.store(row + EXACT, tl.full((), SOURCE != "codes", tl.float64))
            tl.store(row + STEP, tl.load(row + BEGUN))
            tl.store(row + DUE, 0.0)
            tl.store(ended, 0)


def plan_statistics(watched: Watched, into: Row, target: Target) -> TritonLaunch:
    """The launch that fills a row of an operand with elements."""
    data, scale, block = watched.q
    tensors = [data, storage(scale), *_inputs(watched)]
    tensors = [batched(as_batch(tensor)) for tensor in tensors]
    if is_column_major(tensors[0]):
        tensors, block = [tensor.mT for tensor in tensors], (block[1], block[0])
    out = Quantized(tensors[0], tensors[1], block)
    batch, m, n = out.data.shape
    rows, columns = 16, 128
    tiles_m, tiles_n = ceil_div(m, rows), ceil_div(n, columns)
    tiles = batch * tiles_m * tiles_n
    programs = min(tiles, PROGRAMS)
    s_b, s_m, s_n = out.scale.stride()
    absent = dict.fromkeys(("b", "m", "n"), 0)
    given = dict(zip(("x", "o", "r"), tensors[2:], strict=False))
    steps: dict[str, Any] = {**strides("d", out.data)}
    steps |= {"s_b": s_b, "s_m": 0 if block[0] == WHOLE else s_m, "s_n": 0 if block[1] == WHOLE else s_n}
    for name in ("x", "o", "r"):
        steps |= strides(name, given[name]) if name in given else {f"{name}_{axis}": 0 for axis in absent}
    dtype = data.dtype
    return TritonLaunch(
        kernel=statistics,
        grid=(programs, 1, 1),
        args={
            "data": out.data, "scales": out.scale, "x": given.get("x"), "other": given.get("o"), "rstd": given.get("r"),
            "row": into.row, "sums": into.sums, "ended": into.ended, "M": m, "N": n, "elements": data.numel(),
            **steps, "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles, "programs": programs,
        },
        constexprs={
            "BM": rows, "BN": columns, "R": max(block[0], 1), "C": max(block[1], 1), "SOURCE": watched.source,
            "WIDE": is_wide(*tensors), "LARGEST": fp8_max(dtype), "LIMIT": fp8_max(dtype) * TOLERANCE,
            "LEAST": least_exponent(dtype), "MANTISSA": mantissa_bits(dtype), "SATURATES": watched.saturates,
            "PROGRAMS": PROGRAMS, "SUMS": SUMS, **_COLUMNS,
        },
        options={"num_warps": 8},
        target=target,
    )  # fmt: skip


def _inputs(watched: Watched) -> list[Tensor]:
    """The inputs as tensors of the data's shape; what they repeat has a stride of 0."""
    shape = watched.q.data.shape
    if watched.source == "rms_norm":
        x, weight, rstd = watched.inputs
        return [x, weight.expand(shape), rstd[..., None].expand(shape)]
    return [*watched.inputs]
