"""Mixtures of experts of transformers with `FP8Weight`s: logits, and which products compute them."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops import reference
from support.accuracy import snr
from support.expert_models import CONFIGS
from support.fp8_weights import values

transformers = pytest.importorskip("transformers")

IDS: Final = torch.arange(24).view(2, 12) * 37 % 160
IMPLEMENTATIONS: Final = ("grouped_mm", "batched_mm", "eager")


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    for place, parameter in model.named_parameters():
        if place.endswith(("gate.weight", "router.weight")):  # so that few roundings change the chosen experts
            nn.init.normal_(parameter, std=0.2)
        elif not parameter.any():  # biases of experts
            nn.init.normal_(parameter, std=0.1)
    report = fp8fn.quantize_weights(model)
    experts = [name for name in report.quantized if ".experts." in name]
    assert [name.rpartition(".")[2] for name in experts] == ["gate_up_proj", "down_proj"]
    return model


def with_values(model: Any, dtype: torch.dtype) -> Any:
    """A copy whose weights are plain tensors of the values that the `FP8Weight`s stand for."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, FP8Weight):
                module._parameters[name] = nn.Parameter(values(weight).to(dtype), requires_grad=False)
    return twin.to(dtype)


def median_snr(found: Tensor, wanted: Tensor) -> float:
    """The median over tokens, since one whose experts nearly tie may choose others by any rounding."""
    pairs = zip(found.float().flatten(0, 1), wanted.flatten(0, 1), strict=True)
    return statistics.median(snr(one, other) for one, other in pairs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """The products with FP8 weights that run, by op and the number of the weight's dimensions."""
    found: Counter[tuple[str, int]] = Counter()

    def count(name: str) -> None:
        multiply = getattr(reference, name)

        def counted(x: Tensor, w: Any, *rest: Any) -> Tensor:
            found[name, w.data.ndim] += 1
            out: Tensor = multiply(x, w, *rest)
            return out

        monkeypatch.setattr(reference, name, counted)

    for name in ("mm_a16w8", "grouped_mm_a16w8"):
        count(name)
    return found


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_and_the_products_of_experts(
    name: str, calls: Counter[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are as near to float32 on the same values as those of a model in bf16 with dequantized weights."""
    model = build(name)
    exact, plain = (with_values(model, dtype) for dtype in (torch.float32, torch.bfloat16))
    monkeypatch.delattr(FP8Weight, "dequantize")
    for implementation in IMPLEMENTATIONS:
        for each in (model, exact, plain):
            each.set_experts_implementation(implementation)
        wanted = exact(IDS).logits
        calls.clear()
        found = model(IDS).logits
        of_matrices = calls["mm_a16w8", 2]
        if implementation == "grouped_mm":
            assert calls == {("grouped_mm_a16w8", 3): 2, ("mm_a16w8", 2): of_matrices}
        elif implementation == "batched_mm":  # the bytes of the chosen experts are gathered
            assert calls == {("mm_a16w8", 3): 2, ("mm_a16w8", 2): of_matrices}
        else:  # two products for each expert that has tokens
            assert calls == {("mm_a16w8", 2): of_matrices}
            assert of_matrices >= 4 + 2 * 2
        assert median_snr(found, wanted) > median_snr(plain(IDS).logits, wanted) - 1


# transformers calls functions of its own that are cached, and Dynamo says that it does not see the cache.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("name", "dtype"), [("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.float16)], ids=str)
def test_compiled_in_one_graph(name: str, dtype: torch.dtype, calls: Counter[tuple[str, int]]) -> None:
    """In float16 transformers calls an op of its own in the place of `_grouped_mm`."""
    model = build(name, dtype)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits
        calls.clear()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(IDS, use_cache=False).logits
    assert calls["grouped_mm_a16w8", 3] == 2
    assert snr(found.float(), wanted.float()) > 40


def test_gradients_through_frozen_experts() -> None:
    """As an adapter before them needs: the gradient of the experts' input, in float32."""
    experts = build("qwen3_moe", torch.float32).model.layers[0].mlp.experts
    plain = with_values(experts, torch.float32)
    x, index, weights = torch.randn(9, 256), torch.arange(18).view(9, 2) % 3, torch.rand(9, 2)
    for implementation in IMPLEMENTATIONS:
        grads = []
        for module in (experts, plain):
            module.config._experts_implementation = implementation
            given = x.clone().requires_grad_()
            module(given, index, weights).square().sum().backward()
            grads.append(given.grad)
        assert snr(*grads) > 90


def test_biases_of_experts_stay() -> None:
    """With 128 experts a bias of each is as large as a weight."""
    module = nn.Module()
    module.register_parameter("gate_up_proj", nn.Parameter(torch.randn(128, 128, 128)))
    module.register_parameter("gate_up_proj_bias", nn.Parameter(torch.randn(128, 256)))
    report = fp8fn.quantize_weights(module)
    assert report.quantized == ("gate_up_proj",)
    assert report.kept == {"gate_up_proj_bias": "it is a bias, which is added"}
