"""Copies, conversions and new tensors of an FP8 weight, and `copy_`, the one op that writes into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE, known_block, moved
from fp8fn.weights.form import Form, bytes_of, longer
from fp8fn.weights.fp8_weight import FP8Weight, NoForm, check_dtype, implements, weight_of
from fp8fn.weights.views import with_row_scales

aten = torch.ops.aten


def with_parts(weight: FP8Weight, change: Callable[[Tensor], Tensor], form: Form | None = None) -> FP8Weight:
    """A weight of `change(data)` and `change(scale)`."""
    return weight_of(change(weight._data), change(weight._scale), weight._form if form is None else form)


def _owned(weight: FP8Weight) -> Form:
    """The form of a copy, whose scales belong to it alone."""
    return weight._form._replace(shares=False)


@implements(aten.clone.default)
def clone(weight: FP8Weight, *, memory_format: torch.memory_format | None = None) -> FP8Weight:
    if memory_format is torch.contiguous_format:
        return with_parts(weight, contiguous_copy, _owned(weight))
    return with_parts(weight, lambda part: moved(part, part.device), _owned(weight))


def contiguous_copy(part: Tensor) -> Tensor:
    """A contiguous copy; PyTorch does not copy every 8-bit type, so bytes are copied."""
    return bytes_of(part).clone(memory_format=torch.contiguous_format).view(part.dtype)


@implements(aten._to_copy.default)
def to_copy(
    weight: FP8Weight, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None,
    pin_memory: bool | None = None, non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> FP8Weight:  # fmt: skip
    """Another device copies both parts; another dtype changes what the weight stands for and copies nothing."""
    form = weight._form
    if dtype is not None and dtype != form.dtype:
        check_dtype("FP8Weight.to", dtype)
        form = form._replace(dtype=dtype)
        if device is None or torch.device(device) == weight.device:
            return weight_of(weight._data, weight._scale, form)
    target = weight.device if device is None else torch.device(device)
    form = form._replace(shares=False)
    if non_blocking and target != weight.device:
        return with_parts(weight, lambda part: _moved_later(part, target), form)
    return with_parts(weight, lambda part: moved(part, target), form)


def _moved_later(part: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)
    bytes_of(copy).copy_(bytes_of(part), non_blocking=True)
    return copy


@implements(aten.copy_.default)
def copy_(weight: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies the data of an `FP8Weight` of the same block, or quantizes a tensor; a tensor gets dequantized values."""
    if not isinstance(weight, FP8Weight):
        assert isinstance(source, FP8Weight)
        return weight.copy_(source.dequantize())
    block = weight._form.block
    if weight._form.shares or weight._form.flat or weight.ndim < 2:
        raise NotImplementedError(
            f"copy_ into a view of an FP8Weight, {tuple(weight.shape)} in blocks of {block}, whose scales belong to "
            "other elements too or are a copy; write the whole weight, or whole blocks of it"
        )
    if not weight.numel() and source.shape == weight.shape:
        return weight  # a rank's empty shard, whose rows may have lost their block
    if not isinstance(source, FP8Weight):
        source = _quantized(weight, source)
    if block[0] == 1 and source._form.block[0] == WHOLE and not source._form.flat:
        source = with_row_scales(source, 0)  # a shard of FSDP2 that was padded
    if source._form.block != block or source._data.dtype != weight._data.dtype or source._form.flat:
        raise ValueError(
            f"copy_ of an FP8Weight of {source._data.dtype} in blocks of {source._form.block} into one of "
            f"{weight._data.dtype} in blocks of {block}; assign a new torch.nn.Parameter, or copy source.dequantize()"
        )
    if source._scale.dtype != weight._scale.dtype:
        raise ValueError(
            f"copy_ of an FP8Weight with scales of {source._scale.dtype} into one with scales of "
            f"{weight._scale.dtype}; assign a new torch.nn.Parameter, or copy source.dequantize()"
        )
    if source.shape != weight.shape:
        raise ValueError(f"copy_ of an FP8Weight of shape {tuple(source.shape)} into one of {tuple(weight.shape)}")
    # AOTAutograd functionalizes writes into its inputs, and not into views of another type.
    weight._data.copy_(source._data, non_blocking)
    weight._scale.copy_(source._scale, non_blocking)
    return weight


def _quantized(weight: FP8Weight, source: Tensor) -> FP8Weight:
    """A tensor in the block and the types of a weight."""
    block = weight._form.block
    pair = known_block(block[-2:])
    if pair is None or any(b != 1 and n != 1 for b, n in zip(block[:-2], weight.shape, strict=False)):
        raise NotImplementedError(
            f"copy_ quantizes a tensor, and {block} is no block of a quantizer; copy an FP8Weight"
        )
    scale = "fp32" if weight._scale.dtype == torch.float32 else "e8m0"
    # `copy_` alone arrives with views that are negated or conjugated lazily; PyTorch resolves them for other ops.
    values = source.resolve_conj().resolve_neg().to(weight.device).expand(weight.shape)
    values = values if values.dtype in (torch.bfloat16, torch.float16, torch.float32) else values.float()
    data, scales = torch.ops.fp8fn.quantize(values, pair, weight._data.dtype, scale)
    return weight_of(data, scales, weight._form)


