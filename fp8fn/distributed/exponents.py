"""Scales that are powers of two as they are sent: the exponent alone, a byte."""

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
