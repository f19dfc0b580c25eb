"""Attention to repeated keys and values: the graph that results, its values, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import fp8fn
from fp8fn.lowering import grouped_queries
from fp8fn.lowering.grouped_queries import group_queries
from fp8fn.ops.targets import Target
from support.accuracy import snr
from support.graphs import kept_for_rewrite
from support.tiny_models import two_layers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

B, KV, G, S, D, DV = 2, 2, 3, 20, 16, 24
H = KV * G
SDPA = F.scaled_dot_product_attention
Made = list[tuple[Any, ...]]


def shapes(node: Node) -> tuple[Any, ...]:
    """The shapes of the query, the key and the value of an attention node."""
    return tuple(tuple(each.meta["example_value"].shape) for each in node.args[:3])


def compiled(function: Callable[..., Any], graphs: list[GraphModule], **options: Any) -> Callable[..., Any]:
    def keep(gm: GraphModule, _: Any) -> Any:
        group_queries(gm)
        gm.graph.lint()
        gm.recompile()
        graphs.append(gm)
        return gm.forward

    return torch.compile(function, backend=keep, fullgraph=True, **options)


def attended(function: Callable[..., Any], *args: Any, **options: Any) -> Made:
    """The shapes of each attention of the graph, which computes what the function does."""
    graphs: list[GraphModule] = []
    copies = [each.clone() if isinstance(each, Tensor) else each for each in args]
    found, wanted = compiled(function, graphs, **options)(*copies), function(*args)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    return [shapes(node) for graph in graphs for node in graph.graph.nodes if node.target is SDPA]


def targets(gm: GraphModule) -> list[str]:
    return [node.target if isinstance(node.target, str) else node.target.__name__ for node in gm.graph.nodes]


def drawn(kv: int = KV, group: int = G, rows: int = 1, dv: int = DV, **options: Any) -> list[Tensor]:
    """A query that is a view of `(B, rows, H, D)`, as models make it, a key and a value."""
    query = torch.randn(B, rows, kv * group, D, **options).transpose(1, 2)
    return [query, torch.randn(B, kv, S, D, **options), torch.randn(B, kv, S, dv, **options)]


def by_expand(x: Tensor, group: int = G) -> Tensor:
    """The spelling of transformers."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, group, length, width).reshape(batch, heads * group, length, width)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "getitem, expand, reshape": by_expand,
    "ellipsis": lambda x: x[..., None, :, :].expand(-1, -1, G, -1, -1).reshape(x.shape[0], H, *x.shape[2:]),
    "unsqueeze, expand, flatten": lambda x: x.unsqueeze(2).expand(-1, -1, G, -1, -1).flatten(1, 2),
    "functions": lambda x: torch.flatten(
        torch.broadcast_to(torch.unsqueeze(x, 2), (B, KV, G, S, x.shape[-1])), 1, 2
    ).contiguous(),
    "contiguous, view": lambda x: x.unsqueeze(2).expand(-1, -1, G, -1, -1).contiguous().view(B, H, S, -1),
    "repeat_interleave": lambda x: x.repeat_interleave(G, dim=1),
    "repeat_interleave by names": lambda x: torch.repeat_interleave(x, repeats=G, dim=-3),
}
GROUPED = ((B, H, 1, D), (B, KV, S, D), (B, KV, S, DV))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    repeat, graphs = SPELLINGS[spelling], list[GraphModule]()

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, repeat(key), repeat(value))

    given = drawn()
    assert attended(attention, *given) == [GROUPED]
    compiled(attention, graphs)(*given)
    assert targets(graphs[0])[3:] == ["scaled_dot_product_attention", "output"]


def test_one_key_head_that_is_repeated() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, by_expand(key, H), value.repeat_interleave(H, 1), scale=0.3)

    assert attended(attention, *drawn(1, H)) == [((B, H, 1, D), (B, 1, S, D), (B, 1, S, DV))]


SEEN = torch.rand(B, 1, 1, S) > 0.3
MASKS = {
    "bool": SEEN,
    "float": torch.randn(B, 1, 1, S),
    "of all sequences": SEEN[:1],
    "matrix": SEEN[0, 0],
    "of each head": torch.randn(B, H, 1, S),
    "of each head, as a view": torch.randn(1, H, 1, 1).expand(B, H, 1, S),
    "of each head of all sequences": torch.rand(H, 1, S) > 0.3,
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value), mask, 0.0, False, scale=0.2)

    assert attended(attention, *drawn(), MASKS[mask]) == [GROUPED]


