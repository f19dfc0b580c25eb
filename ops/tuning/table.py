"""Tables of measured configurations: the one shipped for a chip, and the user's own in the cache; JSON, one row a line.

A user's file that cannot be read is left out with a warning, and so is each row that is none: a table changes how fast
a product is, and never whether it runs. The file is replaced whole, under a lock, with what is there merged in:
processes that tune at the same time keep each other's rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar

from fp8fn.ops.code_cache import cache_dir, replace_whole, warn_once
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.gemm.scaled_mm import KINDS, ScaledMmConfig
from fp8fn.ops.cuda.operands import ELEMENT, FP8
from fp8fn.ops.formats import short_name
from fp8fn.ops.kernel import Named
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import Chip, chip_of
from fp8fn.ops.tuning.model import config_of, runs
from fp8fn.ops.tuning.nearest import nearest
from fp8fn.ops.tuning.neighbours import Neighbour, corrected, near
from fp8fn.ops.tuning.problem import Problem, problem_of

FORMAT: Final = 1
PEER: Final = "cublaslt"
SHIPPED: Final[Mapping[Chip, str]] = {
    Chip("NVIDIA H200", 132): "h200.json",
    Chip("NVIDIA H100 80GB HBM3", 132): "h100.json",
}
COLUMNS: Final = (
    "M", "N", "K", "batch", "a_scale", "b_scale", "a_type", "b_type", "out_type",
    "config", "times_us", "spread_us", "peer_us",
)  # fmt: skip
_FOLDER: Final = Path(__file__).parent / "tables"
_LARGEST_SIZE: Final = 2**63 - 1  # a size of a tensor
_FP8: Final = {short_name(dtype): dtype for dtype in FP8}
_OUT: Final = {short_name(dtype): dtype for dtype in ELEMENT}
_users_allowed = True
T = TypeVar("T", bound=Any)  # a table, which has a chip and as many rows as its length


@dataclass(frozen=True)
class Entry:
    """The measurement of a problem: the configuration chosen, and the median µs of each that was timed.

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

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """The entries as neighbours of other problems."""
        cores = self.chip.multiprocessors
        return tuple(Neighbour(problem, entry.times, cores) for problem, entry in self.entries.items())


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
    """The user's table of a chip, then the shipped one that is nearest by facts; each is read once in a process."""
    return () if chip is None else _tables(chip, user_path(chip) if _users_allowed else None)


@contextmanager
def shipped_only() -> Iterator[None]:
    """No product planned inside reads a user's table: what is distributed depends on the shipped ones alone."""
    global _users_allowed
    before, _users_allowed = _users_allowed, False
    try:
        yield
    finally:
        _users_allowed = before


@cache
def _tables(chip: Chip, path: Path | None) -> tuple[Table, ...]:
    found = [None if path is None else read_users(path, chip, read)]
    served = nearest(chip, SHIPPED)
    if served is not None:
        measured_on, difference = served
        table = read(_FOLDER / SHIPPED[measured_on], checked=False)
        found.append(replace(table, name=f"{table.name}{difference}"))
    return tuple(table for table in found if table is not None)


def forget() -> None:
    """Reads the files again when they are next asked for."""
    _tables.cache_clear()


def user_path(chip: Chip) -> Path:
    """The user's file for a chip, in `FP8FN_CACHE_DIR`."""
    slug = re.sub(r"[^a-z0-9]+", "-", chip.name.lower()).strip("-")
    return cache_dir() / "tuning" / f"{slug}-{chip.multiprocessors}.json"


def read_users(
    path: Path, chip: Chip, read: Callable[[Path, list[str]], T], command: str = "python -m fp8fn tune"
) -> T | None:
    """What `read` makes of the user's file for a chip, which `command` writes; None where there is none, or no table.

    `read` appends a sentence to its second argument for each row that it leaves out.
    """
    faults: list[str] = []
    try:
        table = read(path, faults)
        if table.chip != chip:
            raise ValueError(f"it is of {table.chip.name} with {table.chip.multiprocessors} multiprocessors")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warn_once(f"tuning: {path} is left out: {error}; delete it, or run `{command}` again")
        return None
    if faults:
        more = f", and {len(faults) - 1} more rows of it" if len(faults) > 1 else ""
        warn_once(f"tuning: {path}: {faults[0]}; it is left out{more}. Run `{command}` again")
    return table if len(table) or not faults else None


