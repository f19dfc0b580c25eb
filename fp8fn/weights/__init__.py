"""FP8 weights inside modules: the parameter `FP8Weight`, and the functions that quantize, load and save models."""

from fp8fn.weights.fp8_weight import FP8Weight, fill_before_first_op


def _fill() -> None:
    """Imports the forms of the ops that the subclass has."""
    from fp8fn.weights import collectives, copies, products, views  # noqa: F401


fill_before_first_op(_fill)

__all__ = ["FP8Weight"]
