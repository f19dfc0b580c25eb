"""A launch of a CUDA kernel as a value, for sources that NVRTC compiles, and the same launch loaded and packed."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.code_cache import warn_once
from fp8fn.ops.cuda.runtime import driver, packaged
from fp8fn.ops.cuda.runtime.counters import Kept
from fp8fn.ops.cuda.runtime.nvrtc import Compiled, CudaKernel, compile_into_cache, compile_kernel
from fp8fn.ops.launch import Launch, Resources, cubin_resources
from fp8fn.ops.torch_private import core


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
    counted: str = ""
    """The pointer argument, None here, that is the address of counters when the kernel starts, or null (`counters`)."""

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
    compiled = compile_kernel(kernel, arch)
    try:
        return driver.load_function(compiled.cubin, kernel.entry, shared, device)
    except driver.DriverError as error:
        if not compiled.packaged:
            raise
        warn_once(
            f"the driver does not load kernels of {packaged.DISTRIBUTION} ({error}), and NVRTC compiles them: "
            f"a newer driver may, and {packaged.VARIABLE}=0 leaves the package out"
        )
        return driver.load_function(compile_into_cache(kernel, arch).cubin, kernel.entry, shared, device)


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
        self.index = index
        self._lock = threading.Lock()  # one buffer: two threads may launch the same plan
        self._pack(launch.args)
        self._counted = list(launch.args).index(launch.counted) if launch.counted else None
        self._counters = Kept(self._own_counters(self._parameters))
        self._shape = (*launch.grid, launch.threads, 1, 1, launch.shared)
        self._extent = launch.grid, launch.threads, launch.shared
        self.overlaps = launch.overlaps
        self.settles = launch.settles
        self._stream: int | None = None
        self._start: Callable[[], int]

    def _pack(self, args: Mapping[str, Argument]) -> None:
        sizes = [_size(arg) for arg in args.values()]
        storage = ctypes.create_string_buffer(sum(sizes) + driver.MAP_ALIGNMENT)
        address = -(-ctypes.addressof(storage) // driver.MAP_ALIGNMENT) * driver.MAP_ALIGNMENT
        self._maps: list[tuple[int, ctypes.c_void_p]] = []
        self._slots: list[tuple[int, ctypes.c_uint64]] = []
        self._pointers: list[int] = []  # for each pointer the number of its parameter
        addresses, count = [], 0
        for number, (arg, size) in enumerate(zip(args.values(), sizes, strict=True)):
            addresses.append(address)
            if not isinstance(arg, (int, float, tuple)):
                self._pointers.append(number)
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
        stream = core.stream_handle(self.index)
        with self._lock:
            if addresses != self._last:
                self._place(addresses)
            self._counters.refresh(stream, self.index)
            if stream != self._stream:
                self._start, self._stream = self.start_of(self._parameters, stream), stream
            status = self._start()
            if status == driver.INVALID_CONTEXT:  # this thread's first call of CUDA
                driver.make_context_current(self.index)
                status = self._start()
        if status:
            driver.check(status, "launch")

    def _place(self, addresses: list[int]) -> None:
        """Puts the addresses into the parameters."""
        last, self._last = self._last, [-1] * len(addresses)  # where one fails, all are put in anew
        for place, map_ in self._maps:
            if addresses[place] != last[place]:
                replace_address(self.index, map_, addresses[place])
        for place, slot in self._slots:
            slot.value = addresses[place]
        self._last = addresses

    def copied(self, slots: Sequence[int]) -> Parameters:
        """A copy of the parameters, whose pointers lie at `slots` and whose descriptors and counters are its own."""
        pointers = (ctypes.c_void_p * len(self._parameters))(*self._parameters)
        for number, slot in zip(self._pointers, slots, strict=True):
            pointers[number] = slot
        storage = ctypes.create_string_buffer(driver.MAP_BYTES * len(self._maps) + driver.MAP_ALIGNMENT)
        address = -(-ctypes.addressof(storage) // driver.MAP_ALIGNMENT) * driver.MAP_ALIGNMENT
        maps = []
        with self._lock:  # no thread replaces an address in a descriptor meanwhile
            for place, map_ in self._maps:
                assert map_.value is not None
                ctypes.memmove(address, map_.value, driver.MAP_BYTES)
                pointers[self._pointers[place]] = address
                maps.append((place, ctypes.c_void_p(address)))
                address += driver.MAP_BYTES
        return Parameters(pointers, maps, self._own_counters(pointers), (storage, self))

    def _own_counters(self, parameters: ctypes.Array[ctypes.c_void_p]) -> list[ctypes.c_uint64]:
        """The place, put among the parameters, for the address of the counters, where the kernel has some."""
        if self._counted is None:
            return []
        place = ctypes.c_uint64()
        parameters[self._counted] = ctypes.addressof(place)
        return [place]

    def start_of(self, parameters: ctypes.Array[ctypes.c_void_p], stream: int) -> Callable[[], int]:
        """What starts the kernel on a stream and returns the driver's status."""
        cuda = driver.library()
        if not self.overlaps:
            return partial(cuda.cuLaunchKernel, self._function, *self._shape, ctypes.c_void_p(stream), parameters, None)
        config = driver.overlapping(*self._extent)
        config.stream = stream
        return partial(cuda.cuLaunchKernelEx, ctypes.byref(config), self._function, parameters, None)


