"""The sweep: turns, spreads, who wins, and the bench that it measures by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fp8fn.ops.cuda.gemm.scaled_mm import KINDS, ScaledMmConfig
from fp8fn.ops.targets import SM90
from fp8fn.ops.tuning.device import DeviceBench, corner_error
from fp8fn.ops.tuning.model import (
    SMALLEST,
    TALL,
    W,
    X,
    banded,
    config_name,
    config_of,
    microseconds,
    ranked,
    runs,
)  # fmt: skip
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.sweep import Call, Turns, decide, heats, measure, shortlist, spread, tune, turns_for
from fp8fn.ops.tuning.table import PEER
from support.tuning import CHIP, PROBLEM, FakeBench, expected, quantized

pytestmark = pytest.mark.usefixtures("cache")


def test_a_winner_beats_the_models_choice_by_more_than_the_spread() -> None:
    models = [100.0, 101.0, 99.0, 100.0, 100.0]
    close, clear = [99.8, 100.2, 99.4, 99.6, 99.6], [97.0, 97.2, 97.1, 96.9, 97.0]
    tie = decide({"192x128d1": models, "128x256d1": close}, "192x128d1")
    assert (tie.config, tie.times) == ("192x128d1", {"192x128d1": 100.0, "128x256d1": 99.6})
    won = decide({"192x128d1": models, "128x256d1": clear, PEER: [98.0] * 5}, "192x128d1")
    assert (won.config, won.us, won.peer_us) == ("128x256d1", 97.0, 98.0)
    assert PEER not in won.times
    # A wide spread of either ties them too.
    assert decide({"192x128d1": [90.0, 100.0, 110.0], "128x256d1": clear}, "192x128d1").config == "192x128d1"
    # If the model's choice did not run, the fastest is chosen.
    assert decide({"128x256d1": close, "64x64d2": clear}, "192x128d1").config == "64x64d2"


def test_a_turn_is_the_median_of_its_runs() -> None:
    """Runs of a short call differ by more than the calls do."""
    runs = {"64x64d2": [10.0, 9.6, 11.9], "64x128d2": [9.7, 9.5, 9.9]}

    class Runs:
        def samples(self, call: Call, repeats: int, lead_us: float) -> list[float]:
            return runs[call()]

    found = measure({name: (lambda name=name: name) for name in runs}, Runs(), Turns(5, 3), stays="64x64d2")
    assert found == {"64x64d2": [10.0] * 5, "64x128d2": [9.7] * 5}
    assert decide(found, "64x64d2").config == "64x128d2"


def test_the_spread_is_the_interquartile_range_or_half_a_percent() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert spread([100.0, 100.0, 100.0]) == 0.5
    assert spread([200.0]) == 1.0


def test_the_spread_of_a_gain_is_that_of_the_differences_in_each_round() -> None:
    """A clock that sinks moves both; one that has left has its first round alone."""
    mine, others = [10.0, 10.4, 10.8, 11.2], [10.5, 10.9, 11.4, 11.7]
    assert spread(mine) == pytest.approx(0.6)
    assert spread(mine, others) == pytest.approx(0.005 * 10.6)
    assert decide({"64x128d2": mine, "128x64d2": others}, "128x64d2").config == "64x128d2"
    assert spread(mine, others[:1]) == pytest.approx(0.005 * 10.6)


def test_cublaslt_is_timed_among_the_finalists_of_many() -> None:
    bench = FakeBench()
    times = {**{f"64x64d2g{group}": 10.0 + group for group in range(20)}, PEER: 50.0}
    calls = {name: bench._call(name, time) for name, time in times.items()}
    found = heats(calls, bench, Turns(5, 4), "64x64d2g0")
    assert found == [*(f"64x64d2g{group}" for group in range(8)), PEER]


def test_calls_take_turns_and_what_is_far_behind_leaves() -> None:
    bench, times = FakeBench(), {"64x64d2": 10.0, "64x128d2": 10.5, "128x64d2": 12.0}
    calls = {name: bench._call(name, time) for name, time in times.items()}
    found = measure(calls, bench, Turns(20, 3), stays="64x64d2")
    assert {name: len(samples) for name, samples in found.items()} == {"64x64d2": 20, "64x128d2": 20, "128x64d2": 1}
    turns = bench.runs[::3]
    assert {*turns[:3]} == times.keys()
    rounds = [tuple(turns[i : i + 2]) for i in range(3, len(turns), 2)]
    assert {*rounds} == {("64x64d2", "64x128d2"), ("64x128d2", "64x64d2")}
    assert {name: len(samples) for name, samples in measure(calls, bench, Turns(4, 3), "128x64d2").items()} == {
        "64x64d2": 4, "64x128d2": 4, "128x64d2": 4,
    }  # fmt: skip


def test_long_calls_have_fewer_turns() -> None:
    counts = [turns_for(time) for time in (10.0, 1000.0, 5e3, 1e5)]
    assert [(turns.rounds, turns.repeats) for turns in counts] == [(5, 30), (5, 6), (9, 1), (3, 1)]


def test_a_call_whose_first_run_was_slow_has_the_others() -> None:
    """As long calls' on a chip that its power limit slows down now and then."""

    class Slowed(FakeBench):
        def samples(self, call: Call, repeats: int, lead_us: float) -> list[float]:
            found = super().samples(call, repeats, lead_us)
            return [1.6 * us if len(self.runs) == 1 else us for us in found]

    bench, times = Slowed(), {"64x64d2": 10000.0, "64x128d2": 9000.0}
    calls = {name: bench._call(name, time) for name, time in times.items()}
    found = measure(calls, bench, turns_for(10000.0), stays="none")
    assert [len(samples) for samples in found.values()] == [9, 9]
    assert decide(found, "none").config == "64x128d2"


