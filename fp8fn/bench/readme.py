"""The README's tables from the committed results: `python -m fp8fn bench readme [--check]`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8fn.bench import record
from fp8fn.bench.overhead import BARS
from fp8fn.bench.tables import provenance

RESULTS: Final = Path(__file__).parent / "results"


def overhead(run: dict[str, Any]) -> str:
    """Microseconds of a call, of its work alone, and the difference beside its bar."""
    lines = ["| call | µs | its work alone | above it | bar |", "|---|---|---|---|---|"]
    names = {"quantize": "`torch.ops.fp8fn.quantize`", "gemm": "`fp8fn.gemm`, no_grad"}
    for name, row in run["results"].items():
        times = " | ".join(f"{row[key]:.1f}" for key in ("call_us", "work_us", "extra_us"))
        lines.append(f"| {names[name]} | {times} | {BARS[name]:.0f} |")
    return "\n".join([*lines, "", provenance(run)])


class Table(NamedTuple):
    """What stands between `<!-- marker -->` and `<!-- /marker -->`, from a file of `results/`."""

    marker: str
    result: str
    make: Callable[[dict[str, Any]], str]


# The tables of the README, each with the committed run that it is made from.
TABLES: Final = (Table("overhead", "overhead.json", overhead),)


def rewritten(text: str, tables: Sequence[Table] = TABLES) -> str:
    """The README with its tables made anew."""
    for marker, result, make in tables:
        parts = re.split(rf"(<!-- /?{marker} -->\n)", text)
        if len(parts) != 5:
            raise ValueError(f"README needs one place between <!-- {marker} --> and <!-- /{marker} -->")
        text = f"{parts[0]}{parts[1]}{make(record.read(RESULTS / result))}\n{parts[3]}{parts[4]}"
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
