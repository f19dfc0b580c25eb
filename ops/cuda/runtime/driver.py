"""The calls of CUDA's driver that loading and launching a cubin takes, by ctypes: no compiler, no extension."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Final, NamedTuple

import torch
from torch import Tensor

# CUtensorMapDataType, CUtensorMapSwizzle (cuda.h).
_MAP_TYPES: Final = {
    torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9,
}  # fmt: skip
_SWIZZLES: Final = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS: Final = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion
_MAX_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS: Final = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_STATIC_SHARED_LIMIT: Final = 48 << 10

INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_INVALID_VALUE: Final = 1  # CUDA_ERROR_INVALID_VALUE

MAP_BYTES: Final = 128
MAP_ALIGNMENT: Final = 64
_CAPTURE_ACTIVE: Final = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_CAPTURE_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_KERNEL_NODE: Final = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAPS: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

# What `kernel_node` asks of the driver.
_QUERIES: Final = (
    "cuGraphNodeGetType", "cuGraphNodeGetDependencies_v2", "cuGraphKernelNodeGetParams_v2", "cuFuncGetName",
    "cuFuncGetParamInfo", "cuKernelGetName", "cuKernelGetParamInfo",
)  # fmt: skip


class _Attribute(ctypes.Structure):
    """A CUlaunchAttribute, whose value is an int here, or three."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class LaunchConfig(ctypes.Structure):
    """A CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class _KernelParameters(ctypes.Structure):
    """A CUDA_KERNEL_NODE_PARAMS_v2: a kernel of a graph and the addresses of its parameters' values."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("values", ctypes.POINTER(ctypes.c_void_p)), ("packed", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class _Edge(ctypes.Structure):
    """A CUgraphEdgeData, whose `kind` is 0 where the later node begins after the earlier one has ended."""

    _fields_ = (("ports", ctypes.c_ubyte * 2), ("kind", ctypes.c_ubyte), ("_", ctypes.c_ubyte * 5))


class KernelNode(NamedTuple):
    """A kernel of a graph, and all words of 64 bits that are given to it: its pointers and other values."""

    name: str
    words: tuple[int, ...]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


@cache
def library() -> ctypes.PyDLL:
    """libcuda, called with the GIL held: every call here takes about a microsecond."""
    return ctypes.PyDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def make_context_current(device: int) -> None:
    """Gives the calling thread the device's primary context; a new thread has none before a call of CUDA's runtime."""
    context, cuda = ctypes.c_void_p(), library()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"context of device {device}")
    check(cuda.cuCtxSetCurrent(context), f"context of device {device}")


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Inside, this thread may make calls that allocate while a stream is captured."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "mode of capture")
    try:
        yield
    finally:
        check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "mode of capture")


def zeros(size: int) -> int:
    """The address of so many bytes of the current device, all 0, which are never freed."""
    cuda, address, stream = library(), ctypes.c_uint64(), ctypes.c_void_p()
    with relaxed_capture():
        # Not on the stream of all: it may not be used while another is captured.
        check(cuda.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "stream")
        try:
            check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), f"allocation of {size} bytes")
            zero = ctypes.c_ubyte(0)
            check(cuda.cuMemsetD8Async(address, zero, ctypes.c_size_t(size), stream), f"{size} bytes of zeros")
            check(cuda.cuStreamSynchronize(stream), f"{size} bytes of zeros")
        finally:
            cuda.cuStreamDestroy_v2(stream)
    return address.value


def captured(stream: int) -> tuple[int, int | None] | None:
    """The capture's number and the node that a captured stream is behind, of which the first is behind None.

    None where it is not captured, or comes behind several nodes.
    """
    status, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    failed = library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), ctypes.byref(graph), ctypes.byref(nodes),
        ctypes.byref(count),
    )  # fmt: skip
    if failed or status.value != _CAPTURE_ACTIVE or count.value > 1:
        return None
    return capture.value, nodes[0] if count.value else None


