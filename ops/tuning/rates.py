"""Rates of a chip, for estimates: products in bf16, copies, and this library's quantizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from fp8fn.ops.targets import Chip, Facts, facts_of
from fp8fn.ops.tuning.nearest import SAME

# The chip that the name of a target stands for, where there is none to ask: one with a table.
NAMED: Final[Mapping[str, Chip]] = {
    "sm90": Chip("NVIDIA H200", 132),
    "h200": Chip("NVIDIA H200", 132),
    "h100": Chip("NVIDIA H100 80GB HBM3", 132),
    "h100 pcie": Chip("NVIDIA H100 PCIe", 114),
    "h800": Chip("NVIDIA H800", 132),
    "gh200": Chip("NVIDIA GH200 480GB", 132),
    "h20": Chip("NVIDIA H20", 78),
}


@dataclass(frozen=True)
class Rates:
    """`bf16` in TFLOP/s of `torch.mm` on a warm chip; `copy` in TB/s, bytes read and bytes written.

    `product` is the time of a product in FP8 over that of the model of an H200's multiprocessors.
    """

    bf16: float
    copy: float
    product: float = 1.0

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


@dataclass(frozen=True)
class _Known:
    """Rates of a chip that was measured."""

    facts: Facts
    rates: Rates


# The H200 by `bench linear --suite llm84`: the mean of two days' medians of bf16 forward and backward, 687 and 705, and
# a copy. The H100's bf16 is that of the same layers, 711; its copy has the H200's share of the data sheet's bandwidth.
_H200: Final = Rates(bf16=696.0, copy=3.94)
_COPY_SHARE: Final = _H200.copy / 4.8
_MEASURED: Final = (
    _Known(Facts(132, 4.8, 1.98), _H200),
    _Known(Facts(132, 3.35, 1.98), Rates(bf16=711.0, copy=_COPY_SHARE * 3.35)),
)
# TFLOP/s in bf16 by data sheet of chips whose matrix instructions are slower than multiprocessors and clock say.
_LIMITED: Final[Mapping[str, float]] = {"NVIDIA H20": 148.0}
_MULTIPROCESSORS: Final = 132
_CLOCK: Final = 1.98


def rates_of(chip: Chip) -> Rates:
    """Rates of an sm90 chip by its facts: as measured on one of the same memory, else in proportion to an H200's.

    Products in bf16 go with multiprocessors and clock, copies with the bandwidth; what is not known is the H200's.
    """
    facts = facts_of(chip)
    share = facts.multiprocessors / _MULTIPROCESSORS
    if chip.name in _LIMITED:
        bf16 = 0.9 * _LIMITED[chip.name]
        return Rates(bf16, _COPY_SHARE * facts.bandwidth, share * _H200.bf16 / bf16)
    for known in _MEASURED:
        if facts.bandwidth and abs(known.facts.bandwidth / facts.bandwidth - 1) <= SAME:
            return replace(known.rates, bf16=share * known.rates.bf16)
    share *= (facts.clock or _CLOCK) / _CLOCK
    copy = _COPY_SHARE * facts.bandwidth if facts.bandwidth else _H200.copy
    return Rates(_H200.bf16 * share, copy, _CLOCK / (facts.clock or _CLOCK))
