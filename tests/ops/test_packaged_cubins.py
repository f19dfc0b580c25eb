"""Kernels from `fp8fn-cubins`: when its cubins are taken, what makes one unfit, and what is said of that."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn import cli
from fp8fn.cli import environment
from fp8fn.ops import code_cache
from fp8fn.ops.cuda.runtime import driver, launch, nvrtc, packaged
from fp8fn.ops.cuda.runtime.nvrtc import Compiled, compile_kernel
from support.compilers import needs_nvrtc
from support.cubins import ARCH, install, use
from support.stub_driver import ROWS

OTHER = replace(ROWS, macros=(*ROWS.macros, ("OTHER", 1)))
CUBIN = b"\x7fELF machine code"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that reach NVRTC, which answers with their count."""
    calls: list[Any] = []

    def compile_(*args: Any) -> Compiled:
        calls.append(args)
        return Compiled(b"compiled %d" % len(calls), "log")

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    return calls


def forget_sources() -> None:
    nvrtc._headers.cache_clear()
    nvrtc.sources_hash.cache_clear()


@pytest.fixture
def changed(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Changes sources and options after the package was made; they are read again."""
    with pytest.MonkeyPatch.context() as patch:
        forget_sources()
        yield patch
    forget_sources()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The messages at INFO and above, with nothing said before."""
    code_cache._said.clear()
    with caplog.at_level(logging.INFO, logger="fp8fn"):
        yield caplog
    code_cache._said.clear()


@pytest.fixture
def folder(
    tmp_path: Path, cache: Path, compiled: list[Any], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder of an installed package that has the cubin of `ROWS`, beside an empty cache."""
    found = install(tmp_path / "site", {ROWS: CUBIN})
    use(tmp_path / "site", monkeypatch)
    yield found
    packaged.forget()


def messages(said: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in said.records]


def cubin_of(kernel: nvrtc.CudaKernel) -> bytes:
    return compile_kernel(kernel, ARCH).cubin


def test_a_kernel_comes_from_the_package_and_nothing_is_compiled_or_written(
    folder: Path, cache: Path, compiled: list[Any], said: pytest.LogCaptureFixture
) -> None:
    assert compile_kernel(ROWS, ARCH) == Compiled(CUBIN, "", packaged=True)
    assert not compiled
    assert not cache.exists()
    assert not said.records
    assert packaged.PACKAGE not in sys.modules


def test_the_users_cache_comes_first(folder: Path, compiled: list[Any]) -> None:
    nvrtc.compile_into_cache(ROWS, ARCH)
    assert cubin_of(ROWS) == b"compiled 1"


def test_a_kernel_that_the_package_lacks_is_compiled_without_a_word(
    folder: Path, compiled: list[Any], said: pytest.LogCaptureFixture
) -> None:
    assert cubin_of(OTHER) == b"compiled 1"
    assert compile_kernel(ROWS, "sm_100a").cubin == b"compiled 2"
    assert not said.records


def test_verbose_compiles(folder: Path) -> None:
    assert compile_kernel(ROWS, ARCH, verbose=True).log == "log"


@pytest.mark.parametrize("name", ["row_rstd.cu", "row_sum.cuh", "scaled_mm.cu"])
def test_a_changed_source_is_a_miss_that_is_said_once(
    name: str, folder: Path, said: pytest.LogCaptureFixture, changed: pytest.MonkeyPatch
) -> None:
    """Also the source of another kernel: the package belongs to one version of all."""
    text = nvrtc._text
    changed.setattr(nvrtc, "_text", lambda file: text(file) + "//" * (file == name))
    assert cubin_of(ROWS) == b"compiled 1"
    assert cubin_of(OTHER) == b"compiled 2"
    ((level, message),) = messages(said)
    assert level == "INFO"
    assert "fp8fn-cubins 1.2.3 is not used" in message
    assert "made from the kernels of another version of fp8fn" in message
    assert "pip install -U 'fp8fn[cubins]'" in message


def test_a_changed_option_of_all_kernels_is_a_miss(folder: Path, changed: pytest.MonkeyPatch) -> None:
    changed.setattr(nvrtc, "_OPTIONS", ("--std=c++20",))
    assert cubin_of(ROWS) == b"compiled 1"


def test_machine_code_of_another_nvrtc_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 9))
    assert cubin_of(ROWS) == CUBIN


@pytest.mark.parametrize(("cuda", "taken"), [(None, True), ("13.0", True), ("14.2", True), ("12.8", False)])
def test_drivers_of_an_earlier_cuda_get_none_of_it(
    cuda: str | None, taken: bool, folder: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cubin_of(ROWS) == (CUBIN if taken else b"compiled 1")
    reasons = [message for _, message in messages(said)]
    assert len(reasons) == (not taken)
    assert all("made for drivers of CUDA 13 and later, and PyTorch is built for CUDA 12.8" in each for each in reasons)
    assert all(each.endswith("; a PyTorch for CUDA 13 uses it") for each in reasons)  # no other release would serve


def test_a_driver_that_refuses_the_machine_code_is_a_warning_and_the_kernel_is_compiled(
    folder: Path, compiled: list[Any], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []

    def load(cubin: bytes, entry: str, shared: int, device: int) -> int:
        loaded.append(cubin)
        if cubin == CUBIN:
            raise driver.DriverError(f"loading {entry}: device kernel image is invalid")
        return 7

    monkeypatch.setattr(driver, "load_function", load)
    assert launch.function_of.__wrapped__(ROWS, ARCH, 0, 0) == 7
    assert loaded == [CUBIN, b"compiled 1"]
    ((level, message),) = messages(said)
    assert level == "WARNING"
    assert "does not load kernels of fp8fn-cubins (loading row_rstd: device kernel image is invalid)" in message
    assert "FP8FN_CUBINS=0" in message
    assert launch.function_of.__wrapped__(ROWS, ARCH, 0, 0) == 7  # from the cache
    assert loaded[2:] == [b"compiled 1"]


def test_a_driver_that_refuses_what_was_compiled_is_an_error(
    cache: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> int:
        raise driver.DriverError("out of memory")

    monkeypatch.setattr(driver, "load_function", load)
    with pytest.raises(driver.DriverError, match="out of memory"):
        launch.function_of.__wrapped__(ROWS, ARCH, 0, 0)
    assert len(compiled) == 1


@pytest.mark.parametrize("damage", [b"", CUBIN[:-1], CUBIN + b"\0", b"\x7fELF machine cope"])
def test_a_damaged_cubin_is_a_warning_and_compiled(
    damage: bytes, folder: Path, compiled: list[Any], said: pytest.LogCaptureFixture
) -> None:
    (file,) = folder.glob("*.cubin")
    file.write_bytes(damage)
    assert cubin_of(ROWS) == b"compiled 1"
    assert cubin_of(ROWS) == b"compiled 1"  # from the cache by now
    ((level, message),) = messages(said)
    assert level == "WARNING"
    assert f"{file} is damaged" in message
    assert "pip install --force-reinstall --no-deps fp8fn-cubins==1.2.3" in message


def test_a_missing_cubin_is_a_warning_and_compiled(folder: Path, said: pytest.LogCaptureFixture) -> None:
    (file,) = folder.glob("*.cubin")
    file.unlink()
    assert cubin_of(ROWS) == b"compiled 1"
    assert [level for level, _ in messages(said)] == ["WARNING"]


@pytest.mark.parametrize(
    "document",
    [
        "", "{", "[]", "\0", '{"format": 2}', '{"format": 1}',
        '{"format": 1, "fp8fn": "1", "sources": "", "NVRTC": [13, 0], "arch": "", "kernels": []}',
        '{"format": 1, "fp8fn": "1", "sources": "", "NVRTC": "13.0", "arch": "", "kernels": {}}',
        '{"format": 1, "fp8fn": "1", "sources": "", "NVRTC": [13], "arch": "", "kernels": {}}',
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_a_warning_and_kernels_are_compiled(
    document: str, folder: Path, said: pytest.LogCaptureFixture
) -> None:
    (folder / packaged.MANIFEST).write_text(document)
    assert cubin_of(ROWS) == b"compiled 1"
    assert cubin_of(OTHER) == b"compiled 2"
    ((level, message),) = messages(said)
    assert level == "WARNING"
    assert str(folder / packaged.MANIFEST) in message


def test_without_the_package_nothing_changes(
    tmp_path: Path, cache: Path, compiled: list[Any], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch)
    assert cubin_of(ROWS) == b"compiled 1"
    assert len(list((cache / "cubin").iterdir())) == 1
    assert not said.records
    assert packaged.describe(nvrtc.sources_hash()) == "not installed"
    packaged.forget()


def test_the_variable_leaves_the_package_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8FN_CUBINS", "0")
    assert cubin_of(ROWS) == b"compiled 1"
    assert environment.describe()["fp8fn-cubins"] == "left out by FP8FN_CUBINS=0"
    monkeypatch.setenv("FP8FN_CUBINS", "1")
    assert cubin_of(OTHER) == b"compiled 2"
    assert environment.describe()["fp8fn-cubins"].startswith("1.2.3, ")


def test_env_says_what_is_there_and_why_it_is_not_used(folder: Path, changed: pytest.MonkeyPatch) -> None:
    assert environment.describe()["fp8fn-cubins"] == "1.2.3, 1 kernels for sm_90a by NVRTC 13.0"
    cubin_of(OTHER)
    assert environment.describe()["kernel cache"].endswith("cubin, 1 kernels")
    changed.setattr(nvrtc, "_OPTIONS", ())
    forget_sources()
    found = environment.describe()["fp8fn-cubins"]
    assert found == "1.2.3, not used: it was made from the kernels of another version of fp8fn"


def test_the_log_says_where_each_kernel_came_from(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        for kernel in (ROWS, OTHER, OTHER):
            cubin_of(kernel)
    assert [record.getMessage() for record in caplog.records] == [
        "kernel row_rstd comes from fp8fn-cubins",
        "kernel row_rstd comes from NVRTC",
        "kernel row_rstd comes from the cache",
    ]


def test_writing_again_gives_the_same_files_and_removes_the_others(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "scaled_mm-0.cubin").touch()
    assert install(folder.parent, {ROWS: CUBIN}) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert json.loads(before[packaged.MANIFEST]) == {
        "format": 1, "fp8fn": "1.2.3", "sources": nvrtc.sources_hash(), "NVRTC": [13, 0], "arch": ARCH,
        "kernels": {nvrtc.cubin_name(ROWS, ARCH): hashlib.sha256(CUBIN).hexdigest()},
    }  # fmt: skip


def test_the_package_replaces_no_cubins_that_are_not_its_own(
    tmp_path: Path, cache: Path, compiled: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the user's cache, whose files have names of the same form."""
    kept = tmp_path / "mine.cubin"
    kept.write_bytes(CUBIN)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["aot", "--shapes", "128,128,128", "--recipe", "rowwise", "--out", str(tmp_path)])
    assert "has 1 cubins, such as mine.cubin, and no manifest.json" in capsys.readouterr().err
    assert not compiled
    assert kept.read_bytes() == CUBIN


def test_importing_fp8fn_looks_for_no_package(folder: Path) -> None:
    script = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        import fp8fn
        from fp8fn.ops.cuda.runtime import packaged
        assert packaged._installed.cache_info().currsize == 0
        assert packaged.installed().version == "1.2.3"
        assert "fp8fn_cubins" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script, folder.parent], check=True)


