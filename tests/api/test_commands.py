"""Messages of every command about a wrong device, unreadable and unwritable files, missing packages, and Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tqdm import tqdm

from fp8fn import cli
from fp8fn.bench import docs, plot, record
from fp8fn.cli import isa, options, tune
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.nvrtc import Compiled
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning import sweep, table
from fp8fn.ops.tuning.problem import Problem

RESULTS = record.RESULTS
# The arguments of each command that has the option, without the option.
DEVICES = {
    "demo": ("demo",),
    "tune": ("tune", "--shapes", "128,128,128"),
    "convert": ("convert", "from", "to"),
    **{
        name: ("bench", name)
        for name in (
            "dense",
            "wgrad",
            "linear",
            "moe",
            "decode",
            "invariant",
            "decoder",
            "generate",
            "prefill",
            "quant",
            "train",
            "loss",
            "seeds",
            "cold",
        )
    },
}
OUTPUTS = {
    "demo": (("demo",), ("--json", "--plot")),
    "tune": (("tune",), ("--export",)),
    "isa": (("isa",), ("--json",)),
    **{
        name: (("bench", name), ("--json", "--plot"))
        for name in ("dense", "wgrad", "linear", "moe", "decode", "invariant", "decoder", "quant")
    },
    "seeds": (("bench", "seeds"), ("--json", "--report")),
    **{
        name: (("bench", name), ("--json",))
        for name in ("overhead", "compile", "host", "generate", "prefill", "train", "loss", "cold")
    },
}


def leaves(group: cli.Group, *before: str) -> Iterator[tuple[tuple[str, ...], cli.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, cli.Group):
            yield from leaves(command, *before, name)
        else:
            yield (*before, name), command


COMMANDS = dict(leaves(cli.COMMANDS))


def stopped(*argv: str) -> int:
    """The status with which a command ends itself."""
    with pytest.raises(SystemExit) as leave:
        cli.main(argv)
    assert isinstance(leave.value.code, int)
    return leave.value.code


def options_of(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    assert stopped(*argv, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_command_with_such_an_option_is_tested_here(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = options_of(name, capsys)
    assert ("--device" in text) == (name[-1] in DEVICES and name != ("isa",))
    written = [option for option in ("--json", "--plot", "--report", "--export") if f"{option} " in text]
    assert sorted(written) == sorted(next((o for argv, o in OUTPUTS.values() if argv == name), ()))


@pytest.mark.parametrize("argv", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("foo", "'foo' is not a device; use "),
        ("meta", "fp8fn has no kernels for 'meta' here; use "),
        ("mps", "fp8fn has no kernels for 'mps' here; use "),
        ("cuda:-1", "'cuda:-1' is not a device; use "),
        ("cuda", "'cuda' does not exist: torch sees 0 GPUs; use "),
        ("cuda:7", "'cuda:7' does not exist: torch sees 0 GPUs; use "),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    argv: tuple[str, ...], device: str, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert stopped(*argv, "--device", device) == 2
    assert f"argument --device: {message}" in capsys.readouterr().err


def test_the_gpus_that_are_there_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert stopped("bench", "dense", "--device", "cuda:2") == 2
    assert "'cuda:2' does not exist: torch sees 2 GPUs; use cuda:0 to cuda:1" in capsys.readouterr().err
    assert stopped(*DEVICES["tune"], "--device", "cpu") == 2
    assert "fp8fn has no kernels for 'cpu' here; use cuda or cuda:N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "option"), [(argv, option) for argv, options in OUTPUTS.values() for option in options]
)
def test_a_file_that_cannot_be_written_is_an_error_before_any_work(
    argv: tuple[str, ...], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path / "no" / "x.png", "it must be a file in a folder that exists"),
        (tmp_path, "it must be a file in a folder that exists"),
        (tmp_path / "file" / "x.png", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        assert stopped(*argv, option, str(path)) == 2
        assert f"argument {option}: {str(path)!r} can't be written: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("denied", ["file", "folder"])
def test_a_file_that_may_not_be_written_is_no_output(
    denied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    if denied == "file":
        path.touch()
    of = path if denied == "file" else tmp_path
    access = os.access  # root is never refused
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path) != of and access(path, *how))
    with pytest.raises(
        argparse.ArgumentTypeError, match=re.escape(f"{str(path)!r} can't be written: permission denied")
    ):
        options.output_file(str(path))
    monkeypatch.undo()
    assert options.output_file(str(path)) == path


def test_bench_isa_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped("bench", "isa", "--folder", str(tmp_path / "no")) == 2
    assert f"argument --folder: {str(tmp_path / 'no')!r} can't be written to: it must be a" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("isa",), ("isa", "--write-tables"), ("bench", "isa")], ids=" ".join)
def test_without_triton_isa_says_what_to_install(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert stopped(*argv) == 2
    assert "needs Triton, whose compiler writes the machine code: pip install triton" in capsys.readouterr().err


def test_without_triton_tune_says_what_to_install() -> None:
    """In a process of its own: this one may have imported the kernels."""
    argv = ["tune", "--dry-run", "--arch", "gfx950", "--shapes", "512,512,512"]
    code = f"import sys; sys.modules['triton'] = None; from fp8fn import cli; sys.exit(cli.main({argv}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "tune: error: --op scaled_mm needs Triton, whose kernels are candidates: pip install triton (on Linux)"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"python -m fp8fn {said}")


# `bench plot` and `bench docs`.


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert stopped("bench", "plot", str(RESULTS / "forward.json"), str(tmp_path / "x.png")) == 2
    assert "needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_plot_of_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, why in ((tmp_path / "run.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert stopped("bench", "plot", str(path), str(tmp_path / "x.png")) == 2
        assert f"{path} can't be read: {why}; --json of dense, wgrad, linear, quant or train" in capsys.readouterr().err


GOOD = json.loads((RESULTS / "forward.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe", b"{", b"[]", b"3", b"[" * 100_000, b'{"results": {"rows": []}}', b'{"results": {"rows": 3}}',
        (RESULTS / "host.json").read_bytes(), (RESULTS / "generate.json").read_bytes(),
        json.dumps({**GOOD, "results": {"rows": GOOD["results"]["rows"]}}).encode(),
        json.dumps({"benchmark": "dense", "results": GOOD["results"]}).encode(),
    ],
    ids=[
        "empty", "no UTF-8", "no JSON", "list", "number", "deep", "no rows", "no list of rows", "host", "generate",
        "no suite", "no environment",
    ],
)  # fmt: skip
def test_plot_of_another_file(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_bytes(content)
    assert stopped("bench", "plot", str(tmp_path / "run.json"), str(tmp_path / "x.png")) == 2
    message = f"{tmp_path / 'run.json'} is not a run of dense, wgrad, linear, quant or train, as --json writes it"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ("bench", "plot", str(RESULTS / "forward.json")),
        ("bench", "dense", "--device", "cpu", "--shape", "16,128,128", "--rounds", "1", "--peers", "none", "--plot"),
    ],
    ids=["plot", "dense"],
)
def test_a_figure_of_no_format(argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped(*argv, str(tmp_path / "x.docx")) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'x.docx'}: no format 'docx'; use " in error
    assert "png" in error.rpartition("use ")[2]
    assert plot.format_fault(tmp_path / "x.PNG") is None


@pytest.mark.parametrize("argv", [(), ("--check",)])
def test_docs_outside_of_a_checkout(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    path = tmp_path / "benchmarks.md"
    for content, why in (
        (None, "can't be read (No such file or directory): run this command in a checkout of fp8fn"),
        (b"# Another project\n", "is not fp8fn's page (needs one place between <!-- forward --> and"),
        (b"\xff\xfe\x00", "is not fp8fn's page ("),
    ):
        if content is not None:
            path.write_bytes(content)
        assert stopped("bench", "docs", *argv) == 2
        assert f"{path} {why}" in capsys.readouterr().err
    assert path.read_bytes() == b"\xff\xfe\x00"


def test_an_installed_package_has_no_committed_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docs" / "results"
    monkeypatch.setattr(record, "RESULTS", folder)
    for read in (record.all_committed, lambda: record.committed("forward")):
        with pytest.raises(FileNotFoundError, match="only a checkout of fp8fn has the committed results"):
            read()
    assert stopped("bench", "isa") == 2
    assert f"--folder: '{folder}' can't be written to: it must be a folder that exists" in capsys.readouterr().err


# `isa`.


def test_isa_writes_the_tables_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, str]] = []
    monkeypatch.setattr(isa, "write_table", lambda path, arch: written.append((path, arch)))
    for arch in ("gfx942", "gfx950"):  # one at a time, as Triton 3.6 wants it
        assert cli.main(["isa", "--arch", arch, "--write-tables"]) == 0
    assert [arch for _, arch in written] == ["gfx942", "gfx950"]
    for path, arch in written:
        assert json.loads(path.read_text(encoding="utf-8"))["arch"] == arch


# A reader of the output that leaves, as `head` does.


@pytest.mark.parametrize("lines", [1, 100_000])  # fewer than the buffer holds, and more
def test_a_reader_that_leaves_is_status_141(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(argv: list[str]) -> int:
        print("line\n" * lines)
        return 0

    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as stdout:  # closed without an error
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(importlib.import_module("fp8fn.cli.environment"), "main", command)
        assert cli.main(["env", "x"]) == 141
        print("no error")


def test_a_broken_pipe_to_another_process_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(argv: list[str]) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(importlib.import_module("fp8fn.cli.environment"), "main", broken)
    with (tmp_path / "output").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            cli.main(["env", "x"])


# Ctrl-C.


@pytest.mark.parametrize(("name", "command"), COMMANDS.items(), ids=map(" ".join, COMMANDS))
def test_ctrl_c_is_a_sentence_and_status_130(
    name: tuple[str, ...], command: cli.Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(command.module), "main", interrupted)
    assert cli.main([*name, "x"]) == 130
    kept = {
        "tune": "what is tuned is kept; ", "aot": "what is compiled is kept; ", "convert": "",
        "train": "finished figures are in the file of --json; ",
        "seeds": "finished figures are in the file of --json; ",
        "loss": "finished seeds are in the file of --json; ",
    }  # fmt: skip
    resume = f"{kept[name[-1]]}run the same command again to resume" if name[-1] in kept else "nothing more is written"
    assert capsys.readouterr().err == f"\npython -m fp8fn {' '.join(name)}: interrupted; {resume}\n"


CHIP = Chip("NVIDIA Test", 132)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    table.forget()
    return tmp_path / "cache"


def tuned_after(count: int, asked: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the sweep by one that is interrupted at problem number `count`."""

    def one(problem: Problem, bench: Any) -> table.Entry:
        if len(asked) == count:
            raise KeyboardInterrupt
        asked.append(problem)
        return table.Entry("64x64d2", {"64x64d2": 1.0}, 0.1)

    assert sweep.tune is tune.tune
    monkeypatch.setattr(tune, "tune", one)
    monkeypatch.setattr(tune, "_gpu", lambda *_, **__: ())
    monkeypatch.setattr(tune, "DeviceBench", lambda: SimpleNamespace(chip=CHIP, clock=None))
    monkeypatch.setattr(tune, "_chip", lambda *_: CHIP)


