"""Blocks of a scale, and where data and scales lie in memory.

A block `(r, c)` shares one scale among `r` rows and `c` columns; `-1` means the whole axis. Of a matrix that enters a
product, the long side of its block is the contraction. Memory follows from that, so that a GEMM loads without copies:

- data is contiguous along the contraction, its leading dimension padded to 16 bytes (TMA's granularity);
- the scales of a one-sided block are contiguous along the other axis; those of a square block follow their data. Their
  leading dimension is padded to 16 bytes too.

Hence the layout of one-sided blocks commutes with transposition: `quantize(x, (c, r))` lies as `quantize(x.mT, (r, c))`
does, transposed. A square block follows its input, and is row-major where the input has no contiguous axis; quantized
for both sides (`quantize_dual`), it is row-major first and column-major second, as one-sided blocks `(1, c)` are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Final, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from fp8fn.ops.kinds import kind_of
from fp8fn.ops.torch_private.core import dispatch_depth, symbolic_shapes

Block: TypeAlias = tuple[int, int]
Strides: TypeAlias = tuple[int, ...]
P = ParamSpec("P")
T = TypeVar("T")

WHOLE: Final = -1
BLOCKS: Final[tuple[Block, ...]] = (
    (1, 128), (128, 1), (128, 128), (1, WHOLE), (WHOLE, 1), (WHOLE, WHOLE), (1, 32), (32, 1),
)  # fmt: skip
_KNOWN: Final = frozenset(BLOCKS)
# The blocks of the operands that `mx_mm` multiplies.
MX_A_BLOCK: Final[Block] = (1, 32)
MX_B_BLOCK: Final[Block] = (32, 1)


def without_guards() -> AbstractContextManager[None]:
    """Tracing inside adds no guard that asks whether a tensor is contiguous.

    Tracing asks this of every result. For a dynamic M the answer differs between lengths: `ceil(M / 128)` scales may be
    one row, and `M` may equal its padded stride. Guards on either compile a graph again for other lengths. In here
    PyTorch takes such a result to be contiguous only where it always is.
    """
    context: AbstractContextManager[None] = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return context


def unguarded(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose results, and the views that it makes of them, are traced `without_guards()`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if dispatch_depth() == 0:  # not traced
            return function(*args, **kwargs)
        with without_guards():
            return function(*args, **kwargs)

    return call


def known_block(block: object) -> Block | None:
    """The block of `BLOCKS` with these sizes, None where there is none.

    Sizes are compared one by one, and the result is constants: torch.compile may have made those of a `ScaledTensor`
    symbolic, and SymPy does not come back from the one condition that `block in BLOCKS` then is.
    """
    if isinstance(block, (tuple, list)) and len(block) == 2:
        rows, columns = block
        if type(rows) is int and type(columns) is int:
            return (rows, columns) if (rows, columns) in _KNOWN else None
        if isinstance(rows, (float, bool)) or isinstance(columns, (float, bool)):  # equal to a size, and none
            return None
        for known in BLOCKS:
            if rows == known[0] and columns == known[1]:
                return known
    return None


def unknown_block(name: str, block: object) -> TypeError | ValueError:
    """The error for what `known_block` does not know; `name` says whose argument it is."""
    remedy = f"use one of {BLOCKS} (-1 is a whole axis)"
    if not isinstance(block, (tuple, list)):
        return TypeError(f"{name}={block!r} is {kind_of(block)}, not a pair of ints; {remedy}")
    return ValueError(f"{name}={tuple(block)} is not a block of fp8fn; {remedy}")


def is_mx(a_scale: Tensor, a_block: Block, b_scale: Tensor, b_block: Block) -> bool:
    """Whether `mx_mm` multiplies operands in these formats."""
    if a_scale.dtype != torch.float8_e8m0fnu or b_scale.dtype != torch.float8_e8m0fnu:
        return False
    return (known_block(a_block), known_block(b_block)) == (MX_A_BLOCK, MX_B_BLOCK)


def swap(block: Block) -> Block:
    """The block of the transposed matrix."""
    return block[1], block[0]


def is_square(block: Block) -> bool:
    return block[0] == block[1]


def contracts_rows(block: Block) -> bool:
    """Whether the long side of a one-sided block runs along the rows' axis (the first of the two)."""
    rows, columns = block
    return columns != WHOLE and (rows == WHOLE or rows > columns)


