"""Results as tables: for the terminal, one shape at a time, and in Markdown for `docs/`.

A function for Markdown takes a run as `record.read` returns it. Its text ends with the machine, versions and date.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fp8fn.bench.accuracy import worst
from fp8fn.bench.llm84 import Pair, Times, pairs
from fp8fn.bench.measure import SNR_BAR_DB, Row
from fp8fn.bench.shapes import LLM84
from fp8fn.terminal import fitted


def rows_of(run: dict[str, Any]) -> list[Row]:
    return [Row.of_json(row) for row in run["results"]["rows"]]


def terminal(rows: Sequence[Row]) -> str:
    """Every figure of the rows, and below them why some rows have none."""
    body = []
    for row in rows:
        if row.us is not None and row.us_q1 is not None and row.us_q3 is not None:
            name = (",".join(map(str, row.shape)), row.peer, row.case)
            spread = number(100 * (row.us_q3 - row.us_q1) / row.us)
            times = (number(row.us), spread, number(row.graph_us), number(row.host_us, "{:.0f}"))
            snr = " / ".join(number(value) for value in row.snr_db.values()) + (" WRONG" if row.wrong else "")
            body.append((*name, *times, rate(row.rate), number(row.percent, "{:.0f}"), snr))
    unit = rows[0].unit if rows else ""
    headers = ("shape", "by", "case", "µs", "IQR %", "graph µs", "host µs", unit, "% of ceiling", "SNR dB")
    alignment = ("left", "left", "left", *["right"] * 7)
    table = [fitted(body, headers, alignment)] if body else []
    missing = [f"{row.label}: not available: {row.unavailable}" for row in rows if row.unavailable is not None]
    missing += [f"{row.label}: no CUDA graph: {row.graph_unavailable}" for row in rows if row.graph_unavailable]
    return "\n".join([*table, *missing])


def products(run: dict[str, Any]) -> str:
    return _rates(run, "TFLOP/s")


def quant(run: dict[str, Any]) -> str:
    return _rates(run, "TB/s")


def small(run: dict[str, Any]) -> str:
    """Microseconds of a call, and in brackets those of its CUDA graph."""

    def cell(row: Row) -> str:
        return number(row.us) + (f" ({row.graph_us:.1f})" if row.graph_us is not None else "")

    return _by_shape(run, "µs (as a CUDA graph)", cell, _worst_snr)


def layers(run: dict[str, Any]) -> str:
    """TFLOP/s with a line for each shape and a column for each case, for runs of many shapes."""
    rows = rows_of(run)
    labels = list(dict.fromkeys(row.label for row in rows))
    body = []
    for shape in dict.fromkeys(row.shape for row in rows):
        found = {row.label: rate(row.rate) if row.us is not None else "n/a" for row in rows if row.shape == shape}
        body.append([",".join(map(str, shape)), *(found.get(label, "") for label in labels)])
    return "\n".join([markdown(body, ["TFLOP/s", *labels]), *_missing_figures(rows), "", provenance(run)])


def llm84(run: dict[str, Any]) -> str:
    """A line for each model: TFLOP/s of bf16 → fp8fn, speedup, lowest speedup with the layer's id, and worst SNR.

    `BLOCKWISE_SQUARE`, where it was measured, has one line of all layers.
    """
    rows = rows_of(run)
    found, square = pairs(rows), pairs(rows, "fp8fn square")
    measured = [(s.id, s.model, found[s[2:]]) for s in LLM84 if s[2:] in found]
    groups = [
        (name, [(id, pair) for id, model, pair in measured if model == name])
        for name in dict.fromkeys(s.model for s in LLM84)
    ]
    groups.append(("all", [(id, pair) for id, _, pair in measured]))
    if square:
        groups.append(("all, `BLOCKWISE_SQUARE`", [(s.id, square[s[2:]]) for s in LLM84 if s[2:] in square]))
    body = []
    for name, members in groups:
        if not members:
            body.append([name, "0", *[""] * 6])
            continue
        id, slowest = min(members, key=lambda member: member[1].speedup)
        group = [pair for _, pair in members]
        body.append(
            [
                name,
                str(len(group)),
                _both_rates(group, 1, lambda times: times.forward),
                _both_rates(group, 2, lambda times: times.backward),
                _both_rates(group, 3, lambda times: times.combined),
                f"{statistics.geometric_mean(pair.speedup for pair in group):.2f}x",
                f"{slowest.speedup:.2f}x ({id})",
                f"{worst(pair.snr_db for pair in group):.1f}",
            ]
        )
    headers = ("model", "layers", "forward", "backward", "combined", "speedup", "lowest (id)", "worst SNR, dB")
    slower = sum(pair.speedup < 1 for _, _, pair in measured)
    under = sum(not pair.snr_db >= SNR_BAR_DB for _, _, pair in measured)
    lines = [
        markdown(body, headers),
        "",
        f"TFLOP/s of bf16 → fp8fn, geometric means. {slower} of {len(measured)} layers are slower than bf16 combined,"
        f" {under} have under {SNR_BAR_DB:.0f} dB; {len(LLM84) - len(measured)} of {len(LLM84)} were not measured.",
    ]
    return "\n".join([*lines, *_missing_figures(rows), "", provenance(run)])


def provenance(run: dict[str, Any]) -> str:
    """The measured device (the first GPU if the run names none), the versions and the date."""
    environment = run["environment"]
    device = run["results"].get("device") or environment.get("cuda:0 device", environment["cpu device"])
    return f"{device}; torch {environment['torch']}, Triton {environment['triton']}; {run['date']}."


def _rates(run: dict[str, Any], unit: str) -> str:
    """A line for each case: its rate at each shape with the percentage of the ceiling, geometric mean, worst SNR."""

    def cell(row: Row) -> str:
        return rate(row.rate) + (f" ({row.percent:.0f} %)" if row.percent is not None else "")

    def mean(rows: Sequence[Row]) -> str:
        rates = [row.rate for row in rows if row.rate is not None]
        return rate(statistics.geometric_mean(rates)) if len(rates) == len(rows) else ""

    return _by_shape(run, f"{unit} (of the ceiling)", cell, mean, _worst_snr, headers=("geomean", "worst SNR, dB"))


def _by_shape(
    run: dict[str, Any],
    corner: str,
    cell: Callable[[Row], str],
    *totals: Callable[[Sequence[Row]], str],
    headers: Sequence[str] = ("worst SNR, dB",),
) -> str:
    """A line for each case, a column for each shape, then a column of `headers` for each of `totals`."""
    rows = rows_of(run)
    shapes = list(dict.fromkeys(row.shape for row in rows))
    body = []
    for label in dict.fromkeys(row.label for row in rows):
        line = {row.shape: row for row in rows if row.label == label}
        cells = [cell(line[shape]) if shape in line and line[shape].us is not None else "n/a" for shape in shapes]
        body.append([label, *cells, *(total(list(line.values())) for total in totals)])
    names = [corner, *(",".join(map(str, shape)) for shape in shapes), *headers]
    return "\n".join([markdown(body, names), *_missing_figures(rows), "", provenance(run)])


def _worst_snr(rows: Sequence[Row]) -> str:
    return number(worst(value for row in rows for value in row.snr_db.values()))


def _both_rates(group: Iterable[Pair], products: int, time: Callable[[Times], float]) -> str:
    """TFLOP/s of bf16 → fp8fn, geometric means over the group."""
    rates = [[products * pair.operations / time(times) / 1e6 for times in (pair.bf16, pair.fp8fn)] for pair in group]
    return " → ".join(rate(statistics.geometric_mean(column)) for column in zip(*rates, strict=True))


def _missing_figures(rows: Iterable[Row]) -> list[str]:
    """Each reason for a missing figure, once, with its cases."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for kind, text in (("n/a", row.unavailable), ("no CUDA graph", row.graph_unavailable)):
            if text is not None:
                labels = reasons.setdefault(f"{kind}: `{text}`", [])
                if row.label not in labels:
                    labels.append(row.label)
    lines = [f"{text}: {', '.join(labels)}." for text, labels in reasons.items()]
    return [part for line in lines for part in ("", line)]


def markdown(body: Sequence[Sequence[str]], headers: Sequence[str], left: int = 0) -> str:
    """A Markdown table with column `left` aligned to the left, and the other columns to the right."""
    from tabulate import tabulate

    alignment = ["left" if column == left else "right" for column in range(len(headers))]
    return str(tabulate(body, headers, tablefmt="pipe", disable_numparse=True, colalign=alignment))


def rate(value: float | None) -> str:
    """Three significant digits, and whole numbers from 100 on."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def number(value: float | None, form: str = "{:.1f}") -> str:
    return "" if value is None else form.format(value)
