"""Counters in a GPU's memory, for kernels that deal out their tiles while they run (`deal.cuh`).

Each counter is 0 when no launch uses it. Launches that may run at the same time need different ones: those on different
streams, and in different CUDA graphs.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.torch_private import core

MOST_LISTS: Final = 191  # clusters of a launch, each of which has a counter beside that of all
SETS: Final = 2048  # of a device: 1.5 MB
_BYTES: Final = 4 * (1 + MOST_LISTS)
_PER_THREAD: Final = 2  # CU_STREAM_PER_THREAD: a stream of each thread, by one name

Owner: TypeAlias = tuple[int, int, int | None]
"""A device, a stream, and the capture in which it is."""

_LOG: Final = logging.getLogger("fp8fn")
_lock: Final = threading.Lock()
_pools: Final[dict[int, int]] = {}
_sets: Final[dict[Owner, int]] = {}
_used: Final[dict[int, int]] = {}


def counters_of(stream: int, device: int) -> int:
    """The address of counters for launches on the current stream of the current device; 0 for none.

    There are none in a process by itself, where nothing holds processors beside a product, and counters cost it a
    microsecond. Nor are there where another stream may take the handle of this one before its work has ended: PyTorch
    keeps those of its own as long as the process lives.
    """
    if not is_shared():
        return 0
    capture = None
    if stream != 0:
        if torch.cuda.is_current_stream_capturing():
            if (place := driver.captured(stream)) is None:
                return 0
            capture = place[0]
        # Odd for the streams of PyTorch's pools.
        elif stream == _PER_THREAD or core.stream_identity(device)[0] % 2 == 0:
            return 0
    owner = device, stream, capture
    found = _sets.get(owner)
    if found is None:
        with _lock:
            if owner not in _sets:
                _sets[owner] = _new(device)
            found = _sets[owner]
    return found


class Kept:
    """The counters of launches that are started again and again: the places from which they read the address.

    Args:
        places: an address for each launch that has counters.
    """

    def __init__(self, places: Sequence[ctypes.c_uint64]) -> None:
        self._places = places
        self._settled = False  # they are those of the stream of all, which is never captured

    def refresh(self, stream: int, device: int) -> None:
        """Writes the address for the current stream of the current device; call it before each start."""
        if not self._places or (self._settled and stream == 0):
            return
        address = counters_of(stream, device)
        for place in self._places:
            place.value = address
        self._settled = stream == 0 and address != 0


def is_shared() -> bool:
    """Whether other kernels may run beside a product: those of NCCL, once the process is of a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _new(device: int) -> int:
    used = _used.get(device, 0)
    if used == SETS:
        _LOG.info("GPU %d: no counters are left; products of one more stream or graph deal in advance", device)
        return 0
    if device not in _pools:
        driver.make_context_current(device)
        try:
            _pools[device] = driver.zeros(SETS * _BYTES)
        except driver.DriverError as error:  # a product does not fail for want of them
            _LOG.info("GPU %d: there is no memory for counters, and products deal in advance: %s", device, error)
            _used[device] = SETS
            return 0
    _used[device] = used + 1
    return _pools[device] + used * _BYTES