def read_json(path: Path) -> Any:
    """OSError or ValueError where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def read(path: Path, faults: list[str] | None = None, *, checked: bool = True) -> Table:
    """The table of a file; OSError or ValueError where it is none.

    A row that is none is a ValueError too, or a sentence in `faults`, where that is given. Rows of shipped tables are
    `checked` by the tests alone: it takes longer than reading them, in the first product of each process.
    """
    return replace(parse(read_json(path), faults, checked=checked), name=path.name)


def parse(document: Any, faults: list[str] | None = None, *, checked: bool = True) -> Table:
    """The table of a file's contents; `faults` and `checked` as in `read`."""
    if isinstance(document, dict) and isinstance(document.get("op"), str):
        raise ValueError(f"it is a table of `tune --op {document['op']}`, and no table of products in CUDA C++")
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("columns") != list(COLUMNS):
        raise ValueError(f"it is no table of format {FORMAT}")
    name, count, rows, origin = (document.get(key) for key in ("chip", "multiprocessors", "rows", "origin"))
    if not isinstance(name, str) or not _is_size(count) or not isinstance(rows, list):
        raise ValueError("it needs a chip, a number of multiprocessors, and a list of rows")
    entries: dict[Problem, Entry] = {}
    for number, row in enumerate(rows, 1):
        fault = _fault_of_row(row) if checked else None
        if fault is None:
            problem, entry = _entry_of_row(row)
            entries[problem] = entry
        elif faults is None:
            raise ValueError(f"row {number} {fault}")
        else:
            faults.append(f"row {number} {fault}")
    return Table(Chip(name, count), entries, origin if isinstance(origin, dict) else {})


def _fault_of_row(row: Any) -> str | None:
    """Why a row is none, to go on after "row 3 ", or None."""
    if not isinstance(row, list) or len(row) != len(COLUMNS):
        return f"is no list of {len(COLUMNS)} values"
    cells = dict(zip(COLUMNS, row, strict=True))
    for column in ("M", "N", "K", "batch"):
        if not _is_size(cells[column]):
            return f"has {_shown(cells[column])} as {column}, which has to be a positive whole number"
    kinds = [cells["a_scale"], cells["b_scale"]]
    if kinds not in [list(known) for known in KINDS]:
        return f"has scales of no kind: {_shown(kinds)}"
    for column, types in (("a_type", _FP8), ("b_type", _FP8), ("out_type", _OUT)):
        if cells[column] not in list(types):  # a list: what is in a file need not have a hash
            return f"has {_shown(cells[column])} as {column}, which has to be one of {', '.join(sorted(types))}"
    times, spread, peer_us = cells["times_us"], cells["spread_us"], cells["peer_us"]
    if not isinstance(times, dict) or not all(map(is_time, times.values())):
        return f"has {_shown(times)} as times_us, which have to be positive numbers"
    if not _is_number(spread) or spread < 0:
        return f"has {_shown(spread)} as spread_us, which has to be a number of at least 0"
    if peer_us is not None and not is_time(peer_us):
        return f"has {_shown(peer_us)} as peer_us, which has to be null or a positive number"
    if not isinstance(cells["config"], str) or cells["config"] not in times:
        return f"has no time of its configuration {_shown(cells['config'])}"
    try:
        configs = {name: config_of(name) for name in times}
    except ValueError as error:
        return f"has a time of no configuration: {error!s:.80}"
    problem = _problem_of_row(row)
    for name, config in configs.items():
        if not runs(problem, config):
            of = "the configuration" if name == cells["config"] else "a time of"
            return f"has {of} {name}, in which the kernel can't multiply its problem"
    return None


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _LARGEST_SIZE


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; NaN and infinity are not less than 1e300."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_time(value: Any) -> bool:
    """Whether a value is a positive number."""
    return _is_number(value) and value > 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _problem_of_row(row: list[Any]) -> Problem:
    m, n, k, batch, a_scale, b_scale, a_type, b_type, out_type, *_ = row
    return Problem(m, n, k, a_scale, b_scale, batch, _FP8[a_type], _FP8[b_type], _OUT[out_type])


