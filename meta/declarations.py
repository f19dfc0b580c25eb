"""The declaration of every op of `torch.ops.fp8fn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from fp8fn.meta import autograd, autograd_expert_mlp, autograd_grouped, gather_scaled_mm, monitor, vmap
from fp8fn.meta.registry import OPS, Op, declare, register_shardings
from fp8fn.ops import expert_mlp as expert_mlp_op
from fp8fn.ops import (
    gemm,
    grouped_gemm,
    grouped_mm_a16w8,
    mm_a16w8,
    moe_gemm,
    mx_mm,
    quantize,
    quantize_fused,
    quantize_grouped,
    quantize_grouped_fused,
    quantize_silu_mul,
    scaled_grouped_mm,
    scaled_mm,
)

_DIFFERENTIABLE = "use fp8fn.gemm(a, b) on the unquantized tensors, which is differentiable, or detach its input"


def _leaf(module: ModuleType, schema: str, derivative: Callable[..., Any]) -> Op:
    """Declares an op whose parts `module` holds under the op's name; `derivative` makes its Autograd kernel.

    `vmap` holds its rule; an op without one is called once for each element of the batch.
    """
    name = schema.partition("(")[0]
    reference, kernel = getattr(module, f"{name}_reference"), getattr(module, f"{name}_kernel")
    return declare(
        Op(
            schema=schema,
            reference=reference,
            kernel=kernel,
            fake=getattr(module, f"{name}_fake"),
            autograd=derivative(reference, kernel),
            vmap=getattr(vmap, name, vmap.each(name)),
        )
    )


def _constant(module: ModuleType, schema: str) -> Op:
    """Declares an op that has no derivative."""
    return _leaf(module, schema, partial(autograd.not_differentiable, schema.partition("(")[0], _DIFFERENTIABLE))


AMAX = _constant(quantize, quantize.AMAX_SCHEMA)
QUANTIZE = _constant(quantize, quantize.QUANTIZE_SCHEMA)
QUANTIZE_DUAL = _constant(quantize, quantize.QUANTIZE_DUAL_SCHEMA)
QUANTIZE_GROUPED = _constant(quantize_grouped, quantize_grouped.QUANTIZE_GROUPED_SCHEMA)
QUANTIZE_GROUPED_DUAL = _constant(quantize_grouped, quantize_grouped.QUANTIZE_GROUPED_DUAL_SCHEMA)
QUANTIZE_SILU_MUL = _constant(quantize_fused, quantize_fused.SILU_MUL_SCHEMA)
QUANTIZE_SILU_MUL_DUAL = _constant(quantize_fused, quantize_fused.SILU_MUL_DUAL_SCHEMA)
QUANTIZE_RMS_NORM = _constant(quantize_fused, quantize_fused.RMS_NORM_SCHEMA)
QUANTIZE_RMS_NORM_DUAL = _constant(quantize_fused, quantize_fused.RMS_NORM_DUAL_SCHEMA)
QUANTIZE_SILU_MUL_GROUPED = _constant(quantize_grouped_fused, quantize_grouped_fused.SILU_MUL_COLUMNS_SCHEMA)
QUANTIZE_SILU_MUL_GROUPED_DUAL = _constant(quantize_grouped_fused, quantize_grouped_fused.SILU_MUL_SCHEMA)
QUANTIZE_SILU_MUL_GRAD_GROUPED_DUAL = _constant(quantize_grouped_fused, quantize_grouped_fused.SILU_MUL_GRAD_SCHEMA)
QUANTIZE_SILU_MUL_SAVED = _constant(quantize_silu_mul, quantize_silu_mul.SAVED_SCHEMA)
QUANTIZE_SILU_MUL_BACKWARD = _constant(quantize_silu_mul, quantize_silu_mul.BACKWARD_SCHEMA)
SCALED_MM = _constant(scaled_mm, scaled_mm.SCALED_MM_SCHEMA)
MX_MM = _constant(mx_mm, mx_mm.MX_MM_SCHEMA)
MOE_GEMM = _constant(moe_gemm, moe_gemm.MOE_GEMM_SCHEMA)
SCALED_GROUPED_MM = _constant(scaled_grouped_mm, scaled_grouped_mm.SCALED_GROUPED_MM_SCHEMA)
MM_A16W8 = _leaf(mm_a16w8, mm_a16w8.MM_A16W8_SCHEMA, autograd.mm_a16w8)
GROUPED_MM_A16W8 = _leaf(grouped_mm_a16w8, grouped_mm_a16w8.GROUPED_MM_A16W8_SCHEMA, autograd.grouped_mm_a16w8)
GEMM = declare(Op(schema=gemm.GEMM_SCHEMA, composite=autograd.gemm, vmap=vmap.gemm))
GROUPED_GEMM = declare(
    Op(
        schema=grouped_gemm.GROUPED_GEMM_SCHEMA,
        composite=autograd_grouped.grouped_gemm,
        vmap=vmap.each("grouped_gemm"),
    )
)
EXPERT_MLP = declare(
    Op(
        schema=expert_mlp_op.EXPERT_MLP_SCHEMA,
        composite=autograd_expert_mlp.expert_mlp,
        vmap=vmap.each("expert_mlp"),
    )
)
register_shardings([*OPS, gather_scaled_mm.NAME, monitor.NAME])
