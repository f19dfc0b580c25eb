"""Whole columns quantized on Hopper, of matrices and of groups of rows: by `stream_columns.cu`, of many small groups by
`walk_columns.cu`, and by `quantize_columns.cu` few rows and what the copy engine does not take.

Columns that are contiguous are the rows of the transpose, and `quantize_rows.cu` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda import driver, quantize_rows
from fp8fn.ops.cuda.launch import CudaLaunch, TensorMap, function_of
from fp8fn.ops.cuda.nvrtc import CudaKernel
from fp8fn.ops.cuda.prepared import Call, Step, geometry
from fp8fn.ops.cuda.quantize import CHUNK, Quantized, accepts_rows, batched, is_aligned, types
from fp8fn.ops.cuda.scaled_mm import SHARED_LIMIT, as_batch
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale, is_column_major, swap
from fp8fn.ops.targets import OCP, Target

_SECTOR: Final = 32  # rows, of which a block's share is a multiple
_LARGEST_GRID: Final = 65535
_ROW_BYTES: Final = 128  # of a panel of `stream_columns.cu`
_PIECES: Final = _ROW_BYTES // 16  # of a row, each of which a warp has
_CHUNK: Final = 128  # rows


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
        return self.CLUSTER * ((SHARED_LIMIT - self.overhead) // self.PANEL // _SECTOR * _SECTOR)

    def rows(self, rows: int) -> int:
        """That a block keeps of a matrix or group of so many."""
        share = -(-rows // (self.CLUSTER * _SECTOR)) * _SECTOR
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


@dataclass(frozen=True)
class Stream:
    """The macros of `stream_columns.cu`, which says what each is."""

    CLUSTER: int = 1
    STAGES: int = 13
    WARPS: int = 8
    RESIDENT: int = 1
    BASE: int = 32
    BOX: int = 32
    HELD: int = 0

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring, the maxima that its warps are told for two panels, barriers."""
        told = 2 * _ROW_BYTES * self.CLUSTER * (self.WARPS // _PIECES)
        return self.STAGES * _CHUNK * _ROW_BYTES + told + 8 * (2 * self.STAGES + 2 * _PIECES)


@dataclass(frozen=True)
class Walk:
    """The macros of `walk_columns.cu`, which says what each is."""

    STAGES: int = 7
    RESIDENT: int = 2
    BOX: int = 32

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring and its barriers."""
        return self.STAGES * (_CHUNK * _ROW_BYTES + 2 * 8)


# The fastest that were timed on an H200, by rows: of a matrix; of one of few panels, where more clusters end together;
# of a group. The ring has room for the panel and for what comes meanwhile.
_STREAMS: Final = (
    (1024, Stream(2, 6, RESIDENT=2, BOX=128)), (2048, Stream(4, 6, RESIDENT=2, BOX=128)),
    (5120, Stream(8, 6, RESIDENT=2, BOX=128)), (7168, Stream(8, BOX=128)), (10**9, Stream(16, BOX=128)),
)  # fmt: skip
_STREAMS_OF_FEW: Final = (
    *_STREAMS[:2], (4096, _STREAMS[2][1]), (5120, Stream(8, 6, RESIDENT=2, BOX=128, HELD=3)),
    (10240, Stream(16, 6, RESIDENT=2, BOX=128, HELD=3)), (10**9, Stream(16, BOX=128, HELD=4)),
)  # fmt: skip
_STREAMS_OF_GROUPS: Final = (
    (1280, Stream(2, 6, RESIDENT=2, BASE=128)), (2560, Stream(4, 6, RESIDENT=2)), (5000, Stream(8, 6, RESIDENT=2)),
    (7168, Stream(8)), (10**9, Stream(16, HELD=4)),
)  # fmt: skip
_FEW_PANELS: Final = 256
# On multiprocessors that clusters of 16 leave idle, of up to so many rows, which it holds. Where a panel fills the
# ring, nothing of the next comes meanwhile, and of its share of the panels it takes such a part.
_BESIDE: Final = Stream(8, BOX=128, HELD=4)
_MOST_BESIDE: Final = _BESIDE.CLUSTER * (_BESIDE.STAGES + _BESIDE.HELD) * _CHUNK
_FILLED: Final = 0.7
# As timed on an H200, by the mean rows of a group: the ring of the first holds groups of up to so many. Blocks that run
# further ahead part from those beside them, which read the other pieces of the same rows.
_WALKS: Final = ((340, Walk(4, BOX=128)), (10**9, Walk()))
# With fewer or more rows the other kernels are as fast or faster.
_LEAST_WALKED: Final = 64
_MOST_WALKED: Final = 640
_LEAST_SHARE: Final = 4096  # rows of a panel for each multiprocessor
_SMALL: Final = 512  # rows; up to them the other kernel is as fast or faster


def default_stream(rows: int, panels: int, grouped: bool) -> Stream:
    """For so many panels of a matrix, or of groups, of so many rows."""
    few = _STREAMS_OF_FEW if panels <= _FEW_PANELS else _STREAMS
    return next(tile for most, tile in (_STREAMS_OF_GROUPS if grouped else few) if rows <= most)


def default_walk(x: Tensor, groups: int, cores: int) -> Walk | None:
    """For so many groups of an x `(M, N)`, where they are small and many enough to be walked over."""
    rows, columns = x.shape
    panels = -(-columns * x.element_size() // _ROW_BYTES)
    if groups < 2 or rows < groups * _LEAST_WALKED or panels * rows < _LEAST_SHARE * cores:
        return None
    if rows > groups * _MOST_WALKED:
        return None
    return next(walk for most, walk in _WALKS if rows <= groups * most)


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
    if not streams(x):
        return (plan_panels(x, out, scale, target, offsets),)
    if offsets is not None and (walk := default_walk(x, offsets.shape[0], target.cores)) is not None:
        return (plan_walk(x, out, scale, target, offsets, walk),)
    if _typical(x.shape[-2], 0 if offsets is None else offsets.shape[0]) <= _SMALL:
        return (plan_panels(x, out, scale, target, offsets),)
    return plan_streams(x, out, scale, target, offsets)


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
    rows = _typical(m, groups)
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
            "data_n": out.data.stride(-1), "scale_lead": _scale_lead(out.scale, offsets is not None), "groups": groups,
            "kept": kept,
        },
        target=target,
        options={**macros, "KEPT": kept},
    )  # fmt: skip


def plan_streams(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None = None
) -> tuple[CudaLaunch, ...]:
    """One launch of `stream_columns.cu`, or two where clusters of 16 leave room for others."""
    *batch, m, n = x.shape
    rows, count = (m, batch[0] if batch else 1) if offsets is None else (_typical(m, len(offsets)), len(offsets) + 1)
    columns = _ROW_BYTES // x.element_size()
    panels = -(-n // columns)
    tile = default_stream(rows, panels * count, offsets is not None)
    kernel = _stream_kernel(x, out, scale, offsets, tile)
    clusters = _resident(kernel, tile, x.device, target)
    if tile.CLUSTER == 2 * _BESIDE.CLUSTER and panels * count <= _FEW_PANELS and rows <= _MOST_BESIDE:
        halves = _resident(_stream_kernel(x, out, scale, offsets, _BESIDE, "SECOND"), _BESIDE, x.device, target)
        beside = halves - 2 * -(-clusters // tile.RESIDENT)  # a cluster takes the place of two of half its size
        filled = rows > _BESIDE.CLUSTER * _BESIDE.STAGES * _CHUNK
        if (taken := int(panels * beside / halves * (_FILLED if filled else 1))) > 0:
            border = (panels - taken) * columns
            return (
                plan_stream(x, out, scale, target, offsets, tile, clusters, (0, border)),
                plan_stream(x, out, scale, target, offsets, _BESIDE, beside, (border, n)),
            )
    return (plan_stream(x, out, scale, target, offsets, tile, clusters),)


def plan_stream(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None, tile: Stream,
    clusters: int | None = None, span: tuple[int, int] | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch of `stream_columns.cu`, for an x that `streams`, by so many `clusters`, by default all that fit.

    With a `span` of columns it is one of two: the first of them begins at 0, the second overlaps with it.
    """
    *batch, m, n = x.shape
    part = "ALL" if span is None else "SECOND" if span[0] else "FIRST"
    begin, end = span or (0, n)
    groups = 0 if offsets is None else offsets.shape[0]
    columns = _ROW_BYTES // x.element_size()
    items = -(-(end - begin) // columns) * (groups + 1 if groups else batch[0] if batch else 1)
    kernel = _stream_kernel(x, out, scale, offsets, tile, part)
    clusters = clusters or _resident(kernel, tile, x.device, target)
    return CudaLaunch(
        kernel=kernel,
        grid=(min(items, clusters) * tile.CLUSTER, 1, 1),
        threads=32 * (tile.WARPS + 1),
        shared=tile.shared,
        args={
            # By more a miss would bring of the next panel what another cluster reads at another time: 10 % slower.
            "x": TensorMap(as_batch(x), (1, tile.BOX, columns), _ROW_BYTES, promotion=_ROW_BYTES),
            "data": out.data, "scale": out.scale, "offsets": offsets, "M": m, "N": n, "begin": begin, "end": end,
            "data_n": out.data.stride(-1), "scale_lead": _scale_lead(out.scale, offsets is not None), "groups": groups,
            "items": items,
        },
        target=target,
        options=dict(kernel.macros),
        overlaps=part == "SECOND",
    )  # fmt: skip


def _stream_kernel(
    x: Tensor, out: Quantized, scale: str, offsets: Tensor | None, tile: Stream, part: str = "ALL"
) -> CudaKernel:
    macros: dict[str, int | str] = {
        **types(x, out, scale),
        "PANEL": _ROW_BYTES // x.element_size(),
        **vars(tile),
        "GROUPED": int(offsets is not None),
        "PART": f"Part::{part}",
    }
    return CudaKernel("stream_columns.cu", "stream_columns", tuple(macros.items()))


def plan_walk(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor, tile: Walk | None = None,
    blocks: int | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch of `walk_columns.cu`, for groups of an x `(M, N)` that `streams`, by so many `blocks`."""
    m, n = x.shape
    tile = tile or Walk()
    most = target.cores * tile.RESIDENT
    columns = _ROW_BYTES // x.element_size()
    macros: dict[str, int | str] = {
        **types(x, out, scale), "PANEL": columns, "CLUSTER": 1, "WARPS": _PIECES, **vars(tile)
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("walk_columns.cu", "walk_columns", tuple(macros.items())),
        grid=(blocks or _shares(-(-n // columns), most), 1, 1),
        threads=32 * (_PIECES + 1),
        shared=tile.shared,
        args={
            "x": TensorMap(as_batch(x), (1, tile.BOX, columns), _ROW_BYTES, promotion=_ROW_BYTES),
            "data": out.data, "scale": out.scale, "offsets": offsets, "M": m, "N": n, "data_n": out.data.stride(-1),
            "scale_lead": out.scale.stride(0), "groups": offsets.shape[0],
        },
        target=target,
        options=macros,
    )  # fmt: skip


def _shares(panels: int, most: int) -> int:
    """Blocks that walk over so many panels: as many for each of them, where that keeps four of five of `most` busy.

    Then all panels are cut at the same groups: what is read at a time are whole rows, and where groups differ in size,
    the blocks' shares differ less.
    """
    even = most // panels * panels
    return even if 5 * even >= 4 * most else most


def _resident(kernel: CudaKernel, tile: Stream, device: torch.device, target: Target) -> int:
    """Clusters that run at once; on a device it depends on how many multiprocessors each GPC has."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _resident_on(kernel, tile, torch.cuda.current_device())
    return max(1, target.cores // tile.CLUSTER) * tile.RESIDENT


@cache
def _resident_on(kernel: CudaKernel, tile: Stream, device: int) -> int:
    driver.make_context_current(device)  # this thread may not have called CUDA before
    function = function_of(kernel, tile.shared, device)
    return driver.resident_clusters(function, tile.CLUSTER, 32 * (tile.WARPS + 1), tile.shared)


def _typical(rows: int, groups: int) -> int:
    """Rows to keep of a matrix, or of a group an eighth larger than the mean, which begins anywhere in a sector."""
    return rows if groups < 2 else min(rows, -(-rows // groups) * 9 // 8) + _SECTOR - 1


def _scale_lead(scale: Tensor, grouped: bool) -> int:
    """From the scales of a group, or of a matrix, to those of the next."""
    if grouped:
        return scale.stride(0)
    return scale.stride(0) if scale.dim() == 3 else 0
