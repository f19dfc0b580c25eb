"""Whole columns of many rows, by clusters that keep them on chip: tiles and launches of `stream_columns.cu`.

They take a row-major x of any size that the copy engine takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm.operands import as_batch
from fp8fn.ops.cuda.quantize.chunk import CHUNK_ROWS, PIECES, ROW_BYTES, scale_lead, typical_rows
from fp8fn.ops.cuda.quantize.quantize import Quantized, outgrows_l2, types
from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap, function_of
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.targets import Target


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
        told = 2 * ROW_BYTES * self.CLUSTER * (self.WARPS // PIECES)
        return self.STAGES * CHUNK_ROWS * ROW_BYTES + told + 8 * (2 * self.STAGES + 2 * PIECES)


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
_MOST_BESIDE: Final = _BESIDE.CLUSTER * (_BESIDE.STAGES + _BESIDE.HELD) * CHUNK_ROWS
_FILLED: Final = 0.7


def default_stream(rows: int, panels: int, grouped: bool) -> Stream:
    """For so many panels of a matrix, or of groups, of so many rows."""
    few = _STREAMS_OF_FEW if panels <= _FEW_PANELS else _STREAMS
    return next(tile for most, tile in (_STREAMS_OF_GROUPS if grouped else few) if rows <= most)


def plan(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None = None
) -> tuple[CudaLaunch, ...]:
    """The launch on all columns of `x (B?, M, N)`, or two where clusters of 16 leave room for others."""
    m, n = x.shape[-2:]
    rows, count = typical_rows(m, 0 if offsets is None else offsets.shape[0]), _count(x, offsets)
    columns = ROW_BYTES // x.element_size()
    panels = -(-n // columns)
    tile = default_stream(rows, panels * count, offsets is not None)
    if tile.CLUSTER == 2 * _BESIDE.CLUSTER and panels * count <= _FEW_PANELS and rows <= _MOST_BESIDE:
        wholes, halves = (
            _resident(_kernel(x, out, scale, offsets, of, part), of, x.device, target)
            for of, part in ((tile, "FIRST"), (_BESIDE, "SECOND"))
        )
        beside = halves - 2 * -(-wholes // tile.RESIDENT)  # a cluster takes the place of two of half its size
        filled = rows > _BESIDE.CLUSTER * _BESIDE.STAGES * CHUNK_ROWS
        if (taken := int(panels * beside / halves * (_FILLED if filled else 1))) > 0:
            border = (panels - taken) * columns
            return (
                plan_part(x, out, scale, target, offsets, tile, wholes, (0, border)),
                plan_part(x, out, scale, target, offsets, _BESIDE, beside, (border, n)),
            )
    return (plan_part(x, out, scale, target, offsets, tile),)


def plan_part(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor | None, tile: Stream,
    clusters: int | None = None, span: tuple[int, int] | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch by so many `clusters`, by default all that fit.

    With a `span` of columns it is one of two: the first of them begins at 0, the second overlaps with it.
    """
    m, n = x.shape[-2:]
    part = "ALL" if span is None else "SECOND" if span[0] else "FIRST"
    begin, end = span or (0, n)
    columns = ROW_BYTES // x.element_size()
    items = -(-(end - begin) // columns) * _count(x, offsets)
    kernel = _kernel(x, out, scale, offsets, tile, part)
    clusters = clusters or _resident(kernel, tile, x.device, target)
    return CudaLaunch(
        kernel=kernel,
        grid=(min(items, clusters) * tile.CLUSTER, 1, 1),
        threads=32 * (tile.WARPS + 1),
        shared=tile.shared,
        args={
            # By more a miss would bring of the next panel what another cluster reads at another time: 10 % slower.
            "x": TensorMap(as_batch(x), (1, tile.BOX, columns), ROW_BYTES, promotion=ROW_BYTES),
            "data": out.data, "scale": out.scale, "offsets": offsets, "M": m, "N": n, "begin": begin, "end": end,
            "data_n": out.data.stride(-1), "scale_lead": scale_lead(out.scale, offsets is not None),
            "groups": 0 if offsets is None else offsets.shape[0], "items": items,
        },
        target=target,
        options=dict(kernel.macros),
        overlaps=part == "SECOND",
        constant=("x", "data", "scale", "offsets") if part == "SECOND" else (),  # the first begins when all has ended
    )  # fmt: skip


def _count(x: Tensor, offsets: Tensor | None) -> int:
    """Matrices; or groups, and the rows in none."""
    if offsets is not None:
        return offsets.shape[0] + 1
    return x.shape[0] if x.dim() == 3 else 1


def _kernel(
    x: Tensor, out: Quantized, scale: str, offsets: Tensor | None, tile: Stream, part: str = "ALL"
) -> CudaKernel:
    macros: dict[str, int | str] = {
        **types(x, out, scale),
        "PANEL": ROW_BYTES // x.element_size(),
        **vars(tile),
        "X_LEAVES": f"Leaves::{_leaves(x, offsets is not None)}",
        "GROUPED": int(offsets is not None),
        "PART": f"Part::{part}",
    }
    return CudaKernel("stream_columns.cu", "stream_columns", tuple(macros.items()))


def _leaves(x: Tensor, grouped: bool) -> str:
    """When the lines of x leave the L2: as was the fastest on an H200.

    Those of a matrix that is not much larger make room for what is written. Of a larger one a hint gains nothing, and
    costs time where x was just written. That was not timed of groups, whose lines are the last.
    """
    if grouped:
        return "LAST" if outgrows_l2(x) else "ANY"
    return "FIRST" if outgrows_l2(x) and not outgrows_l2(x, 2) else "ANY"


def _resident(kernel: CudaKernel, tile: Stream, device: torch.device, target: Target) -> int:
    """Clusters that run at once; on a device it depends on how many multiprocessors each GPC has."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _resident_on(kernel, tile, target.cubin, torch.cuda.current_device())
    return max(1, target.cores // tile.CLUSTER) * tile.RESIDENT


@cache
def _resident_on(kernel: CudaKernel, tile: Stream, arch: str, device: int) -> int:
    driver.make_context_current(device)  # this thread may not have called CUDA before
    function = function_of(kernel, arch, tile.shared, device)
    return driver.resident_clusters(function, tile.CLUSTER, 32 * (tile.WARPS + 1), tile.shared)
