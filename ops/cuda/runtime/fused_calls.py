"""Calls that follow each other, as one: what a forward or a backward launches is found once, and then only started.

A training step of a layer is seven launches. Each goes through the dispatcher, its checks and the search for what was
kept for it, which together take the host longer than the launch. The first run of a kind is written down; where it was
nothing but kept calls on the inputs and on what calls before them made, it becomes a `Program`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime import call_cache, graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Geometry, Step, Tape, geometry, keep, recall, record
from fp8fn.ops.cuda.runtime.launch import LaunchSequence, Prepared
from fp8fn.ops.torch_private import core

# Bytes up to which the tensors that a run makes for itself share one allocation. Products of larger operands take the
# device longer than the host, and large allocations of many sizes fragment PyTorch's pool.
SHARED_BYTES: Final = 32 << 20
_ALIGNMENT: Final = 256

_NOT_ALL_CALLS: Final = "a run that is more than kept calls"

Results = Sequence[Tensor | None]


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
        made = call_cache.allocated(self.made, self.device)
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

    def start(addresses: list[int]) -> None:  # launches that a test put in the place of prepared ones
        for launch, places in steps:
            call_cache.start(launch, [0 if place is None else addresses[place] for place in places])

    return start


def _bytes(of: Geometry) -> int:
    """Bytes from the first element of a tensor to its last."""
    shape, strides, dtype = of
    if 0 in shape:
        return 0
    return dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
