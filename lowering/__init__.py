"""torch.compile: the backend, the pass over joint graphs, the patterns it looks for, and `explain`."""

from __future__ import annotations

from contextlib import AbstractContextManager


def substitution() -> AbstractContextManager[None]:
    """Plain `torch.compile` puts fp8fn's ops in the place of products on FP8 data, of what is compiled inside.

    A compilation happens at the first call of a compiled function, so that is what has to be inside:

        with fp8fn.lowering.substitution():
            torch.compile(model)(x)
    """
    from fp8fn.lowering import joint_pass

    return joint_pass.substitution()


def enable() -> None:
    """Plain `torch.compile` substitutes from now on, as inside `substitution()`; again is no error."""
    from fp8fn.lowering import joint_pass

    joint_pass.enable()


def disable() -> None:
    """Undoes `enable()`; without it, nothing happens."""
    from fp8fn.lowering import joint_pass

    joint_pass.disable()
