"""Whole columns of many rows, which clusters keep on chip: configurations and launches of `stream_columns.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from fp8fn.ops.cuda.operands import outgrows_l2, quantization_types
from fp8fn.ops.cuda.quantize.column_panels import (
    CHUNK_ROWS,
    PIECES,
    ROW_BYTES,
    columns_fault,
    columns_of,
    output_of,
    panel_columns,
    panels_of,
    scale_lead,
    tensor_map,
    tma_fault,
    typical_rows,
)
from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, function_of
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.operands import Quantization
from fp8fn.ops.targets import Target

# Up to so many rows, `quantize_columns.cu`, which has no ring, is as fast or faster.
_SMALL: Final = 512


@dataclass(frozen=True)
class StreamConfig:
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
        """Bytes of shared memory: the ring, the maxima of two panels that other warps send, and the barriers."""
        told = 2 * ROW_BYTES * self.CLUSTER * (self.WARPS // PIECES)
        return self.STAGES * CHUNK_ROWS * ROW_BYTES + told + 8 * (2 * self.STAGES + 2 * PIECES)


# The fastest configurations that were timed on an H200, by the number of rows: for a matrix, for a matrix of few
# panels, where more clusters end together, and for groups. The ring has room for a panel and for the chunks that arrive
# meanwhile.
_STREAMS: Final = (
    (1024, StreamConfig(2, 6, RESIDENT=2, BOX=128)),
    (2048, StreamConfig(4, 6, RESIDENT=2, BOX=128)),
    (5120, StreamConfig(8, 6, RESIDENT=2, BOX=128)),
    (7168, StreamConfig(8, BOX=128)),
    (10**9, StreamConfig(16, BOX=128)),
)
_STREAMS_OF_FEW: Final = (
    *_STREAMS[:2],
    (4096, _STREAMS[2][1]),
    (5120, StreamConfig(8, 6, RESIDENT=2, BOX=128, HELD=3)),
    (10240, StreamConfig(16, 6, RESIDENT=2, BOX=128, HELD=3)),
    (10**9, StreamConfig(16, BOX=128, HELD=4)),
)
_STREAMS_OF_GROUPS: Final = (
    (1280, StreamConfig(2, 6, RESIDENT=2, BASE=128)),
    (2560, StreamConfig(4, 6, RESIDENT=2)),
    (5000, StreamConfig(8, 6, RESIDENT=2)),
    (7168, StreamConfig(8)),
    (10**9, StreamConfig(16, HELD=4)),
)
_FEW_PANELS: Final = 256
# The configuration for multiprocessors that clusters of 16 leave idle, for as many rows as its clusters hold. If a
# panel fills the ring, no chunk of the next panel arrives meanwhile, and these clusters take only a part of their
# panels.
_BESIDE: Final = StreamConfig(8, BOX=128, HELD=4)
_MOST_BESIDE: Final = _BESIDE.CLUSTER * (_BESIDE.STAGES + _BESIDE.HELD) * CHUNK_ROWS
_FILLED: Final = 0.7


def default_config(rows: int, panels: int, grouped: bool) -> StreamConfig:
    """The configuration for so many panels, of matrices or of groups, with so many rows each."""
    few = _STREAMS_OF_FEW if panels <= _FEW_PANELS else _STREAMS
    return next(config for most, config in (_STREAMS_OF_GROUPS if grouped else few) if rows <= most)


def accepts(q: Quantization) -> str | None:
    """Why the kernel cannot quantize a non-empty `x`, or None."""
    return columns_fault(q) or tma_fault(q)


def untuned(q: Quantization) -> str | None:
    """Why the kernel is not the fastest, or None."""
    rows = typical_rows(q)
    return f"{rows} rows to keep are no more than {_SMALL}" if rows <= _SMALL else None


def configure(q: Quantization) -> StreamConfig:
    return default_config(typical_rows(q), _panels(q) * _count(q), q.offsets is not None)


def plan(q: Quantization, config: StreamConfig) -> tuple[CudaLaunch, ...]:
    """The launch on all columns, or two launches if clusters of 16 leave room for smaller ones."""
    rows, n = typical_rows(q), columns_of(q).shape[-1]
    panels = _panels(q)
    if config.CLUSTER == 2 * _BESIDE.CLUSTER and panels * _count(q) <= _FEW_PANELS and rows <= _MOST_BESIDE:
        wholes, halves = (
            _resident(_kernel(q, of, part), of, q.x.device, q.target)
            for of, part in ((config, "FIRST"), (_BESIDE, "SECOND"))
        )
        beside = halves - 2 * -(-wholes // config.RESIDENT)  # a cluster takes the place of two of half its size
        filled = rows > _BESIDE.CLUSTER * _BESIDE.STAGES * CHUNK_ROWS
        if (taken := int(panels * beside / halves * (_FILLED if filled else 1))) > 0:
            border = (panels - taken) * panel_columns(q)
            return (
                plan_part(q, config, wholes, (0, border)),
                plan_part(q, _BESIDE, beside, (border, n)),
            )
    return (plan_part(q, config),)


def plan_part(
    q: Quantization, config: StreamConfig, clusters: int | None = None, span: tuple[int, int] | None = None
) -> CudaLaunch:
    """The launch by so many `clusters`, by default by all that fit.

    With a `span` of columns, the launch is one of two. The first one begins at column 0, and the second one overlaps
    with it.
    """
    out, (m, n) = output_of(q), columns_of(q).shape[-2:]
    part = "ALL" if span is None else "SECOND" if span[0] else "FIRST"
    begin, end = span or (0, n)
    items = panels_of(end - begin, q) * _count(q)
    kernel = _kernel(q, config, part)
    clusters = clusters or _resident(kernel, config, q.x.device, q.target)
    return CudaLaunch(
        kernel=kernel,
        grid=(min(items, clusters) * config.CLUSTER, 1, 1),
        threads=32 * (config.WARPS + 1),
        shared=config.shared,
        args={
            "x": tensor_map(q, config.BOX), "data": out.data, "scale": out.scale, "offsets": q.offsets,
            "M": m, "N": n, "begin": begin, "end": end, "data_n": out.data.stride(-1), "scale_lead": scale_lead(q),
            "groups": q.groups, "items": items,
        },
        target=q.target,
        options=dict(kernel.macros),
        overlaps=part == "SECOND",
        constant=("x", "data", "scale", "offsets") if part == "SECOND" else (),  # the first waits for all before it
    )  # fmt: skip


def _panels(q: Quantization) -> int:
    return panels_of(columns_of(q).shape[-1], q)


def _count(q: Quantization) -> int:
    """The number of matrices; or of groups, and one more for the rows in none."""
    return q.matrices if q.offsets is None else q.groups + 1


def _kernel(q: Quantization, config: StreamConfig, part: str = "ALL") -> CudaKernel:
    macros: dict[str, int | str] = {
        **quantization_types(q),
        "PANEL": panel_columns(q),
        **vars(config),
        "X_LEAVES": f"Leaves::{_leaves(q)}",
        "GROUPED": int(q.offsets is not None),
        "PART": f"Part::{part}",
    }
    return CudaKernel("stream_columns.cu", "stream_columns", tuple(macros.items()))


def _leaves(q: Quantization) -> str:
    """When the lines of x leave the L2; each choice was the fastest on an H200.

    The lines of a matrix that is little larger than the L2 leave first, which makes room for the output. For a larger
    matrix a hint gains nothing, and costs time if x was just written. This case was not timed for groups, whose lines
    leave last.
    """
    if q.offsets is not None:
        return "LAST" if outgrows_l2(q.x) else "ANY"
    return "FIRST" if outgrows_l2(q.x) and not outgrows_l2(q.x, 2) else "ANY"


def _resident(kernel: CudaKernel, config: StreamConfig, device: torch.device, target: Target) -> int:
    """Clusters that run at once; on a device it depends on how many multiprocessors each GPC has."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _resident_on(kernel, config, target.cubin, torch.cuda.current_device())
    return max(1, target.cores // config.CLUSTER) * config.RESIDENT


@cache
def _resident_on(kernel: CudaKernel, config: StreamConfig, arch: str, device: int) -> int:
    driver.make_context_current(device)  # this thread may not have called CUDA before
    function = function_of(kernel, arch, config.shared, device)
    return driver.resident_clusters(function, config.CLUSTER, 32 * (config.WARPS + 1), config.shared)
