"""The processors that kernels are planned and compiled for, and what each of them takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

Backend: TypeAlias = Literal["cuda", "hip", "cpu"]

OCP: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ: Final = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

# Multiprocessors of the largest product of an architecture: the grid of a persistent kernel that is planned offline.
_MULTIPROCESSORS: Final[dict[int | str, int]] = {
    89: 142, 90: 132, 100: 148, 103: 160, 120: 188, "gfx942": 304, "gfx950": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A processor: `arch` is the compute capability as `90` for CUDA, and as `"gfx950"` for HIP.

    `multiprocessors` is 0 where no device was asked; `cores` is then the architecture's largest product.
    """

    backend: Backend
    arch: int | str
    warp_size: int
    multiprocessors: int = 0

    @property
    def name(self) -> str:
        """`"sm90"`, `"gfx942"` or `"cpu"`."""
        return f"sm{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def cores(self) -> int:
        """Streaming multiprocessors or compute units."""
        return self.multiprocessors or _MULTIPROCESSORS.get(self.arch, 1)

    @property
    def cubin(self) -> str:
        """The architecture that NVRTC compiles for, with the instructions that Hopper and later have for themselves."""
        if self.backend != "cuda":
            raise ValueError(f"{self.name} runs no cubin: compile kernels in CUDA C++ for a CUDA target")
        return f"sm_{self.arch}a" if int(self.arch) >= 90 else f"sm_{self.arch}"

    def to_triton(self) -> GPUTarget:
        """The same processor, as Triton's compiler names it; ValueError for the CPU."""
        if self.backend == "cpu":
            raise ValueError("the CPU is no target of Triton's compiler: give Launch.compile a CUDA or HIP target")
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


CPU: Final = Target("cpu", "cpu", 1)
SM89: Final = Target("cuda", 89, 32)
SM90: Final = Target("cuda", 90, 32)
SM100: Final = Target("cuda", 100, 32)
SM120: Final = Target("cuda", 120, 32)
GFX942: Final = Target("hip", "gfx942", 64)
GFX950: Final = Target("hip", "gfx950", 64)

# Compute capabilities for which Triton's products load by TMA descriptors.
BY_TMA: Final = (90, 100, 103, 120)

# Products by their short names: the architecture, and its multiprocessors or compute units.
PRODUCTS: Final[Mapping[str, tuple[Target, int]]] = {
    "l4": (SM89, 58), "l40s": (SM89, 142), "rtx 4090": (SM89, 128), "rtx 6000 ada": (SM89, 142),
    "h20": (SM90, 78), "h100 pcie": (SM90, 114), "h100": (SM90, 132), "h200": (SM90, 132), "h800": (SM90, 132),
    "gh200": (SM90, 132),
    "b200": (SM100, 148), "gb200": (SM100, 148), "rtx 5090": (SM120, 170), "rtx pro 6000": (SM120, 188),
    "mi300a": (GFX942, 228), "mi300x": (GFX942, 304), "mi325x": (GFX942, 304),
    "mi350x": (GFX950, 256), "mi355x": (GFX950, 256),
}  # fmt: skip
# Words that drivers put around the name of a product.
_AROUND: Final = re.compile(r"\b(nvidia|amd|geforce|instinct|\d+gb|hbm\w*)\b")


def named_target(name: str) -> tuple[str, Target] | None:
    """A product ("H100", "NVIDIA H100 80GB HBM3", "rtx4090") or an architecture ("sm90"), with its short name."""
    short = "".join(re.split(r"[\s_-]+", _AROUND.sub("", name.lower())))
    for product, (target, count) in PRODUCTS.items():
        if product.replace(" ", "") == short:
            return product, replace(target, multiprocessors=count)
    for target, _ in PRODUCTS.values():
        if target.name == short:
            return short, target
    return None


