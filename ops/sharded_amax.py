"""The largest magnitudes of blocks that lie on several ranks: what they have to agree on, instead of gathering data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE, Block


def splits_block(x: Tensor, block: Block) -> bool:
    """Whether `x` is a DTensor, sharded along an axis that is one block."""
    if WHOLE not in block:
        return False
    dims = [place.dim - x.ndim for place in getattr(x, "placements", ()) if place.is_shard()]
    return any(dim >= -2 and block[dim] == WHOLE for dim in dims)


def sharded_amax(x: Tensor, block: Block) -> Tensor | None:
    """The magnitudes that a quantizer has to be given for a tensor that `splits_block`; None for other tensors.

    They are reduced as integers, whose order is that of floats from 0 on, and which have a NaN above all others: the
    reductions of floats may drop it.
    """
    if not splits_block(x, block):
        return None
    from torch.distributed.tensor import DTensor, Replicate

    parts: Any = torch.ops.fp8fn.amax(x, block)
    mesh, form = parts.device_mesh, {"shape": parts.shape, "stride": parts.stride()}
    bits = DTensor.from_local(parts.to_local().view(torch.int32), mesh, parts.placements, **form)
    bits = bits.redistribute(placements=[Replicate() if place.is_partial() else place for place in parts.placements])
    return DTensor.from_local(bits.to_local().view(torch.float32), mesh, bits.placements, **form)
