"""FP8 on many GPUs, under PyTorch's own `fully_shard`, process groups, DTensors, parallel styles and checkpoints.

Importing fp8fn does not import this package: it would take the time that importing DTensor takes.
"""

from fp8fn.distributed.experts import combine, dispatch
from fp8fn.distributed.gather import gather_fp8, update_scales
from fp8fn.distributed.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "combine",
    "dispatch",
    "gather_fp8",
    "update_scales",
]
