"""Runs HIP kernels on CPU tensors: the same sources, compiled by g++ with `hip_host/wave.h` in the place of gfx950.

What it checks is everything but the compiler and the instructions themselves: indices, layouts, masks, barriers, bits.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from torch import Tensor

from fp8fn.ops.hip import build
from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.launch import HipLaunch, Wide
from support import build_cache
from support.cuda_emulator import extent

HOST: Final = Path(__file__).parent / "hip_host"
SOURCES: Final = Path(build.__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="HIP's model of the host is compiled by g++")

_TYPES: Final = (
    ((Tensor, type(None)), ctypes.c_uint64), (Wide, ctypes.c_int64), (int, ctypes.c_int32), (float, ctypes.c_float),
)  # fmt: skip
# No contraction to fused multiply-adds that the source does not ask for.
_OPTIONS: Final = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC")
_GLUE: Final = """
struct Parameters {{ {fields} }};
static void run(void* with) {{ auto& p = *static_cast<Parameters*>(with); {entry}({arguments}); }}
extern "C" const char* emulate(const Span* spans, int count, void* with, const int* grid, int threads,
                               bool backwards) {{
    tensors = spans;
    tensor_count = count;
    return launch(run, with, grid, threads, backwards);
}}
"""


def source_of(name: str) -> str:
    """The text of a file of the library, or of the tests' own."""
    return next(folder / name for folder in (SOURCES, HOST) if (folder / name).exists()).read_text(encoding="utf-8")


@cache
def _built(kernel: HipKernel) -> ctypes.CDLL:
    source = source_of(kernel.source)
    found = re.search(rf"KERNEL\([^)]*\)\s*void {kernel.entry}\(([^)]*)\)", source)
    assert found is not None, kernel
    types = [re.sub(r"\w+$", "", parameter.strip()) for parameter in found[1].split(",")]
    glue = _GLUE.format(
        fields=" ".join(f"{kind} p{i};" for i, kind in enumerate(types)),
        entry=kernel.entry,
        arguments=", ".join(f"p.p{i}" for i in range(len(types))),
    )
    macros = [f"-D{name}={value}" for name, value in kernel.macros]
    headers = {path.name: path.read_text(encoding="utf-8") for path in (*SOURCES.glob("*.h"), *HOST.glob("*.h"))}
    loaded = build_cache.library(source + glue, headers, [*_OPTIONS, *macros])
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


def run_on_host(*launches: HipLaunch, backwards: bool = False) -> None:
    """Runs launches in order; AssertionError with what the model found wrong."""
    for launch in launches:
        fault = _emulate(launch, backwards)
        assert not fault, f"{launch.describe()}: {fault.decode()}"


def _emulate(launch: HipLaunch, backwards: bool) -> bytes:
    fields: list[tuple[str, Any]] = []
    values: list[int | float] = []
    spans: list[int] = []
    for i, arg in enumerate(launch.args.values()):
        values.append(arg.data_ptr() if isinstance(arg, Tensor) else arg or 0)
        fields.append((f"p{i}", next(kind for types, kind in _TYPES if isinstance(arg, types))))
        if isinstance(arg, Tensor):
            spans += (arg.data_ptr(), arg.data_ptr() + arg.element_size() * extent(arg.shape, arg.stride()))
    parameters = type("Parameters", (ctypes.Structure,), {"_fields_": fields})(*values)
    covered, grid = (ctypes.c_uint64 * len(spans))(*spans), (ctypes.c_int * 3)(*launch.grid)
    result: bytes = _built(launch.kernel).emulate(
        covered, len(spans) // 2, ctypes.byref(parameters), grid, launch.threads, backwards
    )
    return result
