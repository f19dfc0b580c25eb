"""The search for the fastest configuration of a problem: candidates take turns, and the winner has to be clear.

A GPU's clock sinks as it warms, and a cool one prefers other tiles: it is warmed before each problem, and the order of
the turns is shuffled anew in each round. A turn's time is the median of its runs, which for a short call differ by more
than calls do, and a call's that of its turns; two calls are compared round by round. What is far behind after the first
round leaves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final, Protocol, TypeAlias

from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning.model import SMALLEST, TALL, W, X, banded, candidates, config_name, microseconds, ranked
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import PEER, Entry

Call: TypeAlias = Callable[[], Any]

_BEST: Final = 4
_BANDED: Final = 2
_FEW_ROWS: Final = 128
_BEHIND: Final = 1.15
# The least spread, as a part of the median: one kernel's times in two sweeps of a warm H200 mostly differ by more.
_LEAST_SPREAD: Final = 0.005
# More candidates than these leave by halves in rounds of few repeats: a sweep of 144 costs a fifth.
_FINALISTS: Final = 8
_HEAT: Final = 4  # a heat repeats a call this many times less than a full round
_BURST_US: Final = 6000.0
# Calls that are repeated within a round no more.
_LONG_US: Final = 4e3
_ROUNDS_US: Final = 1e5
_MOST_ROUNDS: Final = 9
# Runs whose median says that a call is far behind.
_SURE: Final = 3
_MOST_REPEATS: Final = 30
_FLUSH_US: Final = 80.0
# While the operands of a problem are made the chip cools.
_WARM_S: Final = 0.2


class Clock(Protocol):
    """Times calls on a device."""

    def warm(self, seconds: float) -> None:
        """Keeps the device as busy as products do."""

    def samples(self, call: Call, repeats: int, lead_us: float) -> list[float]:
        """`repeats` times in µs, each behind an emptied L2; `lead_us` is the host's head start."""


class Bench(Protocol):
    """A device on which problems are timed."""

    @property
    def chip(self) -> Chip: ...

    @property
    def clock(self) -> Clock: ...

    def calls(self, problem: Problem, configs: Sequence[ScaledMmConfig]) -> dict[str, Call]:
        """Calls to time, by `config_name`, and `PEER` where it takes the operands; without calls that do not run."""


@dataclass(frozen=True)
class Turns:
    """`rounds` turns for each call, of `repeats` runs that count."""

    rounds: int
    repeats: int


def turns_for(us: float) -> Turns:
    """Fewer for a longer call: a run of 100 ms averages over what a short one has to be repeated for.

    A chip at its power limit slows down for some milliseconds at a time: runs of 10 ms differ by up to 1.6x.
    """
    if us > _LONG_US:
        return Turns(max(_SURE, min(_MOST_ROUNDS, round(_ROUNDS_US / us))), 1)
    return Turns(5, max(1, min(_MOST_REPEATS, round(_BURST_US / (us + _FLUSH_US)))))


def shortlist(problem: Problem, cores: int) -> list[ScaledMmConfig]:
    """The model's best few, and the three tiles that win most large products, or the smallest where rows are few.

    Those three and the model's best two of a large product are there in bands of several heights too.
    """
    there, best = candidates(problem, cores), ranked(problem, cores)
    others = [tile for tile in ((X, W, TALL) if problem.m > _FEW_ROWS else (SMALLEST,)) if tile in there]
    bands = [config for tile in (*best[:_BANDED], *others) for config in banded(problem, tile, cores)]
    return list(dict.fromkeys([*best[:_BEST], *others, *bands]))


def tune(problem: Problem, bench: Bench) -> Entry:
    """Measures a problem; RuntimeError where no configuration runs."""
    cores = bench.chip.multiprocessors
    configs = shortlist(problem, cores)
    calls = bench.calls(problem, configs)
    chosen = config_name(configs[0])
    if not calls.keys() - {PEER}:
        raise RuntimeError(f"{problem}: none of {', '.join(map(config_name, configs))} runs on {bench.chip.name}")
    turns = turns_for(microseconds(problem, configs[0], cores))
    bench.clock.warm(_WARM_S)
    return decide(measure(calls, bench.clock, turns, stays=chosen), chosen)


