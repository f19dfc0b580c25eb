"""Kept calls: which are kept, what a plan reads of its tensors, and how a call puts others in their place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.runtime import call_cache
from fp8fn.ops.cuda.runtime.call_cache import geometry, kind
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.torch_private import core
from support.stub_driver import FORWARD, WGRAD, Operands, StubDriver

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def test_what_was_used_longest_ago_is_dropped(kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "LIMIT", 3)
    for key in "abc":
        assert call_cache.keep(key, key.upper()) == key.upper()
    assert call_cache.recall("a") == "A"
    call_cache.keep("d", "D")
    assert list(kept) == ["c", "a", "d"]
    assert call_cache.recall("b") is None
    for i in range(100):
        call_cache.keep(i, i)
    assert len(kept) == 3


def test_the_first_of_two_that_are_kept_under_one_key_stays(kept: OrderedDict[Any, Any]) -> None:
    assert call_cache.keep("key", "first") == "first"
    assert call_cache.keep("key", "second") == "first"


def test_threads_that_keep_at_once_keep_no_more_than_the_limit(
    kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "LIMIT", 16)
    wrong = []

    def work(thread: int) -> None:
        for i in range(500):
            key = (thread * i) % 40
            if call_cache.keep(key, key) != key or call_cache.recall(key) not in (key, None):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(kept) <= 16


def test_a_kind_is_all_that_a_plan_reads() -> None:
    x = torch.empty(64, 48, dtype=torch.uint8)
    memory = torch.empty(64 * 48 + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    aligned, off = (memory[start + by :].as_strided((64, 48), (48, 1)) for by in (16, 17))
    assert kind(x) == kind(torch.empty(64, 48, dtype=torch.uint8)) == kind(aligned)
    for other in (
        x[:63], x.mT, x.view(torch.int8), off, x[None], torch.empty(64, 64, dtype=torch.uint8)[:, :48],
        x.view(torch.float8_e4m3fn), torch.empty(64, 48, dtype=torch.uint8, device="meta"),
    ):  # fmt: skip
        if other.device.type == "meta":
            continue  # its index is that of the CPU
        assert kind(other) != kind(x)
    assert hash(kind(x)) == hash(kind(aligned))


def names_of_pointers(plan: CudaLaunch) -> list[str]:
    return [name for name, arg in plan.args.items() if not isinstance(arg, (int, float, tuple))]


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("bias", [None, FP16], ids=str)
@pytest.mark.parametrize("blocks", [FORWARD, WGRAD, ((1, -1), (-1, 1))], ids=str)
def test_a_call_puts_each_tensor_in_its_place(
    blocks: tuple[Block, Block], bias: torch.dtype | None, batch: int | None, stub: StubDriver
) -> None:
    planned, other = (Operands(blocks=blocks, bias=bias, batch=batch) for _ in range(2))
    plan = planned.plan(ScaledMmConfig())
    call = planned.call(plan)
    assert call.made[0] == geometry(planned.out)
    assert len(call.made) == 1
    outs = call(*other.inputs)
    assert len(outs) == 1
    assert geometry(outs[0]) == geometry(planned.out)
    tensors = dict(zip(("a", "a_scale", "b", "b_scale", "bias"), other.inputs, strict=False))
    seen = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    seen["out"] = outs[0].data_ptr()
    assert len(stub.launched) == len(call.steps) == 1
    words = dict(zip(plan.args, stub.launched[0].words, strict=True))
    for name in names_of_pointers(plan):
        assert words[name] == (0 if plan.args[name] is None else seen[name]), name


def test_a_call_allocates_anew_each_time(stub: StubDriver) -> None:
    operands = Operands()
    call = operands.call(operands.plan(ScaledMmConfig()))
    first, second = call(*operands.inputs)[0], call(*operands.inputs)[0]
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() != operands.out.data_ptr()


def test_a_call_on_another_device_than_the_current_one_changes_to_it(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    def enter(device: torch.device) -> Any:
        entered.append(device)
        return nullcontext()

    operands = Operands()
    call = operands.call(operands.plan())
    monkeypatch.setattr(torch.cuda, "device", enter)
    call(*operands.inputs)
    assert entered == []
    monkeypatch.setattr(core, "current_gpu", lambda: 1)
    call(*operands.inputs)
    assert entered == [operands.a.device]
