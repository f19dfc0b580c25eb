"""Calls as one: what is written down, what is refused, and that values follow the tensors of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fp8fn
from fp8fn.meta.call_site import CallSite
from fp8fn.ops.cuda.runtime import call_cache
from fp8fn.ops.cuda.runtime.call_cache import Call, Program, Step, chained, geometry
from fp8fn.ops.torch_private import core

BF16 = torch.bfloat16


class Adds:
    """In the place of a `Prepared`: its last pointer is where the sum of the others is written."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.started: list[list[int]] = []

    def launch(self, addresses: list[int]) -> None:
        self.started.append(addresses)
        *terms, out = (_at[address] for address in addresses)
        out.as_strided((4,), (1,)).copy_(sum(terms[1:], terms[0]))


_at: dict[int, Tensor] = {}


def known(*tensors: Tensor) -> tuple[Tensor, ...]:
    _at.update({x.data_ptr(): x for x in tensors})
    return tensors


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_kept", type(call_cache._kept)())
    monkeypatch.setattr(call_cache, "start", lambda launch, addresses: launch.launch(addresses))
    allocated = call_cache.allocated
    monkeypatch.setattr(call_cache, "allocated", lambda made, device: list(known(*allocated(made, device))))
    _at.clear()


def add() -> Call:
    """`add()(x, y)` is `[x + y]`, of four elements."""
    return Call((Step(Adds(), (0, 1, 2)),), (geometry(torch.empty(4)),), 1)  # type: ignore[arg-type]


def ones(value: float) -> Tensor:
    return known(torch.full((4,), value))[0]


def runner(first: Call, second: Call, x: Tensor, y: Tensor, ran: list[int]) -> Callable[[], list[Tensor | None]]:
    def run() -> list[Tensor | None]:
        ran.append(1)
        both = first(x, y)[0]
        return [second(both, y)[0], None, both]

    return run


def test_the_second_time_is_one_call_on_the_new_tensors() -> None:
    first, second, ran = add(), add(), []
    for value in (1.0, 10.0, 100.0):
        x, y = ones(value), ones(2 * value)
        out, nothing, both = chained("key", (x, y), runner(first, second, x, y, ran))
        assert out is not None
        assert both is not None
        assert nothing is None
        assert (out[0].item(), both[0].item()) == (5 * value, 3 * value)
    assert len(ran) == 1
    assert len(first.steps[0].launch.started) == len(second.steps[0].launch.started) == 3  # type: ignore[attr-defined]


def test_one_tensor_for_two_inputs_is_not_kept() -> None:
    """`x @ xᵀ` first, and `x @ y` later."""
    first, second, ran = add(), add(), []
    x, y = ones(1.0), ones(5.0)
    assert chained("key", (x, x), runner(first, second, x, x, ran))[0][0] == 3.0  # type: ignore[index]
    assert call_cache.recall("key") is None
    assert chained("key", (x, y), runner(first, second, x, y, ran))[0][0] == 11.0  # type: ignore[index]
    assert chained("key", (x, x), runner(first, second, x, x, ran))[0][0] == 3.0  # type: ignore[index]


def test_what_is_not_all_calls_runs_each_time() -> None:
    def uses_a_copy(x: Tensor, y: Tensor) -> list[Tensor | None]:
        return list(add()(*known(x.clone()), y))

    def returns_a_copy(x: Tensor, y: Tensor) -> list[Tensor | None]:
        return [add()(x, y)[0].clone()]

    def calls_nothing(x: Tensor, y: Tensor) -> list[Tensor | None]:
        return [x + y]

    for run in (uses_a_copy, returns_a_copy, calls_nothing):
        for value in (1.0, 2.0):
            x, y = ones(value), ones(value)
            found = chained(run.__name__, (x, y), lambda run=run, x=x, y=y: run(x, y))  # type: ignore[misc]
            assert found[0][0] == 2 * value  # type: ignore[index]
        assert call_cache.recall(run.__name__) is call_cache._NOT_ALL_CALLS


def test_a_run_that_raises_leaves_nothing_behind() -> None:
    def fails() -> list[Tensor | None]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        chained("key", (ones(1.0),), fails)
    assert call_cache.recall("key") is None
    assert call_cache._recording.tape is None


