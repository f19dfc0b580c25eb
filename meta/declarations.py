"""The declaration of every op of `torch.ops.fp8fn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fp8fn.meta import autograd, autograd_expert_mlp, autograd_grouped, vmap
from fp8fn.meta.registry import LIBRARY, OPS, Op, declare, register_fake, register_shardings
from fp8fn.ops import expert_mlp as expert_mlp_op
from fp8fn.ops import (
    gather_scaled_mm,
    gemm,
    grouped_gemm,
    grouped_mm_a16w8,
    mm_a16w8,
    moe_gemm,
    monitor,
    mx_mm,
    quantize,
    quantize_fused,
    quantize_grouped,
    quantize_grouped_fused,
    quantize_silu_mul,
    scaled_grouped_mm,
    scaled_mm,
)
from fp8fn.ops.kernel import deferred

if TYPE_CHECKING:
    from fp8fn.ops import sibling_products
else:
    sibling_products = deferred("fp8fn.ops.sibling_products")

_DIFFERENTIABLE = "use fp8fn.gemm(a, b) on the unquantized tensors, which is differentiable, or detach its input"


def _leaf(module: ModuleType, schema: str, derivative: Callable[..., Any] | None = None) -> None:
    """Declares an op whose parts `module` holds under the op's name; `derivative` makes its Autograd kernel, if any.

    `vmap` holds its rule; an op without one is called once for each element of the batch.
    """
    name = schema.partition("(")[0]
    reference, kernel = getattr(module, f"{name}_reference"), getattr(module, f"{name}_kernel")
    derivative = derivative or partial(autograd.not_differentiable, name, _DIFFERENTIABLE)
    declare(
        Op(
            schema=schema,
            reference=reference,
            kernel=kernel,
            fake=getattr(module, f"{name}_fake"),
            autograd=derivative(reference, kernel),
            vmap=getattr(vmap, name, vmap.each(name)),
        )
    )


def _of_passes(schema: str, reference: Callable[..., Any], kernel: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Registers an op that only passes over compiled graphs call, below autograd and never under vmap; its name."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, reference, "CPU")
    LIBRARY.impl(name, kernel, "CUDA")
    register_fake(name, fake)
    return name


_leaf(quantize, quantize.AMAX_SCHEMA)
_leaf(quantize, quantize.QUANTIZE_SCHEMA)
_leaf(quantize, quantize.QUANTIZE_DUAL_SCHEMA)
_leaf(quantize_grouped, quantize_grouped.QUANTIZE_GROUPED_SCHEMA)
_leaf(quantize_grouped, quantize_grouped.QUANTIZE_GROUPED_DUAL_SCHEMA)
_leaf(quantize_fused, quantize_fused.SILU_MUL_SCHEMA)
_leaf(quantize_fused, quantize_fused.SILU_MUL_DUAL_SCHEMA)
_leaf(quantize_fused, quantize_fused.RMS_NORM_SCHEMA)
_leaf(quantize_fused, quantize_fused.RMS_NORM_DUAL_SCHEMA)
_leaf(quantize_fused, quantize_fused.ADD_RMS_NORM_SCHEMA)
_leaf(quantize_grouped_fused, quantize_grouped_fused.SILU_MUL_COLUMNS_SCHEMA)
_leaf(quantize_grouped_fused, quantize_grouped_fused.SILU_MUL_SCHEMA)
_leaf(quantize_grouped_fused, quantize_grouped_fused.SILU_MUL_GRAD_SCHEMA)
_leaf(quantize_silu_mul, quantize_silu_mul.SAVED_SCHEMA)
_leaf(quantize_silu_mul, quantize_silu_mul.BACKWARD_SCHEMA)
_leaf(scaled_mm, scaled_mm.SCALED_MM_SCHEMA)
_leaf(mx_mm, mx_mm.MX_MM_SCHEMA)
_leaf(moe_gemm, moe_gemm.MOE_GEMM_SCHEMA)
_leaf(scaled_grouped_mm, scaled_grouped_mm.SCALED_GROUPED_MM_SCHEMA)
_leaf(mm_a16w8, mm_a16w8.MM_A16W8_SCHEMA, autograd.mm_a16w8)
_leaf(mm_a16w8, mm_a16w8.SILU_MUL_MM_A16W8_SCHEMA)
_leaf(mm_a16w8, mm_a16w8.MM_A16W8_SILU_MUL_SCHEMA)
_leaf(grouped_mm_a16w8, grouped_mm_a16w8.GROUPED_MM_A16W8_SCHEMA, autograd.grouped_mm_a16w8)
for _schema, _composite, _vmap in (
    (gemm.GEMM_SCHEMA, autograd.gemm, vmap.gemm),
    (grouped_gemm.GROUPED_GEMM_SCHEMA, autograd_grouped.grouped_gemm, vmap.each("grouped_gemm")),
    (expert_mlp_op.EXPERT_MLP_SCHEMA, autograd_expert_mlp.expert_mlp, vmap.each("expert_mlp")),
):
    declare(Op(schema=_schema, composite=_composite, vmap=_vmap))
# Their lists of results fit neither `Op` nor the cache of fake results.
_GATHER = _of_passes(
    gather_scaled_mm.GATHER_SCALED_MM_SCHEMA,
    gather_scaled_mm.gather_scaled_mm_reference,
    gather_scaled_mm.gather_scaled_mm_kernel,
    gather_scaled_mm.gather_scaled_mm_fake,
)
_SIBLINGS = _of_passes(
    mm_a16w8.MM_A16W8_SIBLINGS_SCHEMA,
    sibling_products.mm_a16w8_siblings_reference,
    sibling_products.mm_a16w8_siblings_kernel,
    sibling_products.mm_a16w8_siblings_fake,
)
# It has a side effect and no result, so that no graph may leave it out.
_MONITOR = _of_passes(monitor.MONITOR_SCHEMA, monitor.monitor, monitor.monitor, lambda *_: None)
torch.fx.node.has_side_effect(torch.ops.fp8fn.monitor.default)
register_shardings([*OPS, _GATHER, _SIBLINGS, _MONITOR])
