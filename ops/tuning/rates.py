"""Rates of a chip, for estimates: products in bf16, copies, and this library's quantizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from fp8fn.ops.targets import Chip

# The chip that the name of a target stands for, where there is none to ask: one with a table.
NAMED: Final[Mapping[str, Chip]] = {
    "sm90": Chip("NVIDIA H200", 132),
    "h200": Chip("NVIDIA H200", 132),
    "h100": Chip("NVIDIA H100 80GB HBM3", 132),
    "h800": Chip("NVIDIA H800", 132),
    "gh200": Chip("NVIDIA GH200 480GB", 132),
    "h20": Chip("NVIDIA H20", 78),
}


@dataclass(frozen=True)
class Rates:
    """`bf16` in TFLOP/s of `torch.mm` on a warm chip; `copy` in TB/s, bytes read and bytes written."""

    bf16: float
    copy: float

    @property
    def quantize(self) -> float:
        """TB/s of a quantizer, bytes read and bytes written.

        0.8 of a copy's: with that and 3 µs a launch, forward and backward combined of the layers in
        `docs/results/llm84.json` come out within 3 % rms; with all of a copy's 2 % too fast. Alone and one after the
        other quantizers have 0.9 (`docs/results/quant.json`); the rest is what a layer has besides.
        """
        return 0.8 * self.copy


@dataclass(frozen=True)
class HostTimes:
    """Microseconds of host time of a call: a product, quantizers with one and with two results, and `torch.mm`."""

    product: float
    quantize: float
    dual: float
    bf16: float


# `bench host` on the host of an H200 (docs/results/host.json). Compiled code makes the same calls.
HOST: Final = HostTimes(product=19.4, quantize=25.4, dual=32.2, bf16=12.3)

# By `bench linear --suite llm84`: the mean of two days' medians of bf16 forward and backward, 687 and 705, and a copy.
_H200: Final = Rates(bf16=696.0, copy=3.94)
_BY_NAME: Final[Mapping[str, Rates]] = {
    "NVIDIA H200": _H200,
    # The same processor at the same power with 3.35 TB/s by its data sheet for the H200's 4.8. Not measured.
    "NVIDIA H100 80GB HBM3": replace(_H200, copy=_H200.copy * 3.35 / 4.8),
}
_MULTIPROCESSORS: Final = 132


def rates_of(chip: Chip) -> Rates:
    """Rates of an sm90 chip, the H200's if its name is unknown, with bf16 in proportion to its multiprocessors."""
    found = _BY_NAME.get(chip.name, _H200)
    return replace(found, bf16=found.bf16 * chip.multiprocessors / _MULTIPROCESSORS)
