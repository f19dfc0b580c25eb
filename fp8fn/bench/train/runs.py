"""Figures on disk: a run for each machine, commit and setting, with a row for each variant."""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import fp8fn
from fp8fn.bench import record
from fp8fn.bench.train.variants import BF16
from fp8fn.timing import reason

_KEY: Final = ("device", "commit", "setting")
_FACTS: Final = frozenset({*_KEY, "date", "environment", "rows"})


def revision() -> str:
    """The commit of a clean checkout; a digest of the package's sources where git does not know them."""
    package = Path(fp8fn.__file__).parent
    git = ["git", "-C", str(package.parent)]
    try:
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return f"sources {_digest(package)}"
    return f"sources {_digest(package)}" if changed.stdout.strip() else f"commit {head.stdout.strip()}"


def _digest(package: Path) -> str:
    found = hashlib.sha256()
    folders = (package, *(package / name for name in ("ops", "meta", "lowering")))
    for folder in folders:  # the last three are links, which rglob does not follow
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".json"):
                found.update(path.read_bytes())
    return found.hexdigest()[:10]


def key_of(device: str, commit: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that two runs must share to be one."""
    return {"device": device, "commit": commit, "setting": dict(setting)}


def read_runs(path: Path, benchmark: str) -> list[dict[str, Any]]:
    """The runs of a file; ValueError where the benchmark did not write it."""
    try:
        document = record.read(path)
        written_by = document["benchmark"]
        runs: list[dict[str, Any]] = document["results"]["runs"] if written_by == benchmark else []
        missing = {name for run in runs for name in _FACTS - run.keys()}
        missing |= {"variant" for run in runs for row in run.get("rows", ()) if "variant" not in row}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file that bench {benchmark} wrote ({reason(error)})") from error
    if written_by != benchmark:
        raise ValueError(f"{path} has results of bench {written_by}")
    if missing:
        raise ValueError(f"{path} is no file that bench {benchmark} wrote (a run has no {', '.join(sorted(missing))})")
    return runs


def check_file(parser: argparse.ArgumentParser, path: Path | None, benchmark: str) -> None:
    """Ends with the parser's error where the file of `--json` exists and the benchmark did not write it."""
    try:
        _former(path, benchmark)
    except ValueError as error:
        parser.error(f"--json: {error}; name another file, or one that does not exist yet")


def _former(path: Path | None, benchmark: str) -> list[dict[str, Any]]:
    """The runs of a file to go on from; none where it does not exist or is empty."""
    return read_runs(path, benchmark) if path is not None and path.exists() and path.stat().st_size else []


class Runs:
    """The runs of a file, and the one that this command adds rows to."""

    def __init__(self, path: Path | None, key: Mapping[str, Any], benchmark: str = "train") -> None:
        self.path, self.benchmark = path, benchmark
        self.runs = _former(path, benchmark)
        same = [run for run in self.runs if all(run[name] == value for name, value in key.items())]
        if same:
            self.run = same[0]
        else:
            self.run = {**key, "rows": []}
            self.runs.append(self.run)
        self.run["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        self.run["environment"] = record.environment()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.run["rows"])

    def finished(self) -> set[str]:
        """The variants with times, and those that can't run on this machine."""
        return {row["variant"] for row in self.rows if "rounds" in row or "unavailable" in row}

    def put(self, row: dict[str, Any]) -> None:
        """Add a row in the place of the variant's former one, and write the file."""
        rows: list[dict[str, Any]] = self.run["rows"]
        places = [index for index, each in enumerate(rows) if each["variant"] == row["variant"]]
        if places:
            rows[places[0]] = row
        else:
            rows.append(row)
        self.write()

    def restore(self, variant: str, former: dict[str, Any] | None) -> None:
        """Put a variant's former row back, or remove the variant where it had none."""
        rows = [former if row["variant"] == variant else row for row in self.run["rows"]]
        self.run["rows"] = [row for row in rows if row is not None]
        self.write()

    def write(self) -> None:
        if self.path is not None:
            record.write(self.path, self.benchmark, {"runs": self.runs})


def merge(path: Path, others: Sequence[Path], benchmark: str) -> list[dict[str, Any]]:
    """Add the runs of other files to a file, and return all of it.

    Two runs of one machine, commit and setting become one; of a variant that both have, the other file's row is kept.
    The file's date and environment become those of its newest run: nothing was measured where this is called.
    Raises ValueError, before anything is written, for a file that the benchmark did not write.
    """
    found = _former(path, benchmark)
    for run in [run for other in others for run in read_runs(other, benchmark)]:
        same = [each for each in found if all(each[name] == run[name] for name in _KEY)]
        if not same:
            found.append(run)
            continue
        rows = {row["variant"]: row for row in (*same[0]["rows"], *run["rows"])}
        same[0].update({**run, "rows": list(rows.values())})
    newest = max(reversed(found), key=lambda run: run["date"], default=None)
    record.write(path, benchmark, {"runs": found}, measured=newest)
    return found


def milliseconds(row: Mapping[str, Any], figure: str) -> float | None:
    """The median over rounds of `"forward_backward_ms"` or `"step_ms"`, or None for a row without times."""
    rounds = row.get("rounds")
    return statistics.median(each[figure] for each in rounds) if rounds else None


def speedup(row: Mapping[str, Any], figure: str, over: str = BF16) -> float | None:
    """The median over rounds of the time of `over` in the same round by the row's; None without such pairs.

    A round holds the times of bf16 and of torchao's recipes beside the row's own.
    """
    ratios = [each["beside"][over][figure] / each[figure] for each in row.get("rounds", ()) if over in each["beside"]]
    return statistics.median(ratios) if ratios else None


def best_torchao(row: Mapping[str, Any], figure: str) -> float | None:
    """The speedup over torchao's fastest recipe in the same rounds."""
    names = {name for each in row.get("rounds", ()) for name in each["beside"] if name.startswith("torchao:")}
    ratios = [ratio for name in names if (ratio := speedup(row, figure, name)) is not None]
    return min(ratios) if ratios else None


def round_rows(times: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """A round's entry for each variant: the median of its calls, and those of the variants it is compared with."""
    medians = {
        name: {figure: statistics.median(calls) for figure, calls in found.items()} for name, found in times.items()
    }
    beside = {name: found for name, found in medians.items() if name == BF16 or name.startswith("torchao:")}
    return {name: {**found, "beside": beside} for name, found in medians.items()}
