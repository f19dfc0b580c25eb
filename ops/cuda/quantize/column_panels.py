"""Operands and panel sizes that the three kernels of whole columns share.

A panel is a number of columns of one matrix or group. `stream_columns.cu` and `walk_columns.cu` load panels by
TMA, in chunks of 128 rows of 128 bytes; `quantize_columns.cu` uses plain loads. Whole rows are whole columns of the
transpose.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from fp8fn.ops.cuda.limits import MOST_BLOCKS
from fp8fn.ops.cuda.operands import hardware_fault, is_aligned, offsets_fault, rows_fault, tma_batch
from fp8fn.ops.cuda.runtime.launch import TensorMap
from fp8fn.ops.layout import WHOLE, is_column_major
from fp8fn.ops.operands import PLAIN, Quantization, Quantized

# A block's share of the rows is a multiple of it.
SECTOR_ROWS: Final = 32
# The sizes of a chunk, as `chunk.cuh` has them.
CHUNK_ROWS: Final = 128
ROW_BYTES: Final = 128
# Pieces of 16 bytes of a row; each warp takes one.
PIECES: Final = ROW_BYTES // 16


def rows_of(q: Quantization) -> int:
    """The rows of `columns_of`."""
    return columns_of(q).shape[-2]


def columns_of(q: Quantization) -> Tensor:
    """`x`, or its transpose for whole rows: one column has one scale."""
    return q.x.mT if q.block == (1, WHOLE) else q.x


def output_of(q: Quantization) -> Quantized:
    """The output of `columns_of`."""
    return q.out.mT if q.block == (1, WHOLE) else q.out


def columns_fault(q: Quantization) -> str | None:
    """Why no kernel of this folder quantizes whole columns of a non-empty `x`, or None."""
    if q.block not in ((WHOLE, 1), (1, WHOLE)) or q.dual or q.source is not PLAIN:
        return f"block {q.block}{' and its transpose' * q.dual} is no whole column"
    if (reason := hardware_fault(q) or offsets_fault(q)) is not None:
        return reason
    if q.groups >= MOST_BLOCKS:
        return f"offsets has {q.groups} groups, more than {MOST_BLOCKS - 1}"
    x = columns_of(q)
    if q.offsets is None and is_column_major(x):
        return f"x has strides {q.x.stride()}: elements with one scale are contiguous"
    return rows_fault(x)


def tma_fault(q: Quantization) -> str | None:
    """Why TMA does not copy the rows of `x`, or None: they do not overlap, and begin at multiples of 16 bytes."""
    x = columns_of(q)
    if is_aligned(x) and x.stride(-2) >= x.shape[-1]:
        return None
    return f"x has strides {q.x.stride()}, which TMA does not take"


def tensor_map(q: Quantization, box_rows: int) -> TensorMap:
    """Boxes of so many rows of a panel."""
    x = columns_of(q)
    if x.dim() > 3:  # the matrices follow each other; `flatten` would change strides of axes of size 1
        x = x.as_strided((q.matrices, *x.shape[-2:]), x.stride()[-3:])
    # With a larger promotion, a miss would bring a part of the next panel, which another cluster reads at another time:
    # 10 % slower.
    return TensorMap(tma_batch(x), (1, box_rows, panel_columns(q)), ROW_BYTES, promotion=ROW_BYTES)


def panel_columns(q: Quantization) -> int:
    """The columns of a panel of 128 bytes a row."""
    return ROW_BYTES // q.x.element_size()


def panels_of(columns: int, q: Quantization) -> int:
    """The panels of so many columns of one matrix or group."""
    return -(-columns // panel_columns(q))


def typical_rows(q: Quantization) -> int:
    """The rows to keep of a matrix, or of a group an eighth larger than the mean, which begins anywhere in a sector."""
    rows, groups = rows_of(q), q.groups
    return rows if groups < 2 else min(rows, -(-rows // groups) * 9 // 8) + SECTOR_ROWS - 1


def scale_lead(q: Quantization) -> int:
    """The distance from the scales of a group, or of a matrix, to those of the next."""
    scale = output_of(q).scale
    if q.offsets is not None:
        return scale.stride(0)
    return scale.stride(-3) if scale.dim() > 2 else 0
