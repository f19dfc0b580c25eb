"""Dynamic lengths: a graph that serves one length serves the others too, as it does without FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

import fp8fn
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.ops.layout import Block
from fp8fn.ops.recipe import PRESETS
from support.accuracy import snr

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Multiples of 16 and of 128, one more, one less, fewer than one block and many.
LENGTHS = (64, 65, 129, 128, 257, 383, 17, 1000)


class Mlp(nn.Module):
    """Two products, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 144), nn.Linear(144, 128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(x)))
        return out


class Counting:
    """A backend that counts the graphs it is given, puts `recipe` into them and traces them down to both of AOT's."""

    def __init__(self, recipe: str | None) -> None:
        self.recipe, self.graphs = recipe, 0

        def boxed(gm: GraphModule, _: Any) -> Any:
            return make_boxed_func(gm.forward)

        self.aot: Any = aot_autograd(
            fw_compiler=boxed, bw_compiler=boxed, inference_compiler=boxed,
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip

    def __call__(self, gm: GraphModule, inputs: Sequence[Tensor]) -> Any:
        self.graphs += 1
        if self.recipe is not None:
            decisions = rewrite(gm, PRESETS[self.recipe], "*")
            assert [decision.reason for decision in decisions] == [None] * len(decisions)
        return self.aot(gm, inputs)


def graphs(
    function: Callable[..., Tensor], inputs: Callable[[int], tuple[Tensor, ...]], recipe: str | None,
    *, train: bool, lengths: Sequence[int] = LENGTHS, exact: Callable[..., Tensor] | None = None,
) -> int:  # fmt: skip
    """The number of graphs that all lengths need; results and gradients are near those of the function as it is."""
    torch._dynamo.reset()
    backend = Counting(recipe)
    compiled = torch.compile(function, backend=backend)
    for length in lengths:
        args = inputs(length)
        leaves = [arg for arg in args if arg.is_floating_point()]
        with torch.set_grad_enabled(train):
            out, expected = compiled(*args), (exact or function)(*args)
        pairs = [(expected, out)]
        if train:
            weight = torch.randn(out.shape)
            grads = [torch.autograd.grad((each * weight).sum(), leaves) for each in (expected, out)]
            pairs += zip(*grads, strict=True)
        for reference, found in pairs:
            assert reference.shape == found.shape
            assert snr(found, reference) > 20, length
    return backend.graphs


def tokens(length: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, length, 128, requires_grad=True),)


def rows(length: int) -> tuple[Tensor, ...]:
    return (torch.randn(length, 128, requires_grad=True),)


@pytest.mark.parametrize("recipe", PRESETS)
def test_training_needs_the_graphs_that_it_needs_without_fp8(recipe: str) -> None:
    assert graphs(Mlp(), rows, recipe, train=True) == 2  # the first length alone, and any


def test_so_it_is_without_fp8() -> None:
    assert graphs(Mlp(), rows, None, train=True) == graphs(Mlp(), tokens, None, train=True) == 2


@pytest.mark.parametrize("train", [False, True])
def test_tokens_of_a_batch(train: bool) -> None:
    assert graphs(Mlp(), tokens, "hybrid", train=train) == 2


WEIGHTS = torch.randn(3, 128, 256, requires_grad=True), torch.randn(3, 128, 128, requires_grad=True)


def ends(length: int) -> Tensor:
    return torch.tensor([length // 3, length // 2, length], dtype=torch.int32)


def in_groups(length: int) -> tuple[Tensor, ...]:
    return torch.randn(length, 128, requires_grad=True), WEIGHTS[0], ends(length)


def to_experts(length: int) -> tuple[Tensor, ...]:
    return torch.randn(length, 128, requires_grad=True), *WEIGHTS, ends(length)


def in_columns(length: int) -> tuple[Tensor, ...]:
    a, b = (torch.randn(length, n, requires_grad=True) for n in (128, 144))
    return a, b, ends(length)


def each_group(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    starts = [0, *offsets.tolist()]
    return torch.cat([x[starts[i] : starts[i + 1]] @ w[i] for i in range(len(w))])


def each_expert(x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor) -> Tensor:
    gate, up = each_group(x, w_gate_up, offsets).chunk(2, -1)
    return each_group(F.silu(gate) * up, w_down, offsets)


def each_sum(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    starts = [0, *offsets.tolist()]
    return torch.stack([a[starts[i] : starts[i + 1]].mT @ b[starts[i] : starts[i + 1]] for i in range(3)])


@pytest.mark.parametrize(
    ("function", "exact", "inputs"),
    [
        (lambda x, w, ends: fp8fn.grouped_gemm(x, w, ends, recipe="rowwise"), each_group, in_groups),
        (lambda a, b, ends: fp8fn.grouped_gemm(a.mT, b, ends, recipe="rowwise"), each_sum, in_columns),
        (lambda x, v, w, ends: fp8fn.expert_mlp(x, v, w, ends, recipe="rowwise"), each_expert, to_experts),
    ],
    ids=["rows", "columns", "experts"],
)
def test_groups(
    function: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Callable[[int], tuple[Tensor, ...]]
) -> None:
    assert graphs(function, inputs, None, train=True, lengths=(64, 65, 129, 400), exact=exact) == 2


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (1, -1), (-1, -1)])
def test_an_op_outside_of_a_product(block: Block) -> None:
    """A user's own `quantize`, whose results tracing looks at before any product does."""
    w = torch.randn(128, 144)
    right = fp8fn.quantize(w, (block[1], block[0]))

    def called(x: Tensor) -> Tensor:
        return fp8fn.gemm(fp8fn.quantize(x, block), right, out_dtype=torch.float32)

    inputs = partial(torch.randn, 128)
    assert graphs(called, lambda length: (inputs(length).mT,), None, train=False, exact=lambda x: x @ w) == 2


def test_inductor_adds_none() -> None:
    """Inductor asks whether the tensors that the forward keeps for the backward are dense."""
    model = nn.Sequential(nn.Linear(128, 144, bias=False), nn.Linear(144, 128, bias=False))
    compiled = torch.compile(model, backend="fp8fn", options={"where": "*"}, dynamic=True)
    for length in (64, 65, 129, 80):
        x = torch.randn(length, 128)
        out, expected = compiled(x), model(x)
        grads = [torch.autograd.grad(each.square().sum(), list(model.parameters())) for each in (expected, out)]
        pairs = ((expected, out), *zip(*grads, strict=True))
        assert all(snr(found, wanted) > 20 for wanted, found in pairs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_slice_along_a_length_compiles() -> None:
    """PyTorch 2.11 can't lower one without guards."""

    def shifted(tokens: Tensor) -> Tensor:
        return F.pad(tokens, (0, 1), value=-100)[..., 1:].contiguous()

    compiled = torch.compile(shifted, backend="fp8fn", fullgraph=True, dynamic=True)
    for length in (20, 33):
        tokens = torch.randint(0, 64, (2, length))
        assert torch.equal(compiled(tokens), shifted(tokens))
