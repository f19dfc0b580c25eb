"""The definition of an operand's statistics, in float64: the CPU path, and the oracle of the kernel.

With `x` at hand, the shares are those of `fp8fn.error`. Without `x`, FP8 codes take its place: each code stands for the
values that round to it, spread evenly, so that its error has the variance `spacing² / 12`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.formats import fp8_max
from fp8fn.ops.reference.produce import rms_norm, silu_mul
from fp8fn.ops.reference.quantize import spread
from fp8fn.ops.statistics import TOLERANCE, Column, Watched, least_exponent, mantissa_bits


def statistics(watched: Watched) -> Tensor:
    """The columns `ELEMENTS` to `EXACT` of a row of statistics, `(7,)` in float64.

    Without `x`, a zero code counts as flushed, and a code of the largest magnitude as saturated if the format of the
    scale allows saturation: both are upper bounds.
    """
    data, scale, block = watched.q
    codes = data.double()
    spread_scale = spread(scale.float().double(), data.shape, block)
    values = codes * spread_scale
    if watched.exact:
        exact = _exact(watched).double()
        saturated = exact.abs() > spread_scale * (fp8_max(data.dtype) * TOLERANCE)
        flushed = (exact != 0) & (codes == 0)
        noise = (exact - values).square()
    else:
        exact = values
        saturated = (codes.abs() == fp8_max(data.dtype)) & watched.saturates
        flushed = codes == 0
        noise = (_spacing(data) * spread_scale).square() / 12
    row = exact.new_zeros(Column.STEP)
    row[Column.ELEMENTS] = data.numel()
    row[Column.SATURATED] = saturated.sum()
    row[Column.FLUSHED] = flushed.sum()
    row[Column.AMAX] = exact.abs().max() if exact.numel() else 0
    row[Column.SIGNAL] = exact.square().sum()
    row[Column.NOISE] = noise.sum()
    row[Column.EXACT] = watched.exact
    return row


def _exact(watched: Watched) -> Tensor:
    if watched.source == "silu_mul":
        return silu_mul(*watched.inputs)
    if watched.source == "rms_norm":
        x, weight, rstd = watched.inputs
        return rms_norm(x, weight, 0.0, rstd)
    return watched.inputs[0]


def _spacing(data: Tensor) -> Tensor:
    """The distance between FP8 numbers of a code's magnitude, in units of the scale."""
    exponent = torch.frexp(data.float().abs())[1] - 1
    exponent = exponent.clamp_min(least_exponent(data.dtype))
    return torch.exp2((exponent - mantissa_bits(data.dtype)).double())
