"""A pytest plugin for `mutate.py`: writes what became of each test, a line of JSON each, to `MUTATION_REPORT`."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Generator
from typing import Any, Final

import pytest

_BROKEN: Final = frozenset({
    "SyntaxError", "IndentationError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError",
    "CompilationError",
})  # fmt: skip
"""Exceptions of code that does not compile or names what is not there: such a mutation is no test of the tests."""


def _write(**line: Any) -> None:
    with open(os.environ["MUTATION_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _does_not_compile(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """Whether an exception, or one that it was raised from, says that the code under test does not compile."""
    current: BaseException | None = error.value
    while current is not None:
        compiler = type(current).__name__ == "CalledProcessError" and "g++" in str(getattr(current, "cmd", ""))
        if compiler or type(current).__name__ in _BROKEN:
            return True
        current = current.__cause__
    return False


def pytest_configure(config: pytest.Config) -> None:
    spec = importlib.util.find_spec("fp8fn")
    if spec is not None:
        _write(package=spec.origin)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(started=nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(outcome="uncollected", test=report.nodeid, text=str(report.longrepr)[-2000:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        assert call.excinfo is not None
        outcome = "broken" if _does_not_compile(call.excinfo) else "failed"
        _write(outcome=outcome, test=item.nodeid, when=call.when, text=str(report.longrepr)[-2000:])
    elif report.skipped or call.when == "call":
        _write(outcome=report.outcome, test=item.nodeid)
    return report
