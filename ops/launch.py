"""A launch as a value: kernel, grid, arguments and configuration, to be run, interpreted or compiled."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.targets import Target

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.tools.tensor_descriptor import TensorDescriptor

Argument: TypeAlias = "Tensor | TensorDescriptor | int | float | None"


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch, decided but not performed.

    `args` and `constexprs`, in this order, are all parameters of `kernel` in the order of its signature. `options` are
    the compiler's (`num_warps`, `num_stages`, and `matrix_instr_nonkdim` and the like of a backend).
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: Mapping[str, Argument]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    target: Target
    reason: str = field(default="")
    """Why this kernel and not another; shown by `explain` and in the log."""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def describe(self) -> str:
        """One line: kernel, constexprs that make the tile, grid, options, target."""
        tile = ",".join(f"{k}={v}" for k, v in self.constexprs.items() if k in ("BM", "BN", "BK"))
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        grid = "x".join(str(size) for size in self.grid)
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.name}[{tile}] grid={grid} {options} {self.target.name}{because}"

    def run(self) -> None:
        """Launch on the current stream of the tensors' device; compiles at the first call of a specialisation."""
        device = self._device_index()
        if device == torch.cuda.current_device():
            self._run()
        else:
            with torch.cuda.device(device):
                self._run()

    def _run(self) -> None:
        self.kernel.run(*self.args.values(), *self.constexprs.values(), grid=self.grid, warmup=False, **self.options)

    def interpret(self) -> None:
        """Execute on CPU tensors by Triton's interpreter, with the casts and products of the hardware."""
        from fp8fn.ops.triton.interpreter import interpret

        interpret(self.kernel, self.grid, {**self.args, **self.constexprs})

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


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers and spilled registers a thread, bytes of scratch and of shared memory."""

    registers: int
    spills: int
    scratch: int
    shared: int


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
    return _cubin_resources(compiled)


def _cubin_resources(compiled: CompiledKernel) -> Resources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about the registers of {compiled.name}: {usage!r}")
    registers, stack, local = (int(group) for group in found.groups())
    return Resources(registers, (stack + local) // 4, stack + local, int(compiled.metadata.shared))
