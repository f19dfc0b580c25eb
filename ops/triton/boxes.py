"""Boxes by TMA: of one matrix, or of each matrix of a batch, whose axis is then the box's first, of extent 1."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8fn.ops.cuda.operands import tma_batch


@triton.jit
def load_box(x, matrix, line, column):
    """The box from `line` and `column` on: of matrix `matrix` of a batch, or of the one that serves a whole batch."""
    if len(x.block_shape) == 3:
        box = tl.reshape(x.load([matrix, line, column]), (x.block_shape[1], x.block_shape[2]))
    else:
        box = x.load([line, column])
    return box


@triton.jit
def matrix_of(x, matrix):
    """The matrix of x that `load_box` loads from."""
    if len(x.block_shape) == 3:
        own = matrix
    else:
        own = 0
    return own


@triton.jit
def store_box(x, box, matrix, line, column):
    """Stores a box as `load_box` loads one; what lies past the edges of its matrix is left out."""
    value = box.to(x.dtype)
    if len(x.block_shape) == 3:
        x.store([matrix, line, column], tl.reshape(value, (1, x.block_shape[1], x.block_shape[2])))
    else:
        x.store([line, column], value)


def boxes(x: Tensor, lines: int, columns: int) -> TensorDescriptor:
    """Boxes of `lines` by `columns` of a matrix or of each matrix of a batch; a batch of one is a matrix."""
    batch = tma_batch(x)
    if batch.shape[0] == 1:
        return TensorDescriptor.from_tensor(batch[0], [lines, columns])
    return TensorDescriptor.from_tensor(batch, [1, lines, columns])
