"""Whole columns of many small groups, over which blocks walk: tiles and the launch of `walk_columns.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from fp8fn.ops.cuda.gemm.scaled_mm import as_batch
from fp8fn.ops.cuda.quantize.column_panels import CHUNK_ROWS, PIECES, ROW_BYTES
from fp8fn.ops.cuda.quantize.quantize import LARGEST_INT32, Quantized, outgrows_l2, types
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.targets import Target


@dataclass(frozen=True)
class Walk:
    """The macros of `walk_columns.cu`, which says what each is."""

    STAGES: int = 7
    RESIDENT: int = 2
    BOX: int = 32

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring and its barriers."""
        return self.STAGES * (CHUNK_ROWS * ROW_BYTES + 2 * 8)


# As timed on an H200, by the mean rows of a group: the ring of the first holds groups of up to so many. Blocks that run
# further ahead part from those beside them, which read the other pieces of the same rows.
_WALKS: Final = ((340, Walk(4, BOX=128)), (10**9, Walk()))
# With fewer or more rows the other kernels are as fast or faster.
_LEAST_WALKED: Final = 64
_MOST_WALKED: Final = 640
_LEAST_SHARE: Final = 4096  # rows of a panel for each multiprocessor


def default_walk(x: Tensor, groups: int, cores: int) -> Walk | None:
    """For so many groups of an x `(M, N)`, where they are small and many enough to be walked over."""
    rows, columns = x.shape
    panels = -(-columns * x.element_size() // ROW_BYTES)
    if groups < 2 or rows < groups * _LEAST_WALKED or panels * rows < _LEAST_SHARE * cores:
        return None
    if rows > groups * _MOST_WALKED or panels * rows > LARGEST_INT32:
        return None
    return next(walk for most, walk in _WALKS if rows <= groups * most)


def plan(
    x: Tensor, out: Quantized, scale: str, target: Target, offsets: Tensor, tile: Walk | None = None,
    blocks: int | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch on groups of a row-major x `(M, N)` that the copy engine takes, by so many `blocks`."""
    m, n = x.shape
    tile = tile or Walk()
    most = target.cores * tile.RESIDENT
    columns = ROW_BYTES // x.element_size()
    macros: dict[str, int | str] = {
        **types(x, out, scale), "PANEL": columns, "CLUSTER": 1, "WARPS": PIECES,
        "X_LEAVES": f"Leaves::{'LAST' if outgrows_l2(x) else 'ANY'}", **vars(tile),
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("walk_columns.cu", "walk_columns", tuple(macros.items())),
        grid=(blocks or _shares(-(-n // columns), most), 1, 1),
        threads=32 * (PIECES + 1),
        shared=tile.shared,
        args={
            "x": TensorMap(as_batch(x), (1, tile.BOX, columns), ROW_BYTES, promotion=ROW_BYTES),
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
