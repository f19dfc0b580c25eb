"""FP8 checkpoints: safetensors files, the formats that they are in, and `load_blockwise`."""

from fp8fn.checkpoint.load import load_blockwise

__all__ = ["load_blockwise"]
