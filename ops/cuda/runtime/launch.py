"""A launch of a CUDA kernel as a value, for sources that NVRTC compiles, and the same launch loaded and packed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime import driver
from fp8fn.ops.cuda.runtime.nvrtc import Compiled, CudaKernel, compile_kernel
from fp8fn.ops.launch import Launch, Resources, cubin_resources


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A TMA descriptor as an argument: a tensor, and the box of it that one copy moves.

    `box` is in the order of the tensor's axes; the last axis of `tensor` is contiguous. `swizzle` is the span, in
    bytes, over which the 16-byte pieces of rows in shared memory are exchanged (0, 32, 64 or 128). What a copy misses
    comes to the L2 by `promotion` bytes (0, 64, 128 or 256).
    """

    tensor: Tensor
    box: tuple[int, ...]
    swizzle: int = 0
    promotion: int = 256


Argument: TypeAlias = "TensorMap | Tensor | int | float | tuple[int, ...] | None"


@dataclass(frozen=True, eq=False)
class CudaLaunch(Launch):
    """One launch of a CUDA kernel; `args` are the kernel's parameters in order.

    A tensor is passed as its address, None as a null pointer, `int` as int32, `float` as float32, and a tuple as a
    struct of int32.
    """

    kernel: CudaKernel
    grid: tuple[int, int, int]
    threads: int
    shared: int
    args: Mapping[str, Argument]
    options: Mapping[str, Any] = field(default_factory=dict)
    overlaps: bool = False
    """Whether it may begin while the launch before it on the stream ends: the kernel waits for that one by itself."""
    late: bool = False
    """Whether, after a launch that overlaps, the next may begin only when all before it has ended."""
    binds: Mapping[str, str] = field(default_factory=dict)
    """The op's tensor behind a pointer argument, by name, where the op has another name for it than the kernel."""
    scratch: tuple[str, ...] = ()
    """The pointer arguments that only the launches of one call read and write: none of the op's tensors."""
    constant: tuple[str, ...] = ()
    """The arguments that a launch which overlaps reads before it waits: no launch that may still run writes them."""

    @property
    def settles(self) -> bool:
        """Whether all before it has ended when the launch after it begins."""
        return self.late or not self.overlaps

    @property
    def name(self) -> str:
        return self.kernel.entry

    def describe(self) -> str:
        """One line: kernel, the macros that make the tile, grid, target."""
        return self._described(self.options, self.grid, {})

    def run(self) -> None:
        """Launch on the current stream of the tensors' device; compiles where no cubin is cached."""
        prepared = self.prepare()
        with torch.cuda.device(prepared.device):
            prepared.launch(pointers(self.args))

    def prepare(self) -> Prepared:
        """All but the addresses, done ahead: to launch again on other tensors of the same shapes and strides."""
        return Prepared(self)

    def compile(self, *, verbose: bool = False) -> Compiled:
        """The machine code; needs no device. `verbose` compiles anew and brings ptxas's report."""
        return compile_kernel(self.kernel, self.target.cubin, verbose=verbose)

    def resources(self) -> Resources:
        """Registers, spills and shared memory of the compiled kernel."""
        return cubin_resources(self.compile().cubin, self.name, self.shared)


def pointers(args: Mapping[str, Argument]) -> list[int]:
    """The addresses among the arguments, in order; 0 for None."""
    found = []
    for arg in args.values():
        if isinstance(arg, TensorMap):
            found.append(arg.tensor.data_ptr())
        elif isinstance(arg, Tensor):
            found.append(arg.data_ptr())
        elif arg is None:
            found.append(0)
    return found


@cache
def function_of(kernel: CudaKernel, arch: str, shared: int, device: int) -> int:
    """The loaded kernel; modules live as long as the process, as Triton's and PyTorch's do."""
    return driver.load_function(compile_kernel(kernel, arch).cubin, kernel.entry, shared, device)


def _size(arg: Argument) -> int:
    """Bytes of an argument in the buffer of parameters: descriptors are aligned to 64, so all take that or more."""
    return driver.MAP_BYTES if isinstance(arg, TensorMap) else driver.MAP_ALIGNMENT


