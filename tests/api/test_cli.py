"""The command line: help, version, exit statuses, and what `env` prints."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fp8fn
from fp8fn import cli
from fp8fn.cli import environment, kept_help, options
from fp8fn.cli import help as help_texts
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.hip import build
from fp8fn.ops.targets import CPU, GFX942, GFX950, SM89, SM90, SM100, SM120, Target, named_target
from fp8fn.version import __version__

DEMO_OPTIONS = ("--device", "--steps", "--recipe", "--size", "--plot", "--seed", "--batch")


def exit_status(*argv: str) -> int:
    """The status with which the process would end."""
    try:
        return cli.main(argv)
    except SystemExit as leave:
        return int(leave.code or 0)


@pytest.mark.parametrize(
    ("argv", "mentioned"),
    [
        ((), ("demo", "env", "bench", "--version")),
        (("demo",), (*DEMO_OPTIONS, "blockwise", "hybrid", "tiny", "1b", "Exit status")),
        (("env",), ("Versions",)),
        (("bench",), ("overhead",)),
    ],
)
def test_help(argv: tuple[str, ...], mentioned: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(*argv, "--help") == 0
    text = capsys.readouterr().out
    assert [word for word in mentioned if word not in text] == []
    assert text.startswith(" ".join(("usage: python -m fp8fn", *argv)))


def test_kept_help_is_that_of_the_parsers() -> None:
    """`python -m fp8fn.cli.help` writes it again."""
    kept = cli.HELP.read_text(encoding="utf-8")
    assert kept == help_texts.text()
    assert not re.search(r"/(home|root|work|tmp|usr)/", kept)


@pytest.mark.parametrize("columns", [50, 60, 80, 132, 200])
def test_kept_help_is_formatted_as_by_the_parsers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any width of the terminal, which all lines fit but calls, which are to be copied, and single words."""
    monkeypatch.setenv("COLUMNS", str(columns))
    kept = json.loads(cli.HELP.read_text(encoding="utf-8"))
    widest = 0
    for names, command in help_texts.commands(cli.COMMANDS):
        text = kept_help.parser_of_kept(kept[" ".join(names)]).format_help()
        assert text == help_texts.parser(command).format_help()
        lines = [line for line in text.splitlines() if not line.startswith("  python -m fp8fn")]
        assert [line for line in lines if len(line) > columns - 2 and len(line.split()) > 1] == []
        widest = max(widest, *map(len, lines))
    assert widest > columns - 10


