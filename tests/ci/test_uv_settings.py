"""`.ci/uv_settings.py`: pip's settings as lines of shell for uv."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "uv_settings.py"
if not SCRIPT.exists():
    pytest.skip("only a checkout has .ci", allow_module_level=True)


@pytest.fixture
def lines_for_uv(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    found = runpy.run_path(str(SCRIPT))
    for name, _ in found["NAMES"].values():
        monkeypatch.delenv(name, raising=False)
    return found["lines_for_uv"]


def test_every_setting_of_packages_is_named(lines_for_uv: Callable[[str], list[str]]) -> None:
    listed = """global.index-url='https://index/simple'
global.extra-index-url='file:///a file:///b'
global.find-links='/wheels\\n/more'
global.constraint='/one.txt /two.txt'
global.timeout='60'
"""
    assert lines_for_uv(listed) == [
        "export UV_DEFAULT_INDEX=https://index/simple",
        "export UV_INDEX='file:///a file:///b'",
        "export UV_FIND_LINKS=/wheels,/more",
        "uv_constraints=(-c /one.txt -c /two.txt)",
    ]


def test_a_nearer_setting_wins(lines_for_uv: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = """:env:.find-links='/variable'
global.find-links='/global'
install.find-links='/install'
download.no-binary=':all:'
install.index-url='https://install'
global.index-url='https://global'
"""
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://set/before")
    assert lines_for_uv(listed) == ["export UV_FIND_LINKS=/variable", "uv_constraints=()"]
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    assert "export UV_DEFAULT_INDEX=https://install" in lines_for_uv(listed)


def test_pip_installs_where_uv_lacks_a_setting(lines_for_uv: Callable[[str], list[str]]) -> None:
    with pytest.raises(ValueError, match="no-binary"):
        lines_for_uv("install.no-binary=':all:'\n")


def test_without_settings_uv_is_told_nothing(lines_for_uv: Callable[[str], list[str]]) -> None:
    assert lines_for_uv("") == ["uv_constraints=()"]
