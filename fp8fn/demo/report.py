"""What the demo says in the end: the table, the plot and the exit status."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from fp8fn.demo.train import Run

# How much higher FP8's final validation loss may be, relative to the baseline's.
TOLERANCE: Final = 0.01


def relative_difference(baseline: float, fp8: float) -> float:
    """`(fp8 - baseline) / baseline`."""
    return (fp8 - baseline) / baseline


def verdict(baseline: float, fp8: float) -> int:
    """The exit status: 0 where `fp8 <= baseline * 1.01`, both finite, else 1."""
    if not (math.isfinite(baseline) and math.isfinite(fp8)):
        return 1
    return int(fp8 > baseline * (1 + TOLERANCE))


def conclusion(baseline: float, fp8: float) -> str:
    """The verdict in a sentence."""
    if not (math.isfinite(baseline) and math.isfinite(fp8)):
        return f"FAIL: a loss is not finite (baseline {baseline}, FP8 {fp8})."
    difference = relative_difference(baseline, fp8)
    outcome = "FAIL" if verdict(baseline, fp8) else "OK"
    return (
        f"{outcome}: FP8's final validation loss is {difference:+.2%} from the baseline's; +{TOLERANCE:.0%} is allowed."
    )


def table(baseline: Run, fp8: Run) -> str:
    """Both runs side by side, and how FP8 differs."""
    from tabulate import tabulate

    rows = [
        (
            "final validation loss [nats/byte]",
            f"{baseline.final_loss:.4f}",
            f"{fp8.final_loss:.4f}",
            f"{relative_difference(baseline.final_loss, fp8.final_loss):+.2%}",
        ),
        (
            "tokens/s, median step",
            f"{baseline.tokens_per_second:,.0f}",
            f"{fp8.tokens_per_second:,.0f}",
            f"{fp8.tokens_per_second / baseline.tokens_per_second:.2f}x",
        ),
        (
            "saved for backward per step [MiB]",
            f"{baseline.saved_bytes / 2**20:.1f}",
            f"{fp8.saved_bytes / 2**20:.1f}",
            f"{fp8.saved_bytes / baseline.saved_bytes:.2f}x",
        ),
    ]
    alignment = ("left", "right", "right", "right")
    headers = ("", baseline.name, fp8.name, "difference")
    return str(tabulate(rows, headers, disable_numparse=True, colalign=alignment))


def plot(baseline: Run, fp8: Run, path: Path) -> None:
    """Write the loss curves of both runs, and their relative difference, to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), dpi=150, layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    # The curves all but coincide: a broad pale line below a thin dark dashed one shows both, in gray too.
    styles = (
        (baseline, {"color": "tab:orange", "linewidth": 3.5, "linestyle": "-", "marker": "o", "markersize": 7}),
        (fp8, {"color": "black", "linewidth": 1.3, "linestyle": "--", "marker": "^", "markersize": 4}),
    )
    for run, style in styles:
        every = range(1, len(run.losses) + 1)
        curves.plot(every, run.losses, color=style["color"], linestyle=style["linestyle"], linewidth=0.8, alpha=0.5)
    for run, style in styles:
        steps, losses = zip(*run.validation, strict=True)
        curves.plot(steps, losses, label=f"{run.name}, validation", **style)
    curves.set_ylabel("loss [nats/byte]")
    curves.set_title("A byte-level GPT on the Python standard library (thin: training loss)", fontsize="medium")
    curves.legend()
    curves.grid(alpha=0.3)

    steps, losses = zip(*baseline.validation, strict=True)
    pairs = zip(losses, (loss for _, loss in fp8.validation), strict=True)
    percent = [100 * relative_difference(before, after) for before, after in pairs]
    differences.plot(steps, percent, color="black", linestyle="--", marker="^", markersize=4)
    differences.axhline(100 * TOLERANCE, color="gray", linestyle=":", label=f"allowed at the end: +{TOLERANCE:.0%}")
    differences.axhline(0, color="gray", linewidth=0.8)
    differences.set_ylabel("FP8 - baseline [%]")
    differences.set_xlabel("step")
    differences.legend(fontsize="small")
    differences.grid(alpha=0.3)
    figure.savefig(path, format="png")
