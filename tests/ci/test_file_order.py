"""The order and time limit of conftest: slow files first, and an end for a test that hangs, with two workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import file_order

pytest.importorskip("xdist")
pytest.importorskip("pytest_timeout")
TESTS = Path(file_order.__file__).parents[1]


def run(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest, with the plugin and the options of this repository, on test files of our own."""
    (folder / "tests").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "tests" / name).write_text(text, encoding="utf-8")
    (folder / "conftest.py").write_text(
        "from support.file_order import FileOrder\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(FileOrder(config))\n",
        encoding="utf-8",
    )
    settings = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    method = re.search(r'^timeout_method = "(\w+)"', settings, re.MULTILINE)
    assert method is not None
    command = [sys.executable, "-m", "pytest", "-v", "-rA", "-o", f"timeout_method={method[1]}", *options, "tests"]
    env = {**os.environ, "PYTHONPATH": str(TESTS), "FP8FN_TEST_CACHE": str(folder / "cache")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


WAIT = "import time\n\ndef test_a():\n    time.sleep({})\n\ndef test_b():\n    pass\n"


def test_files_that_took_longer_come_first(tmp_path: Path) -> None:
    files = {"test_a.py": WAIT.format(0), "test_b.py": WAIT.format(0.3), "test_c.py": WAIT.format(0.1)}
    orders = []
    for options in ((), (), ("--deselect", "tests/test_b.py::test_a"), ()):
        done = run(tmp_path, files, "-p", "no:xdist", *options)
        assert done.returncode == 0, done.stdout
        orders.append(re.findall(r"^tests/test_(\w)\.py::\w+ PASSED", done.stdout, re.MULTILINE))
    assert orders == [list("aabbcc"), list("bbccaa"), list("bccaa"), list("bbccaa")]


@pytest.mark.slow
def test_workers_agree_on_the_order(tmp_path: Path) -> None:
    files = {f"test_{name}.py": WAIT.format(seconds) for name, seconds in zip("abc", (0, 0.2, 0.1), strict=True)}
    for _ in range(2):
        done = run(tmp_path, files, "-n", "2", "--dist", "worksteal")
        assert done.returncode == 0, done.stdout
        assert "6 passed" in done.stdout
    times = json.loads((tmp_path / "cache" / "file_times.json").read_text(encoding="utf-8"))
    assert sorted(times, key=times.__getitem__) == ["tests/test_a.py", "tests/test_c.py", "tests/test_b.py"]


def test_a_test_that_hangs_fails_and_its_worker_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, {"test_a.py": WAIT.format(60)}, "-n", "1", "-o", "timeout=1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout (>1.0s)" in done.stdout
    assert "crashed" not in done.stdout


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tests/test_a.py": "slow"}'])
def test_times_that_are_no_times(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8FN_TEST_CACHE", str(tmp_path))
    (tmp_path / "file_times.json").write_text(content, encoding="utf-8")
    assert file_order.known_times() == {}


def test_without_times_a_committed_list_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8FN_TEST_CACHE", str(tmp_path))
    items = [SimpleNamespace(nodeid=f"{file}::test") for file in ("tests/test_fast.py", *reversed(file_order.SLOW))]
    config: Any = SimpleNamespace()
    order: Any = file_order.FileOrder(config)
    order.pytest_collection_modifyitems(items)
    assert [item.nodeid.partition("::")[0] for item in items] == [*file_order.SLOW, "tests/test_fast.py"]


def test_the_slow_files_exist() -> None:
    assert not [file for file in file_order.SLOW if not (TESTS.parent / file).is_file()]
