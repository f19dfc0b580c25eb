"""Figures of a committed or new run: `python -m fp8fn bench plot RUN.json FIGURE.png`.

Products and quantizers are bars by shape. Products also stand in a roofline with the ceilings that the run measured.
The 84 layers are speedups over bf16, and whole models (`bench train`) are bars of times and of peak memory. Grays,
hatches and markers tell cases apart, also in a print without colour.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from fp8fn.bench import record
from fp8fn.bench.llm84 import pairs
from fp8fn.bench.measure import Row
from fp8fn.bench.shapes import LLM84
from fp8fn.bench.tables import provenance, rate, rows_of
from fp8fn.bench.train.figure import draw, shown
from fp8fn.cli.options import output_file, parser_of

_DRAWN: Final = "dense, wgrad, linear, quant or train"
_HATCHES: Final = ("//", "..", "xx", "", "\\\\", "oo", "++", "--")
_GRAYS: Final = ("0.55", "0.75", "0.9", "0.4", "0.65", "0.85", "0.5", "0.95")
_MARKERS: Final = ("s", "^", "D", "v", "P", "X", "<", ">")


def format_fault(path: Path) -> str | None:
    """The reason why matplotlib can't draw to a file of this name, or None."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    ending = path.suffix[1:].lower()
    return None if not ending or ending in known else f"{path}: no format {ending!r}; use {', '.join(sorted(known))}"


