"""What fp8fn uses of PyTorch that is not public: an import looks for each name, and its error says what is missing."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
import torch
import torch.distributed.tensor  # before the module that needs it

from fp8fn.ops import torch_private
from fp8fn.ops.torch_private import core, look_for, needed_by

FOLDER: Final = Path(torch_private.__file__).parent
FILES: Final = sorted(file for file in FOLDER.glob("*.py") if file.name != "__init__.py")


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """The names that a file imports where it looks for them, each with its module."""
    for block in ast.walk(ast.parse(file.read_text())):
        if isinstance(block, ast.With):
            for node in block.body:
                if isinstance(node, ast.ImportFrom):
                    yield from ((str(node.module), alias.name) for alias in node.names)


NAMES: Final = [(file, *found) for file in FILES for found in imported(file)]


@pytest.mark.parametrize(("file", "module", "name"), NAMES, ids=[f"{module}.{name}" for _, module, name in NAMES])
def test_a_release_without_a_name_is_told_apart(
    file: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=rf"needs what torch {re.escape(torch.__version__)} does not have: .*{name}"):
        runpy.run_path(str(file))


def test_most_names_are_looked_for() -> None:
    assert len(NAMES) > 30
    assert {file for file, *_ in NAMES} >= {FOLDER / "core.py", FOLDER / "dtensor.py"}


def test_an_attribute_is_looked_for() -> None:
    look_for(SimpleNamespace(_here=1), "_here")
    with (
        pytest.raises(ImportError, match=r"^a step needs what torch .* does not have: .*_gone.* torch 2\.11 to 2\.14"),
        needed_by("a step"),
    ):
        look_for(SimpleNamespace(_here=1), "_here", "_gone")


@pytest.mark.parametrize("first", ["fp8fn", "torch.distributed.tensor"])
def test_a_release_without_a_name_of_dtensors_has_the_rest(first: str) -> None:
    """The import that fails is one of fp8fn, or of DTensors by a program that has never heard of fp8fn's."""
    program = f"""
import sys, warnings
import torch
import {first}
if "fp8fn" in sys.modules:
    assert "torch.distributed.tensor" not in sys.modules
    from importlib.machinery import SourceFileLoader
    run = SourceFileLoader.exec_module
    def without(self, module):
        run(self, module)
        if module.__name__ == "torch.distributed.tensor":
            del sys.modules["torch.distributed.tensor._ops.utils"].generate_redistribute_costs
    SourceFileLoader.exec_module = without
else:
    del sys.modules["torch.distributed.tensor._ops.utils"].generate_redistribute_costs
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import fp8fn, torch.distributed.tensor
    from torch.distributed.tensor import DTensor
text, = [str(each.message) for each in seen if "fp8fn" in str(each.message)]
assert text.startswith("fp8fn's ops take no DTensors: what fp8fn does with DTensors needs what torch"), text
assert fp8fn.linear(torch.ones(8, 256), torch.ones(128, 256)).unique().tolist() == [256]
try:
    import fp8fn.distributed
except ImportError as error:
    assert "generate_redistribute_costs" in str(error), error
else:
    raise AssertionError("fp8fn.distributed was imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of PyTorch has them")
@pytest.mark.parametrize("function", [core.current_gpu, core.stream_handle, core.stream_identity])
def test_a_build_for_cpus_has_no_streams(function: object) -> None:
    with pytest.raises(RuntimeError, match=r"is built for CPUs alone and has no torch\._C\._cuda_get"):
        function(0)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("style", "method"),
    [
        ("ColwiseParallel", "_prepare_input_fn"), ("RowwiseParallel", "_prepare_output_fn"),
        ("PrepareModuleInput", "_prepare_input_arg"),
    ],
)  # fmt: skip
def test_a_method_that_a_style_replaces_is_looked_for(style: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(getattr(torch.distributed.tensor.parallel, style), method)
    with pytest.raises(ImportError, match=f"^what fp8fn does with DTensors needs what torch .*{style}.*{method}"):
        runpy.run_path(str(FOLDER / "dtensor.py"))
