"""The demo's figures, as they stand in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8fn.cli.environment import device_name
from fp8fn.demo.pairs import Pair
from fp8fn.demo.train import Plan, Run


def results(pairs: Sequence[Pair], plan: Plan, model: str, size: str, recipe: str) -> dict[str, Any]:
    """The settings, then the figures of both runs for each seed."""
    return {
        "device": device_name(plan.device),
        "model": model,
        "size": size,
        "recipe": recipe,
        "steps": plan.steps,
        "batch": plan.batch,
        "learning_rate": plan.learning_rate,
        "pairs": [{"seed": pair.seed, "baseline": _run(pair.baseline), "fp8": _run(pair.fp8)} for pair in pairs],
    }


def _run(run: Run) -> dict[str, Any]:
    """The figures of one run; `validation` holds pairs of a step and a loss in nats per byte."""
    return {
        "name": run.name,
        "validation": [list(point) for point in run.validation],
        "tokens_per_second": run.tokens_per_second,
        "saved_bytes": run.saved_bytes,
    }
