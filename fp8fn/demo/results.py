"""The demo's figures, as they stand in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fp8fn.bench import tables
from fp8fn.cli.environment import device_name
from fp8fn.demo.pairs import Pair
from fp8fn.demo.train import Plan, Run


def results(
    pairs: Sequence[Pair], plan: Plan, model: str, size: str, recipe: str, left: Sequence[str] = ()
) -> dict[str, Any]:
    """The settings, then the figures of both runs for each seed. `left` says what was not computed in FP8."""
    return {
        "device": device_name(plan.device),
        "model": model,
        "size": size,
        "recipe": recipe,
        "steps": plan.steps,
        "batch": plan.batch,
        "learning_rate": plan.learning_rate,
        "left": list(left),
        "pairs": [{"seed": pair.seed, "baseline": _run(pair.baseline), "fp8": _run(pair.fp8)} for pair in pairs],
    }


def markdown(document: dict[str, Any]) -> str:
    """The demo's table of a committed run, with what was left alone and the provenance."""
    found = document["results"]
    pairs = [(pair["baseline"], pair["fp8"]) for pair in found["pairs"]]
    losses = [fmean(run["validation"][-1][1] for run in runs) for runs in zip(*pairs, strict=True)]
    speeds = [fmean(run["tokens_per_second"] for run in runs) for runs in zip(*pairs, strict=True)]
    saved = [fmean(run["saved_bytes"] for run in runs) / 2**30 for runs in zip(*pairs, strict=True)]
    difference = fmean(fp8["validation"][-1][1] / before["validation"][-1][1] - 1 for before, fp8 in pairs)
    body = [
        ["final validation loss, nats/byte", *(f"{each:.4f}" for each in losses), f"{difference:+.2%}"],
        ["tokens/s, median step", *(f"{each:,.0f}" for each in speeds), f"{speeds[1] / speeds[0]:.2f}x"],
    ]
    if all(run["peak_bytes"] is not None for pair in pairs for run in pair):
        peaks = [fmean(run["peak_bytes"] for run in runs) / 2**30 for runs in zip(*pairs, strict=True)]
        body.append(["peak memory, GiB", *(f"{each:.2f}" for each in peaks), f"{peaks[1] / peaks[0]:.2f}x"])
    body.append(["saved for backward, GiB", *(f"{each:.2f}" for each in saved), f"{saved[1] / saved[0]:.2f}x"])
    settings = ("model", "size", "recipe", "steps")
    arguments = " ".join(f"--{name} {found[name]}" for name in settings)
    lines = [f"`python -m fp8fn demo {arguments}`, {len(pairs)} pair{'s' * (len(pairs) > 1)}:", ""]
    lines += [tables.markdown(body, ("", *(run["name"] for run in pairs[0]), "difference"))]
    if found["left"]:
        lines += ["", f"Not in FP8: {'; '.join(found['left'])}"]
    return "\n".join([*lines, "", tables.provenance(document)])


def _run(run: Run) -> dict[str, Any]:
    """The figures of one run; `validation` holds pairs of a step and a loss in nats per byte."""
    return {
        "name": run.name,
        "validation": [list(point) for point in run.validation],
        "tokens_per_second": run.tokens_per_second,
        "saved_bytes": run.saved_bytes,
        "peak_bytes": run.peak_bytes,
    }
