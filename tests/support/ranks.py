"""Ranks without other processes, and DTensors of several ranks in one: what tests compare with whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode


class Ranks(NamedTuple):
    """Ranks of a device mesh, all of which run in each op while the mode is entered."""

    mesh: Any
    mode: LocalTensorMode


@contextmanager
def ranks_in_one_process(*sizes: int) -> Iterator[Ranks]:
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        with LocalTensorMode(world) as mode:
            mesh = init_device_mesh("cpu", sizes)
        yield Ranks(mesh, mode)
    finally:
        dist.destroy_process_group()


@contextmanager
def a_rank_of(world: int, rank: int) -> Iterator[None]:
    """A rank of a group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(x: Tensor, mesh: Any, *placements: Placement) -> Any:
    """Each rank's part of a tensor, without communication, which no backend has for all FP8 types."""
    if any(placement.is_partial() for placement in placements):
        parts = x / mesh.size() + torch.zeros(())  # exact for powers of two; what is made in the mode is each rank's
        return DTensor.from_local(parts, mesh, placements)
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def gathered(x: Any) -> Tensor:
    """The whole tensor, on which all ranks agree. FP8 as bytes, for PyTorch pads no e8m0."""
    if x.element_size() == 1:
        parts = x.to_local().view(torch.uint8)
        bits = DTensor.from_local(parts, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())
        return _agreed(bits.full_tensor()).view(x.dtype)
    whole = x.full_tensor().contiguous()
    return _agreed(whole.view(torch.int32 if x.element_size() == 4 else torch.int16)).view(x.dtype)


def _agreed(x: Any) -> Tensor:
    """As integers, of which each equals itself."""
    result: Tensor = x.reconcile() if isinstance(x, LocalTensor) else x
    return result


def moved(comm: CommDebugMode) -> dict[str, int]:
    """How often each collective ran."""
    return {str(op).rpartition(".")[2]: count for op, count in comm.get_comm_counts().items() if count}


def placed(args: Sequence[Any], mesh: Any, which: int, placement: Placement) -> list[Any]:
    """Arguments of an op with all tensors as DTensors: the tensor number `which` is sharded, the others are whole."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            is_cut = sum(isinstance(each, DTensor) for each in found) == which
            found.append(sharded(arg, mesh, placement if is_cut else Replicate()))
        else:
            found.append(arg)
    return found
