"""Compiled code on disk: where it is kept, whose files are trusted, and files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from threading import Lock
from typing import Final

VARIABLE: Final = "FP8FN_CACHE_DIR"
_CHECKSUM_BYTES: Final = 32
_LOG: Final = logging.getLogger("fp8fn")
_said: Final[set[str]] = set()
_saying: Final = Lock()


def cache_dir() -> Path:
    """The folder of compiled kernels and tuned configurations.

    `FP8FN_CACHE_DIR`, else the user's cache folder (on Linux `~/.cache/fp8fn`), else, where the user has no home
    folder, one of the user's own among the temporary files.
    """
    named = os.environ.get(VARIABLE)
    try:
        if not named:
            from platformdirs import user_cache_path

            return _absolute(user_cache_path("fp8fn", appauthor=False))
        return Path(named).expanduser()
    except RuntimeError:  # there is no home folder to expand
        found = _temporary_dir()
        warn_once(
            f"{f'{VARIABLE}={named}' if named else 'the cache folder'} depends on a home folder, and none is known: "
            f"kernels are cached in {found}; set HOME, or {VARIABLE} to an absolute path"
        )
        return found


def read_whole(path: Path) -> bytes | None:
    """The content that `write` wrote; None if the file is missing, unreadable, damaged, or maybe written by others.

    The checksum finds damage and not malice: whoever may write the file may write the checksum too.
    """
    if not _trusted_folder(path.parent):
        return None
    try:
        with open(path, "rb") as file:
            fault = _fault(path, os.fstat(file.fileno()))
            content = file.read()
    except PermissionError as error:
        warn_once(f"{path.parent} has a kernel that can't be read ({error.strerror}): {_remedy()}")
        return None
    except OSError:
        return None
    if fault is not None:
        warn_once(f"{fault}: it is not trusted, and {_remedy()}")
        return None
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return content if _checksum(content) == checksum else None


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, also beside another process that writes the same; where it can't be, a warning says so."""
    if not _trusted_folder(path.parent):  # nothing would be read from there
        return
    try:
        replace_whole(path, content + _checksum(content))  # after the content: tools that read an ELF file still do
    except OSError as error:
        warn_once(f"{path.parent} can't be written ({error.strerror or error}): {_remedy()}")


def replace_whole(path: Path, content: bytes) -> None:
    """Puts a file in the place of what is there, whole or not at all; OSError where it can't, which leaves nothing.

    The umask decides who may read it. Only its owner may write it, and the folder where that is made: a umask of 002,
    which many distributions set, would let a group write both.
    """
    path.parent.mkdir(0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f".fp8fn-{os.urandom(8).hex()}")
    file = open(temporary, "xb", opener=_open_for_owner)  # noqa: SIM115 (what follows an open file has to be undone)
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave the name without the content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def warn_once(message: str) -> None:
    """Warns, unless the process has said just this before."""
    _say_once(logging.WARNING, message)


def info_once(message: str) -> None:
    """Like `warn_once`, for what costs no more than a compilation."""
    _say_once(logging.INFO, message)


def _say_once(level: int, message: str) -> None:
    with _saying:
        new = message not in _said
        _said.add(message)
    if new:
        _LOG.log(level, "%s", message)


def _absolute(path: Path) -> Path:
    """RuntimeError for a path that still begins with `~`, as older releases of platformdirs return it."""
    if not path.is_absolute():
        raise RuntimeError(f"{path} has no home folder")
    return path


def _temporary_dir() -> Path:
    # Others may write beside it; its files are checked for who owns them, like any cached code.
    owner = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir(), f"fp8fn{owner}")


def _trusted_folder(folder: Path) -> bool:
    """Whether code from it may be run; a warning says why not. One that is not there yet will be the user's own."""
    try:
        fault = _fault(folder, folder.stat())
    except OSError:
        return True
    if fault is not None:
        warn_once(f"{fault}: its kernels are not trusted, and {_remedy()}")
    return fault is None


def _fault(path: Path, found: os.stat_result) -> str | None:
    """Why others than the user and root may have written a file or folder, or None: the rule of OpenSSH's StrictModes.

    Windows has access control lists in place of owners and modes, and keeps others out of a user's own folders.
    """
    if not hasattr(os, "geteuid"):
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to the user of id {found.st_uid}, neither to you nor to root"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):04o}; chmod go-w would end that)"
    return None


def _remedy() -> str:
    return f"kernels are compiled again in each process; set {VARIABLE} to a folder that only you can write"


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
