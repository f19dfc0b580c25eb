"""Views of an FP8 weight that are views of its data and its scales.

A view that cuts a block of 128 rows has a scale for each row, a copy: the kernels know (1, 128) and not (64, 128).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE
from fp8fn.weights.form import Form, bytes_of
from fp8fn.weights.fp8_weight import FP8Weight, NoForm, implements, weight_of

aten = torch.ops.aten
# What `Tensor.view` raises where the strides do not allow it; of a fake tensor it is a ValueError.
_NO_VIEW: Final = (RuntimeError, ValueError)


def alias(weight: FP8Weight) -> FP8Weight:
    return weight_of(weight._data, weight._scale, weight._form)


@implements(aten.detach.default)
def detach(weight: FP8Weight) -> FP8Weight:
    return weight_of(weight._data.detach(), weight._scale.detach(), weight._form)


implements(aten.alias.default)(alias)


@implements(aten.t.default)
def t(weight: FP8Weight) -> FP8Weight:
    form = weight._form
    if weight.ndim < 2:
        return alias(weight)
    # `linear` transposes at each call: a kept form saves a microsecond.
    return weight_of(weight._data.t(), weight._scale.t(), _transposed(form))


@cache
def _transposed(form: Form) -> Form:
    """The form of the transposed matrix."""
    return form._replace(block=form.block[::-1])


@implements(aten.transpose.int)
def transpose(weight: FP8Weight, first: int, second: int) -> FP8Weight:
    if weight.ndim < 2:
        return alias(weight)
    order = list(range(weight.ndim))
    order[first], order[second] = order[second], order[first]
    return permute(weight, order)


@implements(aten.permute.default)
def permute(weight: FP8Weight, dims: Sequence[int]) -> FP8Weight:
    if weight._form.flat:
        return alias(weight)
    order = [axis % weight.ndim for axis in dims]
    form = weight._form._replace(block=tuple(weight._form.block[axis] for axis in order))
    return weight_of(weight._data.permute(order), weight._scale.permute(order), form)


@implements(aten.unsqueeze.default)
def unsqueeze(weight: FP8Weight, axis: int) -> FP8Weight:
    if weight._form.flat:
        raise NoForm
    axis %= weight.ndim + 1
    block = weight._form.block
    form = weight._form._replace(block=(*block[:axis], 1, *block[axis:]))
    return weight_of(weight._data.unsqueeze(axis), weight._scale.unsqueeze(axis), form)


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(weight: FP8Weight, dims: int | Sequence[int] | None = None) -> FP8Weight:
    if weight._form.flat:
        return alias(weight)
    named = range(weight.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {axis % weight.ndim for axis in named if weight.shape[axis] == 1}
    form = weight._form._replace(block=tuple(b for axis, b in enumerate(weight._form.block) if axis not in gone))
    return weight_of(weight._data.squeeze(tuple(gone)), weight._scale.squeeze(tuple(gone)), form)


@implements(aten.expand.default)
def expand(weight: FP8Weight, size: Sequence[int], *, implicit: bool = False) -> FP8Weight:
    if weight._form.flat:
        raise NoForm
    new = len(size) - weight.ndim
    grown = [n == 1 and s not in (1, -1) for n, s in zip((1,) * new + tuple(weight.shape), size, strict=True)]
    block = [1 if g else b for g, b in zip(grown, (1,) * new + weight._form.block, strict=True)]

    def expanded(part: Tensor) -> Tensor:
        now = (1,) * new + tuple(part.shape)
        return part.expand([s if g else n for n, s, g in zip(now, size, grown, strict=True)])

    return weight_of(expanded(weight._data), expanded(weight._scale), weight._form._replace(block=tuple(block)))


@implements(aten.select.int)
def select(weight: FP8Weight, axis: int, index: int) -> FP8Weight:
    """One expert, row or column. A row of a block has scales that belong to other rows, too."""
    if weight._form.flat or weight.ndim == 1:
        raise NoForm
    axis, form = axis % weight.ndim, weight._form
    block, size = form.block[axis], weight.shape[axis]
    if not -size <= index < size:
        raise IndexError(f"select: index {index} is out of range for dimension {axis} of size {size} of an FP8Weight")
    index %= size
    # A form holds no symbolic values: it outlives the trace, in the views that a graph returns.
    shares = form.shares or bool(block != 1 and size != 1)
    form = form._replace(block=form.block[:axis] + form.block[axis + 1 :], shares=shares)
    at = 0 if block == WHOLE else index // block
    return weight_of(weight._data.select(axis, index), weight._scale.select(axis, at), form)


@implements(aten.unbind.int)
def unbind(weight: FP8Weight, axis: int = 0) -> list[FP8Weight]:
    if weight._form.flat or weight.ndim == 1:
        raise NoForm
    return [select(weight, axis, index) for index in range(weight.shape[axis])]


def with_row_scales(weight: FP8Weight, axis: int) -> FP8Weight:
    """The weight with a scale for each index along an axis: a copy of its scales."""
    block = weight._form.block
    if block[axis] == 1:
        return weight
    size = weight.shape[axis]
    repeats = size if block[axis] == WHOLE else block[axis]
    scale = bytes_of(weight._scale).repeat_interleave(repeats, axis).narrow(axis, 0, size).view(weight._scale.dtype)
    form = weight._form._replace(block=(*block[:axis], 1, *block[axis + 1 :]), shares=True)
    return weight_of(weight._data, scale, form)


@implements(aten.slice.Tensor)
def cut(weight: FP8Weight, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> FP8Weight:
    axis %= weight.ndim
    size = weight.shape[axis]
    first, last, _ = slice(start, None if end is None else min(end, size)).indices(size)
    if step == 1 and (first, last) == (0, size):
        return alias(weight)
    if weight._form.flat or step != 1:
        raise NoForm
    last = max(first, last)
    if weight._form.block[axis] == WHOLE:
        form = weight._form._replace(shares=True)
        return weight_of(weight._data.narrow(axis, first, last - first), weight._scale, form)
    if first % weight._form.block[axis]:
        weight = with_row_scales(weight, axis)
    block = weight._form.block[axis]
    top, bottom = first // block, -(-last // block)
    form = weight._form._replace(shares=weight._form.shares or bool(last % block != 0 and last != size))
    scale = weight._scale.narrow(axis, top, max(0, bottom - top))
    return weight_of(weight._data.narrow(axis, first, last - first), scale, form)


@implements(aten.split.Tensor)
def split(weight: FP8Weight, size: int, axis: int = 0) -> list[FP8Weight]:
    whole = weight.shape[axis]
    return split_with_sizes(weight, [min(size, whole - at) for at in range(0, max(whole, 1), max(size, 1))], axis)


@implements(aten.split_with_sizes.default)
def split_with_sizes(weight: FP8Weight, sizes: Sequence[int], axis: int = 0) -> list[FP8Weight]:
    if weight._form.flat:
        raise NoForm
    axis %= weight.ndim
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    block = weight._form.block[axis]
    if block != WHOLE and any(start % block for start in starts):  # all parts in the same blocks
        weight = with_row_scales(weight, axis)
    return [cut(weight, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@implements(aten.as_strided.default)
def as_strided(weight: FP8Weight, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> FP8Weight:
    if tuple(size) != tuple(weight.shape) or tuple(stride) != weight.stride() or offset:
        raise NotImplementedError(
            f"as_strided of an FP8Weight of shape {tuple(weight.shape)}: its scales have no such strides; "
            "use weight.dequantize()"
        )
    return alias(weight)


@implements(aten.view.default, aten._unsafe_view.default)
def view(weight: FP8Weight, size: Sequence[int]) -> FP8Weight:
    shape = list(size)
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = weight.numel() // rest if rest else 0
    if weight._form.flat:
        if shape == list(weight._data.shape):
            return weight_of(weight._data, weight._scale, weight._form._replace(flat=False))
        if len(shape) != 1:
            raise NoForm
        return alias(weight)
    if shape == list(weight.shape):
        return alias(weight)
    if len(shape) == 1 and weight.ndim > 1 and weight._data.is_contiguous():
        return weight_of(weight._data, weight._scale, weight._form._replace(flat=True))
    out = _reshaped(weight, shape)
    if out is None and weight.ndim > 1 and weight._form.block[-2] not in (1, WHOLE):
        # A scale for each row lets rows be merged and split anywhere.
        out = _reshaped(with_row_scales(weight, weight.ndim - 2), shape)
    if out is None:
        raise NoForm
    return out


@implements(aten._reshape_alias.default)
def reshape_alias(weight: FP8Weight, size: Sequence[int], stride: Sequence[int]) -> FP8Weight:
    return view(weight, size)


@dataclass
class _Axis:
    """A dimension of the data, the block along it, and the number of scales along it."""

    size: int
    block: int
    scales: int


def _reshaped(weight: FP8Weight, shape: Sequence[int]) -> FP8Weight | None:
    """The weight with dimensions merged and split at the borders of blocks; None where a block would be torn."""
    sizes = zip(weight.shape, weight._form.block, weight._scale.shape, strict=True)
    old = [_Axis(*each) for each in sizes if each[0] != 1]
    new = [size for size in shape if size != 1]
    made: list[_Axis] = []
    while old and new:
        axis, size = old[0], new[0]
        if axis.size == size:
            made.append(old.pop(0))
            new.pop(0)
        elif axis.size < size:  # merge with the next dimension
            if len(old) == 1 or axis.block != 1 or old[1].block == WHOLE or old[1].size % old[1].block:
                return None
            old[:2] = [_Axis(axis.size * old[1].size, old[1].block, axis.scales * old[1].scales)]
        else:  # split off the first dimension
            if size == 0 or axis.size % size or axis.block == WHOLE or (axis.size // size) % axis.block:
                return None
            old[0] = _Axis(axis.size // size, axis.block, axis.scales // size)
            made.append(_Axis(new.pop(0), 1, size))
    if old or new:
        return None
    axes = iter(made)
    full = [next(axes) if size != 1 else _Axis(1, 1, 1) for size in shape]
    try:
        data = weight._data.view(list(shape))
    except _NO_VIEW:
        return None
    lengths = [axis.scales for axis in full]
    shares = weight._form.shares
    try:
        scale = weight._scale.view(lengths)
    except _NO_VIEW:  # scales lie with padded rows
        scale, shares = bytes_of(weight._scale).reshape(lengths).view(weight._scale.dtype), True
    return weight_of(data, scale, weight._form._replace(block=tuple(axis.block for axis in full), shares=shares))


@implements(aten.index.Tensor)
def index(weight: FP8Weight, indices: Sequence[Tensor | None]) -> FP8Weight:
    """The rows or experts that an integer tensor names: a copy."""
    rows = indices[0]
    if weight._form.flat or rows is None or any(other is not None for other in indices[1:]):
        raise NoForm
    if rows.dtype in (torch.bool, torch.uint8):
        raise NoForm
    return taken(weight, rows)


@implements(aten.index_select.default)
def index_select(weight: FP8Weight, axis: int, rows: Tensor) -> FP8Weight:
    if weight._form.flat or axis % weight.ndim or rows.ndim != 1:
        raise NoForm
    return taken(weight, rows, lambda part, rows: part.index_select(0, rows))


def taken(
    weight: FP8Weight, rows: Tensor, take: Callable[[Tensor, Tensor], Tensor] = lambda part, rows: part[rows]
) -> FP8Weight:
    """The rows that an integer tensor names, by `take(part, rows)`: it decides which numbers are errors."""
    block = weight._form.block
    at = (
        rows if block[0] == 1 else torch.zeros_like(rows) if block[0] == WHOLE else (rows % weight.shape[0]) // block[0]
    )
    pick: Callable[[Tensor, Tensor], Tensor] = lambda part, i: take(bytes_of(part), i).view(part.dtype)  # noqa: E731
    form = weight._form._replace(block=(1,) * rows.ndim + block[1:], shares=False)
    return weight_of(pick(weight._data, rows), pick(weight._scale, at), form)


@implements(aten.embedding.default)
def embedding(
    weight: FP8Weight, rows: Tensor, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """The dequantized rows of a table; no other row is dequantized."""
    if not isinstance(weight, FP8Weight) or weight._form.flat or weight.ndim != 2:
        raise NoForm
    return taken(weight, rows, aten.embedding.default).dequantize()
