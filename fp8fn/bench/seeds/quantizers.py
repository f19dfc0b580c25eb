"""Seed 003 as tables: quantizers of experts' weights, and of tokens in groups."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from fp8fn.bench import moe
from fp8fn.bench.seeds.figures import Column, Figures, change, paragraphs, sizes, table
from fp8fn.bench.seeds.protocols import BY_GROUP, TRANSPOSED, WEIGHTS, Shape
from fp8fn.bench.tables import number

GPUS: Final = {"MI300X": "003-mi300x", "H100": "003-h100", "MI250X": "003-mi250x"}
_COPY: Final = "torch copy"


def of_figures(figures: Figures) -> str:
    weights, tokens = figures.measured("weights", WEIGHTS), figures.measured("tokens", moe.TOKENS)
    changed = "; torchao's before → after its new configurations" if figures.published else ""
    return paragraphs(
        f"Weights, µs of a quantizer{changed}:" if weights else "",
        table(figures, weights, _weights(figures, "µs", _us("weights", figures))),
        _same_gpu(figures, weights),
        "Weights, GB/s. torchao's count, 5 bytes an element: two reads in 16 bits and a write in 8. fp8fn reads once "
        "where a row fits on chip, so that its figure is not its bandwidth. A copy counts 4 bytes:"
        if weights
        else "",
        table(figures, weights, _weights(figures, "GB/s", _gb_s("weights", figures))),
        f"Tokens in groups, µs{changed}:" if tokens else "",
        table(
            figures,
            tokens,
            [
                Column("G,M,N", sizes),
                Column("fp8fn, µs", _us("tokens", figures)(f"fp8fn {BY_GROUP}")),
                Column("fp8fn, GB/s", _gb_s("tokens", figures)(f"fp8fn {BY_GROUP}")),
                Column("a copy, µs", _us("tokens", figures)(_COPY)),
                Column("MI300X by rows, µs", _given(figures, "003-rowwise", "triton µs"), True),
                Column(
                    "MI300X by rows of a transposed copy, µs",
                    _given(figures, "003-rowwise", "triton_transpose µs"),
                    True,
                ),
                Column("MI300X by columns, µs", _given(figures, "003-colwise", "µs"), True),
            ],
        ),
    )


def _same_gpu(figures: Figures, found: Sequence[Shape]) -> str:
    """The geometric mean over torchao's faster kernel, where its figures are of this GPU's model."""
    lines = []
    for gpu, source in GPUS.items():
        if gpu not in figures.device:
            continue
        pairs = []
        for shape in found:
            both = [figures.given(source, sizes(shape), f"{kernel} µs") for kernel in ("atomic", "reduction")]
            fastest, ours = min(filter(None, both), default=None), figures.us("weights", shape, f"fp8fn {TRANSPOSED}")
            if fastest and ours:
                pairs.append(fastest / ours)
        if pairs:
            mean = statistics.geometric_mean(pairs)
            lines.append(
                f"Over the faster of torchao's two kernels at each of {len(pairs)} shapes, published for the same "
                f"model of GPU: {mean:.2f}x, geometric mean (lowest {min(pairs):.2f}x)."
            )
    return "\n".join(lines)


def _weights(figures: Figures, unit: str, ours: Callable[[str], Callable[[Shape], str]]) -> list[Column]:
    columns = [
        Column("E,N,K", sizes),
        Column("fp8fn", ours(f"fp8fn {TRANSPOSED}")),
        Column("a copy", ours(_COPY)),
    ]
    for gpu, source in GPUS.items():
        for kernel in ("atomic", "reduction"):
            columns.append(Column(f"{gpu}, {kernel}", _given(figures, source, f"{kernel} {unit}"), True))
        if gpu == "H100":
            columns.append(Column(f"{gpu}, torch.compile", _given(figures, source, f"torch {unit}"), True))
    if unit == "µs":
        columns.append(Column("MI300X later, atomic, many configurations → one", _single(figures), True))
    return columns


def _us(part: str, figures: Figures) -> Callable[[str], Callable[[Shape], str]]:
    return lambda label: lambda shape: number(figures.us(part, shape, label))


def _gb_s(part: str, figures: Figures) -> Callable[[str], Callable[[Shape], str]]:
    def cell(label: str) -> Callable[[Shape], str]:
        def gb_s(shape: Shape) -> str:
            row = figures.row(part, shape, label)
            return number(None if row is None or row.us is None else row.bytes / row.us / 1e3, "{:.0f}")

        return gb_s

    return cell


def _given(figures: Figures, source: str, figure: str) -> Callable[[Shape], str]:
    def cell(shape: Shape) -> str:
        before, after = (figures.given(source, sizes(shape), f"{figure}{when}") for when in (", before", ""))
        return change(before, after, "{:.0f}" if figure.endswith("GB/s") else "{:.1f}")

    return cell


def _single(figures: Figures) -> Callable[[Shape], str]:
    def cell(shape: Shape) -> str:
        many, one = (figures.given("003-single", sizes(shape), f"atomic ms{which}") for which in (", expanded", ""))
        return change(many and 1e3 * many, one and 1e3 * one, "{:.0f}")

    return cell
