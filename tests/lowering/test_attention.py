"""PyTorch's attention modules under the backend, what `explain` lists of the rest, and that both say the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import fp8fn
from fp8fn.lowering import attention, backend
from fp8fn.lowering.recipe_pass import decide
from support.accuracy import snr

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings(
        "ignore:.*nested tensor.*:UserWarning", "ignore:.*weight_norm.*:FutureWarning", "ignore:The .grad attribute"
    ),
]

WIDTH = 128
LEFT = "no parameter: activation by activation"


def leaves(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def apart(model: Callable[..., Any], *args: Tensor, dynamic: bool = False, **kwargs: Any) -> list[str]:
    """The weights of the products of a graph, or why they stay; it computes what the model does, dropout included."""
    names: list[str] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        names.extend(found.gemm.site.weight if found.reason is None else found.reason for found in decide(gm, "*"))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch.manual_seed(1)
    expected = leaves(model(*args, **kwargs))
    torch.manual_seed(1)
    found = leaves(torch.compile(model, backend=keep, dynamic=dynamic, fullgraph=True)(*args, **kwargs))
    assert len(expected) == len(found)
    for reference, out in zip(expected, found, strict=True):
        torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)
    return names


X, Y = torch.randn(2, 20, WIDTH), torch.randn(2, 12, WIDTH)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(20)
PADDING = torch.arange(20).expand(2, 20) > torch.tensor([[14], [19]])
WEIGHTS = {"need_weights": True}
SELF, CROSS, OUT = ["in_proj_weight"], ["in_proj_weight"] * 2, ["out_proj.weight"]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("options", "args", "kwargs", "expected"),
    [
        ({}, (X, X, X), WEIGHTS, [*SELF, LEFT, LEFT, *OUT]),
        ({}, (X, Y, Y), {"need_weights": False}, [*CROSS, *OUT]),
        ({"bias": False}, (X, Y, Y), {"average_attn_weights": False}, [*CROSS, LEFT, LEFT, *OUT]),
        ({"dropout": 0.3}, (X, X, X), {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, [*SELF, *OUT]),
        ({}, (X, X, X), {"key_padding_mask": PADDING}, [*SELF, LEFT, LEFT, *OUT]),
        ({"add_bias_kv": True, "add_zero_attn": True}, (X, X, X), {"need_weights": False}, [*SELF, *OUT]),
        ({"batch_first": False}, (X, X, X), {"need_weights": False}, [*SELF, *OUT]),
        (
            {"kdim": 160, "vdim": 192}, (X, torch.randn(2, 12, 160), torch.randn(2, 12, 192)), {"need_weights": False},
            ["q_proj_weight", "k_proj_weight", "v_proj_weight", *OUT],
        ),
    ],
    ids=["self", "cross", "each head's", "causal", "padding", "more keys", "sequence first", "other widths"],
)  # fmt: skip
def test_attention(
    options: dict[str, Any], args: Sequence[Tensor], kwargs: dict[str, Any], expected: list[str], train: bool
) -> None:
    model = nn.MultiheadAttention(WIDTH, 4, **{"batch_first": True, **options}).train(train)
    with torch.set_grad_enabled(train):
        assert apart(model, *args, **kwargs) == expected


@pytest.mark.parametrize("masks", [{}, {"key_padding_mask": PADDING, "need_weights": True}])
def test_attention_of_dynamic_lengths(masks: dict[str, Any]) -> None:
    model = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    names = apart(model, X, X, X, dynamic=True, **masks)
    assert (names[0], names[-1]) == ("in_proj_weight", "out_proj.weight")


LAYER = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDING}, {"src_mask": CAUSAL}, {
    "src_mask": CAUSAL, "src_key_padding_mask": PADDING.float().masked_fill(PADDING, float("-inf")),
}], ids=["all", "padding", "causal", "both"])  # fmt: skip
def test_encoder_layer(masks: dict[str, Any], first: bool, train: bool) -> None:
    """In training as modules, in inference as PyTorch's one kernel for the layer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True, norm_first=first, activation="gelu")
    with torch.set_grad_enabled(train):
        assert apart(layer.train(train), X, **masks) == LAYER


@pytest.mark.parametrize("train", [True, False])
def test_transformer(train: bool) -> None:
    model = nn.Transformer(WIDTH, 4, 1, 1, 256, batch_first=True).train(train)
    cross = ["multihead_attn.in_proj_weight"] * 2 + ["multihead_attn.out_proj.weight"]
    with torch.set_grad_enabled(train):
        names = apart(model, X, Y)
    assert names == [f"encoder.layers.0.{name}" for name in LAYER] + [
        f"decoder.layers.0.{name}" for name in (*LAYER[:2], *cross, *LAYER[2:])
    ]


