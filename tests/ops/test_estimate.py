"""Estimates of layers: against the committed measurements of the H200, and what they know nothing of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8fn.bench import llm84, record
from fp8fn.bench.llm84 import Pair
from fp8fn.bench.tables import rows_of
from fp8fn.ops.recipe import BLOCKWISE, HYBRID, MXFP8, ROWWISE, TENSORWISE, Recipe
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.estimate import Step, Times, grouped_parts, linear_times, product_us
from fp8fn.ops.tuning.problem import Problem, linear_problems
from fp8fn.ops.tuning.rates import NAMED, rates_of
from fp8fn.ops.tuning.table import PEER, Entry, Table

H200 = NAMED["sm90"]
KEPT = Recipe(keep_weights=True)  # what the suite measured: a weight that is quantized once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tables but the shipped ones."""
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    table.forget()


def run(name: str) -> dict[str, Any]:
    return record.committed(name)


def estimate(shape: tuple[int, ...], recipe: Recipe = BLOCKWISE, chip: Chip = H200, **options: int) -> Times:
    m, n, k = shape
    found = linear_times(m, n, k, recipe, chip, **options)
    assert found is not None
    return found


def geomean(ratios: Iterable[float]) -> float:
    logarithms = [log(ratio) for ratio in ratios]
    return exp(sum(logarithms) / len(logarithms))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Pair]:
    """The layers of the suite as measured on an H200 on 2026-11-23, and the table of that day's sweep in the shipped
    one's place.
    """
    folder = Path(__file__).parent
    monkeypatch.setattr(table, "SHIPPED", {H200: str(folder / "h200_first_sweep.json")})
    table.forget()
    rows = json.loads((folder / "h200_first_layers.json").read_text())["rows"]
    assert len(rows) == 69
    return {(m, n, k): Pair(2.0 * m * n * k, llm84.Times(*us[:2]), llm84.Times(*us[2:]), 28.6) for m, n, k, *us in rows}


def test_the_verdict_is_the_measured_one(told: dict[tuple[int, ...], Pair]) -> None:
    """Whether FP8 wins or loses, forward and backward combined, wherever it is 10 % or more."""
    for shape, pair in told.items():
        if abs(pair.speedup - 1) > 0.1:
            assert (estimate(shape).speedup > 1) == (pair.speedup > 1), shape


def test_layers_are_within_15_percent_of_what_was_measured(told: dict[tuple[int, ...], Pair]) -> None:
    found = {shape: (estimate(shape, KEPT), pair) for shape, pair in told.items()}
    for ratios in (
        [times.fp8.forward / pair.fp8fn.forward for times, pair in found.values()],
        [times.fp8.backward / pair.fp8fn.backward for times, pair in found.values()],
        [times.bf16.combined / pair.bf16.combined for times, pair in found.values()],
        [times.speedup / pair.speedup for times, pair in found.values()],
    ):
        assert abs(log(geomean(ratios))) < log(1.06)
        assert max(abs(log(ratio)) for ratio in ratios) < log(1.15)
    combined = [log(times.fp8.combined / pair.fp8fn.combined) for times, pair in found.values()]
    assert sqrt(sum(ratio**2 for ratio in combined) / len(combined)) < 0.03


def test_the_linear_benchmark_is_within_15_percent() -> None:
    for row in rows_of(run("linear")):
        times = estimate(row.shape)
        for label, us in (("fp8fn linear", times.fp8.combined), ("torch bf16 linear", times.bf16.combined)):
            if row.label == label:
                assert row.us is not None
                assert abs(log(us / row.us)) < log(1.15)


@pytest.mark.parametrize(
    ("label", "recipe"),
    [("fp8fn 1x128·128x128", BLOCKWISE), ("fp8fn rowwise", ROWWISE), ("fp8fn tensorwise", TENSORWISE)],
)
def test_forward_products_are_within_15_percent_in_the_geometric_mean(label: str, recipe: Recipe) -> None:
    ratios = [
        product_us(linear_problems(*row.shape, recipe)["forward"], H200)[0] / row.us
        for row in rows_of(run("forward"))
        if row.label == label and row.us is not None
    ]
    assert len(ratios) == 5
    assert abs(log(geomean(ratios))) < log(1.15)


def test_small_layers_lose_and_large_ones_win() -> None:
    """As the comment of `site.LEAST_WORTHWHILE` has it, and a decoding step, which reads each weight once more."""
    assert estimate((4096, 512, 512)).speedup < 0.8
    assert estimate((16, 4096, 4096)).speedup < 0.8
    assert estimate((8192, 4096, 14336)).speedup > 1.3


def test_who_knows() -> None:
    assert estimate((8192, 28672, 4096)).source == "h200.json"
    assert estimate((8192, 28672, 4112)).source == "shapes near it in h200.json"
    assert estimate((2**20, 2**16, 2**16)).source == "the model"
    assert estimate((8192, 28672, 4096), HYBRID) == estimate((8192, 28672, 4096))  # FP8 types run at one rate
    assert estimate((8192, 6144, 4096), ROWWISE).source == "h200.json and shapes near it in h200.json"


