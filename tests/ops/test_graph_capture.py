"""Launches that may still run when a captured one begins, and CUDA graphs whose products read their weights early."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.cuda.gemm import a16w8_tiles, mx_tiles
from fp8fn.ops.cuda.runtime import call_cache, driver, graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Call, Step, geometry
from fp8fn.ops.cuda.runtime.driver import KernelNode
from fp8fn.ops.cuda.runtime.launch import CudaKernel, CudaLaunch
from fp8fn.ops.targets import SM90, Target
from fp8fn.ops.torch_private import core
from fp8fn.ops.triton.launch import TritonCall
from support.operands.mx import operands
from support.operands.weights import weight
from support.products import planned, scaled_product, weight_product

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@dataclass
class Graph:
    """In the place of the driver: a capture whose stream is behind `nodes`."""

    capture: int = 1
    nodes: list[int] = field(default_factory=list)
    count: int = 0
    kernels: dict[int, KernelNode] = field(default_factory=dict)

    def place(self, stream: int) -> tuple[int, int | None] | None:
        if len(self.nodes) > 1:
            return None
        return self.capture, self.nodes[0] if self.nodes else None

    def add(self, name: str = "", *given: Tensor | int) -> None:
        """A node, or a kernel of this name that is given these addresses."""
        self.count += 1
        self.nodes = [self.count]
        if name:
            words = (x.data_ptr() if isinstance(x, Tensor) else x for x in given)
            self.kernels[self.count] = KernelNode(name, tuple(words))


@dataclass
class Launched:
    """In the place of a `Prepared`."""

    graph: Graph
    settles: bool
    device: torch.device = CPU

    def launch(self, addresses: list[int]) -> None:
        self.graph.add()


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    found = Graph()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(graph_capture, "capturing", lambda: True)
    monkeypatch.setattr(driver, "captured", found.place)
    monkeypatch.setattr(driver, "kernel_node", found.kernels.get)
    monkeypatch.setattr(core, "stream_handle", lambda index: 77)
    monkeypatch.setattr(core, "current_gpu", lambda: None)  # the index of the CPU
    graph_capture.forget()
    yield found
    graph_capture.forget()


def launch(graph: Graph, *settles: bool) -> Tensor:
    """One call of ours, of a launch each; what it makes."""
    x = torch.empty(4)
    steps = tuple(Step(Launched(graph, each), (0, 1)) for each in settles)  # type: ignore[arg-type]
    return Call(steps, (geometry(x),), 1)(x)[0]


def test_a_graph_of_hip_is_captured_and_its_places_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for captured in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        assert graph_capture.capturing() == captured
        assert graph_capture.ahead(CPU) is None
        assert not graph_capture.readable(torch.empty(4))


def test_at_the_beginning_everything_may_be_read(graph: Graph) -> None:
    assert graph_capture.readable(torch.empty(4))


def test_behind_ours_all_but_what_they_make(graph: Graph) -> None:
    w = torch.empty(8, 8)
    first, second = launch(graph, False), launch(graph, False)
    assert graph_capture.readable(w, w[3:])
    for written in (first, second, second[1:], second.view(2, 2).mT):
        assert not graph_capture.readable(written)
        assert not graph_capture.readable(w, written)


def test_what_settles_leaves_nothing_before_it_running(graph: Graph) -> None:
    first, second, third = launch(graph, False), launch(graph, True), launch(graph, False)
    assert graph_capture.readable(first)
    assert not graph_capture.readable(second)
    assert not graph_capture.readable(third)


def test_kept_launches_by_triton_settle(graph: Graph) -> None:
    """All before them has ended; only their last one's results may still be written."""

    class Started:
        def start(self, tensors: Sequence[Tensor | None], device: torch.device) -> None:
            graph.add("quantize_rows")

    w, x = torch.empty(4), torch.empty(4)
    call = TritonCall((Started(), Started()), (geometry(x), geometry(w)), 1)  # type: ignore[arg-type]
    graph.add("another")
    assert not graph_capture.readable(w)
    (made,) = call(x)
    assert graph_capture.readable(w, x)
    assert not graph_capture.readable(w, made)
    settled = launch(graph, True)
    assert graph_capture.readable(w, made)
    assert not graph_capture.readable(settled)
    graph.add("quantize_rows")  # the same kernel by other hands
    assert not graph_capture.readable(w)


