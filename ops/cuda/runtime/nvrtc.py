"""CUDA C++ to machine code by NVRTC, which every CUDA build of PyTorch brings along; results are kept on disk.

No GPU is needed to compile. A cubin is cached in `code_cache.cache_dir()`, named by the hash of all that it depends
on: the sources, the macros, the options and NVRTC's version. A kernel that is not in the cache comes from the
distribution `fp8fn-cubins`, where that is installed and has it (`packaged`). The log says at DEBUG where each kernel
came from.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import torch

from fp8fn.ops.code_cache import cache_dir, read_whole, write
from fp8fn.ops.cuda.runtime import packaged

_FOLDER: Final = Path(__file__).parent.parent
_OPTIONS: Final = ("--std=c++17", "--device-int128", "-default-device")
_LOG: Final = logging.getLogger("fp8fn")
# Where a kernel came from, in the log.
CACHE: Final = "the cache"
COMPILER: Final = "NVRTC"


class Instruction(Protocol):
    """An instruction as a function of CUDA C++ whose text is made when a kernel is compiled; equal by value."""

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a `.cu` file of `ops/cuda`, specialised by macros: the constexprs of CUDA C++.

    The source of the `instructions` goes before the file: their text depends on their width and types.
    """

    file: str
    entry: str
    macros: tuple[tuple[str, int | str], ...]
    instructions: tuple[Instruction, ...] = field(default=(), repr=False)

    @property
    def generated(self) -> str:
        """The source that goes before the file."""
        return "".join(instruction.source for instruction in self.instructions)


class CompilationError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@dataclass(frozen=True)
class Compiled:
    """Machine code, and what the compiler said of it: `log` is empty where it was not compiled now.

    `packaged` tells a cubin of `fp8fn-cubins`.
    """

    cubin: bytes
    log: str
    packaged: bool = False


def compile_kernel(kernel: CudaKernel, arch: str, *, verbose: bool = False) -> Compiled:
    """The cubin of a kernel for `Target.cubin`: from the cache, else from `fp8fn-cubins`, else compiled and cached.

    `verbose` always compiles, for ptxas's report.
    """
    if verbose:
        return compile_anew(kernel, arch, "--ptxas-options=-v")
    if (cubin := read_whole(cache_path(kernel, arch))) is not None:
        _LOG.debug("kernel %s comes from %s", kernel.entry, CACHE)
        return Compiled(cubin, "")
    if packaged.installed() is not None and (cubin := _packaged_cubin(kernel, arch)) is not None:
        _LOG.debug("kernel %s comes from %s", kernel.entry, packaged.DISTRIBUTION)
        return Compiled(cubin, "", packaged=True)
    return compile_into_cache(kernel, arch)


def compile_into_cache(kernel: CudaKernel, arch: str) -> Compiled:
    """Compiles a kernel, and keeps its cubin in the cache, whatever is there or in `fp8fn-cubins`."""
    compiled = compile_anew(kernel, arch)
    _LOG.debug("kernel %s comes from %s", kernel.entry, COMPILER)
    write(cache_path(kernel, arch), compiled.cubin)
    return compiled


def compile_anew(kernel: CudaKernel, arch: str, *more: str) -> Compiled:
    """Compiles a kernel with `more` options than usual, and keeps nothing."""
    source, headers, options = _input(kernel, arch)
    return _compile(source, kernel.file, headers, (*options, *more))


def cache_path(kernel: CudaKernel, arch: str) -> Path:
    """The file that has a kernel's cubin once it is compiled."""
    return cache_dir() / "cubin" / f"{kernel.entry}-{_hash((*_input(kernel, arch), version()))}.cubin"


def cubin_name(kernel: CudaKernel, arch: str) -> str:
    """The name of a kernel's cubin in `fp8fn-cubins`: like that in the cache, without NVRTC's version."""
    return f"{kernel.entry}-{_hash(_input(kernel, arch))}"


@cache
def sources_hash() -> str:
    """The hash of all sources of kernels, and of the options that all kernels share."""
    return _hash((_OPTIONS, {name: _text(name) for name in sources()}))


@cache
def version() -> tuple[int, int]:
    """NVRTC's major and minor version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def unavailable() -> str | None:
    """Why there is no NVRTC here, or None where there is."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


# Whether kernels are chosen for another machine: see `elsewhere`.
CHOOSES_ELSEWHERE: Final[ContextVar[bool]] = ContextVar("elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within it, kernels are chosen for another machine, so that no kernel is refused because NVRTC is missing here."""
    token = CHOOSES_ELSEWHERE.set(True)
    try:
        yield
    finally:
        CHOOSES_ELSEWHERE.reset(token)


def _input(kernel: CudaKernel, arch: str) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """The source, its headers and the options."""
    options = (*_OPTIONS, f"--gpu-architecture={arch}", *(f"-D{name}={value}" for name, value in kernel.macros))
    return kernel.generated + f'#line 1 "{kernel.file}"\n' + _text(kernel.file), _headers(), options


def _packaged_cubin(kernel: CudaKernel, arch: str) -> bytes | None:
    return packaged.find(cubin_name(kernel, arch), sources_hash())


def _hash(key: object) -> str:
    """The hash of a value that its `repr` determines."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


@cache
def sources() -> dict[str, Path]:
    """Every `.cu` and `.cuh` file by its name, which no two share."""
    return {path.name: path for path in sorted(_FOLDER.glob("*/*.cu*"))}


@cache
def _text(name: str) -> str:
    return sources()[name].read_text(encoding="utf-8")


@cache
def _headers() -> dict[str, str]:
    return {name: _text(name) for name in sources() if name.endswith(".cuh")}


def _compile(source: str, name: str, headers: dict[str, str], options: tuple[str, ...]) -> Compiled:
    nvrtc = _library()
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names))
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        log = _read(program, "ProgramLog").rstrip(b"\0").decode()
        if status != 0:
            raise CompilationError(f"NVRTC {version()} does not compile {name} with {options}:\n{log}")
        return Compiled(_read(program, "CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status != 0:
        name = _library().nvrtcGetErrorString
        name.restype = ctypes.c_char_p
        raise CompilationError(f"NVRTC: {name(status).decode()}")


@cache
def _library() -> ctypes.CDLL:
    """The NVRTC that PyTorch loaded, else the one of the `nvidia-cuda-nvrtc` package, else the system's."""
    cuda = torch.version.cuda
    majors = [cuda.split(".")[0]] if cuda else ["13", "12"]
    for major in majors:
        for name in (f"libnvrtc.so.{major}", *_packaged(major)):
            try:
                if os.sep in name:
                    for builtins in Path(name).parent.glob(f"libnvrtc-builtins.so.{major}*"):
                        ctypes.CDLL(str(builtins))  # NVRTC opens it by name, which succeeds once it is loaded
                return ctypes.CDLL(name)
            except OSError:
                continue
    raise OSError(
        f"no libnvrtc.so.{' or .'.join(majors)} is here: pip install nvidia-cuda-nvrtc, or put CUDA's lib64 folder on "
        "the loader's path"
    )


def _packaged(major: str) -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    return [
        str(path)
        for folder in folders or ()
        for pattern in (f"cu{major}/lib/libnvrtc.so.{major}", f"cuda_nvrtc/lib/libnvrtc.so.{major}")
        for path in Path(folder).glob(pattern)
    ]
