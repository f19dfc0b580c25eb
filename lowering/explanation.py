"""`Explanation`: what `explain` returns, a line for each product, by its kernel or by why it is left alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html import escape

from fp8fn.lowering.missed_weights import Outside
from fp8fn.lowering.whole_step import StepTimes
from fp8fn.ops.tuning.estimate import Times


@dataclass(frozen=True, kw_only=True)
class Row:
    """One product: its node, source line and sizes, and its kernel or the reason to leave it alone.

    `shape` is `(M, N, K)`, or `(E, M, N, K)` for a product of E groups, where M or K sums over the groups. `estimated`
    and `measured` are the µs of forward and backward, in FP8 with all quantization and in bf16; None if the recipe
    cannot take the product, or if the time is unknown or was not requested.
    """

    node: str
    source: str
    op: str
    weight: str
    shape: tuple[int, ...]
    kernel: str | None
    reason: str | None
    estimated: Times | None = None
    measured: Times | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of `explain`, one for each product of all graphs; `str()` is the table, `repr()` its summary.

    In the table, layers that differ only in their number share a line: `layers.*.mlp.up.weight`, `12x`. `chip` is the
    chip that times are estimated for. `outside` lists the weights that no graph contains, below the table. `step` is
    the estimated time of all products in FP8 together, where each tensor is quantized once.
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

    def __str__(self) -> str:
        head, body = self._table()
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        rule = tuple("-" * width for width in widths)
        lines = ["  ".join(map(str.ljust, line, widths)) for line in (head, rule, *body)]
        return "\n".join(line.rstrip() for line in (*lines, *self._foot()))

    def __repr__(self) -> str:
        return f"Explanation({self._foot()[0]})"

    def _repr_html_(self) -> str:
        """The same table for a notebook."""
        head, body = self._table()
        lines = [("th", head), *(("td", line) for line in body)]
        table = "".join(
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>" for tag, line in lines
        )
        return f"<table>{table}</table>" + "".join(f"<p>{escape(line)}</p>" for line in self._foot())

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The header, and a line for each group of equal products."""
        times = self._times()
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            outcome = row.kernel or f"- {row.reason}"
            name = re.sub(r"\b\d+\b", "*", row.weight)
            cells = [_cell(getattr(row, kind)) for kind in times]
            alike.setdefault((row.source, name, ",".join(map(str, row.shape)), *cells, outcome), []).append(row)
        body = [
            (rows[0].node, f"{len(rows)}x", source, rows[0].weight if len(rows) == 1 else name, *rest)
            for (source, name, *rest), rows in alike.items()
        ]
        sizes = "(E,)M,N,K" if any(len(row.shape) > 3 for row in self.rows) else "M,N,K"
        head = ("node", "", "source", "weight", sizes, *(f"{kind}, µs" for kind in times), "kernel, or why not")
        return head, body

    def _foot(self) -> list[str]:
        times = self._times()
        lines = [
            f"{self.substituted} of {len(self.rows)} products in FP8, recipe {self.recipe}, {self.graphs} graph(s)"
        ]
        if times:
            lines.append("µs: forward and backward, bf16 → FP8 with quantization")
            lines[-1] += f", estimated for {self.chip}" if "estimated" in times else ""
        if self.step is not None and self.step.products:
            left = " (left alone)" if self.step.loses and not self.substituted else ""
            lines.append(f"whole step{left}: {self.step.describe()}; the rest of the step is not counted")
        missed = Counter((re.sub(r"\b\d+\b", "*", weight), reason) for weight, reason in self.outside)
        return lines + [f"{count}x {weight}: {reason}" for (weight, reason), count in missed.items()]

    def _times(self) -> list[str]:
        return [name for name in ("estimated", "measured") if any(getattr(row, name) for row in self.rows)]


def _cell(times: Times | None) -> str:
    if times is None:
        return ""
    return f"{times.bf16.combined:.0f} → {times.fp8.combined:.0f} ({times.speedup:.2f}x)"