def test_the_shortlist_is_the_models_best_and_the_largest_tiles_or_the_smallest() -> None:
    for shape in ((64, 2304, 6144), (4096, 4096, 4096), (64, 24576, 1536), (129, 4096, 4096)):
        problem = Problem(*shape)
        short = shortlist(problem, 132)
        assert short[:4] == list(ranked(problem, 132)[:4])
        assert ({X, W, TALL} if shape[0] > 128 else {SMALLEST}) <= set(short)
        assert len({replace(config, GROUP=8, TURNS=True) for config in short}) <= 7


def test_large_products_are_tuned_in_bands_of_several_heights() -> None:
    def heights(problem: Problem, tile: ScaledMmConfig) -> set[int]:
        return {config.GROUP for config in shortlist(problem, 132) if replace(config, GROUP=8) == tile}

    for tile in (X, replace(X, TURNS=False)):
        assert heights(Problem(16384, 4096, 4096), tile) == {4, 5, 8, 12}
        assert heights(Problem(1024, 4096, 4096), tile) == {8}  # not two waves of tiles


@pytest.mark.parametrize(
    ("a_scale", "b_scale", "offered"),
    [
        ("VECTOR", "BLOCK", True), ("BLOCK", "BLOCK", True), ("BLOCK", "VECTOR", False), ("VECTOR", "VECTOR", False),
        ("LINE", "LINE", False), ("WHOLE", "WHOLE", False),
    ],
)  # fmt: skip
def test_three_warpgroups_are_tuned_without_turns_where_they_would_take_them(
    a_scale: str, b_scale: str, offered: bool
) -> None:
    problem, free = Problem(16384, 4096, 4096, a_scale, b_scale), replace(X, TURNS=False)
    assert (free in shortlist(problem, 132)) == offered
    assert runs(problem, free) == offered
    assert config_of(config_name(replace(free, GROUP=5))) == replace(free, GROUP=5)


def test_no_two_heights_are_the_same_bands() -> None:
    """The kernel walks in as many bands as come nearest to the height: noise alone would choose between two of one."""

    def heights(rows: int) -> set[int]:
        return {config.GROUP for config in (X, *banded(Problem(192 * rows, 65536, 4096), X, 132))}

    assert heights(6) == {4, 8}  # two bands of three rows, and one of six by 5 as by 8
    assert heights(8) == {4, 8}  # two bands of four rows by 4 as by 5
    assert heights(11) == {4, 5, 8}  # three, two and one
    assert heights(13) == {4, 8, 12}  # three, two and one
    assert heights(86) == {4, 5, 8, 12}


def test_tuning_finds_what_is_faster_than_the_model_has_it() -> None:
    entry = tune(PROBLEM, FakeBench())
    assert entry.config == "128x256d1"
    assert entry.us == pytest.approx(0.8 * microseconds(PROBLEM, W, 132), rel=1e-3)
    assert entry.times["192x128d1"] == pytest.approx(microseconds(PROBLEM, X, 132), rel=1e-3)
    assert entry.peer_us == pytest.approx(1.05 * entry.us, rel=2e-3)
    assert not entry.peer_wins


def test_the_chip_is_warmed_before_each_problem() -> None:
    """After the operands are made, before the first run that counts; making `PEER` runs each configuration once."""
    bench = FakeBench()
    tune(PROBLEM, bench)
    ran, made = len(bench.runs), len(shortlist(PROBLEM, 132))
    tune(PROBLEM, bench)
    assert bench.warmed == [made, ran + made]


class Nothing(FakeBench):
    def calls(self, problem: Problem, configs: Sequence[ScaledMmConfig]) -> dict[str, Call]:
        return {PEER: self._call(PEER, 1.0)}


def test_a_problem_that_no_configuration_runs_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"none of 192x128d1, .* runs on NVIDIA Test"):
        tune(PROBLEM, Nothing())


def test_the_operands_of_a_bench_are_as_of_quantized_normal_numbers() -> None:
    bench = DeviceBench(torch.device("cpu"), SM90, CHIP, FakeBench())
    made = bench.filled(Problem(300, 40, 200, a_type=torch.float8_e5m2))
    a, b = made.a.data, made.b.data
    for data in (a, b):
        assert data.float().isfinite().all()
        assert 0.3 < data.float().std() / torch.finfo(data.dtype).max < 0.45
    assert (a.view(torch.uint8)[0, :40] != b.mT.view(torch.uint8)[0, :40]).any()
    large = bench.filled(Problem(4200, 16, 4096)).a.data  # more than the sample
    assert large.float().isfinite().all()
    assert (large.view(torch.uint8)[4196:] == large.view(torch.uint8)[100:104]).all()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shape", [(1, 16, 64), (70, 200, 300), (256, 384, 512)])
def test_the_check_of_a_bench_sees_a_wrong_corner(kinds: tuple[str, str], shape: tuple[int, int, int]) -> None:
    made = quantized(Problem(*shape, *kinds))
    made.out.copy_(expected(made))
    assert corner_error(made.product(SM90)) < 4e-3
    made.out[-1, -1] += made.out.float().abs().max()
    assert corner_error(made.product(SM90)) > 1e-2
    made.out[0, 0] = torch.nan
    assert not corner_error(made.product(SM90)) <= 1e-2