def test_behind_another_library_s_launch_nothing_until_one_of_ours_settles(graph: Graph) -> None:
    w = torch.empty(4)
    launch(graph, True)
    graph.add()
    assert not graph_capture.readable(w)
    launch(graph, False)
    assert not graph_capture.readable(w)
    made = launch(graph, True)
    assert graph_capture.readable(w)
    assert not graph_capture.readable(made)


def test_behind_a_kernel_of_inductor_s_all_but_what_it_is_given(graph: Graph) -> None:
    """Whatever came before it has ended, and a view's address lies within its storage."""
    w, given, number = torch.empty(8, 8), torch.empty(8, 8), torch.empty(4)
    graph.add("another")
    assert not graph_capture.readable(w)
    graph.add("triton_poi_fused_add_mul_0", given[3:], 0, 7, number.data_ptr())
    assert graph_capture.readable(w, w[2:])
    for written in (given, given[:1], given.mT, number):
        assert not graph_capture.readable(written)
        assert not graph_capture.readable(w, written)
    made = launch(graph, False)
    assert graph_capture.readable(w)
    for written in (given, made):
        assert not graph_capture.readable(written)
    graph.add("triton_red_fused_1", w)
    assert graph_capture.readable(given, made)
    assert not graph_capture.readable(w)


@pytest.mark.parametrize(
    "name",
    [
        "triton_tem_fused_mm_0", "triton_mm", "poi_fused", "void at::native::triton_poi_fused()", "_triton_per_fused",
        "triton_per_token_group_quant", "triton_red_stats", "triton_for_", "triton_poi_",
        "_ZN5flash16flash_fwd_kernelI", "flash_fwd_kernel", "_ZN13pytorch_flash", "fmha_cutlassF_bf16",
        "_Z37fmha_cutlassB_bf16", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_4",
    ],
)  # fmt: skip
def test_behind_other_kernels_nothing_is_known(name: str, graph: Graph) -> None:
    graph.add(name)
    assert not graph_capture.readable(torch.empty(4))


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_0", "triton_per_fused_mean_1", "triton_red_fused_2", "triton_for_fused_3", "triton_poi__4",
        "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traits",
        "_ZN13pytorch_flash24flash_fwd_splitkv_kernelI",
        "_Z41fmha_cutlassF_bf16_aligned_64x128_rf_sm80N22PyTorchMemEffAttention15AttentionKernelI",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x128_4x1x1_kernel0_0",
    ],
)  # fmt: skip
def test_kernels_of_pytorch_s_are_known_by_their_names(name: str, graph: Graph) -> None:
    graph.add(name)
    assert graph_capture.readable(torch.empty(4))


def test_a_call_of_several_launches_settles_if_one_of_them_does(graph: Graph) -> None:
    graph.add()
    made = launch(graph, False, True, False)
    assert graph_capture.readable(torch.empty(4))
    assert not graph_capture.readable(made)
    graph.add()
    launch(graph, False, False)
    assert not graph_capture.readable(torch.empty(4))


def test_behind_several_nodes_nothing_is_known(graph: Graph) -> None:
    launch(graph, True)
    graph.nodes = [1, 7]
    assert not graph_capture.readable(torch.empty(4))
    launch(graph, True)  # behind all of them
    assert graph_capture.readable(torch.empty(4))


def test_streams_and_captures_have_their_own(graph: Graph) -> None:
    w = torch.empty(4)
    launch(graph, True)
    ours = graph.nodes
    graph.add()
    assert not graph_capture.readable(w)
    graph.nodes = ours  # another stream
    assert graph_capture.readable(w)
    graph.capture = 2  # where a node may have the same address
    assert not graph_capture.readable(w)


def test_the_last_places_are_kept(graph: Graph) -> None:
    for _ in range(graph_capture.LIMIT + 10):
        launch(graph, True)
    assert len(graph_capture._windows) == graph_capture.LIMIT
    assert graph_capture.readable(torch.empty(4))


