"""Seed 001 as tables: products, forwards, and forwards with backwards of layers of experts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fp8fn.bench import moe
from fp8fn.bench.seeds.figures import Column, Figures, paragraphs, ratio, sizes, table
from fp8fn.bench.seeds.protocols import Shape
from fp8fn.bench.tables import number

PART: Final = "layers"


class _Work(NamedTuple):
    """What one table has: the name of the work, its labels in our rows, and its published source.

    `loop` and `bf16` are labels of what is compared; "" where there is none.
    """

    title: str
    ours: str
    loop: str
    bf16: str
    source: str


WORKS: Final = (
    _Work("The product of quantized operands", "fp8fn product", "fp8fn product, expert by expert",
          "torch rowwise product", "001-product"),
    _Work("Forward, quantization counted", "fp8fn forward", "fp8fn forward, expert by expert", "torch bf16 forward",
          "001-forward"),
    _Work("Forward and backward", "fp8fn forward and backward", "", "torch bf16 forward and backward", "001-step"),
)  # fmt: skip


def published_key(shape: Shape) -> str:
    """torchao orders E,M,K,N."""
    experts, m, n, k = shape
    return sizes((experts, m, k, n))


def of_figures(figures: Figures) -> str:
    found = figures.measured(PART, moe.LAYERS)
    note = (
        "torchao's TFLOP/s count 2·E·M·N·K operations for M tokens of all experts together, which is E times the work "
        "(with M tokens for each expert, its bf16 would be above the GPU's peak). So milliseconds are compared, and "
        "TFLOP/s below are of 2·M·N·K."
    )
    return paragraphs(note if found and figures.published else "", *(_work(figures, found, work) for work in WORKS))


def _work(figures: Figures, found: Sequence[Shape], work: _Work) -> str:
    if not found:
        return ""

    def ms(label: str) -> Callable[[Shape], str]:
        return lambda shape: number(_over(figures.us(PART, shape, label), 1e3), "{:.3f}")

    def given(figure: str, form: str = "{:.3f}") -> Callable[[Shape], str]:
        return lambda shape: number(figures.given(work.source, published_key(shape), figure), form)

    def over(label: str) -> Callable[[Shape], str]:
        return lambda shape: ratio(figures.us(PART, shape, label), figures.us(PART, shape, work.ours))

    other = "rowwise" if work.source == "001-product" else "bf16"
    columns = [
        Column("E,M,N,K", sizes),
        Column("fp8fn, ms", ms(work.ours)),
        Column("TFLOP/s", lambda shape: number(rate(figures, shape, work), "{:.0f}")),
    ]
    if work.loop:
        columns += [Column("expert by expert, ms", ms(work.loop)), Column("over it", over(work.loop))]
    columns += [Column(f"{other}, ms", ms(work.bf16)), Column(f"over {other}", over(work.bf16))]
    if work.loop:
        columns += [
            Column("MI300X, loop, ms", given("loop ms"), True),
            Column("MI300X, ms", given("ms"), True),
            Column("over the loop", given("over the loop", "{:.2f}x"), True),
        ]
    else:
        columns.append(Column("MI300X, ms", given("ms"), True))
    if work.source == "001-forward":
        columns += [
            Column("MI300X, bf16, ms", given("bf16 ms"), True),
            Column("over bf16, published", given("over bf16", "{:.2f}x"), True),
        ]
    means = [
        f"{statistics.geometric_mean(values):.2f}x {name}"
        for name, label in (("expert by expert", work.loop), (other, work.bf16))
        if (values := speedups(figures, found, work.ours, label))
    ]
    mean = f" Geometric means: {', '.join(means)}." if means else ""
    return paragraphs(f"{work.title}.{mean}", table(figures, found, columns))


def speedups(figures: Figures, found: Sequence[Shape], ours: str, label: str) -> list[float]:
    """How many times as fast as `label` the shapes are that have both times."""
    pairs = [(figures.us(PART, shape, label), figures.us(PART, shape, ours)) for shape in found]
    return [theirs / mine for theirs, mine in pairs if theirs and mine]


def rate(figures: Figures, shape: Shape, work: _Work) -> float | None:
    row = figures.row(PART, shape, work.ours)
    return None if row is None else row.rate


def _over(value: float | None, by: float) -> float | None:
    return None if value is None else value / by
