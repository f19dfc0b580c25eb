"""The search for the fastest kernel and configuration of an op: all candidates take turns, as in `sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning.measured import Form, Key, Row, candidate_name
from fp8fn.ops.tuning.sweep import Call, Clock, decide, measure, turns_for

_WARM_S: Final = 0.2
_GUESS_US: Final = 300.0  # a call, a chain of products, is taken to last this long: decides how often a turn repeats it

Named: TypeAlias = tuple[str, Any]
"""A kernel's name, and a configuration of it."""


class OpBench(Protocol):
    """A device on which an op's problems are timed."""

    @property
    def chip(self) -> Chip: ...

    @property
    def clock(self) -> Clock: ...

    def calls(self, problem: Any, candidates: Mapping[str, Named]) -> tuple[dict[str, Call], int]:
        """Calls to time, by name, and the number of products in each; without candidates that fail or are wrong."""


def tune(form: Form, key: Key, bench: OpBench, default: str) -> Row:
    """Measures the problem of a key; RuntimeError where no candidate runs.

    `default` is the name of what the op chooses without a table: another has to be clearly faster.
    """
    problem = form.problem(key, bench.chip)
    candidates = {
        candidate_name(kernel, config): (kernel, config)
        for kernel, configs in form.candidates(problem).items()
        for config in configs
    }
    calls, products = bench.calls(problem, candidates)
    if not calls:
        raise RuntimeError(f"{form.op} {key}: none of {len(candidates)} candidates runs on {bench.chip.name}")
    bench.clock.warm(_WARM_S)
    handicaps = {name: form.handicap.get(kernel, 1.0) for name, (kernel, _) in candidates.items()}
    entry = decide(measure(calls, bench.clock, turns_for(_GUESS_US), stays=default), default, handicaps)
    kernel, config = candidates[entry.config]
    times = {name: us / products for name, us in entry.times.items()}
    return Row(kernel, config, times, entry.spread / products)
