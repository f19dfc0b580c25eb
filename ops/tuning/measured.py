"""Tables of what was measured of an op's problems on a chip: the fastest kernel and its configuration; JSON.

As `table.py` has it: the user's file in the cache comes before a shipped one, each is read once in a process, a file
that cannot be read and a row that is none are left out with a warning, and a file is replaced whole, under a lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Final

from fp8fn.ops.code_cache import replace_whole
from fp8fn.ops.kernel import Named
from fp8fn.ops.kernel import forget as forget_choices
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning.nearest import nearest
from fp8fn.ops.tuning.table import is_time, read_json, read_users
from fp8fn.ops.tuning.table import user_path as dense_path

FORMAT: Final = 1
_VALUES: Final = ("kernel", "config", "times_us", "spread_us")
_LARGEST_SIZE: Final = 2**31
_FOLDER: Final = Path(__file__).parent / "tables"

Key = tuple[Any, ...]


def none_pruned(_: Any) -> Mapping[str, str]:
    """A form's `pruned` where all candidates are timed."""
    return {}


@dataclass(frozen=True, eq=False)
class Form:
    """The contents of an op's table.

    Args:
        op: the name of the op.
        keys: the names of the values that a row is found by.
        problem: the problem of a row's values on a chip; ValueError where they are none.
        candidates: the configurations in which each kernel, by name, computes a problem, the kernel's own first.
        pruned: the candidates that are not timed, by name, each with the reason.
        handicap: how much faster than the others each kernel, by name, has to be, as 1.03, where it has to.
        known: the configurations that a row may have, if these are more than the candidates.
    """

    op: str
    keys: tuple[str, ...]
    problem: Callable[[Key, Chip], Any]
    candidates: Callable[[Any], Mapping[str, Sequence[Any]]]
    pruned: Callable[[Any], Mapping[str, str]] = none_pruned
    handicap: Mapping[str, float] = field(default_factory=dict)
    known: Callable[[Any], Mapping[str, Collection[Any]]] | None = None

    @property
    def columns(self) -> list[str]:
        return [*self.keys, *_VALUES]


@dataclass(frozen=True)
class Row:
    """The fastest kernel and its configuration, the median µs of all that were timed, and what they have to differ by.

    The times are by the names of `candidate_name`.
    """

    kernel: str
    config: Any
    times: Mapping[str, float]
    spread: float

    @property
    def us(self) -> float:
        return self.times[candidate_name(self.kernel, self.config)]


@dataclass(frozen=True)
class Table:
    """The rows of one op on one chip, and where they come from: versions, date and command, as text."""

    form: Form
    chip: Chip
    rows: Mapping[Key, Row]
    origin: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    def __len__(self) -> int:
        return len(self.rows)


@lru_cache(maxsize=4096)
def options_of(config: Any) -> Any:
    """The fields of a configuration as JSON has them; not to be changed."""
    return json.loads(json.dumps(asdict(config)))


def _is_named(config: Any, options: Any) -> bool:
    """Whether a row's options are the configuration's; what the fp8fn that wrote it did not have is its default."""
    if not isinstance(options, dict) or not options:
        return False
    own = options_of(config)
    unsaid = [each for each in fields(config) if each.name not in options]
    return bool({**own, **options} == own) and all(getattr(config, each.name) == each.default for each in unsaid)


def candidate_name(kernel: str, config: Any) -> str:
    return f"{kernel} {config}"


def lookup(form: Form, chip: Chip, key: Key) -> tuple[Row, str] | None:
    """The row of the first table of a chip that has one, and the table's name."""
    for table in tables(form, chip):
        if key in table.rows:
            return table.rows[key], table.name
    return None


def verdict(form: Form, chip: Chip | None, key: Key | None) -> Named | None:
    """The kernel that a chip's tables name for a key, or None; `chip` or `key` is None where no table applies."""
    found = None if chip is None or key is None else lookup(form, chip, key)
    if found is None:
        return None
    row, table = found
    return Named(row.kernel, table, lambda _: row.config)


def tables(form: Form, chip: Chip) -> tuple[Table, ...]:
    """The user's table of a chip, then the shipped one of a chip with the same facts."""
    return _tables(form, chip, user_path(form, chip))


@cache
def _tables(form: Form, chip: Chip, path: Path) -> tuple[Table, ...]:
    found = [_read_users(form, path, chip), _shipped(form, chip, _FOLDER / path.name)]
    return tuple(table for table in found if table is not None)


def _shipped(form: Form, chip: Chip, own: Path) -> Table | None:
    """The table in the chip's own file, else that of a chip with as many multiprocessors and the same memory.

    One of another memory serves no op here: what it would cost was not measured, as it was for `table.tables`.
    """
    if own.exists():
        return read(form, own)
    found = {table.chip: table for table in (read(form, path) for path in sorted(_FOLDER.glob(f"{form.op}-*.json")))}
    served = nearest(chip, found)
    return found[served[0]] if served is not None and not served[1] else None


