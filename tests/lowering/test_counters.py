"""Counters that a graph advances by one number: one addition, the values of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from fp8fn.lowering import counters

aten = torch.ops.aten


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of counters that one addition of a compiled graph advances."""
    found: list[int] = []
    together = counters.advance_together

    def counted(graph: Graph) -> None:
        together(graph)
        added = graph.find_nodes(op="call_function", target=aten._foreach_add.Scalar)
        found.extend(len(node.args[0]) for node in added)

    monkeypatch.setattr(counters, "advance_together", counted)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield found


def int64(*values: int) -> Tensor:
    return torch.tensor(values)


def agrees(function: Callable[..., Any], given: list[Tensor]) -> None:
    """Three calls give eager mode's results and leave its values behind."""
    with torch.no_grad():
        compiled = torch.compile(function, backend="fp8fn", fullgraph=True)
        wanted, found = ([each.clone() for each in given] for _ in range(2))
        for _ in range(3):
            for one, other in zip(function(*wanted), compiled(*found), strict=True):
                assert torch.equal(one, other)
        for one, other in zip(wanted, found, strict=True):
            assert torch.equal(one, other)


def test_reads_before_and_after_an_addition(grouped: list[int]) -> None:
    def step(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        before = x * a + b
        a.add_(1)
        b.add_(1)
        c += 1
        return before, x.index_copy(0, b[:1] % 8, before[:1])

    agrees(step, [torch.arange(8.0), int64(3), int64(4, 5)[:1], int64(6)])
    assert grouped == [2]  # b's sum is read, so that it is computed where it was


def test_counters_of_other_types_and_steps(grouped: list[int]) -> None:
    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        for each in (a, b, c):
            each.add_(2)
        d.add_(-1)
        e.add_(2)
        f.add_(0.5)
        return (a + f,)

    i32, f32 = torch.tensor([7, 8], dtype=torch.int32), torch.tensor([[0.25]])
    agrees(step, [int64(1), int64(2).squeeze(), i32, int64(9), i32 + 1, f32])
    assert grouped == [2]  # a is read; of the rest, c and e are of one type


def test_what_is_no_counter_stays_alone(grouped: list[int]) -> None:
    """Large tensors, sums of two tensors, multiples, and results of another type."""

    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
        a.add_(1)
        b.add_(1)
        c.add_(d)
        d.add_(1, alpha=2)
        e.copy_(d + 1)
        return (c * 2,)

    large = torch.zeros(1025, dtype=torch.long)
    agrees(step, [large, large + 1, int64(1), int64(2), int64(3)])
    assert grouped == []


def test_views_of_one_tensor(grouped: list[int]) -> None:
    """Two counters in one memory are both advanced."""

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        a.add_(1)
        b.add_(1)
        return (a * b,)

    for views in (lambda x: (x[:1], x[1:]), lambda x: (x[:1], x[:1])):
        torch._dynamo.reset()
        wanted, found = int64(1, 5), int64(1, 5)
        compiled = torch.compile(step, backend="fp8fn", fullgraph=True)
        for _ in range(3):
            assert torch.equal(step(*views(wanted))[0], compiled(*views(found))[0])
        assert torch.equal(wanted, found)


def test_a_number_that_is_not_known(grouped: list[int]) -> None:
    def step(a: Tensor, b: Tensor, by: Tensor) -> tuple[Tensor, ...]:
        a.add_(by.shape[0])
        b.add_(by.shape[0])
        return (by * 2,)

    compiled = torch.compile(step, backend="fp8fn", fullgraph=True, dynamic=True)
    a, b = int64(1), int64(2)
    for size in (3, 5):
        compiled(a, b, torch.zeros(size))
    assert (a.item(), b.item()) == (9, 10)
    assert grouped == []


def test_batch_normalization_counts_batches(grouped: list[int]) -> None:
    """In training, too."""
    layers = [torch.nn.Sequential(*(torch.nn.BatchNorm1d(4) for _ in range(3))) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    compiled = torch.compile(layers[1], backend="fp8fn", fullgraph=True)
    x = torch.linspace(-1, 1, 32).view(8, 4)
    for _ in range(2):
        for call in (layers[0], compiled):
            call(x).square().sum().backward()
    for (name, one), other in zip(layers[0].state_dict().items(), layers[1].state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert layers[1][2].num_batches_tracked == 2
    assert grouped == [3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_counters_in_a_captured_graph() -> None:
    def step(x: Tensor, *counters: Tensor) -> Tensor:
        total = x
        for each in counters:
            total = total + x[each]
            each.add_(1)
        return total

    torch._dynamo.reset()
    x = torch.arange(64.0, device="cuda")
    counters = [torch.tensor(place, device="cuda") for place in range(40)]
    for each in counters:
        torch._dynamo.mark_static_address(each)
    compiled = torch.compile(step, backend="fp8fn", options={"triton.cudagraphs": True})
    with torch.no_grad():
        for call in range(6):
            assert torch.equal(compiled(x, *counters), x + sum(range(40)) + 40 * call)
    assert [each.item() for each in counters] == list(range(6, 46))
