"""FP8 weights inside modules: the parameter `FP8Weight`, and the functions that quantize, load and save models."""

from typing import TYPE_CHECKING

from fp8fn.weights.fp8_weight import FP8Weight, fill_before_first_op


def _fill() -> None:
    """Imports the forms of the ops that the subclass has."""
    from fp8fn.weights import collectives, copies, products, views  # noqa: F401


fill_before_first_op(_fill)

if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports the modules of the reports of `load_weights` and `quantize_weights` when they are first used."""
        if name not in ("load", "quantize"):
            raise AttributeError(f"module 'fp8fn.weights' has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"fp8fn.weights.{name}")


__all__ = ["FP8Weight"]
