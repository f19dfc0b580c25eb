"""Whole columns quantized on Hopper, of matrices and of groups of rows: which kernel takes them, and the launch of
`quantize_columns.cu`, which has few rows and what the copy engine does not take.

Columns that are contiguous are the rows of the transpose, and `quantize_rows.cu` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm.scaled_mm import SHARED_LIMIT
from fp8fn.ops.cuda.quantize import quantize_rows, stream_columns, walk_columns
from fp8fn.ops.cuda.quantize.column_panels import SECTOR, scale_lead, typical_rows
from fp8fn.ops.cuda.quantize.quantize import CHUNK, Quantized, accepts_rows, batched, is_aligned, types
from fp8fn.ops.cuda.runtime.call_cache import Call, Step, geometry
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale, is_column_major, swap
from fp8fn.ops.targets import OCP, Target

_LARGEST_GRID: Final = 65535
_SMALL: Final = 512  # rows; up to them the kernel without rings is as fast or faster


@dataclass(frozen=True)
class Tile:
    """`quantize_columns.cu` says what each is; PANEL in bytes of a row."""

    PANEL: int = 128
    CLUSTER: int = 1
    WARPS: int = 8
    RESIDENT: int = 4
    LOAD: str = "PAST_L1"

    @property
    def overhead(self) -> int:
        """Bytes of shared memory beside the rows: maxima of a panel for each warp and for the block, and scales."""
        return self.PANEL * (self.WARPS + 2) + 2 * self.PANEL

    @property
    def most_rows(self) -> int:
        """That a cluster can keep."""
        return self.CLUSTER * ((SHARED_LIMIT - self.overhead) // self.PANEL // SECTOR * SECTOR)

    def rows(self, rows: int) -> int:
        """That a block keeps of a matrix or group of so many."""
        share = -(-rows // (self.CLUSTER * SECTOR)) * SECTOR
        return min(share, self.most_rows // self.CLUSTER)


# The first that keeps the rows with three blocks or more on a multiprocessor, which hide each other's waits.
_TILES: Final = (
    (384, Tile(128)), (768, Tile(128, 2)), (1536, Tile(128, 4)), (3072, Tile(128, 8)), (8192, Tile(64, 8, 8, 3)),
)  # fmt: skip
_TALL: Final = Tile(64, 8, 16, 1)
# In the place of those above from 3072 rows on, where each GPC has 16 multiprocessors: faster on an H200.
_LARGE_GPCS: Final = ((6144, Tile(128, 16)), (13312, Tile(64, 16)))
_CORES_OF_LARGE_GPCS: Final = 132


def default_tile(rows: int, cores: int) -> Tile:
    """For a matrix or a group of so many rows, on a chip of so many multiprocessors."""
    tiles = (*_TILES[:-1], *_LARGE_GPCS) if cores >= _CORES_OF_LARGE_GPCS else _TILES
    return next((tile for most, tile in tiles if rows <= most), _TALL)


def accepts(x: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    """None where `call_quantize` takes this call, else the reason why not."""
    if block == (1, WHOLE):
        return accepts(x.mT, swap(block), dtype, target)
    if block != (WHOLE, 1):
        return f"block {block} is no whole column"
    if is_column_major(x):
        return quantize_rows.accepts(x.mT, dtype, target)
    return _refusal(x, dtype, target)


def accepts_grouped(x: Tensor, offsets: Tensor, dtype: torch.dtype, target: Target) -> str | None:
    """None where `call_quantize_grouped` takes a non-empty `x (M, N)`, else the reason why not."""
    if not offsets.is_contiguous():
        return f"offsets has stride {offsets.stride(0)}, not 1"
    if offsets.shape[0] >= _LARGEST_GRID:
        return f"offsets has {offsets.shape[0]} groups, more than {_LARGEST_GRID - 1}"
    return _refusal(x, dtype, target)


def _refusal(x: Tensor, dtype: torch.dtype, target: Target) -> str | None:
    if target.name != "sm90":
        return f"{target.name} is not sm90"
    if dtype not in OCP:
        return f"{dtype} is no type of the hardware"
    return accepts_rows(x)


def call_quantize(x: Tensor, block: Block, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize(x, block)` as a call on tensors of the kind of `x (..., M, N)`, which is not empty; see `accepts`."""
    out = Quantized(empty_data(x, block, dtype), empty_scale(x, block, scale))
    rows, of_rows = batched(x), out.batch
    if block == (1, WHOLE):
        rows, of_rows = rows.mT, of_rows.mT
    if is_column_major(rows):
        launch = quantize_rows.plan(rows.mT, of_rows.mT, scale, target)
        return Call((Step(launch.prepare(), (0, 1, 2)),), tuple(map(geometry, out)), 2)
    steps = tuple(Step(launch.prepare(), (0, 1, 2, None)) for launch in plan(rows, of_rows, scale, target))
    return Call(steps, tuple(map(geometry, out)), 2)