SHAPES = ("tune", "--shapes", "1024,512,256", "--products", "forward,dgrad,wgrad")


def test_an_interrupted_tune_resumes(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Problem] = []
    with monkeypatch.context() as patch:
        tuned_after(2, first, patch)
        assert cli.main(SHAPES) == 130
    assert "tune: interrupted; what is tuned is kept; run the same command again to resume" in capsys.readouterr().err
    rest: list[Problem] = []
    with monkeypatch.context() as patch:
        tuned_after(9, rest, patch)
        assert cli.main(SHAPES) == 0
    assert (len(first), len(rest), len({*first, *rest})) == (2, 1, 3)


@pytest.mark.parametrize("fault", ["a file", "full"])
def test_tune_says_where_it_cannot_keep_what_it_found(
    fault: str, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked: list[Problem] = []
    tuned_after(9, asked, monkeypatch)
    if fault == "a file":
        cache.touch()
    else:
        monkeypatch.setattr(os, "fsync", full)
    assert cli.main(SHAPES) == 1
    why = "Not a directory" if fault == "a file" else "No space left on device"
    path = table.user_path(CHIP)
    assert f"fp8fn tune: {path} can't be written ({why}): set FP8FN_CACHE_DIR to a folder" in capsys.readouterr().err
    assert len(asked) == 1  # later results would be lost too


@pytest.mark.parametrize("where", ["compiler", "bar"])
def test_an_interrupted_aot_leaves_what_has_not_begun_and_resumes(
    where: str, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    update = tqdm.update

    def bar(self: tqdm[Any], count: float = 1) -> bool | None:
        if interrupted and where == "bar":
            raise KeyboardInterrupt
        return update(self, count)

    def compile_(source: str, name: str, *_: Any) -> Compiled:
        begun.append(name)
        if interrupted and where == "compiler" and len(begun) == 2:
            raise KeyboardInterrupt
        time.sleep(0.1 if interrupted else 0)
        return Compiled(b"code", "")

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(tqdm, "update", bar)
    interrupted = True
    assert cli.main(["aot", "--shapes", "8192,6144,4096"]) == 130
    assert "aot: interrupted; what is compiled is kept; run the same command again to resume" in capsys.readouterr().err
    assert len(begun) < 5  # of 8: one more begins while the interrupt is delivered
    kept = len(list((cache / "cubin").iterdir()))
    assert 1 <= kept <= len(begun)
    interrupted = False
    assert cli.main(["aot", "--shapes", "8192,6144,4096"]) == 0
    assert f"8 kernels, {8 - kept} compiled now, {kept} there before" in capsys.readouterr().out
