"""The folder in which tests keep what they compile: equal inputs are found again, others and damaged files are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.nvrtc import Compiled, CudaKernel
from support import build_cache, cuda_emulator

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="libraries are compiled by g++")
OPTIONS = ["-std=c++17", "-shared", "-fPIC"]
SOURCE = '#include "middle.h"\nextern "C" int answer() { static int calls = 0; return VALUE + 100 * calls++; }\n'
HEADERS = {"middle.h": '# include "value.h"', "value.h": "#define VALUE 1", "unrelated.h": "#error not included"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8FN_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that compile, as they are run."""
    build_cache.host_compiler()
    run, commands = subprocess.run, []

    def recorded(command: Any, **given: Any) -> Any:
        commands.append([str(part) for part in command])
        return run(command, **given)

    monkeypatch.setattr(subprocess, "run", recorded)
    return commands


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def answer(source: str = SOURCE, headers: dict[str, str] = HEADERS, options: list[str] = OPTIONS) -> int:
    return build_cache.library(source, headers, options).answer()


@needs_compiler
def test_an_equal_library_is_compiled_once(folder: Path, commands: list[list[str]]) -> None:
    assert [answer(), answer()] == [1, 1]  # and each has variables of its own
    assert len(commands) == len(files(folder)) == 1
    answer(headers={**HEADERS, "unrelated.h": "#error changed"})
    assert len(commands) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"source": SOURCE.replace("VALUE", "VALUE + 1")}, 2),
        ({"headers": {**HEADERS, "value.h": "#define VALUE 3"}}, 3),
        ({"headers": {**HEADERS, "middle.h": "#define VALUE 4"}}, 4),
        ({"options": [*OPTIONS, "-O1"]}, 1),
        ({"source": SOURCE.replace("VALUE", "MORE"), "options": [*OPTIONS, "-DMORE=6"]}, 6),
    ],
    ids=["source", "header of a header", "header", "option", "macro"],
)
def test_a_change_is_compiled(changed: dict[str, Any], expected: int, folder: Path, commands: list[list[str]]) -> None:
    assert answer() == 1
    assert answer(**changed) == expected
    assert len(commands) == 2


@needs_compiler
def test_libraries_share_no_variables(folder: Path) -> None:
    """Nor variables of inline functions and of headers, of which g++ makes one for all libraries of a process."""
    source = """
    inline int calls[SIZE];
    inline int counted() { static int times = 0; return ++times; }
    extern "C" int answer() { return 10 * counted() + ++calls[SIZE - 1]; }
    """
    sizes = (1, 1 << 24, 1)  # the last element of the second lies far behind the first's
    assert [answer(source, options=[*OPTIONS, f"-DSIZE={size}"]) for size in sizes] == [11, 11, 11]


