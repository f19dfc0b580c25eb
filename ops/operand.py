"""`Quantized`: FP8 data, its scales and their block, passed whole."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp8fn.ops.layout import Block, swap


class Quantized(NamedTuple):
    """A quantized `(..., M, N)`: the numbers `data.float() * scale`, with `scale` repeated over `block`."""

    data: Tensor
    scale: Tensor
    block: Block

    @property
    def mT(self) -> Quantized:
        return Quantized(self.data.mT, self.scale.mT, swap(self.block))