class Prepared:
    """A loaded kernel with its parameters packed; `launch` puts the addresses in and starts it.

    The parameters stay where the driver reads them, so that a launch is: each address written, each descriptor's
    address replaced, one driver call.
    """

    def __init__(self, launch: CudaLaunch) -> None:
        tensors = [a.tensor if isinstance(a, TensorMap) else a for a in launch.args.values()]
        self.device = next(t.device for t in tensors if isinstance(t, Tensor))
        with torch.cuda.device(self.device):
            index = torch.cuda.current_device()
            function = function_of(launch.kernel, launch.target.cubin, launch.shared, index)
            self._function = ctypes.c_void_p(function)
            driver.make_context_current(index)  # for descriptors; this thread may not have called CUDA before
        self._index = index
        self._lock = threading.Lock()  # one buffer: two threads may launch the same plan
        self._pack(launch.args)
        self._shape = (*launch.grid, launch.threads, 1, 1, launch.shared)
        self._config = driver.overlapping(launch.grid, launch.threads, launch.shared) if launch.overlaps else None
        self.settles = launch.settles

    def _pack(self, args: Mapping[str, Argument]) -> None:
        sizes = [_size(arg) for arg in args.values()]
        storage = ctypes.create_string_buffer(sum(sizes) + driver.MAP_ALIGNMENT)
        address = -(-ctypes.addressof(storage) // driver.MAP_ALIGNMENT) * driver.MAP_ALIGNMENT
        self._maps: list[tuple[int, ctypes.c_void_p]] = []
        self._slots: list[tuple[int, ctypes.c_uint64]] = []
        addresses, count = [], 0
        for arg, size in zip(args.values(), sizes, strict=True):
            addresses.append(address)
            if isinstance(arg, TensorMap):
                driver.encode_map(address, arg.tensor, arg.box, arg.swizzle, arg.promotion)
                self._maps.append((count, ctypes.c_void_p(address)))
                count += 1
            elif isinstance(arg, (int, tuple)):
                values = arg if isinstance(arg, tuple) else (arg,)
                (ctypes.c_int32 * len(values)).from_address(address)[:] = list(values)
            elif isinstance(arg, float):
                ctypes.c_float.from_address(address).value = arg
            else:
                self._slots.append((count, ctypes.c_uint64.from_address(address)))
                count += 1
            address += size
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._keep = storage
        self._last = [0] * count

    def launch(self, addresses: list[int]) -> None:
        """Start the kernel on the current stream of the current device, which is the one it was prepared on."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        with self._lock:
            if addresses != self._last:
                self._place(addresses)
            status = self._start(stream)
            if status == driver.INVALID_CONTEXT:  # this thread's first call of CUDA
                driver.make_context_current(self._index)
                status = self._start(stream)
        if status:
            driver.check(status, "launch")

    def _start(self, stream: int) -> int:
        cuda = driver.library()
        if self._config is None:
            launch = (self._function, *self._shape, ctypes.c_void_p(stream), self._parameters, None)
            return int(cuda.cuLaunchKernel(*launch))
        self._config.stream = stream
        return int(cuda.cuLaunchKernelEx(ctypes.byref(self._config), self._function, self._parameters, None))

    def _place(self, addresses: list[int]) -> None:
        """Puts the addresses into the parameters."""
        replace_address = driver.library().cuTensorMapReplaceAddress
        last, self._last = self._last, [-1] * len(addresses)  # where one fails, all are put in anew
        for place, map_ in self._maps:
            if addresses[place] != last[place]:
                address = ctypes.c_void_p(addresses[place])
                status = replace_address(map_, address)
                if status == driver.INVALID_CONTEXT:
                    driver.make_context_current(self._index)
                    status = replace_address(map_, address)
                if status:
                    driver.check(status, "TMA descriptor")
        for place, slot in self._slots:
            slot.value = addresses[place]
        self._last = addresses
