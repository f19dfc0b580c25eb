"""Primus-Turbo's protocol on its 84 layers: forward and backward timed separately, quantization included, beside bf16.

Forward has 2MNK operations, backward 4MNK; combined is 6MNK over the sum of both times. SNR compares all elements of
out, dA and dB with bf16's. Layers of equal sizes are measured once. The recipe `BLOCKWISE_SQUARE` is timed beside
`BLOCKWISE`; the table has one line of all layers for each, and a line of each model for `BLOCKWISE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fp8fn
from fp8fn.bench.accuracy import snr_db, worst
from fp8fn.bench.layer import Layer
from fp8fn.bench.measure import Case, Row
from fp8fn.bench.shapes import LLM84
from fp8fn.timing import Call, Schedule

SHAPES: Final = tuple(dict.fromkeys((s.M, s.N, s.K) for s in LLM84))

# Turns are short: one pass of bf16 takes 1.8 PFLOP, a fifth of it in the largest layer.
SCHEDULE: Final = Schedule(rounds=3, burst_ms=15.0, warm_s=0.1)


class _Reference:
    """The output and the gradients of a layer in bf16."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    @cached_property
    def out(self) -> Tensor:
        return F.linear(*self._layer.leaves)

    @cached_property
    def grads(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self._layer.leaves, self._layer.g, retain_graph=True)


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`: forward and backward, by fp8fn and in bf16."""
    layer = Layer(shape, device)
    reference = _Reference(layer)

    def forward(linear: Callable[[Tensor, Tensor], Tensor]) -> Call:
        x, w = layer.leaves
        return lambda: linear(x, w)

    def backward(out: Tensor) -> Call:
        return lambda: torch.autograd.grad(out, layer.leaves, layer.g, retain_graph=True)

    def forward_snr(out: Any) -> dict[str, float]:
        return {"out": snr_db(reference.out.detach(), out.detach())}

    def backward_snr(grads: Any) -> dict[str, float]:
        return {name: snr_db(ref, grad) for name, ref, grad in zip(("dA", "dB"), reference.grads, grads, strict=True)}

    square = partial(fp8fn.linear, recipe=fp8fn.BLOCKWISE_SQUARE)
    once, twice = layer.operations, 2 * layer.operations
    return [
        Case("fp8fn", "forward", lambda: forward(fp8fn.linear), forward_snr, once),
        Case("fp8fn", "backward", lambda: backward(fp8fn.linear(*layer.leaves)), backward_snr, twice),
        Case("fp8fn", "square forward", lambda: forward(square), forward_snr, once),
        Case("fp8fn", "square backward", lambda: backward(square(*layer.leaves)), backward_snr, twice),
        Case("torch", "bf16 forward", lambda: forward(F.linear), None, once),
        Case("torch", "bf16 backward", lambda: backward(reference.out), None, twice),
    ]


class Times(NamedTuple):
    """Microseconds of one layer."""

    forward: float
    backward: float

    @property
    def combined(self) -> float:
        return self.forward + self.backward


class Pair(NamedTuple):
    """Times of a layer by fp8fn and in bf16, with the operations of one product and the worst SNR of out, dA and dB."""

    operations: float
    fp8fn: Times
    bf16: Times
    snr_db: float

    @property
    def speedup(self) -> float:
        """Speedup of forward and backward combined."""
        return self.bf16.combined / self.fp8fn.combined


def pairs(rows: Iterable[Row], who: str = "fp8fn") -> dict[tuple[int, ...], Pair]:
    """The pair of each shape, by `who`: "fp8fn" or "fp8fn square"; shapes with a missing time are left out."""
    by_shape: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, {})[row.label] = row
    found = {}
    for shape, by_label in by_shape.items():
        ours, theirs = times(by_label, who), times(by_label, "torch bf16")
        if ours is not None and theirs is not None:
            forward, backward = by_label[f"{who} forward"], by_label[f"{who} backward"]
            snr = worst((*forward.snr_db.values(), *backward.snr_db.values()))
            if snr is not None:
                found[shape] = Pair(forward.operations, ours, theirs, snr)
    return found


def times(by_label: Mapping[str, Row], who: str) -> Times | None:
    """The times of a layer by `who`: "fp8fn", "fp8fn square" or "torch bf16"; None where one is missing."""
    forward, backward = (by_label.get(f"{who} {way}") for way in ("forward", "backward"))
    if forward is None or backward is None or forward.us is None or backward.us is None:
        return None
    return Times(forward.us, backward.us)