@needs_compiler
def test_another_compiler_compiles_again(
    folder: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer()
    monkeypatch.setattr(build_cache, "host_compiler", lambda: ("g++ 99",))
    answer()
    assert len(commands) == 2


@needs_compiler
def test_another_object_is_linked_again(folder: Path, commands: list[list[str]]) -> None:
    source = '#include "value.h"\nint value();\nextern "C" int answer() { return value() + VALUE; }\n'
    for value in (1, 2, 1):
        text = f"int value() {{ return {value}; }}\n"
        linked = build_cache.compiled(text, {}, ["-fPIC", "-c"])
        assert build_cache.library(source, HEADERS, OPTIONS, linked).answer() == value + 1
    assert len(commands) == 4


@needs_compiler
@pytest.mark.parametrize("damage", ["one byte", "cut off", "empty"])
def test_a_damaged_file_is_compiled_again(damage: str, folder: Path, commands: list[list[str]]) -> None:
    answer()
    (path,) = files(folder)
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "one byte": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "cut off": content[:middle],
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    assert answer() == 1
    assert len(commands) == 2
    assert path.read_bytes() == content
    assert answer() == 1
    assert len(commands) == 2


@needs_compiler
def test_a_source_that_does_not_compile_is_not_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            answer("no C++")
    assert not files(folder)


@needs_compiler
def test_without_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP8FN_TEST_CACHE", str(tmp_path / "file"))
    assert [answer(), answer()] == [1, 1]
    build_cache.prune()


def test_an_include_that_names_no_file() -> None:
    with pytest.raises(AssertionError, match="names no file"):
        build_cache.reached("#define NAME <value.h>\n#include NAME\n", HEADERS)


@needs_compiler
@pytest.mark.parametrize("where", ["sources of the library", "headers of the emulator", "macros"])
def test_the_emulator_sees_a_change(
    where: str, folder: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = CudaKernel("probe.cu", "probe", (("N", 1),))
    texts = {"probe.cu": 'extern "C" __global__ void probe(int* out) { *out = N; }\n'}
    monkeypatch.setattr(nvrtc, "_text", lambda name: texts[name])
    monkeypatch.setattr(nvrtc, "_headers", dict)
    emulator = tmp_path / "emulator"
    shutil.copytree(cuda_emulator.FOLDER, emulator)
    (emulator / "runtime.cuh").write_text('#define RUNTIME\n#include "cuda.h"\n')
    monkeypatch.setattr(cuda_emulator, "FOLDER", emulator)
    monkeypatch.setattr(cuda_emulator, "_built", cuda_emulator._built.__wrapped__)
    cuda_emulator._built(kernel)
    cuda_emulator._built(kernel)
    assert len(commands) == 2  # the emulator's own functions, and the kernel
    if where == "sources of the library":
        texts["probe.cu"] = texts["probe.cu"].replace("N;", "N + 1;")
    elif where == "macros":
        kernel = replace(kernel, macros=(("N", 2),))
    else:
        with (emulator / "cuda.h").open("a") as file:
            file.write("inline int changed;\n")
    cuda_emulator._built(kernel)
    assert len(commands) == (4 if where == "headers of the emulator" else 3)


def test_machine_code_is_found_by_all_that_it_depends_on(folder: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    version = [(13, 0)]

    def compile_source(*args: Any) -> Compiled:
        calls.append(args)
        return Compiled(b"code %d" % len(calls), "0 bytes spill stores")

    compiled = build_cache.by_content(compile_source, lambda: version)
    source, options = '#include "value.h"\n', ("--std=c++17", "-DN=1")
    first = compiled(source, "k.cu", HEADERS, options)
    assert first == Compiled(b"code 1", "0 bytes spill stores")
    assert compiled(source, "k.cu", {**HEADERS, "unrelated.h": ""}, options) == first
    others = [
        (source + " ", "k.cu", HEADERS, options),
        (source, "other.cu", HEADERS, options),
        (source, "k.cu", {**HEADERS, "value.h": "#define VALUE 2"}, options),
        (source, "k.cu", HEADERS, (*options, "--ptxas-options=-v")),
        (source, "k.cu", HEADERS, ("--std=c++17", "-DN=2")),
    ]
    assert len({compiled(*other).cubin for other in others}) == len(others)
    version[0] = (13, 1)
    assert compiled(source, "k.cu", HEADERS, options) != first
    assert len(calls) == 2 + len(others)


def test_a_refused_source_is_refused_each_time(folder: Path) -> None:
    def refuse(*args: Any) -> Compiled:
        raise nvrtc.CompilationError("no")

    compiled = build_cache.by_content(refuse, lambda: 1)
    for _ in range(2):
        with pytest.raises(nvrtc.CompilationError):
            compiled("", "k.cu", {}, ())
    assert not files(folder)


def test_two_processes_that_write_one_file(folder: Path) -> None:
    """Whoever reads finds a whole file, whichever was written last."""
    code = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from support import build_cache
        for i in range(200):
            (path,) = [build_cache.folder() / "kind" / "file"]
            build_cache._write(path, sys.argv[2].encode() * 50_000)
            assert build_cache._read(path) is not None
    """)
    tests = str(Path(build_cache.__file__).parents[1])
    writers = [subprocess.Popen([sys.executable, "-c", code, tests, letter]) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    (path,) = files(folder)
    assert build_cache._read(path) in (b"a" * 50_000, b"b" * 50_000)


def test_old_files_and_too_many_are_removed(folder: Path) -> None:
    now = time.time()
    for name, days in (("a", 20), ("b", 3), ("c", 2), ("d", 1)):
        build_cache._write(folder / "kind" / name, bytes(968))  # and 32 of the checksum
        os.utime(folder / "kind" / name, (now - days * 86400,) * 2)
    build_cache.prune()
    assert [path.name for path in files(folder)] == ["b", "c", "d"]
    assert build_cache._read(folder / "kind" / "b") is not None  # which makes it the one used last
    build_cache.prune(largest=2000)
    assert [path.name for path in files(folder)] == ["b", "d"]


def test_files_of_one_triton_kernel_are_removed_together(folder: Path) -> None:
    for name, days in (("a.json", 20), ("a.cubin", 1), ("b.json", 20), ("b.cubin", 19)):
        path = folder / "triton" / f"HASH{name[0]}" / name
        build_cache._write(path, b"code")
        os.utime(path, (time.time() - days * 86400,) * 2)
    build_cache.prune()
    assert [path.name for path in files(folder)] == ["a.cubin", "a.json"]


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FP8FN_TEST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert build_cache.folder() == tmp_path / "fp8fn-tests"
    monkeypatch.setenv("FP8FN_TEST_CACHE", str(tmp_path / "named"))
    assert build_cache.folder() == tmp_path / "named"


def test_this_run_keeps_its_caches_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert torch.compiler.config.cache_key_tag == os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] != ""
    assert os.environ["TRITON_CACHE_DIR"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert nvrtc._compile.__module__ == build_cache.__name__
