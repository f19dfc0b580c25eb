"""The programs of `fp8fn.examples` that need one process: each ends, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8fn.examples

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
