"""Every op in plain PyTorch: the oracle of the tests, and the path on the CPU."""

from fp8fn.ops.reference.mm_a16w8 import mm_a16w8
from fp8fn.ops.reference.moe_gemm import moe_gemm
from fp8fn.ops.reference.produce import rms_norm, silu_mul, silu_mul_grad
from fp8fn.ops.reference.quantize import amax, dequantize, quantize, quantize_dual
from fp8fn.ops.reference.quantize_grouped import dequantize_grouped, quantize_grouped, quantize_grouped_dual
from fp8fn.ops.reference.scaled_grouped_mm import grouped_mm_a16w8, scaled_grouped_mm, scaled_masked_mm
from fp8fn.ops.reference.scaled_mm import scaled_mm

__all__ = [
    "amax",
    "dequantize",
    "dequantize_grouped",
    "grouped_mm_a16w8",
    "mm_a16w8",
    "moe_gemm",
    "quantize",
    "quantize_dual",
    "quantize_grouped",
    "quantize_grouped_dual",
    "rms_norm",
    "scaled_grouped_mm",
    "scaled_masked_mm",
    "scaled_mm",
    "silu_mul",
    "silu_mul_grad",
]
