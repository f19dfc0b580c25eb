"""A benchmark of one shape: each case is built, checked and timed in turn, and becomes a row of figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from fp8fn.bench.accuracy import worst
from fp8fn.timing import Call, Clock, Schedule, Timing, interleaved, reason, replayed

# The bar for results of E4M3 operands, which is also Primus-Turbo's.
SNR_BAR_DB: Final = 25.0


@dataclass(frozen=True)
class Case:
    """One way to do the work of a benchmark.

    Attributes:
        peer: the implementation: "fp8fn", or a name of `peers.PEERS`.
        name: what is computed; peer and name together are the label.
        build: makes the call that is timed. Its own time does not count. Raises where the case can't run.
        accuracy: SNR in dB of each output, from the call's result; None where there is nothing to compare with.
        operations, bytes: ideal counts of a call. The rate is operations per second, or bytes without operations.
        ceiling: whether the other cases' rates are given as percentages of this one's.
        snr_bar_db: the least SNR of an output; lower where several products follow each other.
    """

    peer: str
    name: str
    build: Callable[[], Call]
    accuracy: Callable[[Any], dict[str, float]] | None = None
    operations: float = 0.0
    bytes: float = 0.0
    ceiling: bool = False
    snr_bar_db: float = SNR_BAR_DB


@dataclass(frozen=True)
class Row:
    """The figures of a case, as they stand in JSON.

    Times are in µs: median and quartiles of `samples` runs on the device, the host's time for a launch, and the time of
    a CUDA graph. `rate` is in `unit`; `percent` is relative to the ceiling at the same shape. Without a time,
    `unavailable` says why.
    """

    shape: tuple[int, ...]
    peer: str
    case: str
    unit: str
    operations: float
    bytes: float
    samples: int = 0
    us: float | None = None
    us_q1: float | None = None
    us_q3: float | None = None
    host_us: float | None = None
    graph_us: float | None = None
    rate: float | None = None
    percent: float | None = None
    snr_db: dict[str, float] = field(default_factory=dict)
    unavailable: str | None = None
    graph_unavailable: str | None = None
    snr_bar_db: float = SNR_BAR_DB

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> Row:
        return cls(**{**row, "shape": tuple(row["shape"])})

    @property
    def label(self) -> str:
        return f"{self.peer} {self.case}"

    @property
    def wrong(self) -> bool:
        """Whether an output's SNR is under the bar or NaN."""
        least = worst(self.snr_db.values())
        return least is not None and not least >= self.snr_bar_db


def measure(
    shape: tuple[int, ...], cases: Sequence[Case], clock: Clock, schedule: Schedule, graphs: bool = False
) -> list[Row]:
    """A row for each case, in their order. With `graphs`, replays of a CUDA graph are timed too, on a GPU.

    An exception in a case becomes the row's `unavailable`, and the other cases continue.
    """
    calls: dict[tuple[int, str], Call] = {}
    snr: dict[int, dict[str, float]] = {}
    failures: dict[tuple[int, str], str] = {}
    for i, case in enumerate(cases):
        try:
            call = case.build()
            value = call()
            clock.synchronize()
            snr[i] = case.accuracy(value) if case.accuracy else {}
            calls[i, "call"] = call
        except Exception as error:
            failures[i, "call"] = reason(error)
            continue
        finally:
            value = None  # may hold several GB
        if graphs and clock.device.type == "cuda":
            try:
                calls[i, "graph"] = replayed(call)
            except Exception as error:
                failures[i, "graph"] = reason(error)
    outcomes: dict[tuple[int, str], Timing | str] = {**interleaved(calls, clock, schedule), **failures}
    rows = [
        _row(shape, case, outcomes[i, "call"], snr.get(i, {}), outcomes.get((i, "graph")))
        for i, case in enumerate(cases)
    ]
    ceiling = next((row.rate for row, case in zip(rows, cases, strict=True) if case.ceiling and row.rate), None)
    if ceiling is not None:
        rows = [replace(row, percent=100 * row.rate / ceiling) if row.rate else row for row in rows]
    return rows


def copy_rate(clock: Clock, mebibytes: int = 512) -> float:
    """TB/s of a plain copy, counting bytes read and bytes written."""
    source = torch.zeros(mebibytes * 2**20 // 4, dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    microseconds = statistics.median(clock.samples(lambda: target.copy_(source), 20, 1000.0))
    return 2 * source.nbytes / microseconds / 1e6


def _row(
    shape: tuple[int, ...], case: Case, timing: Timing | str, snr: dict[str, float], graph: Timing | str | None
) -> Row:
    unit = "TFLOP/s" if case.operations else "TB/s"
    row = Row(shape, case.peer, case.name, unit, case.operations, case.bytes, snr_bar_db=case.snr_bar_db)
    if isinstance(timing, str):
        return replace(row, unavailable=timing)
    us = timing.median
    first, third = timing.quartiles
    return replace(
        row,
        samples=len(timing.samples),
        us=us,
        us_q1=first,
        us_q3=third,
        host_us=timing.host_us,
        graph_us=graph.median if isinstance(graph, Timing) else None,
        rate=(case.operations or case.bytes) / us / 1e6,
        snr_db=snr,
        graph_unavailable=graph if isinstance(graph, str) else None,
    )
