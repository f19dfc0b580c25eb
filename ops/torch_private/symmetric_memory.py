"""PyTorch's private names of memory that the ranks of a group share."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from fp8fn.ops.torch_private import needed_by

with needed_by("what fp8fn does over memory of several GPUs"):
    from torch.distributed._symmetric_memory import _pipelined_multi_all_gather_and_consume as gather_and_consume
    from torch.distributed._symmetric_memory import (
        empty,
        enable_symm_mem_for_group,
        is_symm_mem_enabled_for_group,
        rendezvous,
    )
    from torch.distributed.distributed_c10d import _resolve_process_group as group_of  # type: ignore[attr-defined]
