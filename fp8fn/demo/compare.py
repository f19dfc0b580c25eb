"""The demo as a function: one model trained twice from the same weights on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import torch

from fp8fn.demo.corpus import Corpus
from fp8fn.demo.model import GPT, GPTConfig
from fp8fn.demo.train import Plan, Run, Variant, train

BASELINE: Final = Variant(name="baseline", backend="inductor")

Progress = Callable[[str, Iterable[int]], Iterable[int]]


def silent(name: str, steps: Iterable[int]) -> Iterable[int]:
    """The progress that shows nothing."""
    return steps


def in_fp8(recipe: str) -> Variant:
    """The variant in which fp8fn compiles the model."""
    return Variant(name=f"fp8 {recipe}", backend="fp8fn", options={"recipe": recipe, "where": "*"})


def build(config: GPTConfig, plan: Plan) -> GPT:
    """The model with the initial weights of `plan.seed`; they are drawn on the CPU, so every device starts alike."""
    torch.manual_seed(plan.seed)
    return GPT(config).to(plan.device)


def compare(
    model: GPT, corpus: Corpus, plan: Plan, fp8: Variant, baseline: Variant = BASELINE, progress: Progress = silent
) -> tuple[Run, Run]:
    """Train `model` by `baseline`, then again from its initial weights by `fp8`; `progress` takes a name and steps."""
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runs = []
    for variant in (baseline, fp8):
        model.load_state_dict(initial)
        runs.append(train(model, variant, corpus, plan, partial(progress, variant.name)))
        model.zero_grad(set_to_none=True)
    return runs[0], runs[1]
