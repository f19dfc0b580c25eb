"""Seed 000 as tables: means over the 84 layers, means of each model, changes by layer, and the layers themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from fp8fn.bench import llm84, shapes
from fp8fn.bench.accuracy import worst
from fp8fn.bench.llm84 import Pair, Times
from fp8fn.bench.seeds.figures import Column, Figures, change, paragraphs, significant, table
from fp8fn.bench.tables import number
from fp8fn.timing import Timing

PART: Final = "layers"
# The layer that Primus-Turbo's main fails, which its geometric means leave out.
LEFT_OUT: Final = 47
# Products of each direction in units of 2MNK.
WAYS: Final[dict[str, int]] = {"forward": 1, "backward": 2, "combined": 3}
WHO: Final = ("fp8fn", "square", "bf16")


class Measured(NamedTuple):
    """A layer with its times, by fp8fn, by `BLOCKWISE_SQUARE` and in bf16."""

    layer: shapes.Shape
    pair: Pair
    square: Times | None

    def times(self, who: str) -> Times | None:
        return {"fp8fn": self.pair.fp8fn, "square": self.square, "bf16": self.pair.bf16}[who]

    def rate(self, who: str, way: str) -> float | None:
        """TFLOP/s of one direction."""
        times = self.times(who)
        return None if times is None else WAYS[way] * self.pair.operations / microseconds(times, way) / 1e6

    def gain(self, way: str) -> float:
        """Percent by which fp8fn's TFLOP/s are over bf16's."""
        return 100 * (microseconds(self.pair.bf16, way) / microseconds(self.pair.fp8fn, way) - 1)


def microseconds(times: Times, way: str) -> float:
    return {"forward": times.forward, "backward": times.backward, "combined": times.combined}[way]


def of_figures(figures: Figures) -> str:
    found = measured(figures)
    if not found:
        return ""
    return paragraphs(
        _means(figures, found), _models(figures, found), _gains(figures, found), _layers(figures, found),
        _milliseconds(figures, found),
    )  # fmt: skip


def measured(figures: Figures) -> list[Measured]:
    """The layers with times, in the order of their ids. Layers of equal sizes share their times."""
    rows = figures.rows[PART]
    pairs = llm84.pairs(replace(row, shape=shape) for shape, found in rows.items() for row in found.values())
    return [
        Measured(layer, pairs[layer[2:]], llm84.times(rows[layer[2:]], "fp8fn square"))
        for layer in shapes.LLM84
        if layer[2:] in pairs
    ]


def geomean(found: Iterable[Measured], who: str, way: str) -> float | None:
    """The geometric mean of TFLOP/s; None where a layer has no time."""
    rates = [each.rate(who, way) for each in found]
    return statistics.geometric_mean([rate for rate in rates if rate]) if rates and all(rates) else None


class _Line(NamedTuple):
    name: str
    ours: Mapping[str, float | None]
    gpu: str
    main: float | None
    published: float | None


def _rates(of: Callable[[_Line], float | None]) -> Callable[[_Line], str]:
    return lambda line: significant(of(line))


def _means(figures: Figures, found: Sequence[Measured]) -> str:
    """Geometric means without layer 47, as of an MI355X, and arithmetic ones with it, as of an MI300X."""
    without = [each for each in found if each.layer.id != LEFT_OUT]
    lines = [
        _Line(
            f"{way}, geometric mean", {who: geomean(without, who, way) for who in WHO}, "MI355X",
            figures.given("000-aggregate", "all", f"{way} TFLOP/s, main"),
            figures.given("000-aggregate", "all", f"{way} TFLOP/s"),
        )
        for way in WAYS
    ]  # fmt: skip
    for way in ("forward", "backward"):
        rates = {who: [each.rate(who, way) for each in found] for who in WHO}
        means = {who: statistics.fmean(filter(None, each)) if all(each) else None for who, each in rates.items()}
        main, last = (figures.given("000-mi300x", "all", f"{way} TFLOP/s, mean{end}") for end in (", main", ""))
        lines.append(_Line(f"{way}, mean", means, "MI300X", main, last))
    return paragraphs(
        f"Geometric means over {len(without)} layers without layer {LEFT_OUT}, which Primus-Turbo leaves out, and "
        f"means over all {len(found)} measured:",
        table(
            figures,
            lines,
            [
                Column("TFLOP/s", lambda line: line.name),
                *_who(lambda line, who: line.ours[who]),
                Column("published on", lambda line: line.gpu, True),
                Column("main", _rates(lambda line: line.main), True),
                Column("Primus-Turbo", _rates(lambda line: line.published), True),
            ],
        ),
    )


def _who(rate: Callable[[Any, str], float | None]) -> list[Column]:
    names = {"fp8fn": "fp8fn", "square": "fp8fn, BLOCKWISE_SQUARE", "bf16": "bf16"}
    return [Column(name, lambda line, who=who: significant(rate(line, who))) for who, name in names.items()]  # type: ignore[misc]


class _Model(NamedTuple):
    """A model with the layers of it that were measured, without layer 47."""

    name: str
    group: Sequence[Measured]

    def gain(self, way: str) -> str:
        return number(statistics.fmean(each.gain(way) for each in self.group), "{:+.1f}")


def _models(figures: Figures, found: Sequence[Measured]) -> str:
    """Combined rates of each model, and mean changes, which the report on an MI300X has."""
    models = [
        _Model(name, [each for each in found if each.layer.model == name and each.layer.id != LEFT_OUT])
        for name in dict.fromkeys(layer.model for layer in shapes.LLM84)
    ]
    models = [model for model in models if model.group]

    def given(source: str, figure: str, form: str) -> Callable[[_Model], str]:
        return lambda model: number(figures.given(source, model.name, figure), form)

    return paragraphs(
        f"Combined TFLOP/s by model, geometric means, with the number of layers measured, without layer {LEFT_OUT}:",
        table(
            figures,
            models,
            [
                Column("model", lambda model: f"{model.name} ({len(model.group)})"),
                *_who(lambda model, who: geomean(model.group, who, "combined")),
                Column("MI355X, main", given("000-models", "combined TFLOP/s, main", "{:.0f}"), True),
                Column("MI355X, Primus-Turbo", given("000-models", "combined TFLOP/s", "{:.0f}"), True),
            ],
        ),
        "Mean changes of TFLOP/s by model, in percent, of fp8fn over bf16"
        + (", and of Primus-Turbo over its main on an MI300X:" if figures.published else ":"),
        table(
            figures,
            models,
            [
                Column("model", lambda model: model.name),
                Column("forward, fp8fn", lambda model: model.gain("forward")),
                Column("backward, fp8fn", lambda model: model.gain("backward")),
                Column("forward, MI300X", given("000-mi300x-models", "forward change %", "{:+.2f}"), True),
                Column("backward, MI300X", given("000-mi300x-models", "backward change %", "{:+.2f}"), True),
            ],
        ),
    )


class _Spread(NamedTuple):
    name: str
    values: Mapping[str, float | None]


_STATISTICS: Final = (
    "median %", "mean %", "first quartile %", "third quartile %", "layers from +1 %", "layers to -1 %",
    "layers from +5 %", "layers to -5 %",
)  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """The statistics of changes in percent, by the names that the published ones have."""
    first, third = Timing(tuple(values)).quartiles
    found = (
        statistics.median(values), statistics.fmean(values), first, third, sum(value >= 1 for value in values),
        sum(value <= -1 for value in values), sum(value >= 5 for value in values), sum(value <= -5 for value in values),
    )  # fmt: skip
    return dict(zip(_STATISTICS, found, strict=True))


def _gains(figures: Figures, found: Sequence[Measured]) -> str:
    without = [each for each in found if each.layer.id != LEFT_OUT]
    if not without:
        return ""
    lines = []
    for way in WAYS:
        lines.append(_Spread(f"fp8fn over bf16, {way}", spread([each.gain(way) for each in without])))
        if figures.published:
            given = {name: figures.given("000-distribution", "all", f"{way} change, {name}") for name in _STATISTICS}
            lines.append(_Spread(f"MI355X, Primus-Turbo over main, {way}", given))

    def cell(name: str) -> Callable[[_Spread], str]:
        return lambda line: number(line.values[name], "{:+.2f}" if name.endswith("%") and name[0] != "l" else "{:.0f}")

    columns = [Column(name, cell(name)) for name in _STATISTICS]
    return paragraphs(
        f"Changes of TFLOP/s by layer, over {len(without)} layers without layer {LEFT_OUT}:",
        table(figures, lines, [Column("change", lambda line: line.name), *columns]),
    )


def _layers(figures: Figures, found: Sequence[Measured]) -> str:
    def rate(way: str, who: str = "fp8fn") -> Callable[[Measured], str]:
        return lambda each: significant(each.rate(who, way))

    def given(each: Measured, figure: str) -> float | None:
        sources = ("000-most", "000-least", "000-slower", "000-47")
        cells = (figures.given(source, str(each.layer.id), figure) for source in sources)
        return next((value for value in cells if value is not None), None)

    def changes(each: Measured) -> str:
        values = [given(each, f"{way} change %") for way in WAYS]
        return " / ".join(f"{value:+.2f}" for value in values if value is not None)

    return paragraphs(
        f"TFLOP/s of {len(found)} of {len(shapes.LLM84)} layers"
        + ("; Primus-Turbo publishes those of some layers:" if figures.published else ":"),
        table(
            figures,
            found,
            [
                Column("id", lambda each: str(each.layer.id)),
                Column("model", lambda each: each.layer.model),
                Column("M,N,K", lambda each: ",".join(map(str, each.layer[2:]))),
                Column("forward", rate("forward")),
                Column("backward", rate("backward")),
                Column("combined", rate("combined")),
                Column("combined, BLOCKWISE_SQUARE", rate("combined", "square")),
                Column("combined, bf16", rate("combined", "bf16")),
                Column("over bf16", lambda each: f"{each.pair.speedup:.2f}x"),
                Column("worst SNR, dB", lambda each: number(worst([each.pair.snr_db]))),
                Column(
                    "combined, MI355X: main → Primus-Turbo",
                    lambda each: change(given(each, "combined TFLOP/s, main"), given(each, "combined TFLOP/s")),
                    True,
                ),
                Column("forward / backward / combined over main, %", changes, True),
            ],
        ),
    )


def _milliseconds(figures: Figures, found: Sequence[Measured]) -> str:
    """The layers that the report on an MI300X gives in milliseconds."""
    if figures.published is None:
        return ""
    named = {of for way in ("forward", "backward") for of in figures.published.of(f"000-mi300x-{way}")}

    def ours(way: str) -> Callable[[Measured], str]:
        return lambda each: number(microseconds(each.pair.fp8fn, way) / 1e3, "{:.2f}")

    def given(way: str) -> Callable[[Measured], str]:
        def cell(each: Measured) -> str:
            source, of = f"000-mi300x-{way}", str(each.layer.id)
            return change(
                figures.given(source, of, f"{way} ms, main"), figures.given(source, of, f"{way} ms"), "{:.2f}"
            )

        return cell

    lines = [each for each in found if str(each.layer.id) in named]
    columns = [
        Column("id", lambda each: str(each.layer.id)),
        Column("M,N,K", lambda each: ",".join(map(str, each.layer[2:]))),
    ]
    for way in ("forward", "backward"):
        columns.append(Column(f"{way}, ms", ours(way)))
        columns.append(Column(f"{way}, MI300X: main → Primus-Turbo, ms", given(way), True))
    return paragraphs("The layers with published milliseconds:" if lines else "", table(figures, lines, columns))
