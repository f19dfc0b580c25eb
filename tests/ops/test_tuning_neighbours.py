"""Configurations for problems that no table has, by what was measured near them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning import compare, table
from fp8fn.ops.tuning.model import candidates, config_name, microseconds, ranked
from fp8fn.ops.tuning.neighbours import Neighbour, corrected, near
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import Entry, Table
from support.tuning import CHIP

CORES = 132
HERE = Problem(8192, 4096, 4096)
BESIDE = replace(HERE, k=4608)


def modelled(problem: Problem) -> dict[str, float]:
    return {config_name(config): microseconds(problem, config, CORES) for config in candidates(problem, CORES)}


def test_no_neighbour_leaves_the_model() -> None:
    times = corrected(HERE, [], CORES)
    assert times == modelled(HERE)
    assert next(iter(times)) == config_name(ranked(HERE, CORES)[0])


def test_a_neighbour_moves_the_choice() -> None:
    times = modelled(BESIDE)
    first, second = list(corrected(HERE, [], CORES))[:2]
    slow = Neighbour(BESIDE, {first: 2 * times[first], second: times[second]}, CORES)
    found = corrected(HERE, [slow], CORES)
    assert next(iter(found)) == second
    assert found[first] / modelled(HERE)[first] == pytest.approx(2, rel=0.05)


def test_what_nobody_timed_is_as_slow_as_the_rest() -> None:
    """Else it would win wherever the chip is slower than the model."""
    times = modelled(BESIDE)
    ahead = corrected(HERE, [], CORES)
    chosen = [name for name, us in ahead.items() if us < 1.1 * min(ahead.values())]
    slow = Neighbour(BESIDE, {name: 2 * times[name] for name in chosen}, CORES)
    found = corrected(HERE, [slow], CORES)
    assert list(found) == list(ahead)
    untimed = next(name for name in found if name not in chosen)
    assert sqrt(2) < found[untimed] / modelled(HERE)[untimed] <= 2


def test_a_tile_that_only_small_products_timed_wins_no_large_one() -> None:
    """All are faster than the model there, and slower where the chip is held by its power."""
    first, second, third = list(corrected(HERE, [], CORES))[:3]
    large, small = replace(HERE, k=8192), replace(HERE, m=2048, n=2048)
    known = [
        Neighbour(problem, {name: factor * modelled(problem)[name] for name in names}, CORES)
        for problem, factor, names in ((large, 1.2, (first, second)), (small, 0.85, (first, second, third)))
    ]
    assert list(corrected(HERE, known, CORES))[:2] == [first, second]


def test_the_nearest_count_most() -> None:
    name = config_name(ranked(HERE, CORES)[0])
    known = [
        Neighbour(replace(HERE, k=k), {name: factor * modelled(replace(HERE, k=k))[name]}, CORES)
        for k, factor in ((4224, 1.5), (16384, 0.5), (32768, 0.5))
    ]
    assert corrected(HERE, known, CORES)[name] > 1.3 * modelled(HERE)[name]


@pytest.mark.parametrize(
    "other",
    [
        replace(HERE, a_scale="LINE", b_scale="LINE"),
        replace(HERE, batch=2),
        replace(HERE, m=8192 * 16),
        replace(HERE, m=8192 * 8, n=4096 * 8),
    ],
    ids=["scales", "batch", "far", "far in two sizes"],
)
def test_what_is_no_neighbour(other: Problem) -> None:
    assert near(HERE, BESIDE)
    assert not near(HERE, other)
    assert (
        table.beside(HERE, (Table(CHIP, {other: Entry("128x128d2", {"128x128d2": 1.0}, 0.1)}, name="t.json"),)) is None
    )


def test_types_are_no_distance() -> None:
    """FP8 types run at one rate."""
    assert near(replace(HERE, a_type=torch.float8_e5m2, out_type=torch.float32), HERE)


def test_both_tables_say_it_and_the_users_row_comes_first() -> None:
    first, second = list(corrected(HERE, [], CORES))[:2]

    def one(name: str, *, problem: Problem, slow: str) -> Table:
        measured = {config: (2 if config == slow else 1) * modelled(problem)[config] for config in (first, second)}
        return Table(CHIP, {problem: Entry(first, measured, 0.1)}, name=name)

    users = one("mine.json", problem=BESIDE, slow=first)
    shipped = one("shipped.json", problem=BESIDE, slow=second)
    farther = one("shipped.json", problem=replace(BESIDE, k=6144), slow=second)
    found = table.beside(HERE, (users, shipped))
    assert found is not None
    assert (next(iter(found.times)), found.source) == (second, "shapes near it in mine.json and shipped.json")
    found = table.beside(HERE, (farther,))
    assert found is not None
    assert (next(iter(found.times)), found.source) == (first, "shapes near it in shipped.json")


@pytest.mark.parametrize("chip", table.SHIPPED, ids=lambda chip: chip.name)
def test_shapes_left_out_of_a_shipped_table(chip: Chip) -> None:
    shipped = table.read(table._FOLDER / table.SHIPPED[chip])
    found, models = compare.left_out(shipped), compare.regret(shipped, unseen=False)
    assert found.problems == len(shipped.entries)
    assert found.mean > 0.99
    assert found.mean > models.mean
    assert found.least > 0.7
