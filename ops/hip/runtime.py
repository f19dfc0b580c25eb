"""The calls of the HIP runtime that loading and launching a code object takes, by ctypes: no compiler, no extension."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch


class HipError(RuntimeError):
    """A call of the HIP runtime failed."""


def load_function(code: bytes, entry: str) -> int:
    """The handle of a kernel of a code object on the current device; modules live as long as the process."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    hip = library()
    check(hip.hipModuleLoadData(ctypes.byref(module), code), f"loading {entry}")
    check(hip.hipModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding {entry}")
    return function.value or 0


def launch(
    function: int, entry: str, grid: tuple[int, int, int], threads: int, stream: int, parameters: ctypes.Array[Any]
) -> None:
    """Starts blocks of `threads` on the current device; `parameters` are the addresses of the arguments."""
    sizes = (ctypes.c_uint(size) for size in (*grid, threads, 1, 1, 0))  # no dynamic LDS
    status = library().hipModuleLaunchKernel(
        ctypes.c_void_p(function), *sizes, ctypes.c_void_p(stream), parameters, None
    )
    if status:
        check(status, f"launching {entry}, {'x'.join(map(str, grid))} blocks of {threads} threads")


def check(status: int, what: str) -> None:
    if status == 0:
        return
    hip = library()
    hip.hipGetLastError()  # else PyTorch reports it of its own next launch
    explain = hip.hipGetErrorString
    explain.restype = ctypes.c_char_p
    raise HipError(f"{what}: {(explain(status) or b'unknown error').decode()} ({status})")


@cache
def library() -> ctypes.CDLL:
    """PyTorch's own libamdhip64, else the system's; OSError where there is none."""
    tried = []
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(str(error))
    raise OSError(f"no libamdhip64.so is here, which ROCm's builds of PyTorch bring along: {'; '.join(tried)}")


def _candidates() -> Iterator[str]:
    # A library that is loaded already comes first: a second copy would know neither PyTorch's streams nor its memory.
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        _, slash, path = line.partition("/")
        if "libamdhip64.so" in path:
            yield slash + path
    yield from (str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libamdhip64.so*")))
    yield from ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
