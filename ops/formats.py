"""The FP8 element types and the formats of their scales."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import torch

ScaleFormat: TypeAlias = Literal["fp32", "pow2", "e8m0", "rceil"]

FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INPUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
SCALE_FORMATS: Final[tuple[ScaleFormat, ...]] = ("fp32", "pow2", "e8m0", "rceil")
SCALE_DTYPES: Final = (torch.float32, torch.float8_e8m0fnu)

# The least amax of a "fp32" or "pow2" scale, so that a block of zeros has a finite scale and a finite inverse.
AMAX_FLOOR: Final = 1e-12


def fp8_max(dtype: torch.dtype) -> float:
    """The largest finite value of an FP8 type."""
    return torch.finfo(dtype).max


def fp8_max_exponent(dtype: torch.dtype) -> int:
    """`floor(log2(fp8_max))`: the `emax` of the OCP MX specification v1.0, section 6.3."""
    return {
        torch.float8_e4m3fn: 8,
        torch.float8_e5m2: 15,
        torch.float8_e4m3fnuz: 7,
        torch.float8_e5m2fnuz: 15,
    }[dtype]


def rceil_addend(dtype: torch.dtype) -> int:
    """The integer to add to the bits of `amax`: it raises the exponent by one where `"rceil"` rounds the scale up.

    With `amax = 1.f * 2 ** e` and `fp8_max = 1.m * 2 ** emax`, `ceil(log2(amax / fp8_max)) = e - emax + (f > m)`.
    """
    fraction = fp8_max(dtype) / 2 ** fp8_max_exponent(dtype) - 1
    return 0x7FFFFF - int(fraction * 2**23)


def short_name(dtype: torch.dtype) -> str:
    """`torch.float8_e4m3fn` → `"e4m3fn"`, `torch.bfloat16` → `"bfloat16"`."""
    return str(dtype).removeprefix("torch.").removeprefix("float8_")
