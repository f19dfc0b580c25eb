"""A launch of a Triton kernel as a value: to be run, interpreted on CPU tensors, or compiled for another target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Geometry, Outputs, allocated, geometry
from fp8fn.ops.launch import Launch, Resources, cubin_resources
from fp8fn.ops.targets import Target
from fp8fn.ops.torch_private import core

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.tools.tensor_descriptor import TensorDescriptor

Argument: TypeAlias = "Tensor | TensorDescriptor | int | float | None"


@dataclass(frozen=True, eq=False)
class TritonLaunch(Launch):
    """One launch of a Triton kernel.

    `args` and `constexprs`, in this order, are all parameters of `kernel` in the order of its signature. `options` are
    the compiler's (`num_warps`, `num_stages`, and `matrix_instr_nonkdim` and the like of a backend).
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: Mapping[str, Argument]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    binds: Mapping[str, str] = field(default_factory=dict)
    """The op's tensor behind a pointer argument that has another name."""
    scratch: tuple[str, ...] = ()
    """The pointer arguments that only the launches of one call read and write: none of the op's tensors."""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def overlaps(self) -> bool:
        """Whether the launch uses programmatic dependent launch: its kernel then waits by `overlap.wait`."""
        return bool(self.constexprs.get("OVERLAPS"))

    def describe(self) -> str:
        """One line: kernel, constexprs that make the tile, grid, options, target."""
        tile = {name: value for name, value in self.constexprs.items() if name in ("BM", "BN", "BK")}
        if self.constexprs.get("MASKED"):
            tile["MASKED"] = True
        return self._described(tile, self.grid, self.options)

    def run(self) -> CompiledKernel:
        """Launch on the current stream of the tensors' device; compiles at the first call of a specialisation."""
        device = self._device_index()
        if device == torch.cuda.current_device():
            return self._run()
        with torch.cuda.device(device):
            return self._run()

    def _run(self) -> CompiledKernel:
        args = (*self.args.values(), *self.constexprs.values())
        compiled: CompiledKernel = self.kernel.run(*args, grid=self.grid, warmup=False, **self.options)
        return compiled

    def interpret(self) -> None:
        """Execute on CPU tensors by Triton's interpreter, with the casts and products of the hardware."""
        from fp8fn.ops.triton.interpreter import interpret

        alone = {"OVERLAPS": False} if self.overlaps else {}
        interpret(self.kernel, self.grid, {**self.args, **self.constexprs, **alone})

    def compile(self, target: Target | GPUTarget | None = None) -> CompiledKernel:
        """Compile without a device, as the JIT would for these arguments; `.asm` of the result has every stage.

        The tensors may lie on any device, `meta` too: only type, address modulo 16 and size of storage are read.
        """
        import triton
        from triton.compiler import ASTSource
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        chosen = self.target if target is None else target
        gpu = chosen.to_triton() if isinstance(chosen, Target) else chosen
        _check_architecture(gpu)
        backend = make_backend(gpu)
        # The JIT's own binder and packer, so that what is compiled here is what a device would run.
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, options = bind(*self.args.values(), *self.constexprs.values(), **self.options)
        parsed, signature, constexprs, attrs = self.kernel._pack_args(
            backend, dict(self.options), bound, specialization, options
        )
        source_type: Any = ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            source_type = GluonASTSource
        source = source_type(self.kernel, signature, constexprs, attrs)
        return triton.compile(source, target=gpu, options=parsed.__dict__)

    def resources(self, target: Target | None = None) -> Resources:
        """Registers, spills and shared memory of the compiled kernel."""
        return resources(self.compile(target))

    def _device_index(self) -> int:
        for arg in self.args.values():
            tensor = getattr(arg, "base", arg) if not isinstance(arg, Tensor) else arg
            if isinstance(tensor, Tensor):
                return tensor.get_device()
        raise ValueError(f"launch of {self.name} has no tensor among its arguments, so no device")


class SecondArchitectureError(RuntimeError):
    """Triton before 3.7 keeps the FP8 conversions of the first AMD architecture for the life of a process.

    For gfx950 after gfx942 it would convert by integer operations, and for gfx942 after gfx950 it fails.
    """


_first: dict[str, str] = {}  # the first architecture of each backend in this process


