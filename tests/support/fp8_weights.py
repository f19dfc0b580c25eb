"""FP8 weights, and the values that they stand for, computed from data and scales without the code under test."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block


def make(
    *shape: int, block: Block = (128, 128), dtype: torch.dtype = torch.float32, scale: ScaleFormat = "fp32"
) -> FP8Weight:
    return FP8Weight(fp8fn.quantize(torch.randn(shape), block, scale=scale), dtype)


def values(weight: Tensor) -> Tensor:
    """The float32 values of a matrix or of experts: each element by the scale of its block."""
    assert isinstance(weight, FP8Weight)
    q = weight.scaled
    scale = q.scale.float()
    for axis, block in zip((-2, -1), q.block, strict=True):
        size = q.shape[axis]
        scale = scale.repeat_interleave(size if block == -1 else block, axis).narrow(axis, 0, size)
    return q.data.float() * scale


def parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of data and scales."""
    assert isinstance(weight, FP8Weight)
    scale = weight.scaled.scale
    dense = torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
    dense.copy_(scale)
    return weight.scaled.data.view(torch.uint8), dense.flatten().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two weights have equal bytes, blocks and element types."""
    assert isinstance(a, FP8Weight)
    assert isinstance(b, FP8Weight)
    kinds = [(w.scaled.block, w.scaled.dtype, w.scaled.scale.dtype) for w in (a, b)]
    return kinds[0] == kinds[1] and all(map(torch.equal, parts(a), parts(b)))


def layer(
    n: int = 320,
    k: int = 384,
    *,
    bias: bool = False,
    block: Block = (128, 128),
    dtype: torch.dtype = torch.float32,
    scale: ScaleFormat = "fp32",
) -> nn.Linear:
    """A linear layer with an FP8 weight."""
    made = nn.Linear(k, n, bias=bias, dtype=dtype)
    made.weight = nn.Parameter(make(n, k, block=block, dtype=dtype, scale=scale), requires_grad=False)
    return made
