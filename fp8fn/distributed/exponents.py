"""Scales that are powers of two as they are sent: the exponent alone, a byte; and what FP8 rounds beyond a type."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_FRACTION: Final = 23  # bits of float32's fraction


def exponents_of(scale: Tensor) -> Tensor:
    """The exponents of float32 powers of two: of NaN and Inf 255, and the data of such a block are NaN.

    By shifts of integers, for Inductor's kernels make no `float8_e8m0fnu` of a scale.
    """
    return (scale.view(torch.int32) >> _FRACTION).to(torch.uint8)


def scale_of(exponents: Tensor) -> Tensor:
    """The scales again; 255 is Inf."""
    return (exponents.to(torch.int32) << _FRACTION).view(torch.float32)


def saturated(x: Tensor) -> Tensor:
    """Rows that came as FP8, in place, with the largest finite number of their type for each Inf.

    FP8 rounds float16's 65504 to 65536, and the largest numbers of bfloat16 and float32 to 2**128. Such numbers keep
    their FP8 bits if they are quantized again. Rows that held an Inf are NaN in that block, and stay it.
    """
    largest = torch.finfo(x.dtype).max
    return x.clamp_(-largest, largest)
