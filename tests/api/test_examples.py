"""The programs of `fp8fn.examples` that need one process: each ends, and its loss falls."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8fn.examples
from fp8fn.examples import PACKAGES, SEVERAL, why_not

FOLDER = Path(fp8fn.examples.__file__).parent


def printed(name: str, *args: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", f"fp8fn.examples.{name}", *args]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow(but="moe")
@pytest.mark.parametrize(
    ("name", "packages"), [("moe", ()), ("trainer", ("accelerate", "transformers")), ("lora", ("peft", "transformers"))]
)
def test_an_example_learns(name: str, packages: tuple[str, ...]) -> None:
    for package in packages:
        pytest.importorskip(package)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed(name))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
def test_an_example_generates() -> None:
    pytest.importorskip("transformers")
    out = printed("generate", "--new-tokens", "3")
    assert "14 weights in FP8; missing []" in out
    tokens = re.findall(r"^tokens (.*)$", out, re.MULTILINE)[0].split()
    assert tokens[:8] == [str(token) for token in range(1, 9)]
    assert len(tokens) == 11


def test_examples_are_short() -> None:
    """Each can be read on one screen; `python -m` is how its first line starts it."""
    for path in FOLDER.glob("[!_]*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 61, path
        assert f"fp8fn.examples.{path.stem}" in lines[0], path


@pytest.mark.parametrize(
    ("command", "environment", "reason"),
    [
        ("python -m fp8fn.examples.moe --steps 1", {}, None),
        (
            "python -m fp8fn.examples.lora",
            {},
            "fp8fn.examples.lora: peft, transformers not installed: pip install 'fp8fn[examples]'",
        ),
        ("python -m fp8fn.examples.fsdp2_tp --help", {}, None),
        ("python -u -m fp8fn.examples.fsdp2", {"RANK": "0"}, None),
        (
            "python -u -m fp8fn.examples.fsdp2 --steps 2",
            {},
            "fp8fn.examples.fsdp2 runs in several processes: torchrun --nproc-per-node 2 -m fp8fn.examples.fsdp2",
        ),
        ("python train.py -m fp8fn.examples.lora2", {}, None),
        ("python -m fp8fn.examples", {}, None),
        ("python -m other.lora", {}, None),
        ("python -m", {}, None),
        ("python", {}, None),
    ],
)
def test_what_a_program_lacks(
    command: str, environment: dict[str, str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fp8fn.examples, "installed_by", "pip install 'fp8fn[{}]'".format)
    assert why_not(command.split(), environment) == reason


def test_a_process_ends_with_what_its_program_lacks() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    call = [sys.executable, "-m", "fp8fn.examples.ep"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=240, check=False)
    said = "fp8fn.examples.ep runs in several processes: torchrun --nproc-per-node 2 -m fp8fn.examples.ep\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_what_the_programs_need_is_listed() -> None:
    for path in FOLDER.glob("[!_]*.py"):
        if path.stem.startswith("torchtitan"):  # which torchtitan imports
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        others = {name.partition(".")[0] for name in named} - sys.stdlib_module_names - {"torch", "fp8fn"}
        converts = (
            {"safetensors", "tabulate", "tqdm"} if path.stem == "generate" else set()
        )  # by `python -m fp8fn convert`
        # `Trainer` imports accelerate when it is made.
        assert {*PACKAGES.get(path.stem, ())} - {"accelerate"} == others | converts, path
        assert (path.stem in SEVERAL) == ("torchrun" in (ast.get_docstring(tree) or "").splitlines()[0]), path
