"""Tables that fit the terminal on which they are printed; a file, a pipe or a notebook gets whole lines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final

_BETWEEN: Final = 2  # blanks between columns
_BESIDE: Final = 2  # blanks that tabulate adds to a header


def columns() -> int | None:
    """The width of the terminal that the output goes to; None if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def fitted(rows: Sequence[Sequence[str]], headers: Sequence[str], alignment: Sequence[str] | None = None) -> str:
    """The table of tabulate, with cells that are wrapped between words where the terminal is narrower."""
    from tabulate import tabulate

    given: dict[str, Any] = {"disable_numparse": True, "colalign": alignment}
    width = columns()
    if width is None or not rows:
        return str(tabulate(rows, headers, **given))
    parts = list(zip(headers, *rows, strict=True))
    widths = [max(len(header) + _BESIDE, *map(len, cells)) for header, *cells in parts]
    least = [max(_longest(header) + _BESIDE, *map(_longest, cells)) for header, *cells in parts]
    for _ in range(sum(widths) + _BETWEEN * (len(widths) - 1) - width):
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[widest] <= least[widest]:
            break
        widths[widest] -= 1
    above = [max(1, each - _BESIDE) for each in widths]
    return str(tabulate(rows, headers, **given, maxcolwidths=widths, maxheadercolwidths=above))


def _longest(cell: str) -> int:
    return max(map(len, cell.split()), default=0)
