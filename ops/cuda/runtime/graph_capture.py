"""Launches that may still run when the next launch of a CUDA graph begins: may it read a weight before it waits?

A kernel that uses programmatic dependent launch may begin while others run, and reads the tensors that those write only
after it has waited for them. During capture the driver tells which node of the graph the stream is behind. If that node
is one of our launches, it is known when its kernel lets the next one begin; and as ops are functional, it writes
only tensors that were made for it. Kernels that Inductor generates and PyTorch's attention begin when all before them
has ended, and write nothing but tensors whose addresses they are given. For other kernels, and outside capture, neither
is known.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.torch_private import core

_log = logging.getLogger("fp8fn")

# As Inductor names its pointwise kernels, reductions (two kinds) and several in one, with and without descriptive
# names (those of other kernels may begin alike, as triton_per_token_quant); PyTorch's flash attention, which has a
# namespace of its own, its memory-efficient attention, and cuDNN's forward (nodes of its backward were not looked at).
_ADDRESSED: Final = re.compile(
    r"triton_(poi|per|red|for)_(fused_|_\d)|_ZN13pytorch_flash\d+\w+_kernel|_Z\d+fmha_cutlassF_"
    r"|cudnn_generated_fort_native_sdpa_(?!\w*bprop)"
)

LIMIT: Final = 256  # nodes that are remembered: asked for is the last one of a stream

Window: TypeAlias = frozenset[range]
"""Addresses that launches write which may still run when the one behind a node begins."""


class Place(NamedTuple):
    """The position of a captured stream: its capture, and the node that it is behind (None at the beginning)."""

    capture: int
    node: int | None


_windows: Final[OrderedDict[Place, Window]] = OrderedDict()


def capturing() -> bool:
    """Whether the current stream is captured into a graph, of CUDA or of HIP."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def readable(*tensors: Tensor) -> bool:
    """Whether the launch that is captured next may read tensors of its device before it waits for those before it."""
    window = ahead(tensors[0].device) if capturing() else None
    if window is None or any(_meet(read, written) for read in map(span, tensors) for written in window):
        return False
    _log.debug("captured: the next launch reads its weight early; what may still run does not write it")
    return True


def ahead(device: torch.device) -> Window | None:
    """The window of the current stream; None where it is not known, or the stream is not captured."""
    place = _place(device)
    if place is None:
        return None
    if place.node is None:  # a graph begins when all before it on its stream has ended
        return frozenset()
    if place not in _windows and (written := _written_by_pytorch(place.node)) is not None:
        _remember(place, written)
    return _windows.get(place)


def launched(device: torch.device, window: Window | None, made: Iterable[Tensor]) -> None:
    """Launches that write `made` were captured, `window` being that of those before them which may still run."""
    if window is None or (place := _place(device)) is None:
        return
    _remember(place, window.union(map(span, made)))


def forget() -> None:
    """As if what has been captured were another library's."""
    _windows.clear()


def span(x: Tensor) -> range:
    """The addresses of a tensor's storage."""
    storage = x.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _remember(place: Place, window: Window) -> None:
    _windows[place] = window
    while len(_windows) > LIMIT:
        _windows.popitem(last=False)


def _written_by_pytorch(node: int) -> Window | None:
    """All addresses that a kernel of PyTorch's is given, each of which may be that of a tensor that it writes.

    None for nodes of others. A tensor of a storage that no such address lies in is not written.
    """
    kernel = driver.kernel_node(node)
    if kernel is None or _ADDRESSED.match(kernel.name) is None:
        return None
    return frozenset(range(word, word + 1) for word in kernel.words)


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _place(device: torch.device) -> Place | None:
    if torch.version.cuda is None or device.index != core.current_gpu():  # the driver is CUDA's
        return None
    found = driver.captured(core.stream_handle(device.index))
    return None if found is None else Place(*found)
