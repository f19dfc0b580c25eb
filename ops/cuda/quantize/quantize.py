"""The quantizers on Hopper in CUDA C++: what they accept, their configurations, and their launches (`quantize.cu`)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime.call_cache import Call, Step, geometry
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.groups import spread_blocks, spread_unit
from fp8fn.ops.layout import Block, contracts_rows, empty_data, empty_scale, is_column_major, is_square, swap
from fp8fn.ops.targets import OCP, Target

BLOCK_SHAPES: Final[tuple[Block, ...]] = ((1, 128), (128, 1), (128, 128))
TILE_N: Final = 128
CHUNK: Final = 8
_INPUTS: Final = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
_FP8: Final = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
LARGEST_INT32: Final = 2**31 - 1
_LARGEST_GRID: Final = 65535
_ALIGNMENT: Final = 16
_L2_BYTES: Final = 50 * 2**20
_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class Tile:
    """Threads of a block and their accesses; `quantize.cu` says what each macro does.

    A tile is `2 * WARPS * ROWS` rows high: 128, but for row blocks alone any height will do.
    """

    WARPS: int = 8
    ROWS: int = 8
    BLOCKS: int = 4
    GROUP: int = 1
    LOAD: str = "CACHED"
    STORE: str = "NORMAL"
    ROW_BYTES: int = 16

    @property
    def rows(self) -> int:
        return 2 * self.WARPS * self.ROWS

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "default"


class Quantized(NamedTuple):
    """Where one orientation goes: data and scales `(..., M, N)`, as `fp8fn.ops.layout` makes them."""

    data: Tensor
    scale: Tensor

    @property
    def mT(self) -> Quantized:
        return Quantized(self.data.mT, self.scale.mT)

    @property
    def batch(self) -> Quantized:
        return Quantized(batched(self.data), batched(self.scale))


def batched(x: Tensor) -> Tensor:
    """`(..., M, N)` as `(B, M, N)`, for matrices that follow each other; keeps the strides of axes of size 1, too."""
    if x.dim() <= 3:
        return x
    return x.as_strided((math.prod(x.shape[:-2]), *x.shape[-2:]), x.stride()[-3:])


def accepts(x: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    """None where `plan_quantize` takes this call, else the reason why not."""
    if target.name != "sm90":
        return f"{target.name} is not sm90"
    if block not in BLOCK_SHAPES:
        return f"block {block} is none of {BLOCK_SHAPES}"
    if dtype not in OCP:
        return f"{dtype} is no type of the hardware"
    return accepts_rows(x.mT if is_column_major(x) else x)


def accepts_rows(x: Tensor, more_blocks: int = 0) -> str | None:
    """Why the kernel cannot address a row-major `x (..., M, N)`, in more blocks of rows than it has, or None."""
    m, n = x.shape[-2:]
    matrices = math.prod(x.shape[:-2])
    if x.stride(-1) != 1 and n > 1:
        return f"x has strides {x.stride()}, none of the last two 1"
    if max(m, n, x.stride(-2)) > LARGEST_INT32:
        return f"x has shape {tuple(x.shape)} and strides {x.stride()}, past 32 bits"
    if max(-(-m // TILE_N) + more_blocks, matrices) > _LARGEST_GRID:
        return f"x has shape {tuple(x.shape)}, more than {_LARGEST_GRID} blocks of rows or matrices"
    step = m * x.stride(-2)
    for size, stride in zip(x.shape[-3::-1], x.stride()[-3::-1], strict=True):
        if size > 1 and stride != step:
            return f"x has strides {x.stride()}: its matrices do not follow each other"
        step *= size
    return None


def call_quantize(x: Tensor, block: Block, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize(x, block)` as a call on tensors of the kind of `x (..., M, N)`, which is not empty; see `accepts`."""
    out = Quantized(empty_data(x, block, dtype), empty_scale(x, block, scale))
    launch = plan_quantize(batched(x), out.batch, block, scale, target)
    by_column = not is_square(block) and contracts_rows(block) != is_column_major(x)
    places = (0, None, None, None, None, 1, 2, None) if by_column else (0, None, None, 1, 2, None, None, None)
    return Call((Step(launch.prepare(), places),), tuple(map(geometry, out)), 2)


