"""A launch as a value: kernel, grid, arguments and configuration, decided but not performed.

`Launch` is the base of Triton's, CUDA's, HIP's and cuBLASLt's launches.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8fn.ops.targets import Target


@dataclass(frozen=True, eq=False, kw_only=True)
class Launch(ABC):
    """One launch on a target; `reason` says why this kernel and not another, for `explain` and the log."""

    target: Target
    reason: str = ""
    prepares: bool = False
    """Whether it only lays operands out for the launch after it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The kernel's name."""

    @abstractmethod
    def describe(self) -> str:
        """One line: kernel, tile, grid, target, reason."""

    @abstractmethod
    def run(self) -> object:
        """Launch on the current stream of the tensors' device; compiles where nothing is cached."""

    def call(self) -> Callable[..., Sequence[Tensor]] | None:
        """The launch on other tensors of the same kinds, where it can be kept as such a function by itself."""
        return None

    def _described(self, tile: Mapping[str, Any], grid: tuple[int, int, int], options: Mapping[str, Any]) -> str:
        """The form of `describe` for a kernel with a grid; `options` are the compiler's."""
        shown = ",".join(f"{name}={value}" for name, value in tile.items())
        words = (
            f"{self.name}[{shown}]",
            f"grid={'x'.join(map(str, grid))}",
            *(f"{name}={value}" for name, value in options.items()),
            self.target.name,
        )
        return " ".join(words) + self._because()

    def _because(self) -> str:
        return f" ({self.reason})" if self.reason else ""


def described(launches: Sequence[Launch]) -> str:
    """The line of the first launch that computes a result."""
    return next(launch for launch in launches if not launch.prepares).describe()


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel: registers and spilled registers a thread, bytes of scratch and shared memory."""

    registers: int
    spills: int
    scratch: int
    shared: int


def cubin_resources(cubin: bytes, name: str, shared: int) -> Resources:
    """Resources of NVIDIA's machine code, read by cuobjdump; `shared` is the dynamic shared memory of a launch."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about the registers of {name}: {usage!r}")
    registers, stack, local = (int(group) for group in found.groups())
    return Resources(registers, (stack + local) // 4, stack + local, shared)
