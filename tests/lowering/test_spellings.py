"""Other spellings of a product with a weight: each is found, gives its function's values, and names a true reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.ops.recipe import BLOCKWISE
from support.accuracy import snr
from support.traced import both_passes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

M, N, K, BATCH = 32, 256, 128, 2


class Weights(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w, self.stack = nn.Parameter(torch.randn(K, N)), nn.Parameter(torch.randn(BATCH, K, N))
        self.cell = nn.Parameter(torch.randn(3 * K, K))
        self.row, self.term = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(M, N))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def doubled(x: Tensor) -> Tensor:
    return x.expand(BATCH, M, K)


FOUND: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "matmul by name": lambda m, x: torch.matmul(x, other=m.w),
    "mm by names": lambda m, x: torch.mm(input=x, mat2=m.w),
    "a method's operand by name": lambda m, x: x.matmul(other=m.w),
    "__matmul__": lambda m, x: x.__matmul__(m.w),
    "linalg.matmul": lambda m, x: torch.linalg.matmul(x, m.w),
    "addmm by names": lambda m, x: torch.addmm(input=m.row, mat1=x, mat2=m.w),
    "a bias's method": lambda m, x: m.row.addmm(x, m.w),
    "addmm of a matrix": lambda m, x: torch.addmm(m.term, x, m.w),
    "addmm of a scalar": lambda m, x: torch.addmm(m.row[0], x, m.w),
    "addmm with scales": lambda m, x: torch.addmm(m.row, x, m.w, beta=0.5, alpha=2.0),
    "addmm without its term": lambda m, x: torch.addmm(torch.where(m.row > 0, m.row, torch.nan), x, m.w, beta=0),
    "baddbmm": lambda m, x: torch.baddbmm(m.term, doubled(x), m.stack, alpha=3),
    "a view of the weight's product": lambda m, x: (m.w.mT @ x.mT).view(-1),
    "tensordot": lambda m, x: torch.tensordot(x.unflatten(0, (2, -1)), m.w, dims=1),
    "tensordot over given axes": lambda m, x: torch.tensordot(x.unflatten(1, (8, -1)), m.w.view(8, -1, N)),
    "tensordot by names": lambda m, x: torch.tensordot(a=x, b=m.w.mT, dims=([1], [-1])),
    "inner": lambda m, x: torch.inner(x, m.w.mT),
    "inner's method": lambda m, x: x.inner(m.w.mT),
    "a part of a weight": lambda m, x: F.linear(x, m.stack.movedim(0, 1).narrow(1, 0, 1).squeeze(1).mT),
    "a tensordot in a checkpoint": lambda m, x: checkpoint(torch.tensordot, x, m.w, 1, use_reentrant=False),
    "an einsum in a checkpoint": lambda m, x: checkpoint(
        lambda y: torch.einsum("mk,kn->nm", y, m.w), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str) -> None:
    model, x = Weights(FOUND[name]), torch.randn(M, K, requires_grad=True)
    backend = both_passes()
    out = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert [(decision.reason, decision.gemm.site.n) for decision in backend.decided] == [(None, N)]
    expected = model(x)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert snr(out, expected) > 25
    assert not torch.equal(out, expected)  # the product is in FP8
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    cotangent = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, leaves, cotangent, allow_unused=True) for y in (out, expected))
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want) or snr(got, want) > 25


def test_a_term_under_autocast() -> None:
    """Autocast casts the term of an `addmm` too; in the sum that is spelled out the type stays."""
    model, x = Weights(FOUND["addmm of a matrix"]), torch.randn(M, K)
    with torch.autocast("cpu", torch.bfloat16):
        backend = both_passes()
        out = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert [decision.reason for decision in backend.decided] == [None]
        assert out.dtype == torch.bfloat16
        assert snr(out.float(), model(x).float()) > 25


LEFT: dict[str, tuple[Callable[[Weights, Tensor], Tensor], str]] = {
    "in place": (
        lambda m, x: torch.zeros(M, N).addmm_(x, m.w),
        "addmm_ writes into its input: spell it with torch.addmm",
    ),
    "a sum over the batch": (lambda m, x: torch.addbmm(m.term, doubled(x), m.stack), "addbmm is not matched"),
    "a chain": (
        lambda m, x: torch.linalg.multi_dot([x, m.w, m.w.mT]),
        "a chain of products, whose order PyTorch chooses: spell each product with torch.matmul",
    ),
    "an einsum of activations": (
        lambda m, x: torch.einsum("mk,nk->mn", x * m.row[0], x.sin()),
        "no parameter: activation by activation",
    ),
    "a cell": (
        lambda m, x: torch.gru_cell(x[:2], x[2:4], m.cell, m.cell),
        "the weights of a GRU are multiplied inside PyTorch's kernel",
    ),
    "positions": (
        lambda m, x: torch.einsum("mk,nmk->mn", x, m.w.mT[(torch.arange(M)[:, None] + torch.arange(8)).mT]),
        "computed from a parameter (w): fp8fn.gemm takes it",
    ),
    "a codebook": (
        lambda m, x: x @ m.row.flatten()[torch.zeros(K, N, dtype=torch.int32)],
        "the weight is int32 data with scales already, which the recipe never quantizes again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    function, reason = LEFT[name]
    rows = fp8fn.explain(Weights(function), torch.randn(M, K), where="*", show=False).rows
    assert {row.reason for row in rows} == {reason}


POSITIONAL: Final[dict[str, tuple[Callable[[Weights, Tensor], Tensor], str]]] = {
    "a scale": (
        lambda m, x: torch.addmm(0.5, m.term, x, m.w),
        "addmm with 4 positional arguments is not matched: give all but the tensors by name",
    ),
    "a scale and a weight on the left": (
        lambda m, x: torch.addmm(0.5, x.repeat(4, 1), m.cell[:K], x.repeat(4, 1)),
        "computed from a parameter (cell): fp8fn.linear takes it",
    ),
    "a type": (
        lambda m, x: torch.mm(x.bfloat16(), m.w.bfloat16(), torch.float32),
        "mm with 3 positional arguments is not matched: give all but the tensors by name",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated:UserWarning")
@pytest.mark.parametrize("name", POSITIONAL)
def test_positional_arguments_beside_the_tensors(name: str) -> None:
    """PyTorch takes scales before the tensors, and a type after them, which no CPU kernel computes."""
    function, reason = POSITIONAL[name]
    reasons: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        reasons.extend(decision.reason for decision in rewrite(gm, BLOCKWISE, "*"))
        return lambda *inputs: inputs[:1]

    torch.compile(Weights(function), backend=backend, fullgraph=True)(torch.randn(M, K))
    assert reasons == [reason]


@torch.compiler.nested_compile_region
def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def without_inductor(gm: torch.fx.GraphModule, _: object) -> Callable[..., Tensor]:
    rewrite(gm, BLOCKWISE, "*")
    forward: Callable[..., Tensor] = gm.forward
    return forward


@torch.compiler.nested_compile_region
def two_layers(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return layer(layer(x, v), w) * 2


class Layers(nn.Module):
    """Three weights of one region; with `around`, two of them in a region that calls it."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.around = around
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(K, K) / 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.around:
            return layer(two_layers(x, self.layers[0], self.layers[1]), self.layers[2])
        for w in self.layers:
            x = layer(x, w)
        return x


