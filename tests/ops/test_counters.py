"""Counters of launches: which stream and which graph has which, and how a launch gets their address."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.cuda.runtime import counters, driver
from fp8fn.ops.cuda.runtime.counters import MOST_LISTS, SETS, counters_of
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, LaunchSequence, pointers
from fp8fn.ops.torch_private import core
from support.stub_driver import Operands, StubDriver

FIRST = 1 << 20
BYTES = 4 * (1 + MOST_LISTS)


class Streams:
    """Streams without a GPU: the current one's handle and number, and in which capture it is."""

    def __init__(self) -> None:
        self.handle, self.number, self.capture = 0, 0, 0
        self.pools: list[int] = []

    def be(self, handle: int, number: int = 1, capture: int = 0) -> int:
        self.handle, self.number, self.capture = handle, number, capture
        return counters_of(handle, 0)

    def zeros(self, size: int) -> int:
        self.pools.append(size)
        return FIRST * len(self.pools)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    for store in ("_pools", "_sets", "_used"):
        monkeypatch.setattr(counters, store, {})
    monkeypatch.setattr(counters, "is_shared", lambda: True)
    monkeypatch.setattr(driver, "zeros", found.zeros)
    monkeypatch.setattr(driver, "make_context_current", lambda device: None)
    monkeypatch.setattr(driver, "captured", lambda stream: (found.capture, 4) if found.capture > 0 else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capture != 0)
    monkeypatch.setattr(
        core, "stream_identity", lambda device: (found.number, device, 1)
    )  # fmt: skip
    return found


def test_each_stream_has_its_own(streams: Streams) -> None:
    assert streams.be(0, 0) == FIRST
    assert streams.be(4096) == FIRST + BYTES
    assert streams.be(8192) == FIRST + 2 * BYTES
    assert [streams.be(0, 0), streams.be(8192), streams.be(4096)] == [FIRST, FIRST + 2 * BYTES, FIRST + BYTES]
    assert streams.pools == [SETS * BYTES]


def test_each_device_has_its_own_pool(streams: Streams) -> None:
    assert [counters_of(0, 0), counters_of(0, 1), counters_of(0, 0)] == [FIRST, 2 * FIRST, FIRST]


def test_each_capture_has_its_own(streams: Streams) -> None:
    assert streams.be(4096) == FIRST
    assert streams.be(4096, capture=7) == FIRST + BYTES
    assert streams.be(4096, capture=8) == FIRST + 2 * BYTES
    assert streams.be(8192, capture=8) == FIRST + 3 * BYTES  # a branch of the same graph
    assert streams.be(4096, capture=8) == FIRST + 2 * BYTES
    assert streams.be(4096) == FIRST
    assert streams.be(4096, capture=-1) == 0  # behind several nodes, or a capture that is broken


@pytest.mark.parametrize(("handle", "number"), [(4096, 4096), (2, 1), (2, 2)])
def test_a_stream_that_pytorch_does_not_own_has_none(streams: Streams, handle: int, number: int) -> None:
    assert streams.be(handle, number) == 0
    assert streams.pools == []


