"""fp8fn: FP8 matrix multiplication for PyTorch as pure functions."""

import fp8fn.meta.declarations  # noqa: F401  registers the ops
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
    "Recipe",
    "ScaledTensor",
    "Site",
    "__version__",
    "dequantize",
    "explain",
    "fp8",
    "gemm",
    "linear",
    "quantize",
    "quantize_dual",
    "quantize_rms_norm",
    "quantize_rms_norm_dual",
    "quantize_silu_mul",
    "quantize_silu_mul_dual",
]
