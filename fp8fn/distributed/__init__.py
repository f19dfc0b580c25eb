"""FP8 on many GPUs, under PyTorch's own process groups, DTensors and parallel styles.

Each name is imported when it is first used: importing fp8fn must not take the time that importing DTensor takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8fn.distributed.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
else:
    _MODULES = dict.fromkeys(("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel"), "parallel")

    def __getattr__(name):
        if name in _MODULES:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ColwiseParallel", "PrepareModuleInput", "RowwiseParallel"]
