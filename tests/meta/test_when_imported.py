"""`when_imported`: a function is called right after the import of a module, whoever else looks for modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fp8fn.meta.when_imported import when_imported

_NAME = "fp8fn_test_of_when_imported"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    file = tmp_path / f"{_NAME}.py"
    file.write_text("value = 1\n")
    yield file
    sys.modules.pop(_NAME, None)


@pytest.fixture
def called() -> list[ModuleType]:
    """The module as it is at each call of the function."""
    calls: list[ModuleType] = []
    when_imported(_NAME, lambda: calls.append(sys.modules[_NAME]))
    return calls


def test_the_function_is_called_once_behind_the_import(called: list[ModuleType]) -> None:
    assert not called
    imported = importlib.import_module(_NAME)
    assert called == [imported]
    assert imported.value == 1
    importlib.reload(imported)
    assert called == [imported]


def test_the_function_is_called_now_where_the_module_is_imported() -> None:
    importlib.import_module(_NAME)
    calls: list[None] = []
    when_imported(_NAME, lambda: calls.append(None))
    assert len(calls) == 1


def test_a_look_for_the_module_is_no_import(called: list[ModuleType]) -> None:
    """As of libraries that ask `find_spec` whether a module is there."""
    assert importlib.util.find_spec(_NAME) is not None
    assert importlib.util.find_spec(_NAME) is not None
    assert not called
    assert called == [importlib.import_module(_NAME)]


def test_an_import_that_fails_calls_nothing_and_the_next_one_does(called: list[ModuleType], module: Path) -> None:
    module.write_text("raise ValueError('broken')\n")
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(_NAME)
    assert not called
    module.write_text("value = 'another'\n")
    assert called == [importlib.import_module(_NAME)]


def test_each_of_two_functions_is_called(called: list[ModuleType]) -> None:
    calls: list[None] = []
    when_imported(_NAME, lambda: calls.append(None))
    importlib.import_module(_NAME)
    assert len(calls) == len(called) == 1


@pytest.mark.usefixtures("called")
def test_the_finders_stay_where_they_are() -> None:
    """A thread that goes through them, for another module, would pass over the one that moved up."""
    before = list(sys.meta_path)
    importlib.import_module(_NAME)
    assert sys.meta_path == before
