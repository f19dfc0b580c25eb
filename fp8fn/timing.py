"""Times calls that take turns on one device: with events and a flushed L2 on a GPU, with the clock on a CPU.

On a GPU a burst of calls is enqueued behind a spinning kernel that outlasts their launches, so that a sample is device
time only; the host time of a launch is measured separately. The calls take turns in random order for several rounds,
because the GPU's clock drops as it warms: a kernel timed alone after a pause seems up to 15 % faster than it sustains.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import torch

from fp8fn.ops.torch_private.core import spin_gpu

Call: TypeAlias = Callable[[], Any]
Flush: TypeAlias = Literal["writes", "reads"]
Key = TypeVar("Key")

# `torch.cuda._sleep` counts cycles. No supported GPU runs much faster than 2 GHz; a slower clock only waits longer.
_CYCLES_PER_US: Final = 2000
_LONGEST_LEAD_US: Final = 1e5
_MOST_REPEATS: Final = 50


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a measurement: `rounds` turns of about `burst_ms` for each call, on a chip warmed for `warm_s`.

    A `flush` before each call evicts its data from the L2. Flushing by writes leaves dirty lines, which are written
    back while the call runs, as after a launch that wrote much. Flushing by reads leaves clean lines.
    """

    rounds: int = 5
    burst_ms: float = 25.0
    warm_s: float = 1.0
    flush: Flush = "writes"


DEFAULT: Final = Schedule()


@dataclass(frozen=True)
class Timing:
    """The `samples` of a call on its device and the host time of a launch (None on a CPU), in microseconds."""

    samples: tuple[float, ...]
    host_us: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third


class Clock(Protocol):
    """Times calls on one device; all times in microseconds."""

    device: torch.device
    flush_us: float

    def warm(self, seconds: float) -> None:
        """Keeps the device busy with matrix products."""

    def synchronize(self) -> None:
        """Waits for the enqueued work, and raises its errors."""

    def host_us(self, call: Call) -> float | None:
        """The host time of a launch; None if the host does the work itself."""

    def samples(self, call: Call, repeats: int, lead_us: float, flush: Flush = "writes") -> list[float]:
        """Times of `repeats` calls, after one that is not counted; `lead_us` is the host's head start."""


def clock_of(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else CpuClock(device)


def flush_bytes(l2_bytes: int) -> int:
    """At least twice the L2, and at least 256 MiB, so that times are comparable with `triton.testing.do_bench`."""
    return max(2 * l2_bytes, 256 * 2**20)


class GpuClock:
    """Times calls with events, each after a write or a read of `flush_bytes` that flushes the L2."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = flush_bytes(torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.empty(size // 4, dtype=torch.int32, device=device)
        self.flush_us = 0.0
        self.flush_us = statistics.median(self.samples(self._buffer.zero_, 10, 1000.0))

    def warm(self, seconds: float) -> None:
        a, b = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(8):
                torch.mm(a, b)
            self.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def host_us(self, call: Call) -> float:
        times = []
        for _ in range(3):
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        self.synchronize()
        return min(times) * 1e6

    def samples(self, call: Call, repeats: int, lead_us: float, flush: Flush = "writes") -> list[float]:
        empty = self._buffer.zero_ if flush == "writes" else self._buffer.sum
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 1)]
        spin_gpu(int(lead_us * _CYCLES_PER_US))
        for start, end in events:
            empty()
            start.record()
            call()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events[1:]]


class CpuClock:
    """Times calls with the processor's clock, without a flush or a separate launch time."""

    flush_us = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm(self, seconds: float) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def host_us(self, call: Call) -> None:
        return None

    def samples(self, call: Call, repeats: int, lead_us: float, flush: Flush = "writes") -> list[float]:
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return times[1:]


def lead_us(host_us: float, device_us: float, repeats: int) -> float:
    """The head start with which the device never waits for the host in `repeats` calls of `host_us` each."""
    behind = max(0.0, host_us - device_us)  # the host falls behind the device by this much in each repeat
    return min(_LONGEST_LEAD_US, host_us + repeats * behind)


def interleaved(calls: Mapping[Key, Call], clock: Clock, schedule: Schedule) -> dict[Key, Timing | str]:
    """The times of every call, or why it failed; the calls take turns in a new random order in each round."""
    plans: dict[Key, tuple[int, float]] = {}
    hosts: dict[Key, float | None] = {}
    failures: dict[Key, str] = {}
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    for key, call in calls.items():
        try:
            call()
            hosts[key] = clock.host_us(call)
            # The flush, two events, and up to 1.6 times the launch: autograd's thread competes in a burst.
            host = 2.0 * (hosts[key] or 0.0) + 20.0
            once = statistics.median(clock.samples(call, 3, lead_us(host, 0.0, 4), schedule.flush))
            once += clock.flush_us
            repeats = min(_MOST_REPEATS, max(1, round(schedule.burst_ms * 1e3 / once)))
            plans[key] = repeats, lead_us(host, once, repeats + 1)
        except Exception as error:
            failures[key] = reason(error)
    clock.warm(schedule.warm_s)
    order = list(plans)
    shuffle = random.Random(0).shuffle
    for _ in range(schedule.rounds):
        shuffle(order)
        for key in order:
            if key in failures:
                continue
            try:
                samples[key] += clock.samples(calls[key], *plans[key], schedule.flush)
            except Exception as error:
                failures[key] = reason(error)
    return {key: failures[key] if key in failures else Timing(tuple(samples[key]), hosts[key]) for key in calls}


def replayed(call: Call) -> Call:
    """The same work as a replay of a CUDA graph, without gaps between launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Capture inside `stream(side)`: a failed capture leaves its own stream as the current one.
    with torch.cuda.stream(side):
        call()
        with torch.cuda.graph(graph, stream=side):
            call()
    torch.cuda.current_stream().wait_stream(side)
    return graph.replay


def reason(error: Exception) -> str:
    """The error as one short line. The error object would keep the tensors of its frames alive."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
