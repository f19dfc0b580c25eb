"""A launch of a HIP kernel as a value, for sources that clang compiles."""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.hip import runtime
from fp8fn.ops.hip.build import CompilationError, HipKernel, NoCompiler, compile_kernel, unavailable
from fp8fn.ops.hip.code_object import metadata
from fp8fn.ops.launch import Launch, Resources
from fp8fn.ops.torch_private import core

_log = logging.getLogger("fp8fn")


class Wide(int):
    """An argument passed as int64."""


Argument: TypeAlias = "Tensor | int | float | None"

# As `struct` has them; all else is a pointer, "P".
_FORMATS: Final[Mapping[type, str]] = {int: "i", Wide: "q", float: "f"}
_NAMES: Final = {"P": "a pointer", "i": "an int32", "q": "an int64", "f": "a float32"}


@dataclass(frozen=True, eq=False)
class HipLaunch(Launch):
    """One launch of a HIP kernel; `args` are the kernel's parameters in order.

    A tensor is passed as its address, None as a null pointer, `int` as int32, `Wide` as int64, `float` as float32.
    """

    kernel: HipKernel
    grid: tuple[int, int, int]
    threads: int
    args: Mapping[str, Argument]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.entry

    @cached_property
    def format(self) -> str:
        """How `struct` packs the arguments, a letter each: C's alignment is the kernel's."""
        return "".join([_FORMATS.get(type(arg), "P") for arg in self.args.values()])

    def describe(self) -> str:
        """One line: kernel, the macros that make the tile, grid, target."""
        return self._described(self.options, self.grid, {})

    def run(self) -> None:
        """Launch on the current stream of the tensors' device, without waiting; compiles where nothing is cached."""
        device = self._device()
        if device == torch.cuda.current_device():
            self._run(device)
        else:
            with torch.cuda.device(device):
                self._run(device)

    def _run(self, device: int) -> None:
        function = _function(self.kernel, self.format, device)
        stream = core.stream_handle(device)
        parameters, _buffer = self._packed()  # held until the runtime has read it
        runtime.launch(function, self.name, self.grid, self.threads, stream, parameters)

    def fault(self) -> str | None:
        """Why the kernel can't be compiled or loaded here, or None where `run` has only to start it."""
        return _fault(self.kernel, self.format, self._device())

    def compile(self) -> bytes:
        """The code object; needs no device."""
        return compile_kernel(self.kernel)

    def resources(self) -> Resources:
        """Registers, spills and LDS of the compiled kernel."""
        found = metadata(self.compile(), self.name)
        return Resources(found.vgprs, found.spills, found.scratch, found.lds)

    def _packed(self) -> tuple[ctypes.Array[Any], ctypes.Array[Any]]:
        """The addresses of the arguments, and the buffer that they lie in."""
        offsets, size = layout(self.format)
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg or 0 for arg in self.args.values()]
        buffer = ctypes.create_string_buffer(size)
        try:
            struct.pack_into(self.format, buffer, 0, *values)
        except struct.error as error:
            integers = {name: arg for name, arg in self.args.items() if isinstance(arg, int)}
            raise ValueError(f"{self.name}: an argument is past 32 bits and no Wide, of {integers}") from error
        start = ctypes.addressof(buffer)
        return (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets]), buffer

    def _device(self) -> int:
        for arg in self.args.values():
            if isinstance(arg, Tensor):
                return torch.cuda.current_device() if arg.device.index is None else arg.device.index
        raise ValueError(f"launch of {self.name} has no tensor among its arguments, so no device")


@cache
def layout(format_: str) -> tuple[tuple[int, ...], int]:
    """The offset of each argument in bytes, and the size of all."""
    ends = [struct.calcsize(format_[: count + 1]) for count in range(len(format_))]
    offsets = (end - struct.calcsize(letter) for end, letter in zip(ends, format_, strict=True))
    return tuple(offsets), ends[-1]


@cache
def _function(kernel: HipKernel, format_: str, device: int) -> int:
    """The loaded kernel, whose own account of its parameters is that of the launch."""
    code = compile_kernel(kernel)
    check_parameters(code, kernel.entry, format_)
    return runtime.load_function(code, kernel.entry)


def check_parameters(code: bytes, entry: str, format_: str) -> None:
    """Nothing where arguments that are packed so are what the kernel reads; else a ValueError."""
    taken = [(p.offset, p.size, p.pointer) for p in metadata(code, entry).parameters]
    given = [(at, struct.calcsize(kind), kind == "P") for at, kind in zip(layout(format_)[0], format_, strict=True)]
    if taken != given:
        kinds = ", ".join(_NAMES[kind] for kind in format_)
        raise ValueError(f"{entry} takes (offset, size, is a pointer) {taken}, not {given} of {kinds}")


@cache
def _fault(kernel: HipKernel, format_: str, device: int) -> str | None:
    try:
        with torch.cuda.device(device):
            _function(kernel, format_, device)
    except NoCompiler:
        _warn(f"Triton's kernels serve where kernels in HIP would: {unavailable()}")
    except (CompilationError, runtime.HipError, OSError) as error:
        _warn(f"Triton's kernels serve in place of {kernel.entry}, which can't be loaded: {error}")
    else:
        return None
    return f"{kernel.entry} can't be loaded"


@cache
def _warn(message: str) -> None:
    """Once in a process."""
    _log.warning(message)