def measure(calls: Mapping[str, Call], clock: Clock, turns: Turns, stays: str) -> dict[str, list[float]]:
    """The times of each call's turns; what is far behind the best after `_SURE` runs has no more, but for `stays`.

    Only those of many calls that `heats` leaves have times, in more and shorter turns: they differ by less than the
    clock of the chip drifts during a long one. Where `stays` does not run, the first call has its part.
    """
    if stays not in calls:
        stays = next((name for name in calls if name != PEER), stays)
    finalists = heats(calls, clock, turns, stays)
    if len(finalists) < len(calls):
        turns = Turns(_HEAT * turns.rounds, max(1, turns.repeats // _HEAT))
    samples: dict[str, list[float]] = {name: [] for name in finalists}
    order, shuffle = finalists, random.Random(0).shuffle
    for turn in range(turns.rounds):
        shuffle(order)
        for name in order:
            samples[name].append(_turn(calls[name], clock, turns.repeats))
        if turn == -(-_SURE // turns.repeats) - 1:
            least = min(median(times) for times in samples.values())
            order = [name for name in order if name == stays or median(samples[name]) <= _BEHIND * least]
    return samples


def heats(calls: Mapping[str, Call], clock: Clock, turns: Turns, stays: str) -> list[str]:
    """The calls that are worth full rounds, in their order: all of a few, and of many what halving leaves, and `PEER`.

    Each heat times all that are left, a few repeats each, and keeps the faster half by what it has of all heats. The
    clock of the chip drifts during a heat of a hundred calls by more than they differ, so `stays` is timed between
    every few of them, and each time is divided by that of the `stays` before and after.
    """
    left, shuffle = [name for name in calls if name != PEER], random.Random(0).shuffle
    if stays not in calls or len(left) <= _FINALISTS:
        return list(calls)
    repeats = max(1, turns.repeats // _HEAT)
    ratios: dict[str, list[float]] = {name: [] for name in left}
    while len(left) > _FINALISTS:
        order = [name for name in left if name != stays]
        shuffle(order)
        before = _turn(calls[stays], clock, repeats)
        for start in range(0, len(order), _FINALISTS):
            few = order[start : start + _FINALISTS]
            times = {name: _turn(calls[name], clock, repeats) for name in few}
            after = _turn(calls[stays], clock, repeats)
            for name in few:
                ratios[name].append(2 * times[name] / (before + after))
            before = after
        ranked = sorted(order, key=lambda name: median(ratios[name]))
        kept = {stays, *ranked[: max(len(left) // 2, _FINALISTS) - 1]}
        left = [name for name in left if name in kept]
    return [name for name in calls if name in left or name == PEER]


def _turn(call: Call, clock: Clock, repeats: int) -> float:
    """The median of a call's repeats. 20 µs are what the host takes for a launch, the flush and two events."""
    return median(clock.samples(call, repeats, 20.0 * (repeats + 1)))


def decide(samples: Mapping[str, Sequence[float]], models: str, handicaps: Mapping[str, float] | None = None) -> Entry:
    """The entry: the fastest, or the model's choice where the two tie, else the first in order that ties with it.

    Two tie where they differ by no more than the spread of their difference, so that which of them noise makes the
    faster one decides nothing. The difference is that in each round, since both follow the clock of the chip. A
    candidate with a handicap of 1.03 has to be 3 % faster than one without.
    """
    times = {name: median(found) for name, found in samples.items()}
    peer_us = times.pop(PEER, None)
    weighed = {name: [us * (handicaps or {}).get(name, 1.0) for us in samples[name]] for name in times}
    best = min(weighed, key=lambda name: (median(weighed[name]), name))

    def ties(name: str) -> bool:
        rounds = zip(weighed[best], weighed[name], strict=False)  # one may have left early
        return median(other - mine for mine, other in rounds) <= spread(samples[best], samples[name])

    chosen = models if models in times and ties(models) else next(filter(ties, times))
    return Entry(chosen, times, spread(samples[chosen], samples.get(PEER)), peer_us)


def spread(samples: Sequence[float], others: Sequence[float] | None = None) -> float:
    """The difference from which medians differ: the turns' interquartile range, or half a percent if that is larger.

    Between two calls, the range is that of their difference in each round, since both follow the clock of the chip.
    """
    least = _LEAST_SPREAD * median(samples)
    if others is not None:
        samples = [other - mine for mine, other in zip(samples, others, strict=False)]  # one may have left early
    if len(samples) == 1:
        return least
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return max(third - first, least)
