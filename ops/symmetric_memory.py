"""Memory that all ranks of a group read, and PyTorch's pipeline over it.

The pipeline copies one rank's rows over NVLink while those of the rank before are computed with. Every rank of a group
takes part or none: they agree about it once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fp8fn.ops.cuda.runtime import graph_capture


def gather_and_consume(
    shards: Sequence[Tensor], consume: Callable[[list[Tensor], int], None], gathered: Sequence[Tensor], group_name: str
) -> None:
    """Gathers `shards` into `gathered` and calls `consume` with the shards of each rank and its number."""
    from fp8fn.ops.torch_private import symmetric_memory as private

    private.gather_and_consume(list(shards), consume, list(gathered), cast(Any, group_name))


# By the group, as PyTorch gives the name of a group that was destroyed to another one.
_answers: Final[WeakKeyDictionary[Any, str | None]] = WeakKeyDictionary()


def not_pipelined(group_name: str, group_size: int) -> str | None:
    """Why a gather over a group is not pipelined, or None: the same on all its ranks, all of which have to ask."""
    if group_size == 1:
        return "the group has one rank"
    try:
        from fp8fn.ops.torch_private import symmetric_memory as private
    except ImportError as error:
        return str(error)
    group: Any = private.group_of(cast(Any, group_name))
    if group not in _answers:
        if graph_capture.capturing():
            return "the ranks have not agreed yet, and cannot while a CUDA graph is captured"
        _answers[group] = _agreed(_fault(group, group_name, group_size), group)
    return _answers[group]


def not_shared(group: Any) -> str | None:
    """Why the ranks of a group cannot read each other's memory, or None; the same on all its ranks, all of which ask.

    A group of one rank needs no other's memory.
    """
    if not _has_gpus(group):
        return f"the group's backends are {dist.get_backend_config(group)}, none of which has GPUs"
    return not_pipelined(group.group_name, group.size()) if group.size() > 1 else None


def has_agreed(group: Any) -> bool:
    """Whether `not_shared` knows its answer for the group, and asks no other rank."""
    if group.size() == 1 or not _has_gpus(group):
        return True
    try:
        from fp8fn.ops.torch_private import symmetric_memory as private
    except ImportError:
        return True
    return private.group_of(group.group_name) in _answers


def _has_gpus(group: Any) -> bool:
    """By all backends of a group: one that was made without a backend's name has several."""
    return "nccl" in str(dist.get_backend_config(group))


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return graph_capture.capturing()


class SharedBuffer:
    """Bytes on each rank of a group that all of its ranks read. All of them make one of the same size at once.

    Args:
        nbytes: Size on each rank.
        group: Process group for which `not_shared` gives None.
        device: The rank's GPU.
    """

    def __init__(self, nbytes: int, group: Any, device: torch.device) -> None:
        self._handle: Any = None
        self._last: dict[bool, torch.cuda.Stream] = {}  # of eager calls, and of captured ones
        with torch.inference_mode(False):  # tensors of that mode could not be written outside of it
            if group.size() == 1:
                self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
                addresses = [self.bytes.data_ptr()]
            else:
                from fp8fn.ops.torch_private import symmetric_memory as private

                self.bytes = private.empty(nbytes, dtype=torch.uint8, device=device)
                self._handle = private.rendezvous(self.bytes, group.group_name)
                ranks = range(group.size())
                addresses = [self._handle.get_buffer(rank, (nbytes,), torch.uint8).data_ptr() for rank in ranks]
            self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        """Where the bytes of each rank begin, as this rank's GPU addresses them."""

    def claim(self) -> None:
        """Orders what follows on the current stream behind what another stream did with the bytes.

        No stream waits across the begin of a capture, or its end.
        """
        if not self.bytes.is_cuda:
            return
        stream, captured = torch.cuda.current_stream(self.bytes.device), graph_capture.capturing()
        last = self._last.get(captured)
        if last is not None and last != stream and (not captured or _captures(last)):
            stream.wait_stream(last)
        self._last[captured] = stream

    def wait(self) -> None:
        """The current stream waits for all ranks' streams to come here, and sees what they have written."""
        if self._handle is not None:
            self._handle.barrier(channel=0)


def _agreed(fault: str | None, group: Any) -> str | None:
    """`fault`, or, where this rank has none and another has one, that."""
    device = "cuda" if _has_gpus(group) else "cpu"
    able = torch.tensor(fault is None, dtype=torch.int32, device=device)
    dist.all_reduce(able, dist.ReduceOp.MIN, group)
    return fault if fault is not None or able.item() else "another rank of the group cannot"


def _fault(group: Any, group_name: str, group_size: int) -> str | None:
    """What speaks against it on this rank. Whatever goes wrong does: the other ranks wait for the answer."""
    try:
        return _local_fault(group, group_name, group_size)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _local_fault(group: Any, group_name: str, group_size: int) -> str | None:
    """What this rank sees that speaks against it."""
    ranks = dist.get_process_group_ranks(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if len({rank // local for rank in ranks}) > 1 or group_size > torch.cuda.device_count():
        return f"the {group_size} ranks of the group are not on one machine's {torch.cuda.device_count()} GPUs"
    from fp8fn.ops.torch_private import symmetric_memory as private

    if not private.is_symm_mem_enabled_for_group(cast(Any, group_name)):
        # The function is deprecated from PyTorch 2.9 on, where every group is enabled.
        try:
            private.enable_symm_mem_for_group(cast(Any, group_name))
        except (RuntimeError, ValueError) as error:
            return f"symmetric memory is not enabled for the group: {error}"
    here = torch.cuda.current_device()
    others = (other for other in range(torch.cuda.device_count()) if other != here)
    if not all(torch.cuda.can_device_access_peer(here, other) for other in others):
        return "some GPU cannot read another GPU's memory"
    return None
