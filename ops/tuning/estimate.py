"""How long a linear layer takes in FP8, quantization counted in, and in bf16: estimates for a chip that need no GPU.

A product in FP8 takes what a table measured, or else the model's time of its choice. A quantizer reads its input and
writes both forms of it, `bytes / rate`, and a product in bf16 is a roofline, `max(operations / rate, bytes / rate)`;
each has a launch besides. `tests/ops/test_estimate.py` holds them against the committed measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch

from fp8fn.ops import targets
from fp8fn.ops.grouped_gemm import wgrad_block
from fp8fn.ops.layout import WHOLE, Block, scale_dtype
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning.model import microseconds, ranked
from fp8fn.ops.tuning.problem import Problem, linear_problems
from fp8fn.ops.tuning.rates import Rates, rates_of
from fp8fn.ops.tuning.table import beside, lookup, tables

_PRODUCT_US: Final = 4.7  # a launch with the pipeline's start and end, as `model.py` has it
_QUANTIZE_US: Final = 3.0
_GROUP_US: Final = 1.3  # of each group of `torch._grouped_mm`, over a roofline (docs/results/moe_layer.json)


class Step(NamedTuple):
    """Microseconds of one layer."""

    forward: float
    backward: float

    @property
    def combined(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Times:
    """A layer in FP8 with its quantization, and in bf16; `source` says who knows: a table, the model, or a clock."""

    fp8: Step
    bf16: Step
    source: str
    parts: Parts | None = field(default=None, compare=False, repr=False)
    """The same times of each product and quantizer, where they are known."""

    @property
    def speedup(self) -> float:
        """The speedup of forward and backward combined."""
        return self.bf16.combined / self.fp8.combined


class Parts(NamedTuple):
    """Microseconds of a layer's three products and of its quantizers in FP8, and of each product in bf16.

    `weight` and `weight_again` are the quantizers of the weight in the forward and in the backward; the second one is 0
    where the recipe keeps the FP8 weight. `gradient` is the quantizer of the output's gradient.
    """

    forward: float
    dgrad: float
    wgrad: float
    x: float
    weight: float
    weight_again: float
    gradient: float
    bf16: float
    source: str

    @property
    def times(self) -> Times:
        """The layer with nothing shared, forward and backward."""
        forward = self.forward + self.x + self.weight
        backward = self.dgrad + self.wgrad + self.gradient + self.weight_again
        return Times(Step(forward, backward), Step(self.bf16, 2 * self.bf16), self.source, self)


def linear_times(
    m: int, n: int, k: int, recipe: Recipe, chip: Chip, *, batch: int = 1, itemsize: int = 2
) -> Times | None:
    """The times of `x (m, k) @ w (n, k)ᵀ`, `batch` times, and of its gradients, on a chip of sm90.

    `itemsize` is that of the tensors to quantize; the bf16 product is not charged for a cast. None if no kernel in CUDA
    C++ multiplies by this recipe, or if there is nothing to multiply.
    """
    if min(m, n, k, batch) < 1 or scale_dtype(recipe.scale) != torch.float32:
        return None
    if not {recipe.activation_dtype, recipe.weight_dtype, recipe.gradient_dtype} <= {None, *targets.OCP}:
        return None
    try:
        problems = linear_problems(m, n, k, recipe)
    except ValueError:
        return None
    found = {name: product_us(replace(problem, batch=batch), chip) for name, problem in problems.items()}
    rates = rates_of(chip)

    def quantize(rows: int, columns: int, block: Block, forms: int = 2) -> float:
        reads = 2 if WHOLE in block else 1  # the largest element of a line is known at its end
        moved = batch * rows * columns * (reads * itemsize + forms)
        return _QUANTIZE_US + moved / (rates.quantize * 1e6)

    w, sources = recipe.weight_block, dict.fromkeys(source for _, source in found.values())
    parts = Parts(
        forward=found["forward"][0],
        dgrad=found["dgrad"][0],
        wgrad=found["wgrad"][0],
        x=quantize(m, k, recipe.activation_block),
        weight=quantize(n, k, w, 2 if recipe.keep_weights else 1),
        weight_again=0.0 if recipe.keep_weights else quantize(n, k, w),
        gradient=quantize(m, n, recipe.gradient_block),
        bf16=_bf16_us(batch, m, n, k, rates),  # of each product, which has the same sizes in another order
        source=" and ".join(sources),
    )
    return parts.times


def grouped_parts(
    m: int, n: int, k: int, recipe: Recipe, chip: Chip, *, groups: int, itemsize: int = 2
) -> Parts | None:
    """The times of `x (m, k)` by `w (groups, k, n)`, each row by its group, as if all groups were equal."""
    if groups < 1:
        return None
    by_groups = replace(recipe, wgrad_activation_block=wgrad_block(recipe))
    times = linear_times(-(-m // groups), n, k, by_groups, chip, batch=groups, itemsize=itemsize)
    if times is None or times.parts is None:
        return None
    return times.parts._replace(bf16=times.parts.bf16 + _GROUP_US * groups)


def product_us(problem: Problem, chip: Chip) -> tuple[float, str]:
    """The time of a product on operands that are quantized, by the kernel that a plan takes, and who knows it.

    A fast product that goes to cuBLASLt has the modelled time of fp8fn's kernel: no table has cuBLASLt's.
    """
    known = tables(chip)
    found = lookup(problem, known)
    if found is None:
        others, cores = beside(problem, known), chip.multiprocessors
        if others is not None:
            return next(iter(others.times.values())), others.source
        return microseconds(problem, ranked(problem, cores)[0], cores) * rates_of(chip).product, "the model"
    entry = found.entry
    if found.exact and entry.peer_wins and entry.peer_us is not None:
        return entry.peer_us, found.table.name
    return entry.us, found.table.name


def prequantized_us(problem: Problem, chip: Chip, itemsize: int) -> tuple[float, float]:
    """The time of a product whose `a` is quantized first, and that of 16-bit activations by the same FP8 weight.

    Many rows by an FP8 weight take the time of bf16.
    """
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    rates = rates_of(chip)
    quantizer = _QUANTIZE_US + batch * m * k * (itemsize + 1) / (rates.quantize * 1e6)
    return product_us(problem, chip)[0] + quantizer, _bf16_us(batch, m, n, k, rates)


def _bf16_us(batch: int, m: int, n: int, k: int, rates: Rates) -> float:
    operations, moved = 2.0 * batch * m * n * k, 2.0 * batch * (m * k + n * k + m * n)
    return _PRODUCT_US + max(operations / rates.bf16, moved / rates.copy) / 1e6
