"""Launches that are kept: a second call on tensors of the same kind only allocates, writes addresses and launches.

Calls that follow each other are kept as one. A training step of a layer is seven launches. Each goes through the
dispatcher, its checks and the search for what was kept for it, which together take the host longer than the launch. The
first run of a kind is written down; where it was nothing but kept calls on the inputs and on what calls before them
made, it becomes a `Program`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, LaunchSequence, Prepared
from fp8fn.ops.torch_private import core

# A training step has a few launches for each of its shapes; past the limit the one that was used longest ago goes.
LIMIT: Final = 4096
# Bytes up to which the tensors that a run makes for itself share one allocation. Products of larger operands take the
# device longer than the host, and large allocations of many sizes fragment PyTorch's pool.
SHARED_BYTES: Final = 32 << 20
_ALIGNMENT: Final = 256
_NOT_ALL_CALLS: Final = "a run that is more than kept calls"

Kind: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, int, int] | None
Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Results: TypeAlias = Sequence[Tensor | None]

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


@dataclass(frozen=True, eq=False)
class Program:
    """The launches of a run on new inputs: allocates, writes the addresses and starts the kernels.

    Args:
        start: starts the launches on addresses: of the inputs, of `made`, and of the parts of the shared allocation.
        device: the device of all tensors.
        made: tensors that are allocated one by one, the results first; the last one is the shared allocation, if any.
        offsets: where the parts of the shared allocation begin.
        returned: for each result its place in `made`, or None where the run returned None.
    """

    start: Callable[[list[int]], None]
    device: torch.device
    made: tuple[Geometry, ...]
    offsets: tuple[int, ...]
    returned: tuple[int | None, ...]

    def __call__(self, *inputs: Tensor) -> list[Tensor | None]:
        """The results; `inputs` have the kinds of those of the run that was written down."""
        index = self.device.index
        if index is None or index == core.current_gpu():
            return self._run(inputs)
        with torch.cuda.device(self.device):
            return self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        made = allocated(self.made, self.device)
        addresses = [x.data_ptr() for x in (*inputs, *made)]
        if self.offsets:
            base = addresses.pop()  # of the shared allocation, which is the last
            addresses += [base + offset for offset in self.offsets]
        self.start(addresses)
        return [None if place is None else made[place] for place in self.returned]


def chained(key: Hashable, inputs: Sequence[Tensor], run: Callable[[], Results]) -> Results:
    """`run()`, which computes with `inputs` alone and returns what it made; from the second time on as one call.

    `key` determines what it launches, as for `recall`, but in a CUDA graph, where what came before matters too.
    """
    if graph_capture.capturing():
        return run()
    found: Program | str | None = recall(key)
    if found is None:
        results, program = recorded(inputs, run)
        if distinct(inputs):
            keep(key, program or _NOT_ALL_CALLS)
        return results
    return run() if isinstance(found, str) else found(*inputs)


def recorded(inputs: Sequence[Tensor], run: Callable[[], Results]) -> tuple[Results, Program | None]:
    """The results of `run()`, and its launches as a program, None where it is more than kept calls."""
    with record() as tape:
        results = run()
    return results, chain(tape, inputs, results) if distinct(inputs) else None


def distinct(inputs: Sequence[Tensor]) -> bool:
    """Whether an address tells which of the inputs it is: `x` in `x @ xᵀ` may be either."""
    return len({x.data_ptr() for x in inputs}) == len(inputs)


def chain(tape: Tape, inputs: Sequence[Tensor], results: Results) -> Program | None:
    """The calls on the tape as one; None where they used, or the run returned, what is no input and made by none.

    A result may be a view of all of a tensor that a call made: it is then allocated as the view is.
    """
    places = {x.data_ptr(): place for place, x in enumerate(inputs)}
    made: list[Tensor] = []
    steps: list[Step] = []
    for call, taken, new in tape:
        if call.zeroed:
            return None
        at = [None if x is None else places.get(x.data_ptr(), -1) for x in taken]
        if -1 in at:
            return None
        for x in new:
            at.append(places.setdefault(x.data_ptr(), len(inputs) + len(made)))
            made.append(x)
        for launch, pointers in call.steps:
            steps.append(Step(launch, tuple(None if p is None else at[p] for p in pointers)))
    if not steps:
        return None
    order = {x.data_ptr(): place for place, x in enumerate(made)}
    sources = [None if x is None else order.get(x.data_ptr(), -1) for x in results]
    geometries = {}
    for result, source in zip(results, sources, strict=True):
        if result is None or source is None:
            continue
        if source == -1 or source in geometries or _bytes(geometry(result)) != _bytes(geometry(made[source])):
            return None
        geometries[source] = geometry(result)
    return _program(steps, len(inputs), [geometry(x) for x in made], geometries, sources)


def _program(
    steps: Sequence[Step], inputs: int, made: Sequence[Geometry], results: dict[int, Geometry],
    sources: Sequence[int | None],
) -> Program:  # fmt: skip
    """`steps` on `inputs` and `made`, of which `results` are returned with these geometries, in the order of `sources`.

    Tensors that are not returned share one allocation, as many as fit `SHARED_BYTES`.
    """
    alone, parts, size = list(results), [], 0
    for place, made_geometry in enumerate(made):
        if place in results:
            continue
        bytes_ = -(-_bytes(made_geometry) // _ALIGNMENT) * _ALIGNMENT
        if size + bytes_ <= SHARED_BYTES:
            parts.append((place, size))
            size += bytes_
        else:
            alone.append(place)
    new = {place: inputs + i for i, place in enumerate([*alone, *(place for place, _ in parts)])}
    moved = [
        Step(launch, tuple(p if p is None or p < inputs else new[p - inputs] for p in pointers))
        for launch, pointers in steps
    ]
    shared: list[Geometry] = [((size,), (1,), torch.uint8)] if parts else []
    return Program(
        start=_starter(moved, inputs + len(made)),
        device=steps[0].launch.device,
        made=(*(results.get(place, made[place]) for place in alone), *shared),
        offsets=tuple(offset for _, offset in parts),
        returned=tuple(None if place is None else alone.index(place) for place in sources),
    )


def _starter(steps: Sequence[Step], count: int) -> Callable[[list[int]], None]:
    """Starts the steps on a list of `count` addresses."""
    if all(isinstance(launch, Prepared) for launch, _ in steps):
        return LaunchSequence(steps, count).start

    def start_each(addresses: list[int]) -> None:  # launches that a test put in the place of prepared ones
        for launch, places in steps:
            start(launch, [0 if place is None else addresses[place] for place in places])

    return start_each


def _bytes(of: Geometry) -> int:
    """Bytes from the first element of a tensor to its last."""
    shape, strides, dtype = of
    if 0 in shape:
        return 0
    return dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
