"""Everything about an FP8 weight but its two tensors, and their bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.activations import Activations
from fp8fn.ops.layout import Block
from fp8fn.version import __version__


class Form(NamedTuple):
    """Everything about an `FP8Weight` but its two tensors; torch.compile guards on it.

    `block` has one entry for each dimension of the data (1 for experts, -1 for a whole axis), so that a permutation and
    most reshapes of a weight are views of its data and scales. `flat` says that the weight is seen as a vector, as FSDP
    and DDP see parameters. `shares` says that a scale also belongs to elements outside of this view, or is a copy: then
    nothing may be written into the view. `activations` is how products read what the weight multiplies. `gathered` says
    that the weight was quantized for a training step: a recipe's products take it in the place of its master, and its
    gradient is the master's.
    """

    block: tuple[int, ...]
    dtype: torch.dtype
    flat: bool = False
    shares: bool = False
    activations: Activations = "16bit"
    gathered: bool = False


def block_by_dimension(ndim: int, block: Block) -> tuple[int, ...]:
    """`Form.block` of data with `ndim` dimensions: 1 for experts, and the block of a matrix."""
    return (1,) * (ndim - 2) + tuple(block)


def bytes_of(part: Tensor) -> Tensor:
    """Data or scales of one byte as uint8, which every op of PyTorch takes; float32 scales as they are."""
    return part.view(torch.uint8) if part.element_size() == 1 else part


def cache_key(kind: str, form: object, *parts: Tensor) -> str:
    """The key of a subclass in AOTAutograd's cache: metadata, and the version, which decides what ops trace to."""
    known = [(part.shape, part.stride(), part.dtype, part.device) for part in parts]
    return f"{kind} {__version__} {form} {known}"


def longer(part: Tensor, axis: int, more: int) -> Tensor:
    """Data or scales with zeros behind the end of an axis."""
    known = bytes_of(part)
    size = (*known.shape[:axis], more, *known.shape[axis + 1 :])
    return torch.cat([known, known.new_zeros(size)], axis).view(part.dtype)
