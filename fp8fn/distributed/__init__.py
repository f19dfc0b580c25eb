"""FP8 on many GPUs, under PyTorch's own `fully_shard`, process groups, DTensors, parallel styles and checkpoints.

Each name is imported when it is first used: importing fp8fn must not take the time that importing DTensor takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8fn.distributed.experts import combine, dispatch
    from fp8fn.distributed.gather import gather_fp8, update_scales
    from fp8fn.distributed.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
else:
    _MODULES = {
        "ColwiseParallel": "parallel",
        "PrepareModuleInput": "parallel",
        "RowwiseParallel": "parallel",
        "combine": "experts",
        "dispatch": "experts",
        "gather_fp8": "gather",
        "update_scales": "gather",
    }

    def __getattr__(name):
        if name in _MODULES:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "combine",
    "dispatch",
    "gather_fp8",
    "update_scales",
]
