"""Malformed checkpoints: an error names the file and the fault, and the module stays as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fp8fn

pytest.importorskip("safetensors")
from safetensors.torch import save, save_file

pytestmark = pytest.mark.every_case

E4M3, E5M2, E8M0, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8
Tensors = dict[str, Tensor]


def weight(scale: str, scales: Tensor, **more: Tensor) -> Tensors:
    data = torch.randn(200, 300).to(E4M3)
    return {"fc.weight": data, f"fc.{scale}": scales, **{name.replace("__", "."): t for name, t in more.items()}}


def group(**changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors, with changes of its weights."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, **changes}
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


def ct(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group(**changes)}}


def ct_with(value: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": value}


def activations(**inputs: Any) -> dict[str, Any]:
    asked = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, **inputs}
    return ct_with({"group_0": {**group(), "input_activations": asked}})


def rotated(location: str, **apply: Any) -> dict[str, Any]:
    """compressed-tensors with a rotation at the input and at another place of a module."""
    places = [{"targets": ["Linear"], "location": place, **apply} for place in ("weight_input", location)]
    return {**ct(), "transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": places}}}}


def modelopt(algo: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo}


INV, SCALE = "weight_scale_inv", "weight_scale"
SQUARE: Final = torch.full((2, 3), 0.5)
ROWS: Final = torch.full((200, 1), 0.5)
ONE: Final = torch.tensor(0.5)
NAN: Final = float("nan")
FP8: Final = {"quant_method": "fp8"}


def bad(scales: Tensor, value: float) -> Tensor:
    scales = scales.clone()
    scales.view(-1)[-1] = value
    return scales


class Case(NamedTuple):
    tensors: Tensors
    config: Any
    message: str


S: Final = r"model\.safetensors: tensor 'fc\.weight"
CASES: Final = {
    # Scales that cannot be right, in each spelling.
    **{
        f"{spelling} {value}": Case(weight(spelling, bad(scales, value)), config, f"fc.{spelling}' has 1 of")
        for spelling, scales, config in ((INV, SQUARE, FP8), (SCALE, ROWS, ct()), ("scale_weight", ONE, None))
        for value in (NAN, float("inf"), 0.0, -1.0)
    },
    "e8m0 NaN": Case(weight(SCALE, torch.full((200, 10), 255, dtype=U8)), modelopt("MXFP8"), "scales that are NaN"),
    "input scale NaN": Case(
        weight(SCALE, ONE, fc__input_scale=torch.tensor(NAN)), modelopt("FP8"), "fc.input_scale' has 1 of 1"
    ),
    "input scale int": Case(
        weight(SCALE, ONE, fc__input_scale=torch.tensor(3)), modelopt("FP8"), "fc.input_scale' is int64[]"
    ),
    **{
        f"input scale {list(shape)}": Case(
            weight(SCALE, ONE, fc__input_scale=torch.ones(shape)), modelopt("FP8"), f"_scale' is float32{list(shape)}"
        )
        for shape in ((3, 5), (7,), (200,), (1, 1, 1), (0,))
    },
    **{
        f"{name} {value}": Case(
            weight(spelling, scales, **{f"fc__{name}": torch.tensor([1.0, value])}), config, f"fc.{name}' holds NaN"
        )
        for spelling, scales, config in ((INV, SQUARE, FP8), (SCALE, ROWS, ct()))
        for name in ("k_scale", "v_scale", "q_scale")
        for value in (NAN, float("inf"))
    },
    "no input scale": Case(weight(SCALE, ONE), modelopt("FP8"), "their scale 'fc.input_scale' is not there"),
    # Shapes and types that do not fit.
    "square shape": Case(weight(INV, torch.ones(3, 2)), FP8, "has shape (3, 2)"),
    "channel shape": Case(weight(SCALE, torch.ones(300)), ct(), "has shape (300,)"),
    "channel turned": Case(weight(SCALE, torch.ones(1, 200)), ct(), "has shape (1, 200)"),
    "tensor shape": Case(weight(SCALE, torch.ones(2)), ct(strategy="tensor"), "has shape (2,)"),
    "mx shape": Case(weight(SCALE, torch.ones(200, 9, dtype=U8)), modelopt("MXFP8"), "has shape (200, 9)"),
    "one scale too few dims": Case(weight("scale_weight", torch.ones(7)), None, "has shape (7,)"),
    "declared block": Case(
        weight(INV, SQUARE), {**FP8, "weight_block_size": [1, 128]}, "has shape (2, 3)"
    ),
    "float64 scales": Case(weight(INV, SQUARE.double()), FP8, "is float64"),
    "int8 scales": Case(weight(SCALE, ROWS.to(torch.int8)), ct(), "is int8"),
    "e4m3 scales": Case(weight(SCALE, ROWS.to(E4M3)), ct(), "is e4m3fn"),
    "bf16 data": Case({"fc.weight": torch.ones(200, 300).bfloat16(), "fc.weight_scale_inv": SQUARE}, FP8, "has scales"),
    "int8 data": Case({"fc.weight": torch.ones(200, 300, dtype=torch.int8), "fc.weight_scale": ROWS}, ct(), "is int8["),
    "a vector": Case({"fc.weight": torch.ones(300).to(E4M3), "fc.weight_scale": ONE}, ct(), "must be a matrix"),
    "no scales": Case({"fc.weight": torch.ones(200, 300).to(E4M3)}, ct(), "'fc.weight_scale' is not there"),
    "scales alone": Case({"fc.weight_scale": ROWS}, ct(), "'fc.weight', which is not there"),
    "old scale alone": Case(
        {**weight("scale_weight", ONE), "x.scale_weight": ONE.clone()}, None, "'x.weight'"
    ),
    **{
        f"{dtype} without scales": Case(
            {"fc.weight": torch.ones(200, 300, dtype=dtype)}, None, f"fc.weight is {str(dtype)[6:]} without scales in "
        )
        for dtype in (torch.int8, U8, torch.int32, torch.bool, torch.complex64)
    },
    "bool bias": Case(
        {"fc.weight": torch.ones(200, 300), "fc.bias": torch.ones(200, dtype=torch.bool)}, None, "fc.bias is bool"
    ),
    **{
        f"e5m2 as {name}": Case({"fc.weight": torch.randn(200, 300).to(E5M2), f"fc.{spelling}": scales}, config, words)
        for name, spelling, scales, config, words in (
            ("fmt", INV, SQUARE, {**FP8, "fmt": "e4m3"}, "is e5m2[200, 300], and declared as fp8 e4m3"),
            ("fp8", INV, SQUARE, FP8, "and declared as fp8 e4m3"),
            ("autofp8", SCALE, ONE, FP8, "and declared as fp8 e4m3"),
            ("ct", SCALE, ROWS, ct(), "and declared as float8 per channel"),
            ("modelopt", SCALE, ROWS, modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "and declared as quant_algo FP8_PER"),
            ("mxfp8", INV, torch.full((200, 10), 127, dtype=U8), {"quant_method": "mxfp8"}, "and declared as mxfp8"),
        )
    },
    # Two formats in one checkpoint, or another one than the config declares.
    "inv and scale": Case(weight(INV, SQUARE, fc__weight_scale=ROWS), FP8, "a checkpoint has one format"),
    "inv and old": Case(weight(INV, SQUARE, fc__scale_weight=ONE), None, "a checkpoint has one format"),
    "ct with inv": Case(weight(INV, SQUARE), ct(), "config.json declares compressed-tensors"),
    "modelopt with old": Case(weight("scale_weight", ONE), modelopt("FP8"), "config.json declares modelopt"),
    "mxfp8 with scale": Case(weight(SCALE, ROWS), {"quant_method": "mxfp8"}, "config.json declares mxfp8"),
    # Schemes that fp8fn does not have.
    "awq": Case({"fc.qweight": torch.ones(3, 3).int(), "fc.scales": ROWS}, {"quant_method": "awq"}, "GPTQ or AWQ"),
    "gptq": Case({"fc.g_idx": torch.ones(3).int(), "fc.qweight": ROWS.int()}, {"quant_method": "gptq"}, "g_idx"),
    "zeros": Case({"fc.qzeros": torch.ones(3).int()}, {"quant_method": "gptq"}, "zero points"),
    "packed": Case({"fc.weight_packed": torch.ones(3).int()}, ct(num_bits=4), "packed four-bit"),
    "zero point": Case(weight(SCALE, ROWS, fc__weight_zero_point=ROWS.clone()), ct(), "asymmetric"),
    "nvfp4": Case(weight(SCALE, ROWS, fc__weight_scale_2=ONE), modelopt("NVFP4"), "NVFP4"),
    "mxfp4": Case({"e.down_proj_blocks": torch.ones(3, dtype=U8)}, {"quant_method": "mxfp4"}, "MXFP4"),
    "bnb": Case({"fc.weight.absmax": ONE}, {"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "bnb int8": Case({"fc.SCB": ROWS}, {"quant_method": "bitsandbytes"}, "int8"),
    "smoothed": Case(weight(SCALE, ONE, fc__pre_quant_scale=ROWS), modelopt("FP8"), "pre_quant_scale"),
    "unknown method": Case(weight(SCALE, ROWS), {"quant_method": "hqq"}, "quant_method 'hqq'"),
    "unknown algo": Case(weight(SCALE, ROWS), modelopt("INT8_SQ"), "quant_algo INT8_SQ"),
    "unnamed layer": Case(
        weight(SCALE, ONE), {**modelopt("MIXED_PRECISION"), "quantized_layers": {}}, "quant_algo none"
    ),
    "int8 group": Case(weight(SCALE, ROWS), ct(type="int"), "int8 per channel"),
    "4 bits": Case(weight(SCALE, ROWS), ct(num_bits=4), "float4 per channel"),
    "asymmetric": Case(weight(SCALE, ROWS), ct(symmetric=False), "asymmetric float8"),
    "group of 16": Case(weight(SCALE, ROWS), ct(strategy="group", group_size=16), "per group of 16"),
    "group of a list": Case(weight(SCALE, ROWS), ct(strategy="group", group_size=[128]), "per group of [128]"),
    "e5m2": Case(weight(INV, SQUARE), {**FP8, "fmt": "e5m2"}, "is stored as fp8 e5m2"),
    "int activations": Case(weight(SCALE, ROWS), activations(type="int"), "activations of int8"),
    "local activations": Case(weight(SCALE, ROWS), activations(dynamic="local"), "activations of float8"),
    "no target": Case(weight(SCALE, ROWS), ct_with({"g": {**group(), "targets": ["re:other"]}}), "no target of"),
    "bad target": Case(weight(SCALE, ROWS), ct_with({"g": {**group(), "targets": ["re:("]}}), "no regular expression"),
    **{
        f"rotation at {place}": Case(weight(SCALE, ROWS), rotated(place), f"online transform, hadamard at {place} (R4)")
        for place in ("input", "output", "q_attn", "k_cache")
    },
    # Declarations that are none.
    "transforms a list": Case(weight(SCALE, ROWS), {**ct(), "transform_config": [1]}, "transform_config=[1]"),
    "a transform of nowhere": Case(
        weight(SCALE, ROWS), {**ct(), "transform_config": {"config_groups": {"u": {"apply": [{}]}}}}, "transform_conf"
    ),
    "block a word of ct": Case(
        weight(SCALE, SQUARE), ct(strategy="block", block_structure="128by128"), "block_structure='128by128'"
    ),
    "block 64x64 of ct": Case(weight(SCALE, SQUARE), ct(strategy="block", block_structure="64x64"), "[64, 64]"),
    "null strategy of 16": Case(weight(SCALE, ROWS), ct(strategy=None, group_size=16), "is stored as float8 per None"),
    "config a list": Case(weight(INV, SQUARE), [1], "quantization_config=[1] must be a JSON object"),
    "method a number": Case(weight(INV, SQUARE), {"quant_method": 7}, "quant_method=7 must be a string"),
    "block a word": Case(weight(INV, SQUARE), {**FP8, "weight_block_size": "x"}, "weight_block_size='x'"),
    "block of 64": Case(weight(INV, SQUARE), {**FP8, "weight_block_size": [64, 64]}, "weight_block_size=[64, 64]"),
    "scheme of activations": Case(weight(INV, SQUARE), {**FP8, "activation_scheme": "x"}, "activation_scheme='x'"),
    "groups a list": Case(weight(SCALE, ROWS), ct_with([]), "config_groups=[]"),
    "group a list": Case(weight(SCALE, ROWS), ct_with({"g": []}), "config_groups={'g': []}"),
    "targets a word": Case(weight(SCALE, ROWS), ct_with({"g": {**group(), "targets": "Linear"}}), "targets='Linear'"),
    "no weights": Case(weight(SCALE, ROWS), ct_with({"g": {"targets": ["Linear"]}}), "config_groups.g must have"),
    "block structure": Case(
        weight(SCALE, ROWS), ct(strategy="block", block_structure=[7, 7]), "block_structure=[7, 7]"
    ),
    "layers a list": Case(
        weight(SCALE, ONE), {**modelopt("MIXED_PRECISION"), "quantized_layers": []}, "quantized_layers=[]"
    ),
    # Shapes that are not the module's.
    "another shape": Case(
        {"fc.weight": torch.ones(3, 3), "fc.bias": torch.ones(200)}, None, "size mismatch for fc.weight"
    ),
    "unexpected": Case({**weight(INV, SQUARE), "other": ONE}, FP8, 'Unexpected key(s) in state_dict: "other"'),
    "missing": Case({"fc.bias": torch.ones(200)}, None, 'Missing key(s) in state_dict: "fc.weight"'),
}  # fmt: skip


def module() -> nn.Module:
    return nn.ModuleDict({"fc": nn.Linear(300, 200)})


def refused(folder: Path, message: str) -> None:
    model = module()
    before = {name: (id(p), p._version, p.clone()) for name, p in model.named_parameters()}
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError), match=re.escape(message)) as error:
        fp8fn.load_weights(model, folder)
    assert type(error.value) is not RuntimeError or "state_dict" in str(error.value)
    for name, p in model.named_parameters():
        assert (id(p), p._version) == before[name][:2]
        assert torch.equal(p, before[name][2])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"text_config": {"quantization_config": ct(type="int")}}, "int8 per channel"),
        ({"text_config": {"quantization_config": [1]}}, "text_config.quantization_config=[1] must be a JSON object"),
        ({"text_config": {"compression_config": ct(num_bits=4)}}, "float4 per channel"),
        ({"compression_config": ct(type="int")}, "int8 per channel"),
        ({"compression_config": 3}, "compression_config=3 must be a JSON object"),
        ({"quantization_config": None, "compression_config": ct(type="int")}, "int8 per channel"),
        ({"quantization_config": ct(type="int"), "text_config": {"quantization_config": ct()}}, "int8 per channel"),
    ],
    ids=str,
)
def test_a_declaration_in_another_place(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_file({**weight(SCALE, ROWS), "fc.bias": torch.ones(200)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(section))
    refused(tmp_path, message)


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_checkpoint(name: str, tmp_path: Path) -> None:
    tensors, config, message = CASES[name]
    tensors = tensors if "fc.bias" in tensors or "missing" in name else {**tensors, "fc.bias": torch.ones(200)}
    save_file(tensors, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    refused(tmp_path, message)


def header(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A file with a changed header."""
    begin = 8 + int.from_bytes(content[:8], "little")
    described = json.loads(content[8:begin])
    change(described)
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + content[begin:]


