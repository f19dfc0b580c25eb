"""The demo as a function: trains one model by two variants, from the same weights on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from fp8fn.demo.corpus import Corpus
from fp8fn.demo.model import GPT, GPTConfig
from fp8fn.demo.pairs import Pair
from fp8fn.demo.train import Plan, Run, Variant, train

BASELINE: Final = Variant(name="baseline", backend="inductor")

Progress = Callable[[str, Iterable[int]], Iterable[int]]


def silent(name: str, steps: Iterable[int]) -> Iterable[int]:
    """A progress that shows nothing."""
    return steps


def in_fp8(recipe: str, where: str | None = None) -> Variant:
    """The variant in which fp8fn compiles the model. `where` is the backend's option, by default the backend's own."""
    return Variant(name=f"fp8 {recipe}", backend="fp8fn", options={"recipe": recipe, "where": where})


def build(config: GPTConfig, plan: Plan) -> GPT:
    """The model with the initial weights of `plan.seed`, drawn on the CPU so that every device starts from the same."""
    torch.manual_seed(plan.seed)
    return GPT(config).to(plan.device)


def compare(
    model: GPT,
    corpus: Corpus,
    plan: Plan,
    fp8: Variant,
    baseline: Variant = BASELINE,
    progress: Progress = silent,
    seeds: int = 1,
) -> list[Pair]:
    """Train `model` by `baseline` and by `fp8`, with each of the `seeds` seeds from `plan.seed` on.

    The first pair starts from the weights of `model`, the others from the weights that `build` draws. `progress` wraps
    the steps of a run, whose name it is given.
    """
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plans = [replace(plan, seed=plan.seed + index) for index in range(seeds)]

    def runs(variant: Variant) -> list[Run]:
        # All seeds run on one compiled model before the next variant, so that each variant compiles once.
        compiled = variant.compile(model)
        found = []
        for each in plans:
            if each.seed == plan.seed:
                model.load_state_dict(initial)
            else:
                model.load_state_dict(build(model.config, replace(each, device=torch.device("cpu"))).state_dict())
            label = variant.name if seeds == 1 else f"{variant.name}, seed {each.seed}"
            found.append(train(model, compiled, variant.name, corpus, each, partial(progress, label)))
            model.zero_grad(set_to_none=True)
        return found

    return [
        Pair(seed=each.seed, baseline=before, fp8=after)
        for each, before, after in zip(plans, runs(baseline), runs(fp8), strict=True)
    ]
