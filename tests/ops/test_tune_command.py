"""`python -m fp8fn tune`: what it tunes, saves, prints, skips, exports and compares, and wrong use of it."""

from __future__ import annotations

from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8fn
from fp8fn import cli
from fp8fn.cli import tune as command
from fp8fn.cli import tune_loop
from fp8fn.ops.tuning import compare, table
from fp8fn.ops.tuning.model import W, config_name, ranked
from fp8fn.ops.tuning.table import Table
from support.tuning import CHIP, ENTRY, H200, PROBLEM, FakeBench, choose_config, save

pytestmark = pytest.mark.usefixtures("cache")


def run(*argv: str, bench: FakeBench | None = None) -> tuple[int, FakeBench]:
    bench = bench or FakeBench()
    try:
        return command.main(argv, bench), bench
    except SystemExit as leave:
        return int(leave.code or 0), bench


SHAPES = ("--shapes", "4096,4096,4096", "8192,6144,4096")
FAST = replace(fp8fn.ROWWISE, accumulate="fast").key


def test_the_command_tunes_saves_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    status, bench = run(*SHAPES)
    out = capsys.readouterr().out
    assert status == 0
    # dgrad of a square layer is its forward product.
    assert len(bench.asked) == len(set(bench.asked)) == 5
    found = table.users(CHIP)
    assert found.entries.keys() == set(bench.asked)
    assert found.entries[PROBLEM].config == "128x256d1"
    assert found.origin["torch"] == torch.__version__
    assert "5 of 5 products are tuned" in out
    assert str(table.user_path(CHIP)) in out
    row = next(line for line in out.splitlines() if line.startswith("8192,6144,4096 1x128·128x128"))
    assert row.split()[2:4] == ["128x256d1", f"{found.entries[PROBLEM].us:.1f}"]
    assert "192x128d1" in row
    # A plan takes the saved configuration from now on.
    assert choose_config(PROBLEM, 132, table.tables(CHIP)).config == W


@pytest.mark.slow
def test_what_is_tuned_is_skipped_unless_forced() -> None:
    run(*SHAPES, "--products", "forward")
    status, again = run(*SHAPES, "--products", "forward,wgrad")
    assert status == 0
    assert {problem.b_scale for problem in again.asked} == {"VECTOR"}
    _, forced = run(*SHAPES, "--products", "forward", "--force")
    assert len(forced.asked) == 2


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(*SHAPES, bench=FakeBench(fail_at=2))
    assert len(table.users(CHIP).entries) == 2
    _, rest = run(*SHAPES)
    assert len(rest.asked) == 3
    assert len(table.users(CHIP).entries) == 5


def test_a_budget_ends_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(tune_loop, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    status, bench = run(*SHAPES, "--budget", "25")
    assert (status, len(bench.asked)) == (0, 2)
    assert "2 of 5 products are tuned" in capsys.readouterr().out


def test_export_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    run(*SHAPES, "--products", "forward", "--export", str(one))
    assert table.read(one).entries == table.users(CHIP).entries
    entries = dict(table.read(one).entries)
    slower = {n: 1.1 * time for n, time in entries[PROBLEM].times.items()}
    changed = replace(entries[PROBLEM], times={**slower, "192x128d1": slower["128x256d1"] / 1.02}, config="192x128d1")
    table.write(two, Table(CHIP, {**entries, PROBLEM: changed}))
    capsys.readouterr()
    status, _ = run("--compare", str(one), str(two))
    out = capsys.readouterr().out
    assert status == 0
    assert "2 products in both of one.json and two.json (NVIDIA Test)" in out
    assert "the same choice: 1 (50 %)" in out
    agreement = compare.agreement(table.read(one), table.read(two))
    assert (agreement.problems, agreement.same, agreement.within) == (2, 1, 1)
    assert agreement.ratio == pytest.approx((1.1 / 1.02) ** 0.5, rel=1e-3)
    assert agreement.carried == pytest.approx((1 / 1.02) ** 0.5, rel=1e-3)
    wide = table.read(one)
    wide = replace(wide, entries={**wide.entries, PROBLEM: replace(wide.entries[PROBLEM], spread=1e9)})
    assert compare.agreement(wide, table.read(two)).within == 2
    regret = compare.regret(table.read(one), unseen=False)
    shares = {
        problem: entry.us / entry.times[config_name(ranked(problem, 132)[0])] for problem, entry in entries.items()
    }
    assert min(shares.values()) < 1
    assert (regret.problems, regret.worst) == (2, min(shares, key=lambda problem: shares[problem]))
    assert regret.least == pytest.approx(min(shares.values()))
    assert regret.mean == pytest.approx(sqrt(prod(shares.values())))
    assert compare.regret(table.read(one), unseen=True).problems == 0
    with pytest.raises(ValueError, match="is of"):
        compare.agreement(table.read(one), Table(H200, {}))


def test_export_alone_writes_what_is_there(tmp_path: Path) -> None:
    save({PROBLEM: ENTRY})
    status, bench = run("--export", str(tmp_path / "out.json"))
    assert (status, bench.asked) == (0, [])
    assert table.read(tmp_path / "out.json").entries == {PROBLEM: ENTRY}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "give --shapes M,N,K ... or --suite"),
        (("--shapes", "1,2"), "'1,2' is no M,N,K"),
        (("--shapes", "1,2,0"), "'1,2,0' is no M,N,K"),
        (("--suite", "all"), "invalid choice: 'all'"),
        ((*SHAPES, "--products", "forward,back"), "'back' is no product"),
        ((*SHAPES, "--recipe", "mxfp8"), "use blockwise, rowwise or tensorwise"),
        ((*SHAPES, "--recipe", "blokwise"), "did you mean 'blockwise'"),
        ((*SHAPES, "--recipe", FAST), "accumulate='fast', whose tile the model chooses; leave accumulate out, or give"),
        ((*SHAPES, "--budget", "0"), "'0' is no positive number of seconds"),
        (("--compare", "no-such-file", "no-such-file"), "--compare: "),
    ],
)
def test_wrong_use_of_tune_exits_2(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv)[0] == 2
    assert message in capsys.readouterr().err


def test_the_gradients_of_a_fast_recipe_are_tuned() -> None:
    """They are those of the promoting recipe, and nothing in the table is fast."""
    status, bench = run(*SHAPES, "--recipe", FAST, "--products", "dgrad,wgrad")
    assert status == 0
    assert set(bench.asked) == set(
        command.problems_of(((4096,) * 3, (8192, 6144, 4096)), ("dgrad", "wgrad"), fp8fn.ROWWISE)
    )
    assert not any(problem.fast for problem in bench.asked)


def test_without_a_gpu_tune_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        cli.main(["tune", *SHAPES])
    assert "no GPU here" in capsys.readouterr().err


def test_the_suites_are_those_of_the_benchmarks() -> None:
    assert len(command.SUITES["llm84"]) == len(set(command.SUITES["llm84"])) == 69
    problems = command.problems_of(command.SUITES["llm84"], ("forward", "wgrad"), fp8fn.BLOCKWISE)
    assert len(problems) == 138
    assert problems[-1].operations == 2.0 * 32768 * 106496 * 16384
    assert [p.operations for p in problems] == sorted(p.operations for p in problems)
