"""Products of the same few rows by several FP8 weights, as suites of `python -m fp8fn bench decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.bench import tables
from fp8fn.bench.accuracy import snr_db, worst
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case, Row
from fp8fn.timing import Call

_BLOCK: Final = (128, 128)
_JOINT: Final = "fp8fn in one launch"
_APART: Final = "fp8fn one by one"
_BF16: Final = "torch bf16"
# Bytes of weights that a call reads at least: more than the L2 holds.
_LEAST: Final = 2e8


class Siblings:
    """Sets of weights `(N, K)`, one for each of `widths`, and rows `x (M, K)` that all are multiplied by."""

    def __init__(self, m: int, k: int, widths: Sequence[int], device: torch.device) -> None:
        self.m, self.k, self.widths, self.device = m, k, widths, device
        self.copies = min(64, int(_LEAST / self.elements) + 1) if device.type == "cuda" else 2

    @property
    def elements(self) -> float:
        """Elements of a set."""
        return float(self.k * sum(self.widths))

    @cached_property
    def x(self) -> Tensor:
        return normal(self.m, self.k, self.device, 0)

    def matrices(self, copy: int) -> list[Tensor]:
        return [normal(n, self.k, self.device, 1 + copy * len(self.widths) + i) for i, n in enumerate(self.widths)]

    @cached_property
    def quantized(self) -> list[list[ScaledTensor]]:
        return [[fp8fn.quantize(w, _BLOCK).mT for w in self.matrices(copy)] for copy in range(self.copies)]

    def joint(self) -> Call:
        given = [([w.data for w in each], [w.scale for w in each], [None] * len(each)) for each in self.quantized]
        return self._round(lambda parts: torch.ops.fp8fn.mm_a16w8_siblings(self.x, *parts, _BLOCK), given)

    def apart(self) -> Call:
        return self._round(lambda each: [fp8fn.gemm(self.x, w) for w in each], self.quantized)

    def bf16(self) -> Call:
        sets = [[w.mT for w in self.matrices(copy)] for copy in range(self.copies)]
        return self._round(lambda each: [torch.mm(self.x, w) for w in each], sets)

    def _round(self, multiply: Callable[[Any], list[Tensor]], sets: Sequence[Any]) -> Call:
        """The call that multiplies by each set, and returns the products by the last one."""

        def call() -> list[Tensor]:
            for each in sets:
                out = multiply(each)
            return out

        return call

    def snr_db(self, found: Sequence[Tensor]) -> dict[str, float]:
        exact = (self.x.double() @ w.double().mT for w in self.matrices(self.copies - 1))
        return {"out": min(snr_db(wanted, out) for wanted, out in zip(exact, found, strict=True))}

    def cases(self) -> list[Case]:
        def case(label: str, size: int, build: Callable[[], Call]) -> Case:
            peer, _, name = label.partition(" ")
            return Case(peer, name, build, self.snr_db, bytes=size * self.copies * self.elements)

        return [case(_JOINT, 1, self.joint), case(_APART, 1, self.apart), case(_BF16, 2, self.bf16)]


def qkv(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of `(M, N, B, K)`: weights of N, B and B columns, as of q, k and v."""
    m, n, b, k = shape
    return Siblings(m, k, (n, b, b), device).cases()


def gate_up(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of `(M, N, K)`: two weights of N columns, as of gate and up."""
    m, n, k = shape
    return Siblings(m, k, (n, n), device).cases()


def _columns(shape: tuple[int, ...]) -> int:
    return shape[1] + 2 * shape[2] if len(shape) == 4 else 2 * shape[1]


def table(run: dict[str, Any]) -> str:
    """A line for each shape: µs of a set of products, and how much faster one launch is."""
    rows = tables.rows_of(run)

    def microseconds(row: Row | None) -> float | None:
        if row is None or (time := row.graph_us or row.us) is None:
            return None
        return time * _columns(row.shape) * row.shape[-1] * (1 + (row.label == _BF16)) / row.bytes

    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        found = {row.label: row for row in rows if row.shape == shape}
        times = {label: microseconds(found.get(label)) for label in (_JOINT, _APART, _BF16)}
        ours = times[_JOINT]
        rate = tables.number(ours and _columns(shape) * shape[-1] / ours / 1e6, "{:.2f}")
        least = worst(value for row in found.values() for value in row.snr_db.values())
        faster = [
            tables.number(ours and (time := times[label]) and time / ours, "{:.2f}x") for label in (_APART, _BF16)
        ]
        cells = [tables.number(time, "{:.1f}") for time in times.values()]
        lines.append([",".join(map(str, shape)), *cells, rate, *faster, tables.number(least, "{:.1f}")])
    headers = (
        "shape", *(f"{label}, µs" for label in (_JOINT, _APART, _BF16)), "TB/s", "over one by one", "over bf16",
        "worst SNR, dB",
    )  # fmt: skip
    return "\n".join([tables.markdown(lines, headers), "", tables.provenance(run)])
