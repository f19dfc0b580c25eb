"""The demo's results: the table, the plot, the verdict and the exit status."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import fp8fn
from fp8fn.demo.pairs import Pair, relative_difference, standard_deviation, standard_error
from fp8fn.terminal import fitted

# The largest relative increase of the final validation loss in FP8 over the baseline's, chance apart.
TOLERANCE: Final = 0.01


def allowed(pairs: int, deviation: float) -> float:
    """The largest mean difference of so many pairs, each of which deviates by chance: 1 % and two standard errors."""
    return TOLERANCE + 2 * deviation / math.sqrt(pairs)


def verdict(pairs: Sequence[Pair], deviation: float = 0.0) -> int:
    """The exit status: 0 if the mean of the pairs' differences is `allowed` and all losses are finite, else 1."""
    limit = allowed(len(pairs), deviation)
    return int(not all(pair.finite for pair in pairs) or fmean(pair.difference for pair in pairs) > limit)


def conclusion(pairs: Sequence[Pair], deviation: float = 0.0) -> str:
    """The verdict as a sentence."""
    for pair in pairs:
        if not pair.finite:
            seed = f"seed {pair.seed}: " if len(pairs) > 1 else ""
            return f"FAIL: a loss is not finite ({seed}baseline {pair.baseline.final_loss}, FP8 {pair.fp8.final_loss})."
    outcome = "FAIL" if verdict(pairs, deviation) else "OK"
    of_pairs = f" (mean ± standard error of {len(pairs)} pairs)" if len(pairs) > 1 else ""
    return (
        f"{outcome}: FP8's final validation loss is {_difference(pairs)}{of_pairs} from the baseline's; "
        f"+{TOLERANCE:.0%} is allowed{_chance(len(pairs), deviation)}."
    )


def _chance(pairs: int, deviation: float) -> str:
    if not deviation:
        return ""
    error = deviation / math.sqrt(pairs)
    varies = f", and twice {error:.1%}, the standard error of {pairs} pair{'s' * (pairs > 1)} at this size"
    return f"{varies}; --seeds 8 allows +{allowed(8, deviation):.1%}" if pairs < 8 else varies


def table(pairs: Sequence[Pair], *, speed: bool = True) -> str:
    """Both variants side by side, with the difference of FP8. Several pairs add each pair's losses and their spread.

    `speed=False` leaves out the speed, which says nothing where FP8 has no kernels.
    """
    baselines, fp8s = [pair.baseline for pair in pairs], [pair.fp8 for pair in pairs]
    losses = [[run.final_loss for run in runs] for runs in (baselines, fp8s)]
    speeds = [fmean(run.tokens_per_second for run in runs) for runs in (baselines, fp8s)]
    saved = [fmean(run.saved_bytes for run in runs) for runs in (baselines, fp8s)]
    peaks = [[run.peak_bytes for run in runs if run.peak_bytes is not None] for runs in (baselines, fp8s)]
    mean = "mean " if len(pairs) > 1 else ""
    rows = [
        (f"{mean}final validation loss [nats/byte]", *(f"{fmean(each):.4f}" for each in losses), _difference(pairs)),
        (f"{mean}tokens/s, median step", *(f"{each:,.0f}" for each in speeds), f"{speeds[1] / speeds[0]:.2f}x"),
        (
            f"{mean}saved for backward per step [MiB]",
            *(f"{count / 2**20:.1f}" for count in saved),
            f"{saved[1] / saved[0]:.2f}x",
        ),
    ]
    if all(peaks):
        before, after = (fmean(found) for found in peaks)
        label = f"{mean}peak memory [GiB]"
        rows.insert(2, (label, f"{before / 2**30:.2f}", f"{after / 2**30:.2f}", f"{after / before:.2f}x"))
    if not speed:
        del rows[1]
    if len(pairs) > 1:
        rows.insert(1, ("its standard deviation over seeds", *(f"{_spread(each):.2%}" for each in losses), ""))
        rows[:0] = [
            (f"final validation loss, seed {pair.seed}", f"{before:.4f}", f"{after:.4f}", f"{pair.difference:+.2%}")
            for pair, before, after in zip(pairs, *losses, strict=True)
        ]
    alignment = ("left", "right", "right", "right")
    headers = ("", baselines[0].name, fp8s[0].name, "difference")
    return fitted(rows, headers, alignment)