@pytest.mark.parametrize("rows", [2, S])
@pytest.mark.parametrize("kind", ["all", "causal", "masked", "a mask of each token"])
def test_many_tokens(kind: str, rows: int) -> None:
    mask = {"masked": SEEN, "a mask of each token": torch.rand(B, 1, rows, S) > 0.3}.get(kind)

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value), mask, is_causal=kind == "causal")

    given = [*drawn(rows=rows), mask if mask is None else mask.index_fill(-1, torch.tensor(0), True)]
    assert attended(attention, *given) == [((B, H, rows, D), *GROUPED[1:])]


def test_a_symbolic_number_of_tokens() -> None:
    """One graph serves all lengths, and grouping adds no guard."""
    graphs: list[GraphModule] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value), is_causal=True)

    run = compiled(attention, graphs)
    for length in (7, 20, 33):
        given = [torch.randn(B, heads, length, D) for heads in (H, KV, KV)]
        for each in given:
            torch._dynamo.mark_dynamic(each, 2)
        torch.testing.assert_close(run(*given), attention(*given), atol=1e-5, rtol=1e-5)
    (graph,) = graphs
    assert "expand" not in targets(graph)


def test_a_boolean_mask_becomes_values_once() -> None:
    """For all attentions by queries of one type, unless it is written between them."""

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, write: bool) -> Tensor:
        repeated = by_expand(key), by_expand(value)
        first = SDPA(query, *repeated, mask)
        if write:
            mask.logical_not_()
        second = SDPA(query.double(), by_expand(key.double()), by_expand(value.double()), mask).float()
        return first + SDPA(query * 2, *repeated, mask) + second

    mask = torch.rand(B, 1, 1, S) > 0.5
    for write, values in ((False, 2), (True, 1)):
        graphs: list[GraphModule] = []
        given = drawn()
        found = compiled(attention, graphs)(*given, mask.clone(), write)
        torch.testing.assert_close(found, attention(*given, mask.clone(), write), atol=1e-5, rtol=1e-5)
        (graph,) = graphs
        assert targets(graph).count("where") == values
        masks = {str(node.kwargs.get("attn_mask", node.args[-1])) for node in graph.graph.nodes if node.target is SDPA}
        assert len(masks) == 2


@pytest.mark.parametrize("sizes", ["length", "both"])
@pytest.mark.parametrize("spelling", ["getitem, expand, reshape", "unsqueeze, expand, flatten", "repeat_interleave"])
def test_symbolic_sizes(spelling: str, sizes: str) -> None:
    """One graph serves all lengths, and all numbers of sequences."""
    repeat, graphs = SPELLINGS[spelling], list[GraphModule]()

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return SDPA(query, repeat(key), repeat(value), mask)

    run = compiled(attention, graphs)
    for batch, length in ((2, 20), (2, 33), (5, 7) if sizes == "both" else (2, 7)):
        query = torch.randn(batch, 1, H, D).transpose(1, 2)
        key, value = torch.randn(batch, KV, length, D), torch.randn(batch, KV, length, DV)
        mask = torch.rand(batch, 1, 1, length) > 0.3
        mask[..., 0] = True
        for each, axis in ((key, 2), (value, 2), (mask, 3)):
            torch._dynamo.mark_dynamic(each, axis)
            if sizes == "both":
                torch._dynamo.mark_dynamic(each, 0)
        if sizes == "both":
            torch._dynamo.mark_dynamic(query, 0)
        torch.testing.assert_close(run(query, key, value, mask), attention(query, key, value, mask))
    (graph,) = graphs
    assert not {"expand", "repeat_interleave"} & set(targets(graph))


def chosen_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A kernel that a caller names may be one that takes no grouped queries."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return SDPA(query, by_expand(key), by_expand(value))