class Parameters(NamedTuple):
    """A kernel's parameters: where each lies, its descriptors by the number of their pointer, and what holds them.

    `counters` has the place of the address of its counters, where it has some.
    """

    pointers: ctypes.Array[ctypes.c_void_p]
    maps: list[tuple[int, ctypes.c_void_p]]
    counters: list[ctypes.c_uint64]
    holders: tuple[object, ...]


class LaunchSequence:
    """Loaded kernels that start one after another on one device.

    The kernels share one list of addresses, in which each address is written once. If a call has the addresses and the
    stream of the call before, nothing is written.

    Args:
        steps: each kernel, and for each of its pointers the place of its address in the list, or None for null.
        count: the length of the list.
    """

    def __init__(self, steps: Sequence[tuple[Prepared, Sequence[int | None]]], count: int) -> None:
        self.device = steps[0][0].device
        self._index = steps[0][0].index
        self._lock = threading.Lock()
        self._addresses = (ctypes.c_uint64 * (count + 1))()  # the last one is null
        self._format = struct.Struct(f"={count}Q")
        first, size = ctypes.addressof(self._addresses), ctypes.sizeof(ctypes.c_uint64)
        self._kernels: list[tuple[Prepared, Parameters]] = []
        self._maps: list[tuple[int, ctypes.c_void_p]] = []
        for kernel, places in steps:
            parameters = kernel.copied([first + size * (count if place is None else place) for place in places])
            self._kernels.append((kernel, parameters))
            for pointer, map_ in parameters.maps:
                place = places[pointer]
                assert place is not None
                self._maps.append((place, map_))
        self._counters = Kept([place for _, parameters in self._kernels for place in parameters.counters])
        self._last = [-1] * count
        self._stream: int | None = None
        self._starts: list[Callable[[], int]] = []

    def start(self, addresses: list[int]) -> None:
        """Start the kernels on the current stream of the current device, which is the one they were prepared on."""
        stream = core.stream_handle(self._index)
        with self._lock:
            if addresses != self._last:
                self._place(addresses)
            self._counters.refresh(stream, self._index)
            if stream != self._stream:
                self._starts = [kernel.start_of(parameters.pointers, stream) for kernel, parameters in self._kernels]
                self._stream = stream
            for start in self._starts:
                status = start()
                if status:
                    if status == driver.INVALID_CONTEXT:  # this thread's first call of CUDA
                        driver.make_context_current(self._index)
                        status = start()
                    driver.check(status, "launch")

    def _place(self, addresses: list[int]) -> None:
        """Writes the addresses into the list and the descriptors."""
        last, self._last = self._last, [-1] * len(addresses)  # where one fails, all are written anew
        self._format.pack_into(self._addresses, 0, *addresses)
        for place, map_ in self._maps:
            if addresses[place] != last[place]:
                replace_address(self._index, map_, addresses[place])
        self._last = addresses


def replace_address(index: int, map_: ctypes.c_void_p, address: int) -> None:
    """Writes an address into a TMA descriptor for a device."""
    replace, pointer = driver.library().cuTensorMapReplaceAddress, ctypes.c_void_p(address)
    status = replace(map_, pointer)
    if status == driver.INVALID_CONTEXT:
        driver.make_context_current(index)
        status = replace(map_, pointer)
    if status:
        driver.check(status, "TMA descriptor")
