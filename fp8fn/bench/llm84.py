"""Primus-Turbo's protocol on its 84 layers: forward and backward apart, quantization counted in, beside bf16.

2MNK operations forward, 4MNK backward; combined is 6MNK by the sum of both times. SNR of out, dA and dB is that of all
their elements against bf16's. Of layers with equal sizes one is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
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

# Small turns: 1.8 PFLOP in all for one pass of bf16, of which a fifth in the largest layer.
SCHEDULE: Final = Schedule(rounds=3, burst_ms=15.0, warm_s=0.1)


class _Reference:
    """What bf16 gives for a layer."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    @cached_property
    def out(self) -> Tensor:
        return F.linear(*self._layer.leaves)

    @cached_property
    def grads(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self._layer.leaves, self._layer.g, retain_graph=True)


def cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """Of one `(M, N, K)`: forward and backward, fp8fn's and bf16's."""
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

    once, twice = layer.operations, 2 * layer.operations
    return [
        Case("fp8fn", "forward", lambda: forward(fp8fn.linear), forward_snr, once),
        Case("fp8fn", "backward", lambda: backward(fp8fn.linear(*layer.leaves)), backward_snr, twice),
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
    """A layer by fp8fn and by bf16; `operations` are those of one product, `snr_db` the worst of out, dA and dB."""

    operations: float
    fp8fn: Times
    bf16: Times
    snr_db: float

    @property
    def speedup(self) -> float:
        """Forward and backward combined."""
        return self.bf16.combined / self.fp8fn.combined


def pairs(rows: Iterable[Row]) -> dict[tuple[int, ...], Pair]:
    """By shape; a shape of which a time is missing is left out."""
    by_shape: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows:
        by_shape.setdefault(row.shape, {})[row.label] = row
    found = {}
    for shape, by_label in by_shape.items():
        ours, theirs = _times(by_label, "fp8fn"), _times(by_label, "torch bf16")
        snr = worst(value for row in by_label.values() for value in row.snr_db.values())
        if ours is not None and theirs is not None and snr is not None:
            found[shape] = Pair(by_label["fp8fn forward"].operations, ours, theirs, snr)
    return found


def _times(by_label: Mapping[str, Row], who: str) -> Times | None:
    forward, backward = (by_label.get(f"{who} {way}") for way in ("forward", "backward"))
    if forward is None or backward is None or forward.us is None or backward.us is None:
        return None
    return Times(forward.us, backward.us)
