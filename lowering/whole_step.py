"""The estimated time of all products of a step that FP8 takes: each tensor quantized once, and the host's launches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from fp8fn.ops.tuning.estimate import Parts
from fp8fn.ops.tuning.rates import HOST


@dataclass(frozen=True)
class Taken:
    """A product in FP8: its times, the tensors that it quantizes, and which gradients the step computes.

    Args:
        parts: the times of its products and quantizers.
        x: what stands for the activation; products with the same one share its quantizer.
        weight: what stands for the weight, likewise.
        dgrad: whether the activation has a gradient.
        wgrad: whether the weight has a gradient.
        groups: whether it is a product of groups of rows, which counts as if all groups were equal.
    """

    parts: Parts
    x: Hashable
    weight: Hashable
    dgrad: bool
    wgrad: bool
    groups: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of a step's products, in FP8 with their quantizers and in bf16, on the device and on the host.

    Attention, norms, the optimizer and whatever else FP8 does not change are not counted.

    Args:
        products: the number of products that are counted.
        unknown: the number of products in FP8 whose time is not known.
        backward: whether gradients are counted.
        replayed: whether a CUDA graph replays the launches, so that they take no host time.
        groups: the number of counted products whose groups are taken to be equal.
    """

    fp8: float = 0.0
    bf16: float = 0.0
    fp8_host: float = 0.0
    bf16_host: float = 0.0
    products: int = 0
    unknown: int = 0
    backward: bool = False
    replayed: bool = False
    groups: int = 0

    def __add__(self, other: StepTimes) -> StepTimes:
        """The times of both graphs of a step."""
        return StepTimes(
            self.fp8 + other.fp8, self.bf16 + other.bf16, self.fp8_host + other.fp8_host,
            self.bf16_host + other.bf16_host, self.products + other.products, self.unknown + other.unknown,
            self.backward or other.backward, self.replayed or other.replayed, self.groups + other.groups,
        )  # fmt: skip

    @property
    def fp8_us(self) -> float:
        """The time in FP8: a step waits for the device, or for the host if its launches take longer."""
        return self.fp8 if self.replayed else max(self.fp8, self.fp8_host)

    @property
    def bf16_us(self) -> float:
        """The time in bf16, likewise."""
        return self.bf16 if self.replayed else max(self.bf16, self.bf16_host)

    @property
    def loses(self) -> bool:
        """Whether the counted products are estimated to be slower in FP8."""
        return self.products > 0 and self.fp8_us > self.bf16_us

    def describe(self) -> str:
        """One sentence without its end."""
        passes = "forward and backward" if self.backward else "forward"
        waits = "" if self.replayed or self.fp8 >= self.fp8_host else ", launch-bound"
        known = f"{self.products} product{'s' * (self.products != 1)}"
        text = (
            f"{known}, {passes}: bf16 {self.bf16_us / 1e3:.3g} ms → FP8 {self.fp8_us / 1e3:.3g} ms{waits} "
            f"({self.bf16_us / self.fp8_us:.2f}x)"
        )
        text += f"; {self.groups} of them by groups, as if these were equal" if self.groups else ""
        return text + (f"; unknown: the time of {self.unknown} more in FP8" if self.unknown else "")

    @property
    def reason(self) -> str:
        """Why a product is left alone that FP8 would speed up by itself."""
        return f"slower as a whole step: {self.describe()}; where='*' takes it too"


def step_times(taken: Iterable[Taken], *, unknown: int = 0, replayed: bool = False) -> StepTimes:
    """The times of a step's products; each activation, weight and gradient is quantized once in each direction."""
    total = StepTimes(unknown=unknown, replayed=replayed)
    inputs: set[Hashable] = set()
    weights: dict[str, set[Hashable]] = {"forward": set(), "backward": set()}
    for each in taken:
        parts = each.parts
        backward = each.dgrad + each.wgrad
        fp8, host = parts.forward, HOST.product * (1 + backward)
        if each.x not in inputs:
            fp8 += parts.x
            host += HOST.dual if each.wgrad else HOST.quantize
        if each.weight not in weights["forward"]:
            fp8 += parts.weight
            host += HOST.quantize
        if each.dgrad and parts.weight_again and each.weight not in weights["backward"]:
            fp8 += parts.weight_again
            host += HOST.dual
            weights["backward"].add(each.weight)
        inputs.add(each.x)
        weights["forward"].add(each.weight)
        if backward:
            fp8 += parts.gradient + parts.dgrad * each.dgrad + parts.wgrad * each.wgrad
            host += HOST.dual if backward == 2 else HOST.quantize
        total = replace(
            total, fp8=total.fp8 + fp8, bf16=total.bf16 + parts.bf16 * (1 + backward),
            fp8_host=total.fp8_host + host, bf16_host=total.bf16_host + HOST.bf16 * (1 + backward),
            products=total.products + 1, groups=total.groups + each.groups, backward=total.backward or backward > 0,
        )  # fmt: skip
    return total
