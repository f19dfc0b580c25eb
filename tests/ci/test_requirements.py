"""What installing fp8fn installs: beside ROCm's PyTorch no other Triton, which would overwrite the files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8fn.examples import PACKAGES

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
requirements = pytest.importorskip("packaging.requirements")

PROJECT: Any = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def parsed(lines: list[str]) -> dict[str, Any]:
    return {requirement.name: requirement for requirement in map(requirements.Requirement, lines)}


def test_nothing_replaces_the_triton_of_rocms_torch() -> None:
    required = parsed(PROJECT["dependencies"])
    assert not [name for name in required if "triton" in name]
    for version in ("2.11.0+rocm7.0", "2.13.0+rocm7.1", "2.11.0+cu130", "2.13.0+cpu"):
        assert required["torch"].specifier.contains(version)


def test_only_two_extras_bring_triton_and_on_linux_alone() -> None:
    extras = {name: parsed(lines) for name, lines in PROJECT["optional-dependencies"].items()}
    assert {name for name, required in extras.items() if "triton" in required} == {"triton", "test"}
    for name in ("triton", "test"):
        requirement = extras[name]["triton"]
        assert requirement.specifier.contains("3.6.0")
        assert not requirement.specifier.contains("3.5.1")
        assert requirement.marker.evaluate({"sys_platform": "linux"})
        assert not requirement.marker.evaluate({"sys_platform": "win32"})


def test_an_extra_has_what_the_examples_import() -> None:
    needed = {name for names in PACKAGES.values() for name in names}
    assert {*parsed(PROJECT["optional-dependencies"]["examples"])} == needed
