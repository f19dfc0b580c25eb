"""PyTorch's private names of collectives as ops; a build without `torch.distributed` has none of them."""

from __future__ import annotations

from typing import Final

import torch

from fp8fn.ops.torch_private import look_for, needed_by

WRAP: Final = "_c10d_functional::_wrap_tensor_autograd"
"""An op of PyTorch 2.13 that begins to exist with `torch.distributed._functional_collectives`."""

FROM_RANK_0: Final = "torch.distributed._state_dict_utils"
"""PyTorch's module that broadcasts a state dict of rank 0, by `set_model_state_dict(broadcast_from_rank0=True)`."""

if torch.distributed.is_available():
    with needed_by("fp8fn's collectives"):
        all_gather = torch.ops._c10d_functional.all_gather_into_tensor
        broadcast = torch.ops._c10d_functional.broadcast
        wait = torch.ops._c10d_functional.wait_tensor
        in_place = torch.ops.c10d
        look_for(in_place, "broadcast_", "scatter_", "allgather_")
