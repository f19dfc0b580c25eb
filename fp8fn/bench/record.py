"""Results on disk: figures with the machine, the versions and the date of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from fp8fn.cli.environment import describe
from fp8fn.ops.code_cache import replace_whole

# The committed results of a checkout. An installed package has none.
RESULTS: Final = Path(__file__).resolve().parents[2] / "docs" / "results"


def environment() -> dict[str, str]:
    """The lines of `python -m fp8fn env` that figures depend on."""
    left_out = ("platform", "C++ compiler", "kernel cache")
    return {key: value for key, value in describe().items() if key not in left_out}


def make(benchmark: str, results: Any, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`results` with their provenance, as `read` returns it: the date and environment of `measured`, or of now."""
    if measured is None:
        measured = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "environment": environment()}
    return {
        "benchmark": benchmark,
        "date": measured["date"],
        "environment": measured["environment"],
        "results": results,
    }


def write(path: str | Path, benchmark: str, results: Any, measured: Mapping[str, Any] | None = None) -> None:
    """Write what `make` returns as JSON. A run that ends meanwhile leaves the file as it was."""
    content = (json.dumps(make(benchmark, results, measured), indent=1) + "\n").encode()
    file = Path(path).resolve()  # a link stays one
    if file.exists() and not file.is_file():  # such as /dev/stdout
        file.write_bytes(content)
    else:
        replace_whole(file, content)


def read(path: str | Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return run


def committed(name: str) -> dict[str, Any]:
    """The committed run `docs/results/NAME.json`. Raises FileNotFoundError outside a checkout."""
    return read(_results_folder() / f"{name}.json")


def all_committed() -> dict[str, dict[str, Any]]:
    """Every committed run by the name of its file. Raises FileNotFoundError outside a checkout."""
    return {path.stem: read(path) for path in sorted(_results_folder().glob("*.json"))}


def _results_folder() -> Path:
    if not RESULTS.is_dir():
        raise FileNotFoundError(f"{RESULTS} does not exist: only a checkout of fp8fn has the committed results")
    return RESULTS
