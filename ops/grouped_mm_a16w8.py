"""The op `fp8fn::grouped_mm_a16w8`, groups of 16- or 32-bit rows by experts in FP8: schema, checks, and dispatch.

With `activations="fp8"` the op quantizes many rows and multiplies in FP8, as `fp8fn::mm_a16w8` does. With "fp8_fast"
sums are promoted all the same: products of groups have no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.activations import Activations, check_activations, quantized_grouped_product, why_16_bits
from fp8fn.ops.groups import check_ends, check_offsets
from fp8fn.ops.kernel import Dispatch, Kernel, Tensors, deferred, takes_all
from fp8fn.ops.layout import Block
from fp8fn.ops.mm_a16w8 import check_weight_operands, unserved
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.scaled_grouped_mm import check_group_bias, check_group_count, empty_grouped_output
from fp8fn.ops.scaled_mm import Parts

if TYPE_CHECKING:
    from fp8fn.ops.cuda.gemm import parts_a16w8
    from fp8fn.ops.triton import grouped_mm_a16w8 as triton
else:
    parts_a16w8 = deferred("fp8fn.ops.cuda.gemm.parts_a16w8")
    triton = deferred("fp8fn.ops.triton.grouped_mm_a16w8")

GROUPED_MM_A16W8_SCHEMA: Final = (
    "grouped_mm_a16w8(Tensor x, Tensor w, Tensor w_scale, int[2] w_block, Tensor offsets, Tensor? bias=None, "
    'ScalarType? out_dtype=None, str activations="16bit") -> Tensor'
)

_NAME: Final = "grouped_mm_a16w8"


def check_grouped_mm_a16w8(
    x: Tensor, w_parts: Parts, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None,
    activations: Activations = "16bit",
) -> Block:  # fmt: skip
    """The block as a tuple, or the error that says which argument is wrong and what would work."""
    w = w_parts[0]
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(
            f"{_NAME}: x has shape {tuple(x.shape)} and w {tuple(w.shape)}; they must be (M, K) and (E, K, N), the "
            "rows of all experts and a weight for each"
        )
    block = check_weight_operands(_NAME, x, w_parts, bias, out_dtype)
    check_offsets(_NAME, offsets, "x", x)
    check_group_count(_NAME, offsets, "w", w)
    check_group_bias(_NAME, w, offsets.shape[0], bias)
    check_activations(_NAME, activations, block)
    return block


def grouped_mm_a16w8_reference(  # noqa: PLR0913  an op's signature
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], offsets: Tensor,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, activations: Activations = "16bit",
) -> Tensor:  # fmt: skip
    block = check_grouped_mm_a16w8(x, (w, w_scale, w_block), offsets, bias, out_dtype, activations)
    check_ends(_NAME, offsets)
    weight = Quantized(w, w_scale, block)
    multiply = quantized_grouped_product if _is_quantized(x, weight, activations) else reference.grouped_mm_a16w8
    return multiply(x, weight, offsets, bias, out_dtype or x.dtype)


def grouped_mm_a16w8_fake(  # noqa: PLR0913  an op's signature
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], offsets: Tensor,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, activations: Activations = "16bit",
) -> Tensor:  # fmt: skip
    check_grouped_mm_a16w8(x, (w, w_scale, w_block), offsets, bias, out_dtype, activations)
    return empty_grouped_output(x, w, offsets, out_dtype or x.dtype)


def grouped_mm_a16w8_kernel(  # noqa: PLR0913  an op's signature
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], offsets: Tensor,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, activations: Activations = "16bit",
) -> Tensor:  # fmt: skip
    if activations != "16bit":
        block = check_grouped_mm_a16w8(x, (w, w_scale, w_block), offsets, bias, out_dtype, activations)
        weight = Quantized(w, w_scale, block)
        if _is_quantized(x, weight, activations):
            return quantized_grouped_product(x, weight, offsets, bias, out_dtype or x.dtype)
    return GROUPED_MM_A16W8((x, w, w_scale, offsets, bias), (tuple(w_block), out_dtype))[0]


def _is_quantized(x: Tensor, w: Quantized, activations: Activations) -> bool:
    return activations != "16bit" and why_16_bits(x, w, groups=w.data.shape[0]) is None


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> WeightProduct:
    (x, w, w_scale, offsets, bias), (w_block, out_dtype) = tensors, values
    block = check_grouped_mm_a16w8(x, (w, w_scale, w_block), offsets, bias, out_dtype)
    return WeightProduct(
        x=x, w=Quantized(w, w_scale, block), bias=bias, offsets=offsets,
        out=empty_grouped_output(x, w, offsets, out_dtype or x.dtype), target=targets.target_of(x.device),
    )  # fmt: skip


def _settled(product: WeightProduct) -> Tensors | None:
    """Contiguous offsets, as the kernels take them."""
    offsets = product.group_ends
    if offsets.is_contiguous():
        return None
    return product.x, *product.w[:2], offsets.contiguous(), product.bias


def _reference(product: WeightProduct) -> tuple[Tensor]:
    return (reference.grouped_mm_a16w8(product.x, product.w, product.group_ends, product.bias, product.out.dtype),)


GROUPED_MM_A16W8: Final = Dispatch(
    op=_NAME,
    inputs=("x", "w", "w_scale", "offsets", "bias"),
    operands=_operands,
    kernels=(
        Kernel(
            "cuda_parts",
            parts_a16w8.accepts,
            parts_a16w8.configure_groups,
            parts_a16w8.plan,
            parts_a16w8.untuned_groups,
        ),
        Kernel("triton", takes_all, triton.configure, triton.plan_grouped_mm_a16w8),
    ),
    reference=_reference,
    unserved=unserved,
    settled=_settled,
)
