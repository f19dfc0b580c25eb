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
    if block in SCALES
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
    assert all(recipe is None or recipe.weight_block == block[::-1] for recipe in report.layout.recipes.values())
    found = {key: scale.item() for key, scale in report.layout.input_scales.items()}
    assert found.keys() == (report.layout.weights.keys() if static else set())
    for key, scale in (scales or {}).items():  # the matrices of experts have names of their own
        assert scale in found.values() if ".experts." in key else found[key] == scale
    assert torch.equal(logits(again), logits(model))
    fp8fn.save_weights(again, tmp_path / "b", format=report.layout)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == files


def test_16_bit_scales_and_static_activations_of_vllms_checkpoints(tmp_path: Path) -> None:
    """compressed-tensors' rows in bfloat16, a cache's scales, and modules that stay: written again as they were."""
    import json

    from safetensors.torch import load_file, save_file

    q = fp8fn.quantize(torch.randn(200, 300), (1, -1), dtype=torch.float8_e4m3fn)
    scale = q.scale.bfloat16().contiguous()
    written = {"0.weight": q.data.contiguous(), "0.weight_scale": scale, "0.input_scale": torch.tensor([0.5])}
    written |= {"0.k_scale": torch.tensor(2.0), "1.weight": torch.randn(7, 200)}
    save_file(written, tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["re:0$"], "weights": weights, "input_activations": inputs}}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    model = nn.Sequential(nn.Linear(300, 200, bias=False), nn.Linear(200, 7, bias=False))
    report = fp8fn.load_weights(model, tmp_path)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    recipe = report.layout.recipes["0.weight"]
    assert recipe is not None
    assert (recipe.activation_block, recipe.weight_block) == ((-1, -1), (-1, 1))
    assert torch.equal(values(model[0].weight), q.data.float() * scale.float())
    fp8fn.save_weights(model, tmp_path / "again", format=report.layout)
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"] == section
