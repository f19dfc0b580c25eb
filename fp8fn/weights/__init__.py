"""FP8 weights inside modules: the parameter `FP8Weight`, and the functions that quantize, load and save models."""

import fp8fn.weights.collectives
import fp8fn.weights.copies
import fp8fn.weights.products
import fp8fn.weights.views  # noqa: F401  the ops that the subclass has
from fp8fn.weights.fp8_weight import FP8Weight
from fp8fn.weights.load import load_weights
from fp8fn.weights.quantize import quantize_weights
from fp8fn.weights.save import save_weights

__all__ = ["FP8Weight", "load_weights", "quantize_weights", "save_weights"]
