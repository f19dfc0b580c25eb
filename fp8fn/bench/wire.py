"""Collectives in a profile: how long they ran, and how much of that other kernels covered."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

_COLLECTIVES: Final = ("AllGather", "ReduceScatter", "AllReduce", "SendRecv")


class Kernel(NamedTuple):
    """A kernel on a GPU, from `begin` to `end` in µs."""

    name: str
    begin: float
    end: float


def profiled(step: Callable[[], object]) -> list[Kernel]:
    """The kernels of a step of all ranks. The step before it bears what a profiler does at first.

    Python collects no garbage meanwhile: that takes one rank half a second, for which all others wait. fp8fn does not
    see this profiler, under which it would launch by the dispatcher, to have its ops named, and take the host twice as
    long. The first collective is left out: the barrier before the step.
    """
    recorded: list[Kernel] = []

    def keep(profiler: Any) -> None:
        recorded.extend(sorted(kernels_of(profiler), key=lambda kernel: kernel.begin))
        barrier = next((place for place, kernel in enumerate(recorded) if _is_sent(kernel)), None)
        if barrier is not None:
            del recorded[barrier]

    turns = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    gc.collect()
    gc.disable()
    try:
        with (
            mock.patch.object(torch._C._autograd, "_profiler_enabled", return_value=False),
            torch.profiler.profile(activities=activities, schedule=turns, on_trace_ready=keep) as profiler,
        ):
            for _ in range(2):
                dist.barrier()
                torch.cuda.synchronize()
                step()
                profiler.step()
    finally:
        gc.enable()
    return recorded


def kernels_of(profiler: Any) -> list[Kernel]:
    """The kernels, copies and fills that a `torch.profiler.profile` recorded."""
    cuda = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in cuda]


def summary(kernels: Sequence[Kernel], longest: int = 12) -> dict[str, Any]:
    """Times of collectives by kind, and of the kernels that took longest beside them, in ms.

    `covered` is the share of a collective's time during which another kernel than a collective ran.
    """
    sent = [kernel for kernel in kernels if _is_sent(kernel)]
    others = [kernel for kernel in kernels if not _is_sent(kernel)]
    busy = merged(others)
    found: dict[str, Any] = {"busy_ms": _length(busy) / 1e3, "collectives": {}, "kernels": {}}
    for kind in _COLLECTIVES:
        spans = merged(kernel for kernel in sent if kind in kernel.name)
        if spans:
            found["collectives"][kind] = {
                "count": sum(kind in kernel.name for kernel in sent),
                "ms": _length(spans) / 1e3,
                "covered": _length(_common(spans, busy)) / _length(spans),
            }
    times: dict[str, list[float]] = {}
    for kernel in others:
        times.setdefault(kernel.name[:60], []).append(kernel.end - kernel.begin)
    for name in sorted(times, key=lambda name: -sum(times[name]))[:longest]:
        found["kernels"][name] = {"count": len(times[name]), "ms": sum(times[name]) / 1e3}
    return found


def merged(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """The spans of time in which at least one of the kernels ran, in order."""
    spans: list[tuple[float, float]] = []
    for _, begin, end in sorted(kernels, key=lambda kernel: kernel.begin):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans


def _is_sent(kernel: Kernel) -> bool:
    return "nccl" in kernel.name.lower()


def _common(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans that two lists of `merged` share."""
    both, place = [], 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        for first, last in other[place:]:
            if first >= end:
                break
            both.append((max(begin, first), min(end, last)))
    return both


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
