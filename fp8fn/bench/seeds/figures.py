"""The figures of a run, by part and shape, and Markdown tables with columns that compare them with published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fp8fn.bench import tables
from fp8fn.bench.measure import Row
from fp8fn.bench.seeds.protocols import SEEDS, Shape
from fp8fn.bench.seeds.published import Published, published


class Figures(NamedTuple):
    """What a run measured for a seed.

    `rows`: by part, by the seed's own shape, by label; a row's `shape` is the measured one, which is smaller on a CPU.
    `published`: None where the shapes are scaled down, so that nothing can be compared. `device`: the name of the GPU.
    """

    rows: Mapping[str, Mapping[Shape, Mapping[str, Row]]]
    published: Published | None
    device: str = ""

    def row(self, part: str, shape: Shape, label: str) -> Row | None:
        """A row with a time, or None."""
        found = self.rows.get(part, {}).get(shape, {}).get(label)
        return found if found is not None and found.us is not None else None

    def us(self, part: str, shape: Shape, label: str) -> float | None:
        """Microseconds of a call."""
        found = self.row(part, shape, label)
        return None if found is None else found.us

    def given(self, source: str, of: str, figure: str) -> float | None:
        """A published figure, if it may be compared with."""
        return None if self.published is None else self.published.figure(source, of, figure)

    def measured(self, part: str, shapes: Iterable[Shape]) -> list[Shape]:
        return [shape for shape in shapes if shape in self.rows.get(part, {})]


def of_run(run: Mapping[str, Any], seed: str) -> Figures:
    found: dict[str, dict[Shape, dict[str, Row]]] = {part: {} for part in SEEDS[seed].parts}
    for entry in run["rows"]:
        if entry["seed"] == seed and entry["part"] in found:
            rows = [_right(Row.of_json(row)) for row in entry["rows"]]
            found[entry["part"]][tuple(entry["shape"])] = {row.label: row for row in rows}
    return Figures(found, None if run["setting"]["scaled_down"] else published(), run["device"])


def _right(row: Row) -> Row:
    """A row whose result is wrong has no time: a kernel that computes something else is not faster."""
    if not row.wrong:
        return row
    return replace(row, us=None, graph_us=None, rate=None, unavailable=f"a wrong result, under {row.snr_bar_db:g} dB")


class Column(NamedTuple):
    """A column of a table; with `compares`, it holds published figures, and is left out where nothing is compared."""

    header: str
    cell: Callable[[Any], str]
    compares: bool = False


def table(figures: Figures, items: Iterable[Any], columns: Sequence[Column]) -> str:
    """A Markdown table with a line for each item; empty without items."""
    shown = [column for column in columns if figures.published is not None or not column.compares]
    body = [[column.cell(item) for column in shown] for item in items]
    return tables.markdown(body, [column.header for column in shown]) if body else ""


def significant(value: float | None) -> str:
    """Three significant digits, and whole numbers from 1000 on."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".removesuffix(".")


def ratio(slower: float | None, faster: float | None) -> str:
    """How many times as fast: `slower` over `faster`."""
    return f"{slower / faster:.2f}x" if slower and faster else ""


def change(before: float | None, after: float | None, form: str = "{:.1f}") -> str:
    """`before → after`, or the one of them that there is."""
    return " → ".join(form.format(value) for value in (before, after) if value is not None)


def sizes(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def paragraphs(*parts: str) -> str:
    """The parts that are not empty, with a blank line between."""
    return "\n\n".join(filter(None, parts))
