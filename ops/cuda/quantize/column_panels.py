"""What the launches of `stream_columns.cu`, `walk_columns.cu` and `quantize_columns.cu` have in common: their sizes."""

from __future__ import annotations

from typing import Final

from torch import Tensor

SECTOR: Final = 32  # rows, of which a block's share is a multiple
# Of a panel that comes in chunks, as chunk.cuh has them.
CHUNK_ROWS: Final = 128
ROW_BYTES: Final = 128
PIECES: Final = ROW_BYTES // 16  # of a row, each of which a warp has


def typical_rows(rows: int, groups: int) -> int:
    """Rows to keep of a matrix, or of a group an eighth larger than the mean, which begins anywhere in a sector."""
    return rows if groups < 2 else min(rows, -(-rows // groups) * 9 // 8) + SECTOR - 1


def scale_lead(scale: Tensor, grouped: bool) -> int:
    """From the scales of a group, or of a matrix, to those of the next."""
    if grouped:
        return scale.stride(0)
    return scale.stride(0) if scale.dim() == 3 else 0
