"""Every op of `torch.ops.fp8fn`, each declared once with all that belongs to it."""

from __future__ import annotations

from fp8fn.meta import autograd, fake, vmap
from fp8fn.meta.registry import Op, declare
from fp8fn.ops import gemm, mm_a16w8, quantize, quantize_produced, scaled_mm

_DIFFERENTIABLE = "use fp8fn.gemm(a, b) on the unquantized tensors, which is differentiable, or detach its input"

QUANTIZE = declare(
    Op(
        schema=quantize.QUANTIZE_SCHEMA,
        reference=quantize.quantize_reference,
        kernel=quantize.quantize_kernel,
        fake=fake.quantize,
        autograd=autograd.not_differentiable(
            "quantize", _DIFFERENTIABLE, quantize.quantize_reference, quantize.quantize_kernel
        ),
        vmap=vmap.quantize,
    )
)
QUANTIZE_DUAL = declare(
    Op(
        schema=quantize.QUANTIZE_DUAL_SCHEMA,
        reference=quantize.quantize_dual_reference,
        kernel=quantize.quantize_dual_kernel,
        fake=fake.quantize_dual,
        autograd=autograd.not_differentiable(
            "quantize_dual", _DIFFERENTIABLE, quantize.quantize_dual_reference, quantize.quantize_dual_kernel
        ),
        vmap=vmap.quantize_dual,
    )
)
QUANTIZE_SILU_MUL = declare(
    Op(
        schema=quantize_produced.SILU_MUL_SCHEMA,
        reference=quantize_produced.quantize_silu_mul_reference,
        kernel=quantize_produced.quantize_silu_mul_kernel,
        fake=fake.quantize_silu_mul,
        autograd=autograd.not_differentiable(
            "quantize_silu_mul", _DIFFERENTIABLE,
            quantize_produced.quantize_silu_mul_reference, quantize_produced.quantize_silu_mul_kernel,
        ),
        vmap=vmap.quantize_silu_mul,
    )
)  # fmt: skip
QUANTIZE_SILU_MUL_DUAL = declare(
    Op(
        schema=quantize_produced.SILU_MUL_DUAL_SCHEMA,
        reference=quantize_produced.quantize_silu_mul_dual_reference,
        kernel=quantize_produced.quantize_silu_mul_dual_kernel,
        fake=fake.quantize_silu_mul_dual,
        autograd=autograd.not_differentiable(
            "quantize_silu_mul_dual", _DIFFERENTIABLE,
            quantize_produced.quantize_silu_mul_dual_reference, quantize_produced.quantize_silu_mul_dual_kernel,
        ),
        vmap=vmap.quantize_silu_mul_dual,
    )
)  # fmt: skip
QUANTIZE_RMS_NORM = declare(
    Op(
        schema=quantize_produced.RMS_NORM_SCHEMA,
        reference=quantize_produced.quantize_rms_norm_reference,
        kernel=quantize_produced.quantize_rms_norm_kernel,
        fake=fake.quantize_rms_norm,
        autograd=autograd.not_differentiable(
            "quantize_rms_norm", _DIFFERENTIABLE,
            quantize_produced.quantize_rms_norm_reference, quantize_produced.quantize_rms_norm_kernel,
        ),
        vmap=vmap.quantize_rms_norm,
    )
)  # fmt: skip
QUANTIZE_RMS_NORM_DUAL = declare(
    Op(
        schema=quantize_produced.RMS_NORM_DUAL_SCHEMA,
        reference=quantize_produced.quantize_rms_norm_dual_reference,
        kernel=quantize_produced.quantize_rms_norm_dual_kernel,
        fake=fake.quantize_rms_norm_dual,
        autograd=autograd.not_differentiable(
            "quantize_rms_norm_dual", _DIFFERENTIABLE,
            quantize_produced.quantize_rms_norm_dual_reference, quantize_produced.quantize_rms_norm_dual_kernel,
        ),
        vmap=vmap.quantize_rms_norm_dual,
    )
)  # fmt: skip
SCALED_MM = declare(
    Op(
        schema=scaled_mm.SCALED_MM_SCHEMA,
        reference=scaled_mm.scaled_mm_reference,
        kernel=scaled_mm.scaled_mm_kernel,
        fake=fake.scaled_mm,
        autograd=autograd.not_differentiable(
            "scaled_mm", _DIFFERENTIABLE, scaled_mm.scaled_mm_reference, scaled_mm.scaled_mm_kernel
        ),
        vmap=vmap.scaled_mm,
    )
)
MM_A16W8 = declare(
    Op(
        schema=mm_a16w8.MM_A16W8_SCHEMA,
        reference=mm_a16w8.mm_a16w8_reference,
        kernel=mm_a16w8.mm_a16w8_kernel,
        fake=fake.mm_a16w8,
        autograd=autograd.mm_a16w8(mm_a16w8.mm_a16w8_reference, mm_a16w8.mm_a16w8_kernel),
        vmap=vmap.mm_a16w8,
    )
)
GEMM = declare(Op(schema=gemm.GEMM_SCHEMA, composite=autograd.gemm, vmap=vmap.gemm))
