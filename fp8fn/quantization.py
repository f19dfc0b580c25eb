"""`quantize`, its variants, and `dequantize`: conversions between tensors and `ScaledTensor`s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.meta.bypass import shortest
from fp8fn.ops import reference
from fp8fn.ops.formats import INPUT_DTYPES, ScaleFormat
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.quantize import quantize_dual_kernel, quantize_kernel
from fp8fn.ops.sharded import sharded_amax
from fp8fn.scaled_tensor import ScaledTensor

# Checks of the arguments that all quantizers share.
_FORMAT: Final[dict[str, arguments.Check]] = {
    "block": arguments.block,
    "dtype": arguments.fp8_dtype,
    "scale": arguments.scale,
}
_DUAL: Final[dict[str, arguments.Check]] = {**_FORMAT, "dual_block": arguments.optional(arguments.block)}


@checked(x=arguments.matrix, **_FORMAT)
def quantize(x: Tensor, block: Block, *, dtype: torch.dtype | None = None, scale: ScaleFormat = "fp32") -> ScaledTensor:
    """Quantizes a tensor to FP8 with one scale for each block of `r x c` elements.

    Values past FP8's range saturate. A block with a NaN or an Inf dequantizes to NaN or Inf and does not affect another
    block. The function has no derivative; `gemm` of tensors has one.

    Args:
        x: bfloat16, float16 or float32, any strides, any sizes; the last block of an axis may be partial.
        block: `(r, c)`: `(1, 128)`, `(128, 1)`, `(128, 128)`, `(1, 32)`, `(32, 1)`, `(1, -1)` (rowwise), `(-1, 1)`
            (columnwise) or `(-1, -1)` (tensorwise); `-1` is the whole axis of one matrix.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format. "fp32" is `max(amax, 1e-12) / fp8_max`; "pow2" is the same, rounded up to a power of two;
            "e8m0" is `2 ** (floor(log2(amax)) - emax)` in float8_e8m0fnu, with which the largest values of a block may
            saturate; "rceil" is `2 ** ceil(log2(amax / fp8_max))` in float8_e8m0fnu, with which none does.

    Shape:
        `x (..., M, N)` → data `(..., M, N)`, scale `(..., ceil(M / r), ceil(N / c))`.

    Returns:
        A `ScaledTensor` of the shape of `x`.

    Raises:
        TypeError: The input is not bfloat16, float16 or float32, or `dtype` is not an FP8 type.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> fp8fn.quantize(torch.ones(256, 512), (1, 128)).scale.shape
        torch.Size([256, 4])

    Source:
        "e8m0" is the conversion of the OCP Microscaling Formats (MX) Specification v1.0, section 6.3.
    """
    op: Callable[..., tuple[Tensor, Tensor]] = torch.ops.fp8fn.quantize
    data, scales = shortest(op, quantize_kernel, x)(x, block, dtype, scale, sharded_amax(x, block))
    return ScaledTensor(data, scales, block)


@checked(x=arguments.matrix, **_DUAL)
def quantize_dual(
    x: Tensor,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
    dual_block: Block | None = None,
) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantizes a tensor in a block and in the transposed block, for blocks of 128 and of 32 with one read.

    A training step needs both forms of an activation: rows for the forward, columns for the weight's gradient. For a
    square block both results hold the same values; the first is stored by rows, the second by columns.

    Args:
        x: bfloat16, float16 or float32, any strides.
        block: Block `(r, c)` of the first result.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.
        dual_block: Block of the second result, `(c, r)` by default; beside `(1, 128)` or `(128, 1)` also `(128, 128)`,
            which is stored along the other axis than the first result.

    Shape:
        `x (..., M, N)` → two `ScaledTensor`s `(..., M, N)`.

    Returns:
        `(quantize(x, block), quantize(x, dual_block))`.

    Raises:
        TypeError: The input is not bfloat16, float16 or float32, or `dtype` is not an FP8 type.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> rows, columns = fp8fn.quantize_dual(torch.ones(256, 512))
        >>> rows.scale.shape, columns.scale.shape
        (torch.Size([256, 4]), torch.Size([2, 512]))
    """
    op: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = torch.ops.fp8fn.quantize_dual
    quantizer = shortest(op, quantize_dual_kernel, x)
    row, row_scale, col, col_scale = quantizer(x, block, dtype, scale, None, dual_block)
    return ScaledTensor(row, row_scale, block), ScaledTensor(col, col_scale, dual_block or swap(block))


