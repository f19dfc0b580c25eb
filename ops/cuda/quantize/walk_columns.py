"""Whole columns of many small groups, over which blocks walk: configurations and the launch of `walk_columns.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp8fn.ops.cuda.operands import LARGEST_INT32, outgrows_l2, quantization_types
from fp8fn.ops.cuda.quantize.column_panels import (
    CHUNK_ROWS,
    PIECES,
    ROW_BYTES,
    columns_fault,
    output_of,
    panel_columns,
    panels_of,
    scale_lead,
    tensor_map,
    tma_fault,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.operands import Quantization


@dataclass(frozen=True)
class WalkConfig:
    """The macros of `walk_columns.cu`, which says what each is."""

    STAGES: int = 7
    RESIDENT: int = 2
    BOX: int = 32

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring and its barriers."""
        return self.STAGES * (CHUNK_ROWS * ROW_BYTES + 2 * 8)


# The fastest configurations that were timed on an H200, by the mean number of rows of a group. The ring of the first
# one holds groups of 340 rows. Blocks that run further ahead part from the blocks beside them, which read other pieces
# of the same rows.
_WALKS: Final = ((340, WalkConfig(4, BOX=128)), (10**9, WalkConfig()))
# The mean number of rows of a group. With fewer or more rows, the other kernels are as fast or faster.
_LEAST_WALKED: Final = 64
_MOST_WALKED: Final = 640
_LEAST_SHARE: Final = 4096  # rows of a panel for each multiprocessor


def accepts(q: Quantization) -> str | None:
    """Why the kernel cannot quantize a non-empty `x`, or None."""
    if q.offsets is None:
        return "there are no groups"
    if (reason := columns_fault(q) or tma_fault(q)) is not None:
        return reason
    if (steps := panels_of(q.n, q) * q.m) > LARGEST_INT32:
        return f"{steps} rows of all panels are past 32 bits"
    return None


def untuned(q: Quantization) -> str | None:
    """Why the kernel is not the fastest, or None: groups are small, and there are enough of them to be walked over."""
    rows, groups = q.m, q.groups
    if groups < 2 or not groups * _LEAST_WALKED <= rows <= groups * _MOST_WALKED:
        return f"{rows} rows in {groups} groups are not {_LEAST_WALKED} to {_MOST_WALKED} a group of two or more"
    if panels_of(q.n, q) * rows < _LEAST_SHARE * q.target.cores:
        return f"each multiprocessor has fewer than {_LEAST_SHARE} rows of a panel"
    return None


def configure(q: Quantization) -> WalkConfig:
    return next(config for most, config in _WALKS if q.m <= q.groups * most)


def plan(q: Quantization, config: WalkConfig, blocks: int | None = None) -> tuple[CudaLaunch]:
    """The launch on groups of rows, by so many `blocks`."""
    out, most = output_of(q), q.target.cores * config.RESIDENT
    macros: dict[str, int | str] = {
        **quantization_types(q), "PANEL": panel_columns(q), "CLUSTER": 1, "WARPS": PIECES,
        "X_LEAVES": f"Leaves::{'LAST' if outgrows_l2(q.x) else 'ANY'}", **vars(config),
    }  # fmt: skip
    launch = CudaLaunch(
        kernel=CudaKernel("walk_columns.cu", "walk_columns", tuple(macros.items())),
        grid=(blocks or _shares(panels_of(q.n, q), most), 1, 1),
        threads=32 * (PIECES + 1),
        shared=config.shared,
        args={
            "x": tensor_map(q, config.BOX), "data": out.data, "scale": out.scale, "offsets": q.offsets,
            "M": q.m, "N": q.n, "data_n": out.data.stride(-1), "scale_lead": scale_lead(q), "groups": q.groups,
        },
        target=q.target,
        options=macros,
    )  # fmt: skip
    return (launch,)


def _shares(panels: int, most: int) -> int:
    """The number of blocks for so many panels: equally many for each, if that keeps four fifths of `most` busy.

    Then all panels are cut at the same groups. The blocks that run together read whole rows, and if groups differ in
    size, the shares of the blocks differ less.
    """
    even = most // panels * panels
    return even if 5 * even >= 4 * most else most
