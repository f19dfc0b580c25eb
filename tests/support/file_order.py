"""Test files that take long run first, so that no worker begins one when the others have finished.

The order is of whole files, since fixtures belong to a file. The times are those that earlier runs measured on this
machine, kept in the folder of `build_cache`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from support import build_cache

# The order before anything is measured: the files that took longest on two cores, the slowest first.
SLOW: Final = (
    "tests/api/test_notebooks.py",
    "tests/kernels/mm_a16w8/test_tiles.py",
    "tests/kernels/mm_a16w8/test_splitk.py",
    "tests/kernels/scaled_mm/test_values.py",
    "tests/lowering/test_models.py",
    "tests/lowering/test_transformers_fp8.py",
    "tests/lowering/test_pattern_producers.py",
    "tests/lowering/test_moe_models.py",
    "tests/kernels/mm_a16w8/test_gemv.py",
    "tests/kernels/quantize/test_columns.py",
    "tests/api/test_wrappers.py",
)


class FileOrder:
    """A plugin of pytest: orders the collected tests, and measures files for the next run."""

    def __init__(self, config: pytest.Config) -> None:
        # Workers take the order from the process that started them: xdist refuses workers that differ.
        sent: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._is_worker = sent is not None
        self._known: dict[str, float] = sent["file_times"] if sent is not None else known_times()
        self._measured: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["file_times"] = self._known

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        times = self._known or {file: float(len(SLOW) - i) for i, file in enumerate(SLOW)}
        items.sort(key=lambda item: -times.get(file_of(item.nodeid), 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self._is_worker:
            remember_times({**self._known, **longest(self._known, self._measured)})


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest(known: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """A run of a part of a file's tests does not make the file a fast one."""
    return {file: max(seconds, known.get(file, 0.0)) for file, seconds in measured.items()}


def known_times() -> dict[str, float]:
    """Seconds by file; none where no run has measured any."""
    with suppress(OSError, ValueError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(seconds, float) for seconds in found.values()):
            return found
    return {}


def remember_times(times: dict[str, float]) -> None:
    path = _path()
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({file: round(times[file], 2) for file in sorted(times)}), encoding="utf-8")
        os.replace(temporary, path)


def _path() -> Path:
    return build_cache.folder() / "file_times.json"