@pytest.mark.parametrize("preset", [ROWWISE, TENSORWISE], ids=lambda recipe: recipe.key)
def test_a_fast_forward_has_the_time_of_its_own_kernel(preset: Recipe) -> None:
    """No table has the product, and the gradients are promoted."""
    promoted, fast = (
        linear_times(8192, 28672, 4096, recipe, H200) for recipe in (preset, replace(preset, accumulate="fast"))
    )
    assert promoted is not None
    assert fast is not None
    assert fast.parts is not None
    assert fast.fp8.backward == promoted.fp8.backward
    assert fast.fp8.forward != promoted.fp8.forward
    assert "the model" in fast.source
    kind = "LINE" if preset == ROWWISE else "WHOLE"
    problem = Problem(8192, 28672, 4096, kind, kind, fast=True)
    assert fast.parts.forward == product_us(problem, H200)[0]


def test_the_faster_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = linear_problems(256, 512, 1024, BLOCKWISE)["forward"]
    entry = Entry("128x128d2", {"128x128d2": 20.0}, 1.0, 15.0)
    for peer, expected in ((15.0, 15.0), (19.5, 20.0), (None, 20.0)):
        known = Table(H200, {problem: Entry(entry.config, entry.times, entry.spread, peer)}, name=PEER)
        monkeypatch.setattr("fp8fn.ops.tuning.estimate.tables", lambda chip, known=known: (known,))
        assert product_us(problem, H200) == (expected, PEER)


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        ((256, 512, 1024), MXFP8),
        ((256, 512, 1024), Recipe(scale="e8m0")),
        ((256, 512, 1024), Recipe(scale="rceil")),
        ((256, 512, 1024), Recipe(weight_dtype=torch.float8_e4m3fnuz)),
        ((0, 512, 1024), BLOCKWISE),
        ((256, 512, 0), BLOCKWISE),
    ],
)
def test_what_nothing_is_known_of(shape: tuple[int, int, int], recipe: Recipe) -> None:
    assert linear_times(*shape, recipe, H200) is None


def test_batches_and_wide_elements_count() -> None:
    one = estimate((4096, 4096, 8192))
    assert estimate((4096, 4096, 8192), batch=8).bf16.forward > 7 * one.bf16.forward
    assert estimate((4096, 4096, 8192), batch=8).fp8.combined > 7 * one.fp8.combined
    wide = estimate((4096, 4096, 8192), itemsize=4)
    assert wide.bf16 == one.bf16
    assert wide.fp8.forward > one.fp8.forward


def test_rates_of_chips() -> None:
    assert rates_of(Chip("NVIDIA H200", 66)).bf16 == rates_of(H200).bf16 / 2
    assert rates_of(Chip("NVIDIA H100 80GB HBM3", 132)).copy < rates_of(H200).copy
    assert rates_of(Chip("another", 132)) == rates_of(H200)


def test_times_add_up() -> None:
    times = Times(Step(10.0, 20.0), Step(15.0, 30.0), "the clock")
    assert (times.fp8.combined, times.bf16.combined, times.speedup) == (30.0, 45.0, 1.5)


def test_groups_are_within_a_fifth_of_what_was_measured() -> None:
    """Forward and backward of groups that are equal, or nearly, with a weight that is quantized once."""
    measured = {(row.shape, row.label): row.us for row in rows_of(run("moe_layer"))}
    shapes = list(dict.fromkeys(shape for shape, _ in measured))
    assert len(shapes) >= 8
    for shape in shapes:
        groups, m, n, k = shape
        parts = grouped_parts(m, n, k, KEPT, H200, groups=groups)
        assert parts is not None
        fp8, bf16 = measured[shape, "fp8fn forward and backward"], measured[shape, "torch bf16 forward and backward"]
        assert fp8 is not None
        assert bf16 is not None
        assert abs(log(parts.times.fp8.combined / fp8)) < log(1.2), shape
        assert abs(log(3 * parts.bf16 / bf16)) < log(1.2), shape
    assert grouped_parts(0, 512, 512, KEPT, H200, groups=8) is None
    assert grouped_parts(512, 512, 512, KEPT, H200, groups=0) is None


def test_a_weight_that_is_not_kept_is_quantized_twice() -> None:
    """4 bytes an element in the forward and both forms in the backward, and one form in the forward alone."""
    kept, again = (estimate((4096, 8192, 4096), recipe) for recipe in (KEPT, BLOCKWISE))
    rate = rates_of(H200).quantize * 1e6
    elements = 8192 * 4096
    assert kept.fp8.backward - again.fp8.backward == pytest.approx(-(3.0 + 4 * elements / rate))
    assert kept.fp8.forward - again.fp8.forward == pytest.approx(elements / rate)


def test_parts_add_up_to_the_times() -> None:
    times = estimate((4096, 8192, 4096))
    parts = times.parts
    assert parts is not None
    assert times.fp8.forward == pytest.approx(parts.forward + parts.x + parts.weight)
    assert times.fp8.backward == pytest.approx(parts.dgrad + parts.wgrad + parts.gradient + parts.weight_again)
    assert times.bf16 == (parts.bf16, 2 * parts.bf16)


def test_a_whole_row_or_column_is_read_twice() -> None:
    """Once for its largest element: of wider elements the quantizers' time grows by twice as much as of blocks."""

    def per_byte(recipe: Recipe) -> float:
        narrow, wide = (estimate((4096, 4096, 8192), recipe, itemsize=size).fp8.combined for size in (2, 4))
        return wide - narrow

    assert per_byte(BLOCKWISE) > 0
    assert per_byte(ROWWISE) == pytest.approx(2 * per_byte(BLOCKWISE))
