"""torch.compile: the backend, the passes over its graphs with their patterns, and `explain`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

__all__ = ["disable", "enable", "substitution"]

if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports the module of the types of `explain` when it is first used."""
        if name != "explanation":
            raise AttributeError(f"module 'fp8fn.lowering' has no attribute {name!r}")
        from importlib import import_module

        return import_module("fp8fn.lowering.explanation")


def substitution() -> AbstractContextManager[None]:
    """Makes plain `torch.compile` replace products on FP8 data by fp8fn's ops, for what is compiled inside.

    The replacement is exact: it reads the FP8 data of the graph and quantizes nothing. A compilation happens at the
    first call of a compiled function, so the call must be inside.

    Returns:
        A context manager.

    Example:
        >>> with fp8fn.lowering.substitution():
        ...     compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    """
    from fp8fn.lowering import joint_pass

    return joint_pass.substitution()


def enable() -> None:
    """Makes plain `torch.compile` replace products as inside `substitution()` from now on; a second call does nothing.

    Example:
        >>> fp8fn.lowering.enable()
        >>> fp8fn.lowering.disable()
    """
    from fp8fn.lowering import joint_pass

    joint_pass.enable()


def disable() -> None:
    """Undoes `enable()`; has no effect without it.

    Example:
        >>> fp8fn.lowering.disable()
    """
    from fp8fn.lowering import joint_pass

    joint_pass.disable()
