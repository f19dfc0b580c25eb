"""The definition of quantization, in plain PyTorch: the CPU path, and the oracle of every kernel.

For `"fp32"`: `scale = max(amax, 1e-12) / fp8_max`, `inv = 1 / scale`, `data = cast(clamp(x * inv))`, each step rounded
to nearest even in float32. `"pow2"` rounds that scale up to a power of two. `"e8m0"` is the OCP MX specification v1.0,
section 6.3: `scale = 2 ** (floor(log2(amax)) - emax)`, at least `2 ** -127`, and NaN for a block with a NaN or an Inf.
`"rceil"` rounds up where `"e8m0"` rounds down, `scale = 2 ** ceil(log2(amax / fp8_max))`, without the rounding of a
division, and is the same otherwise; it is what NVIDIA's `cvt.rp.satfinite.ue8m0x2.f32` makes of `amax / fp8_max`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8fn.ops.formats import AMAX_FLOOR, fp8_max, fp8_max_exponent, rceil_addend
from fp8fn.ops.layout import (
    WHOLE,
    Block,
    contracts_rows,
    data_is_column_major,
    empty_data,
    empty_scale,
    extent,
    is_square,
    scale_dtype,
    scale_shape,
    turned,
)
from fp8fn.ops.sharded import beside


def amax(x: Tensor, block: Block) -> Tensor:
    """`x (..., M, N)` → the largest magnitude of each block `(..., ceil(M / r), ceil(N / c))`, NaN above all others."""
    if x.numel() == 0:
        return x.new_zeros(scale_shape(x.shape, block), dtype=torch.float32)
    return _largest(split(x.float(), block))


def _largest(tiles: Tensor) -> Tensor:
    return tiles.abs().amax((-3, -1))


def quantize(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str, given: Tensor | None = None,
    column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`x (..., M, N)` → data `(..., M, N)` in FP8 and scales `(..., ceil(M / r), ceil(N / c))`.

    `given` are the blocks' largest magnitudes, or larger ones; their signs have no effect. `column_major` is the layout
    of a square block's data, by default that of `x`.
    """
    if column_major is None:
        column_major = data_is_column_major(x, block)
    data, scales = empty_data(x, block, dtype, column_major), empty_scale(x, block, scale, column_major)
    if x.numel() == 0:
        return data, scales.copy_(_scale_of(amax(x, block) if given is None else given.float().abs(), dtype, scale))
    tiles = split(x.float(), block)
    block_scale = _scale_of(_largest(tiles) if given is None else given.float().abs(), dtype, scale)
    inverse = block_scale.reciprocal()[..., :, None, :, None]
    largest = fp8_max(dtype)
    values = merge((tiles * inverse).clamp_(-largest, largest), x.shape[-2], x.shape[-1]).to(dtype)
    # As bytes: PyTorch's CPU copy that casts and transposes at once is twice as slow as one after the other.
    data.view(torch.uint8).copy_(values.view(torch.uint8))
    return data, scales.copy_(block_scale)


def quantize_dual(
    x: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale: str,
    given: Tensor | None = None,
    dual_block: Block | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize(x, block)` and `quantize(x, dual_block)`, by default in the transposed block.

    A square block's one result is stored row-major and column-major. Beside a one-sided block, the result in a square
    block lies along the other axis.
    """
    if is_square(block):
        data, scales = quantize(x, block, dtype, scale, given)
        return turned(data, False), turned(scales, False), turned(data, True), turned(scales, True)
    first = quantize(x, block, dtype, scale)
    if dual_block is None or not is_square(dual_block):
        return *first, *quantize(x, (block[1], block[0]), dtype, scale)
    data, scales = quantize(x, dual_block, dtype, scale)
    column_major = not contracts_rows(block)
    return *first, turned(data, column_major), turned(scales, column_major)


def dequantize(data: Tensor, scale: Tensor, block: Block) -> Tensor:
    """`data * scale` in float32, each scale spread over its block."""
    if scale.shape != scale_shape(data.shape, block):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, data {tuple(data.shape)} in {block} blocks needs another"
        )
    return data.float() * spread(scale.float(), data.shape, block)


def spread(scale: Tensor, shape: Sequence[int], block: Block) -> Tensor:
    """`(..., ceil(M / r), ceil(N / c))` → `(..., M, N)`, or what broadcasts to it.

    By an index, not by views: of `x * scale[..., None].expand(...).flatten(-2)` in 16 bits, Inductor's C++ code leaves
    the columns of a partial last block unwritten (PyTorch 2.13).
    """
    for dim in (-2, -1):
        if block[dim] not in (1, WHOLE):
            index = torch.arange(shape[dim], device=scale.device) // block[dim]
            scale = scale.index_select(dim, beside(scale, index))
    return scale


def split(x: Tensor, block: Block) -> Tensor:
    """`(..., M, N)` → `(..., ceil(M / r), r, ceil(N / c), c)`, padded with zeros."""
    rows, columns = extent(x.shape[-2], block[0]), extent(x.shape[-1], block[1])
    pad_rows, pad_columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    if pad_rows or pad_columns:
        x = F.pad(x, (0, pad_columns, 0, pad_rows))
    tiles: Tensor = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return tiles


def merge(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `split`."""
    return tiles.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]


def _scale_of(amax: Tensor, dtype: torch.dtype, scale: str) -> Tensor:
    """The float32 scale of blocks whose largest magnitude is `amax`."""
    if scale_dtype(scale) == torch.float8_e8m0fnu:
        bits = amax.view(torch.int32) + (rceil_addend(dtype) if scale == "rceil" else 0)
        exponent = (bits >> 23) - fp8_max_exponent(dtype)
        power = _power_of_two(exponent.clamp_min(0))
        return torch.where(amax.isfinite(), power, torch.nan)
    # A tensor and not a number: CUDA multiplies by a number's reciprocal, which rounds twice.
    exact = amax.clamp_min(AMAX_FLOOR) / amax.new_full((), fp8_max(dtype))
    if scale == "fp32":
        return exact
    rounded_up = ((exact.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(exact.isnan(), exact, rounded_up)


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    """`2 ** (e - 127)` in float32; `e = 0` is the subnormal `2 ** -127`."""
    bits = torch.where(biased_exponent == 0, 0x400000, biased_exponent << 23)
    return bits.to(torch.int32).view(torch.float32)
