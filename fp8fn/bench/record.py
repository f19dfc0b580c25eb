"""A result on disk: figures with the machine, the versions and the date that they belong to."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from fp8fn.environment import describe


def write(path: str, benchmark: str, results: Any) -> None:
    """Writes `results` with their provenance as JSON."""
    environment = {key: value for key, value in describe().items() if key not in ("platform", "C++ compiler")}
    record = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "environment": environment,
        "results": results,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
