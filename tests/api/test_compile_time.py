"""`bench compile`: ways take turns, growth compares medians, and a real compilation is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8fn import cli
from fp8fn.bench import compile_time, docs, record
from fp8fn.bench.compile_time import CHECKED, PLAIN, WAYS, Seconds, Way, compile_seconds, growth, measure, medians

SECONDS = {PLAIN: [(10.0, 8.0), (12.0, 6.0), (50.0, 7.0)], CHECKED: [(15.0, 7.2), (9.0, 7.4), (11.0, 7.3)]}


def test_growth_is_that_of_the_medians() -> None:
    assert medians(SECONDS[PLAIN]) == Seconds(12.0, 7.0)
    found = growth(SECONDS, CHECKED)
    assert found == pytest.approx((11.0 / 12.0 - 1, 7.3 / 7.0 - 1))
    assert growth(SECONDS, PLAIN) == (0, 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Way, int, bool]]:
    """Compilations of 10 s each, with 11 s of processor time with "fp8fn" and 10.5 s inside `substitution()`."""
    calls: list[tuple[Way, int, bool]] = []
    processor = {id(WAYS[PLAIN]): 10.0, id(WAYS[CHECKED]): 10.5}

    def seconds(way: Way, layers: int, *, dynamic: bool) -> Seconds:
        calls.append((way, layers, dynamic))
        return Seconds(10.0, processor.get(id(way), 11.0))

    monkeypatch.setattr(compile_time, "compile_seconds", seconds)
    return calls


def test_ways_take_turns_after_a_small_one_of_each(fake: list[tuple[Way, int, bool]]) -> None:
    found = measure(layers=4, rounds=3)
    assert [layers for _, layers, _ in fake] == [1] * 3 + [4] * 9
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys(WAYS, 3)
    rounds = [[id(way) for way, *_ in fake[at : at + 3]] for at in (3, 6, 9)]
    assert all(len(set(each)) == 3 for each in rounds)


def test_the_command(fake: list[tuple[Way, int, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compile.json"
    assert cli.main(["bench", "compile", "--layers", "2", "--rounds", "1", "--json", str(file)]) == 0
    assert "processor   10.5 s (+5.0%)" in capsys.readouterr().out
    run = record.read(file)
    assert (run["benchmark"], run["results"]["layers"]) == ("compile", 2)
    table = docs.compiled(run).splitlines()
    assert table[3] == "| Inductor inside `substitution()` | 10.0 | +0.0 % | 10.5 | +5.0 % | 10 % |"
    assert table[-1].startswith("Medians of 1. ")
    assert run["results"]["dynamic"] is False
    assert cli.main(["bench", "compile", "--dynamic", "--rounds", "1", "--json", str(file)]) == 0
    assert record.read(file)["results"]["dynamic"] is fake[-1][-1] is True
    assert not fake[0][-1]


def test_over_the_bar_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {**SECONDS, CHECKED: [(1.0, 7.7)]}
    monkeypatch.setattr(compile_time, "measure", lambda *_, **__: slow)
    assert cli.main(["bench", "compile"]) == 1


@pytest.mark.parametrize("name", ["compile", "compile_dynamic"])
def test_the_committed_runs_are_of_32_layers_and_under_the_bar(name: str) -> None:
    results = record.committed(name)["results"]
    assert (results["layers"], results["dynamic"]) == (32, name == "compile_dynamic")
    assert {len(samples) for samples in results["seconds"].values()} <= {3, 5}
    assert growth(results["seconds"], CHECKED).processor < compile_time.BAR


@pytest.mark.parametrize("argv", [("--layers", "0"), ("--rounds", "many")])
def test_wrong_use(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", "compile", *argv])
    assert error.value.code == 2
    assert "is not a positive whole number" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compilation_is_timed(dynamic: bool, fresh_dynamo: None) -> None:
    """A compilation takes longer than a step."""
    found = compile_seconds(WAYS["fp8fn"], 1, dynamic=dynamic)
    assert found.wall > 0.1
    assert found.processor > 0.1
