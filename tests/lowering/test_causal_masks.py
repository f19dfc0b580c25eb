"""Masks of constants in attention: which are left out, the values that result, and which stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fp8fn.lowering import causal_masks
from fp8fn.lowering.causal_masks import drop_causal_masks
from fp8fn.lowering.graph.sdpa import arguments, attentions
from support.accuracy import snr
from support.graphs import kept_for_rewrite
from support.tiny_models import two_layers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

B, H, S, D = 2, 3, 20, 16
SDPA = F.scaled_dot_product_attention


def drawn(length: int = S, **options: Any) -> list[Tensor]:
    return [torch.randn(B, H, length, D, **options) for _ in range(3)]


def kept(function: Callable[..., Any], *given: Any, **options: Any) -> list[tuple[bool, bool]]:
    """Whether each attention has a mask, and whether it is causal; the graph computes what the function does."""
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        drop_causal_masks(gm)
        gm.graph.lint()
        gm.recompile()
        graphs.append(gm)
        return gm.forward

    found, wanted = torch.compile(function, backend=keep, fullgraph=True, **options)(*given), function(*given)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    named = [arguments(node) for graph in graphs for node in attentions(graph)]
    return [(each["attn_mask"] is not None, each["is_causal"]) for each in named if each is not None]


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)


def by_positions(x: Tensor) -> Tensor:
    return positions(x)[None, :] <= positions(x)[:, None]


def by_transformers(x: Tensor) -> Tensor:
    """The operations of transformers 5 for a batch whose positions it searches for several sequences."""
    rows = positions(x).unsqueeze(0).expand(x.shape[0], -1)
    sequence = (torch.diff(rows, prepend=rows[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, q, kv = torch.arange(x.shape[0])[:, None, None, None], positions(x)[:, None], positions(x)[None, :]
    seen = q.new_ones((), dtype=torch.bool) & (sequence[batch, q] == sequence[batch, kv])
    return (seen & (rows[batch, kv] <= rows[batch, q])).expand(x.shape[0], -1, -1, -1)


def by_triu(x: Tensor, low: float = -torch.inf) -> Tensor:
    """The mask of `nn.Transformer.generate_square_subsequent_mask`."""
    return torch.triu(torch.full((x.shape[2], x.shape[2]), low), diagonal=1)


def windowed(x: Tensor, window: int) -> Tensor:
    apart = positions(x)[:, None] - positions(x)[None, :]
    return (apart >= 0) & (apart < window)


CAUSAL: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": by_positions,
    "transformers": by_transformers,
    "tril": lambda x: torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril(),
    "of each head": lambda x: by_positions(x).expand(B, H, -1, -1),
    "triu of -inf": by_triu,
    "triu of the least number": lambda x: by_triu(x, torch.finfo(x.dtype).min),
    "where": lambda x: torch.where(by_positions(x), 0.0, -torch.inf),
    "masked_fill": lambda x: torch.zeros(S, S).masked_fill(~by_positions(x), -torch.inf),
    "a window as long as the sequence": lambda x: windowed(x, S),
}


@pytest.mark.parametrize("spelling", CAUSAL)
def test_causal_masks(spelling: str) -> None:
    assert kept(lambda q, k, v: SDPA(q, k, v, CAUSAL[spelling](q), scale=0.2), *drawn()) == [(False, True)]


def test_a_mask_that_hides_nothing() -> None:
    full = {"bool": lambda x: by_positions(x) | ~by_positions(x), "zeros": lambda x: torch.zeros(S, S)}
    for make in full.values():
        assert kept(lambda q, k, v, make=make: SDPA(q, k, v, make(q)), *drawn()) == [(False, False)]
        torch._dynamo.reset()
    query, key, value = drawn()
    attention = kept(lambda q, k, v: SDPA(q[:, :, :5], k, v, torch.ones(5, S, dtype=torch.bool)), query, key, value)
    assert attention == [(False, False)]


def changed(x: Tensor) -> Tensor:
    mask = by_positions(x)
    mask[3, 9] = True
    return mask


def changed_by_a_view(x: Tensor) -> Tensor:
    mask = by_positions(x)
    mask.view(-1)[3:5].logical_not_()
    return mask


def one_of_a_batch(x: Tensor) -> Tensor:
    mask = by_positions(x).expand(B, 1, -1, -1)
    return torch.where(torch.arange(B)[:, None, None, None] == 1, mask, ~mask | mask)


STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a window": lambda x: windowed(x, S - 1),
    "strictly causal but the first": lambda x: windowed(x, S) & ((positions(x)[:, None] != 4) | (positions(x) != 2)),
    "a finite bias": lambda x: by_triu(x, -1e4),
    "a bias below the diagonal": lambda x: by_triu(x) + torch.tril(torch.full((S, S), 0.5)),
    "NaN": lambda x: by_triu(x, torch.nan),
    "written": changed,
    "written by a view": changed_by_a_view,
    "one sequence of the batch": one_of_a_batch,
    "of an input": lambda x: by_positions(x) & (x[0, 0, :, 0] > -100)[None, :],
    "random": lambda x: by_triu(x) + 0 * torch.rand(S, S),
    "anti-causal": lambda x: positions(x)[None, :] >= positions(x)[:, None],
}


@pytest.mark.parametrize("kind", STAYS)
def test_masks_that_stay(kind: str) -> None:
    query, key, value = drawn()
    graphs: list[str] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        graphs.append(str(gm.graph))
        drop_causal_masks(gm)
        assert str(gm.graph) == graphs[0]
        return gm.forward

    torch.compile(lambda q, k, v: SDPA(q, k, v, STAYS[kind](q)), backend=keep, fullgraph=True)(query, key, value)
    assert "scaled_dot_product_attention" in graphs[0]


def test_lengths_that_differ_and_lengths_that_are_not_known_stay() -> None:
    query, key, value = drawn()
    short = [query[:, :, :5], key, value]
    assert kept(lambda q, k, v: SDPA(q, k, v, torch.ones(5, S, dtype=torch.bool).tril()), *short) == [(True, False)]
    torch._dynamo.reset()
    assert kept(lambda q, k, v: SDPA(q, k, v, by_positions(q)), query, key, value, dynamic=True) == [(True, False)]


def test_dropout_stays() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, by_positions(q), dropout_p=1.0)

    assert kept(attention, *drawn()) == [(True, False)]


def test_a_mask_of_all_layers() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = by_positions(q)
        out = SDPA(SDPA(q, k, v, mask), k, v, mask)
        return SDPA(out, k, v, mask & (positions(q) > 2)[None, :] | torch.eye(S, dtype=torch.bool))

    assert kept(layers, *drawn()) == [(False, True), (False, True), (True, False)]


@pytest.mark.parametrize("region", ["checkpoint", "nested_compile_region"])
@pytest.mark.parametrize("alike", [True, False])
def test_masks_that_are_given_to_a_region(region: str, alike: bool) -> None:
    """All callers of a region that two layers share have to give it a causal mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return SDPA(q, k, v, mask)

    nested = torch.compiler.nested_compile_region(attention)

    def layers(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
        mask = by_positions(q)
        for each in (mask, mask if alike else mask | seen):
            if region == "checkpoint":
                q = torch.utils.checkpoint.checkpoint(attention, q, k, v, each, use_reentrant=False)
            else:
                q = nested(q, k, v, each)
        return q

    given = [*(each.requires_grad_() for each in drawn()), torch.rand(S, S) > 0.5]
    found = kept(layers, *given)
    dropped, stays = (False, True), (True, False)
    if region == "checkpoint":
        assert found == [dropped, dropped if alike else stays]
    else:
        assert found == [dropped if alike else stays]


class Halves(torch.autograd.Function):
    """Its backward has other inputs than its forward, and reads the first mask alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(q, seen)
        return q / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        query, seen = ctx.saved_tensors
        return SDPA(query, query, grad, seen), None, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself
def test_a_mask_of_a_custom_backward() -> None:
    query, seen = drawn()[0].requires_grad_(), torch.rand(S, S) > 0.5

    def halves(q: Tensor, seen: Tensor) -> Tensor:
        return Halves.apply(q, seen & True, by_positions(q))

    def keep(gm: GraphModule, _: Any) -> Any:
        drop_causal_masks(gm)
        gm.recompile()
        return gm.forward

    step = torch.compile(halves, backend=keep, fullgraph=True)
    found, wanted = (torch.autograd.grad(run(query, seen).square().sum(), query) for run in (step, halves))
    torch.testing.assert_close(found, wanted)


def test_a_mask_of_a_branch_stays() -> None:
    def branches(q: Tensor, k: Tensor, v: Tensor) -> Any:
        a = by_positions(q)
        return torch.cond(q.sum() > 0, lambda a, q: SDPA(q, q, q, a), lambda a, q: SDPA(q, q, q, a) + 1, (a, q))

    assert kept(branches, *drawn()) == [(True, False)] * 2


def test_a_mask_that_pytorch_refuses_stays() -> None:
    """It would broadcast the scores."""
    for sequences, rows, shape in ((1, S, (B, 1, S, S)), (B, 1, (S, S)), (B, S, (1, 1, 1, S, S))):
        query, key, value = (each[:sequences] for each in drawn())

        def attention(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, ...] = shape) -> Tensor:
            return SDPA(q, k, v, torch.ones(shape, dtype=torch.bool))

        graphs: list[str] = []

        def keep(gm: GraphModule, _: Any, graphs: list[str] = graphs) -> Any:
            graphs.append(str(gm.graph))
            drop_causal_masks(gm)
            graphs.append(str(gm.graph))
            return gm.forward

        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            torch.compile(attention, backend=keep)(query[:, :, :rows], key, value)
        assert graphs[0] == graphs[1]


def test_a_mask_cut_from_a_large_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor computes what is read of it alone."""
    monkeypatch.setattr(causal_masks, "_MOST_ELEMENTS", 2000)
    for length, stays in ((40, False), (50, True)):
        torch._dynamo.reset()

        def attention(q: Tensor, k: Tensor, v: Tensor, length: int = length) -> Tensor:
            return SDPA(q, k, v, torch.ones(length, length, dtype=torch.bool).tril()[:S, :S])

        assert kept(attention, *drawn()) == [(stays, not stays)]


def test_a_mask_that_cannot_be_computed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(causal_masks, "_computed", computed)
    assert kept(lambda q, k, v: SDPA(q, k, v, by_positions(q)), *drawn()) == [(True, False)]


def test_gradients_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    given = [each.requires_grad_() for each in drawn()]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, by_transformers(q))

    with caplog.at_level(logging.INFO, logger="fp8fn"):
        step = torch.compile(attention, backend="fp8fn", options={"where": []}, fullgraph=True)
        found, wanted = (
            (out := function(*given), *torch.autograd.grad(out.square().sum(), given)) for function in (step, attention)
        )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    wanted_line = "constant masks, causal or of True alone, that attention does without: 1"
    assert wanted_line in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_training_step_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, transformers gives the compiled attention a mask; the step's graph has none."""
    pytest.importorskip("transformers")
    model = two_layers(kind)
    graphs = kept_for_rewrite(monkeypatch)
    tokens, losses = torch.randint(64, (2, 32)), []
    for call in (model, torch.compile(model, backend="fp8fn", options={"where": []}, fullgraph=True)):
        model.zero_grad()
        loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append((loss.detach(), *(each.grad.clone() for each in model.parameters())))
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    found = [arguments(node) for gm in graphs for node in attentions(gm)]
    assert [(each["attn_mask"], each["is_causal"], each["enable_gqa"]) for each in found if each] == [
        (None, True, True)
    ] * 2


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    given = drawn(300, device="cuda", dtype=torch.bfloat16)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v, by_positions(q))

    compiled = torch.compile(attention, backend="fp8fn", options={"where": []}, fullgraph=True)
    assert snr(compiled(*given), attention(*(each.double() for each in given))) > 45
