"""Calls that follow each other, as one: what a forward or a backward launches is found once, and then only started.

A training step of a layer is six launches. Each goes through the dispatcher, its checks and the search for what was
kept for it, which together take the host longer than the launch. The first run of a kind is written down; where it was
nothing but kept calls on the inputs and on what calls before them made, it becomes a `Call` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, TypeAlias

from torch import Tensor

from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Call, Geometry, Step, Tape, keep, recall, record

Fused: TypeAlias = tuple[Call, tuple[int | None, ...]]
"""The launches of a run as one call, and which of the tensors that it makes the run returns."""

_NOT_ALL_CALLS: Final = "a run that is more than kept calls"

Results = Sequence[Tensor | None]


def chained(key: Hashable, inputs: Sequence[Tensor], run: Callable[[], Results]) -> Results:
    """`run()`, which computes with `inputs` alone and returns what it made; from the second time on as one call.

    `key` determines what it launches, as for `recall`, but in a CUDA graph, where what came before matters too.
    """
    if graph_capture.capturing():
        return run()
    found: Fused | str | None = recall(key)
    if found is None:
        with record() as tape:
            results = run()
        if distinct(inputs):
            keep(key, chain(tape, inputs, results) or _NOT_ALL_CALLS)
        return results
    if isinstance(found, str):
        return run()
    call, returned = found
    made = call(*inputs)
    return [None if place is None else made[place] for place in returned]


def distinct(inputs: Sequence[Tensor]) -> bool:
    """Whether an address tells which of the inputs it is: `x` in `x @ xᵀ` may be either."""
    return len({x.data_ptr() for x in inputs}) == len(inputs)


def chain(tape: Tape, inputs: Sequence[Tensor], results: Results) -> Fused | None:
    """The calls on the tape as one; None where they used, or the run returned, what is no input and made by none."""
    places = {x.data_ptr(): place for place, x in enumerate(inputs)}
    made: list[Tensor] = []
    geometries: list[Geometry] = []
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
        geometries += call.made
        for launch, pointers in call.steps:
            steps.append(Step(launch, tuple(None if p is None else at[p] for p in pointers)))
    order = {id(x): place for place, x in enumerate(made)}
    returned = [None if x is None else order.get(id(x), -1) for x in results]
    if not steps or -1 in returned:
        return None
    return Call(tuple(steps), tuple(geometries), len(made)), tuple(returned)