def takes_architectures() -> bool:
    """Whether Triton compiles for several AMD architectures in one process."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def _check_architecture(gpu: GPUTarget) -> None:
    import triton

    first = _first.setdefault(gpu.backend, gpu.arch)
    if gpu.backend == "hip" and gpu.arch != first and not takes_architectures():
        raise SecondArchitectureError(
            f"target is {gpu.arch}, and this process has compiled for {first}, whose FP8 conversions "
            f"Triton {triton.__version__} would use: compile in another process, or install Triton 3.7"
        )


class Place(NamedTuple):
    """A pointer or a descriptor: its name and place in the signature, its type, and the place of its tensor in a call.

    `descriptor` makes the descriptor of the tensor, where the argument is one.
    """

    name: str
    argument: int
    dtype: torch.dtype
    tensor: int
    descriptor: Callable[[Tensor], TensorDescriptor] | None = None

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor | TensorDescriptor | None:
        """The argument of a call. Of its tensor only the address is read, whatever its type."""
        return self._argument(tensors[self.tensor])

    def typed(self, tensors: Sequence[Tensor | None]) -> Tensor | TensorDescriptor | None:
        """The argument of a call in the type that Triton compiles for, such as bytes for e8m0."""
        tensor = tensors[self.tensor]
        return self._argument(tensor if tensor is None or tensor.dtype == self.dtype else tensor.view(self.dtype))

    def _argument(self, tensor: Tensor | None) -> Tensor | TensorDescriptor | None:
        return tensor if tensor is None or self.descriptor is None else self.descriptor(tensor)


class Step:
    """A launch without its tensors, which are a call's own.

    The first call of a step has Triton compile the launch, or find it; a later one starts that machine code, past the
    code in Python by which Triton would find it again. AMD's depends on the sizes of storages, which no key has: there
    each call asks Triton.
    """

    def __init__(self, launch: TritonLaunch, places: Sequence[Place]) -> None:
        self._launch = launch
        self._places = tuple(places)
        self._arguments = (*launch.args.values(), *launch.constexprs.values())
        self._start: Callable[..., None] | None = None

    def start(self, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        if self._start is None:
            self._compile_and_start(tensors)
            return
        arguments = list(self._arguments)
        for place in self._places:
            arguments[place.argument] = place.of(tensors)
        if device.index == core.current_gpu():
            self._start(*arguments)
        else:
            with torch.cuda.device(device):
                self._start(*arguments)

    def _compile_and_start(self, tensors: Sequence[Tensor | None]) -> None:
        args = dict(self._launch.args)
        for place in self._places:
            argument = place.typed(tensors)
            assert argument is not None
            args[place.name] = argument
        compiled = replace(self._launch, args=args).run()
        if self._launch.target.backend == "cuda" and compiled is not None:  # None where a hook of Triton's compiles
            self._start = compiled[self._launch.grid]


@dataclass(frozen=True, eq=False)
class TritonCall:
    """Kept launches on new tensors of the same kinds: allocates `made`, and returns the first `returned` of them."""

    steps: tuple[Step, ...]
    made: tuple[Geometry, ...]
    returned: int

    def __call__(self, *inputs: Tensor | None) -> list[Tensor]:
        device = next(x.device for x in inputs if x is not None)
        made = allocated(self.made, device)
        tensors = (*inputs, *made)
        for step in self.steps:
            step.start(tensors, device)
        if graph_capture.capturing():  # a step lets the next launch begin only when all before the step has ended
            graph_capture.launched(device, frozenset(), made)
        return made[: self.returned]


def kept(launches: Sequence[Launch], inputs: Mapping[str, Tensor | None], outputs: Outputs) -> TritonCall | None:
    """Planned launches as a call; None where one has a tensor that is not the op's, such as a copy of an input."""
    made, steps = dict(outputs.tensors), []
    for launch in launches:
        if not isinstance(launch, TritonLaunch) or outputs.zeroed:
            return None
        made |= {name: x for name in launch.scratch if isinstance(x := launch.args[name], Tensor)}
    known = {**inputs, **made}
    order = {name: place for place, name in enumerate(known)}
    for launch in launches:
        assert isinstance(launch, TritonLaunch)
        args, places = dict(launch.args), []
        for position, (name, arg) in enumerate(launch.args.items()):
            if arg is None or isinstance(arg, (int, float)):
                continue
            own = launch.binds.get(name, name)
            tensor = known.get(own)
            base = arg if isinstance(arg, Tensor) else arg.base
            if tensor is None or tensor.data_ptr() != base.data_ptr():
                return None
            args[name] = None
            descriptor = None if isinstance(arg, Tensor) else _descriptors_like(arg)
            places.append(Place(name, position, base.dtype, order[own], descriptor))
        steps.append(Step(replace(launch, args=args), places))
    return TritonCall(tuple(steps), tuple(map(geometry, made.values())), outputs.returned)


def _descriptors_like(descriptor: TensorDescriptor) -> Callable[[Tensor], TensorDescriptor]:
    """A function that makes the same descriptor of another tensor, of which only the address and type are read."""
    made: Callable[..., TensorDescriptor] = type(descriptor)
    return partial(made, shape=descriptor.shape, strides=descriptor.strides, block_shape=descriptor.block_shape)


def resources(compiled: CompiledKernel) -> Resources:
    """Read from the machine code: the cubin's resource usage, or the metadata of the AMDGPU assembly."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def note(key: str) -> int:
            found = re.search(rf"\.{key}:\s+(\d+)", text)
            return int(found.group(1)) if found else 0

        # Spilled scalar registers are not counted: they go to lanes of vector registers, not to memory.
        spills, scratch = note("vgpr_spill_count"), note("private_segment_fixed_size")
        return Resources(note("vgpr_count"), spills, scratch, int(compiled.metadata.shared))
    return cubin_resources(compiled.asm["cubin"], compiled.name, int(compiled.metadata.shared))
