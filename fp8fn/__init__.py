"""fp8fn: FP8 matrix multiplication for PyTorch as pure functions."""

from typing import TYPE_CHECKING

from fp8fn.cli import needs_torch, watch_import
from fp8fn.version import __version__

if needs_torch():  # False where the command line prints only its help or version
    watch_import()
    try:
        import fp8fn.meta.declarations  # noqa: F401  registers the ops
    except ModuleNotFoundError as missing:
        if missing.name != "fp8fn.meta":
            raise
        raise ImportError(
            "fp8fn/meta, fp8fn/ops and fp8fn/lowering are symbolic links to folders, and files in this checkout: clone"
            " it with git clone -c core.symlinks=true (under Windows in developer mode), or install the wheel"
        ) from None
    from fp8fn.grouped import expert_mlp, grouped_gemm
    from fp8fn.grouped_quantization import quantize_grouped, quantize_grouped_dual
    from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
    from fp8fn.matmul import gemm, linear
    from fp8fn.ops.recipe import (
        BLOCKWISE,
        BLOCKWISE_POW2,
        BLOCKWISE_SQUARE,
        HYBRID,
        MXFP8,
        ROWWISE,
        TENSORWISE,
        Recipe,
    )
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
    from fp8fn.weights import FP8Weight

# The modules of the names that no product needs. Each is imported when one of its names is first used: together they
# double the time that `import fp8fn` takes. Type checkers read the imports below.
_LATER = {
    "CheckpointLayout": "fp8fn.checkpoint.format",
    "Site": "fp8fn.site",
    "Statistics": "fp8fn.lowering.operand_statistics",
    "decoding_loop": "fp8fn.decoding",
    "error": "fp8fn.quantization_error",
    "explain": "fp8fn.lowering.explain",
    "fp8": "fp8fn.transform",
    "load_blockwise": "fp8fn.checkpoint.load",
    "load_weights": "fp8fn.weights.load",
    "moe_gemm": "fp8fn.moe",
    "quantize_weights": "fp8fn.weights.quantize",
    "read_monitor": "fp8fn.lowering.monitor",
    "save_weights": "fp8fn.weights.save",
    "sort_tokens": "fp8fn.moe",
    "write_monitor": "fp8fn.lowering.monitor",
}
_MODULES_LATER = ("checkpoint", "distributed", "lowering", "plot")

if TYPE_CHECKING:
    from fp8fn import checkpoint as checkpoint  # by its own name, as `__all__` does not have it
    from fp8fn import distributed, plot
    from fp8fn import lowering as lowering  # as above
    from fp8fn.checkpoint.format import CheckpointLayout
    from fp8fn.checkpoint.load import load_blockwise
    from fp8fn.decoding import decoding_loop
    from fp8fn.lowering.explain import explain
    from fp8fn.lowering.monitor import read_monitor, write_monitor
    from fp8fn.lowering.operand_statistics import Statistics
    from fp8fn.moe import moe_gemm, sort_tokens
    from fp8fn.quantization_error import error
    from fp8fn.site import Site
    from fp8fn.transform import fp8
    from fp8fn.weights.load import load_weights
    from fp8fn.weights.quantize import quantize_weights
    from fp8fn.weights.save import save_weights
else:

    def __getattr__(name):
        """Imports a name of `_LATER`, or a module of `_MODULES_LATER`, when it is first used."""
        import sys
        from importlib import import_module

        if name in _MODULES_LATER:
            return import_module(f"fp8fn.{name}")
        if name not in _LATER:
            # With the name and the module, Python's traceback names the nearest attribute.
            raise AttributeError(f"module 'fp8fn' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        found = globals()[name] = getattr(import_module(_LATER[name]), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "BLOCKWISE",
    "BLOCKWISE_POW2",
    "BLOCKWISE_SQUARE",
    "HYBRID",
    "MXFP8",
    "ROWWISE",
    "TENSORWISE",
    "CheckpointLayout",
    "FP8Weight",
    "GroupedScaledTensor",
    "Recipe",
    "ScaledTensor",
    "Site",
    "Statistics",
    "__version__",
    "decoding_loop",
    "dequantize",
    "distributed",
    "error",
    "expert_mlp",
    "explain",
    "fp8",
    "gemm",
    "grouped_gemm",
    "linear",
    "load_blockwise",
    "load_weights",
    "moe_gemm",
    "plot",
    "quantize",
    "quantize_dual",
    "quantize_grouped",
    "quantize_grouped_dual",
    "quantize_rms_norm",
    "quantize_rms_norm_dual",
    "quantize_silu_mul",
    "quantize_silu_mul_dual",
    "quantize_weights",
    "read_monitor",
    "save_weights",
    "sort_tokens",
    "write_monitor",
]