def test_attention_in_an_autocast_region() -> None:
    """The operands' types are those that the region gives them, and names are the module's own."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True)

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = layer.train()(x)
        return out

    assert apart(called, X) == LAYER


def test_what_cannot_be_taken_apart_stays_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is as it was, and each weight of the node has the reason."""

    def fails(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query.relu()
        raise NotImplementedError("no reason at all")

    monkeypatch.setitem(attention._SPELLED, F.multi_head_attention_forward, fails)
    model = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    rows = fp8fn.explain(model, X, X, X, where="*", show=False).rows
    reason = "multi_head_attention_forward is not taken apart: no reason at all"
    assert [(row.weight, row.shape, row.reason) for row in rows] == [
        ("in_proj_weight", (40, 384, 128), reason), ("out_proj.weight", (40, 128, 128), reason),
    ]  # fmt: skip
    assert apart(model, X, X, X) == [reason, reason]
    left: list[str] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        before = str(gm.graph)
        decide(gm, "*")
        left.append(before)
        assert str(gm.graph) == before
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(X, X, X)
    assert len(left) == 1


def test_attention_in_fp8() -> None:
    """Values and gradients of a layer whose four products are the recipe's."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True, dropout=0.0)

    def eager(gm: GraphModule, _: Any) -> Any:
        backend.rewrite(gm, fp8fn.BLOCKWISE, "*")
        return gm.forward

    out, expected = torch.compile(layer, backend=eager)(X), layer(X)
    grads = [torch.autograd.grad(each.square().sum(), list(layer.parameters())) for each in (expected, out)]
    assert 20 < snr(out, expected) < 60
    assert all(snr(found, expected) > 15 for expected, found in zip(*grads, strict=True))


class Others(nn.Module):
    """Products that are no linear layer's, and layers whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.wn, self.sn, self.old = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        nn.utils.parametrizations.weight_norm(self.wn)
        nn.utils.parametrizations.spectral_norm(self.sn)
        nn.utils.weight_norm(self.old)
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.bilinear, self.conv = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.wide, self.lstm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, torch.cat([self.q.weight, self.k.weight]))[..., :WIDTH] + x @ (self.q.weight * 2)
        y = self.old(self.sn(self.wn(y))) + x @ self.table + x @ x.mT @ x
        y = self.wide(self.conv(self.bilinear(x, y).mT)).mT
        out: Tensor = self.lstm(y)[0]
        return out


def test_what_is_left_is_listed_with_its_reason() -> None:
    found = fp8fn.explain(Others(), X, where="*", show=False)
    original = ".parametrizations.weight.original"
    remedy = "fp8fn.linear takes it"
    # In the order of the graph.
    assert [(row.weight, row.shape, row.reason) for row in found.rows] == [
        ("", (40, 256, 128), f"computed from a parameter (k.weight, q.weight): {remedy}"),
        ("", (40, 128, 128), f"computed from a parameter (q.weight): {remedy}"),
        ("", (40, 128, 128), f"computed from a parameter (wn{original}0, wn{original}1): {remedy}"),
        ("", (40, 128, 128), f"computed from a parameter (sn{original}): {remedy}"),
        ("", (40, 128, 128), f"computed from a parameter (old.weight_g, old.weight_v): {remedy}"),
        ("", (40, 128, 128), "a buffer (table), not a parameter: register it as one, with requires_grad=False"),
        ("", (20, 20, 128), LEFT),
        ("", (20, 128, 20), LEFT),
        (
            "bilinear.weight", (40, 128, 16384),
            "bilinear has a matrix for each output: spell it with torch.einsum or torch.matmul",
        ),
        (
            "conv.weight", (40, 128, 128),
            "a convolution: one of kernel size 1 is F.linear with channels as the last dimension",
        ),
    ]  # fmt: skip
    reason = "the weights of LSTM are multiplied inside PyTorch's kernel, in no graph"
    assert [*found.outside] == [("lstm.weight_ih_l0", reason), ("lstm.weight_hh_l0", reason)]