def test_two_processes_read_at_once(folder: Path) -> None:
    """Neither compiles, writes or waits for the other."""
    script = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from fp8fn.ops.cuda.runtime import nvrtc
        nvrtc.version = lambda: (13, 0)
        nvrtc._compile = None
        kernel = nvrtc.CudaKernel(sys.argv[2], sys.argv[3], tuple(eval(sys.argv[4])))
        print({nvrtc.compile_kernel(kernel, "sm_90a").cubin for _ in range(50)})
    """)
    command = [sys.executable, "-c", script, str(folder.parent), ROWS.file, ROWS.entry, repr(ROWS.macros)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [reader.communicate()[0].strip() for reader in readers] == [repr({CUBIN})] * 2
    assert [reader.returncode for reader in readers] == [0, 0]


@needs_nvrtc
def test_aot_fills_the_cache_also_beside_the_package(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `aot` compiles may be copied to a machine that has no package."""
    site = tmp_path / "site"
    (site / packaged.PACKAGE).mkdir(parents=True)
    shapes = ["--shapes", "4096,4096,4096"]
    assert cli.main(["aot", *shapes, "--out", str(site / packaged.PACKAGE), "--recipe", "tensorwise"]) == 0
    assert not cache.exists()
    use(site, monkeypatch)
    assert cli.main(["aot", *shapes, "--recipe", "tensorwise"]) == 0
    assert "compiled now, 0 there before" in capsys.readouterr().out
    assert {path.name.split("-")[0] for path in (cache / "cubin").iterdir()} == {"amax", "quantize", "scaled_mm"}
    packaged.forget()
