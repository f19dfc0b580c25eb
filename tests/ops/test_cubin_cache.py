"""The cache of NVRTC's output: keys, damage, processes that write at once; errors of the source."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.code_cache import cache_dir, read_whole
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.nvrtc import CompilationError, Compiled
from fp8fn.ops.targets import SM90
from support.compilers import needs_nvrtc
from support.stub_driver import ROWS

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Text:
    """An instruction of some source."""

    source: str


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that reach NVRTC, which answers with their count."""
    calls: list[tuple[Any, ...]] = []

    def compile_(*args: Any) -> Compiled:
        calls.append(args)
        return Compiled(b"cubin %d" % len(calls), "log")

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    return calls


def compile_kernel(kernel: nvrtc.CudaKernel, arch: str = SM90.cubin, *, verbose: bool = False) -> Compiled:
    return nvrtc.compile_kernel(kernel, arch, verbose=verbose)


def test_the_second_time_a_kernel_comes_from_the_cache(cache: Path, compiled: list[Any]) -> None:
    first = compile_kernel(ROWS)
    assert first == Compiled(b"cubin 1", "log")
    assert compile_kernel(ROWS) == Compiled(b"cubin 1", "")
    assert len(compiled) == 1
    (file,) = (cache / "cubin").iterdir()
    assert file.name.startswith("row_rstd-")
    assert file.suffix == ".cubin"


def test_verbose_compiles_anew_and_keeps_nothing(cache: Path, compiled: list[Any]) -> None:
    assert compile_kernel(ROWS, verbose=True).log == "log"
    assert compile_kernel(ROWS, verbose=True).cubin == b"cubin 2"
    assert "--ptxas-options=-v" in compiled[0][-1]
    assert not cache.exists()