def call_quantize_dual(x: Tensor, block: Block, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize_dual(x, block)` for a square block or a `(1, c)`, like `call_quantize`."""
    row, col = (
        Quantized(empty_data(x, of, dtype, column_major), empty_scale(x, of, scale, column_major))
        for of, column_major in ((block, False), (swap(block), True))
    )
    launch = plan_quantize_both(batched(x), row.batch, col.batch, is_square(block), scale, target)
    places = (0, None, None, 3, 4, 1, 2, None) if is_column_major(x) else (0, None, None, 1, 2, 3, 4, None)
    return Call((Step(launch.prepare(), places),), tuple(map(geometry, (*row, *col))), 4)


def plan_quantize(
    x: Tensor, out: Quantized, block: Block, scale: str, target: Target, tile: Tile | None = None
) -> CudaLaunch:
    """The launch that quantizes a non-empty `x (B?, M, N)`; see `accepts`."""
    if is_column_major(x):
        return plan_quantize(x.mT, out.mT, (block[1], block[0]), scale, target, tile)
    by_column = contracts_rows(block)
    return plan(x, None if by_column else out, out if by_column else None, is_square(block), scale, target, tile)


def plan_quantize_both(
    x: Tensor, row: Quantized, col: Quantized, square: bool, scale: str, target: Target, tile: Tile | None = None
) -> CudaLaunch:
    """The launch that quantizes a non-empty `x (B?, M, N)` in blocks `(1, 128)` and `(128, 1)`, or `square` ones twice.

    The data of `row` is row-major, that of `col` column-major.
    """
    if is_column_major(x):
        return plan_quantize_both(x.mT, col.mT, row.mT, square, scale, target, tile)
    return plan(x, row, col, square, scale, target, tile)


def outgrows_l2(x: Tensor, times: int = 1) -> bool:
    """Whether x has more bytes than the L2 of a Hopper chip, or so many times as many.

    Then its lines may be told to be the last that leave the L2, and what is written leaves it the sooner, which is
    faster the larger x is. Of what was just written the L2 has a part: of an x of few times its size that counts more.
    """
    return x.numel() * x.element_size() > times * _L2_BYTES


def default_tile(x: Tensor, aligned: bool, source: str, both: bool, grouped: bool = False) -> Tile:
    """The fastest of the tiles that were timed, and fewer blocks where a thread needs more registers.

    From five times its size on x stays in the L2; of groups, where an x that was just written was not timed, from once,
    or three times where `both` orientations are written.
    """
    narrow = x.element_size() == 2 and aligned
    if source != "PLAIN":
        return Tile(BLOCKS=2 if narrow else 1)
    if narrow:
        times = (3 if both else 1) if grouped else 5
        return Tile(BLOCKS=4, LOAD="LAST_OUT" if outgrows_l2(x, times) else "CACHED")
    return Tile(BLOCKS=2)


def plan(
    x: Tensor, row: Quantized | None, col: Quantized | None, square: bool, scale: str, target: Target,
    tile: Tile | None = None, *, source: str = "PLAIN", other: Tensor | None = None, rstd: Tensor | None = None,
    offsets: Tensor | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch on a row-major `x`, or on what `source` of `values.cuh` makes of it, `other` and `rstd`.

    With `offsets (E,)` the rows of a matrix `x` are tokens of groups, and `col` holds them spread.
    """
    aligned = is_aligned(x) and (other is None or is_aligned(other))
    tile = tile or default_tile(x, aligned, source, row is not None and col is not None, offsets is not None)
    *batch, m, n = x.shape
    out = row or col
    assert out is not None
    macros: dict[str, int | str] = {
        **types(x, out, scale),
        "SOURCE": f"Source::{source}",
        "BY_ROW": int(row is not None),
        "BY_COLUMN": int(col is not None),
        "SQUARE": int(square),
        "EVEN": int(offsets is None and m % tile.rows == 0 and n % TILE_N == 0),
        "PARTIAL": int(n % CHUNK != 0),
        "ALIGNED": int(aligned),
        "GROUPED": int(offsets is not None),
    }
    tiles_m, groups = -(-m // tile.rows), 0
    if offsets is not None:  # one more than blocks of columns, for rows that are in no group
        groups = offsets.shape[0]
        tiles_m = spread_blocks(m, groups) + (row is not None)
        macros["SPREAD_UNIT"] = spread_unit(m, groups)
    options: dict[str, int | str] = {
        "WARPS": tile.WARPS, "ROWS": tile.ROWS, "BLOCKS": tile.BLOCKS, "GROUP": tile.GROUP,
        "LOAD": f"Load::{tile.LOAD}", "STORE": f"Store::{tile.STORE}", "ROW_BYTES": tile.ROW_BYTES,
    }  # fmt: skip
    launch = CudaLaunch(
        kernel=CudaKernel("quantize.cu", "quantize", (*macros.items(), *options.items())),
        grid=(-(-n // TILE_N), tiles_m, batch[0] if batch else 1),
        threads=32 * tile.WARPS,
        shared=0,
        args={
            "x": x, "other": other, "rstd": rstd,
            "row_data": row and row.data, "row_scale": row and row.scale,
            "col_data": col and col.data, "col_scale": col and col.scale, "offsets": offsets,
            "M": m, "N": n, "x_m": x.stride(-2),
            "other_m": 0 if other is None or other.dim() == 1 else other.stride(-2),
            "row_m": row.data.stride(-2) if row else 0,
            "row_scale_lead": row.scale.stride(-2 if square else -1) if row else 0,
            "col_n": col.data.stride(-1) if col else 0,
            "col_scale_lead": col.scale.stride(-1 if square else -2) if col else 0,
            "groups": groups,
        },
        target=target,
        options={**macros, **options},
    )  # fmt: skip
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("quantize %s %s: %s", tuple(x.shape), x.dtype, launch.describe())
    return launch


def input_type(x: Tensor) -> str:
    return f"Element::{_INPUTS[x.dtype]}"


def types(x: Tensor, out: Quantized, scale: str) -> dict[str, int | str]:
    """The macros of the element types."""
    return {
        "INPUT": input_type(x),
        "FP8": f"Fp8::{_FP8[out.data.dtype]}",
        "FORMAT": f"Format::{scale.upper()}",
    }


def is_aligned(x: Tensor) -> bool:
    """Whether every 8 columns from a multiple of 8 on load by 16 bytes; a `meta` tensor's address is 0."""
    return x.data_ptr() % _ALIGNMENT == 0 and (x.dim() == 1 or x.stride(-2) * x.element_size() % _ALIGNMENT == 0)
