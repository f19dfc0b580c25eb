"""`bench cold`: the processes of each setting, what is wrong with figures, the tables, and real processes on a CPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from fp8fn import cli
from fp8fn.bench import cold, record
from fp8fn.bench.cold import AOT, EMPTY, PACKAGE
from support.compilers import needs_nvrtc

SHAPE = [4096, 4096, 4096]
PATH = os.pathsep.join(["cubins", "before"])


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """The last argument and the variables of each process; the k-th timed one of a setting takes k seconds."""
    found: list[tuple[str, dict[str, str]]] = []
    seconds = dict.fromkeys((EMPTY, AOT, PACKAGE), 0)

    def output(command: Sequence[str], environment: Mapping[str, str]) -> str:
        found.append((command[-1], {**environment}))
        if "aot" in command:
            Path(environment["FP8FN_CACHE_DIR"]).mkdir()
            return ""
        filled = Path(environment["FP8FN_CACHE_DIR"]).exists()
        way = PACKAGE if environment["FP8FN_CUBINS"] == "1" else AOT if filled else EMPTY
        *_, count = json.loads(command[-1])
        if count:
            return json.dumps([0, 0, [cold.ORIGINS[way]] * 7, "installed"])
        seconds[way] += 1
        return json.dumps([seconds[way], 10 * seconds[way], [], "installed"])

    monkeypatch.setattr(cold, "_output", output)
    monkeypatch.setenv("PYTHONPATH", "before")
    return found


def test_each_setting_has_a_process_that_counts_and_others_that_are_timed(processes: list[Any]) -> None:
    setting = cold.ColdStart(SHAPE, "rowwise", "cuda", Path("cubins"))
    assert cold.measure(setting, rounds=3) == {
        EMPTY: {"first_s": [1, 2, 3], "step_s": [10, 20, 30], "kernels": {"NVRTC": 7}},
        AOT: {"first_s": [1, 2, 3], "step_s": [10, 20, 30], "kernels": {"the cache": 7}},
        PACKAGE: {"first_s": [1, 2, 3], "step_s": [10, 20, 30], "kernels": {"fp8fn-cubins": 7}},
    }
    assert len(processes) == 4 + 5 + 4
    caches = [environment["FP8FN_CACHE_DIR"] for _, environment in processes]
    assert [len({*part}) for part in (caches[:4], caches[4:9], caches[9:])] == [4, 1, 4]
    assert [environment["FP8FN_CUBINS"] for _, environment in processes] == ["0"] * 9 + ["1"] * 4
    assert [environment["PYTHONPATH"] for _, environment in processes] == ["before"] * 9 + [PATH] * 4
    assert json.loads(processes[0][0]) == [SHAPE, "rowwise", True]
    assert json.loads(processes[1][0]) == [SHAPE, "rowwise", False]
    assert processes[4][0] == "rowwise"


def test_a_package_that_is_not_there_is_a_reason(processes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cold.ORIGINS, PACKAGE, "NVRTC")
    found = cold.measure(cold.ColdStart(SHAPE, "rowwise", "cuda"), rounds=1)
    assert found[PACKAGE] == {"unavailable": "installed"}


def results(device: str, *, first: float = 0.25, compiled: int = 0) -> dict[str, Any]:
    def row(seconds: float, **kernels: int) -> dict[str, Any]:
        return {"first_s": [seconds, 9.0, 0.0], "step_s": [2 * seconds] * 3, "kernels": kernels}

    return {
        "device": "a GPU", "type": device, "shape": SHAPE, "recipe": "blockwise",
        "ways": {
            EMPTY: row(1.5, NVRTC=7), AOT: row(first, cache=7),
            PACKAGE: row(0.125, package=7 - compiled, NVRTC=compiled),
        },
    }  # fmt: skip


def test_faults() -> None:
    assert cold.faults(results("cuda")) == []
    assert cold.faults(results("cuda", first=0.5)) == ["aot: the first product takes 0.5 s or more"]
    assert cold.faults(results("cpu", first=0.5)) == []
    assert cold.faults(results("cpu", compiled=2)) == ["fp8fn-cubins: 2 kernels were compiled"]
    missing = results("cuda")
    missing["ways"][PACKAGE] = {"unavailable": "not installed"}
    assert cold.faults(missing) == []


def test_the_table() -> None:
    environment = {"cpu device": "x", "cuda:0 device": "y", "torch": "2.11", "triton": "3.6"}
    found = results("cuda")
    found["ways"][PACKAGE] = {"unavailable": "not installed"}
    table = cold.table({"environment": environment, "date": "2026-11-26", "results": found}).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[:5] if "--" not in line] == [
        ["setting", "first product, s", "bar, s", "first training step after it, s", "kernels"],
        ["empty cache", "1.500", "", "3.000", "7 from NVRTC"],
        ["aot", "0.250", "0.5", "0.500", "7 from cache"],
        ["fp8fn-cubins", "not installed", "", "", ""],
    ]
    assert table[-1] == (
        "Layer 4096x4096x4096, blockwise; medians of 3 processes. a GPU; torch 2.11, Triton 3.6; 2026-11-26."
    )
    assert "machine code of the first product, s" in cold.table(
        {"environment": environment, "date": "2026-11-26", "results": results("cpu")}
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--recipe", "mxfp9"), "did you mean"),
        (("--cubins", "no/such"), "has no folder fp8fn_cubins"),
        (("--shape", "1,2"), "--shape"),
        (("--device", "cuda"), "cuda"),
    ],
)
@needs_nvrtc
def test_wrong_use_exits_2(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        cli.main(["bench", "cold", "--device", "cpu", *argv])
    assert leave.value.code == 2
    assert message in capsys.readouterr().err


def test_the_script_for_a_gpu_runs_on_a_cpu() -> None:
    """With the device's name replaced: no test here has a GPU."""
    script = cold._HEAD + cold._ON_A_GPU + cold._TAIL
    script = script.replace('"cuda"', '"cpu"').replace("torch.cuda.", "torch.cpu.")
    command = [sys.executable, "-c", script, json.dumps([[64, 256, 128], "tensorwise", True])]
    first, step, origins, package = json.loads(cold._output(command, {**os.environ, "FP8FN_CUBINS": "0"}))
    assert min(first, step) > 0
    assert (origins, package) == ([], "left out by FP8FN_CUBINS=0")
    with pytest.raises(RuntimeError, match=r"(?s)a process failed:.*JSONDecodeError"):
        cold._output([*command[:-1], "["], os.environ)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_processes_compile_in_an_empty_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code of one layer, with a package of just its kernels."""
    package = tmp_path / "site" / "fp8fn_cubins"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    layer = "4096,4096,4096"
    assert cli.main(["aot", "--shapes", layer, "--recipe", "tensorwise", "--out", str(package)]) == 0
    file = tmp_path / "cold.json"
    options = ["--device", "cpu", "--rounds", "1", "--shape", layer, "--recipe", "tensorwise", "--json", str(file)]
    assert cli.main(["bench", "cold", *options, "--cubins", str(tmp_path / "site")]) == 0
    run = record.read(file)
    assert run["benchmark"] == "cold"
    found = run["results"]["ways"]
    kernels = found[EMPTY]["kernels"]["NVRTC"]
    assert [row["kernels"] for row in found.values()] == [
        {"NVRTC": kernels}, {"the cache": kernels}, {"fp8fn-cubins": kernels},
    ]  # fmt: skip
    assert kernels >= 4
    assert min(found[EMPTY]["first_s"]) > max(*found[AOT]["first_s"], *found[PACKAGE]["first_s"])
