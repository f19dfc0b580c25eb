"""Launches that may still run when a captured one begins, and CUDA graphs whose products read their weights early."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.cuda.gemm import a16w8_tiles, mx_tiles
from fp8fn.ops.cuda.runtime import call_cache, driver, graph_capture
from fp8fn.ops.cuda.runtime.call_cache import Call, Step, geometry
from fp8fn.ops.cuda.runtime.launch import CudaKernel, CudaLaunch
from fp8fn.ops.targets import SM90, Target
from fp8fn.ops.torch_private import core
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

    def place(self, stream: int) -> tuple[int, int | None] | None:
        if len(self.nodes) > 1:
            return None
        return self.capture, self.nodes[0] if self.nodes else None

    def add(self) -> None:
        self.count += 1
        self.nodes = [self.count]


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
    for _ in range(100):
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


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