def test_a_view_of_a_whole_result_is_allocated_as_the_view_is() -> None:
    def turned(x: Tensor, y: Tensor) -> list[Tensor | None]:
        return [add()(x, y)[0].view(2, 2).mT]

    def a_part(x: Tensor, y: Tensor) -> list[Tensor | None]:
        return [add()(x, y)[0][:3]]

    def twice(x: Tensor, y: Tensor) -> list[Tensor | None]:
        out = add()(x, y)[0]
        return [out, out.view(2, 2)]

    for run, whole in ((turned, True), (a_part, False), (twice, False)):
        for value in (1.0, 2.0):
            x, y = ones(value), ones(value)
            found = chained(run.__name__, (x, y), lambda run=run, x=x, y=y: run(x, y))  # type: ignore[misc]
            expected = run(x, y)
            for one, other in zip(found, expected, strict=True):
                assert one is not None
                assert other is not None
                assert torch.equal(one, other)
                assert (one.shape, one.stride()) == (other.shape, other.stride())
        assert isinstance(call_cache.recall(run.__name__), Program) == whole


def test_a_program_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        events.append(device)
        yield
        events.append("left")

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(core, "current_gpu", lambda: 1)
    monkeypatch.setattr(
        call_cache, "allocated", lambda made, device: [torch.empty(shape, dtype=dtype) for shape, _, dtype in made]
    )
    for index in (1, 2):
        device = torch.device("cuda", index)
        program = Program(lambda addresses: events.append(len(addresses)), device, (((4,), (1,), BF16),), (), (0, None))
        out, nothing = program(torch.empty(2))
        assert out is not None
        assert nothing is None
        assert events == ([2] if index == 1 else [device, 2, "left"])
        events.clear()


@pytest.mark.gpu
def test_a_layers_calls_as_one_give_the_same_bits() -> None:
    """Twice with other values, then one tensor as both operands; each beside the ops one by one."""

    def step(x: Tensor, w: Tensor, bias: Tensor | None, g: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
        out = fp8fn.linear(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, g)

    for bias in (False, True):
        for _ in range(3):
            x, w, g = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            b = torch.randn(256, device="cuda", dtype=torch.bfloat16) if bias else None
            at_once = step(x, w, b, g)
            with torch.profiler.profile(acc_events=True):  # which has each op called
                one_by_one = step(x, w, b, g)
            assert all(torch.equal(first, second) for first, second in zip(at_once, one_by_one, strict=True))
    x, g = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        assert torch.equal(fp8fn.linear(x, x), fp8fn.linear(x, x.clone()))
        assert not torch.equal(fp8fn.linear(x, g), fp8fn.linear(x, x))


def test_a_site_starts_what_its_first_call_launched() -> None:
    call, ran = add(), []

    def op(x: Tensor, y: Tensor) -> Tensor:
        ran.append(1)
        return call(x, y)[0]

    site = CallSite(op)
    for value in (1.0, 10.0, 100.0):
        out = site(ones(value), ones(2 * value))
        assert isinstance(out, Tensor)
        assert torch.equal(out, torch.full((4,), 3 * value))
    assert len(ran) == 1
    pair = CallSite(lambda x, y: tuple(call(x, y) + call(y, y)))
    for value in (1.0, 10.0):
        assert [float(out[0]) for out in pair(ones(value), ones(2 * value))] == [3 * value, 4 * value]


def test_a_site_calls_the_op_where_it_must() -> None:
    """An unaligned tensor, a mode, a profiler; one tensor twice, and an op that is more than launches, for good."""
    call, ran = add(), []

    def op(x: Tensor, y: Tensor) -> Tensor:
        ran.append(1)
        return call(x, y)[0]

    def runs(site: CallSite, x: Tensor, y: Tensor) -> int:
        before = len(ran)
        out = site(x, y)
        assert isinstance(out, Tensor)
        assert torch.equal(out, x + y)
        return len(ran) - before

    x, y, unaligned = ones(1.0), ones(2.0), known(torch.arange(5.0)[1:])[0]
    site = CallSite(op)
    assert unaligned.data_ptr() % 16
    assert runs(site, unaligned, y) == 1
    assert (runs(site, x, y), runs(site, y, x), runs(site, unaligned, y)) == (1, 0, 1)
    with FlopCounterMode(display=False):
        assert runs(site, x, y) == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert runs(site, x, y) == 1
    assert runs(site, x, y) == 0
    twice = CallSite(op)
    assert (runs(twice, x, x), runs(twice, x, y), runs(twice, x, y)) == (1, 1, 1)
    copies = CallSite(lambda x, y: known(op(x, y).clone())[0])
    assert (runs(copies, x, y), runs(copies, x, y)) == (1, 1)