def call_quantize_grouped(x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize_grouped(x, offsets, (-1, 1))` as a call on tensors of the kinds of these; see `accepts_grouped`."""
    out = Quantized(*empty_grouped(x, offsets.shape[0], (WHOLE, 1), dtype, scale))
    steps = tuple(Step(launch.prepare(), (0, 2, 3, 1)) for launch in plan(x, out, scale, target, offsets))
    return Call(steps, tuple(map(geometry, out)), 2)


def plan(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None = None
) -> tuple[CudaLaunch, ...]:
    """The launches on a row-major `x (B?, M, N)`; with `offsets (E,)` the rows of a matrix are tokens of groups."""
    groups = 0 if offsets is None else offsets.shape[0]
    if streams(x):
        if offsets is not None and (walk := walk_columns.default_walk(x, groups, target.cores)) is not None:
            return (walk_columns.plan(x, out, scale, target, offsets, walk),)
        if typical_rows(x.shape[-2], groups) > _SMALL:
            return stream_columns.plan(x, out, scale, target, offsets)
    return (plan_panels(x, out, scale, target, offsets),)


def streams(x: Tensor) -> bool:
    """Whether the copy engine takes a row-major x: by 16 bytes, from rows that do not overlap."""
    return is_aligned(x) and x.stride(-2) >= x.shape[-1]


def plan_panels(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None = None, tile: Tile | None = None,
    kept: int | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch of `quantize_columns.cu`; arguments as for `plan`.

    A block keeps `kept` rows in shared memory, by default its share of a matrix, or of a group an eighth larger than
    the mean.
    """
    *batch, m, n = x.shape
    groups = 0 if offsets is None else offsets.shape[0]
    rows = typical_rows(m, groups)
    tile = tile or default_tile(rows, target.cores)
    kept = kept or tile.rows(rows)
    columns = tile.PANEL // x.element_size()
    macros: dict[str, int | str] = {
        **types(x, out, scale),
        "PANEL": columns, "CLUSTER": tile.CLUSTER, "WARPS": tile.WARPS, "RESIDENT": tile.RESIDENT,
        "LOAD": f"Load::{tile.LOAD}", "GROUPED": int(offsets is not None), "ALIGNED": int(is_aligned(x)),
        "PARTIAL": int(n % CHUNK != 0),
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("quantize_columns.cu", "quantize_columns", tuple(macros.items())),
        grid=(-(-n // columns) * tile.CLUSTER, groups + 1 if groups else 1, batch[0] if batch else 1),
        threads=32 * tile.WARPS,
        shared=tile.overhead + kept * tile.PANEL,
        args={
            "x": x, "data": out.data, "scale": out.scale, "offsets": offsets, "M": m, "N": n, "x_m": x.stride(-2),
            "data_n": out.data.stride(-1), "scale_lead": scale_lead(out.scale, offsets is not None), "groups": groups,
            "kept": kept,
        },
        target=target,
        options={**macros, "KEPT": kept},
    )  # fmt: skip
