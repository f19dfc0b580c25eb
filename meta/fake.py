"""Fake implementations: the shapes, types and strides of what an op returns, from those of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8fn.ops.layout import empty_data, empty_scale, swap
from fp8fn.ops.quantize import check_dual_block, check_quantize
from fp8fn.ops.scaled_mm import check_scaled_mm, empty_output


def quantize(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    return empty_data(x, pair, fp8), empty_scale(x, pair, scale)


def quantize_dual(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    check_dual_block(pair)
    return (
        empty_data(x, pair, fp8), empty_scale(x, pair, scale),
        empty_data(x, swap(pair), fp8), empty_scale(x, swap(pair), scale),
    )  # fmt: skip


def scaled_mm(
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    check_scaled_mm(a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype)
    return empty_output(a, b, out_dtype)
