"""One training run of the demo: a compiled model over a fixed sequence of batches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8fn.demo.corpus import Corpus
from fp8fn.demo.model import GPT
from fp8fn.demo.saved import bytes_saved

# Steps that do not count: the first one compiles, and allocators, caches and clocks settle in the next few.
WARM_UP: Final = 5
CLIP: Final = 1.0

Compiled = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings that both runs share; `batch` counts sequences, and `seed` fixes the weights and the batches."""

    device: torch.device
    steps: int
    batch: int
    learning_rate: float
    seed: int = 0
    evaluations: int = 8
    validation_batches: int = 8

    @property
    def autocast(self) -> torch.autocast:
        """bf16 over float32 master weights on a GPU; float32 throughout on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def rate(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the learning rate."""
        warm = min(1.0, (step + 1) / max(1.0, self.steps / 10))
        return self.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A name, and the arguments of `torch.compile`."""

    name: str
    backend: str
    options: dict[str, Any] | None = None

    def compile(self, model: GPT) -> Compiled:
        """The compiled `model`, which compiles in its first step and serves whatever weights `model` has later."""
        torch.compiler.reset()
        compiled: Compiled = torch.compile(model, backend=self.backend, options=self.options)
        return compiled


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one training; losses are in nats per byte, and `validation` pairs a step with a loss."""

    name: str
    losses: list[float]
    validation: list[tuple[int, float]]
    step_seconds: list[float]
    tokens_per_step: int
    saved_bytes: int
    peak_bytes: int | None = None
    """The most memory that tensors took on a GPU in the steps after the first one; None on a CPU."""

    @property
    def final_loss(self) -> float:
        return self.validation[-1][1]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median step after the warm-up, or of the last step of a run without one."""
        return self.tokens_per_step / statistics.median(self.step_seconds[WARM_UP:] or self.step_seconds[-1:])


def train(
    model: GPT,
    compiled: Compiled,
    name: str,
    corpus: Corpus,
    plan: Plan,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Run:
    """Train `model` in place by its `compiled` form for `plan.steps`; `progress` wraps step numbers, as `tqdm` does."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = corpus.batches(plan.batch, model.config.context, plan.seed)
    held_out = corpus.validation_batches(plan.validation_batches, plan.batch, model.config.context)
    every = math.ceil(plan.steps / plan.evaluations)
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    step_seconds: list[float] = []

    for step in progress(range(plan.steps)):
        if step % every == 0:
            validation.append((step, evaluate(compiled, held_out, plan)))
        inputs, targets = (tensor.to(plan.device) for tensor in next(batches))
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        begin = time.perf_counter()
        loss = loss_of(compiled, inputs, targets, plan)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss waits until the GPU has done the whole step, the optimizer's part included.
        losses.append(loss.item())
        step_seconds.append(time.perf_counter() - begin)
        if step == 0 and plan.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(plan.device)  # the first step also compiles and chooses kernels

    peak = torch.cuda.max_memory_allocated(plan.device) if plan.device.type == "cuda" else None
    validation.append((plan.steps, evaluate(compiled, held_out, plan)))
    inputs, _ = next(batches)
    with plan.autocast:
        saved = bytes_saved(model, lambda: compiled(inputs.to(plan.device)))
    return Run(
        name=name,
        losses=losses,
        validation=validation,
        step_seconds=step_seconds,
        tokens_per_step=plan.batch * model.config.context,
        saved_bytes=saved,
        peak_bytes=peak,
    )


def loss_of(model: Compiled, inputs: Tensor, targets: Tensor, plan: Plan) -> Tensor:
    """Mean cross entropy of the next byte in nats, with the softmax in float32."""
    with plan.autocast:
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: Compiled, batches: list[tuple[Tensor, Tensor]], plan: Plan) -> float:
    """The mean loss over `batches` of equal size."""
    losses = [loss_of(model, inputs.to(plan.device), targets.to(plan.device), plan) for inputs, targets in batches]
    return torch.stack(losses).mean().item()
