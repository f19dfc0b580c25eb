"""The structure of the tests: no test module imports another, and shared code lies in `tests/support`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from support import build_cache

pytestmark = pytest.mark.every_case

TESTS: Final = Path(__file__).parent
FILES: Final = sorted(TESTS.rglob("*.py"))
MODULES: Final = {file.stem for file in FILES if file.stem.startswith("test_")}


def imported(source: str) -> set[str]:
    """Every part of the names of the modules that a source imports, at its top or inside of a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
            names.update(alias.name for alias in node.names)
    return names


def test_imports_are_found_in_every_form() -> None:
    source = (
        "import test_a\nfrom test_b import x\nfrom kernels import test_c\ndef f():\n    import kernels.test_d as y\n"
    )
    assert {"test_a", "test_b", "test_c", "test_d"} <= imported(source)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(TESTS).as_posix())
def test_no_test_module_is_imported(file: Path) -> None:
    """A test module may change without a look at the others; what two of them need moves to `tests/support`."""
    found = imported(file.read_text(encoding="utf-8")) & MODULES
    assert not found, f"{file.name} imports {', '.join(sorted(found))}: move what it needs to tests/support"


def test_calls_name_arguments_that_exist() -> None:
    """Also in tests that this machine skips, for want of a GPU or of the emulator of AMD machine code."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", TESTS]
    # Without what mypy kept of PyTorch this takes 4 minutes, and with it 3 s. With other options than the `mypy` that
    # `.ci/run` calls, each of the two would read all modules anew.
    variables = {"MYPY_CACHE_DIR": str(build_cache.folder() / "mypy"), **os.environ}
    found = subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True)
    lines = found.stdout.decode().splitlines()
    assert any(line.endswith("[arg-type]") for line in lines), found.stderr.decode()  # mypy has read the tests
    unknown = [line for line in lines if "Unexpected keyword argument" in line and ' for "' in line]
    wrong = [line for line in unknown if 'Config"' not in line]  # transformers' configurations take any
    assert not wrong, "\n".join(wrong)