def overlap(described: dict[str, Any]) -> None:
    described["fc.bias"]["data_offsets"] = [0, 800]
    described["fc.weight_scale_inv"]["data_offsets"] = [0, 24]


def beyond(described: dict[str, Any]) -> None:
    described["fc.weight"]["data_offsets"][1] += 10**9


def hole(described: dict[str, Any]) -> None:
    described["fc.weight"]["data_offsets"] = [n + 64 for n in described["fc.weight"]["data_offsets"]]


def shape(described: dict[str, Any]) -> None:
    described["fc.weight"]["shape"] = [200, 301]


def negative(described: dict[str, Any]) -> None:
    described["fc.weight"]["shape"] = [-200, -300]


DAMAGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "half": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "header alone": lambda content: content[: 8 + int.from_bytes(content[:8], "little")],
    "empty": lambda content: b"",
    "eight bytes": lambda content: content[:8],
    "huge header": lambda content: b"\xff" * 8 + content[8:],
    "overlap": lambda content: header(content, overlap),
    "beyond the end": lambda content: header(content, beyond),
    "hole": lambda content: header(content, hole),
    "shape of another size": lambda content: header(content, shape),
    "negative shape": lambda content: header(content, negative),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    whole = save({**weight(INV, SQUARE), "fc.bias": torch.ones(200)})
    (tmp_path / "model.safetensors").write_bytes(DAMAGES[name](whole))
    refused(tmp_path, "model.safetensors: ")


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "a/model.safetensors", "..", "gone"])
def test_an_index_that_leaves_its_folder(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"fc.weight": torch.ones(200, 300), "fc.bias": torch.ones(200)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"fc.weight": file, "fc.bias": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "index.json: tensor 'fc.weight' is said to be in ")


