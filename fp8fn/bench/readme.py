"""The README's tables from the committed results: `python -m fp8fn bench readme [--check]`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8fn.bench.overhead import BARS

RESULTS = Path(__file__).parent / "results"


def tables() -> dict[str, str]:
    """Markdown for each marked place of the README."""
    return {"bench": dense_table(_load("dense")), "overhead": overhead_table(_load("overhead"))}


def dense_table(run: dict[str, Any]) -> str:
    """A row for each case, a column for each shape; TFLOP/s, and TB/s over the bytes that have to move."""
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in run["results"]))
    cells: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
    for row in run["results"]:
        cells.setdefault(row["case"], {})[tuple(row["shape"])] = row
    lines = ["| M,N,K | " + " | ".join(",".join(map(str, shape)) for shape in shapes) + " |"]
    lines.append("|---" * (len(shapes) + 1) + "|")
    for case, by_shape in cells.items():
        unit = next(iter(by_shape.values()))["unit"]
        digits = 0 if unit == "TFLOP/s" else 2
        lines.append(f"| {case}, {unit} | " + " | ".join(f"{by_shape[s]['rate']:.{digits}f}" for s in shapes) + " |")
    return "\n".join([*lines, "", _provenance(run)])


def overhead_table(run: dict[str, Any]) -> str:
    lines = ["| call | µs | its work alone | above it | bar |", "|---|---|---|---|---|"]
    names = {"quantize": "`torch.ops.fp8fn.quantize`", "gemm": "`fp8fn.gemm`, no_grad"}
    for name, row in run["results"].items():
        times = " | ".join(f"{row[key]:.1f}" for key in ("call_us", "work_us", "extra_us"))
        lines.append(f"| {names[name]} | {times} | {BARS[name]:.0f} |")
    return "\n".join([*lines, "", _provenance(run)])


def rewritten(text: str) -> str:
    """The README with its tables made anew."""
    for name, table in tables().items():
        parts = re.split(rf"(<!-- /?{name} -->\n)", text)
        if len(parts) != 5:
            raise ValueError(f"README needs one place between <!-- {name} --> and <!-- /{name} -->")
        text = f"{parts[0]}{parts[1]}{table}\n{parts[3]}{parts[4]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites README.md in this folder; with --check, only says whether it would change."""
    parser = argparse.ArgumentParser(prog="fp8fn bench readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where a table is stale")
    args = parser.parse_args(argv)
    path = Path("README.md")
    text = path.read_text(encoding="utf-8")
    new = rewritten(text)
    if args.check:
        print("README.md is up to date" if new == text else "README.md is stale: python -m fp8fn bench readme")
        return int(new != text)
    path.write_text(new, encoding="utf-8")
    return 0


def _load(name: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return run


def _provenance(run: dict[str, Any]) -> str:
    environment = run["environment"]
    device = environment.get("cuda:0 device", environment["cpu device"])
    return f"{device}; torch {environment['torch']}, Triton {environment['triton']}; {run['date']}."
