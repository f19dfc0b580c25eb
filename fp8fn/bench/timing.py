"""Times of calls that take turns on one device: by events and with the L2 flushed on a GPU, by the clock on a CPU.

On a GPU a whole burst is enqueued behind a spinning kernel that outlasts the launches, so that a sample is what the
device took; what the host takes for a launch is measured apart. The calls take turns in random order for some rounds,
for the clock of a GPU sinks as it warms: a kernel timed alone after a pause reads up to 15 % more than it sustains.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import torch

Call: TypeAlias = Callable[[], Any]
Flush: TypeAlias = Literal["writes", "reads"]
Key = TypeVar("Key")

# `torch.cuda._sleep` counts cycles; at 2 GHz, which no GPU here passes by much, a slower clock only waits longer.
_CYCLES_PER_US: Final = 2000
_LONGEST_LEAD_US: Final = 1e5
_MOST_REPEATS: Final = 50


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long is measured: `rounds` turns of each call, each turn about `burst_ms`, on a chip warmed for `warm_s`.

    Before each call a `flush` leaves nothing of it in the L2. One that writes fills it with lines that go to memory
    while the call runs, as behind a launch that wrote much; after one that reads they are dropped.
    """

    rounds: int = 5
    burst_ms: float = 25.0
    warm_s: float = 1.0
    flush: Flush = "writes"


DEFAULT: Final = Schedule()


@dataclass(frozen=True)
class Timing:
    """Microseconds: the `samples` of a call on its device, and the host's time for a launch (None on a CPU)."""

    samples: tuple[float, ...]
    host_us: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third


class Clock(Protocol):
    """Times calls on one device; all times in microseconds."""

    device: torch.device
    flush_us: float

    def warm(self, seconds: float) -> None:
        """Keeps the device busy with products."""

    def synchronize(self) -> None:
        """Waits for what was enqueued, and raises its errors."""

    def host_us(self, call: Call) -> float | None:
        """What the host takes for a launch, None where it does the work itself."""

    def samples(self, call: Call, repeats: int, lead_us: float, flush: Flush = "writes") -> list[float]:
        """`repeats` times of `call`, after one more that does not count; `lead_us` is the host's head start."""


def clock_of(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else CpuClock(device)


def flush_bytes(l2_bytes: int) -> int:
    """At least twice the L2; 256 MiB as `triton.testing.do_bench` has it, for figures that compare."""
    return max(2 * l2_bytes, 256 * 2**20)


class GpuClock:
    """Times by events, each call behind a write, or a read, of `flush_bytes` that empties the L2."""

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
        torch.cuda._sleep(int(lead_us * _CYCLES_PER_US))
        for start, end in events:
            empty()
            start.record()
            call()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events[1:]]


class CpuClock:
    """Times by the processor's clock; nothing is flushed, and there is no launch to tell apart."""

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
    """How far ahead the host must start for `repeats` calls never to wait for it, when a launch takes it `host_us`."""
    behind = max(0.0, host_us - device_us)  # what the host loses on the device in each repeat
    return min(_LONGEST_LEAD_US, host_us + repeats * behind)


def interleaved(calls: Mapping[Key, Call], clock: Clock, schedule: Schedule) -> dict[Key, Timing | str]:
    """The times of every call, or why it failed; the calls take turns in an order shuffled anew each round."""
    plans: dict[Key, tuple[int, float]] = {}
    hosts: dict[Key, float | None] = {}
    failures: dict[Key, str] = {}
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    for key, call in calls.items():
        try:
            call()
            hosts[key] = clock.host_us(call)
            # The flush and two events; and in a burst, with autograd's thread beside, up to 1.6 times a launch alone.
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
    """The same work as one replay of a CUDA graph, without gaps between launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Captured inside `stream(side)`, for a capture that fails leaves its own stream the current one.
    with torch.cuda.stream(side):
        call()
        with torch.cuda.graph(graph, stream=side):
            call()
    torch.cuda.current_stream().wait_stream(side)
    return graph.replay


def reason(error: Exception) -> str:
    """The error in one short line. As text, for the error itself would keep its frames' tensors alive."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
