"""The folder that a conversion writes to: locked, and with whole files only."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

UNFINISHED: Final = ".unfinished"
_LOCK: Final = ".fp8fn-convert.lock"
# The system's errors for a full disk and an exceeded quota.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Make the folder and lock it against other conversions; afterwards remove the folders made here that are empty."""
    from filelock import FileLock, Timeout, UnixFileLock

    made = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    path = output / _LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"another convert is writing to {output}; wait until it has ended, or name another folder"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            (output / UNFINISHED).rmdir()
        # POSIX removes the file while the lock is held: later it could be the next holder's. Windows can't remove an
        # open file.
        early = isinstance(lock, UnixFileLock)
        with suppress(OSError):
            if early:
                path.unlink()
        lock.release()
        with suppress(OSError):
            if not early:
                path.unlink(missing_ok=True)
            if made:
                output.rmdir()


@contextmanager
def complete_file(target: Path) -> Iterator[BinaryIO]:
    """A file that gets the name `target` once it is whole and on the disk. If writing fails, no file has the name."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):  # left by a run that was killed
        left.unlink(missing_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            free = shutil.disk_usage(target.parent).free
            raise OSError(
                error.errno,
                f"{error.strerror} ({free / 2**20:,.0f} MiB are free there); make room and run the same command again "
                "to resume",
                str(target),
            ) from error
        raise
