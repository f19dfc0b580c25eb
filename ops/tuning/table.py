"""Tables of measured configurations: the one shipped for a chip, and the user's own in the cache; JSON, one row a line.

A user's file that cannot be read is left out with a warning. It is replaced whole, under a lock, with what is there
merged in: processes that tune at the same time keep each other's rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from fp8fn.ops.code_cache import cache_dir
from fp8fn.ops.cuda.scaled_mm import KINDS
from fp8fn.ops.tuning.candidates import config_of
from fp8fn.ops.tuning.problem import Chip, Problem

FORMAT: Final = 1
PEER: Final = "cublaslt"
SHIPPED: Final[Mapping[Chip, str]] = {Chip("NVIDIA H200", 132): "h200.json"}
COLUMNS: Final = (
    "M", "N", "K", "batch", "a_scale", "b_scale", "a_type", "b_type", "out_type",
    "config", "times_us", "spread_us", "peer_us",
)  # fmt: skip
_FOLDER: Final = Path(__file__).parent
_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class Entry:
    """What was measured of a problem: the configuration chosen, and median µs of each that was timed.

    `spread` is the difference in µs that the measurement can tell, and `peer_us` cuBLASLt's time through PyTorch,
    None where it does not take the operands.
    """

    config: str
    times: Mapping[str, float]
    spread: float
    peer_us: float | None = None

    @property
    def us(self) -> float:
        return self.times[self.config]

    @property
    def peer_wins(self) -> bool:
        return self.peer_us is not None and self.peer_us < self.us - self.spread


@dataclass(frozen=True)
class Table:
    """The entries of one chip, and where they come from: versions and date, as text."""

    chip: Chip
    entries: Mapping[Problem, Entry]
    origin: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Found:
    """An entry, the table it is from, and whether it is of just this problem and not of one with plainer types."""

    entry: Entry
    table: Table
    exact: bool


def lookup(problem: Problem, tables: tuple[Table, ...]) -> Found | None:
    """The entry of the first table that has one, for the problem itself or else with plain types."""
    for table in tables:
        for wanted in (problem, problem.plain()):
            entry = table.entries.get(wanted)
            if entry is not None:
                return Found(entry, table, wanted == problem)
    return None


def tables(chip: Chip | None) -> tuple[Table, ...]:
    """The user's table of a chip, then the shipped one; each is read once in a process."""
    return () if chip is None else _tables(chip, user_path(chip))


@cache
def _tables(chip: Chip, path: Path) -> tuple[Table, ...]:
    found = [_read_users(path, chip)]
    if chip in SHIPPED:
        found.append(read(_FOLDER / SHIPPED[chip]))
    return tuple(table for table in found if table is not None)


def forget() -> None:
    """Reads the files again when they are next asked for."""
    _tables.cache_clear()


def user_path(chip: Chip) -> Path:
    """The user's file for a chip, in `FP8FN_CACHE_DIR`."""
    slug = re.sub(r"[^a-z0-9]+", "-", chip.name.lower()).strip("-")
    return cache_dir() / "tuning" / f"{slug}-{chip.multiprocessors}.json"


def _read_users(path: Path, chip: Chip) -> Table | None:
    try:
        table = read(path)
        if table.chip != chip:
            raise ValueError(f"is of {table.chip}")
        return table
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _LOG.warning("tuning: %s is left out: %s; delete it, or run `python -m fp8fn tune` again", path, error)
        return None


def read(path: Path) -> Table:
    """The table of a file; OSError or ValueError where it is none."""
    return replace(parse(json.loads(path.read_text(encoding="utf-8"))), name=path.name)


def parse(document: Any) -> Table:
    """The table of a file's contents."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("columns") != list(COLUMNS):
        raise ValueError(f"it is no table of format {FORMAT}")
    try:
        chip = Chip(str(document["chip"]), int(document["multiprocessors"]))
        entries = dict(_entry_of_row(row) for row in document["rows"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its contents are off: {type(error).__name__}: {error}") from error
    return Table(chip, entries, document.get("origin", {}))


def _entry_of_row(row: list[Any]) -> tuple[Problem, Entry]:
    m, n, k, batch, a_scale, b_scale, a_type, b_type, out_type, config, times, spread, peer_us = row
    problem = Problem(int(m), int(n), int(k), a_scale, b_scale, int(batch), a_type, b_type, out_type)
    if problem.kinds not in KINDS:
        raise ValueError(f"row {row} has scales of no kind")
    config_of(config)
    entry = Entry(
        config, {str(name): float(us) for name, us in times.items()}, float(spread),
        None if peer_us is None else float(peer_us),
    )  # fmt: skip
    if config not in entry.times:
        raise ValueError(f"row {row} has no time of its configuration")
    return problem, entry


def write(path: Path, table: Table) -> None:
    """Replaces the file whole."""
    rows = sorted(table.entries.items(), key=lambda row: (row[0].kinds, row[0].m, row[0].n, row[0].k, repr(row[0])))
    head = {
        "format": FORMAT, "chip": table.chip.name, "multiprocessors": table.chip.multiprocessors,
        "origin": dict(table.origin), "columns": list(COLUMNS),
    }  # fmt: skip
    lines = ",\n".join("  " + json.dumps(_row_of_entry(problem, entry), ensure_ascii=False) for problem, entry in rows)
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [' + (f"\n{lines}\n " if lines else "") + "]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    try:
        os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def _row_of_entry(problem: Problem, entry: Entry) -> list[Any]:
    return [
        problem.m, problem.n, problem.k, problem.batch, problem.a_scale, problem.b_scale,
        problem.a_type, problem.b_type, problem.out_type,
        entry.config, {name: round(us, 2) for name, us in entry.times.items()}, round(entry.spread, 2),
        None if entry.peer_us is None else round(entry.peer_us, 2),
    ]  # fmt: skip


def add(chip: Chip, entries: Mapping[Problem, Entry], origin: Mapping[str, str]) -> Table:
    """Puts entries into the user's table, before all else that is there by now, and returns it."""
    path = user_path(chip)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        before = _read_users(path, chip)
        table = Table(chip, {**(before.entries if before else {}), **entries}, origin, path.name)
        write(path, table)
    return table


def users(chip: Chip) -> Table:
    """The user's table of a chip as it is on disk now, empty where there is none."""
    return _read_users(user_path(chip), chip) or Table(chip, {})


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the lock; it is the kernel's, so that a process that dies leaves none behind."""
    import fcntl

    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
