"""`quantize_grouped` and `quantize_grouped_dual`: tokens in groups to FP8, with no scale across a group's border."""

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
    "block": arguments.tokens_block, "dtype": arguments.fp8_dtype, "scale": arguments.scale,
}  # fmt: skip


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
    """`x (M, N)` in FP8, one scale for each column and `block` tokens of a group; bits are those of each group alone.

    Args:
        x: bfloat16, float16 or float32, any strides, any sizes.
        offsets: int32 `(E,)`, `E >= 1`, on the device of `x`: where each group ends along `axis`, ascending, as
            `torch._grouped_mm` takes them. Groups may be empty. Tokens past the last offset belong to none and become
            zeros; an offset past the tokens counts as their number. Nothing waits for the device: ends that descend
            are an error on the CPU, and on a GPU leave elements unwritten.
        axis: 0 where rows are tokens, 1 where columns are: the transpose of the same on `x.mT`.
        block: 128, with tokens spread so that each group begins at a multiple of a `unit` of rows, 128 where
            `M // 128 >= 4 * E` and else 32 (`fp8fn.ops.groups`), as an expert's gradient of its weight contracts them;
            or -1, one scale for each group and column and tokens where they were, as `torch._scaled_grouped_mm`
            contracts them.
        dtype, scale: see `quantize`.

    Returns a `GroupedScaledTensor`, in memory contiguous along the tokens: `(unit * (M // unit + E), N)` with
    `(M // 128 + E, N)` scales, or `(M, N)` with `(E, N)`. Two tensors with the same offsets, the two operands of a
    weight's gradient, take two calls.

    Raises `ValueError` for another axis, block, scale format or shape, `TypeError` for another dtype of `x` or of
    `offsets`. Has no derivative.
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
    """`quantize(x, (1, block))` of all rows and `quantize_grouped(x, offsets)`; for 128 in one launch, one read of `x`.

    What a layer of experts needs of its tokens: rows for the forward and its input's gradient, blocks of one group for
    its weights' gradient. Tokens past the last offset are quantized in the first and zeros in the second.
    """
    row, row_scale, data, scales = torch.ops.fp8fn.quantize_grouped_dual(x, offsets, (1, block), dtype, scale)
    return ScaledTensor(row, row_scale, (1, block)), GroupedScaledTensor(data, scales, offsets, 0, block, x.shape[0])
