"""Every public callable's docstring: its sections, its arguments, and its example, which runs on the CPU."""

from __future__ import annotations

import doctest
import inspect
import re
import warnings
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8fn
import fp8fn.distributed
import fp8fn.lowering
from fp8fn import GroupedScaledTensor, ScaledTensor

pytestmark = pytest.mark.every_case

PUBLIC = {
    name: getattr(module, name)
    for module in (fp8fn, fp8fn.distributed, fp8fn.lowering)
    for name in module.__all__
    if callable(getattr(module, name))
}
MOST_WORDS = 260


def sections(found: Any) -> dict[str, list[str]]:
    """The lines of each section by its title, and under "" those before the first."""
    lines: dict[str, list[str]] = {"": []}
    title = ""
    for line in inspect.cleandoc(found.__doc__).splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            title = line[:-1]
            assert title not in lines, f"{title} is there twice"
            lines[title] = []
        else:
            lines[title].append(line)
    return lines


def parameters(found: Any) -> list[str]:
    if is_dataclass(found):
        return [field.name for field in fields(found) if field.init]
    return list(inspect.signature(found).parameters)


def takes_tensors(found: Any) -> bool:
    kinds = (Tensor.__name__, ScaledTensor.__name__, GroupedScaledTensor.__name__, "Operand")
    hints = inspect.get_annotations(found).values()
    return any(kind in str(hint) for hint in hints for kind in kinds)


def test_all_public_callables_are_here() -> None:
    assert len(PUBLIC) >= 25
    assert {"gemm", "Recipe", "ScaledTensor", "explain", "substitution"} <= PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_sections(name: str) -> None:
    found = PUBLIC[name]
    lines = sections(found)
    first = lines[""][0]
    assert first.endswith("."), "the first line is one sentence"
    assert len(lines[""]) == 1 or lines[""][1] == "", "an empty line follows the first sentence"
    wanted = ["Example"]
    if parameters(found):
        wanted.append("Args")
    if takes_tensors(found):
        wanted.append("Shape")
    if inspect.isfunction(found) and inspect.signature(found).return_annotation not in (None, "None"):
        wanted.append("Returns")
    if parameters(found) and name != "Site":  # which checks nothing
        wanted.append("Raises")
    assert set(wanted) <= lines.keys()
    order = [title for title in ("Args", "Shape", "Returns", "Raises", "Example", "Source") if title in lines]
    assert [title for title in lines if title] == order
    assert all("`" in "".join(lines[title]) for title in lines if title == "Shape")
    assert len(found.__doc__.split()) <= MOST_WORDS


@pytest.mark.parametrize("name", [name for name in PUBLIC if parameters(PUBLIC[name])])
def test_args_lists_the_parameters_exactly(name: str) -> None:
    listed = [match[1] for line in sections(PUBLIC[name])["Args"] if (match := re.match(r" {4}(\w+): ", line))]
    assert listed == parameters(PUBLIC[name])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", PUBLIC)
def test_example(name: str) -> None:
    found = PUBLIC[name]
    example = "\n".join(sections(found)["Example"])
    parsed = doctest.DocTestParser().get_doctest(example, {"fp8fn": fp8fn, "torch": torch}, name, None, 0)
    assert parsed.examples
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, on the first compilation
        # The globals stay: Dynamo takes its own names out of them when it forgets a function that was compiled here.
        failed, _ = doctest.DocTestRunner().run(parsed, out=said.append, clear_globs=False)
    assert not failed, "".join(said)
