"""`quantize_grouped` and `quantize_grouped_dual`: FP8 quantization in which no scale crosses a group's border."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.ops.formats import ScaleFormat
from fp8fn.scaled_tensor import ScaledTensor

_FORMAT: Final[dict[str, arguments.Check]] = {
    "block": arguments.tokens_block,
    "dtype": arguments.fp8_dtype,
    "scale": arguments.scale,
}


@checked(x=arguments.floats, offsets=arguments.offsets, **_FORMAT)
def quantize_grouped(
    x: Tensor,
    offsets: Tensor,
    axis: int = 0,
    *,
    block: int = 128,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> GroupedScaledTensor:
    """Quantizes groups of tokens to FP8, with one scale for each column and `block` tokens of one group.

    The bits of a group are those of the group quantized alone. The function has no derivative.

    Args:
        x: bfloat16, float16 or float32, any strides, any sizes.
        offsets: int32, ascending: the end of each group along `axis`. Groups may be empty; tokens past the last offset
            become zeros. A GPU does not check the ends, and leaves elements unwritten where they descend.
        axis: 0 where rows are tokens, 1 where columns are.
        block: 128, or 32 for MX, spreads the tokens so that each group begins at a multiple of a unit of rows (see
            `GroupedScaledTensor`), as a weight's gradient contracts them; -1 has one scale for each group and column
            and leaves tokens in place, as `torch._scaled_grouped_mm` contracts them.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.

    Shape:
        `x (M, N)`, `offsets (E)` → data `(unit * (M // unit + E), N)` with scale `(M // block + E, N)` for 128 and 32,
        data `(M, N)` with scale `(E, N)` for -1; both transposed for `axis=1`.

    Returns:
        A `GroupedScaledTensor`, contiguous along the tokens.

    Raises:
        TypeError: The dtype of `x` or of `offsets` does not fit.
        ValueError: The axis, the block, the scale format or a shape does not fit.

    Example:
        >>> ends = torch.tensor([100, 256], dtype=torch.int32)
        >>> fp8fn.quantize_grouped(torch.randn(256, 64), ends)
        GroupedScaledTensor(e4m3fn[256, 64], groups=2, axis=0, block=128, scale=fp32)
    """
    if axis not in (0, 1):
        raise ValueError(f"quantize_grouped: axis={axis} is none of a matrix; use 0 for groups of rows, 1 for columns")
    if axis == 1 and x.ndim == 2:
        return quantize_grouped(x.mT, offsets, block=block, dtype=dtype, scale=scale).mT
    data, scales = torch.ops.fp8fn.quantize_grouped(x, offsets, (block, 1), dtype, scale)
    return GroupedScaledTensor(data, scales, offsets, axis, block, x.shape[0])


@checked(x=arguments.floats, offsets=arguments.offsets, **_FORMAT)
def quantize_grouped_dual(
    x: Tensor,
    offsets: Tensor,
    *,
    block: int = 128,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> tuple[ScaledTensor, GroupedScaledTensor]:
    """Quantizes tokens by rows and by groups, for a block of 128 or 32 in one launch with one read.

    A layer of experts needs both forms: rows for the forward and for its input's gradient, blocks of one group for its
    weights' gradient.

    Args:
        x: bfloat16, float16 or float32, any strides.
        offsets: int32, ascending: the row where each group ends. Rows past the last offset are quantized in the first
            result and zeros in the second.
        block: 128, 32 for MX, or -1 for whole rows and whole groups.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.

    Shape:
        `x (M, N)`, `offsets (E)` → a `ScaledTensor` and a `GroupedScaledTensor`, both `(M, N)`.

    Returns:
        `(quantize(x, (1, block)), quantize_grouped(x, offsets, block=block))`.

    Raises:
        TypeError: The dtype of `x` or of `offsets` does not fit.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> rows, groups = fp8fn.quantize_grouped_dual(torch.randn(256, 128), torch.tensor([256], dtype=torch.int32))
        >>> rows.shape == groups.shape
        True
    """
    row, row_scale, data, scales = torch.ops.fp8fn.quantize_grouped_dual(x, offsets, (1, block), dtype, scale)
    return ScaledTensor(row, row_scale, (1, block)), GroupedScaledTensor(data, scales, offsets, 0, block, x.shape[0])
