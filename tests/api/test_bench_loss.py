"""`python -m fp8fn bench loss`: pairs, seeds that a file has already, the mean difference and the exit status."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fp8fn.bench import loss
from fp8fn.bench.train.variants import Variant
from fp8fn.demo import train as demo_train

# By variant and seed: losses after training.
LOSSES = {
    "bf16": [1.0, 1.1, 1.2],
    "fp8fn:BLOCKWISE": [1.001, 1.1, 1.2012],
    "fp8fn:TENSORWISE": [1.02, 1.122, 1.23],
    "fp8fn:ROWWISE": [1.0, math.nan, 1.2],
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The trainings that were run, which have the losses above and take no time."""
    found: list[tuple[str, int]] = []

    def train(model: Any, compiled: Any, name: str, corpus: Any, plan: demo_train.Plan) -> demo_train.Run:
        assert compiled is model
        found.append((name, plan.seed))
        return demo_train.Run(
            name=name, losses=[], validation=[(0, 5.0), (plan.steps, LOSSES[name][plan.seed])], step_seconds=[],
            tokens_per_step=1, saved_bytes=0,
        )  # fmt: skip

    monkeypatch.setattr(loss, "train", train)
    monkeypatch.setattr(Variant, "compile", lambda self, model, device: model)
    return found


def _run(tmp_path: Path, *arguments: str) -> int:
    file = str(tmp_path / "loss.json")
    return loss.main(["--size", "tiny", "--device", "cpu", "--commit", "one", "--json", file, *arguments])


def test_differences_are_means_over_pairs(
    trained: list[tuple[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "--variants", "fp8fn:BLOCKWISE", "--seeds", "3") == 0
    assert trained == [(name, seed) for name in ("bf16", "fp8fn:BLOCKWISE") for seed in range(3)]
    # The differences are 0.1 %, 0 and 0.1 %, whose standard deviation is 0.0577 %.
    assert "+0.07% ± 0.03%" in (shown := capsys.readouterr().out)
    assert "within 0.5% plus one standard error" in shown
    assert "1.1000" in shown  # the mean of bf16


def test_a_difference_over_the_bar_is_the_exit_status(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    assert _run(tmp_path, "--variants", "fp8fn:TENSORWISE", "--seeds", "3") == 1


def test_a_loss_that_is_no_number_is_over_the_bar(
    trained: list[tuple[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, "--variants", "fp8fn:ROWWISE", "--seeds", "3") == 1
    assert "over 0.5%" in capsys.readouterr().out


def test_seeds_of_the_file_are_not_trained_again(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    _run(tmp_path, "--variants", "fp8fn:BLOCKWISE", "--seeds", "2")
    del trained[:]
    _run(tmp_path, "--variants", "fp8fn:BLOCKWISE fp8fn:TENSORWISE", "--seeds", "3")
    assert trained == [("bf16", 2), ("fp8fn:BLOCKWISE", 2), *(("fp8fn:TENSORWISE", seed) for seed in range(3))]
    (run,) = json.loads((tmp_path / "loss.json").read_text())["results"]["runs"]
    assert {row["variant"]: list(row["losses"].values()) for row in run["rows"]} == {
        name: LOSSES[name] for name in ("bf16", "fp8fn:BLOCKWISE", "fp8fn:TENSORWISE")
    }
    assert _run(tmp_path, "--steps", "7", "--variants", "bf16", "--seeds", "1") == 0
    assert len(json.loads((tmp_path / "loss.json").read_text())["results"]["runs"]) == 2  # another setting


def test_a_peer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _run(tmp_path, "--variants", "torchao:rowwise")
    assert "'torchao:rowwise' replaces layers of the model; use bf16 and fp8fn:PRESET" in capsys.readouterr().err