@pytest.mark.parametrize("around", [False, True])
def test_a_region_that_several_layers_share(around: bool) -> None:
    """Its product is replaced once, for all of its calls, and listed for each."""
    model, x = Layers(around=around), torch.randn(M, K, requires_grad=True)
    found = fp8fn.explain(model, x, where="*", show=False)
    out = torch.compile(model, backend=without_inductor, fullgraph=True)(x)
    assert 20 < snr(out, model(x)) < 60
    assert [(row.weight, row.reason) for row in found.rows] == [(f"layers.{each}", None) for each in range(3)]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("left", range(3))
def test_a_shared_region_with_a_weight_that_where_leaves_out(left: int, around: bool) -> None:
    """No call of it is in FP8, whichever call the weight is of."""
    model, x = Layers(around=around), torch.randn(M, K, requires_grad=True)
    where = [f"layers.{each}" for each in range(3) if each != left]
    found = fp8fn.explain(model, x, where=where, show=False)
    reason = f"where said no (layers.{left}; a region is decided once for all of its calls)"
    assert [(row.weight, row.reason) for row in found.rows] == [(f"layers.{each}", reason) for each in range(3)]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("inner.layers.*", None),
        (
            ["inner.layers.0", "inner.layers.2"],
            "where said no (inner.layers.1; a region is decided once for all of its calls)",
        ),
    ],
)
def test_a_shared_region_behind_a_graph_break(where: str | list[str], reason: str | None) -> None:
    """Its weights have their names in the compiled model."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers(around=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):  # Dynamo leaves a loop with a break to Python
                torch._dynamo.graph_break()
                x = self.inner(x)
            return x

    found = fp8fn.explain(Outer(), torch.randn(M, K, requires_grad=True), where=where, show=False)
    assert [(row.weight, row.reason) for row in found.rows] == [(f"inner.layers.{each}", reason) for each in range(3)]


@torch.compiler.nested_compile_region
def wide_layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w))


class Vocabulary(nn.Module):
    """Layers of as many columns as the embedding has rows, two of one region; with `tied` its table is the last one."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.tied = nn.Embedding(512, 512), tied
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(512, 512)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = wide_layer(wide_layer(self.table(tokens), self.layers[0]), self.layers[1])
        return wide_layer(x, self.table.weight) if self.tied else x