def extent(size: int, block: int) -> int:
    """The number of elements of an axis of `size` that share a scale."""
    return size if block == WHOLE else block


def blocks_along(size: int, block: int) -> int:
    """`ceil(size / block)`; a whole axis is one block, also an empty one."""
    return 1 if block == WHOLE else -(-size // block)


def scale_dtype(scale: str) -> torch.dtype:
    """The type in which a scale of this format is stored."""
    return torch.float8_e8m0fnu if scale in ("e8m0", "rceil") else torch.float32


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """The shape of the scales of data of `shape`."""
    *lead, rows, columns = shape
    return (*lead, blocks_along(rows, block[0]), blocks_along(columns, block[1]))


def is_column_major(x: Tensor) -> bool:
    """Whether the rows' axis is the contiguous one of the last two; a contiguous tensor is row-major."""
    return bool(x.stride(-1) != 1 and x.stride(-2) == 1)


def data_is_column_major(x: Tensor, block: Block) -> bool:
    """Whether `quantize(x, block)` stores its data column-major: by the contraction, or as `x` for a square block."""
    return is_column_major(x) if is_square(block) else contracts_rows(block)


def scale_is_column_major(data_column_major: bool, block: Block) -> bool:
    return data_column_major if is_square(block) else not contracts_rows(block)


def round_up(size: int, to: int) -> int:
    return (size + to - 1) // to * to


def matrix_strides(shape: Sequence[int], column_major: bool, align: int) -> Strides:
    """Strides of a batch of matrices whose leading dimension is a multiple of `align` elements."""
    rows, columns = shape[-2], shape[-1]
    lead = round_up(rows if column_major else columns, align)
    strides = [1, lead] if column_major else [lead, 1]
    step = lead * (columns if column_major else rows)
    for size in reversed(shape[:-2]):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


def empty_data(x: Tensor, block: Block, dtype: torch.dtype, column_major: bool | None = None) -> Tensor:
    """Uninitialised FP8 data for `quantize(x, block)`, of the shape of `x`; `column_major` overrides the rules."""
    if column_major is None:
        column_major = data_is_column_major(x, block)
    return torch.empty_strided(x.shape, matrix_strides(x.shape, column_major, 16), dtype=dtype, device=x.device)


def empty_scale(x: Tensor, block: Block, scale: str, column_major: bool | None = None) -> Tensor:
    """Uninitialised scales for `quantize(x, block)`; `column_major` is that of their data."""
    if column_major is None:
        column_major = data_is_column_major(x, block)
    shape, dtype = scale_shape(x.shape, block), scale_dtype(scale)
    strides = matrix_strides(shape, scale_is_column_major(column_major, block), 16 // dtype.itemsize)
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)


def turned(x: Tensor, column_major: bool) -> Tensor:
    """A copy of data or scales with the strides of a row- or column-major result."""
    strides = matrix_strides(x.shape, column_major, 16 // x.element_size())
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    if x.element_size() == 1:  # as bytes, for PyTorch copies no e8m0
        copy.view(torch.uint8).copy_(x.view(torch.uint8))
    else:
        copy.copy_(x)
    return copy


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device with the same strides; an axis that `expand` made is expanded again, not written out."""
    expanded = any(stride == 0 for stride in x.stride())
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())] if expanded else x
    copy = torch.empty_strided(once.shape, x.stride(), dtype=x.dtype, device=device)
    if x.element_size() == 1:  # as bytes, for PyTorch copies no e8m0
        copy.view(torch.uint8).copy_(once.view(torch.uint8))
    else:
        copy.copy_(once)
    # A view by `expand` would have torch.compile add and subtract where the copy is written: in FP8, it rounds.
    return copy.expand(x.shape) if expanded else copy


def as_batch(x: Tensor) -> Tensor:
    """Leading dimensions as one: `(..., M, N)` → `(B, M, N)`; a matrix stays one."""
    return x if x.ndim <= 3 else x.flatten(0, -3)
