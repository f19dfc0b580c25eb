"""The model corrected by what was measured nearby: how long a product takes for which no table has a row.

The model is off by nearly the same factor for problems of nearly the same sizes. Its time of a configuration is
multiplied by that factor, and by another one: how much slower the configuration is than the others of its rows. Both
are means over the nearest problems of a table, the second over those that timed the configuration, weighted by their
distance: the root of the squared logarithms of the sizes' ratios. Where they are few or far, both are closer to 1. The
second is relative, since rows that timed a configuration may all be small, where the chip is faster: a tile that nobody
timed for large products would win these.

Where all rows of a problem's shape are left out of the table, the choices have 99.4 % of the best speed in the
geometric mean on an H100 and on an H200, the model's 97.8 % and 99.0 % (`compare.left_out`, `compare.regret`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import dist, exp, fsum, log
from typing import Final

from fp8fn.ops.tuning.model import banded, candidates, config_name, config_of, microseconds
from fp8fn.ops.tuning.problem import Problem

_NEAREST: Final = 4
# A neighbour's weight is 1 / (distance² + _SAME), and that of no correction _OTHERWISE.
_SAME: Final = 0.05
_OTHERWISE: Final = 0.3
_REACH: Final = log(16)


@dataclass(frozen=True)
class Neighbour:
    """A problem that was measured on a chip of `cores`, and its `times` in µs by configuration."""

    problem: Problem
    times: Mapping[str, float]
    cores: int

    @cached_property
    def corrections(self) -> Mapping[str, float]:
        """The logarithm of the measured time over the model's by configuration; most problems are never near one."""
        model = {name: microseconds(self.problem, config_of(name), self.cores) for name in self.times}
        return {name: log(us / model[name]) for name, us in self.times.items()}


def corrected(problem: Problem, known: Iterable[Neighbour], cores: int) -> dict[str, float]:
    """The µs of each candidate, the fastest first, by the neighbours that are `near` it."""
    ordered = sorted(
        ((_distance(problem, other.problem), other.corrections) for other in known), key=lambda item: item[0]
    )
    others = [fsum(by.values()) / len(by) for _, by in ordered]
    of_all = _nearest([(away, mean) for (away, _), mean in zip(ordered, others, strict=True)])
    times = {}
    for tile in candidates(problem, cores):
        base = config_name(tile)
        correction = of_all + _nearest(
            [(away, by[base] - mean) for (away, by), mean in zip(ordered, others, strict=True) if base in by]
        )
        times[base] = microseconds(problem, tile, cores) * exp(correction)
        for config in banded(problem, tile, cores):
            name = config_name(config)
            gains = [(away, by[name] - by[base]) for away, by in ordered if name in by and base in by]
            if gains:  # what other bands are worth beside the tile's own
                times[name] = microseconds(problem, config, cores) * exp(correction + _nearest(gains))
    return dict(sorted(times.items(), key=lambda item: (item[1], item[0])))


def _nearest(corrections: Sequence[tuple[float, float]]) -> float:
    """The mean of the nearest few of `(distance, correction)`, in order, weighted by distance, and of no correction."""
    weighed = [(1 / (away**2 + _SAME), by) for away, by in corrections[:_NEAREST]]
    return sum(w * by for w, by in weighed) / (sum(w for w, _ in weighed) + _OTHERWISE)


def near(one: Problem, other: Problem) -> bool:
    """Whether one's time says something of the other's: scales of one kind, as many products, sizes not far off."""
    alike = (one.kinds, one.batch, one.fast) == (other.kinds, other.batch, other.fast)
    return alike and _distance(one, other) < _REACH


def _distance(one: Problem, other: Problem) -> float:
    return dist(one.place, other.place)
