"""transformers' mixtures of experts, unedited, by each of its ways to multiply: what goes to FP8, values, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx

import fp8fn
from fp8fn.lowering import backend
from fp8fn.lowering.find import GATHERED
from fp8fn.lowering.recipe_pass import Decision, rewrite
from support.accuracy import snr
from support.models import LOGITS, SIZES, SMALL, TOKENS, VOCABULARY, all_but_logits, sentences

pytest.importorskip("transformers")
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

EXPERTS, STEPS = 4, 12
ONE_LAYER: dict[str, Any] = {**SIZES, "num_hidden_layers": 1}
# Each token to all experts: of two nearly alike, rounding chooses another, which says nothing about products.
LATENT: dict[str, Any] = {
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


def mixtral(how: str) -> nn.Module:
    config = MixtralConfig(
        **ONE_LAYER, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=EXPERTS,
        experts_implementation=how,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def deepseek_v3(how: str) -> nn.Module:
    """Experts, besides one that all tokens share."""
    config = DeepseekV3Config(
        **ONE_LAYER, **LATENT, moe_intermediate_size=128, n_routed_experts=EXPERTS, num_experts_per_tok=EXPERTS,
        first_k_dense_replace=0, experts_implementation=how,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


# The models with their numbers of products; two of them are its experts'.
MODELS = {"mixtral": (mixtral, 8), "deepseek_v3": (deepseek_v3, 12)}


def tokens(length: int = TOKENS) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The backend's graphs run as they are, for Inductor would take minutes; what was decided about each product."""
    made: list[Decision] = []
    monkeypatch.setattr(backend, "rewrite", lambda *args, **named: made.extend(rewrite(*args, **named)))
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, *_, **__: gm.forward)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_grouped_mm(name: str, dtype: torch.dtype, uncompiled: list[Decision]) -> None:
    """All experts' products, one for each weight; in float32 transformers has its own op for PyTorch's."""
    build, products = MODELS[name]
    model = build("grouped_mm").to(dtype)
    explanation = fp8fn.explain(model, tokens(), where=all_but_logits, show=False)
    in_groups = [row for row in explanation.rows if row.op == "grouped_mm"]
    left = [row.reason for row in explanation.rows if row.reason]
    assert (explanation.graphs, len(explanation.rows), len(in_groups), explanation.outside) == (1, products, 2, ())
    assert {row.reason for row in in_groups} == {None}
    assert {row.shape[:2] for row in in_groups} == {(EXPERTS, 2 * TOKENS * EXPERTS)}
    assert all(row.source.startswith("moe.py:") for row in in_groups)
    assert left == [SMALL, LOGITS]
    compiled = torch.compile(model, backend="fp8fn", fullgraph=True, options={"where": all_but_logits})
    with torch.no_grad():
        expected, found = model(tokens()).logits, compiled(tokens()).logits
    assert sum(decision.reason is None for decision in uncompiled) == explanation.substituted == products - len(left)
    assert snr(found, expected) > 20


@pytest.mark.parametrize("name", MODELS)
def test_batched_mm(name: str, uncompiled: list[Decision]) -> None:
    """Each row has a copy of its expert's weight: those products stay, and the reason says what to call."""
    build, products = MODELS[name]
    model = build("batched_mm").bfloat16()
    explanation = fp8fn.explain(model, tokens(), where=all_but_logits, show=False)
    gathered = [row for row in explanation.rows if row.reason == GATHERED]
    assert (explanation.graphs, len(explanation.rows), len(gathered)) == (1, products, 2)
    assert all(".experts." in row.weight for row in gathered)
    assert "model.set_experts_implementation('grouped_mm')" in str(explanation)
    compiled = torch.compile(model, backend="fp8fn", fullgraph=True, options={"where": all_but_logits})
    with torch.no_grad():
        assert snr(compiled(tokens()).logits, model(tokens()).logits) > 20
    assert sum(decision.reason is None for decision in uncompiled) == explanation.substituted == products - 4
    model.set_experts_implementation("grouped_mm")
    assert fp8fn.explain(model, tokens(), where=all_but_logits, show=False).substituted == products - 2


@pytest.mark.slow(but="mixtral")
@pytest.mark.parametrize("name", MODELS)
def test_eager(name: str, uncompiled: list[Decision]) -> None:
    """A loop over the experts that were hit: Dynamo leaves it to Python, which `explain` says of each weight."""
    model = MODELS[name][0]("eager").bfloat16()
    with torch.no_grad():
        explanation = fp8fn.explain(model, tokens(), where=all_but_logits, show=False)
    assert explanation.graphs > 1
    assert all(".experts." not in row.weight for row in explanation.rows)
    assert len(explanation.outside) == 2
    for weight, reason in explanation.outside:
        assert ".experts." in weight
        assert reason.startswith("in no graph, so Python runs it or nothing does: Dynamic shape operator")
        assert reason.endswith("; use model.set_experts_implementation('grouped_mm')")
    compiled = torch.compile(model, backend="fp8fn", options={"where": all_but_logits})
    with torch.no_grad():
        assert snr(compiled(tokens()).logits, model(tokens()).logits) > 20
    assert any(decision.reason is None for decision in uncompiled)


@pytest.mark.parametrize("name", MODELS)
def test_one_compile_serves_every_length(name: str, uncompiled: list[Decision]) -> None:
    model = MODELS[name][0]("grouped_mm").bfloat16()
    compiled = torch.compile(model, backend="fp8fn", fullgraph=True, dynamic=True, options={"where": all_but_logits})
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for length in (64, 33, 100):
            assert snr(compiled(tokens(length)).logits, model(tokens(length)).logits) > 20


def train(model: nn.Module, call: Callable[..., Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    batches, losses = sentences(), []
    for _ in range(STEPS):
        batch = next(batches)
        loss = call(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, uncompiled: list[Decision]) -> None:
    """From the same weights on the same batches, in bfloat16, each of the last losses is within 1 %."""
    runs = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        model = MODELS[name][0]("grouped_mm").bfloat16()
        options = {"where": all_but_logits}
        runs.append(train(model, torch.compile(model, backend="fp8fn", options=options) if fp8 else model))
    assert runs[0][-1] < 0.9 * runs[0][0]
    for reference, found in zip(runs[0][-4:], runs[1][-4:], strict=True):
        assert abs(found / reference - 1) < 0.01
