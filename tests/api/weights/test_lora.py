"""PEFT's LoRA, unmodified, over a model whose base weights are FP8: gradients, memory, eager mode and torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.activations import Activations
from support.accuracy import snr

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self, n: int = 256, h: int = 384) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(n, h, bias=False), nn.Linear(h, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))  # type: ignore[no-any-return]


def adapted(activations: Activations | None) -> nn.Module:
    """Two blocks with adapters; the base in bf16, or in FP8."""
    torch.manual_seed(0)
    base = nn.Sequential(Block(), Block()).bfloat16()
    if activations is not None:
        fp8fn.quantize_weights(base, activations=activations)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["up", "down"], init_lora_weights=False)
    torch.manual_seed(1)
    model: nn.Module = peft.LoraModel(base, config, "default")
    return model.bfloat16()


def gradients(model: Any, step: Any, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    step(x).float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert x.grad is not None
    assert len(found) == 8
    return {"x": x.grad, **found}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("activations", ["16bit", "fp8"])
def test_adapters_learn_what_they_learn_on_a_bf16_base(activations: Activations, compiled: bool) -> None:
    x = torch.randn(2, 96, 256).bfloat16()
    dense, model = adapted(None), adapted(activations)
    expected = gradients(dense, dense, x)
    step = torch.compile(model, backend="fp8fn", options={"where": lambda _: False}) if compiled else model
    found = gradients(model, step, x)
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert grad.dtype == torch.bfloat16
        assert snr(grad.float(), expected[name].float()) > 20, name


@pytest.mark.parametrize("rows", [64, 192])
def test_nothing_keeps_a_copy_of_a_weight(rows: int) -> None:
    """Between forward and backward the only FP8 memory is that of the weights themselves."""
    model = adapted("fp8")
    weights = [p for p in model.parameters() if isinstance(p, FP8Weight)]
    assert len(weights) == 4
    held = {w.scaled.data.untyped_storage().data_ptr() for w in weights}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        for part in (x.scaled.data, x.scaled.scale) if isinstance(x, FP8Weight) else (x,):
            if part.element_size() == 1:
                saved[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(torch.randn(1, rows, 256).bfloat16().requires_grad_())
    assert saved.keys() <= held
    assert sum(saved.values()) <= sum(w.numel() for w in weights)
    out.float().sum().backward()
    assert sum(w.scaled.data.nbytes for w in weights) == sum(w.numel() for w in weights)


def test_an_adapter_is_merged_into_a_dequantized_weight() -> None:
    """A merge writes into the weight, which an FP8 weight refuses; dequantized first, it is the same model."""
    model, x = adapted("16bit"), torch.randn(4, 256).bfloat16()
    expected = model(x)
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, FP8Weight):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    merged = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    assert snr(merged(x).float(), expected.float()) > 30