def write(run: dict[str, Any], path: str | Path) -> None:
    """Draw `run`, as `record.read` returns it, to `path` in the format of its ending."""
    from matplotlib.figure import Figure

    if run["benchmark"] == "train":
        draw(run, path)
        return
    rows = rows_of(run)
    speedups = run["results"]["suite"] == "llm84"
    roofline = not speedups and any(row.operations and row.bytes for row in rows)
    figure = Figure(figsize=(11, 10 if roofline else 5), dpi=150, layout="constrained")
    axes = figure.subplots(2 if roofline else 1, 1, squeeze=False)[:, 0]
    if speedups:
        _speedups(axes[0], rows)
    else:
        _bars(axes[0], rows)
    if roofline:
        _roofline(axes[1], rows, run["results"]["copy_tb_s"])
    figure.suptitle(f"{run['benchmark']}, {run['results']['suite']}: {provenance(run)}", fontsize="medium")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a file that `--json` wrote."""
    parser = parser_of(
        "bench plot",
        __doc__,
        "docs/results/train.json whole_models.svg",
    )
    parser.add_argument("run", metavar="RUN.json", help=f"a file that {_DRAWN} wrote")
    parser.add_argument("figure", type=output_file, metavar="FIGURE", help="file to draw to")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("needs matplotlib: pip install matplotlib")
    if (problem := format_fault(args.figure)) is not None:
        parser.error(problem)
    try:
        run = record.read(args.run)
        train = run["benchmark"] == "train"
        drawable = bool(shown(run) if train else rows_of(run) and run["results"]["suite"] and provenance(run))
    except OSError as error:
        parser.error(f"{args.run} can't be read: {error.strerror}; --json of {_DRAWN} writes such a file")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):  # no JSON, or not a run's
        drawable = False
    if not drawable:
        parser.error(f"{args.run} is not a run of {_DRAWN}, as --json writes it")
    write(run, args.figure)
    return 0


def _styles(labels: Sequence[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Each label with the look of its bars and its marker: fp8fn in black and white, other implementations in gray."""
    shades, hatches, markers = cycle(_GRAYS), cycle(_HATCHES), cycle(_MARKERS)
    ours = cycle((("black", "", "o"), ("black", "////", "*"), ("white", "xxxx", "h"), ("white", "", "d")))
    for label in labels:
        if label.startswith("fp8fn "):
            color, hatch, marker = next(ours)
            # A hatch has the edge's colour: black on black would be invisible.
            edge = "white" if color == "black" and hatch else "black"
            yield label, {"facecolor": color, "hatch": hatch, "edgecolor": edge}, marker
        else:
            yield label, {"facecolor": next(shades), "hatch": next(hatches), "edgecolor": "black"}, next(markers)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    timed = {(row.label, row.shape): row for row in rows if row.us is not None}
    labels = list(dict.fromkeys(label for label, _ in timed))
    width = 0.85 / max(1, len(labels))
    for i, (label, look, _) in enumerate(_styles(labels)):
        places, rates, below, above = [], [], [], []
        for j, shape in enumerate(shapes):
            row = timed.get((label, shape))
            if row is not None and row.rate and row.us and row.us_q1 and row.us_q3:
                places.append(j + (i - (len(labels) - 1) / 2) * width)
                rates.append(row.rate)
                # The quartiles of the time as rates: the first quartile of the time is the higher rate.
                below.append(row.rate * (1 - row.us / row.us_q3))
                above.append(row.rate * (row.us / row.us_q1 - 1))
        axes.bar(places, rates, width, label=label, **look)
        axes.errorbar(places, rates, [below, above], linestyle="none", color="0.3", capsize=2, linewidth=1)
    axes.set_xticks(range(len(shapes)), [",".join(map(str, shape)) for shape in shapes])
    axes.set_xlabel("M,N,K" if shapes and len(shapes[0]) == 3 else "M,N")
    unit = rows[0].unit if rows else ""
    axes.set_ylabel(f"throughput [{unit}], median and quartiles")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _roofline(axes: Any, rows: Sequence[Row], copy_tb_s: float) -> None:
    """Rates over operations per ideal byte, under the copy's bandwidth and the fastest product of each element type."""
    points = [row for row in rows if row.operations and row.bytes and row.rate is not None]
    if not points:
        return
    intensities = [row.operations / row.bytes for row in points]
    # FLOP/byte times TB/s is TFLOP/s.
    ends = [min(intensities) / 2, max(intensities) * 2]
    peaks = {
        "fastest FP8 product": max((row.rate or 0.0 for row in points if "bf16" not in row.case), default=0.0),
        "fastest bf16 product": max((row.rate or 0.0 for row in points if "bf16" in row.case), default=0.0),
    }
    for (name, peak), style in zip(peaks.items(), ("-", "--"), strict=True):
        if peak:
            knee = peak / copy_tb_s
            low = min(ends[0], knee / 2)
            line = [low, knee, max(ends[1], knee * 2)]
            axes.plot(
                line, [low * copy_tb_s, peak, peak], style, color="0.4", label=f"{name} here: {rate(peak)} TFLOP/s"
            )
    for label, look, marker in _styles(list(dict.fromkeys(row.label for row in points))):
        x = [row.operations / row.bytes for row in points if row.label == label]
        y = [row.rate for row in points if row.label == label]
        axes.plot(x, y, marker, color=look["facecolor"], markeredgecolor="black", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"operations per ideal byte [FLOP/byte]; the slope is the copy's {rate(copy_tb_s)} TB/s")
    axes.set_ylabel("throughput [TFLOP/s]")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _speedups(axes: Any, rows: Sequence[Row]) -> None:
    """Speedup of forward and backward combined over bf16, by the suite's ids."""
    found = pairs(rows)
    models = list(dict.fromkeys(s.model for s in LLM84))
    for model, shade, hatch in zip(models, cycle(_GRAYS), cycle(_HATCHES), strict=False):
        bars = [(s.id, found[s[2:]].speedup) for s in LLM84 if s.model == model and s[2:] in found]
        if bars:
            axes.bar(*zip(*bars, strict=True), label=model, facecolor=shade, hatch=hatch, edgecolor="black")
    axes.axhline(1.0, color="black", linestyle="--", label="bf16")
    axes.set_xlabel("layer [id of the suite]")
    axes.set_ylabel("speedup over bf16, forward and backward")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