@pytest.mark.parametrize(
    ("tied", "reason"), [(False, None), (True, "sensitive: an embedding reads the weight too; where='*' takes it too")]
)
def test_a_shared_region_is_a_head_if_one_of_its_calls_is(tied: bool, reason: str | None) -> None:
    """Repeated layers as wide as the vocabulary are none, as where each has a product of its own."""
    rows = fp8fn.explain(Vocabulary(tied=tied), torch.arange(64), show=False).rows
    names = ["layers.0", "layers.1", *["table.weight"] * tied]
    assert [(row.weight, row.reason) for row in rows] == [(name, reason) for name in names]


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w.mT, x.mT @ grads[0]


def test_regions_of_others() -> None:
    """Products in control flow, and in a function with its own backward, stay, and are listed with a remedy."""
    branch = Weights(lambda m, x: torch.cond(x.sum() > 0, lambda x: x @ m.w, lambda x: x.cos() @ m.w, (x,)))
    own = Weights(lambda m, x: Own.apply(x, m.w))
    inside = "inside of torch.cond: move it out, or call fp8fn.linear there"
    backward = "inside of a torch.autograd.Function, which computes its own backward: call fp8fn.gemm there"
    for model, reasons in ((branch, [inside] * 2), (own, [backward])):
        x = torch.randn(M, K)
        rows = fp8fn.explain(model, x, where="*", show=False).rows
        assert [(row.weight, row.reason) for row in rows] == [("w", reason) for reason in reasons]
        out = torch.compile(model, backend=without_inductor, fullgraph=True)(x)
        assert snr(out, model(x)) > 100


def test_an_rnn_hides_the_products_around_it() -> None:
    """`explain` names the setting with which Dynamo captures them."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.rnn, self.after = nn.Linear(K, K), nn.LSTM(K, K), nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.rnn(self.before(x))[0])  # type: ignore[no-any-return]

    model, x = Around(), torch.randn(2, M, K)
    found = fp8fn.explain(model, x, where="*", show=False)
    reasons = dict(found.outside)
    assert reasons["before.weight"].endswith("set torch._dynamo.config.allow_rnn = True")
    with torch._dynamo.config.patch(allow_rnn=True):
        assert fp8fn.explain(model, x, where="*", show=False).substituted == 2


def test_fp8_weights_beside_a_head_are_no_cause_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"up": nn.Linear(K, N), "lm_head": nn.Linear(N, 512)})
    fp8fn.quantize_weights(model)

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Tensor]:
        rewrite(gm, BLOCKWISE)
        forward: Callable[..., Tensor] = gm.forward
        return forward

    with torch.no_grad(), caplog.at_level(logging.INFO, "fp8fn"):
        torch.compile(lambda x: model["lm_head"](model["up"](x)), backend=backend)(torch.randn(M, K))
    (record,) = (record for record in caplog.records if "0 of 2 products in FP8" in record.message)
    assert record.levelno == logging.INFO
