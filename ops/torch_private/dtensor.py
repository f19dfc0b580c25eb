"""PyTorch's private names of DTensor and of the styles of tensor parallelism.

Import `torch.distributed.tensor` first: fp8fn's rules follow that import at once, and need this module.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, parallel

from fp8fn.ops.torch_private import look_for, needed_by

with needed_by("what fp8fn does with DTensors"):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    register_op_strategy = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    look_for(DTensor, "_local_tensor")
    # fp8fn's styles replace these: without them a sequence would be gathered in 16 bits.
    look_for(parallel.ColwiseParallel, "_prepare_input_fn")
    look_for(parallel.RowwiseParallel, "_prepare_output_fn")
    look_for(parallel.PrepareModuleInput, "_prepare_input_arg")


def local_part(x: DTensor) -> Tensor:
    """What this rank has of a DTensor, past autograd: `to_local` gives a view, without the attributes of a subclass."""
    return x._local_tensor


def set_local_part(x: DTensor, part: Tensor) -> None:
    x._local_tensor = part


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """By the mark that FSDP sets for Dynamo on each module whose parameters it shards; no class has it."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))