@implements(aten.empty_like.default)
def empty_like(weight: FP8Weight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> FP8Weight:
    if dtype not in (None, weight._form.dtype):
        raise NoForm
    target = weight.device if device is None else torch.device(device)

    def empty(part: Tensor) -> Tensor:
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=target)

    return with_parts(weight, empty, _owned(weight))


@implements(aten.new_empty.default)
def new_empty(weight: FP8Weight, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """A weight of the same shape; a tensor for another shape."""
    if tuple(size) == tuple(weight.shape):
        return new_zeros(weight, size, dtype=dtype, device=device)
    target = weight.device if device is None else device
    return torch.empty(list(size), dtype=dtype or weight._form.dtype, device=target)


@implements(aten.new_zeros.default)
def new_zeros(weight: FP8Weight, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """A weight that is longer or shorter along one dimension, as FSDP2 pads its shards; a tensor for another shape."""
    form, shape = weight._form, list(size)
    target = weight.device if device is None else torch.device(device)
    others = [axis for axis, (n, old) in enumerate(zip(shape, weight.shape, strict=False)) if n != old]
    if dtype not in (None, form.dtype) or form.flat or len(shape) != weight.ndim or len(others) > 1:
        return torch.zeros(shape, dtype=dtype or form.dtype, device=target)
    for axis in others:
        if form.block[axis] == WHOLE or shape[axis] % form.block[axis]:
            form = form._replace(block=(*form.block[:axis], 1, *form.block[axis + 1 :]))
    scales = [1 if b == WHOLE else math.ceil(n / b) for n, b in zip(shape, form.block, strict=True)]
    data = torch.zeros(shape, dtype=torch.uint8, device=target).view(weight._data.dtype)
    scale = torch.zeros(scales, device=target).to(weight._scale.dtype)
    return weight_of(data, scale, form._replace(shares=False))


@implements(aten.constant_pad_nd.default)
def pad(weight: FP8Weight, pads: Sequence[int], value: float = 0) -> FP8Weight:
    """Zeros behind the end of one axis, as PyTorch pads shards to one size before it scatters them."""
    form, axis, more = weight._form, weight.ndim - len(pads) // 2, pads[-1] if pads else 0
    if any(pads[:-1]) or more < 0 or value != 0 or form.flat:
        raise NoForm
    block = form.block[axis]
    lines = 0 if block == WHOLE else math.ceil((weight.shape[axis] + more) / block) - weight._scale.shape[axis]
    return weight_of(longer(weight._data, axis, more), longer(weight._scale, axis, lines), _owned(weight))


def _plain(op: Any) -> Callable[..., Tensor]:
    """An op that reads no value: it gets a tensor of the weight's shape that takes no memory."""

    def run(weight: FP8Weight, *args: Any, **kwargs: Any) -> Tensor:
        shape = torch.empty((), dtype=weight._form.dtype, device=weight.device).expand(weight.shape)
        out: Tensor = op(shape, *args, **kwargs)
        return out

    return run


for _op in (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
    aten.randn_like.default,
):  # fmt: skip
    implements(_op)(_plain(_op))


@implements(aten._pin_memory.default)
def pin_memory(weight: FP8Weight, device: Any = None) -> FP8Weight:
    return with_parts(weight, lambda part: bytes_of(part).pin_memory().view(part.dtype))


@implements(aten.is_pinned.default)
def is_pinned(weight: FP8Weight, device: Any = None) -> bool:
    return weight._data.is_pinned() and weight._scale.is_pinned()


@implements(aten.record_stream.default)
def record_stream(weight: FP8Weight, stream: Any) -> None:
    for part in (weight._data, weight._scale):
        part.record_stream(stream)


@implements(aten.equal.default)
def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two weights have the same data and scales in the same block."""
    if not (isinstance(a, FP8Weight) and isinstance(b, FP8Weight)):
        raise NoForm
    if a._form.block != b._form.block or a.shape != b.shape:
        raise NoForm
    parts = ((a._data, b._data), (a._scale, b._scale))
    return all(x.dtype == y.dtype and torch.equal(bytes_of(x), bytes_of(y)) for x, y in parts)


@implements(aten.cat.default)
def cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Weights joined at the borders of blocks; vectors, as DDP makes them of parameters, stay apart."""
    from fp8fn.weights.collectives import joined

    if any(isinstance(each, FP8Weight) and each._form.flat for each in tensors):
        return joined(tensors)
    first = next(each for each in tensors if isinstance(each, FP8Weight))
    form = first._form
    weights = [each for each in tensors if isinstance(each, FP8Weight) and each._form.block == form.block]
    axis %= first.ndim
    block = form.block[axis]
    same = {(w._data.dtype, w._scale.dtype, w._form.dtype) for w in weights}
    if (
        len(weights) != len(tensors)
        or len(same) > 1
        or block == WHOLE
        or any(w.shape[axis] % block for w in weights[:-1])
    ):
        raise NoForm

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([bytes_of(part) for part in parts], axis).view(parts[0].dtype)

    data, scale = join([w._data for w in weights]), join([w._scale for w in weights])
    return weight_of(data, scale, form._replace(shares=False))


@implements(aten.stack.default)
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Weights as the experts of one weight."""
    if not all(isinstance(each, FP8Weight) and not each._form.flat for each in tensors):
        raise NoForm
    return cat([each.unsqueeze(axis) for each in tensors], axis)