LEFT: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "one token, causal": (lambda q, k, v: SDPA(q, by_expand(k), by_expand(v), is_causal=True), drawn()),
    "enable_gqa": (lambda q, k, v: SDPA(q, k, v, enable_gqa=True), drawn()),
    "one key head that is broadcast": (lambda q, k, v: SDPA(q, k, v), drawn(1, H)),
    "no groups": (lambda q, k, v: SDPA(q, k, v), drawn(H, 1)),
    "one group": (lambda q, k, v: SDPA(q, by_expand(k, 1), by_expand(v, 1)), drawn(H, 1)),
    "the key alone": (lambda q, k, v: SDPA(q, by_expand(k), v), [*drawn()[:2], drawn(H, 1)[2]]),
    "heads in turns": (
        lambda q, k, v: SDPA(q, *(x[:, None].expand(-1, G, -1, -1, -1).flatten(1, 2) for x in (k, v))), drawn(),
    ),
    "as many groups as heads, in turns": (
        lambda q, k, v: SDPA(q, *(x[:, None].expand(-1, KV, -1, -1, -1).flatten(1, 2) for x in (k, v))),
        drawn(group=KV),
    ),
    "sequences in another order": (
        lambda q, k, v: SDPA(q, *(by_expand(x)[torch.tensor([1, 0])] for x in (k, v))), drawn(),
    ),
    "tiled": (lambda q, k, v: SDPA(q, k.repeat(1, G, 1, 1), v.repeat(1, G, 1, 1)), drawn()),
    "repeated tokens": (
        lambda q, k, v: SDPA(q, *(x.repeat_interleave(G, 2).view(B, H, S, -1) for x in (k, v))), drawn(),
    ),
    "of two groups": (lambda q, k, v: SDPA(q, by_expand(k), by_expand(v, H)), [*drawn()[:2], drawn(1, H)[2]]),
    "reversed": (lambda q, k, v: SDPA(q, by_expand(k).flip(1), by_expand(v)), drawn()),
    "one query head": (lambda q, k, v: SDPA(q[:, :1], by_expand(k), by_expand(v)), drawn()),
    "one query head and one key head": (lambda q, k, v: SDPA(q[:, :1], by_expand(k, H), by_expand(v, H)), drawn(1, H)),
    "a chosen kernel": (chosen_kernel, drawn()),
    "no batch": (lambda q, k, v: SDPA(q[0], by_expand(k)[0], by_expand(v)[0])[None], drawn()),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT)
def test_what_stays(kind: str) -> None:
    function, given = LEFT[kind]
    before: list[str] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        before.append(str(gm.graph))
        group_queries(gm)
        assert str(gm.graph) == before[0]
        return gm.forward

    torch.testing.assert_close(torch.compile(function, backend=keep, fullgraph=True)(*given), function(*given))
    assert "scaled_dot_product_attention" in before[0]