class Broken(nn.Module):
    """A product before a graph break, one that Dynamo leaves to Python, and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = torch._dynamo.disable(self.between)(x)
        out: Tensor = self.after(x)
        return out


class Mixed(nn.Module):
    """A product of the recipe, an einsum, a small one and two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.small = nn.Linear(WIDTH, 256), nn.Linear(256, 32)
        self.w = nn.Parameter(torch.randn(WIDTH, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) + torch.einsum("bsd,dh->bsh", x, self.w)
        out: Tensor = self.small(y @ y.mT @ y)
        return out


ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "mixed": (Mixed, (X,)),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), (X, Y, Y)),
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True).eval(), (X,)),
    "others": (Others, (X,)),
    "broken": (Broken, (X,)),
}


@pytest.mark.parametrize("name", ZOO)
def test_explain_says_what_the_backend_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the FP8 products that Inductor is given are those that `explain` lists, each as often."""
    made: Counter[str] = Counter()

    def compile_fx(gm: GraphModule, *_: Any, **options: Any) -> Any:
        made.update(source(node.args[1]) for node in gm.graph.nodes if node.target is torch.ops.fp8fn.gemm.default)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model, args = ZOO[name][0](), ZOO[name][1]
    with torch.set_grad_enabled(model.training):
        rows = fp8fn.explain(model, *args, where="*", show=False).rows
        torch._dynamo.reset()
        torch.compile(model, backend="fp8fn", options={"where": "*"})(*args)
    assert Counter(row.weight for row in rows if row.kernel is not None) == made
    assert made.total() > 0 or name == "others"


def source(node: Any) -> str:
    """The name of the parameter that a product's operand is made of, read off Dynamo's name for its input."""
    while isinstance(node, Node) and node.op != "placeholder":
        node = node.args[0]
    found = re.sub(r"^L_(self|fn)_|^(modules|parameters)_|_$", "", str(node.target))
    return re.sub(r"_(modules|parameters)_", ".", re.sub(r"^_?(modules|parameters)_", "", found)).strip("_")


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("transform", ["grad", "vjp", "per sample"])
def test_a_functional_call_that_is_differentiated(transform: str, detach: bool) -> None:
    """The weight is what `torch.func` differentiates; the result is that of `fp8fn.linear`, written by hand."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, 32, WIDTH)
    parameters = {name: p.detach() if detach else p for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def by_hand(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y = fp8fn.linear(x, parameters["0.weight"], parameters["0.bias"]).relu()
        return fp8fn.linear(y, parameters["2.weight"], parameters["2.bias"]).square().sum()

    def step(loss: Callable[..., Tensor], parameters: dict[str, Tensor], x: Tensor) -> Any:
        if transform == "per sample":
            return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        if transform == "grad":
            return torch.func.grad(loss)(parameters, x)
        return torch.func.vjp(partial(loss, x=x), parameters)[1](torch.ones(()))[0]

    def called(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return step(loss, parameters, x)

    rows = fp8fn.explain(called, parameters, x, where="*", show=False).rows
    assert [(row.weight, row.reason) for row in rows] == [("0.weight", None), ("2.weight", None)]
    made: list[int] = []

    def eager(gm: GraphModule, _: Any) -> Any:
        made.append(sum(found.reason is None for found in backend.rewrite(gm, fp8fn.BLOCKWISE, "*")))
        return gm.forward

    torch._dynamo.reset()
    found = torch.compile(called, backend=eager, fullgraph=True)(parameters, x)
    assert made == [2]
    for name, expected in step(by_hand, parameters, x).items():
        assert snr(found[name], expected) > 60


class LearnedQueries(nn.Module):
    """Attention of learned queries to themselves and to the input, and a product with a weight of two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.norm = nn.Parameter(torch.randn(20, WIDTH)), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.left, self.right = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(self.queries)
        rows = (self.q(queries) @ self.k(queries).mT).softmax(-1) @ self.v(queries)
        out: Tensor = (self.q(rows) @ x.mT).softmax(-1) @ x
        return F.linear(out, self.left @ self.right)


def test_learned_queries_are_activations() -> None:
    """Only a weight that is computed without a linear layer is a weight."""
    rows = fp8fn.explain(LearnedQueries(), torch.randn(20, WIDTH), where="*", show=False).rows
    left = [(row.shape, row.reason) for row in rows if not row.weight]
    assert left == [
        ((20, 20, 128), LEFT),
        ((20, 128, 20), LEFT),
        ((20, 20, 128), LEFT),
        ((20, 128, 20), LEFT),
        ((20, 128, 128), "computed from a parameter (left, right): fp8fn.linear takes it"),
    ]
    assert [row.weight for row in rows if row.reason is None] == ["q.weight", "k.weight", "v.weight", "q.weight"]
