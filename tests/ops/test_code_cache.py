"""The cache on disk: where it is, who may read and write it, whose files are trusted, what a failing disk leaves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8fn import cli
from fp8fn.ops import code_cache
from fp8fn.ops.code_cache import cache_dir, read_whole, write
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.nvrtc import Compiled
from fp8fn.ops.hip import build
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import Entry, Table

CHIP = Chip("NVIDIA Test", 132)
TABLE = Table(CHIP, {Problem(64, 128, 256): Entry("64x64d2", {"64x64d2": 1.0}, 0.1)})
NOBODY = 65534


@pytest.fixture(autouse=True)
def nothing_said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every test warns anew."""
    code_cache._said.clear()
    with caplog.at_level(logging.WARNING, logger="fp8fn"):
        yield
    code_cache._said.clear()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "cache"))
    table.forget()
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries of the kernels that reach a compiler, NVRTC or clang, which answers with the count of its calls."""
    calls: list[str] = []

    def by_nvrtc(source: str, name: str, *_: Any) -> Compiled:
        calls.append(name)
        return Compiled(b"code %d" % len(calls), "")

    def by_clang(kernel: build.HipKernel) -> bytes:
        calls.append(kernel.entry)
        return b"code %d" % len(calls)

    monkeypatch.setattr(nvrtc, "_compile", by_nvrtc)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(build, "_compile_by_first", by_clang)
    for module in (nvrtc, build):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    return calls


def cuda_kernel() -> bytes:
    return nvrtc.compile_kernel(nvrtc.CudaKernel("row_rstd.cu", "row_rstd", ()), "sm_90a").cubin


def hip_kernel() -> bytes:
    return build.compile_kernel(build.HipKernel("mxfp8_gemv.hip", "mxfp8_gemv", "gfx950"))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    os.umask(before)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Each writes a file and returns it.
WRITERS: dict[str, Callable[[], Path]] = {
    "cubin": lambda: (write(cache_dir() / "cubin" / "k.cubin", b"code"), cache_dir() / "cubin" / "k.cubin")[1],
    "table": lambda: (table.add(CHIP, TABLE.entries, {}), table.user_path(CHIP))[1],
    "export": lambda: (table.write(cache_dir() / "out" / "t.json", TABLE), cache_dir() / "out" / "t.json")[1],
}
writers = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)


@writers
@pytest.mark.parametrize(
    ("mask", "of_file", "of_folder"), [(0o022, 0o644, 0o755), (0o002, 0o644, 0o755), (0o077, 0o600, 0o700)]
)
def test_the_umask_says_who_may_read_and_only_the_owner_may_write(
    writer: Callable[[], Path], mask: int, of_file: int, of_folder: int, umask: Callable[[int], int]
) -> None:
    umask(mask)
    path = writer()
    assert (mode(path), mode(path.parent)) == (of_file, of_folder)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="fp8fn-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mask", "serves"), [(0o022, True), (0o077, False)])
def test_what_root_compiled_serves_a_user_or_the_user_is_told(
    mask: int, serves: bool, public: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch,
    umask: Callable[[int], int], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(public))
    umask(mask)
    (public / "cubin").mkdir(0o755)
    (public / "cubin").chmod(0o755)
    assert cuda_kernel() == b"code 1"
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"this root can't become another user: {error}")
    try:
        assert cuda_kernel() == (b"code 1" if serves else b"code 2")
    finally:
        os.seteuid(0)
    if serves:
        assert said(caplog) == []
    else:
        assert f"{public / 'cubin'} has a kernel that can't be read (Permission denied)" in said(caplog)[0]


def owned_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a file to another user, or, since only root can do that, makes the process another user's."""
    if os.geteuid() == 0:
        try:
            os.chown(path, NOBODY, -1)
        except OSError as error:
            pytest.skip(f"this root can't give files away: {error}")
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)


KERNELS = {"cubin": cuda_kernel, "hip": hip_kernel}
kernels = pytest.mark.parametrize(("folder", "kernel"), KERNELS.items())


