"""A picture of unmodified models: time and peak memory of a step in bf16, by torchao and by fp8fn, on each card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fp8fn.bench.train.models import Size, operations
from fp8fn.bench.train.runs import milliseconds, speedup

SHOWN: Final = {"bf16": "bf16", "torchao:tensorwise": "torchao, tensorwise", "fp8fn:BLOCKWISE_SQUARE": "fp8fn, default"}
_LOOKS: Final[tuple[dict[str, str], ...]] = (
    {"facecolor": "0.85", "edgecolor": "black"},
    {"facecolor": "0.65", "edgecolor": "black", "hatch": "//"},
    {"facecolor": "0.1", "edgecolor": "black"},
)


def draw(document: Mapping[str, Any], path: str | Path) -> None:
    """Draws the runs of a file of `bench train` that have all three variants; in an SVG, text stays text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = shown(document)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fp8fn", "font.size": 9}):
        figure = Figure(figsize=(9, 1.6 * len(runs) + 0.3), layout="constrained")
        panels = figure.subplots(len(runs), 2, squeeze=False)
        for run, (left, right) in zip(runs, panels, strict=True):
            times, peaks = bars(run)
            _draw(left, times, "forward and backward, ms")
            _draw(right, peaks, "peak memory, GB")
            right.set_yticklabels([])
            left.set_title(f"{run['device']}, {run['date']}", loc="left", fontsize="medium")
        figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def shown(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The run of each card with the most operations a step that has all variants of the picture; of equals the last."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in document["results"]["runs"]:
        if set(SHOWN) <= {row["variant"] for row in run["rows"]} and _work(run) >= _work(found.get(run["device"])):
            found[run["device"]] = run
    return list(found.values())


def _work(run: Mapping[str, Any] | None) -> float:
    """Operations of a forward and backward; 0 without a run."""
    if run is None:
        return 0.0
    setting = run["setting"]
    return operations(Size(**setting["size"]), setting["batch"], setting["sequence"])


Bars = Sequence[tuple[float, str]]


def bars(run: Mapping[str, Any]) -> tuple[Bars, Bars]:
    """Time and peak memory of each variant, each with its label; ratios are those of the tables."""
    rows = {row["variant"]: row for row in run["rows"]}
    times, peaks = [], []
    for name in SHOWN:
        row = rows[name]
        ms, faster = milliseconds(row, "forward_backward_ms"), speedup(row, "forward_backward_ms")
        assert ms is not None
        times.append((ms, f"{ms:.1f}" if name == "bf16" else f"{ms:.1f}, {faster:.2f}x as fast"))
        peak = row["peak_bytes"] / 1e9
        share = row["peak_bytes"] / rows["bf16"]["peak_bytes"]
        peaks.append((peak, f"{peak:.1f}" if name == "bf16" else f"{peak:.1f}, {share:.2f}x"))
    return times, peaks


def _draw(axes: Any, found: Bars, title: str) -> None:
    for place, ((value, label), look) in enumerate(zip(found, _LOOKS, strict=True)):
        axes.barh(place, value, 0.75, **look)
        axes.annotate(label, (value, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(found)), [*SHOWN.values()])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(value for value, _ in found))
    axes.set_xlabel(title)
    axes.spines[["top", "right"]].set_visible(False)
