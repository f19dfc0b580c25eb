"""`Explanation`: what `explain` returns, a line for each product, by its kernel or by why it is left alone."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from math import prod
from textwrap import wrap
from typing import Any, Final

import torch

from fp8fn import terminal
from fp8fn.lowering.costs import size_of
from fp8fn.lowering.missed_weights import Outside
from fp8fn.lowering.whole_step import StepTimes
from fp8fn.ops.tuning.estimate import Times

WIDTH: Final = 100  # columns of the text at most
NARROWEST: Final = 12  # columns that each cell has at least


@dataclass(frozen=True, kw_only=True)
class Row:
    """One product: its node, source line and sizes, and its kernel or the reason to leave it alone.

    `shape` is `(M, N, K)`, or `(E, M, N, K)` for a product of E groups, where M or K sums over the groups; `batch` is
    the number of such products. `backward`: a pattern found it in the backward; other rows are forward products, which
    the backward follows. `estimated` and `measured` are the µs of forward and backward, in FP8 with all
    quantization and in bf16; None if the recipe cannot take the product, or if the time is unknown or was not
    requested. `dtype` is the type in which the model computes the product; in float32 it takes longer than in bf16.
    """

    node: str
    source: str
    op: str
    weight: str
    shape: tuple[int, ...]
    kernel: str | None
    reason: str | None
    batch: int = 1
    backward: bool = False
    estimated: Times | None = None
    measured: Times | None = None
    dtype: torch.dtype | None = None

    @property
    def operations(self) -> float | None:
        """Multiplications and additions of the batch; None where a size is symbolic and has no hint."""
        sizes = [size_of(size) for size in (self.batch, *self.shape[-3:])]
        return None if None in sizes else 2.0 * prod(size for size in sizes if size is not None)

    @property
    def brief(self) -> str:
        """The kernel without its configuration and grid, or the reason without the times, which stand beside it."""
        if self.reason:
            return re.sub(r"\d+ µs in FP8 [^:;]*? and backward by ", "estimated by ", self.reason)
        return re.sub(r"\[[^]]*\]| \w+=\S+|(?<=\()\S+ modelled; ", "", self.kernel or "")


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of `explain`, one for each product of all graphs; `str()` is the table, `repr()` its summary.

    A product of a region that several layers share has a row for each of its calls.
    The table has a section for each kernel and for each reason to leave products alone. Layers that differ only in
    their number share a line: `12x  layers.*.mlp.up.weight`. `chip` is the chip that times are estimated for. `outside`
    lists the weights that no graph contains, below the table. `step` is the estimated time of all products in FP8
    together, where each tensor is quantized once.
    """

    rows: tuple[Row, ...]
    recipe: str
    graphs: int
    chip: str | None = None
    outside: tuple[Outside, ...] = ()
    step: StepTimes | None = None

    @property
    def substituted(self) -> int:
        return sum(row.reason is None for row in self.rows)

    @property
    def share(self) -> float | None:
        """The part of all forward products' operations that is in FP8; None where a size is not known, or all are 0."""
        counts = [(row.operations, row.reason is None) for row in self.rows if not row.backward]
        whole = sum(count or 0.0 for count, _ in counts)
        if not whole or any(count is None for count, _ in counts):
            return None
        return sum(count or 0.0 for count, taken in counts if taken) / whole

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a line for each product, alike or not; ImportError without pandas."""
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as missing:
            raise ImportError("to_dataframe needs pandas: pip install pandas") from missing
        lines = []
        for row in self.rows:
            line = {field.name: getattr(row, field.name) for field in fields(row)}
            line["operations"] = row.operations
            for kind in ("estimated", "measured"):
                times = line.pop(kind)
                line[f"{kind}_bf16_us"] = None if times is None else times.bf16.combined
                line[f"{kind}_fp8_us"] = None if times is None else times.fp8.combined
            lines.append(line)
        return pandas.DataFrame(lines)

    def __str__(self) -> str:
        head, alike = self._head(), self._alike()
        sections: dict[str, list[tuple[str, ...]]] = {}
        for rows in alike:
            outcome = rows[0].brief if rows[0].kernel else f"left alone: {rows[0].brief}"
            sections.setdefault(outcome, []).append(self._cells(rows))
        widths = _narrowed([max(map(len, column)) for column in zip(head, *map(self._cells, alike), strict=True)])
        lines = [_line(head, widths), "  ".join("-" * width for width in widths)]
        for outcome, body in sections.items():
            lines += [*_wrapped(outcome), *(_line(cells, widths) for cells in body)]
        return "\n".join((*lines, *(part for line in self._foot() for part in _wrapped(line))))

    def __repr__(self) -> str:
        return f"Explanation({self._foot()[0]})"

    def _repr_html_(self) -> str:
        """The same in one table for a notebook, whose last column shows all of a kernel or reason under the pointer."""
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in (*self._head(), "kernel, or why not"))]
        for rows in self._alike():
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in self._cells(rows))
            outcome = rows[0].brief if rows[0].kernel else f"- {rows[0].brief}"
            lines.append(f'{cells}<td title="{escape(rows[0].kernel or rows[0].reason or "")}">{escape(outcome)}</td>')
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table>{table}</table>" + "".join(f"<p>{escape(line)}</p>" for line in self._foot())

    def _alike(self) -> list[list[Row]]:
        """Rows that differ only in the number of their layer, together."""
        alike: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            times = [_cell(getattr(row, kind)) for kind in self._times()]
            key = (row.source, _numberless(row.weight), str(row.shape), *times, row.kernel, row.reason)
            alike.setdefault(key, []).append(row)
        return list(alike.values())

    def _head(self) -> tuple[str, ...]:
        sizes = "(E,)M,N,K" if any(len(row.shape) > 3 for row in self.rows) else "M,N,K"
        return ("", "weight, or node", sizes, *(f"{kind}, µs" for kind in self._times()), "source")

    def _cells(self, rows: Sequence[Row]) -> tuple[str, ...]:
        row = rows[0]
        name = _numberless(row.weight) if len(rows) > 1 else row.weight
        times = (_cell(getattr(row, kind)) for kind in self._times())
        return (f"{len(rows)}x", name or row.node, ",".join(map(str, row.shape)), *times, row.source)

    def _foot(self) -> list[str]:
        times = self._times()
        lines = [
            f"{self.substituted} of {len(self.rows)} products in FP8, recipe {self.recipe}, {self.graphs} graph(s)"
        ]
        if 0 < self.substituted < len(self.rows) and self.share is not None:
            lines.append(f"{100 * self.share:.1f} % of the operations of all products are in FP8")
        if times:
            lines.append("µs: forward and backward, bf16 → FP8 with quantization")
            lines[-1] += f", estimated for {self.chip}" if "estimated" in times else ""
        timed = [row for row in self.rows if row.estimated or row.measured]
        if wide := sum(row.dtype == torch.float32 for row in timed):
            lines.append(
                f"{wide} of {len(timed)} timed products are computed in float32, which takes longer than bf16: their "
                "gain is larger than shown"
            )
        if self.step is not None and self.step.products:
            left = " (left alone)" if self.step.loses and not self.substituted else ""
            lines.append(f"whole step{left}: {self.step.describe()}; the rest of the step is not counted")
        missed = Counter((_numberless(weight), reason) for weight, reason in self.outside)
        return lines + [f"{count}x {weight}: {reason}" for (weight, reason), count in missed.items()]

    def _times(self) -> list[str]:
        return [name for name in ("estimated", "measured") if any(getattr(row, name) for row in self.rows)]


def _numberless(weight: str) -> str:
    return re.sub(r"\b\d+\b", "*", weight)


def _cell(times: Times | None) -> str:
    if times is None:
        return ""
    return f"{times.bf16.combined:.0f} → {times.fp8.combined:.0f} ({times.speedup:.2f}x)"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells side by side; of one that is too long, the end."""
    short = (cell if len(cell) <= width else f"…{cell[1 - width :]}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join(map(str.ljust, short, widths)).rstrip()


def _wrapped(sentence: str) -> list[str]:
    return wrap(sentence, _width(), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _width() -> int:
    """`WIDTH`, or the width of a narrower terminal."""
    return min(WIDTH, terminal.columns() or WIDTH)


def _narrowed(widths: list[int]) -> list[int]:
    """Widths that fit, with two blanks between: the source gives first, then the widest of the others."""
    widths = list(widths)
    for _ in range(sum(widths) + 2 * (len(widths) - 1) - _width()):
        widest = max(range(len(widths)), key=lambda i: (widths[i] > NARROWEST, i == len(widths) - 1, widths[i]))
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return widths
