"""FSDP2's gather of a sharded FP8 weight: the bytes at each gather, the scales at the first one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE
from fp8fn.weights.fp8_weight import FP8Weight, bytes_of, weight_of


def before_gather(shard: FP8Weight, mesh: Any, size: torch.Size) -> tuple[tuple[Tensor, ...], Any]:
    """The bytes of this rank's shard, in the padded size that FSDP wants from every rank."""
    count = mesh.size()
    data, block = bytes_of(shard._data), shard._form.block
    by_rows = size[1:] == shard.shape[1:]
    rows = -(-size[0] // count)
    if by_rows and data.shape[0] < rows:
        data = torch.cat([data, data.new_zeros(rows - data.shape[0], *data.shape[1:])])
    if shard._gathered is None:
        shard._gathered = _gathered_scales(shard, mesh, rows if by_rows else None)
    return (data.contiguous(),), (shard._gathered, block, shard._data.dtype, size)


def _gathered_scales(shard: FP8Weight, mesh: Any, rows: int | None) -> Tensor:
    """The scales of all shards. They never change, so they are gathered once; `rows` a shard, None for columns."""
    scale, block = bytes_of(shard._scale), shard._form.block
    if rows is not None and block[0] == WHOLE:
        return shard._scale
    need = scale.shape[0] if rows is None else -(-rows // block[0])
    padded = torch.cat([scale, scale.new_zeros(need - scale.shape[0], *scale.shape[1:])]).contiguous()
    parts = [torch.empty_like(padded) for _ in range(mesh.size())]
    torch.distributed.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat(parts, 1 if rows is None else 0).view(shard._scale.dtype)


def after_gather(
    shard: FP8Weight, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype | None, out: FP8Weight | None
) -> Any:
    """The whole weight over the gathered bytes."""
    scale, block, data_dtype, size = metadata
    data = outputs[0].reshape(-1)[: math.prod(size)].view(size).view(data_dtype)
    if block[0] != WHOLE:
        scale = scale[: -(-size[0] // block[0])]
    if out is not None:
        out._data, out._scale = data, scale
        return None
    form = shard._form._replace(block=block, dtype=param_dtype or shard._form.dtype, shares=False)
    return weight_of(data, scale, form), outputs
