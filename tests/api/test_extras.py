"""Messages about a missing extra have a command that can be typed as it stands."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from fp8fn.extras import installed_by

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parents[2]


def test_an_installed_package_has_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: object())
    assert installed_by("demo") == "pip install 'fp8fn[demo]'"


def test_a_checkout_on_the_path_is_installed_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    found = re.fullmatch(r"pip install -e '(.+)\[demo\]'", installed_by("demo"))
    assert found is not None
    assert (Path(found[1]) / "fp8fn" / "extras.py").is_file()


def test_extras_that_are_named_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^([\w-]+) = \[", text.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    sources = "".join(path.read_text(encoding="utf-8") for folder in ("ops", "meta", "fp8fn", "lowering")
                      for path in (ROOT / folder).rglob("*.py"))  # fmt: skip
    named = {one or other for one, other in re.findall(r"installed_by\('([\w-]+)'\)|fp8fn\[([\w-]+)\]", sources)}
    assert {"demo", "examples", "notebooks", "hip-compile", "cubins"} == named
    assert named < extras