@pytest.mark.parametrize("argv", [("--help",), ("bench", "--help"), ("demo", "--help"), ("bench", "train", "-h")])
def test_help_of_the_process_fits_its_terminal(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for columns in (60, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert exit_status(*argv) == 0
        lines = capsys.readouterr().out.splitlines()
        shown[columns] = [line for line in lines if not line.startswith("  python -m fp8fn")]
        assert max(map(len, shown[columns])) <= columns - 2
    assert len(shown[120]) < len(shown[60])


@pytest.mark.parametrize("names", [names for names, _ in help_texts.commands(cli.COMMANDS)], ids=" ".join)
def test_help_of_each_command_has_an_example(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parser takes it."""
    assert exit_status(*names, "--help") == 0
    text, _, examples = capsys.readouterr().out.partition("\nExamples:\n")
    call = " ".join(("python -m fp8fn", *names))
    assert text.startswith(f"usage: {call}")
    calls = examples.splitlines()
    assert len(calls) >= 1
    for line in calls:
        assert line.startswith(f"  {call}")
        for word in line.split():
            if word.startswith("--"):
                assert re.search(rf"{word}\b", text), f"{line}: there is no {word}"
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda *args: _stop(parse(*args)))
    for line in calls:
        with pytest.raises(_Parsed):
            cli.main(shlex.split(line)[3:])


class _Parsed(Exception):
    """A command's arguments were read."""


def _stop(namespace: argparse.Namespace) -> None:
    raise _Parsed


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    items = "- " + "four " * 20 + "\n- five\n  and six"
    parser = options.parser_of(
        "tune", "One two " * 20 + "\n\n  kept  as it is\n\n" + items, "--shapes 1,2,3", epilog="Three " * 20
    )
    parser.print_help()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 58
    assert "\n  kept  as it is\n" in text
    assert "\n  four four" in text
    assert "\n- five and six\n" in text
    assert text.endswith("\n\nExamples:\n  python -m fp8fn tune --shapes 1,2,3\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("dmeo",), "invalid choice: 'dmeo'"),
        (("bench", "nothing"), "invalid choice: 'nothing'"),
        (("env", "--deep"), "unrecognized arguments: --deep"),
        (("demo", "--steps", "0"), "'0' is not a positive whole number"),
        (("demo", "--recipe", "blokwise"), "did you mean 'blockwise'"),
        (("demo", "--device", "tpu9"), "'tpu9' is not a device"),
        (("demo", "--device", "meta"), "fp8fn has no kernels for 'meta' here"),
        (("demo", "--device", "cuda:99"), "'cuda:99' does not exist"),
        (("demo", "--size", "huge"), "invalid choice: 'huge'"),
        ((), "demo"),
        (("bench",), "overhead"),
    ],
)
def test_wrong_use_exits_2(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(*argv) == 2
    assert message in capsys.readouterr().err


def test_version_and_unknown_command_of_the_process() -> None:
    version, unknown = (
        subprocess.run([sys.executable, "-m", "fp8fn", word], capture_output=True, text=True, check=False)
        for word in ("--version", "unknown")
    )
    assert (version.returncode, version.stdout) == (0, f"fp8fn {__version__}\n")
    assert unknown.returncode == 2


SCRIPT = "import sys\nfrom fp8fn.cli import main\nsys.exit(main())\n"  # what an installer writes for the entry point


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--help",),
        ("--version",),
        ("bench", "--help"),
        ("bench", "nothing"),
        ("tune", "--help"),
        ("bench", "moe", "-h"),
    ],
)
def test_help_and_version_do_not_import_torch(argv: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "fp8fn"
    script.write_text(SCRIPT, encoding="utf-8")
    for program in (("-m", "fp8fn"), (str(script),)):
        command = [sys.executable, "-X", "importtime", *program, *argv]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        imported = {
            line.split("|")[-1].strip() for line in process.stderr.splitlines() if line.startswith("import time:")
        }
        assert "fp8fn.cli" in imported
        assert imported & {"torch", "triton", "fp8fn.matmul"} == set()
        assert process.returncode == (0 if argv and argv[-1].startswith("-") else 2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("demo", "--steps", "3"), "python -m fp8fn demo: interrupted; nothing more is written"),
        (("convert", "a", "b"), "python -m fp8fn convert: interrupted; run the same command again to resume"),
    ],
)
def test_ctrl_c_while_torch_is_imported_is_a_sentence(argv: tuple[str, ...], said: str, tmp_path: Path) -> None:
    script, stub = tmp_path / "fp8fn", tmp_path / "stub"
    script.write_text(SCRIPT, encoding="utf-8")
    stub.mkdir()
    (stub / "torch.py").write_text("raise KeyboardInterrupt\n", encoding="utf-8")
    path = os.pathsep.join((str(stub), str(Path(fp8fn.__file__).parents[1])))
    for program in (("-m", "fp8fn"), (str(script),), ("-c", "import fp8fn")):
        command = [sys.executable, *program, *argv]
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == -signal.SIGINT
        assert (process.stderr == f"\n{said}\n") == (program[0] != "-c"), process.stderr
        assert process.stderr.rstrip().endswith(said if program[0] != "-c" else "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("argv", "original"),
    [
        (["-m", "env", "--help", "x"], ["python", "-m", "fp8fn", "env", "--help", "x"]),
        (["-m", "--help"], ["python", "-m", "trainer", "--help"]),
        (["-m", "-m", "fp8fn"], ["python", "-m", "trainer", "-m", "fp8fn"]),
        (["/bin/fp8fn", "bench", "moe"], ["python", "/bin/fp8fn", "bench", "moe"]),
        (["train.py", "--help"], ["python", "train.py", "--help"]),
        (["-c", "--help"], ["python", "-c", "import fp8fn", "--help"]),
        ([], ["python"]),
    ],
)
def test_every_other_process_imports_all(argv: list[str], original: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert cli.needs_torch()


def test_a_command_gets_what_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def main(argv: list[str]) -> int:
        given.append(argv)
        return 7

    monkeypatch.setattr(environment, "main", main)
    assert cli.main(["env", "--help", "x"]) == 7
    assert given == [["--help", "x"]]


def test_env_prints_what_describe_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("env") == 0
    printed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = environment.describe()
    assert {key: value.strip() for key, value in printed.items()} == lines
    assert lines["fp8fn"] == __version__
    assert lines["torch"] == torch.__version__
    assert lines["cpu arch"] == "cpu"
    assert lines["cpu kernels"] == "reference (PyTorch)"
    assert lines["cpu native e4m3"] == "float8_e4m3fn"
    assert {"Python", "platform", "triton", "C++ compiler", "cpu device"} <= lines.keys()


@pytest.mark.parametrize(
    ("target", "family"),
    [
        (CPU, "reference (PyTorch)"),
        (SM89, "Triton, pointers"),
        (SM90, "CUDA C++ by NVRTC 13.0"),
        (SM100, "Triton, TMA descriptors"),
        (SM120, "Triton, TMA descriptors"),
        (GFX942, "Triton, pointers"),
        (GFX950, "Triton, pointers (HIP for MX products of few rows)"),
    ],
)
def test_kernel_family(target: Target, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_triton_version", lambda: "3.6.0")
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(build, "unavailable", lambda: None)
    assert environment.kernel_family(target) == family


def test_kernel_family_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    old = environment.kernel_family(Target("cuda", 80, 32))
    assert old.startswith("none: ")
    assert "8.0" in old
    assert "8.9" in old
    monkeypatch.setattr(environment, "_triton_version", lambda: "3.6.0")
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC here")
    assert environment.kernel_family(SM90) == "Triton, TMA descriptors (none in CUDA C++: no NVRTC here)"
    monkeypatch.setattr(build, "unavailable", lambda: "no compiler")
    assert environment.kernel_family(GFX950) == "Triton, pointers (none in HIP: no compiler)"
    monkeypatch.setattr(environment, "_triton_version", lambda: None)
    assert environment.kernel_family(SM90) == "none: Triton is not installed"


@pytest.mark.parametrize(
    ("name", "arch", "e4m3"),
    [("mi300x", "gfx942", "e4m3fnuz"), ("gfx950", "gfx950", "e4m3fn"), ("RTX 5090", "sm120", "e4m3fn")],
)
def test_env_of_a_processor_that_is_not_here(
    name: str, arch: str, e4m3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("env", "--arch", name) == 0
    printed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {key: value.strip() for key, value in printed.items()}
    assert lines[f"{name} arch"] == arch
    assert lines[f"{name} native e4m3"] == f"float8_{e4m3}"
    named = named_target(name)
    assert named is not None
    assert lines[f"{name} kernels"] == environment.kernel_family(named[1])
    assert not any(key.startswith(("cpu", "cuda")) for key in lines)
    assert exit_status("env", "--arch", "gfx90a") == 2
    assert "'gfx90a' is no processor; choose from sm89, sm90, sm100" in capsys.readouterr().err


def test_the_cache_counts_kernels_in_hip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    assert environment.kernel_cache() == f"{tmp_path / 'cubin'}, 0 kernels"
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip" / "mxfp8_gemv.hsaco").touch()
    assert environment.kernel_cache() == f"{tmp_path / 'cubin'}, 0 kernels; {tmp_path / 'hip'}, 1 kernels"


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert environment.cpp_compiler() is None
    message = environment.missing_for_inductor()
    assert message is not None
    assert "apt install g++" in message


@functools.cache
def imported_after_torch(statement: str) -> tuple[str, ...]:
    """The modules that a statement imports in a new process that has imported torch."""
    code = f"import sys, torch; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return tuple(process.stdout.split())


def test_a_checkout_without_symlinks_says_what_to_do(tmp_path: Path) -> None:
    """Git writes files with the links' targets where it makes no links, as under Windows."""
    links = ("ops", "meta", "lowering")
    left = shutil.ignore_patterns("__pycache__", *links)
    shutil.copytree(Path(fp8fn.__file__).parent, tmp_path / "fp8fn", ignore=left)
    for name in links:
        (tmp_path / "fp8fn" / name).write_text(f"../{name}", encoding="utf-8")
    imported, version = (
        subprocess.run(
            [sys.executable, *call], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, check=False,
        )
        for call in (("-c", "import fp8fn"), ("-m", "fp8fn", "--version"))
    )  # fmt: skip
    assert imported.returncode == 1
    assert imported.stderr.splitlines()[-1] == (
        "ImportError: fp8fn/meta, fp8fn/ops and fp8fn/lowering are symbolic links to folders, and files in this "
        "checkout: clone it with git clone -c core.symlinks=true (under Windows in developer mode), or install the "
        "wheel"
    )
    assert (version.returncode, version.stdout) == (0, f"fp8fn {__version__}\n")


def test_importing_fp8fn_brings_no_compiler() -> None:
    """SymPy, Inductor and Triton take 0.3 s and more to import: the first call that needs them imports them."""
    loaded = imported_after_torch("import fp8fn")
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & {"sympy", "triton", "transformers", "torchao", "matplotlib"}
    assert not [name for name in loaded if name.startswith(("torch._inductor", "torch._dynamo"))]


def test_importing_fp8fn_imports_what_every_product_needs_and_no_more() -> None:
    """Each module takes 0.5 ms, and three times that where Python keeps no compiled files: few may be added."""
    loaded = imported_after_torch("import fp8fn")
    own = [name for name in loaded if name.partition(".")[0] == "fp8fn"]
    assert len(own) <= 96, own
    assert not [name for name in own if name.startswith(("fp8fn.lowering", "fp8fn.checkpoint", "fp8fn.distributed"))]
    assert not [name for name in own if name.startswith("fp8fn.ops.cuda.quantize")]
    others = sorted(set(loaded) - set(own))  # a release of PyTorch may import less than another
    assert len(others) <= 4, others
    assert not {name.partition(".")[0] for name in others} & {"asyncio", "filelock", "platformdirs", "statistics"}


def test_a_name_is_imported_when_it_is_first_used() -> None:
    loaded = imported_after_torch("from fp8fn import explain")
    assert "fp8fn.lowering.explain" in loaded
    assert "fp8fn.weights.load" not in loaded


def test_every_public_name_is_there_before_it_is_used() -> None:
    """In a new process, since other tests have used the names: `dir`, `import *`, `from fp8fn import`, and errors."""
    code = """
        import sys, fp8fn
        assert set(fp8fn.__all__) <= set(dir(fp8fn))
        assert "fp8fn.lowering.explain" not in sys.modules
        names = {}
        exec("from fp8fn import *", names)
        assert set(fp8fn.__all__) <= names.keys()
        for name in fp8fn.__all__:
            assert names[name] is getattr(fp8fn, name), name
        assert fp8fn.lowering.explain.explain is fp8fn.explain
        assert not hasattr(fp8fn, "nothing")
        try:
            from fp8fn import nothing
        except ImportError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "cannot import name 'nothing' from 'fp8fn'" in process.stdout


def test_threads_may_use_names_for_the_first_time_at_once() -> None:
    """Each of 20 processes has one thread for each name of a package whose modules import each other."""
    code = """
        import os, sys, threading, torch, fp8fn

        def use(name, start, faults):
            start.wait()
            try:
                getattr(fp8fn, name)
            except Exception as error:
                faults.append(f"{name}: {error!r}")

        sys.setswitchinterval(1e-5)
        for _ in range(20):
            if os.fork():
                assert os.wait()[1] == 0
                continue
            names = [name for name, module in fp8fn._LATER.items() if "checkpoint" in module] + ["checkpoint"]
            start, faults = threading.Barrier(len(names)), []
            threads = [threading.Thread(target=use, args=(name, start, faults)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(*faults, file=sys.stderr, flush=True)
            os._exit(bool(faults))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_names_of_the_reference_are_there_after_the_import_alone() -> None:
    """Each in a process of its own, where no other name has imported its module."""
    reference = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    names = [line.removeprefix("::: ") for line in reference.splitlines() if line.startswith("::: ")]
    assert {"fp8fn.lowering.explanation.Row", "fp8fn.weights.load.LoadedWeights"} <= set(names)
    code = f"""
        import functools, os, torch, fp8fn

        for name in {names}:
            if not os.fork():
                functools.reduce(getattr, name.split(".")[1:], fp8fn)
                os._exit(0)
            assert os.wait()[1] == 0, name
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_type_checkers_read_the_imports_that_are_made_later() -> None:
    tree = ast.parse(Path(fp8fn.__file__).read_text(encoding="utf-8"))
    for_types = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    read = {
        each.name: node.module for node in for_types.body if isinstance(node, ast.ImportFrom) for each in node.names
    }
    assert read == fp8fn._LATER | dict.fromkeys(fp8fn._MODULES_LATER, "fp8fn")
    folder = Path(fp8fn.__file__).parent
    submodules = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert not submodules & fp8fn._LATER.keys()  # importing the submodule would replace the name


def test_torch_load_knows_the_classes_of_a_state_dict(tmp_path: Path) -> None:
    """`weights_only` takes them in a process that has only imported fp8fn."""
    scaled = fp8fn.quantize(torch.randn(128, 256), (128, 128))
    torch.save({"scaled": scaled, "weight": fp8fn.FP8Weight(scaled)}, tmp_path / "state.pt")
    code = """
        import sys, torch, fp8fn
        state = torch.load(sys.argv[1], weights_only=True)
        print(type(state["scaled"]).__name__, type(state["weight"]).__name__, tuple((state["weight"].mT).shape))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "state.pt")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split(maxsplit=2) == ["ScaledTensor", "FP8Weight", "(256, 128)\n"]


def test_of_a_misspelt_name_python_knows_what_its_traceback_compares() -> None:
    """It asks "Did you mean: 'quantize'?" for an error that says which name of which module."""
    with pytest.raises(AttributeError, match=r"^module 'fp8fn' has no attribute 'quantise'$") as raised:
        fp8fn.quantise  # type: ignore[attr-defined]  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("quantise", fp8fn)
