"""Fake implementations: shapes, types and strides of an op's results, derived from those of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import empty_data, empty_scale
from fp8fn.ops.mm_a16w8 import check_mm_a16w8
from fp8fn.ops.moe_gemm import check_moe_gemm, output_shape
from fp8fn.ops.mx_mm import check_mx_mm
from fp8fn.ops.products import Routing
from fp8fn.ops.quantization import empty_dual, empty_grouped_dual
from fp8fn.ops.quantize import check_quantize, checked_dual_block
from fp8fn.ops.quantize_fused import check_rms_norm, check_silu_mul
from fp8fn.ops.quantize_grouped import DUAL_BLOCKS, check_quantize_grouped
from fp8fn.ops.quantize_grouped_fused import check_silu_mul_grad_grouped, check_silu_mul_grouped
from fp8fn.ops.scaled_grouped_mm import check_scaled_grouped_mm, empty_grouped_output
from fp8fn.ops.scaled_mm import check_scaled_mm, empty_output


def quantize(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    return empty_data(x, pair, fp8), empty_scale(x, pair, scale)


def quantize_dual(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    return empty_dual(x, pair, fp8, scale, checked_dual_block("quantize_dual", pair, dual_block))


def quantize_grouped(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale)
    return empty_grouped(x, offsets.shape[0], pair, fp8, scale)


def quantize_grouped_dual(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale, "quantize_grouped_dual", DUAL_BLOCKS)
    return empty_grouped_dual(x, offsets.shape[0], pair, fp8, scale)


def quantize_silu_mul(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul")
    return empty_dual(gate, pair, fp8, scale)[:2]


def quantize_silu_mul_dual(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul_dual")
    return empty_dual(gate, pair, fp8, scale, checked_dual_block("quantize_silu_mul_dual", pair, dual_block))


def quantize_silu_mul_grouped_dual(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale)
    return empty_grouped_dual(gate, offsets.shape[0], pair, fp8, scale)


def quantize_silu_mul_grad_grouped_dual(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul_grad_grouped(grad, hidden, offsets, block, dtype, scale)
    return empty_grouped_dual(hidden, offsets.shape[0], pair, fp8, scale)


def quantize_rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm", rstd)
    return empty_dual(x, pair, fp8, scale)[:2]


def quantize_rms_norm_dual(  # noqa: PLR0913  an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm_dual", rstd)
    return empty_dual(x, pair, fp8, scale, checked_dual_block("quantize_rms_norm_dual", pair, dual_block))


def scaled_mm(  # noqa: PLR0913  an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    check_scaled_mm((a, a_scale, a_block), (b, b_scale, b_block), bias, out_dtype)
    return empty_output(a, b, out_dtype)


def mx_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    check_mx_mm(a, a_scale, b, b_scale, bias, out_dtype)
    return empty_output(a, b, out_dtype)


def moe_gemm(  # noqa: PLR0913  an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int], w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, top_k: int, a_div: int,
    token_weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    routing = Routing(sorted_token_ids, expert_ids, num_tokens_post_padded)
    check_moe_gemm((a, a_scale, a_block), (w, w_scale, w_block), routing, top_k, a_div, token_weights, out_dtype)
    return a.new_empty(output_shape(a, w, a_div), dtype=out_dtype or torch.bfloat16)


def scaled_grouped_mm(  # noqa: PLR0913  an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    offsets: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    check_scaled_grouped_mm((a, a_scale, a_block), (b, b_scale, b_block), offsets, bias, out_dtype)
    return empty_grouped_output(a, b, offsets, out_dtype)


def mm_a16w8(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, constant: bool = False,
) -> Tensor:  # fmt: skip
    check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype)
    return empty_output(x, w, out_dtype or x.dtype)
