"""Runs CUDA kernels on CPU tensors: the same sources, compiled by g++ with `emulator/` in the place of CUDA.

What it checks is everything but the compiler and the instructions themselves: indices, layouts, masks, bits, and
whether a kernel waits for everything that it has to wait for.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import call_cache, nvrtc
from fp8fn.ops.cuda.runtime import launch as cuda_launch
from fp8fn.ops.cuda.runtime.counters import MOST_LISTS
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from support import build_cache

FOLDER = Path(__file__).parent / "emulator"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator of CUDA is compiled by g++")

_GLUE = """
struct Parameters {{ {fields} }};
static void run(void* with) {{ auto& p = *static_cast<Parameters*>(with); {entry}({arguments}); }}
extern "C" const char* emulate(const Span* spans, int count, const Span* unsettled, int unsettled_count,
                               bool overlapping, bool late, void* with, unsigned x, unsigned y, unsigned z,
                               int threads, int cluster, int shared, bool backwards, unsigned seed) {{
    tensors = spans;
    tensor_count = count;
    hidden = unsettled;
    hidden_count = unsettled_count;
    overlaps = overlapping;
    must_settle = late;
    return launch(run, with, {{x, y, z}}, threads, cluster, shared, backwards, seed);
}}
"""

# Bytes of a tensor up to which a launch that overlaps does not see it before it waits.
LARGEST_HIDDEN = 64 << 20

# Types of 16 bits that a tensor core multiplies.
_WIDE = {"bf16": "Bf16", "f16": "Fp16"}

# No contraction to fused multiply-adds that the source does not ask for: NVRTC has none to make either.
# _FORTIFY_SOURCE would refuse the longjmp to another stack by which the emulator changes threads.
# All kernels share the emulator's variables, 230 MB that are of one size in each: a launch sets them anew.
_OPTIONS = (
    "-std=c++20", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC", "-fgnu-unique",
)  # fmt: skip
# A cold run compiles 1,400 kernels: each takes 0.2 s with -O0, 0.5 s with -O1. The emulator's own functions, in which
# a kernel spends most of its time, are compiled once.
_KERNEL_OPTIONS = ("-O0", "-shared")
_RUNTIME_OPTIONS = ("-O2", "-c")
# Parameters that a kernel has from some value of a macro on, the last ones first.
_MORE_PARAMETERS = (
    ("UP_PARAMETERS", "PAIRS", 1), ("THIRD_WEIGHT", "BESIDE", 2), ("SECOND_WEIGHT", "BESIDE", 1),
)  # fmt: skip


@cache
def _built(kernel: CudaKernel) -> ctypes.CDLL:
    source = nvrtc._text(kernel.file)
    source = re.sub(r"extern __shared__ .* char (\w+)\[\];", r"char* \1 = block_memory();", source)
    if (more := re.search(r"#define GROUP_PARAMETERS (.*)", source)) is not None:
        given = more[1] if dict(kernel.macros)["GROUPED"] != "DENSE" else ""
        source = source.replace(" GROUP_PARAMETERS)", f"{given})")
        blocks = re.search(r"#define BLOCK_PARAMETERS (, .*)", source)
        given = blocks[1] if blocks and dict(kernel.macros)["A_SCALE"] == "BLOCK" else ""
        source = re.sub(r" BLOCK_PARAMETERS(?=[,)])", given, source)
    for name, macro, least in _MORE_PARAMETERS:
        if (more := re.search(rf"#define {name} (, .*)", source)) is not None:
            given = more[1] if int(dict(kernel.macros)[macro]) >= least else ""
            source = re.sub(rf" {name}(?=[,)])", given, source)
    found = re.search(rf'extern "C" __global__ void[^{{]*?\b{kernel.entry}\(([^)]*)\)\s*\{{', source)
    assert found is not None, kernel
    types = [re.sub(r"\w+$", "", parameter.strip()) for parameter in found[1].split(",")]
    glue = _GLUE.format(
        fields=" ".join(f"{kind} p{i};" for i, kind in enumerate(types)),
        entry=kernel.entry,
        arguments=", ".join(f"p.p{i}" for i in range(len(types))),
    )
    before = '#include "cuda.h"\n'
    macros = dict(kernel.macros)
    if (types := re.search(r"\.f32\.(\w+)\.(\w+) ", kernel.generated)) is not None:
        before += '#include "mma.cuh"\n'
        if types[1] in _WIDE:
            macros["WIDE"] = _WIDE[types[1]]
        else:  # the emulator calls b's what the tensor core takes for a
            macros = {"B_FP8": f"Fp8::{types[1].upper()}", "A_FP8": f"Fp8::{types[2].upper()}", **macros}
    emulator = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    headers = nvrtc._headers() | emulator
    options = [*_OPTIONS, *_KERNEL_OPTIONS, *(f"-D{k}={v}" for k, v in macros.items())]
    runtime = build_cache.compiled(emulator["runtime.cuh"], headers, [*_OPTIONS, *_RUNTIME_OPTIONS])
    loaded = build_cache.library(before + source + glue, headers, options, runtime)
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


def emulate(
    launch: CudaLaunch,
    addresses: list[int] | None = None,
    *,
    backwards: bool = False,
    seed: int = 0,
    deals: bool = True,
) -> None:
    """Runs a launch; `addresses` take the place of those of its tensors, as in `Prepared.launch`.

    Warps run in the order of their numbers, or `backwards`, each as far as it can before the next; clusters of blocks
    take turns in the order. With a `seed` of 32 bits warps run in an order drawn anew each time.
    Where the launch can, and `deals`, tiles are dealt out while it runs: then the first cluster takes all of them over.

    Raises:
        AssertionError: where a load begins outside of all tensors, a store of 8 or 16 bytes leaves them, a barrier has
            too many arrivals, all threads wait, or a thread does not wait for what the hardware does asynchronously.
            `emulator/cuda.h` says what else shows as NaN.
    """
    pointers = iter(cuda_launch.pointers(launch.args) if addresses is None else addresses)
    fields: list[tuple[str, Any]] = []
    values: list[Any] = []
    spans: list[tuple[int, int]] = []
    settled: list[tuple[int, int]] = []
    counters = (ctypes.c_int * (1 + MOST_LISTS))()
    for i, (name, arg) in enumerate(launch.args.items()):
        if isinstance(arg, TensorMap):
            fields.append((f"p{i}", ctypes.c_uint64 * 16))
            tensor_map, span = _described(arg, next(pointers))
            values.append(tensor_map)
            (settled if name in launch.constant else spans).append(span)
            continue
        if isinstance(arg, tuple):
            fields.append((f"p{i}", ctypes.c_int * len(arg)))
            values.append((ctypes.c_int * len(arg))(*arg))
            continue
        pointer = arg is None or isinstance(arg, Tensor)
        number = ctypes.c_float if isinstance(arg, float) else ctypes.c_int
        fields.append((f"p{i}", ctypes.c_uint64 if pointer else number))
        values.append(next(pointers) if pointer else arg)
        if name == launch.counted and deals:
            values[-1] = ctypes.addressof(counters)
        if isinstance(arg, Tensor):
            start = int(values[-1])
            span = start, start + arg.element_size() * extent(arg.shape, arg.stride())
            (settled if name in launch.constant else spans).append(span)
    parameters = type("Parameters", (ctypes.Structure,), {"_fields_": fields})(*values)
    hidden = _merged(spans) if launch.overlaps else []
    macros = dict(launch.kernel.macros)
    cluster = int(macros.get("CLUSTER", 1)) * int(macros.get("SPLIT", 1))
    fault = _built(launch.kernel).emulate(
        *_spans(spans + settled), *_spans(hidden), launch.overlaps, launch.overlaps and launch.late,
        ctypes.byref(parameters), *launch.grid, launch.threads, cluster, launch.shared, backwards, seed,
    )  # fmt: skip
    assert not fault, f"{launch.describe()}: {fault.decode()}"
    assert not any(counters), f"{launch.describe()}: {list(counters)} are left in the counters"


def _spans(spans: list[tuple[int, int]]) -> tuple[Any, int]:
    """Spans of memory as an array, and how many."""
    return (ctypes.c_uint64 * (2 * len(spans)))(*chain.from_iterable(spans)), len(spans)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same memory without overlaps, but for what is too large to be copied for every cluster."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(span for span in spans if 0 < span[1] - span[0] <= LARGEST_HIDDEN):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _described(arg: TensorMap, start: int) -> tuple[Any, tuple[int, int]]:
    """A `TensorMap` as hopper.cuh of the emulator reads it, and the addresses that it covers."""
    shape, strides, element = arg.tensor.shape, arg.tensor.stride(), arg.tensor.element_size()
    # What cuTensorMapEncodeTiled refuses.
    assert max(arg.box) <= 256, f"a box of {arg.box}"
    assert arg.box[-1] * element % 16 == 0, f"a box of {arg.box} elements of {element} bytes"
    assert not arg.swizzle or arg.box[-1] * element <= arg.swizzle, f"a box of {arg.box}, swizzled by {arg.swizzle}"
    outer = [stride for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    assert all(stride * element % 16 == 0 for stride in outer), f"strides of {strides}"
    words = (start, element, arg.swizzle, *shape[::-1], *arg.box[::-1], *(stride * element for stride in strides[::-1]))
    return (ctypes.c_uint64 * 16)(*words), (start, start + element * extent(shape, strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first of a tensor to its last, both counted; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Emulated:
    """In the place of `Prepared`."""

    def __init__(self, launch: CudaLaunch, backwards: bool) -> None:
        self._launch, self._backwards = launch, backwards
        self.device = torch.device("cpu")

    def launch(self, addresses: list[int]) -> None:
        emulate(self._launch, addresses, backwards=self._backwards)


@contextmanager
def hopper_on_cpu(*, backwards: bool = False) -> Iterator[list[CudaLaunch]]:
    """Inside, ops' kernels take CPU tensors for those of an sm90; yields the list of launches made."""
    launches: list[CudaLaunch] = []

    def prepare(launch: CudaLaunch) -> Emulated:
        launches.append(launch)
        return Emulated(launch, backwards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "target_of", lambda device: targets.SM90)
        patch.setattr(CudaLaunch, "prepare", prepare)
        patch.setattr(call_cache, "start", lambda launch, addresses: launch.launch(addresses))
        patch.setattr(call_cache, "_kept", type(call_cache._kept)())
        patch.setattr(nvrtc, "unavailable", lambda: None)
        yield launches