@kernels
@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_file_that_others_may_write_is_compiled_anew(
    folder: str, kernel: Callable[[], bytes], bits: int, cache: Path, compiled: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    kernel()
    (file,) = (cache / folder).iterdir()
    file.chmod(0o644 | bits)
    assert [kernel() for _ in range(2)] == [b"code 2"] * 2  # which replaces it by one of our own
    assert said(caplog) == [
        f"{file} may be written by others (mode {0o644 | bits:04o}; chmod go-w would end that): it is not trusted, and "
        "kernels are compiled again in each process; set FP8FN_CACHE_DIR to a folder that only you can write"
    ]
    assert mode(file) == 0o644


@kernels
def test_a_file_of_another_user_is_compiled_anew(
    folder: str, kernel: Callable[[], bytes], cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    kernel()
    (file,) = (cache / folder).iterdir()
    owned_by_another(file, monkeypatch)
    assert kernel() == b"code 2"
    if os.geteuid() == 0:
        assert f"{file} belongs to the user of id {NOBODY}, neither to you nor to root: it is not" in said(caplog)[0]
    assert len(said(caplog)) == 1


@kernels
@pytest.mark.parametrize("fault", ["group", "world", "owner"])
def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    folder: str, kernel: Callable[[], bytes], fault: str, cache: Path, compiled: list[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    kernel()
    (file,) = (cache / folder).iterdir()
    before = file.read_bytes()
    if fault == "owner":
        owned_by_another(cache / folder, monkeypatch)
    else:
        (cache / folder).chmod(0o775 if fault == "group" else 0o757)
    assert [kernel() for _ in range(3)] == [b"code 2", b"code 3", b"code 4"]
    (message,) = said(caplog)  # once
    assert str(cache / folder) in message
    assert "its kernels are not trusted" in message
    assert "FP8FN_CACHE_DIR" in message
    assert file.read_bytes() == before
    assert [path.name for path in (cache / folder).iterdir()] == [file.name]


def test_an_empty_folder_that_others_may_write_gets_no_kernel(
    cache: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "cubin").mkdir(parents=True)
    (cache / "cubin").chmod(0o777)
    cuda_kernel()
    assert list((cache / "cubin").iterdir()) == []
    assert len(said(caplog)) == 1


def test_roots_files_are_trusted(cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_kernel()
    found = os.stat_result((0o100644, 1, 1, 1, 0, 0, 5, 0, 0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert code_cache._fault(Path("k"), found) is None
    for owner, bits, reason in ((1235, 0o644, "1235"), (1234, 0o664, "0664"), (0, 0o646, "0646")):
        other = os.stat_result((0o100000 | bits, 1, 1, 1, owner, 0, 5, 0, 0, 0))
        assert reason in (code_cache._fault(Path("k"), other) or "")


def test_where_files_have_no_owners_they_are_trusted(
    cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, whose modes say 0o666 and 0o777 of everything."""
    monkeypatch.delattr(os, "geteuid")
    cuda_kernel()
    (file,) = (cache / "cubin").iterdir()
    file.chmod(0o666)
    file.parent.chmod(0o777)
    assert cuda_kernel() == b"code 1"


# Disks that fail.


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may have more than 64 KiB: writing more is an error of the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def large_table() -> Table:
    (entry,) = TABLE.entries.values()
    return Table(CHIP, {Problem(m, 128, 256): entry for m in range(1, 1500)})


def test_a_full_disk_leaves_no_file_of_a_kernel(
    small_disk: None, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache / "cubin" / "k.cubin"
    write(path, b"small")
    for size in (1 << 20, 1 << 21):
        write(path, b"x" * size)
    assert read_whole(path) == b"small"
    assert [file.name for file in path.parent.iterdir()] == ["k.cubin"]
    assert said(caplog) == [
        f"{path.parent} can't be written (File too large): kernels are compiled again in each process; set "
        "FP8FN_CACHE_DIR to a folder that only you can write"
    ]


def test_a_full_disk_leaves_no_file_of_a_table(small_disk: None, cache: Path) -> None:
    table.add(CHIP, TABLE.entries, {})
    with pytest.raises(OSError, match="File too large"):
        table.add(CHIP, large_table().entries, {})
    with pytest.raises(OSError, match="File too large"):
        table.write(cache / "tuning" / "export.json", large_table())
    assert sorted(file.suffix for file in (cache / "tuning").iterdir()) == [".json", ".lock"]
    assert table.users(CHIP).entries == TABLE.entries


@writers
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_call_leaves_no_temporary_file(
    writer: Callable[[], Path], call: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with contextlib.suppress(OSError):  # of tables
        writer()
    assert [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


@writers
def test_what_is_written_is_on_disk_before_it_has_its_name(
    writer: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("sync", os.fstat(fd).st_size)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("name", Path(a).stat().st_size)), replace(a, b)))
    size = writer().stat().st_size
    assert done == [("sync", size), ("name", size)]


def test_a_cache_in_the_place_of_a_file_is_said_once(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(3):
        cuda_kernel()
    (message,) = said(caplog)
    assert message.startswith(f"{tmp_path / 'file' / 'cubin'} can't be written (Not a directory)")
    assert "FP8FN_CACHE_DIR" in message


# The folder of the cache.


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user whom no file knows."""
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "FP8FN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FP8FN_CACHE_DIR", "~/x")
    write(cache_dir() / "cubin" / "k.cubin", b"code")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert read_whole(tmp_path / "home" / "x" / "cubin" / "k.cubin") == b"code"


def test_the_default_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FP8FN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_dir() == tmp_path / ".cache" / "fp8fn"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        assert cache_dir() == tmp_path / "elsewhere" / "fp8fn"


@pytest.mark.parametrize("named", [None, "~/x", "~no-such-user/x"])
def test_without_a_home_folder_the_cache_is_among_temporary_files(
    named: str | None, homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if named:
        monkeypatch.setenv("FP8FN_CACHE_DIR", named)
    expected = tmp_path / f"fp8fn-{os.getuid()}"
    assert [cache_dir(), cache_dir()] == [expected] * 2
    (message,) = said(caplog)
    assert message.startswith(f"FP8FN_CACHE_DIR={named} depends" if named else "the cache folder depends")
    assert str(expected) in message
    assert [cuda_kernel() for _ in range(2)] == [b"code 1"] * 2
    assert [path.name for path in tmp_path.iterdir()] == [expected.name]
    assert table.tables(CHIP) == ()


def test_without_the_modules_that_windows_lacks() -> None:
    """`import fp8fn`, a product on the CPU, and tuning's table."""
    code = textwrap.dedent("""
        import os, sys, tempfile, warnings
        import torch, torch._dynamo  # knows Windows by itself
        warnings.filterwarnings("ignore", "only soft file lock")  # filelock has another lock there, by msvcrt
        for name in ("fcntl", "resource", "pwd", "grp", "termios", "triton"):
            sys.modules[name] = None
        for name in ("geteuid", "getuid", "fchmod", "fchown"):
            delattr(os, name)
        os.environ["FP8FN_CACHE_DIR"] = folder = tempfile.mkdtemp()
        import filelock
        def on_its_own_platform(call, real=sys.platform):
            def wrapped(*args, **kwargs):
                sys.platform, found = real, sys.platform
                try:
                    return call(*args, **kwargs)
                finally:
                    sys.platform = found
            return wrapped
        for name in ("acquire", "release"):  # they have other functions on Windows
            setattr(filelock.FileLock, name, on_its_own_platform(getattr(filelock.FileLock, name)))
        sys.platform = "win32"
        import fp8fn
        from fp8fn.ops.code_cache import read_whole, write
        from fp8fn.ops.tuning import table
        from fp8fn.ops.tuning.problem import Problem
        from fp8fn.ops.targets import Chip
        x, w = torch.randn(16, 256), torch.randn(128, 256)
        out = fp8fn.linear(x, w)
        assert (out - x @ w.mT).norm() < 0.1 * out.norm()
        chip, entry = Chip("Test", 1), table.Entry("64x64d2", {"64x64d2": 1.0}, 0.1)
        table.add(chip, {Problem(64, 128, 256): entry}, {})
        table.add(chip, {Problem(64, 128, 512): entry}, {})
        assert [p.k for p in table.tables(chip)[0].entries] == [256, 512]
        path = table.user_path(chip).parent.parent / "cubin" / "k"
        write(path, b"code")
        assert read_whole(path) == b"code"
        sys.platform = "linux"
        print("done")
    """)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


# `aot`, which counts what is there.

AOT = {
    "cubin": ("aot", "--shapes", "8192,6144,4096"),
    "hip": ("aot", "--arch", "gfx950"),
}
aot = pytest.mark.parametrize(("folder", "argv"), AOT.items())


@aot
def test_aot_counts_kernels_and_not_names(
    folder: str, argv: tuple[str, ...], cache: Path, compiled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 0
    files = list((cache / folder).iterdir())
    count = len(files)
    assert count > 2
    where = f"in {cache / folder}"
    assert f"{count} kernels, {count} compiled now, 0 there before, {where}" in capsys.readouterr().out
    files[0].write_bytes(b"damaged")
    (cache / folder / "another").touch()
    del compiled[:]
    assert cli.main(argv) == 0
    assert f"{count} kernels, 1 compiled now, {count - 1} there before, {where}" in capsys.readouterr().out
    assert len(compiled) == 1


@aot
@pytest.mark.parametrize("fault", ["a file", "full", "not trusted"])
def test_aot_fails_where_kernels_are_not_kept(
    folder: str, argv: tuple[str, ...], fault: str, tmp_path: Path, cache: Path, compiled: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "a file":
        cache.touch()
    elif fault == "full":
        monkeypatch.setattr(os, "fsync", full)
    else:
        (cache / folder).mkdir(parents=True)
        (cache / folder).chmod(0o777)
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    count = len(compiled)
    assert count > 2
    where = cache / folder
    assert f"{count} kernels, {count} compiled now, 0 there before, {count} not kept in {where}" in out
    assert f"fp8fn aot: {where} does not keep kernels: set FP8FN_CACHE_DIR to a folder" in err
    (message,) = said(caplog)
    assert str(where) in message
    assert "FP8FN_CACHE_DIR" in message


def test_aot_says_what_does_not_compile(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise nvrtc.CompilationError("NVRTC (13, 0) does not compile scaled_mm.cu")

    monkeypatch.setattr(nvrtc, "_compile", refuse)
    assert cli.main(AOT["cubin"]) == 1
    assert "fp8fn aot: NVRTC (13, 0) does not compile scaled_mm.cu" in capsys.readouterr().err