def target_of(device: torch.device) -> Target:
    """The target of a device; every device that is neither CUDA nor HIP is the CPU (also `meta`)."""
    if device.type != "cuda":
        return CPU
    return _target_of_index(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _target_of_index(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    count = int(properties.multi_processor_count)
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
        # CDNA's wavefront has 64 lanes, RDNA's (gfx10 and later) 32.
        return Target("hip", arch, 32 if arch.startswith("gfx1") else 64, count)
    return Target("cuda", 10 * int(properties.major) + int(properties.minor), 32, count)


def hopper_fault(target: Target) -> str | None:
    """Why kernels for Hopper, in CUDA C++ or by Triton's TMA descriptors, don't run on the target, or None."""
    return None if target.backend == "cuda" and target.arch == 90 else f"{target.name} is not sm90"


def native_e4m3(target: Target) -> torch.dtype:
    """The e4m3 type of the processor's matrix instructions: e4m3fnuz on gfx942, e4m3fn elsewhere."""
    return torch.float8_e4m3fnuz if target.arch == "gfx942" else torch.float8_e4m3fn


def fp8_dtypes(target: Target) -> tuple[torch.dtype, ...]:
    """The FP8 types that the target's kernels take; empty for a processor without FP8 instructions."""
    if target.backend == "cpu":
        return OCP + FNUZ
    if target.backend == "hip":
        return {"gfx942": FNUZ, "gfx950": OCP}.get(str(target.arch), ())
    return OCP if int(target.arch) >= 89 else ()


def check_supported(target: Target, device: torch.device | None = None) -> None:
    """ValueError, naming the device and the remedy, where fp8fn has no kernel for the target."""
    if fp8_dtypes(target):
        return
    where = "the device" if device is None else f"device {device}"
    remedy = "move the tensors to such a device or to the CPU"
    if target.backend == "cuda":
        capability = f"{int(target.arch) // 10}.{int(target.arch) % 10}"
        raise ValueError(
            f"{where} has compute capability {capability}; fp8fn's kernels need 8.9 (Ada) or later: {remedy}"
        )
    raise ValueError(f"{where} is {target.name}; fp8fn's kernels need gfx942 (MI300) or gfx950 (MI350): {remedy}")


class Chip(NamedTuple):
    """A processor as its driver names it. The same name with fewer multiprocessors (a MIG slice) is another chip."""

    name: str
    multiprocessors: int


class Facts(NamedTuple):
    """What decides which table and which rates fit a chip; 0 where a value is not known.

    `bandwidth` is the memory's, in TB/s at its clock and width. `clock` is the highest of the multiprocessors, in GHz.
    """

    multiprocessors: int
    bandwidth: float = 0.0
    clock: float = 0.0


# Facts of chips by data sheet, for estimates where there is no device to ask.
_BY_DATA_SHEET: Final[Mapping[str, Facts]] = {
    "NVIDIA H200": Facts(132, 4.8, 1.98),
    "NVIDIA H100 80GB HBM3": Facts(132, 3.35, 1.98),
    "NVIDIA H100 PCIe": Facts(114, 2.04, 1.755),
    "NVIDIA H800": Facts(132, 3.35, 1.98),
    "NVIDIA GH200 480GB": Facts(132, 4.0, 1.98),
    "NVIDIA H20": Facts(78, 4.0, 1.98),
}
_asked: Final[dict[Chip, Facts]] = {}
_targets: Final[dict[Chip, Target]] = {}


def facts_of(chip: Chip) -> Facts:
    """The facts of a chip: as its device reports them, else by its data sheet, else its multiprocessors alone."""
    asked, known = _asked.get(chip), _BY_DATA_SHEET.get(chip.name)
    if asked is not None and asked.bandwidth:
        return asked
    return Facts(chip.multiprocessors) if known is None else known._replace(multiprocessors=chip.multiprocessors)


def target_of_chip(chip: Chip) -> Target:
    """The target of a chip: as its device reports it, else by its name; of a name that says nothing, Hopper's.

    Drivers may name two processors alike, so a device's own architecture comes first.
    """
    asked, known = _targets.get(chip), named_target(chip.name)
    if asked is not None:
        return asked
    return replace(SM90 if known is None else known[1], multiprocessors=chip.multiprocessors)


def reported_facts(properties: Any) -> Facts:
    """The facts among the properties of a device; a double data rate counts twice."""

    def number(name: str) -> int:
        return int(getattr(properties, name, 0) or 0)

    bandwidth = 2 * number("memory_clock_rate") * 1e3 * number("memory_bus_width") / 8 / 1e12
    return Facts(int(properties.multi_processor_count), bandwidth, number("clock_rate") / 1e6)


def chip_of(device: torch.device, target: Target) -> Chip | None:
    """The chip that a plan is for: that of the tensors, and of `meta` tensors the current one if it is the target."""
    if device.type == "cuda":
        return _chip_of_index(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "meta" and target.multiprocessors and torch.cuda.is_available():
        chip = _chip_of_index(torch.cuda.current_device())
        return chip if chip.multiprocessors == target.multiprocessors else None
    return None


@cache
def _chip_of_index(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    chip = Chip(str(properties.name), int(properties.multi_processor_count))
    _asked[chip] = reported_facts(properties)
    _targets[chip] = _target_of_index(index)
    return chip