def test_whatever_changes_the_code_changes_the_key(
    cache: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernel(ROWS)
    for other in (
        replace(ROWS, macros=(*ROWS.macros, ("OUT", "Element::FP16"))),
        replace(ROWS, macros=ROWS.macros[::-1]),
        replace(ROWS, instructions=(Text("// before"),)),
        replace(ROWS, entry="sum"),
    ):
        compile_kernel(other)
    compile_kernel(ROWS, "sm_100a")
    text = nvrtc._text
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_text", lambda name: text(name) + ("//" if name.endswith(".cu") else ""))
        compile_kernel(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_headers", lambda: {"hopper.cuh": "", "convert.cuh": "//"})
        compile_kernel(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_OPTIONS", ("--std=c++20",))
        compile_kernel(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: (12, 8))
        compile_kernel(ROWS)
    assert len(compiled) == len(list((cache / "cubin").iterdir())) == 10
    compile_kernel(ROWS)
    assert len(compiled) == 10


def test_macros_and_architecture_are_options(cache: Path, compiled: list[Any]) -> None:
    compile_kernel(replace(ROWS, instructions=(Text("struct Before {};\n"),)))
    source, name, headers, options = compiled[0]
    assert source.startswith('struct Before {};\n#line 1 "row_rstd.cu"\n')
    assert name == "row_rstd.cu"
    assert {"row_sum.cuh", "values.cuh"} <= set(headers)
    assert {"--gpu-architecture=sm_90a", "-DINPUT=Element::BF16", "-DROWS=1"} <= set(options)


@pytest.mark.parametrize("damage", [b"", b"cubin 1", b"\x7fELF" + b"\0" * 100])
def test_a_damaged_file_is_compiled_again(damage: bytes, cache: Path, compiled: list[Any]) -> None:
    compile_kernel(ROWS)
    (file,) = (cache / "cubin").iterdir()
    file.write_bytes(damage)
    assert compile_kernel(ROWS) == Compiled(b"cubin 2", "log")
    assert compile_kernel(ROWS) == Compiled(b"cubin 2", "")


def test_a_file_with_a_flipped_or_missing_byte_is_compiled_again(cache: Path, compiled: list[Any]) -> None:
    compile_kernel(ROWS)
    (file,) = (cache / "cubin").iterdir()
    whole = file.read_bytes()
    for i, damaged in enumerate((whole[:-1], b"d" + whole[1:], whole[1:], whole + b"\0")):
        file.write_bytes(damaged)
        assert compile_kernel(ROWS).cubin == b"cubin %d" % (i + 2)


def test_a_cache_that_cannot_be_written_or_read_does_no_harm(
    tmp_path: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(file))  # mkdir and read both fail
    assert compile_kernel(ROWS).cubin == b"cubin 1"
    folder = tmp_path / "folder"
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(folder))
    compile_kernel(ROWS)
    (kept,) = (folder / "cubin").iterdir()
    kept.unlink()
    kept.mkdir()  # a folder where the file should be
    assert compile_kernel(ROWS).cubin == b"cubin 3"
    assert file.read_bytes() == b""


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_cache_does_no_harm(cache: Path, compiled: list[Any]) -> None:
    (cache / "cubin").mkdir(parents=True)
    (cache / "cubin").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert compile_kernel(ROWS).cubin == b"cubin 1"
    assert compile_kernel(ROWS).cubin == b"cubin 2"


def test_a_failing_write_leaves_the_result(cache: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert compile_kernel(ROWS).cubin == b"cubin 1"
    assert not list(cache.rglob("*.cubin"))


def test_processes_that_write_at_once_leave_a_whole_file(cache: Path) -> None:
    """Two processes replace one file as fast as they can: each read gives the content of one of them, or none yet."""
    path = cache / "kernel.cubin"
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from fp8fn.ops.code_cache import write
        for i in range(200):
            write(Path(sys.argv[1]), sys.argv[2].encode() * 100_000)
    """)
    writers = [subprocess.Popen([sys.executable, "-c", script, path, letter]) for letter in "ab"]
    contents = {None, *(letter * 100_000 for letter in (b"a", b"b"))}
    seen: set[bytes | None] = set()
    while any(writer.poll() is None for writer in writers):
        content = read_whole(path)
        assert content in contents
        assert content is not None or not seen - {None}
        seen.add(content)
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert read_whole(path) in contents - {None}
    assert [file.name for file in cache.iterdir()] == ["kernel.cubin"]  # no temporary file is left


def test_the_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("FP8FN_CACHE_DIR", "")
    assert cache_dir() == Path.home() / ".cache" / "fp8fn"
    monkeypatch.delenv("FP8FN_CACHE_DIR")
    assert cache_dir() == Path.home() / ".cache" / "fp8fn"


@needs_nvrtc
def test_what_the_cache_keeps_is_the_machine_code(cache: Path) -> None:
    first = compile_kernel(ROWS)
    assert first.cubin[:4] == b"\x7fELF"
    assert compile_kernel(ROWS) == Compiled(first.cubin, "")


@needs_nvrtc
def test_an_error_of_the_source_is_nvrtcs_log_and_is_not_kept(cache: Path) -> None:
    broken = replace(ROWS, instructions=(Text("int broken() { return missing; }\n"),))
    for _ in range(2):
        with pytest.raises(CompilationError) as error:
            compile_kernel(broken)
        assert 'identifier "missing" is undefined' in str(error.value)
        assert "row_rstd.cu" in str(error.value)
        assert "--gpu-architecture=sm_90a" in str(error.value)
    assert not cache.exists()


@needs_nvrtc
def test_an_error_in_the_file_is_at_the_files_own_line(cache: Path) -> None:
    before = Text("// one\n"), Text("// two\n")
    with pytest.raises(CompilationError, match=r"row_rstd\.cu\(\d+\): error") as error:
        compile_kernel(replace(ROWS, macros=(*ROWS.macros, ("rstd", "(")), instructions=before))
    assert f"does not compile row_rstd.cu with {('--std=c++17',)!r}"[:-2] in str(error.value)