@checked(gate=arguments.matrix, up=arguments.matrix, **_FORMAT)
def quantize_silu_mul(
    gate: Tensor,
    up: Tensor,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> ScaledTensor:
    """Quantizes `silu(gate) * up`, computed in float32 and rounded once, to FP8.

    The last product of a gated MLP reads this result. On Hopper, contiguous rows take one launch and one read.

    Args:
        gate: bfloat16, float16 or float32, any strides.
        up: Tensor of the shape and type of `gate`.
        block: Block of the result; see `quantize`. A square block is stored by rows.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.

    Shape:
        `gate (..., M, N)`, `up (..., M, N)` → `ScaledTensor` `(..., M, N)`.

    Returns:
        `quantize(silu(gate) * up, block)`, of the unrounded product.

    Raises:
        TypeError: The input is not bfloat16, float16 or float32, or `dtype` is not an FP8 type.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> gate, up = torch.randn(2, 64, 256)
        >>> fp8fn.quantize_silu_mul(gate, up).shape
        torch.Size([64, 256])

    Source:
        SwiGLU: N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    data, scales = torch.ops.fp8fn.quantize_silu_mul(gate, up, block, dtype, scale)
    return ScaledTensor(data, scales, block)


@checked(gate=arguments.matrix, up=arguments.matrix, **_DUAL)
def quantize_silu_mul_dual(
    gate: Tensor,
    up: Tensor,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
    dual_block: Block | None = None,
) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantizes `silu(gate) * up`, in a block and in the transposed block, rounded once, to FP8.

    The last product of a gated MLP reads this result. On Hopper, contiguous rows take one launch and one read.

    Args:
        gate: bfloat16, float16 or float32, any strides.
        up: Tensor of the shape and type of `gate`.
        block: Block `(r, c)` of the first result.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.
        dual_block: Block of the second result, `(c, r)` by default; see `quantize_dual`.

    Shape:
        `gate (..., M, N)`, `up (..., M, N)` → two `ScaledTensor`s `(..., M, N)`.

    Returns:
        `quantize_dual(silu(gate) * up, block)`, of the unrounded product.

    Raises:
        TypeError: The input is not bfloat16, float16 or float32, or `dtype` is not an FP8 type.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> gate, up = torch.randn(2, 64, 256)
        >>> rows, columns = fp8fn.quantize_silu_mul_dual(gate, up)
        >>> columns.block
        (128, 1)

    Source:
        SwiGLU: N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_silu_mul_dual(gate, up, block, dtype, scale, dual_block)
    return ScaledTensor(row, row_scale, block), ScaledTensor(col, col_scale, dual_block or swap(block))


@checked(x=arguments.matrix, weight=arguments.floats, eps=arguments.epsilon, **_FORMAT)
def quantize_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> ScaledTensor:
    """Quantizes `rms_norm(x, weight, eps)`, computed in float32 and rounded once, to FP8.

    `rms_norm` is `x / sqrt(mean(x²) + eps) * weight` over the last axis. Its sums have a fixed order and the same bits
    on every device. On Hopper `(1, 128)` takes one launch and one read of rows of up to 16384 columns; other blocks
    take two.

    Args:
        x: bfloat16, float16 or float32, any strides.
        weight: Tensor that multiplies the normalized columns.
        eps: Number that is added to the mean square.
        block: Block of the result; see `quantize`.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.

    Shape:
        `x (..., M, N)`, `weight (N)` → `ScaledTensor` `(..., M, N)`.

    Returns:
        `quantize(rms_norm(x, weight, eps), block)`, of the unrounded norm.

    Raises:
        TypeError: The input is not bfloat16, float16 or float32, or `dtype` is not an FP8 type.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> x, weight = torch.randn(64, 256), torch.ones(256)
        >>> fp8fn.quantize_rms_norm(x, weight).scale.shape
        torch.Size([64, 2])

    Source:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    data, scales = torch.ops.fp8fn.quantize_rms_norm(x, weight, eps, block, dtype, scale)
    return ScaledTensor(data, scales, block)


@checked(x=arguments.matrix, weight=arguments.floats, eps=arguments.epsilon, **_DUAL)
def quantize_rms_norm_dual(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
    dual_block: Block | None = None,
) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantizes `rms_norm(x, weight, eps)`, in a block and in the transposed block, rounded once, to FP8.

    `rms_norm` is `x / sqrt(mean(x²) + eps) * weight` over the last axis. Its sums have a fixed order and the same bits
    on every device. On Hopper this function takes two launches and two reads of `x`.

    Args:
        x: bfloat16, float16 or float32, any strides.
        weight: Tensor that multiplies the normalized columns.
        eps: Number that is added to the mean square.
        block: Block `(r, c)` of the first result.
        dtype: FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: Scale format, "fp32", "pow2", "e8m0" or "rceil"; see `quantize`.
        dual_block: Block of the second result, `(c, r)` by default; see `quantize_dual`.

    Shape:
        `x (..., M, N)`, `weight (N)` → two `ScaledTensor`s `(..., M, N)`.

    Returns:
        `quantize_dual(rms_norm(x, weight, eps), block)`, of the unrounded norm.

    Raises:
        TypeError: The input is not bfloat16, float16 or float32, or `dtype` is not an FP8 type.
        ValueError: The block, the scale format or a shape does not fit.

    Example:
        >>> x, weight = torch.randn(64, 256), torch.ones(256)
        >>> rows, columns = fp8fn.quantize_rms_norm_dual(x, weight)
        >>> columns.scale.shape
        torch.Size([1, 256])

    Source:
        B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_rms_norm_dual(
        x, weight, eps, block, dtype, scale, None, dual_block
    )
    return ScaledTensor(row, row_scale, block), ScaledTensor(col, col_scale, dual_block or swap(block))


@checked(q=arguments.any_quantized, dtype=arguments.out_dtype)
def dequantize(q: ScaledTensor | GroupedScaledTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Computes `data * scale` in float32 and rounds the result once to `dtype`.

    Args:
        q: `ScaledTensor` or `GroupedScaledTensor`.
        dtype: bfloat16, float16 or float32.

    Shape:
        `q (..., M, N)` → `(..., M, N)`. Tokens of a `GroupedScaledTensor` keep their order; those past the last offset
        are zeros.

    Returns:
        A tensor of `dtype`.

    Raises:
        TypeError: `q` is not quantized, or `dtype` is not an output type.

    Example:
        >>> q = fp8fn.quantize(torch.ones(128, 128), (128, 128))
        >>> fp8fn.dequantize(q, torch.float32).unique()
        tensor([1.])
    """
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dequantize: dtype={dtype} is not an output type; use bfloat16, float16 or float32")
    if isinstance(q, GroupedScaledTensor):
        return q.dequantize(dtype)
    return reference.dequantize(q.data, q.scale, cast(Block, tuple(q.block))).to(dtype)