def test_a_view_of_the_result() -> None:
    """A model may view the result by the strides that its attention had."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = SDPA(query, by_expand(key), by_expand(value))
        return out.transpose(1, 2).view(B, 1, 1, -1)

    assert attended(attention, *drawn()) == [GROUPED]
    assert attended(attention, *drawn(dv=D)) == [((B, H, 1, D), (B, KV, S, D), (B, KV, S, D))]


def test_dropout_stays() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value), dropout_p=0.5)

    graphs: list[GraphModule] = []
    given = drawn()
    torch.manual_seed(1)
    found = compiled(attention, graphs)(*given)
    torch.manual_seed(1)
    assert torch.equal(found, attention(*given))
    assert targets(graphs[0]).count("expand") == 2


def test_a_symbolic_number_of_heads_or_query_tokens_stays() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, key, value, enable_gqa=True)

    graphs: list[GraphModule] = []
    run = compiled(attention, graphs, dynamic=True)
    for rows in (3, 4):
        given = drawn(rows=rows)
        torch.testing.assert_close(run(*given), attention(*given))
    assert [targets(graph)[-2] for graph in graphs] == ["scaled_dot_product_attention"] * len(graphs)


def test_a_key_with_other_readers() -> None:
    """The copy remains for them."""
    graphs: list[GraphModule] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeated = by_expand(key)
        return SDPA(query, repeated, by_expand(value)) + SDPA(query, repeated, by_expand(value)) + repeated.sum()

    given = drawn()
    assert attended(attention, *given) == [GROUPED, GROUPED]
    compiled(attention, graphs)(*given)
    assert targets(graphs[0]).count("expand") == 1


def written(x: Tensor, by: str) -> None:
    if by == "method":
        x.mul_(2)
    elif by == "operator":
        x *= 2
    elif by == "item":
        x[:, :, 3] = 1
    elif by == "view":
        x[:, :, 3:].zero_()
    elif by == "out":
        torch.mul(x, 2, out=x)
    elif by == "function":
        F.relu(x, True)


@pytest.mark.parametrize("by", ["method", "operator", "item", "view", "out", "function"])
def test_a_cache_or_its_copy_that_is_written_later(by: str) -> None:
    def late(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeated = by_expand(key)
        written(key, by)
        return SDPA(query, repeated, by_expand(value))

    def early(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        written(key, by)
        repeated = by_expand(key)
        written(value, by)
        return SDPA(query, repeated, by_expand(value))

    def copied(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeated = by_expand(key)
        written(repeated, by)
        return SDPA(query, repeated, by_expand(value))

    repeated = ((B, H, 1, D), (B, H, S, D), (B, H, S, DV))
    assert attended(late, *drawn()) == [repeated]
    assert attended(copied, *drawn()) == [repeated]
    assert attended(early, *drawn()) == [GROUPED]


@pytest.mark.parametrize("training", [False, True])
def test_keys_that_are_written_before_the_backward(training: bool) -> None:
    """The backward of attention to copies reads the copies."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = SDPA(query, by_expand(key), by_expand(value))
        key.mul_(2)
        return out

    query, key, value = (each.detach() for each in drawn(rows=5))
    query.requires_grad_(training)
    graphs: list[GraphModule] = []
    made: list[Tensor] = []
    step = torch.compile(attention, backend="fp8fn", options={"where": []}, fullgraph=True)
    for run in (attention, step, compiled(attention, graphs)):
        out = run(query, key.clone(), value)
        made.append(torch.autograd.grad(out.square().sum(), query)[0] if training else out)
    for found in made[1:]:
        torch.testing.assert_close(found, made[0], atol=1e-5, rtol=1e-5)
    assert targets(graphs[0]).count("expand") == (2 if training else 0)


@pytest.mark.parametrize("rows", [1, 5])
def test_gradients(rows: int) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value), mask)

    mask = torch.randn(B, H, rows, S, requires_grad=True)
    given = [*(each.detach().requires_grad_() for each in drawn(rows=rows)), mask]
    step = torch.compile(attention, backend="fp8fn", options={"where": []}, fullgraph=True)
    found, wanted = (
        (out := function(*given), *torch.autograd.grad(out.square().sum(), given)) for function in (step, attention)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_autocast() -> None:
    """The attention computes in bfloat16, and the nodes around it have the types that they would have."""
    graphs: list[GraphModule] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = SDPA(query, by_expand(key), by_expand(value))
        return out

    given = drawn()
    found, wanted = compiled(attention, graphs)(*given), attention(*given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
    attention_node = next(node for node in graphs[0].graph.nodes if node.target is SDPA)
    assert attention_node.meta["example_value"].dtype == torch.bfloat16
    assert "SDPA(query" in attention_node.meta["stack_trace"]


@pytest.mark.parametrize("region", ["checkpoint", "nested_compile_region"])
def test_inside_of_a_region(region: str) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value))

    nested = torch.compiler.nested_compile_region(attention)

    def called(*given: Tensor) -> Any:
        if region == "nested_compile_region":
            return nested(*given)
        return torch.utils.checkpoint.checkpoint(attention, *given, use_reentrant=False)

    graphs: list[GraphModule] = []
    given = [each.detach().requires_grad_() for each in drawn()]
    torch.testing.assert_close(compiled(called, graphs)(*given), called(*given))
    inner = [each for each in graphs[0].modules() if isinstance(each, GraphModule) and each is not graphs[0]]
    assert [shapes(node) for each in inner for node in each.graph.nodes if node.target is SDPA] == [GROUPED]


def test_a_region_inside_of_a_chosen_kernel_stays() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value))

    def called(*given: Tensor) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.utils.checkpoint.checkpoint(attention, *given, use_reentrant=False)

    graphs: list[GraphModule] = []
    given = [each.detach().requires_grad_() for each in drawn()]
    torch.testing.assert_close(compiled(called, graphs)(*given), called(*given))
    inner = [each for each in graphs[0].modules() if isinstance(each, GraphModule) and each is not graphs[0]]
    assert [targets(each).count("expand") for each in inner] == [2]


