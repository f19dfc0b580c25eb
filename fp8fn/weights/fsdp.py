"""FSDP2's gather of a sharded FP8 weight: bytes, and the scales of the shards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE
from fp8fn.weights.form import Form, bytes_of, longer

if TYPE_CHECKING:
    from fp8fn.weights.fp8_weight import FP8Weight


class Gathered(NamedTuple):
    """The weight that gathered bytes stand for. `scale` is None where the scales were gathered with the data."""

    size: torch.Size
    form: Form
    dtypes: tuple[torch.dtype, torch.dtype]
    scale: Tensor | None


def before_gather(shard: FP8Weight, mesh: Any, size: torch.Size) -> tuple[tuple[Tensor, ...], Gathered]:
    """The inputs of FSDP's gather.

    FSDP wants inputs of one size on all ranks. Scales of shards with equally many whole blocks are a second input. The
    scales of other shards are gathered here. A scale of a whole axis of rows is every shard's.
    """
    if size[1:] != shard.shape[1:]:
        raise NotImplementedError(
            f"FSDP of an FP8Weight of shape {tuple(size)}: shards of {tuple(shard.shape)} divide another dimension "
            "than the first; leave shard_placement_fn out"
        )
    data, block = bytes_of(shard._data), shard._form.block[0]
    rows = -(-size[0] // mesh.size())
    dtypes = (shard._data.dtype, shard._scale.dtype)
    if block == WHOLE or mesh.size() == 1:  # of one rank FSDP copies the first input alone
        return (_padded(data, rows),), Gathered(size, shard._form, dtypes, shard._scale)
    # A column of scales is contiguous with any stride along the other axis, and no bytes are viewed along that.
    scale = bytes_of(shard._scale).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if size[0] % mesh.size() == 0 and rows % block == 0:
        return (_padded(data, rows), scale), Gathered(size, shard._form, dtypes, None)
    scale = _padded(scale, -(-rows // block))
    parts = [torch.empty_like(scale) for _ in range(mesh.size())]
    torch.distributed.all_gather(parts, scale, group=mesh.get_group())
    return (_padded(data, rows),), Gathered(size, shard._form, dtypes, torch.cat(parts).view(dtypes[1]))


def _padded(part: Tensor, rows: int) -> Tensor:
    """A contiguous tensor of at least this many rows."""
    if part.shape[0] >= rows:
        return part.contiguous()
    return longer(part, 0, rows - part.shape[0])


def after_gather(outputs: tuple[Tensor, ...], gathered: Gathered) -> tuple[Tensor, Tensor]:
    """The data and the scales of the whole weight, over the gathered bytes."""
    form, (data_dtype, scale_dtype) = gathered.form, gathered.dtypes
    data = outputs[0].reshape(-1)[: math.prod(gathered.size)].view(gathered.size).view(data_dtype)
    scale = outputs[1].view(scale_dtype) if gathered.scale is None else gathered.scale
    if form.block[0] != WHOLE:
        scale = scale[: -(-gathered.size[0] // form.block[0])]
    return data, scale
