"""Every format with models of five architectures: products, logits, and files that come back byte for byte."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.checkpoint.formats import FORMATS
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block
from support.accuracy import snr
from support.fp8_weights import same, values
from support.tiny_models import ARCHITECTURES, tiny_model

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

SCALES: Final[dict[Block, ScaleFormat]] = {(128, 128): "fp32", (1, -1): "fp32", (-1, -1): "fp32", (1, 32): "e8m0"}
CASES: Final[list[tuple[str, Block, bool]]] = [
    (name, block, static)
    for name, form in FORMATS.items()
    for block in form.forms
    for static in ((True,) if form.forms[block].static else (False, True) if block == (-1, -1) else (False,))
    if block in SCALES and (not static or name != "torchao")
]
IDS: Final = torch.tensor([[1, 127, 7, 30, 2], [3, 4, 5, 6, 9]])


@cache
def quantized(architecture: str, block: Block) -> Any:
    """A model in bfloat16 with FP8 weights; nobody changes it."""
    torch.manual_seed(0)
    model = tiny_model(architecture)
    report = fp8fn.quantize_weights(model, block=block, scale=SCALES[block])
    assert len(report.quantized) >= 4
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS, use_cache=False).logits
    return out


def with_values(model: Any, dtype: torch.dtype) -> Any:
    """The model whose FP8 weights are tensors of a type."""
    dense = deepcopy(model)
    for module in dense.modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, FP8Weight):
                module._parameters[name] = nn.Parameter(values(p).to(dtype), requires_grad=False)
            elif p is not None:
                module._parameters[name] = nn.Parameter(p.detach().to(dtype), requires_grad=False)
    return dense


@pytest.mark.parametrize("block", SCALES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_and_logits(architecture: str, block: Block) -> None:
    model = quantized(architecture, block)
    for name, p in model.named_parameters():
        if isinstance(p, FP8Weight):
            x = torch.randn(5, p.shape[-1]).bfloat16()
            for w in p if p.ndim == 3 else (p,):
                assert snr(F.linear(x, w).float(), x.float() @ values(w).T) >= 45, name
    exact = logits(with_values(model, torch.float32))
    found, plain = (snr(logits(m).float(), exact) for m in (model, with_values(model, torch.bfloat16)))
    assert found >= plain - 1


@pytest.mark.parametrize(("name", "block", "static"), CASES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_comes_back_byte_for_byte(
    architecture: str, name: str, block: Block, static: bool, tmp_path: Path
) -> None:
    model = quantized(architecture, block)
    weights = {key: p for key, p in model.named_parameters() if isinstance(p, FP8Weight)}
    scales = {key: 0.25 + number for number, key in enumerate(weights)} if static else None
    fp8fn.save_weights(model, tmp_path / "a", format=name, input_scales=scales)
    with torch.device("meta"):
        again = tiny_model(architecture)
    report = fp8fn.load_weights(again, tmp_path / "a")
    assert (report.missing_keys, report.unexpected_keys, report.layout.format) == ([], [], name)
    for key, p in weights.items():
        assert same(p, again.get_parameter(key)), key
        recipe = report.layout.recipes[key]
        assert recipe is None or recipe.weight_block == block[::-1]
        assert (report.layout.input_scales[key].item() if static else None) == (scales[key] if scales else None)
    assert torch.equal(logits(again), logits(model))
    fp8fn.save_weights(again, tmp_path / "b", format=report.layout)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == files
