"""HIP to machine code by clang: that of the user's ROCm, else that of the `ziglang` package; results are kept on disk.

Neither a GPU nor ROCm's headers are needed to compile. A code object is cached in
`code_cache.cache_dir()`, named by the hash of the sources, the macros, the options and the architecture; not of the
compiler, so that one that was compiled elsewhere serves a machine without any.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fp8fn.ops.code_cache import cache_dir, read_whole, write

_FOLDER: Final = Path(__file__).parent
# Version 5 of code objects is what Triton's are too: every ROCm that knows gfx950 loads it.
_OPTIONS: Final = ("-std=c++17", "-O3", "-nogpuinc", "-nogpulib", "-mcode-object-version=5")

_log = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class HipKernel:
    """A kernel of a `.hip` file of this folder, specialised by macros: the constexprs of HIP."""

    source: str
    entry: str
    arch: str
    macros: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True)
class Compiler:
    """The commands of a clang and of its linker, to which arguments are appended."""

    clang: tuple[str, ...]
    lld: tuple[str, ...]


class CompilationError(RuntimeError):
    """Every compiler refused a source; the message says which, and what it printed."""


class NoCompiler(CompilationError):
    """There is none, and the cache does not have the kernel."""


def compile_kernel(kernel: HipKernel) -> bytes:
    """The code object of a kernel, from the cache where it is there."""
    path = cache_path(kernel)
    if (code := read_whole(path)) is not None:
        return code
    if (missing := unavailable()) is not None:
        raise NoCompiler(f"{kernel.source} is not in the cache {path.parent}, and {missing}")
    code = _compile_by_first(kernel)
    write(path, code)
    return code


def cache_path(kernel: HipKernel) -> Path:
    """The file that has a kernel's code object once it is compiled."""
    everything = repr((_text(kernel.source), _headers(), _OPTIONS, kernel))
    digest = hashlib.sha256(everything.encode()).hexdigest()
    return cache_dir() / "hip" / f"{kernel.entry}-{kernel.arch}-{digest[:32]}.hsaco"


@cache
def unavailable() -> str | None:
    """Why nothing compiles HIP here, or None where something does."""
    if _compilers():
        return None
    return (
        "no compiler for HIP is here: set ROCM_PATH to an installation of ROCm, or pip install 'fp8fn[hip-compile]', "
        "or bring the cache of a machine that ran python -m fp8fn aot --arch gfx950"
    )


@cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _headers() -> dict[str, str]:
    return {path.name: _text(path.name) for path in sorted(_FOLDER.glob("*.h"))}


def _compile_by_first(kernel: HipKernel) -> bytes:
    """By the first compiler that does it: an older ROCm knows no gfx950."""
    refused = []
    for compiler in _compilers():
        _log.info("compiling %s for %s by %s", kernel.source, kernel.arch, compiler.clang[0])
        try:
            return _compile(kernel, compiler)
        except CompilationError as error:
            refused.append(str(error))
    raise CompilationError("\n".join(refused))


def _compile(kernel: HipKernel, compiler: Compiler) -> bytes:
    """By way of assembly: clang's own link step looks for `lld` by a name that `ziglang` does not have."""
    macros = [f"-D{name}={value}" for name, value in kernel.macros]
    with tempfile.TemporaryDirectory() as folder:
        assembly, object_, code = (str(Path(folder, f"kernel.{kind}")) for kind in ("s", "o", "hsaco"))
        device = ("-x", "hip", "--offload-device-only", f"--offload-arch={kernel.arch}")
        _run(kernel, *compiler.clang, *device, *_OPTIONS, *macros, "-S", str(_FOLDER / kernel.source), "-o", assembly)
        machine = ("-x", "assembler", "--target=amdgcn-amd-amdhsa", f"-mcpu={kernel.arch}")
        _run(kernel, *compiler.clang, *machine, "-c", assembly, "-o", object_)
        _run(kernel, *compiler.lld, "-shared", "--no-undefined", object_, "-o", code)
        return Path(code).read_bytes()


def _run(kernel: HipKernel, *command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        raise CompilationError(f"{command[0]} does not compile {kernel}:\n{said}\n{' '.join(command)}") from error


@cache
def _compilers() -> tuple[Compiler, ...]:
    """The compilers on this machine, the user's own ROCm first."""
    return tuple(_of_rocm()) + tuple(_of_zig())


def _of_rocm() -> Iterator[Compiler]:
    """The clang of an installation that a variable names, that `hipcc` belongs to, or that lies at the usual place."""
    roots = [Path(os.environ[name]) for name in ("ROCM_PATH", "HIP_PATH") if os.environ.get(name)]
    if (hipcc := shutil.which("hipcc")) is not None:
        roots.append(Path(hipcc).resolve().parent.parent)
    for root in (*roots, Path("/opt/rocm")):
        for folder in (root / "lib" / "llvm" / "bin", root / "llvm" / "bin"):
            clang, lld = folder / "clang", folder / "ld.lld"
            if os.access(clang, os.X_OK) and os.access(lld, os.X_OK):
                yield Compiler((str(clang),), (str(lld),))


def _of_zig() -> Iterator[Compiler]:
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec and spec.submodule_search_locations) or ():
        zig = shutil.which("zig", path=folder)
        if zig is not None:
            yield Compiler((zig, "clang"), (zig, "ld.lld"))
