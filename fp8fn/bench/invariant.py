"""The cost of batch invariance, product by product: `python -m fp8fn bench invariant`.

Products of M rows by an FP8 weight of an 8B model's layer, with and without `Recipe(batch_invariant=True)`, in turn in
one process, beside bf16. Three kinds of activations are measured:
- "x in bf16": `gemm(x, w)`;
- "prequant": `gemm(x, w, prequant=True)`, which quantizes x in the call;
- "x in FP8": `gemm(q, w)` of activations that were quantized before.

A call multiplies by several weights in turn, so that no product finds its weight in the L2. Figures are µs of one
product, from a CUDA graph where there is one. The cost is the ratio of both times; a line's cost is the geometric mean
over the weights. The promise itself is checked: each row must have the bits that it has in a larger product, at another
place. SNR compares with the float64 product of the bf16 operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from statistics import geometric_mean
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import fp8fn
from fp8fn import Recipe, ScaledTensor
from fp8fn.bench import command, tables
from fp8fn.bench.command import Suite
from fp8fn.bench.decode import SCHEDULE, Weights, microseconds
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case
from fp8fn.timing import Call

INVARIANT: Final = Recipe(batch_invariant=True)
PROMISE: Final = ", invariant"
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MORE_ROWS: Final = (512, 1024, 4096)  # which the last line leaves out
LAYER: Final = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))  # (N, K)
COPIES: Final = 16  # copies of a weight of at least 16 MB are together larger than the L2
_OTHER_ROWS: Final = 4096  # ahead of the measured ones in the product that they are compared with


class Kind(NamedTuple):
    """Activations that are quantized before the call, or in it."""

    before: bool = False
    prequant: bool = False


KINDS: Final = {"x in bf16": Kind(), "prequant": Kind(prequant=True), "x in FP8": Kind(before=True)}


class Rows(Weights):
    """`x (M, K) @ w (K, N)` for each of several w. The rows of x are the last ones of `every`."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        super().__init__(0, shape, COPIES if on_gpu else 2, device)
        self.others = _OTHER_ROWS if on_gpu else 5

    @cached_property
    def every(self) -> Tensor:
        return normal(self.others + self.M, self.K, self.device, 0)

    @cached_property
    def x(self) -> Tensor:
        return self.every[self.others :]

    def given(self, x: Tensor, quantized: bool) -> Tensor | ScaledTensor:
        return fp8fn.quantize(x, (1, 128)) if quantized else x

    def accuracy(self, found: Tensor, kind: str, promised: bool) -> dict[str, float]:
        """SNR of the product by the last weight. Raises ArithmeticError where a promised row has other bits."""
        if promised:
            given = self.given(self.every, KINDS[kind].before), self.quantized[-1]
            whole = fp8fn.gemm(*given, recipe=INVARIANT, prequant=KINDS[kind].prequant)[self.others :]
            differ = (whole.view(torch.int16) != found.view(torch.int16)).any(-1).nonzero()
            if differ.numel():
                raise ArithmeticError(
                    f"{len(differ)} of {self.M} rows have other bits among {len(whole) + self.others}, row "
                    f"{int(differ[0])} first"
                )
        return {"out": self.snr_db(found)}


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`."""
    rows = Rows(shape, device)

    def case(kind: str, promised: bool) -> Case:
        recipe = INVARIANT if promised else Recipe()
        multiply = partial(fp8fn.gemm, recipe=recipe, prequant=KINDS[kind].prequant)

        def build() -> Call:
            return rows.round(multiply, rows.quantized, rows.given(rows.x, KINDS[kind].before))

        check: Callable[[Any], dict[str, float]] = partial(rows.accuracy, kind=kind, promised=promised)
        return Case("fp8fn", kind + PROMISE * promised, build, check, bytes=rows.elements)

    found = [case(kind, promised) for kind in KINDS for promised in (False, True)]
    return [*found, rows.case("torch", "bf16", 2, lambda: rows.round(torch.mm, rows.w))]


def times(run: dict[str, Any]) -> dict[str, dict[tuple[int, ...], float]]:
    """µs of a product by case and shape."""
    found: dict[str, dict[tuple[int, ...], float]] = {}
    for row in tables.rows_of(run):
        if (time := microseconds(row)) is not None:
            found.setdefault(row.case, {})[row.shape] = time
    return found


def costs(run: dict[str, Any], kind: str) -> dict[tuple[int, ...], float]:
    """The time with the promise over that without it, by shape."""
    found = times(run)
    promised, plain = found.get(kind + PROMISE, {}), found.get(kind, {})
    return {shape: time / plain[shape] for shape, time in promised.items() if shape in plain}


def table(run: dict[str, Any]) -> str:
    """For each kind of activations a line for each M, and one for all of `ROWS`.

    A weight's column has µs without and with the promise, and their ratio.
    """
    parts = []
    for kind in KINDS:
        body = lines(run, kind)
        weights = [f"{n} x {k}, µs" for n, k in _weights(run)]
        if body:
            headers = (f"{kind}: M", *weights, "cost", "lowest to highest", "with the promise, speedup over bf16")
            parts += [tables.markdown(body, headers), ""]
    return "\n".join([*parts, tables.provenance(run)])


def lines(run: dict[str, Any], kind: str) -> list[list[str]]:
    """The lines of one kind's table."""
    found, cost = times(run), costs(run, kind)
    promised, plain, bf16 = (found.get(case, {}) for case in (kind + PROMISE, kind, "bf16"))

    def summary(name: str, shapes: Sequence[tuple[int, ...]], cells: Sequence[str]) -> list[str]:
        ratios = [cost[shape] for shape in shapes]
        faster = [bf16[shape] / promised[shape] for shape in shapes if shape in bf16]
        over = f"{geometric_mean(faster):.2f}x" if faster else ""
        return [name, *cells, f"{geometric_mean(ratios):.2f}x", f"{min(ratios):.2f}x to {max(ratios):.2f}x", over]

    body = []
    for m in sorted({shape[0] for shape in cost}):
        shapes = [(m, n, k) for n, k in _weights(run)]
        cells = [
            f"{plain[shape]:.1f} → {promised[shape]:.1f} ({cost[shape]:.2f}x)" if shape in cost else "n/a"
            for shape in shapes
        ]
        body.append(summary(str(m), [shape for shape in shapes if shape in cost], cells))
    few = [shape for shape in cost if shape[0] <= max(ROWS)]
    if few:
        body.append(summary(f"up to {max(ROWS)}", few, [""] * len(_weights(run))))
    return body


def _weights(run: dict[str, Any]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(row.shape[1:] for row in tables.rows_of(run)))


SUITES: Final = {
    "layer": Suite(
        tuple((m, n, k) for n, k in LAYER for m in (*ROWS, *MORE_ROWS)), cases, table, schedule=SCHEDULE, graphs=True
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("invariant", __doc__, SUITES, argv)
