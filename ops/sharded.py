"""What ops ask of a DTensor, without importing `torch.distributed.tensor`, which takes a second and a half."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE, Block


def is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(x) is getattr(module, "DTensor", None)


def local_of(x: Any) -> Any:
    """Each rank's part of a DTensor, or `x` itself."""
    if not is_sharded(x):
        return x
    from fp8fn.ops.torch_private.dtensor import local_part

    return local_part(x)


def beside(x: Tensor, other: Tensor) -> Tensor:
    """`other`, whole on each rank, as an op takes it beside `x`: a DTensor where that is one."""
    if not is_sharded(x):
        return other
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = x
    return DTensor.from_local(other, sharded.device_mesh, [Replicate()] * sharded.device_mesh.ndim, run_check=False)


def plain_of(x: Any) -> Any:
    """`local_of` without the wrapper by which FSDP2 gathers FP8 bytes: all ops run on the values within."""
    local = local_of(x)
    return local._tensor if getattr(type(local), "RUNS_ON_VALUES", False) else local


def splits_block(x: Tensor, block: Block) -> bool:
    """Whether `x` is a DTensor, sharded along an axis that is one block."""
    if WHOLE not in block or not is_sharded(x):
        return False
    sharded: Any = x
    dims = [place.dim - x.ndim for place in sharded.placements if place.is_shard()]
    return any(dim >= -2 and block[dim] == WHOLE for dim in dims)


def sharded_amax(x: Tensor, block: Block) -> Tensor | None:
    """The magnitudes that a quantizer has to be given for a tensor that `splits_block`; None for other tensors.

    Ranks agree on them instead of gathering data. They are reduced as integers, whose order is that of floats from 0
    on, and which have a NaN above all others: the reductions of floats may drop it.
    """
    if not splits_block(x, block):
        return None
    from torch.distributed.tensor import DTensor, Replicate

    parts: Any = torch.ops.fp8fn.amax(x, block)
    mesh, form = parts.device_mesh, {"shape": parts.shape, "stride": parts.stride()}
    bits = DTensor.from_local(parts.to_local().view(torch.int32), mesh, parts.placements, **form)
    bits = bits.redistribute(placements=[Replicate() if place.is_partial() else place for place in parts.placements])
    return DTensor.from_local(bits.to_local().view(torch.float32), mesh, bits.placements, **form)