def test_torchaos_metadata(tmp_path: Path) -> None:
    """Each weight's entry must name a known subclass, its parts and its block."""
    tensors = {"fc._weight_qdata": torch.ones(200, 300).to(E4M3), "fc._weight_scale": ROWS, "fc.bias": torch.ones(200)}
    good = {"_type": "Float8Tensor", "_data": {"block_size": [1, 300]}, "_tensor_data_names": ["qdata", "scale"]}
    mx = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
    listed = {"_type": "PerBlock", "_data": [1, 128]}
    for entry, message in (
        (None, "no scheme: the file's metadata for 'fc.weight' is 'None'"),
        ("{", "no scheme"),
        ({**good, "_type": "Int4Tensor"}, "torchao's Int4Tensor"),
        ({**good, "_tensor_data_names": ["qdata", "scale", "zero_point"]}, "of parts ['qdata', 'scale', 'zero_point']"),
        ({**good, "_data": {"block_size": [1, 7]}}, "block_size [1, 7]"),
        ({**good, "_data": {"block_size": "x"}}, "block_size 'x'"),
        ({**good, "_data": {"block_size": [1, 300], "act_quant_kwargs": {"_data": {"granularity": listed}}}},
         'activations {"_type": "PerBlock"'),
        ({**good, "_type": "MXTensor", "_data": {"block_size": 32, "elem_dtype": mx, "is_swizzled_scales": True}},
         "swizzled scales"),
        ({**good, "_type": "MXTensor", "_data": {"block_size": 32}}, "torchao's MXTensor"),
    ):  # fmt: skip
        text = entry if isinstance(entry, str) else json.dumps(entry)
        save_file(tensors, tmp_path / "model.safetensors", {} if entry is None else {"fc.weight": text})
        refused(tmp_path, message)
