"""Declarations in the spellings of other programs: what they say decides the block and the recipe of each weight."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.checkpoint.conversion.convert import convert
from fp8fn.checkpoint.conversion.options import Options
from fp8fn.ops.layout import Block
from fp8fn.weights.load import LoadedWeights

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def group(**weights: Any) -> dict[str, Any]:
    return {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, **weights},
        "input_activations": TOKENS,
    }


def ct(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group(**weights)}}


def loaded(folder: Path, config: dict[str, Any], block: Block, **more: Tensor) -> tuple[LoadedWeights, nn.Module]:
    """A module with one weight in these blocks, whose values are checked, and its report."""
    q = fp8fn.quantize(torch.randn(256, 384), block)
    stored = {"fc.weight": q.data.contiguous(), "fc.weight_scale": q.scale.contiguous(), **more}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    model = nn.ModuleDict({"fc": nn.Linear(384, 256, bias=False)})
    result = fp8fn.load_weights(model, folder)
    weight = model.get_parameter("fc.weight")
    assert isinstance(weight, FP8Weight)
    assert weight.scaled.block == block
    assert torch.equal(weight.dequantize(torch.float32), q.dequantize(torch.float32))
    return result, model


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": ct()},
        {"text_config": {"quantization_config": ct()}},
        {"compression_config": ct()},
        {"compression_config": {"config_groups": ct()["config_groups"]}},
        {"text_config": {"compression_config": ct()}},
        {"quantization_config": ct(), "text_config": {"quantization_config": {"quant_method": "awq"}}},
        {"quantization_config": ct(), "text_config": [1]},
    ],
    ids=["usual", "text", "legacy", "legacy without a method", "legacy text", "both", "no text"],
)
def test_the_places_of_a_declaration(config: dict[str, Any], tmp_path: Path) -> None:
    layout = loaded(tmp_path, config, (1, -1))[0].layout
    assert layout.format == "compressed-tensors"
    recipe = layout.recipes["fc.weight"]
    assert recipe is not None
    assert recipe.activation_block == (1, -1)


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "block", "block_structure": "128x128"}, (128, 128)),
        ({"strategy": "block", "block_structure": [128, 128]}, (128, 128)),
        ({"strategy": None}, (-1, -1)),
        ({"strategy": None, "group_size": -1}, (1, -1)),
        ({"strategy": None, "group_size": 128}, (1, 128)),
    ],
    ids=str,
)
def test_compressed_tensors_blocks(weights: dict[str, Any], block: Block, tmp_path: Path) -> None:
    result, model = loaded(tmp_path, {"quantization_config": ct(**weights)}, block)
    fp8fn.save_weights(model, tmp_path / "again", format=result.layout)
    files = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path, tmp_path / "again")]
    again = nn.ModuleDict({"fc": nn.Linear(384, 256, bias=False)})
    assert fp8fn.load_weights(again, tmp_path / "again").layout.weights == result.layout.weights
    assert len(files[0]) > 256 * 384 < len(files[1])
    assert torch.equal(again.get_parameter("fc.weight").dequantize(), model.get_parameter("fc.weight").dequantize())


@pytest.mark.parametrize("targets", [["LlamaAttention"], ["re:.*"]], ids=str)
def test_groups_without_weights_quantize_none(targets: list[str], tmp_path: Path) -> None:
    """llm-compressor's group of a key-value cache, which stands before that of the linear layers."""
    groups = {"attention": {"targets": targets, "weights": None, "input_activations": TOKENS}, "group_0": group()}
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    result, _ = loaded(tmp_path, {"quantization_config": section}, (1, -1))
    assert result.layout.recipes["fc.weight"] is not None


def entry(content: str) -> Tensor:
    """A layer's tensor as ComfyUI saves it."""
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


def test_a_layers_tensor_of_comfyui_is_no_parameter(tmp_path: Path) -> None:
    marker = entry('{"format": "float8_e4m3fn"}')
    result, model = loaded(tmp_path, {}, (-1, -1), **{"fc.comfy_quant": marker})
    assert (result.layout.format, result.unexpected_keys) == ("comfy", [])
    fp8fn.save_weights(model, tmp_path / "again", format=result.layout)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["fc.comfy_quant"], marker)


