"""Scales inside kernels: from the bits of a largest magnitude to a scale and its inverse, and back from storage.

Every step equals `fp8fn.ops.reference.quantize` bit for bit.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import torch
import triton
import triton.language as tl

from fp8fn.ops.formats import AMAX_FLOOR, fp8_max, fp8_max_exponent

# The bits of float32(1e-12). Bits of non-negative floats order as the floats do, NaN above Inf above all others.
FLOOR_BITS: Final = int(struct.unpack("<i", struct.pack("<f", AMAX_FLOOR))[0])


def scale_constants(dtype: torch.dtype, scale: str) -> dict[str, Any]:
    """The compile-time arguments `LARGEST`, `EMAX`, `FLOOR`, `FORMAT` of `scale_of`."""
    return {"LARGEST": fp8_max(dtype), "EMAX": fp8_max_exponent(dtype), "FLOOR": FLOOR_BITS, "FORMAT": scale}


def storage(scales: torch.Tensor) -> torch.Tensor:
    """Scales as kernels take them: e8m0 as bytes, for Triton has no such type."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in float32, as int32: a maximum of them propagates NaN at no cost."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, LARGEST: tl.constexpr, EMAX: tl.constexpr, FLOOR: tl.constexpr, FORMAT: tl.constexpr):
    """`bits` of the largest magnitude of a block → the scale as stored, and its inverse in float32."""
    if FORMAT == "e8m0" or FORMAT == "rceil":
        finite = bits < 0x7F800000
        if FORMAT == "rceil":  # one more where the fraction is above that of the largest value
            bits += 0x7FFFFF - (tl.full((), LARGEST, tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFF)
        exponent = tl.maximum((bits >> 23) - EMAX, 0)
        stored = tl.where(finite, exponent, 255).to(tl.uint8)
        # 2 ** (127 - exponent), without a division: at exponent 0 the scale itself is subnormal.
        inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    else:
        stored = tl.div_rn(tl.maximum(bits, FLOOR).to(tl.float32, bitcast=True), LARGEST)
        if FORMAT == "pow2":
            exact = stored.to(tl.int32, bitcast=True)
            rounded_up = tl.where(exact > 0x7F800000, exact, (exact + 0x7FFFFF) & 0x7F800000)
            stored = rounded_up.to(tl.float32, bitcast=True)
        inverse = tl.div_rn(1.0, stored)
    return stored, inverse


@triton.jit
def cast(values, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Saturate and round to nearest even; NaN stays."""
    return tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def scale_value(stored):
    """A stored scale in float32: a byte is `2 ** (byte - 127)`, 255 is NaN."""
    if stored.dtype == tl.uint8:
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 0x400000, byte << 23)
        value = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        value = stored
    return value