def kernel_node(node: int) -> KernelNode | None:
    """The kernel that a node of a graph launches once all before it has ended.

    None for other nodes, for a kernel that may begin while one before it runs, and where a driver of before CUDA 12.4
    can't tell.
    """
    cuda, handle = library(), ctypes.c_void_p(node)
    if not all(hasattr(cuda, name) for name in _QUERIES):
        return None
    kind, found = ctypes.c_int(), _KernelParameters()
    if cuda.cuGraphNodeGetType(handle, ctypes.byref(kind)) or kind.value != _KERNEL_NODE or not _waits(handle):
        return None
    if cuda.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(found)) or found.packed:
        return None
    if found.function:
        what, name_of, place_of = found.function, cuda.cuFuncGetName, cuda.cuFuncGetParamInfo
    else:
        what, name_of, place_of = found.kernel, cuda.cuKernelGetName, cuda.cuKernelGetParamInfo
    name, words = ctypes.c_char_p(), list[int]()
    if name_of(ctypes.byref(name), ctypes.c_void_p(what)):
        return None
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for index in count():
        failed = place_of(ctypes.c_void_p(what), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size))
        if failed:
            break
        value = ctypes.string_at(found.values[index], size.value // 8 * 8)
        words += (int.from_bytes(value[at : at + 8], "little") for at in range(0, len(value), 8))
    # Past the last parameter its number is invalid.
    return KernelNode((name.value or b"").decode(), tuple(words)) if failed == _INVALID_VALUE else None


def _waits(node: ctypes.c_void_p) -> bool:
    """Whether a node begins after all those before it have ended."""
    before, cuda = ctypes.c_size_t(), library()
    if cuda.cuGraphNodeGetDependencies_v2(node, None, None, ctypes.byref(before)):
        return False
    if not before.value:  # arrays without an element would be an error
        return True
    nodes, edges = (ctypes.c_void_p * before.value)(), (_Edge * before.value)()
    failed = cuda.cuGraphNodeGetDependencies_v2(node, nodes, edges, ctypes.byref(before))
    return not failed and not any(edge.kind for edge in edges)


def load_function(cubin: bytes, entry: str, shared: int, device: int) -> int:
    """The handle of a kernel of a cubin on a device, allowed `shared` bytes of dynamic shared memory."""
    make_context_current(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda = library()
    with relaxed_capture():
        check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {entry}")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding {entry}")
    if shared > _STATIC_SHARED_LIMIT:
        check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"{shared} bytes for {entry}")
    check(cuda.cuFuncSetAttribute(function, _LARGE_CLUSTERS, 1), f"clusters of 16 blocks for {entry}")
    return function.value or 0


def resident_clusters(function: int, cluster: int, threads: int, shared: int) -> int:
    """Clusters of so many blocks of `threads` threads and `shared` bytes that the current device runs at once."""
    attribute = _Attribute(id=_CLUSTER_DIMENSION, value=cluster, rest=(1, 1))
    config = LaunchConfig(
        (ctypes.c_uint * 3)(cluster, 1, 1), (ctypes.c_uint * 3)(threads, 1, 1), shared, None,
        ctypes.pointer(attribute), 1,
    )  # fmt: skip
    count = ctypes.c_int()
    status = library().cuOccupancyMaxActiveClusters(
        ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)
    )
    check(status, f"clusters of {cluster} blocks")
    return max(count.value, 1)


def overlapping(grid: tuple[int, int, int], threads: int, shared: int) -> LaunchConfig:
    """The configuration of a programmatic dependent launch, which may begin before its predecessor ends."""
    attribute = _Attribute(id=_OVERLAPS, value=1)
    return LaunchConfig(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, None, ctypes.pointer(attribute), 1
    )


def encode_map(into: int, tensor: Tensor, box: Sequence[int], swizzle: int, promotion: int) -> None:
    """Writes the CUtensorMap of a tensor, whose last axis is contiguous, to the 64-byte aligned address `into`.

    One copy moves `box`, in the order of the tensor's axes, and a miss brings `promotion` bytes to the L2. Elements
    outside of the tensor load as zeros, and stores to them are dropped.
    """
    rank, dtype = tensor.dim(), tensor.dtype
    # The driver has the contiguous axis first, and leaves out its stride.
    shape, strides, box = tensor.shape[::-1], tensor.stride()[::-1][1:], box[::-1]
    encoded = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(into), _MAP_TYPES[dtype], rank, ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(rank - 1, 1))(*(stride * dtype.itemsize for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0, _SWIZZLES[swizzle], _PROMOTIONS[promotion], 0,
    )  # fmt: skip
    if encoded:
        check(encoded, f"TMA descriptor of shape {tuple(shape)}, strides {tuple(strides)}, box {tuple(box)} ({dtype})")
