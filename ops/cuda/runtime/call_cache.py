"""Launches that are kept: a second call on tensors of the same kind only allocates, writes addresses and launches."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, Prepared
from fp8fn.ops.torch_private import core

# A training step has a few launches for each of its shapes; past the limit the one that was used longest ago goes.
LIMIT: Final = 4096

Kind: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, int, int] | None
Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

_kept: Final[OrderedDict[Hashable, Any]] = OrderedDict()
_lock: Final = threading.Lock()


def kind(x: Tensor | None) -> Kind:
    """All that a plan reads off a tensor: shape, strides, type, device, and its address modulo 16; None for None.

    The memory of `x` holds its values: a tensor with a bit that says otherwise has been through the dispatcher, which
    `fp8fn.meta.levels` leaves out of no call on one.
    """
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16


def recall(key: Hashable) -> Any:
    """The value kept under an equal key, or None.

    `key` has to determine a launch but for the addresses of its tensors: the name of the op, its arguments, and the
    `kind` of each tensor.
    """
    found = _kept.get(key)
    # The order costs a second search for the key. Below half of the limit it has no effect yet: nothing is dropped
    # before as many keys again have been kept, and until then each key in use comes to the end.
    if found is not None and len(_kept) > LIMIT // 2:
        with suppress(KeyError):  # another thread may have put it out by now
            _kept.move_to_end(key)
    return found


def keep(key: Hashable, value: Any) -> Any:
    """Keeps a value under a key, and returns it; of two threads that make one at the same time, the first's."""
    with _lock:
        value = _kept.setdefault(key, value)
        while len(_kept) > LIMIT:
            _kept.popitem(last=False)
        return value


def start(launch: Prepared, addresses: list[int]) -> None:
    """Launch on the current stream of the device that `launch` was prepared on."""
    if launch.device.index == core.current_gpu():
        launch.launch(addresses)
    else:
        with torch.cuda.device(launch.device):
            launch.launch(addresses)


class Step(NamedTuple):
    """A loaded kernel, and for each of its pointers the place of its tensor among a call's inputs and then outputs."""

    launch: Prepared
    pointers: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """Launches on new tensors: allocates `made`, starts the steps, returns the first `returned` of what it made.

    `zeroed` outputs are set to zero first.
    """

    steps: tuple[Step, ...]
    made: tuple[Geometry, ...]
    returned: int
    zeroed: bool = False

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        device = self.steps[0][0].device
        made = allocated(self.made, device)
        if self.zeroed:
            for tensor in made:
                tensor.zero_()
        tensors = (*inputs, *made)
        window = graph_capture.ahead(device) if (tracked := graph_capture.capturing()) else None
        for launch, places in self.steps:
            start(launch, [0 if at is None or (x := tensors[at]) is None else x.data_ptr() for at in places])
        if tracked:
            settled = any(launch.settles for launch, _ in self.steps)
            graph_capture.launched(device, frozenset() if settled else window, made)
        if (tape := _recording.tape) is not None:
            tape.append((self, inputs, made))
        return made[: self.returned]


def call_of(launches: Sequence[CudaLaunch], inputs: Sequence[str], outputs: Outputs) -> Call:
    """Planned launches as a call on tensors of the same kinds, given in the order of `inputs`.

    A launch's pointer is the tensor of its own name, or of the name that the launch's `binds` has for it. Each call
    allocates the launches' `scratch` after the outputs.
    """
    made = dict(outputs.tensors)
    for launch in launches:
        scratch = {launch.binds.get(name, name): launch.args[name] for name in launch.scratch}
        made |= {name: x for name, x in scratch.items() if isinstance(x, Tensor)}
    places = {name: place for place, name in enumerate((*inputs, *made))}
    steps = []
    for launch in launches:
        names = [name for name, arg in launch.args.items() if not isinstance(arg, (int, float, tuple))]
        at = [None if launch.args[name] is None else places[launch.binds.get(name, name)] for name in names]
        steps.append(Step(launch.prepare(), tuple(at)))
    return Call(tuple(steps), tuple(map(geometry, made.values())), outputs.returned, outputs.zeroed)


@dataclass(frozen=True, eq=False)
class Outputs:
    """The tensors that launches write, by name; the first `returned` are results, the others live between launches."""

    tensors: Mapping[str, Tensor]
    returned: int
    zeroed: bool = False

    @property
    def results(self) -> list[Tensor]:
        return list(self.tensors.values())[: self.returned]


Tape: TypeAlias = list[tuple[Call, tuple[Tensor | None, ...], list[Tensor]]]


class _Recording(threading.local):
    tape: Tape | None = None


_recording: Final = _Recording()


@contextmanager
def record() -> Iterator[Tape]:
    """Inside, this thread writes down each `Call` that is made: what it took and what it made, which so stay alive."""
    outside, _recording.tape = _recording.tape, []
    try:
        yield _recording.tape
    finally:
        _recording.tape = outside


def is_recording() -> bool:
    """Whether this thread writes its calls down."""
    return _recording.tape is not None


def allocated(geometries: Iterable[Geometry], device: torch.device) -> list[Tensor]:
    """Uninitialised tensors, on the current GPU past the dispatcher, as Inductor's code allocates: in half the time."""
    if device.type == "cuda" and device.index == core.current_gpu():
        return [core.empty_on_gpu(*geometry) for geometry in geometries]
    return [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in geometries]


def geometry(x: Tensor) -> Geometry:
    return tuple(x.shape), x.stride(), x.dtype  # `torch.Size` is no tuple to the allocation above