def test_outside_of_a_capture_and_on_a_cpu_nothing(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(graph, True)
    monkeypatch.setattr(core, "current_gpu", lambda: 1)
    assert not graph_capture.readable(torch.empty(4))
    monkeypatch.setattr(core, "current_gpu", lambda: None)
    assert graph_capture.readable(torch.empty(4))
    with monkeypatch.context() as patch:
        patch.setattr(graph_capture, "capturing", lambda: False)
        assert not graph_capture.readable(torch.empty(4))
        launch(graph, True)
        assert not graph_capture.readable(torch.empty(4))
    assert not graph_capture.readable(torch.empty(4))  # what was launched meanwhile is not known
    monkeypatch.undo()
    assert not graph_capture.readable(torch.empty(4))


def test_calls_are_not_written_down_as_one(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that one graph may read early another graph may not."""
    monkeypatch.setattr(call_cache, "_kept", type(call_cache._kept)())
    ran = []

    def run() -> list[Tensor | None]:
        ran.append(1)
        return [launch(graph, True)]

    for _ in range(3):
        call_cache.chained("key", (torch.empty(4),), run)
    assert len(ran) == 3
    assert call_cache.recall("key") is None


def test_what_the_driver_says() -> None:
    class Library:
        status, count, failed = 1, 1, 0

        def cuStreamGetCaptureInfo_v2(self, stream: Any, *out: Any) -> int:
            status, capture, graph, nodes, count = (each._obj for each in out)
            self.keep = (ctypes.c_void_p * 2)(4096, 8192)
            status.value, capture.value, graph.value, count.value = self.status, 5, 64, self.count
            ctypes.memmove(ctypes.byref(nodes), ctypes.byref(ctypes.c_void_p(ctypes.addressof(self.keep))), 8)
            return self.failed

    library = Library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "library", lambda: library)
        assert driver.captured(77) == (5, 4096)
        library.count = 0
        assert driver.captured(77) == (5, None)
        library.count = 2
        assert driver.captured(77) is None
        library.count, library.status = 1, 2  # invalidated
        assert driver.captured(77) is None
        library.status, library.failed = 1, 1
        assert driver.captured(77) is None


class Kernels:
    """In the place of libcuda: one kernel node, behind `before` others."""

    def __init__(
        self, *values: bytes, function: bool = True, kind: int = 0, before: int = 1, edge: int = 0, packed: int = 0
    ) -> None:
        self.values = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self.addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self.values))
        self.function, self.kind, self.before, self.edge, self.packed = function, kind, before, edge, packed

    def cuGraphNodeGetType(self, node: ctypes.c_void_p, kind: Any) -> int:
        assert node.value == 4096
        kind._obj.value = self.kind
        return 0

    def cuGraphNodeGetDependencies_v2(self, node: ctypes.c_void_p, nodes: Any, edges: Any, count: Any) -> int:
        if edges is not None:
            if not self.before:
                return 1
            nodes[count._obj.value - 1], edges[count._obj.value - 1].kind = 64, self.edge
        count._obj.value = self.before
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: ctypes.c_void_p, found: Any) -> int:
        params = found._obj
        params.function, params.kernel = (7, None) if self.function else (None, 7)
        params.values, params.packed = ctypes.cast(self.addresses, type(params.values)), self.packed
        return 0

    def _name(self, name: Any, what: ctypes.c_void_p) -> int:
        assert what.value == 7
        name._obj.value = b"triton_poi_fused_0"
        return 0

    def _place(self, what: ctypes.c_void_p, index: ctypes.c_size_t, offset: Any, size: Any) -> int:
        if index.value >= len(self.values):
            return 1
        size._obj.value = len(self.values[index.value])
        return 0

    cuFuncGetName = cuKernelGetName = _name
    cuFuncGetParamInfo = cuKernelGetParamInfo = _place


@pytest.mark.parametrize(("function", "before"), [(True, 1), (False, 2), (True, 0)])
def test_what_a_kernel_node_is_given(function: bool, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers, a number of 32 bits, a structure of three words and of a half."""
    given = (
        (1 << 40).to_bytes(8, "little"),
        (5).to_bytes(4, "little"),
        b"".join(i.to_bytes(8, "little") for i in (2, 3, 4)),
    )
    monkeypatch.setattr(driver, "library", lambda: Kernels(*given, b"", bytes(12), function=function, before=before))
    assert driver.kernel_node(4096) == ("triton_poi_fused_0", (1 << 40, 2, 3, 4, 0))


@pytest.mark.parametrize("differs", [{"kind": 1}, {"edge": 1}, {"edge": 1, "before": 3}, {"packed": 4096}])
def test_the_driver_says_nothing_of_other_nodes(differs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", lambda: Kernels(bytes(8), **differs))
    assert driver.kernel_node(4096) is None


def test_an_older_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", object)
    assert driver.kernel_node(4096) is None


def test_which_launches_settle() -> None:
    """Launches settle that do not overlap, as they begin after all others, or that let the next one begin late."""
    assert CudaLaunch(CudaKernel("a.cu", "a", ()), (1, 1, 1), 32, 0, {}, target=SM90).settles
    x, w = torch.empty(1, 2048, dtype=BF16), weight(2048, 256, (128, 128))
    out = torch.empty(1, 256, dtype=BF16)
    for late in (False, True):
        launch_ = planned(a16w8_tiles, weight_product(x, w, out), a16w8_tiles.A16W8TilesConfig(8, 4, 2, LATE=late))
        assert launch_.overlaps
        assert launch_.settles == late == bool(launch_.options["LATE"])
    a, b = operands(1, 256, 2048)
    for late in (False, True):
        config = mx_tiles.MxTilesConfig(8, LATE=late, STAGES=2)
        (launch_,) = mx_tiles.plan(scaled_product(a, b, out, SM90), config)
        assert launch_.overlaps
        assert launch_.settles == late == bool(launch_.options["LATE"])


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The answers for each weight whose product was captured."""
    said: list[bool] = []
    readable = graph_capture.readable

    def told(*tensors: Tensor) -> bool:
        found = readable(*tensors)
        if graph_capture.capturing():
            said.append(found)
        return found

    monkeypatch.setattr(graph_capture, "readable", told)
    return said


def weights_on_gpu(mx: bool, count: int, size: int) -> list[ScaledTensor]:
    found = []
    for _ in range(count):
        w = torch.randn(size, size, device="cuda") / size**0.5
        found.append(fp8fn.quantize(w.mT, (32, 1), scale="e8m0") if mx else fp8fn.quantize(w.mT, (128, 128)))
    torch.cuda.synchronize()
    return found


def check_replays(graph: torch.cuda.CUDAGraph, found: list[Tensor], expected: list[Tensor]) -> None:
    for _ in range(100):
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("mx", [False, True], ids=["A16W8", "MX"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_a_graph_reads_weights_early_on_its_own(m: int, mx: bool, early: list[bool], hopper: Target) -> None:
    """Each x is the product before, without anything between them; the kernel need not be loaded before."""
    weights = weights_on_gpu(mx, 12, 1024)
    x = torch.randn(m, 1024, device="cuda", dtype=BF16)
    rows = fp8fn.quantize(x, (1, 32), scale="e8m0")

    def products(**told: bool) -> list[Tensor]:
        if mx:
            return [fp8fn.gemm(rows, w, **told) for w in weights]
        found = [x]
        for w in weights:
            found.append(fp8fn.gemm(found[-1], w, **told))
        return found[1:]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    assert early == [True] * len(weights)
    expected = products(constant=True)
    check_replays(graph, found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mx", [False, True], ids=["A16W8", "MX"])
@pytest.mark.parametrize("m", [1, 16])
def test_behind_inductor_s_kernels_weights_are_read_early(m: int, mx: bool, early: list[bool], hopper: Target) -> None:
    """Each product is behind a kernel that Inductor generated for what lies between two."""
    weights = weights_on_gpu(mx, 6, 1024)
    x = torch.randn(m, 1024, device="cuda", dtype=BF16)

    @torch.compile(fullgraph=True, dynamic=False)
    def products(x: Tensor, **told: bool) -> list[Tensor]:
        found = [x]
        for w in weights:
            a = torch.relu(found[-1]) - 0.25
            found.append(fp8fn.gemm(fp8fn.quantize(a, (1, 32), scale="e8m0") if mx else a, w, **told))
        return found[1:]

    products(x)
    expected = products(x, constant=True)  # a weight that is read early may be divided otherwise
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products(x)
    assert early == [True] * len(weights)
    check_replays(graph, found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 1000])
@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_behind_attention_weights_are_read_early(
    backend: SDPBackend, keys: int, early: list[bool], hopper: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of four queries, which others replace at each replay; the kernel's node has the heads' address."""
    (w,) = weights_on_gpu(False, 1, 1024)
    q, k, v = (torch.randn(1, m, 8, 128, device="cuda", dtype=BF16).transpose(1, 2) for m in (4, keys, keys))
    nodes: list[KernelNode | None] = []
    kernel_node = driver.kernel_node

    def noted(node: int) -> KernelNode | None:
        nodes.append(kernel_node(node))
        return nodes[-1]

    monkeypatch.setattr(driver, "kernel_node", noted)

    def heads() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view(4, 1024)

    fp8fn.gemm(heads(), w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = heads()
        found = fp8fn.gemm(x, w)
    assert early == [True]
    assert any(node is not None and x.data_ptr() in node.words for node in nodes)
    for _ in range(100):
        q.normal_()
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, fp8fn.gemm(heads(), w, constant=True))


@pytest.mark.gpu
@pytest.mark.parametrize("named", [True, False], ids=["as Inductor does", "otherwise"])
def test_a_weight_that_a_kernel_before_is_given_is_not_read_early(
    named: bool, early: list[bool], hopper: Target, tmp_path: Path
) -> None:
    """A kernel writes the weight of the second product right before it; the first one's is another."""
    name = "triton_poi_fused_copy_0" if named else "copy_bytes"
    (tmp_path / "copying.py").write_text(
        "import triton\nimport triton.language as tl\n@triton.jit\n"
        f"def {name}(source, into, count, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(into + at, tl.load(source + at, at < count), at < count)\n"
    )
    spec = importlib.util.spec_from_file_location("copying", tmp_path / "copying.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    other, written, *sources = weights_on_gpu(False, 6, 2048)
    x = torch.randn(4, 2048, device="cuda", dtype=BF16)
    source = torch.empty_like(written.data.view(torch.uint8))
    into = written.data.view(torch.uint8)

    def step() -> list[Tensor]:
        found = []
        for w in (other, written):
            kernel[(-(-into.numel() // 1024),)](source, into, into.numel(), BLOCK=1024)
            found.append(fp8fn.gemm(x, w))
        return found

    source.copy_(sources[0].data.view(torch.uint8))
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert early == [named, False]
    for turn in range(100):
        source.copy_(sources[turn % len(sources)].data.view(torch.uint8))
        graph.replay()
        copied = ScaledTensor(sources[turn % len(sources)].data, written.scale, written.block)
        for one, w in zip(found, (other, copied), strict=True):
            assert torch.equal(one, fp8fn.gemm(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("mx", [False, True], ids=["A16W8", "MX"])
def test_a_weight_that_the_graph_writes_is_read_in_its_turn(mx: bool, early: list[bool], hopper: Target) -> None:
    """By our quantizer right before, or before another weight's product, or by a copy; other values each time."""
    source = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    (other,), (copied,) = weights_on_gpu(mx, 1, 2048), weights_on_gpu(mx, 1, 2048)
    x = torch.randn(4, 2048, device="cuda", dtype=BF16)

    def quantized(w: Tensor) -> ScaledTensor:
        return fp8fn.quantize(w.mT, (32, 1), scale="e8m0") if mx else fp8fn.quantize(w.mT, (128, 128))

    a = fp8fn.quantize(x, (1, 32), scale="e8m0") if mx else x

    def step() -> list[Tensor]:
        w = quantized(source)
        found = [fp8fn.gemm(a, w)]
        found.append(fp8fn.gemm(a, other))
        found.append(fp8fn.gemm(a, w))
        copied.data.view(torch.uint8).copy_(w.data.view(torch.uint8))
        copied.scale.copy_(w.scale)
        found.append(fp8fn.gemm(a, copied))
        return found

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert len(early) == 4
    assert not early[0]
    assert early[1] or mx
    assert not early[3]
    for _ in range(50):
        source.normal_()
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for one, exact in zip(found, step(), strict=True):
            torch.testing.assert_close(one, exact, rtol=2e-2, atol=2e-2)


def test_addresses_below_and_above_what_is_written_are_none_of_it(graph: Graph) -> None:
    """The parts lie in one piece of memory, each in a storage of its own."""
    memory = bytearray(64)

    def part(start: int, stop: int) -> Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=stop - start)

    graph.add()
    graph_capture.launched(CPU, frozenset(), [part(16, 32)])
    for start, stop in ((0, 8), (0, 16), (32, 48), (40, 64)):
        assert graph_capture.readable(part(start, stop)), (start, stop)
    for start, stop in ((0, 17), (31, 48), (16, 32), (20, 24), (0, 64)):
        assert not graph_capture.readable(part(start, stop)), (start, stop)
