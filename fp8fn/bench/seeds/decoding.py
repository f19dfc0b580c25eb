"""Seeds 002 and 004 as tables: batched products, and MX-FP8 products of few rows and of experts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import prod
from typing import Final, NamedTuple

from fp8fn.bench import decode
from fp8fn.bench.measure import Row
from fp8fn.bench.seeds.figures import Column, Figures, paragraphs, ratio, significant, sizes, table
from fp8fn.bench.seeds.protocols import BATCHED, ROUTED, Shape
from fp8fn.bench.shapes import MX_PARALLEL
from fp8fn.bench.tables import number

_BATCHED, _DENSE, _EXPERTS = "products", "dense", "experts"
_MX, _PLAIN, _BF16 = "fp8fn MX-FP8", "triton dot_scaled", "torch bf16"
_WIDE: Final = "fp8fn w in 128x128"
_DEQUANTIZED: Final = "torch dequantize, then bf16"
_PUBLISHED_TP: Final = 4
_IDS: Final = tuple(dict.fromkeys(shape[1] for shape in ROUTED))


def of_batched(figures: Figures) -> str:
    """Seed 002."""
    found = figures.measured(_BATCHED, BATCHED)

    def us(shape: Shape, label: str) -> float | None:
        return product_us(figures.row(_BATCHED, shape, label))

    def cell(label: str) -> Callable[[Shape], str]:
        return lambda shape: number(us(shape, label), "{:.2f}")

    def rate(shape: Shape) -> float | None:
        row, time = figures.row(_BATCHED, shape, _WIDE), us(shape, _WIDE)
        return 2 * prod(row.shape) / time / 1e6 if row and time else None

    def given(shape: Shape) -> float | None:
        source = "002-large" if shape[1] > 128 else "002-batched"
        return figures.given(source, sizes(shape), "TFLOP/s")

    gains = [theirs / ours for shape in found if (theirs := us(shape, _BF16)) and (ours := us(shape, _WIDE))]
    mean = f" Geometric mean over bf16: {statistics.geometric_mean(gains):.2f}x." if gains else ""
    return paragraphs(
        f"µs of a batch, in a CUDA graph where there is one, with another weight for each call.{mean}" if found else "",
        table(
            figures,
            found,
            [
                Column("B,M,N,K", sizes),
                Column("fp8fn, µs", cell(_WIDE)),
                Column("bf16, µs", cell(_BF16)),
                Column("dequantize, then bf16, µs", cell(_DEQUANTIZED)),
                Column("over bf16", lambda shape: ratio(us(shape, _BF16), us(shape, _WIDE))),
                Column("fp8fn, TFLOP/s", lambda shape: significant(rate(shape))),
                Column("MI350X, TFLOP/s", lambda shape: number(given(shape), "{:g}"), True),
            ],
        ),
    )


class Weight(NamedTuple):
    """The weight of a projection on one GPU."""

    projection: str
    parallel: int
    k: int
    n: int


WEIGHTS: Final = tuple(
    Weight(name, parallel, k, n) for name, by_tp in MX_PARALLEL.items() for parallel, (k, n) in by_tp.items()
)


def of_decoding(figures: Figures) -> str:
    """Seed 004."""
    return paragraphs(_dense(figures), _compared(figures), _absolute(figures), _experts(figures))


def dense_us(figures: Figures, weight: Weight, m: int, label: str) -> float | None:
    return product_us(figures.row(_DENSE, (m, weight.n, weight.k), label))


def product_us(row: Row | None) -> float | None:
    """Microseconds of one product of a call, from its CUDA graph if there is one."""
    return None if row is None else decode.microseconds(row)


def _dense(figures: Figures) -> str:
    found = [weight for weight in WEIGHTS if any(dense_us(figures, weight, m, _MX) for m in decode.MX_ROWS)]

    def cell(m: int) -> Callable[[Weight], str]:
        def text(weight: Weight) -> str:
            ours, plain = (dense_us(figures, weight, m, label) for label in (_MX, _PLAIN))
            return number(ours, "{:.2f}") + (f" ({plain:.2f})" if ours and plain else "")

        return text

    columns = [
        Column("weight", lambda weight: weight.projection),
        Column("TP", lambda weight: str(weight.parallel)),
        Column("K,N", lambda weight: f"{weight.k},{weight.n}"),
        *(Column(f"M={m}", cell(m)) for m in decode.MX_ROWS),
    ]
    caption = "Dense products, µs of one in a CUDA graph where there is one, and in brackets those of `tl.dot_scaled`:"
    return paragraphs(caption if found else "", table(figures, found, columns))


def _compared(figures: Figures) -> str:
    if figures.published is None:
        return ""
    found = [
        weight
        for weight in WEIGHTS
        if weight.parallel == _PUBLISHED_TP and any(dense_us(figures, weight, m, _PLAIN) for m in decode.MX_ROWS)
    ]

    def cell(m: int) -> Callable[[Weight], str]:
        def text(weight: Weight) -> str:
            ours = ratio(dense_us(figures, weight, m, _PLAIN), dense_us(figures, weight, m, _MX))
            given = figures.given("004-dense", sizes((m, weight.n, weight.k)), "over Triton")
            return f"{ours} / {number(given, '{:.2f}x')}"

        return text

    return paragraphs(
        "Speedup over `tl.dot_scaled` at TP 4: fp8fn / aiter on an MI355X. A GPU without a matrix instruction that "
        "takes scales widens the operands of `tl.dot_scaled`:"
        if found
        else "",
        table(
            figures,
            found,
            [
                Column("weight", lambda weight: weight.projection),
                *(Column(f"M={m}", cell(m)) for m in decode.MX_ROWS),
            ],
        ),
    )


def _absolute(figures: Figures) -> str:
    if figures.published is None:
        return ""
    shapes = [tuple(map(int, of.split(","))) for of in figures.published.of("004-us")]
    found = figures.measured(_DENSE, shapes)

    def cell(label: str) -> Callable[[Shape], str]:
        return lambda shape: number(product_us(figures.row(_DENSE, shape, label)), "{:.2f}")

    def given(figure: str) -> Callable[[Shape], str]:
        return lambda shape: number(figures.given("004-us", sizes(shape), figure), "{:.2f}")

    return paragraphs(
        "Dense products with published µs:" if found else "",
        table(
            figures,
            found,
            [
                Column("M,N,K", sizes),
                Column("fp8fn, µs", cell(_MX)),
                Column("`tl.dot_scaled`, µs", cell(_PLAIN)),
                Column("bf16, µs", cell(_BF16)),
                Column("MI355X, HIP, µs", given("HIP µs"), True),
                Column("MI355X, Triton, µs", given("Triton µs"), True),
            ],
        ),
    )


def _experts(figures: Figures) -> str:
    sides = [shape for shape in dict.fromkeys((e, n, k) for e, _, n, k in ROUTED) if _any(figures, shape)]

    def cell(ids: int) -> Callable[[Shape], str]:
        def text(shape: Shape) -> str:
            times = [_routed_us(figures, shape, ids, label) for label in (_MX, _PLAIN)]
            ours, plain = times
            return number(ours) + (f" ({plain:.1f}, {ratio(plain, ours)})" if ours and plain else "")

        return text

    def envelope(shape: Shape) -> str:
        most = figures.given("004-experts", sizes(shape), "routed rows, most")
        return f"up to {most:.0f} rows" if most else ""

    claim = ""
    if figures.published:
        all_, eighth = figures.published.of("004-experts")["all"], figures.published.of("004-experts-8")["768,6144"]
        ranges = [f"{each['over Triton, least']:g} to {each['over Triton, most']:g}x" for each in (all_, eighth)]
        claim = (
            " aiter's kernel serves up to a number of rows, beyond which Triton is faster. It publishes "
            f"{ranges[0]} there, and {ranges[1]} for N,K = 768,6144."
        )
    return paragraphs(
        "Products of routed rows, µs of a call, in brackets those of `tl.dot_scaled` and the speedup over it." + claim
        if sides
        else "",
        table(
            figures,
            sides,
            [
                Column("E,N,K", sizes),
                *(Column(f"{ids} rows", cell(ids)) for ids in _IDS),
                Column("MI355X, aiter's kernel", envelope, True),
            ],
        ),
    )


def _any(figures: Figures, shape: Shape) -> bool:
    return any(_routed_us(figures, shape, ids, _MX) for ids in _IDS)


def _routed_us(figures: Figures, shape: Sequence[int], ids: int, label: str) -> float | None:
    experts, n, k = shape
    row = figures.row(_EXPERTS, (experts, ids, n, k), label)
    return None if row is None else row.graph_us or row.us