@pytest.mark.parametrize(("format", "name"), [("comfy", "fc.comfy_quant"), ("scaled_fp8", "scaled_fp8")])
def test_another_declaration_replaces_tensors_that_declare(format: str, name: str, tmp_path: Path) -> None:
    """The weight is e4m3 after a conversion, or in 16 bits when the model is saved."""
    data = torch.randn(256, 256).to(torch.float8_e5m2)
    marker = entry('{"format": "float8_e5m2"}') if format == "comfy" else torch.empty(0, dtype=torch.float8_e5m2)
    scale = "fc.weight_scale" if format == "comfy" else "fc.scale_weight"
    (tmp_path / "a").mkdir()
    save_file({"fc.weight": data, scale: torch.tensor(0.5), name: marker}, tmp_path / "a" / "model.safetensors")
    convert(tmp_path / "a", tmp_path / "b", Options(format=format))
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written["fc.weight"].dtype == torch.float8_e4m3fn
    assert format == "comfy" or written[name].dtype == torch.float8_e4m3fn
    assert fp8fn.load_blockwise(tmp_path / "b")["fc.weight"].dtype == torch.float8_e4m3fn
    model = nn.ModuleDict({"fc": nn.Linear(256, 256, bias=False)})
    layout = fp8fn.load_weights(model, tmp_path / "a").layout
    model["fc"].weight = nn.Parameter(torch.ones(256, 256))
    fp8fn.save_weights(model, tmp_path / "c", format=layout)
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == {"fc.weight"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "mxfp8"}', "tensor 'fc.weight' is stored as comfy_quant's format 'mxfp8', which fp8fn"),
        ('{"format": "float8_e5m2"}', "tensor 'fc.weight' is e4m3fn[256, 384], and declared as comfy_quant's format"),
        ("{", "model.safetensors: tensor 'fc.comfy_quant' holds no JSON object with a format"),
        ("[1]", "model.safetensors: tensor 'fc.comfy_quant' holds no JSON object with a format"),
    ],
)  # fmt: skip
def test_a_layers_tensor_of_comfyui_names_the_scheme(content: str, message: str, tmp_path: Path) -> None:
    """Its MX scales are swizzled, and have the shape of those that are not."""
    q = fp8fn.quantize(torch.randn(256, 384), (1, 32), scale="e8m0")
    stored = {"fc.weight": q.data.contiguous(), "fc.weight_scale": q.scale.view(torch.uint8).contiguous()}
    save_file({**stored, "fc.comfy_quant": entry(content)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        fp8fn.load_blockwise(tmp_path)


def test_torchaos_static_scale_is_a_part_of_the_weight(tmp_path: Path) -> None:
    """torchao counts the tensors of a weight, and waits for more where there are not as many as its entry names."""
    model = nn.ModuleDict({"fc": nn.Linear(384, 256, bias=False)})
    fp8fn.quantize_weights(model, block=(-1, -1))
    fp8fn.save_weights(model, tmp_path, format="torchao", input_scales={"fc.weight": 0.5})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = json.loads(file.metadata()["fc.weight"])["_tensor_data_names"]
        assert {f"fc._weight_{name}" for name in names} == set(file.keys())
    layout = fp8fn.load_weights(model, tmp_path).layout
    activations = layout.weights["fc.weight"].activations
    assert activations is not None
    assert activations.static
    assert layout.input_scales["fc.weight"].item() == 0.5


def test_rotations_within_the_weights_need_nothing(tmp_path: Path) -> None:
    """A rotation of a weight's input or output is part of the values in the file."""
    places = [{"targets": ["Linear"], "location": place} for place in ("weight_input", "weight_output")]
    config = {**ct(), "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": places}}}}
    for transforms in (config, {**ct(), "transform_config": None}, {**ct(), "transform_config": {}}):
        loaded(tmp_path, {"quantization_config": transforms}, (1, -1))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_static_scale_is_one_number(shape: tuple[int, ...], tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    result, _ = loaded(tmp_path, config, (-1, -1), **{"fc.input_scale": torch.full(shape, 0.25)})
    assert result.layout.input_scales["fc.weight"].shape == shape


@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (3, 1, 1)], ids=str)
def test_static_scales_of_experts(shape: tuple[int, ...], tmp_path: Path) -> None:
    q = fp8fn.quantize(torch.randn(3, 128, 128), (-1, -1))
    stored = {"e": q.data.contiguous(), "e_scale": q.scale.contiguous(), "e_input_scale": torch.full(shape, 0.5)}
    save_file(stored, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = nn.ParameterDict({"e": torch.zeros(3, 128, 128)})
    assert fp8fn.load_weights(model, tmp_path).layout.input_scales["e"].shape == shape
    assert torch.equal(model["e"].dequantize(torch.float32), q.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_files_that_declare_no_type_may_have_any(dtype: torch.dtype, tmp_path: Path) -> None:
    q = fp8fn.quantize(torch.randn(128, 128), (128, 128), dtype=dtype)
    save_file({"w": q.data.contiguous(), "w_scale_inv": q.scale.contiguous()}, tmp_path / "model.safetensors")
    model = nn.ParameterDict({"w": torch.zeros(128, 128)})
    fp8fn.load_weights(model, tmp_path)
    assert model["w"].scaled.dtype == dtype
    assert torch.equal(model["w"].dequantize(torch.float32), q.dequantize(torch.float32))