def _entry_of_row(row: list[Any]) -> tuple[Problem, Entry]:
    """The problem and the entry of a row without a fault."""
    *_, config, times, spread, peer_us = row
    found = {name: float(us) for name, us in times.items()}
    return _problem_of_row(row), Entry(config, found, float(spread), None if peer_us is None else float(peer_us))


def write(path: Path, table: Table) -> None:
    """Replaces the file whole; OSError where it can't be written."""
    rows = sorted(table.entries.items(), key=lambda row: (row[0].kinds, row[0].m, row[0].n, row[0].k, repr(row[0])))
    head = {
        "format": FORMAT,
        "chip": table.chip.name,
        "multiprocessors": table.chip.multiprocessors,
        "origin": dict(table.origin),
        "columns": list(COLUMNS),
    }
    lines = ",\n".join("  " + json.dumps(_row_of_entry(problem, entry), ensure_ascii=False) for problem, entry in rows)
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [' + (f"\n{lines}\n " if lines else "") + "]\n}\n"
    replace_whole(path, text.encode())


def _row_of_entry(problem: Problem, entry: Entry) -> list[Any]:
    return [
        problem.m, problem.n, problem.k, problem.batch, problem.a_scale, problem.b_scale,
        short_name(problem.a_type), short_name(problem.b_type), short_name(problem.out_type),
        entry.config, {name: _rounded(us) for name, us in entry.times.items()}, round(entry.spread, 2),
        None if entry.peer_us is None else _rounded(entry.peer_us),
    ]  # fmt: skip


def _rounded(us: float) -> float:
    """To 10 ns, and never to the 0 that no row may have."""
    return max(round(us, 2), 0.01)


def add(chip: Chip, entries: Mapping[Problem, Entry], origin: Mapping[str, str]) -> Table:
    """Puts entries into the user's table, before all else that is there by now, and returns it."""
    from filelock import FileLock  # which imports asyncio

    path = user_path(chip)
    path.parent.mkdir(0o755, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # the system's own: a process that dies leaves none behind
        before = read_users(path, chip, read)
        table = Table(chip, {**(before.entries if before else {}), **entries}, origin, path.name)
        write(path, table)
    return table


def users(chip: Chip) -> Table:
    """The user's table of a chip as it is on disk now, empty where there is none."""
    return read_users(user_path(chip), chip, read) or Table(chip, {})


@dataclass(frozen=True)
class Measured:
    """The configuration that a table has for a problem, the table's name, and whether cuBLASLt was the faster one."""

    config: ScaledMmConfig
    source: str
    peer_wins: bool = False


def measured(problem: Problem, known: tuple[Table, ...]) -> Measured | None:
    """The entry of the first of the `known` tables that has the problem, else what its neighbours in them say."""
    found = lookup(problem, known)
    if found is not None:
        # With other types than those measured the library may do otherwise, the tile does not.
        return Measured(config_of(found.entry.config), found.table.name, found.exact and found.entry.peer_wins)
    others = beside(problem, known)
    return None if others is None else Measured(config_of(next(iter(others.times))), others.source)


@dataclass(frozen=True)
class Beside:
    """The µs of each candidate of a problem that no table has, the fastest first, and which tables are to know them."""

    times: Mapping[str, float]
    source: str


def beside(problem: Problem, known: tuple[Table, ...]) -> Beside | None:
    """The times of a problem by those of the `known` tables near it; the first table's row of a problem counts."""
    found: list[Neighbour] = []
    names = []
    for number, table in enumerate(known):
        rows = [other for other in table.neighbours if near(problem, other.problem)]
        names += [table.name] * bool(rows)
        found += [row for row in rows if not any(row.problem in before.entries for before in known[:number])]
    if not found:
        return None
    return Beside(corrected(problem, found, known[0].chip.multiprocessors), f"shapes near it in {' and '.join(names)}")


def named(product: ScaledProduct) -> Named | None:
    """The kernel and the configuration that a table of the product's chip names."""
    known = tables(product.chip or chip_of(product.a.data.device, product.target))
    found = measured(problem_of(product), known) if known else None
    if found is None:
        return None
    if found.peer_wins and cublaslt.allowed() and cublaslt.accepts(product) is None:
        return Named("cublaslt", found.source, lambda config: config)
    return Named("cuda", found.source, lambda _: found.config)
