"""The loop of `python -m fp8fn tune`: one problem after another, each kept before the next one starts.

A problem that can't be measured (its operands don't fit in memory, or none of its candidates runs) is reported, and the
problems after it are tuned all the same. A kernel's wrong access may end the whole process, so that a file beside the
table names the problem at hand: that at which an earlier run ended comes last in the next one.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from fp8fn.ops.code_cache import VARIABLE
from fp8fn.ops.tuning.sweep import Clock
from fp8fn.timing import reason

_Problem = TypeVar("_Problem")
_Row = TypeVar("_Row")

_PROBE_S = 0.01  # of products, after a failure: does the device still work?


class NotKept(RuntimeError):
    """The user's table can't be written; the message says where it is, and what to do."""


@dataclass(frozen=True)
class Outcome:
    """How many problems are not tuned now, and why some of these failed: a line each."""

    left: int
    failures: tuple[str, ...] = ()

    def tell(self, program: str) -> int:
        """Prints the failures, and returns the command's exit status: 1 where there is one."""
        for failure in self.failures:
            print(f"{program}: {failure}", file=sys.stderr)
        return int(bool(self.failures))


def each(
    todo: Sequence[_Problem], name: Callable[[_Problem], str], measure: Callable[[_Problem], _Row],
    keep: Callable[[_Problem, _Row], object], clock: Clock, path: Path, budget: float | None = None,
) -> Outcome:  # fmt: skip
    """Measures and keeps each problem of `todo`, with a progress bar; none begins when `budget` seconds are over.

    A device that works no more after a failure ends the loop. Raises NotKept where `path`, the table, can't be written.
    """
    from tqdm import tqdm

    ended = _Ended(path)
    began, left, failures = time.perf_counter(), len(todo), []
    with tqdm(total=len(todo), unit="product", disable=not todo) as bar:
        for problem in sorted(todo, key=lambda problem: name(problem) in ended.names):  # those come last
            if budget is not None and time.perf_counter() - began >= budget:
                break
            bar.set_description(name(problem))
            ended.begin(name(problem))
            failure = None
            try:
                row = measure(problem)
            except RuntimeError as error:
                failure = f"{name(problem)} is not tuned: {reason(error)}"
            except KeyboardInterrupt:  # no fault of the problem
                ended.over(name(problem))
                raise
            if failure is not None:
                failures.append(failure)
                if (dead := _device_fault(clock)) is not None:
                    failures.append(
                        f"the device has failed ({dead}): run the command again, which has this product last"
                    )
                    break
            ended.over(name(problem))
            if failure is None:
                _kept(path, partial(keep, problem, row))
                left -= 1
            _free()
            bar.update()
    return Outcome(left, tuple(failures))


class _Ended:
    """The problems at which earlier processes ended, by name, and the file that names this process's problem."""

    def __init__(self, table: Path) -> None:
        self._pattern = f"{table.stem}.*.at"
        self._folder, self._file = table.parent, table.with_name(f"{table.stem}.{os.getpid()}.at")
        self.names = {text for _, text in self._files()}

    def _files(self) -> Iterator[tuple[Path, str]]:
        """The files of processes that have ended, each with its problem's name."""
        for file in self._folder.glob(self._pattern):
            pid = file.suffixes[-2].removeprefix(".")
            if file == self._file or not (pid.isdecimal() and Path("/proc", pid).exists()):
                with suppress(OSError):
                    yield file, file.read_text(encoding="utf-8", errors="replace")

    def begin(self, name: str) -> None:
        with suppress(OSError):  # where nothing can be written the table can't either, which `_kept` says
            self._folder.mkdir(0o755, parents=True, exist_ok=True)
            self._file.write_text(name, encoding="utf-8")

    def over(self, name: str) -> None:
        """The process did not end at the problem."""
        for file, text in [*self._files(), (self._file, name)]:
            if text == name:
                with suppress(OSError):
                    file.unlink()


def _kept(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        why = f"{path} can't be written ({error.strerror or error})"
        raise NotKept(f"{why}: set {VARIABLE} to a folder that you can write") from error


def _device_fault(clock: Clock) -> str | None:
    """Why the device works no more, or None."""
    try:
        _free()
        clock.warm(_PROBE_S)
    except RuntimeError as error:
        return reason(error)
    return None


def _free() -> None:
    """Frees the operands of the last problem, up to 15 GB."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