def test_under_vmap() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return SDPA(query, by_expand(key), by_expand(value))

    given = [torch.stack([each, -each, 2 * each]) for each in drawn()]
    mapped = torch.func.vmap(attention)
    torch.testing.assert_close(compiled(mapped, [])(*given), mapped(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_decoding_step_of_transformers(kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that Inductor is given copies no keys, and its logits are those of the eager model."""
    transformers = pytest.importorskip("transformers")
    model = two_layers(kind).eval()
    graphs = kept_for_rewrite(monkeypatch)
    step = torch.compile(model, backend="fp8fn", options={"where": []}, fullgraph=True)
    prompt = torch.randint(64, (batch, 9))
    logits = []
    with torch.no_grad():
        for call in (model, step):
            cache = transformers.StaticCache(config=model.config, max_cache_len=32)
            out = model(prompt, past_key_values=cache, use_cache=True).logits
            token, steps = out[:, -1:].argmax(-1), []
            for _ in range(4):
                steps.append(call(token, past_key_values=cache, use_cache=True).logits)
                token = steps[-1].argmax(-1)
            logits.append(torch.cat(steps, 1))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert graphs
    attentions = [shapes(node) for gm in graphs for node in gm.graph.nodes if node.target is SDPA]
    assert attentions == [((batch, 4, 1, 16), (batch, 2, 32, 16), (batch, 2, 32, 16))] * 2 * len(graphs)
    expanded = [node.meta["example_value"] for gm in graphs for node in gm.graph.nodes if node.target == "expand"]
    assert max(each.dim() for each in expanded) < 5  # none of keys or values; the mask has four dimensions


@pytest.mark.parametrize(("arch", "masked", "expected"), [(90, True, True), (80, True, False), (80, False, True)])
def test_cudnn_serves_where_pytorch_prefers_it(
    arch: int, masked: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an A100 PyTorch would repeat keys and values itself where a mask keeps its flash kernel out."""
    monkeypatch.setattr(grouped_queries.targets, "target_of", lambda _: Target("cuda", arch, 32))
    for name in ("SDPAParams", "can_use_cudnn_attention", "can_use_flash_attention"):
        monkeypatch.setattr(torch.backends.cuda, name, lambda *_: True)
    with FakeTensorMode():
        query, key = torch.empty(B, H, 1, D, device="cuda"), torch.empty(B, KV, S, D, device="cuda")
        graph = Graph()
        nodes = [graph.placeholder(name) for name in ("query", "key", "value", "mask")]
        for node, meta in zip(nodes, (query, key, key, torch.empty(B, 1, 1, S, device="cuda")), strict=True):
            node.meta["example_value"] = meta
    given = dict(zip(("query", "key", "value"), nodes, strict=False))
    assert (
        grouped_queries._has_kernel({**given, "attn_mask": nodes[3] if masked else None, "is_causal": False})
        == expected
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu(masked: bool, rows: int, dtype: torch.dtype, hopper: Target) -> None:
    """PyTorch's kernels of 16 bits alone read the keys of several query heads without a copy."""

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return SDPA(query, by_expand(key, 4), by_expand(value, 4), mask)

    graphs: list[GraphModule] = []
    run = compiled(attention, graphs)
    for batch, length in ((1, 271), (3, 1000)):
        query = torch.randn(batch, rows, 32, 128, device="cuda", dtype=dtype).transpose(1, 2)
        key, value = torch.randn(2, batch, 8, length, 128, device="cuda", dtype=dtype)
        mask = torch.rand(batch, 1, rows, length, device="cuda") > 0.5 if masked else None
        found, wanted = run(query, key, value, mask), attention(*(x.double() for x in (query, key, value)), mask)
        assert snr(found, wanted) > (45 if dtype == torch.bfloat16 else 60)
    repeated = [targets(graph).count("expand") for graph in graphs]
    assert repeated == [0 if dtype == torch.bfloat16 else 2] * len(graphs)


def test_explain_lists_the_same_products() -> None:
    """Each attention stays one node of the model that `explain` runs."""
    layer = torch.nn.Linear(H * DV, 256)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(SDPA(query, by_expand(key), by_expand(value)).transpose(1, 2).flatten(2))
        return out

    rows = fp8fn.explain(model, *drawn(), show=False).rows
    assert [(row.op, row.shape) for row in rows] == [("linear", (B, 256, H * DV))]
