"""The stress of early launches: that it finds a stale read, and on a GPU, in small, that there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

from stress import stress_early_launches
from stress.stress_early_launches import MODES, Case, Stress, stress

CPU = torch.device("cpu")


def stress_on_cpu(case: Case, checks: int) -> Stress:
    run = Stress(CPU)
    stress([case], run, checks=checks, seconds=60, rounds=4, jobs=1)
    return run


def doubled(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return x + w, x - w


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 5), torch.randn(3, 5)


def test_what_reads_its_operands_in_time_is_right() -> None:
    run = stress_on_cpu(Case("sums", operands, doubled), 40)
    assert dict(run.checks) == {("reference", mode): 8 for mode in MODES}
    assert run.mismatches.total() == 0


@pytest.mark.parametrize("late", [0, 1], ids=["x", "w"])
def test_what_reads_an_operand_of_the_time_before_is_found_in_every_mode(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operand moves, since a constant one may be read at any time."""
    before = [torch.zeros(3, 5), torch.zeros(3, 5)]
    synchronized = []
    expected = Stress._expected

    def in_time(*args: Any) -> Any:
        synchronized.append(1)
        try:
            return expected(*args)
        finally:
            synchronized.clear()

    def stale(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        read = [x, w]
        if not synchronized:
            read[late] = before[late]
            before[:] = x.clone(), w.clone()
        return doubled(*read)

    monkeypatch.setattr(Stress, "_expected", in_time)
    run = stress_on_cpu(Case("sums", operands, stale), 40)
    assert all(run.mismatches["reference", mode] == 8 for mode in MODES)
    assert len(run.found) == 10
    before[1] = torch.zeros(3, 5)
    run = stress_on_cpu(Case("sums", operands, stale, moving=1), 40)
    assert all(run.mismatches["reference", mode] == 8 * (late == 0) for mode in MODES[2:])


def test_a_case_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*_: Tensor) -> Sequence[Tensor]:
        raise ZeroDivisionError("of a kernel")

    case = Case("fails", operands, failing)
    run = stress_on_cpu(case, 40)
    assert run.checks.total() == 0
    assert case.fault == "ZeroDivisionError: of a kernel"
    assert "0 of 1 cases compiled" in capsys.readouterr().out


def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    only = ["mm_a16w8 M=9 128x128", "chain mm_a16w8 M=1 rewritten", "mx_mm M=1 bias"]
    args = ["--device", "cpu", "--rounds", "1", "--json", str(path), "--only", *only]
    assert stress_early_launches.main([*args, "--checks", "25"]) == 0
    found = json.loads(path.read_text())
    assert (found["wrong"], found["faults"]) == (0, {})
    assert found["checks"] == sum(row["checks"] for row in found["rows"]) >= 25
    assert {row["mode"] for row in found["rows"]} == set(MODES)
    assert stress_early_launches.main([*args, "--checks", "25", "--seconds", "0"]) == 1
    assert "fewer than the 25 checks asked for" in capsys.readouterr().out


@pytest.mark.gpu
def test_early_launches_on_a_gpu(hopper: object, tmp_path: Path) -> None:
    """A part of what the command does: each kernel that overlaps, once in each mode."""
    path = tmp_path / "found.json"
    only = [
        "w8 M=4",
        "w8 M=17",
        "w8_tiles M=4",
        "mx M=4",
        "mx_tiles M=4",
        "mm M=4",
        "moe_gemm MX M=4",
        "by columns, mm_a16w8 M=1",
    ]
    args = ["--checks", "1", "--rounds", "3", "--seconds", "100", "--jobs", "4", "--json", str(path), "--only", *only]
    code = stress_early_launches.main(args)
    found = json.loads(path.read_text())
    assert (code, found["wrong"], found["found"], found["faults"]) == (0, 0, [], {})
    ran = {name for row in found["rows"] for name in row["kernels"].split(" + ")}
    assert ran >= {
        f"{name}*" for name in ("gemv_a16w8", "a16w8_tiles", "splitk_a16w8", "mm_a16w8", "gemv_mx", "mx_tiles")
    }
