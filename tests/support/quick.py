"""`--quick`: of a function with many cases a part, the same on every machine; and no test that is marked `slow`.

The part has at least `LEAST` cases and, up to `MOST`, every value of every parameter: in the order of a digest of their
names, those cases come first that have a word in their names which none before them has. `slow(but="llama")` leaves one
case of a slow function, which the name in brackets tells. `every_case` leaves all of a function that takes no time.
`--at-most N` leaves the first N of a part: what another release of a package breaks, it mostly breaks in every case.
`--compiled-at-most N` does so for functions that compile (they use the fixture `fresh_dynamo`), for seconds a case.

No function takes longer than `BUDGET_S`, but by its first case. What a case takes is committed: measured by `--quick
--junitxml FILE`, and written to `quick_seconds.json` by `python tests/support/quick.py FILE`.

`--budget S` without `--quick` leaves all slow tests, and of each other function what S seconds are enough for: for each
`--turn TEXT` other cases. Both leave what the command line names as `file::function[case]`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

LEAST: Final = 4
MOST: Final = 10
BUDGET_S: Final = 1.0
SHORTEST_S: Final = 0.03
_FILE: Final = Path(__file__).with_name("quick_seconds.json")
# Seconds that a case takes, for functions of several cases that take no less than `SHORTEST_S`.
SECONDS: Final[dict[str, float]] = json.loads(_FILE.read_text(encoding="utf-8"))


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="no slow tests, and a part of the cases of each function")
    parser.addoption(
        "--at-most", type=int, default=MOST, metavar="N", help="with --quick: no more than N cases of each function"
    )
    parser.addoption(
        "--compiled-at-most", type=int, metavar="N", help="with --quick: --at-most for functions that compile"
    )
    parser.addoption(
        "--budget", type=float, metavar="S", help="S seconds for the cases of each function that is not slow"
    )
    parser.addoption("--turn", default="", metavar="TEXT", help="with --budget: another text, other cases")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what a quick run, or one by a budget, leaves out."""
    quick, budget = config.getoption("--quick"), config.getoption("--budget")
    if quick and budget is not None:
        raise pytest.UsageError("--quick has a budget of its own; give one of --quick and --budget")
    if quick:
        chosen = _quickly
    elif budget is not None:
        chosen = _by_budget
    else:
        return
    functions = defaultdict(list)
    for item in items:
        # Cases for a GPU have a part of their own, which a machine without one skips.
        functions[item.nodeid.partition("[")[0], _is_for_gpus(item)].append(item)
    kept = {id(item) for cases in functions.values() for item in chosen(config, cases)}
    kept |= {id(item) for item in items if item.nodeid in config.args}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _quickly(config: pytest.Config, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    most: int = config.getoption("--at-most")
    if _compiles(cases[0]):
        most = config.getoption("--compiled-at-most") or most
    if not _is_for_gpus(cases[0]):
        most = min(most, affordable(cases[0], BUDGET_S))
    return part(list(filter(_is_quick, cases)), most)


def _by_budget(config: pytest.Config, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    if any(_is_for_gpus(item) or item.get_closest_marker("slow") for item in cases):
        return cases
    return in_turn(cases, affordable(cases[0], config.getoption("--budget")), config.getoption("--turn"))


def affordable(item: pytest.Item, budget: float) -> int:
    """The number of cases of an item's function that `budget` seconds are enough for, or one."""
    seconds = SECONDS.get(item.nodeid.partition("[")[0])
    return sys.maxsize if seconds is None else max(1, int(budget / seconds))


def in_turn(cases: Sequence[pytest.Item], count: int, turn: str) -> Sequence[pytest.Item]:
    """`count` of the cases, others in each turn."""
    return cases if count >= len(cases) else _by_digest(cases, turn)[:count]


def part(cases: Sequence[pytest.Item], most: int = MOST) -> list[pytest.Item]:
    """The cases of one function that a quick run has, at most `most` of them."""
    if all(item.get_closest_marker("every_case") for item in cases):
        return list(cases)
    seen: set[str] = set()
    first, others = [], []
    for item in _by_digest(cases):
        words = set(_case(item).split("-"))
        (others if words <= seen else first).append(item)
        seen |= words
    return (first + others)[: min(most, max(LEAST, min(len(first), MOST)))]


def _by_digest(cases: Sequence[pytest.Item], turn: str = "") -> list[pytest.Item]:
    return sorted(cases, key=lambda item: hashlib.sha256(f"{turn}{item.nodeid}".encode()).digest())


def _is_for_gpus(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def _is_quick(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("slow")
    return mark is None or mark.kwargs.get("but") == _case(item)


def _compiles(item: pytest.Item) -> bool:
    return "fresh_dynamo" in getattr(item, "fixturenames", ())


def _case(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _measured(junit: str) -> dict[str, float]:
    """`SECONDS` by a run's report."""
    found = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        name, bracket, _ = case.attrib["name"].partition("[")
        if bracket and case.find("skipped") is None:
            found[f"{case.attrib['classname'].replace('.', '/')}.py::{name}"].append(float(case.attrib["time"]))
    means = {function: round(sum(times) / len(times), 2) for function, times in sorted(found.items())}
    return {function: mean for function, mean in means.items() if mean >= SHORTEST_S}


if __name__ == "__main__":
    _FILE.write_text(json.dumps(_measured(sys.argv[1]), indent=1) + "\n", encoding="utf-8")
