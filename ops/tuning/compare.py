"""How far two tables of one chip agree, and how far the model is from what each of them measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

from fp8fn.ops.tuning.model import FITTED, config_name, ranked
from fp8fn.ops.tuning.neighbours import corrected, near
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import Entry, Table


@dataclass(frozen=True)
class Agreement:
    """Over the problems in both tables.

    Attributes:
        problems: how many there are.
        same: in how many the choice is the same.
        within: in how many it is, or differs by no more than the spread of either table.
        ratio: geometric mean of the second's times of its choices over the first's.
        carried: geometric mean, over what both timed, of the second's best time over its time of the first's choice:
            what a user of the first table gets on the day of the second.
    """

    problems: int
    same: int
    within: int
    ratio: float
    carried: float


@dataclass(frozen=True)
class Regret:
    """Choices that no row made, by a table's times: geometric mean and least of `best / chosen`, over `problems`."""

    problems: int
    mean: float
    least: float
    worst: Problem | None


def agreement(first: Table, second: Table) -> Agreement:
    """ValueError where the tables are of two chips."""
    if first.chip != second.chip:
        raise ValueError(f"{first.name} is of {first.chip} and {second.name} of {second.chip}")
    pairs = [(entry, second.entries[problem]) for problem, entry in first.entries.items() if problem in second.entries]
    carried = [_best(two) / two.times[one.config] for one, two in pairs if one.config in two.times]
    return Agreement(
        problems=len(pairs),
        same=sum(one.config == two.config for one, two in pairs),
        within=sum(_alike(one, two) for one, two in pairs),
        ratio=geomean(two.us / one.us for one, two in pairs),
        carried=geomean(carried),
    )


def _alike(one: Entry, two: Entry) -> bool:
    """Whether the choices are the same, or one table has both of them within its spread."""
    return one.config == two.config or any(
        other.config in entry.times and abs(entry.times[other.config] - entry.us) <= entry.spread
        for entry, other in ((one, two), (two, one))
    )


def _best(entry: Entry) -> float:
    return min(entry.times.values())


def regret(table: Table, *, unseen: bool) -> Regret:
    """The model's regret over problems with a time for its choice; `unseen` leaves out the shapes it was fitted to."""
    found: list[tuple[float, Problem]] = []
    for problem, entry in table.entries.items():
        if unseen and _shape(problem) in FITTED:
            continue
        models = config_name(ranked(problem, table.chip.multiprocessors)[0])
        if models in entry.times:
            found.append((_best(entry) / entry.times[models], problem))
    return _regret(found)


def left_out(table: Table) -> Regret:
    """The regret of choices by neighbours, where all rows of a problem's shape are left out of the table."""
    found: list[tuple[float, Problem]] = []
    for problem, entry in table.entries.items():
        others = [n for n in table.neighbours if near(problem, n.problem) and _shape(n.problem) != _shape(problem)]
        times = corrected(problem, others, table.chip.multiprocessors)
        choice = next(name for name in times if name in entry.times)
        found.append((_best(entry) / entry.times[choice], problem))
    return _regret(found)


def _regret(found: list[tuple[float, Problem]]) -> Regret:
    least, worst = min(found, key=lambda item: item[0], default=(1.0, None))
    return Regret(len(found), geomean(share for share, _ in found), least, worst)


def _shape(problem: Problem) -> tuple[int, int, int]:
    return problem.m, problem.n, problem.k


def geomean(values: Iterable[float]) -> float:
    """1 of nothing."""
    logarithms = [log(value) for value in values]
    return exp(sum(logarithms) / len(logarithms)) if logarithms else 1.0