def forget() -> None:
    """Reads the files again when they are next asked for."""
    _tables.cache_clear()
    forget_choices()


def user_path(form: Form, chip: Chip) -> Path:
    """The user's file for an op on a chip, in `FP8FN_CACHE_DIR`."""
    path = dense_path(chip)
    return path.with_name(f"{form.op}-{path.name}")


def users(form: Form, chip: Chip) -> Table:
    """The user's table as it is on disk now, empty where there is none."""
    return _read_users(form, user_path(form, chip), chip) or Table(form, chip, {})


def _read_users(form: Form, path: Path, chip: Chip) -> Table | None:
    return read_users(path, chip, partial(read, form), f"python -m fp8fn tune --op {form.op}")


def read(form: Form, path: Path, faults: list[str] | None = None) -> Table:
    """The table of a file; OSError or ValueError where it is none.

    A row that is none is a ValueError too, or a sentence in `faults`, where that is given.
    """
    return replace(parse(form, read_json(path), faults), name=path.name)


def parse(form: Form, document: Any, faults: list[str] | None = None) -> Table:
    """The table of a file's contents; `faults` as in `read`."""
    head = {"format": FORMAT, "op": form.op, "columns": form.columns}
    if not isinstance(document, dict) or any(document.get(key) != value for key, value in head.items()):
        raise ValueError(f"it is no table of {form.op} of format {FORMAT}")
    name, count, rows, origin = (document.get(key) for key in ("chip", "multiprocessors", "rows", "origin"))
    if not isinstance(name, str) or type(count) is not int or count < 1 or not isinstance(rows, list):
        raise ValueError("it needs a chip, a number of multiprocessors, and a list of rows")
    found: dict[Key, Row] = {}
    for number, values in enumerate(rows, 1):
        try:
            key, row = _row(form, Chip(name, count), values)
            found[key] = row
        except (TypeError, ValueError) as error:
            if faults is None:
                raise ValueError(f"row {number} {error}") from error
            faults.append(f"row {number} {error}")
    return Table(form, Chip(name, count), found, origin if isinstance(origin, dict) else {})


def _row(form: Form, chip: Chip, values: Any) -> tuple[Key, Row]:
    """ValueError where it is none, to go on after "row 3 "."""
    if not isinstance(values, list) or len(values) != len(form.columns):
        raise ValueError(f"is no list of {len(form.columns)} values")
    *keys, kernel, options, times, spread = values
    key = tuple(tuple(value) if isinstance(value, list) else value for value in keys)
    configs = (form.known or form.candidates)(form.problem(key, chip))
    if kernel not in list(configs):
        raise ValueError(f"has the kernel {kernel!r:.40}, which is not one of {', '.join(configs)}")
    config = next((config for config in configs[kernel] if _is_named(config, options)), None)
    if config is None:
        raise ValueError(f"has the configuration {options!r:.160}, in which {kernel} can't multiply its problem")
    if not isinstance(times, dict) or not all(map(is_time, times.values())):
        raise ValueError(f"has {times!r:.80} as times_us, which have to be positive numbers")
    if candidate_name(kernel, config) not in times:
        raise ValueError(f"has no time of its configuration {candidate_name(kernel, config)}")
    if spread != 0 and not is_time(spread):
        raise ValueError(f"has {spread!r:.80} as spread_us, which has to be a number of at least 0")
    return key, Row(kernel, config, {str(name): float(us) for name, us in times.items()}, float(spread))


def check_sizes(**sizes: Any) -> None:
    """ValueError where one is no positive whole number, to go on after "row 3 "."""
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size < _LARGEST_SIZE:
            raise ValueError(f"has {size!r:.40} as {name}, which has to be a positive whole number")


def write(path: Path, table: Table) -> None:
    """Replaces the file whole; OSError where it can't be written."""
    head = {
        "format": FORMAT,
        "op": table.form.op,
        "chip": table.chip.name,
        "multiprocessors": table.chip.multiprocessors,
        "origin": dict(table.origin),
    }
    rows = [_values(key, row) for key, row in sorted(table.rows.items(), key=lambda row: repr(row[0]))]
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "columns": {json.dumps(table.form.columns)}'
    text += ',\n "rows": [' + (f"\n{lines}\n " if lines else "") + "]\n}\n"
    replace_whole(path, text.encode())


def _values(key: Key, row: Row) -> list[Any]:
    times = {name: max(round(us, 3), 0.001) for name, us in row.times.items()}
    return [*key, row.kernel, options_of(row.config), times, round(row.spread, 3)]


def add(table: Table) -> Table:
    """Puts rows into the user's table, before all else that is there by now, and returns it."""
    from filelock import FileLock  # which imports asyncio

    path = user_path(table.form, table.chip)
    path.parent.mkdir(0o755, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        before = _read_users(table.form, path, table.chip)
        merged = replace(table, rows={**(before.rows if before else {}), **table.rows}, name=path.name)
        write(path, merged)
    return merged
