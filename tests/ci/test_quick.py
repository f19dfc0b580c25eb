"""`--quick`: the cases of a function that run, and the slow tests that don't."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import quick


def cases(*names: str, **marks: pytest.Mark) -> list[Any]:
    return [
        SimpleNamespace(nodeid=f"tests/test_a.py::test_b[{name}]" if name else "tests/test_a.py::test_c",
                        get_closest_marker=marks.get)
        for name in names
    ]  # fmt: skip


def run(
    items: list[Any],
    chosen: bool = True,
    most: int = quick.MOST,
    compiled_most: int | None = None,
    budget: float | None = None,
    turn: str = "",
    args: tuple[str, ...] = (),
) -> tuple[list[str], list[str]]:
    """The names that run, and those that are deselected."""
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    options = {"--quick": chosen, "--at-most": most, "--compiled-at-most": compiled_most}
    options |= {"--budget": budget, "--turn": turn}
    config: Any = SimpleNamespace(getoption=options.__getitem__, hook=hook, args=args)
    quick.select(config, items)
    return [item.nodeid for item in items], [item.nodeid for item in deselected]


def test_every_value_of_every_parameter_is_in_a_part() -> None:
    many = [f"{a}-{b}-{c}" for a, b, c in product("pqrstuv", ("(1, 128)", "(128, 1)"), ("torch.half", "torch.float"))]
    kept, left = run(cases(*many))
    words = {word for nodeid in kept for word in nodeid.partition("[")[2][:-1].split("-")}
    assert words == {word for name in many for word in name.split("-")}
    assert quick.LEAST <= len(kept) <= quick.MOST < len(many)
    assert len(kept) + len(left) == len(many)


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (4, 4), (10, 10), (11, 10), (400, 10)])
def test_the_number_of_cases_without_a_common_value(count: int, kept: int) -> None:
    assert len(run(cases(*map(str, range(count))))[0]) == kept


def test_no_more_cases_than_asked_for() -> None:
    names = [f"{i}-{i % 2}" for i in range(20)]
    part, two = (run(cases(*names), most=most)[0] for most in (quick.MOST, 2))
    assert len(two) == 2
    assert set(two) < set(part)
    assert len(run(cases(*names, every_case=pytest.mark.every_case.mark), most=2)[0]) == 20


@pytest.mark.parametrize(("fixtures", "kept"), [(["seed", "fresh_dynamo"], 1), (["seed"], 2)])
def test_functions_that_compile_may_have_fewer(fixtures: list[str], kept: int) -> None:
    items = cases(*map(str, range(20)))
    for item in items:
        item.fixturenames = fixtures
    assert len(run(items, most=2, compiled_most=1)[0]) == kept


@pytest.mark.parametrize(("seconds", "kept"), [(0.1, 10), (0.3, 3), (1.0, 1), (60.0, 1)])
def test_what_takes_long_has_fewer(seconds: float, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SECONDS", {"tests/test_a.py::test_b": seconds})
    assert len(run(cases(*map(str, range(20))))[0]) == kept
    on_gpu = cases(*map(str, range(20)), gpu=pytest.mark.gpu.mark)  # measured on no GPU
    assert len(run(on_gpu)[0]) == quick.MOST


def test_a_budget_has_all_cases_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SECONDS", {"tests/test_a.py::test_b": 2.0})
    names = list(map(str, range(7)))
    turns = [run(cases(*names), chosen=False, budget=5.0, turn=f"{turn:040x}")[0] for turn in range(0, 400, 8)]
    assert {len(set(each)) for each in turns} == {2}
    assert sorted({one for each in turns for one in each}) == [f"tests/test_a.py::test_b[{name}]" for name in names]
    slow = cases(*names, slow=pytest.mark.slow.mark)
    assert len(run(slow, chosen=False, budget=5.0)[0]) == 7
    monkeypatch.setattr(quick, "SECONDS", {})
    assert len(run(cases(*names), chosen=False, budget=5.0)[0]) == 7


@pytest.mark.parametrize(("chosen", "budget"), [(True, None), (False, 0.0)])
def test_what_is_named_runs(chosen: bool, budget: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SECONDS", {"tests/test_a.py::test_b": 9.0})
    named = tuple(f"tests/test_a.py::test_b[{i}]" for i in range(3))
    assert set(named) <= set(run(cases(*map(str, range(20))), chosen=chosen, budget=budget, args=named)[0])


def test_a_budget_beside_quick() -> None:
    with pytest.raises(pytest.UsageError, match="give one of --quick and --budget"):
        run(cases("a"), budget=5.0)


def test_what_was_measured_exists() -> None:
    texts: dict[str, str] = {}
    for function in quick.SECONDS:
        file, _, name = function.partition("::")
        texts.setdefault(file, (Path(__file__).parents[2] / file).read_text(encoding="utf-8"))
        assert f"def {name}(" in texts[file], f"{function}: measure anew by tests/support/quick.py"


def test_seconds_of_a_report(tmp_path: Path) -> None:
    times = {"test_b[1]": 0.5, "test_b[2]": 1.5, "test_quick[1]": 0.01, "test_alone": 9.0}
    parts = [f'<testcase classname="tests.test_a" name="{name}" time="{time}"/>' for name, time in times.items()]
    skipped = '<testcase classname="tests.test_a" name="test_b[3]" time="0"><skipped/></testcase>'
    (tmp_path / "junit.xml").write_text(f"<suites>{''.join(parts)}{skipped}</suites>")
    assert quick._measured(str(tmp_path / "junit.xml")) == {"tests/test_a.py::test_b": 1.0}


def test_few_values_leave_the_least_number() -> None:
    assert len(run(cases(*(f"a-b{'-' * i}" for i in range(40))))[0]) == quick.LEAST


def test_the_part_depends_on_no_order() -> None:
    names = [f"{i}-{i % 3}" for i in range(60)]
    assert set(run(cases(*names))[0]) == set(run(cases(*reversed(names)))[0])


def test_the_order_stays() -> None:
    names = [str(i) for i in range(10)]
    assert run(cases(*names))[0] == [f"tests/test_a.py::test_b[{name}]" for name in names]


def test_gpu_cases_have_a_part_of_their_own() -> None:
    names = [str(i) for i in range(40)]
    items = cases(*names) + cases(*(f"gpu{name}" for name in names), gpu=pytest.mark.gpu.mark)
    assert len(run(items)[0]) == 2 * quick.MOST


def test_every_case_of_what_takes_no_time_stays() -> None:
    assert len(run(cases(*map(str, range(100)), every_case=pytest.mark.every_case.mark))[0]) == 100


def test_slow_tests_stay_out() -> None:
    assert run(cases("", slow=pytest.mark.slow.mark))[0] == []
    assert run(cases("a", "b", slow=pytest.mark.slow.mark))[0] == []
    assert run(cases("a", "b-c", slow=pytest.mark.slow(but="b-c").mark))[0] == ["tests/test_a.py::test_b[b-c]"]


def test_all_run_without_the_option() -> None:
    items = cases(*map(str, range(100)), slow=pytest.mark.slow.mark)
    assert len(run(items, chosen=False)[0]) == 100
