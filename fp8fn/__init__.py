"""fp8fn: FP8 matrix multiplication for PyTorch as pure functions."""

import fp8fn.meta.declarations  # noqa: F401  registers the ops
from fp8fn.grouped import expert_mlp, grouped_gemm
from fp8fn.grouped_quantization import quantize_grouped, quantize_grouped_dual
from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.lowering.explain import explain
from fp8fn.matmul import gemm, linear
from fp8fn.ops.recipe import BLOCKWISE, BLOCKWISE_POW2, HYBRID, MXFP8, ROWWISE, TENSORWISE, Recipe
from fp8fn.quantization import (
    dequantize,
    quantize,
    quantize_dual,
    quantize_rms_norm,
    quantize_rms_norm_dual,
    quantize_silu_mul,
    quantize_silu_mul_dual,
)
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.site import Site
from fp8fn.transform import fp8
from fp8fn.version import __version__

__all__ = [
    "BLOCKWISE",
    "BLOCKWISE_POW2",
    "HYBRID",
    "MXFP8",
    "ROWWISE",
    "TENSORWISE",
    "GroupedScaledTensor",
    "Recipe",
    "ScaledTensor",
    "Site",
    "__version__",
    "dequantize",
    "expert_mlp",
    "explain",
    "fp8",
    "gemm",
    "grouped_gemm",
    "linear",
    "quantize",
    "quantize_dual",
    "quantize_grouped",
    "quantize_grouped_dual",
    "quantize_rms_norm",
    "quantize_rms_norm_dual",
    "quantize_silu_mul",
    "quantize_silu_mul_dual",
]
