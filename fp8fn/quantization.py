"""`quantize`, its relatives, and `dequantize`: between tensors and `ScaledTensor`s."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.ops import reference
from fp8fn.ops.formats import INPUT_DTYPES, ScaleFormat
from fp8fn.ops.layout import Block, swap
from fp8fn.scaled_tensor import ScaledTensor

# The arguments that every quantizer has.
_FORMAT: Final[dict[str, arguments.Check]] = {
    "block": arguments.block, "dtype": arguments.fp8_dtype, "scale": arguments.scale,
}  # fmt: skip


@checked(x=arguments.matrix, **_FORMAT)
def quantize(x: Tensor, block: Block, *, dtype: torch.dtype | None = None, scale: ScaleFormat = "fp32") -> ScaledTensor:
    """`x (..., M, N)` in FP8, one scale for each block of `r x c` elements.

    Args:
        x: bfloat16, float16 or float32, any strides, any sizes (a last block may be partial).
        block: `(1, 128)`, `(128, 1)`, `(128, 128)`, `(1, 32)`, `(32, 1)`, `(1, -1)` rowwise, `(-1, 1)` colwise or
            `(-1, -1)` tensorwise; `-1` is the whole axis of one matrix.
        dtype: an FP8 type; by default the device's own e4m3 (e4m3fnuz on gfx942, e4m3fn elsewhere).
        scale: "fp32": `max(amax, 1e-12) / fp8_max`; "pow2": that, rounded up to a power of two; "e8m0": stored as
            float8_e8m0fnu, `2 ** (floor(log2(amax)) - emax)` (OCP MX specification v1.0, section 6.3), by which a
            block's largest values can saturate; "rceil": stored likewise, `2 ** ceil(log2(amax / fp8_max))`: none does.

    Returns a `ScaledTensor` of the shape of `x`; `scale` is `(..., ceil(M / r), ceil(N / c))`. Values past FP8's range
    saturate; a block with a NaN or an Inf comes back as NaN or Inf, and does not touch another block.

    Raises `ValueError` for a block or a scale format that does not exist, or fewer than two dimensions, `TypeError` for
    a dtype that is not a float of 16 or 32 bits. Has no derivative: `gemm` of tensors has one.
    """
    data, scales = torch.ops.fp8fn.quantize(x, block, dtype, scale)
    return ScaledTensor(data, scales, block)


@checked(x=arguments.matrix, **_FORMAT)
def quantize_dual(
    x: Tensor, block: Block = (1, 128), *, dtype: torch.dtype | None = None, scale: ScaleFormat = "fp32"
) -> tuple[ScaledTensor, ScaledTensor]:
    """`quantize(x, (r, c))` and `quantize(x, (c, r))`, for blocks of 128 and of 32 by one launch with one read of `x`.

    A training step needs both of an activation: rows for the forward, columns for the weight's gradient. Of a square
    block the two hold the same values, the first stored by rows and the second by columns: a weight's for the forward
    and for its input's gradient.
    """
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_dual(x, block, dtype, scale)
    return ScaledTensor(row, row_scale, block), ScaledTensor(col, col_scale, swap(block))


@checked(gate=arguments.matrix, up=arguments.matrix, **_FORMAT)
def quantize_silu_mul(
    gate: Tensor,
    up: Tensor,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> ScaledTensor:
    """`quantize(silu(gate) * up, block)`, computed in float32 and rounded once: what an MLP's last product reads.

    `gate` and `up` have one shape `(..., M, N)` and dtype (bfloat16, float16, float32) and any strides; on Hopper,
    rows that are contiguous take one launch and one read. A square block is stored by rows. For the rest see
    `quantize`.
    """
    data, scales = torch.ops.fp8fn.quantize_silu_mul(gate, up, block, dtype, scale)
    return ScaledTensor(data, scales, block)


@checked(gate=arguments.matrix, up=arguments.matrix, **_FORMAT)
def quantize_silu_mul_dual(
    gate: Tensor,
    up: Tensor,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> tuple[ScaledTensor, ScaledTensor]:
    """`quantize_dual(silu(gate) * up, block)`, like `quantize_silu_mul`."""
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_silu_mul_dual(gate, up, block, dtype, scale)
    return ScaledTensor(row, row_scale, block), ScaledTensor(col, col_scale, swap(block))


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
    """`quantize(rms_norm(x, weight, eps), block)`, computed in float32 and rounded once, to FP8.

    `rms_norm` is `x / sqrt(mean(x²) + eps) * weight`, over the last axis of `x (..., M, N)`, with `weight (N)`; its
    sums have a fixed order, and the same bits on every device. On Hopper, `(1, 128)` of rows of up to 16384 columns
    takes one launch and one read of `x`; other blocks, and `quantize_rms_norm_dual`, take a second launch and read. See
    `quantize` for the rest.
    """
    data, scales = torch.ops.fp8fn.quantize_rms_norm(x, weight, eps, block, dtype, scale)
    return ScaledTensor(data, scales, block)


@checked(x=arguments.matrix, weight=arguments.floats, eps=arguments.epsilon, **_FORMAT)
def quantize_rms_norm_dual(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    block: Block = (1, 128),
    *,
    dtype: torch.dtype | None = None,
    scale: ScaleFormat = "fp32",
) -> tuple[ScaledTensor, ScaledTensor]:
    """`quantize_dual(rms_norm(x, weight, eps), block)`, like `quantize_rms_norm`."""
    row, row_scale, col, col_scale = torch.ops.fp8fn.quantize_rms_norm_dual(x, weight, eps, block, dtype, scale)
    return ScaledTensor(row, row_scale, block), ScaledTensor(col, col_scale, swap(block))


@checked(q=arguments.any_quantized, dtype=arguments.out_dtype)
def dequantize(q: ScaledTensor | GroupedScaledTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`data * scale` in float32, rounded once to `dtype` (bfloat16, float16 or float32), in the shape of `q`.

    A `GroupedScaledTensor` gives its tokens in the order in which they were quantized; those past the last offset are
    zeros.
    """
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dequantize: dtype={dtype} is not an output type; use bfloat16, float16 or float32")
    if isinstance(q, GroupedScaledTensor):
        return q.dequantize(dtype)
    return reference.dequantize(q.data, q.scale, cast(Block, tuple(q.block))).to(dtype)