def test_a_process_by_itself_has_none(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not torch.distributed.is_initialized()
    assert counters_of(0, 0) == 0


def test_no_two_streams_share_the_last_ones(streams: Streams) -> None:
    found = [streams.be(16 * (i + 1)) for i in range(SETS + 2)]
    assert found[:SETS] == [FIRST + i * BYTES for i in range(SETS)]
    assert found[SETS:] == [0, 0]


def dealt() -> CudaLaunch:
    return replace(Operands().plan(), counted="counters")


def address(plan: CudaLaunch, stub: StubDriver) -> int:
    return stub.launched[-1].words[list(plan.args).index("counters")]


def test_a_launch_has_the_counters_of_its_stream(
    stub: StubDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dealt()
    prepared = plan.prepare()
    for handle, number, capture, expected in (
        (0, 0, 0, FIRST), (0, 0, 0, FIRST), (4096, 1, 0, FIRST + BYTES), (4096, 1, 5, FIRST + 2 * BYTES),
        (4096, 1, 0, FIRST + BYTES), (64, 64, 0, 0), (0, 0, 0, FIRST),
    ):  # fmt: skip
        streams.handle, streams.number, streams.capture = handle, number, capture
        monkeypatch.setattr(core, "stream_handle", lambda index: streams.handle)
        prepared.launch(pointers(plan.args))
        assert address(plan, stub) == expected


def test_a_launch_without_counters_asks_for_none(
    stub: StubDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Operands().plan()
    assert plan.counted == ""
    plan.prepare().launch(pointers(plan.args))
    assert address(plan, stub) == 0
    assert streams.pools == []


def test_a_process_that_joins_a_group_later_gets_them(
    stub: StubDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "stream_handle", lambda index: 0)
    joined = False
    monkeypatch.setattr(counters, "is_shared", lambda: joined)
    plan = dealt()
    prepared = plan.prepare()
    prepared.launch(pointers(plan.args))
    assert address(plan, stub) == 0
    joined = True
    prepared.launch(pointers(plan.args))
    assert address(plan, stub) == FIRST


def test_a_sequence_has_counters_beside_those_of_its_launches(
    stub: StubDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches may start on another stream meanwhile, by themselves."""
    monkeypatch.setattr(core, "stream_handle", lambda index: streams.handle)
    plan = dealt()
    prepared = plan.prepare()
    count = len(pointers(plan.args))
    sequence = LaunchSequence([(prepared, list(range(count)))], count)
    given = [16 * (i + 1) for i in range(count)]
    streams.be(0, 0)
    sequence.start(given)
    assert address(plan, stub) == FIRST
    first = stub.launched[-1].parameters[list(plan.args).index("counters")]
    streams.be(4096)
    prepared.launch(pointers(plan.args))
    assert address(plan, stub) == FIRST + BYTES
    assert ctypes.c_uint64.from_address(first).value == FIRST
    sequence.start(given)
    assert address(plan, stub) == FIRST + BYTES


@pytest.mark.parametrize("captured_first", [False, True])
def test_a_sequence_that_is_captured_has_the_counters_of_its_graph(
    captured_first: bool, stub: StubDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may have asked about the stream of another device; the stream is the same before and after."""
    monkeypatch.setattr(core, "stream_handle", lambda index: 4096)
    plan = dealt()
    count = len(pointers(plan.args))
    sequence = LaunchSequence([(plan.prepare(), list(range(count)))], count)
    found = {}
    for capture in (9, 0, 9) if captured_first else (0, 9, 0):
        streams.number, streams.capture = 1, capture
        sequence.start([16 * (i + 1) for i in range(count)])
        found.setdefault(capture, set()).add(address(plan, stub))
    assert [len(found[0]), len(found[9])] == [1, 1]
    assert found[0] != found[9]


def test_a_sequence_started_before_its_process_joins_a_group_gets_them(
    stub: StubDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "stream_handle", lambda index: 0)
    monkeypatch.setattr(counters, "is_shared", lambda: False)
    plan = dealt()
    count = len(pointers(plan.args))
    sequence = LaunchSequence([(plan.prepare(), list(range(count)))], count)
    given = [16 * (i + 1) for i in range(count)]
    sequence.start(given)
    assert address(plan, stub) == 0
    monkeypatch.setattr(counters, "is_shared", lambda: True)
    sequence.start(given)
    assert address(plan, stub) == FIRST


def test_a_gpu_without_memory_for_them_has_none(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def zeros(size: int) -> int:
        asked.append(size)
        raise driver.DriverError("out of memory")

    monkeypatch.setattr(driver, "zeros", zeros)
    assert [streams.be(0, 0), streams.be(4096), streams.be(0, 0)] == [0, 0, 0]
    assert asked == [SETS * BYTES]


def test_zeros_are_written_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
            calls.append(("mode", mode._obj.value))
            mode._obj.value = 0
            return 0

        def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
            address._obj.value = 4096
            calls.append(("alloc", size.value))
            return 0

        def cuStreamCreate(self, stream: Any, flags: int) -> int:
            stream._obj.value = 99
            calls.append(("create", flags))
            return 0

        def cuMemsetD8Async(self, address: Any, value: Any, size: Any, stream: Any) -> int:
            calls.append(("set", (address.value, value.value, size.value, stream.value)))
            return 0

        def cuStreamSynchronize(self, stream: Any) -> int:
            calls.append(("synchronize", stream.value))
            return 0

        def cuStreamDestroy_v2(self, stream: Any) -> int:
            calls.append(("destroy", stream.value))
            return 0

    monkeypatch.setattr(driver, "library", Driver)
    assert driver.zeros(768) == 4096
    assert calls == [
        ("mode", 2), ("create", 1), ("alloc", 768), ("set", (4096, 0, 768, 99)), ("synchronize", 99), ("destroy", 99),
        ("mode", 0),
    ]  # fmt: skip
