"""Checks a wheel: `check_wheel.py WHEEL SOURCE`. It has every file of the package in SOURCE that runs, and is small."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import Final

LARGEST: Final = 1_500_000  # bytes
RUNS: Final = (".cu", ".cuh", ".h", ".hip", ".py", ".typed", "bench/seeds/published.json", "cli/help.json")


def faults(wheel: Path, source: Path) -> list[str]:
    """Faults of a wheel that was built from the files in `source`."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("fp8fn/")}
    wanted = set()
    for folder, _, names in os.walk(source / "fp8fn", followlinks=True):
        paths = {(Path(folder) / name).relative_to(source).as_posix() for name in names}
        wanted |= {path for path in paths if path.endswith(RUNS)}
    found = [f"the wheel lacks {name}" for name in sorted(wanted - held)]
    tables = "fp8fn/ops/tuning/tables/"
    found += [f"the wheel has {name}" for name in sorted(held - wanted) if not name.startswith(tables)]
    if (size := wheel.stat().st_size) > LARGEST:
        found.append(f"the wheel has {size} bytes; at most {LARGEST} are allowed")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path(sys.argv[1]), Path(sys.argv[2]))) or None)