def left_alone(explanation: fp8fn.lowering.explanation.Explanation) -> list[str]:
    """The products that stay as they are, one line for all layers that differ in their number only."""
    alone = [(row.weight, row.reason) for row in explanation.rows if row.reason]
    left = Counter((re.sub(r"\b\d+\b", "*", weight), reason) for weight, reason in (*alone, *explanation.outside))
    return [f"{count}x {weight}: {reason}" for (weight, reason), count in left.items()]


def plot(pairs: Sequence[Pair], path: Path, deviation: float = 0.0) -> None:
    """Write the loss curves of both variants and their relative difference to `path`.

    Several pairs are drawn as means. Thin lines are the training losses of a single pair, or the pairs of the means.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), dpi=150, layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    # The curves nearly coincide: a broad pale line under a thin dark dashed line shows both, also in gray.
    styles = (
        (
            [pair.baseline for pair in pairs],
            {"color": "tab:orange", "linewidth": 3.5, "linestyle": "-", "marker": "o", "markersize": 7},
        ),
        (
            [pair.fp8 for pair in pairs],
            {"color": "black", "linewidth": 1.3, "linestyle": "--", "marker": "^", "markersize": 4},
        ),
    )
    several = len(pairs) > 1
    steps = [step for step, _ in pairs[0].baseline.validation]
    for runs, style in styles:
        thin = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 0.8, "alpha": 0.5}
        for run in runs:
            if several:
                curves.plot(steps, [loss for _, loss in run.validation], **thin)
            else:
                curves.plot(range(1, len(run.losses) + 1), run.losses, **thin)
    for runs, style in styles:
        losses = zip(*([loss for _, loss in run.validation] for run in runs), strict=True)
        label = f"{runs[0].name}, validation" + (f", mean of {len(pairs)} seeds" if several else "")
        curves.plot(steps, [fmean(at_step) for at_step in losses], label=label, **style)
    curves.set_ylabel("loss [nats/byte]")
    title = f"A byte-level GPT on the Python standard library (thin: {'each seed' if several else 'training loss'})"
    curves.set_title(title, fontsize="medium")
    curves.legend()
    curves.grid(alpha=0.3)

    percent = [_percent(pair) for pair in pairs]
    means = [fmean(at_step) for at_step in zip(*percent, strict=True)]
    if several:
        for each in percent:
            differences.plot(steps, each, color="black", linestyle="--", linewidth=0.8, alpha=0.3)
        errors = [standard_error(at_step) for at_step in zip(*percent, strict=True)]
        low = [mean - error for mean, error in zip(means, errors, strict=True)]
        high = [mean + error for mean, error in zip(means, errors, strict=True)]
        differences.fill_between(steps, low, high, color="gray", alpha=0.3, label="mean ± standard error")
    differences.plot(steps, means, color="black", linestyle="--", marker="^", markersize=4)
    limit = allowed(len(pairs), deviation)
    differences.axhline(100 * limit, color="gray", linestyle=":", label=f"allowed at the end: +{100 * limit:.3g}%")
    differences.axhline(0, color="gray", linewidth=0.8)
    differences.set_ylabel("FP8 - baseline [%]")
    differences.set_xlabel("step")
    differences.legend(fontsize="small")
    differences.grid(alpha=0.3)
    figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _difference(pairs: Sequence[Pair]) -> str:
    """The mean of the pairs' differences, with its standard error if there are several pairs."""
    found = [pair.difference for pair in pairs]
    return f"{fmean(found):+.2%}" + (f" ± {standard_error(found):.2%}" if len(found) > 1 else "")


def _spread(losses: Sequence[float]) -> float:
    return standard_deviation(losses) / fmean(losses)


def _percent(pair: Pair) -> list[float]:
    """The relative difference of FP8 at each evaluation, in percent."""
    points = zip(pair.baseline.validation, pair.fp8.validation, strict=True)
    return [100 * relative_difference(before, after) for (_, before), (_, after) in points]
