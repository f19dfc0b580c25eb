"""Whole columns quantized on Hopper, of matrices and of groups of rows: the launches of `quantize_columns.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.launch import CudaLaunch
from fp8fn.ops.cuda.nvrtc import CudaKernel
from fp8fn.ops.cuda.prepared import Call, Step, geometry
from fp8fn.ops.cuda.quantize import CHUNK, Quantized, accepts_rows, batched, is_aligned, types
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale, is_column_major, swap
from fp8fn.ops.targets import OCP, Target

_ROWS: Final = 16  # of a store
_LARGEST_GRID: Final = 65535
_SHARED: Final = 228 << 10  # of a multiprocessor, with
_RESERVED: Final = 1 << 10  # of each block


@dataclass(frozen=True)
class Tile:
    """`quantize_columns.cu` says what each is; PANEL in bytes of a row."""

    PANEL: int = 128
    KEPT: int = 576
    CLUSTER: int = 1
    WARPS: int = 8

    @property
    def resident(self) -> int:
        """Blocks that share a multiprocessor, by their shared memory."""
        return max(_SHARED // (self.shared + _RESERVED), 1)

    @property
    def shared(self) -> int:
        """Bytes: the rows, and maxima and scales of a panel for each warp, for the block, and for the columns."""
        return self.PANEL * (self.KEPT + self.WARPS + 1) + 2 * self.PANEL


# Timed on an H200 at 1040 x 65536: 1.85 TB/s of ideal bytes for a block alone, 1.6 for two with half the rows each; and
# at 8192 x 5120, 1.65 with narrow panels, of which three blocks share a multiprocessor, 1.4 with one wide one.
_TILES: Final = (
    Tile(128, 576), Tile(128, 1088, 1, 16), Tile(128, 1088, 2, 16), Tile(64, 1024, 4), Tile(64, 1024, 8),
    Tile(64, 3264, 8, 16),
)  # fmt: skip


def default_tile(rows: int) -> Tile:
    """The first that keeps a group of so many rows, so that they are read once; the last, where none does."""
    return next((tile for tile in _TILES if rows <= tile.KEPT * tile.CLUSTER), _TILES[-1])


def accepts(x: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    """None where `call_quantize` takes this call, else the reason why not."""
    if block == (1, WHOLE):
        return accepts(x.mT, swap(block), dtype, target)
    if block != (WHOLE, 1):
        return f"block {block} is no whole column"
    if is_column_major(x):
        return f"x has strides {x.stride()}: its columns are contiguous"
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
    launch = plan(rows, of_rows, scale, target)
    return Call((Step(launch.prepare(), (0, 1, 2, None)),), tuple(map(geometry, out)), 2)


def call_quantize_grouped(x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize_grouped(x, offsets, (-1, 1))` as a call on tensors of the kinds of these; see `accepts_grouped`."""
    out = Quantized(*empty_grouped(x, offsets.shape[0], (WHOLE, 1), dtype, scale))
    launch = plan(x, out, scale, target, offsets)
    return Call((Step(launch.prepare(), (0, 2, 3, 1)),), tuple(map(geometry, out)), 2)


def plan(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None = None, tile: Tile | None = None
) -> CudaLaunch:
    """The launch on a row-major `x (B?, M, N)`; with `offsets (E,)` the rows of a matrix are tokens of groups."""
    *batch, m, n = x.shape
    groups = 0 if offsets is None else offsets.shape[0]
    tile = tile or default_tile(-(-m // max(groups, 1)))
    columns = tile.PANEL // x.element_size()
    macros: dict[str, int | str] = {
        **types(x, out, scale),
        "PANEL": columns, "KEPT": tile.KEPT, "CLUSTER": tile.CLUSTER, "WARPS": tile.WARPS, "RESIDENT": tile.resident,
        "GROUPED": int(offsets is not None), "ALIGNED": int(is_aligned(x)), "PARTIAL": int(n % CHUNK != 0),
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("quantize_columns.cu", "quantize_columns", tuple(macros.items())),
        grid=(-(-n // columns) * tile.CLUSTER, groups + 1 if groups else 1, batch[0] if batch else 1),
        threads=32 * tile.WARPS,
        shared=tile.shared,
        args={
            "x": x, "data": out.data, "scale": out.scale, "offsets": offsets, "M": m, "N": n, "x_m": x.stride(-2),
            "data_n": out.data.stride(-1), "scale_lead": _scale_lead(out.scale, offsets is not None), "groups": groups,
        },
        target=target,
        options=macros,
    )  # fmt: skip


def _scale_lead(scale: Tensor, grouped: bool) -> int:
    """From the scales of a group, or of a matrix, to those of the next."""
    if grouped:
        return scale.stride(0)
    return scale.stride(0) if scale.dim() == 3 else 0
