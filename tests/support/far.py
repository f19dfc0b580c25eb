"""Tensors whose elements lie further apart than 32 bits reach, in memory that is reserved and hardly ever touched."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on

# A stride of 32 bits, of whose multiples the second is past them; its bytes are a multiple of 4096.
FAR: Final = 5 * 2**28


def far(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of `x` with these strides, in zeros that reach 2**31 elements to either side.

    An offset that lost its upper bits thus reads zeros, or writes where nothing reads, and is no access outside.
    """
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    around = 2**31 * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, 2 * around + (last + 1) * x.element_size(), flags=flags)
    whole = torch.frombuffer(memory, dtype=torch.uint8)[around : around + (last + 1) * x.element_size()].view(x.dtype)
    return whole.as_strided(x.shape, tuple(strides), whole.storage_offset()).copy_(x)
