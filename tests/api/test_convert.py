"""`python -m fp8fn convert`: values, what is chosen, refusals, and how transformers reads the result."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fp8fn
from fp8fn.checkpoint.conversion import write
from fp8fn.checkpoint.conversion.convert import convert
from fp8fn.checkpoint.conversion.options import Options
from fp8fn.checkpoint.formats import FORMATS

pytest.importorskip("safetensors")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support.accuracy import snr
from support.checkpoints import checkpoint, content, run, scaled

E4M3 = torch.float8_e4m3fn


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.double(), b.double())


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 200), min_size=2, max_size=2),
    experts=st.integers(0, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    block=st.sampled_from([(128, 128), (1, 128), (1, 32)]),
    scale=st.sampled_from(["fp32", "pow2"]),
    seed=st.integers(0, 2**31),
)
def test_what_is_written_is_what_quantize_gives(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], experts: int, dtype: torch.dtype, block: Any,
    scale: Any, seed: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("convert")
    x = torch.randn(*(experts,) * bool(experts), *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    others = {"a": torch.tensor(3), "b": torch.empty(0, 3), "odd": torch.arange(5, dtype=torch.int8)}
    save_file({"w": x, **others}, folder / "in.safetensors")
    options = Options(block, scale, include=("w",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "LEAST_SNR_DB", 20.0)  # one number may be rounded by 1/16 of itself, 24 dB
        convert(folder / "in.safetensors", folder / "out", options)
    expected = fp8fn.quantize(x, block, dtype=E4M3, scale=scale)
    written = load_file(folder / "out" / "in.safetensors")
    assert same(written["w"], expected.data)
    assert same(written["w_scale_inv"], expected.scale)
    assert all(same(written[name], tensor) for name, tensor in others.items())
    assert len(written) == 5
    loaded = scaled(fp8fn.load_blockwise(folder / "out")["w"])
    assert torch.equal(fp8fn.dequantize(loaded), fp8fn.dequantize(expected))


def test_slices_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 700, 200).bfloat16()
    save_file({"experts.weight": x, "vector": torch.randn(1000)}, tmp_path / "in.safetensors")
    monkeypatch.setattr(write, "_SLICE", 300 * 200)
    monkeypatch.setattr(write, "_COPY", 64)
    convert(tmp_path / "in.safetensors", tmp_path / "out", Options())
    written, expected = load_file(tmp_path / "out" / "in.safetensors"), fp8fn.quantize(x, (128, 128), dtype=E4M3)
    assert same(written["experts.weight"], expected.data)
    assert same(written["experts.weight_scale_inv"], expected.scale)
    assert torch.equal(written["vector"], load_file(tmp_path / "in.safetensors")["vector"])


def test_a_sharded_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "worst weights" in text
    assert "layers.0.up.weight" in text
    assert "6 weights in FP8, 3 tensors as they were" in text
    assert "3 files, 3 written now, 0 complete before" in text
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    beside = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*shards, *beside])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["layers.1.up.weight_scale_inv"] == shards[1]
    assert index["metadata"] == {"total_size": 3 * (2 * (60000 + 6 * 4) + 602), "total_parameters": 5}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "other",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }
    with safe_open(str(tmp_path / "out" / shards[0]), "pt") as file:
        metadata = file.metadata()
        assert (metadata["format"], metadata["by"]) == ("pt", "a test")
    loaded = fp8fn.load_blockwise(tmp_path / "out")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            value = loaded[name]
            assert isinstance(value, Tensor)
            assert torch.equal(value, tensor)
        else:
            assert 30 < fp8fn.error(tensor, scaled(loaded[name])).snr_db < 33


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(129, 131).half(), "b": torch.ones(3), "c": torch.ones(5, dtype=torch.int8)}
    save_file(tensors, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out", Options())
    with (tmp_path / "out" / "in.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert length % 8 == 0
    sizes = {"F32": 4, "I8": 1, "F8_E4M3": 1}
    del header["__metadata__"]
    assert [entry["data_offsets"][0] % sizes[entry["dtype"]] for entry in header.values()] == [0] * 4


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (128, 128), True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 300), True),
        ("model.layers.3.mlp.experts.17.gate_proj.weight", (128, 300), True),
        ("experts.weight", (2, 128, 128), True),
        ("model.layers.3.mlp.experts.gate_up_proj", (2, 256, 128), True),
        ("model.layers.3.mlp.experts.down_proj", (2, 128, 127), False),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (2, 128, 128), False),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (128, 128), False),
        ("model.position_embeddings", (1, 512, 128), False),
        ("lstm.weight_ih_l0", (512, 128), False),
        ("conv1d.weight", (256, 128, 4), False),
        ("q_proj.weight", (127, 128), False),
        ("q_proj.weight", (128, 127), False),
        ("q_proj.weight", (1, 1, 128, 128), False),
        ("q_proj.weight", (128,), False),
        ("q_proj.bias", (128, 128), False),
        ("model.embed_tokens.weight", (512, 128), False),
        ("embeddings.word_embeddings.weight", (512, 128), False),
        ("transformer.wte.weight", (512, 128), False),
        ("lm_head.weight", (512, 128), False),
        ("model.layers.3.mlp.gate.weight", (256, 512), False),
        ("model.layers.3.router.weight", (256, 512), False),
        ("model.layers.3.input_layernorm.weight", (256, 512), False),
    ],
)
def test_what_is_converted_by_default(name: str, shape: tuple[int, ...], taken: bool) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert Options().take(name, x) is taken
    assert not Options(exclude=("*.weight", "*.bias", "*_proj")).take(name, x)
    assert Options(include=("*",)).take(name, x) is (x.ndim in (2, 3))
    assert not Options().take(name, x.int())


def test_convert_and_quantize_weights_take_the_same_experts(tmp_path: Path) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("gate_up_proj", (2, 256, 128)), ("down_proj", (2, 128, 128)), ("small", (2, 128, 64))):
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
            self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(2, 256))

    model = torch.nn.ModuleDict({"experts": Experts(), "up": torch.nn.Linear(128, 256)})
    save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out", Options())
    loaded = fp8fn.load_blockwise(tmp_path / "out" / "in.safetensors")
    report = fp8fn.quantize_weights(model)
    assert set(report.quantized) == {"experts.gate_up_proj", "experts.down_proj", "up.weight"}
    for name, p in model.named_parameters():
        value = loaded[name]
        assert isinstance(value, fp8fn.ScaledTensor) == (name in report.quantized), name
        dense = [x.dequantize(torch.float32) if name in report.quantized else x for x in (value, p)]
        assert torch.equal(*dense), name


def test_names_that_clash_with_a_weights_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for format, name, words in (
        ("torchao", "a._weight_scale", "the scales of a.weight"),
        ("compressed-tensors", "a.input_scale", "the scale of activations of a.weight"),
    ):
        save_file({"a.weight": torch.randn(128, 128), name: torch.ones(3)}, tmp_path / "in.safetensors")
        assert run(tmp_path / "in.safetensors", tmp_path / "out", "--format", format) == 1
        error = capsys.readouterr().err
        assert f"in.safetensors: {name} is a tensor of its own, and the name of {words} in '{format}'" in error
        assert not (tmp_path / "out").exists()


def test_include_and_exclude(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    include, exclude = ("--include", "layers.*.up.weight", "layers.1.*"), ("--exclude", "layers.0.*")
    assert run(tmp_path / "in", tmp_path / "out", *include, *exclude) == 0
    loaded = fp8fn.load_blockwise(tmp_path / "out")
    converted = [name for name, value in loaded.items() if isinstance(value, fp8fn.ScaledTensor)]
    assert sorted(converted) == ["layers.1.down.weight", "layers.1.up.weight", "layers.2.up.weight"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    assert sorted(left) == ["layers.0.down", "layers.0.up", "layers.2.down", "lm_head"]
    assert run(tmp_path / "in", tmp_path / "none", "--include", "nothing*") == 1
    assert "no tensor is a linear layer's weight by these options" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_each_pattern_that_matches_no_tensor_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path / "in")
    options = ("--include", "layers.*.up.weight", "layrs.1.*", "--exclude", "layers.0.*", "head.*")
    assert run(tmp_path / "in", tmp_path / "out", *options) == 0
    found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "fp8fn"]
    assert [level for level, _ in found] == ["WARNING", "WARNING"]
    (_, include), (_, exclude) = found
    assert include.startswith(
        "convert: --include: 'layrs.1.*' matches no tensor; nearest names: 'layers.*.up.weight', "
    )
    assert exclude.startswith("convert: --exclude: 'head.*' matches no tensor; nearest names: ")


def test_one_file_takes_only_the_config_beside_it(tmp_path: Path) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in" / "model-00002-of-00003.safetensors", tmp_path / "out", "--block", "1,128") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model-00002-of-00003.safetensors"]
    assert scaled(fp8fn.load_blockwise(tmp_path / "out")["layers.1.up.weight"]).block == (1, 128)


# SNR.


def test_a_weight_that_fp8_cannot_hold_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values under the least scale, which are flushed."""
    bad_file, out = tmp_path / "in.safetensors", tmp_path / "out"
    save_file({"good.weight": torch.randn(128, 128), "bad.weight": 1e-17 * torch.randn(128, 128)}, bad_file)
    assert run(bad_file, out) == 1
    message = capsys.readouterr().err
    assert "in.safetensors: tensor 'bad.weight' has " in message
    assert "--exclude 'bad.weight'" in message
    assert not out.exists()
    assert run(bad_file, out, "--exclude", "bad.weight") == 0
    before = content(out)
    assert run(bad_file, out, "--overwrite") == 1
    assert content(out) == before


def test_zeros_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"zeros.weight": torch.zeros(256, 256)}, tmp_path / "in.safetensors")
    assert run(tmp_path / "in.safetensors", tmp_path / "out") == 0
    assert "inf" in capsys.readouterr().out
    zeros = fp8fn.load_blockwise(tmp_path / "out")["zeros.weight"]
    assert fp8fn.dequantize(scaled(zeros)).count_nonzero() == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_weight_with_nan_or_inf_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: float) -> None:
    """Its block would have a scale that `load_blockwise` refuses."""
    good, bad = torch.randn(256, 256), torch.randn(256, 256)
    bad[200, 0] = broken
    save_file({"good.weight": good, "bad.weight": bad}, tmp_path / "in.safetensors")
    assert run(tmp_path / "in.safetensors", tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert "in.safetensors: tensor 'bad.weight' has NaN or Inf, for whose blocks there is no scale; leave it" in message
    assert "--exclude 'bad.weight'" in message
    assert not (tmp_path / "out").exists()
    assert run(tmp_path / "in.safetensors", tmp_path / "out", "--exclude", "bad.weight") == 0
    assert torch.equal(fp8fn.load_blockwise(tmp_path / "out")["bad.weight"], bad) is not math.isnan(broken)


def test_an_fp8_weight_with_nan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where its bytes are kept and nothing is computed."""
    q = fp8fn.quantize(torch.randn(256, 256), (128, 128), dtype=E4M3)
    q.data.view(torch.uint8)[200, 0] = 0xFF
    save_file({"bad.weight": q.data, "bad.weight_scale_inv": q.scale.contiguous()}, tmp_path / "in.safetensors")
    for block in ("128,128", "1,128"):
        assert run(tmp_path / "in.safetensors", tmp_path / "out", f"--block={block}") == 1
        message = capsys.readouterr().err
        assert "in.safetensors: tensor 'bad.weight' has NaN or Inf" in message
        assert "--exclude" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("block", "format", "scale"), [
    ((128, 128), "deepseek", "pow2"), ((1, 32), "deepseek", "e8m0"), ((1, 32), "modelopt", None),
])  # fmt: skip
def test_the_scales_of_an_fp8_source_become_powers_of_two(block: Any, format: str, scale: Any, tmp_path: Path) -> None:
    """Where the options or the format ask for them; scales that are powers already keep the bytes."""
    q = fp8fn.quantize(torch.randn(256, 256), block, dtype=E4M3)
    save_file({"a.weight": q.data, "a.weight_scale_inv": q.scale.contiguous()}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out", Options(None, scale, format=format))
    made = scaled(fp8fn.load_blockwise(tmp_path / "out")["a.weight"])
    values = made.scale.float()
    assert torch.equal(values.log2(), values.log2().round())
    assert snr(made.dequantize(torch.float32), q.dequantize(torch.float32)) > 28
    convert(tmp_path / "out", tmp_path / "again", Options(None, scale, format=format))
    assert same(scaled(fp8fn.load_blockwise(tmp_path / "again")["a.weight"]).data, made.data)


def test_fp8_weights_that_are_left_keep_their_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {}
    for name in ("a", "b"):
        q = fp8fn.quantize(torch.randn(256, 256), (128, 128), dtype=E4M3)
        stored |= {f"{name}.weight": q.data, f"{name}.weight_scale_inv": q.scale.contiguous()}
    save_file(stored, tmp_path / "in.safetensors")
    for number, patterns in enumerate((("--exclude", "b.weight"), ("--include", "a.weight"))):
        out = tmp_path / str(number)
        options = ("--format", "compressed-tensors", "--block=1,128", "--scale", "pow2", *patterns)
        assert run(tmp_path / "in.safetensors", out, *options) == 0
        made = fp8fn.load_blockwise(out)
        assert scaled(made["a.weight"]).block == (1, 128)
        assert scaled(made["b.weight"]).block == (128, 128)
        assert same(scaled(made["b.weight"]).data, stored["b.weight"])
        assert same(scaled(made["b.weight"]).scale, stored["b.weight_scale_inv"])
    assert run(tmp_path / "in.safetensors", tmp_path / "c", "--block=1,128", "--exclude", "b.weight") == 1
    assert "declares one block for all weights; use 'compressed-tensors'" in capsys.readouterr().err


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_experts_in_every_block(format: str, in_fp8: bool, tmp_path: Path) -> None:
    """Their scales differ, and are read back with the data, which `Verified` is computed from before it is written."""
    x = torch.randn(3, 256, 384) * torch.tensor([0.01, 1.0, 30.0])[:, None, None]
    stored = {"e.up": x}
    if in_fp8:
        q = fp8fn.quantize(x, (-1, -1), dtype=E4M3)
        x = q.dequantize(torch.float32)
        stored = {"e.up": q.data.contiguous(), "e.up_scale_inv": q.scale.contiguous()}
    save_file(stored, tmp_path / "in.safetensors")
    blocks = [block for block, form in FORMATS[format].forms.items() if not form.static]
    for number, block in enumerate(blocks):
        convert(tmp_path / "in.safetensors", tmp_path / str(number), Options(block, include=("e.up",), format=format))
        made = scaled(fp8fn.load_blockwise(tmp_path / str(number))["e.up"])
        assert made.block == block
        for one, other in zip(made.dequantize(torch.float32), x, strict=True):
            assert snr(one, other) > 28


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 256, 256)], ids=str)
@pytest.mark.parametrize("block", [(1, -1), (128, 128)], ids=str)
def test_fp8_weights_without_elements(shape: tuple[int, ...], block: Any, tmp_path: Path) -> None:
    """Such as experts that are all on other ranks."""
    q = fp8fn.quantize(torch.empty(shape), (-1, -1), dtype=E4M3)
    save_file({"a.weight": q.data, "a.weight_scale_inv": q.scale.contiguous()}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out", Options(block, format="compressed-tensors"))
    made = scaled(fp8fn.load_blockwise(tmp_path / "out")["a.weight"])
    assert (made.shape, made.block) == (shape, block)


# Refusals.


def test_the_input_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    before = content(tmp_path / "in")
    for source in (tmp_path / "in", tmp_path / "in" / "model-00001-of-00003.safetensors"):
        assert run(source, tmp_path / "in" / ".." / "in", "--overwrite") == 1
        assert "is the folder of the input" in capsys.readouterr().err
    assert content(tmp_path / "in") == before


@pytest.mark.parametrize("name", list(FORMATS))
def test_from_one_format_to_another(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes stay where the block does; else the weight is quantized again and compared."""
    checkpoint(tmp_path / "in")
    form = FORMATS[name].forms
    block = next(block for block in form if not form[block].static)
    argv = ("--format", name, f"--block={','.join(map(str, block))}", "--include", "up.weight", "down.weight")
    assert run(tmp_path / "in", tmp_path / "a", *argv) == 0
    first = fp8fn.load_blockwise(tmp_path / "a")
    assert scaled(first["layers.0.up.weight"]).block == block
    x = load_file(tmp_path / "in" / "model-00001-of-00003.safetensors")["layers.0.up.weight"]
    direct = fp8fn.quantize(x, block, dtype=E4M3, scale="e8m0" if block == (1, 32) else "fp32")
    assert same(scaled(first["layers.0.up.weight"]).data, direct.data)
    able = next(other for other, format in FORMATS.items() if block in format.forms and other != name)
    assert run(tmp_path / "a", tmp_path / "b", "--format", able) == 0
    second = fp8fn.load_blockwise(tmp_path / "b")
    assert first.keys() - second.keys() == set(FORMATS[name].markers)
    for key in first.keys() & second.keys():
        value, other = first[key], second[key]
        if isinstance(value, fp8fn.ScaledTensor):
            value, other = value.data, scaled(other).data
        assert isinstance(other, Tensor)
        assert same(value, other)
    assert run(tmp_path / "b", tmp_path / "c", "--format", "compressed-tensors", "--block=1,-1") == 0
    again = scaled(fp8fn.load_blockwise(tmp_path / "c")["layers.0.up.weight"])
    assert again.block == (1, -1)
    assert snr(fp8fn.dequantize(again, torch.float32), fp8fn.dequantize(direct, torch.float32)) > 25
    capsys.readouterr()


@pytest.mark.parametrize("format", FORMATS)
def test_a_static_scale_stays_where_the_format_has_one(format: str, tmp_path: Path) -> None:
    """A server refuses it, or never reads it, beside weights in blocks along K: their activations are dynamic."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(256, 256)})
    fp8fn.quantize_weights(model, block=(-1, -1))
    fp8fn.save_weights(model, tmp_path / "in", format="modelopt", input_scales={"fc.weight": 0.5})
    for number, block in enumerate(FORMATS[format].forms):
        convert(tmp_path / "in", tmp_path / str(number), Options(block, format=format))
        layout = fp8fn.load_weights(model, tmp_path / str(number)).layout
        activations = layout.weights["fc.weight"].activations
        static = block == (-1, -1) or (format, block) == ("compressed-tensors", (1, -1))
        assert (activations is not None and activations.static) == static
        assert set(layout.input_scales) == ({"fc.weight"} if static else set())
        config = json.loads((tmp_path / str(number) / "config.json").read_text()) if format != "comfy" else {}
        declared = config.get("quantization_config", {}).get("activation_scheme")
        assert declared in (None, "static" if static else "dynamic")


@pytest.mark.parametrize("target", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize("block", [None, (128, 128)], ids=str)
def test_activations_that_stay_in_16_bits_stay_so(target: str, block: Any, tmp_path: Path) -> None:
    """A server would else multiply what has FP8 weights alone by FP8 activations."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(256, 256)})
    fp8fn.quantize_weights(model, block=(1, -1))
    fp8fn.save_weights(model, tmp_path / "in", format="compressed-tensors")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for name, inputs in (("dynamic", {}), ("16 bits", None)):
        if inputs is None:
            config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
            (tmp_path / "in" / "config.json").write_text(json.dumps(config))
        convert(tmp_path / "in", tmp_path / name, Options(block, format=target))
        layout = fp8fn.load_weights(model, tmp_path / name).layout
        assert (layout.recipes["fc.weight"] is None) == (inputs is None)


@pytest.mark.parametrize("source", ["deepseek", "scaled_fp8"])
def test_the_marker_by_which_comfyui_knows_scaled_files(source: str, tmp_path: Path) -> None:
    """Without the tensor, it multiplies by the FP8 data alone. `save_weights` writes the same tensors."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(128, 128)})
    fp8fn.quantize_weights(model, block=(-1, -1))
    fp8fn.save_weights(model, tmp_path / "a", format=source)
    fp8fn.save_weights(model, tmp_path / "b", format="scaled_fp8")
    convert(tmp_path / "a", tmp_path / "c", Options(format="scaled_fp8"))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "bc")
    assert first.keys() == second.keys()
    assert all(same(value, second[name]) and value.shape == second[name].shape for name, value in first.items())


def test_a_scheme_that_is_not_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert run(tmp_path / "in", tmp_path / "again") == 1
    assert "quant_method 'awq'" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("length", [0, 7, 100, 5000])
def test_a_damaged_input_is_named(tmp_path: Path, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    os.truncate(tmp_path / "in" / "model-00003-of-00003.safetensors", length)
    assert run(tmp_path / "in", tmp_path / "out") == 1
    assert "model-00003-of-00003.safetensors: no whole safetensors file: it ends after" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_index_that_disagrees_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    index = tmp_path / "in" / "model.safetensors.index.json"
    changed = json.loads(index.read_text())
    changed["weight_map"]["gone"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps(changed))
    assert run(tmp_path / "in", tmp_path / "out") == 1
    assert "tensor 'gone' is said to be in 'model-00002-of-00003.safetensors'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("block", [(128.0, 128.0), (True, 128), (64, 64), (128, 1), [128, 128], 128])
def test_a_block_is_one_of_a_weight_s(block: Any) -> None:
    with pytest.raises(ValueError, match=r"is no block of a weight \(N, K\); it must be one of") as error:
        Options(block)
    assert f"block={block!r} is no block" in str(error.value)


def test_a_block_that_the_format_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option that serves: the command has no `input_scales`."""
    save_file({"a.weight": torch.randn(128, 128)}, tmp_path / "model.safetensors")
    assert run(tmp_path, tmp_path / "out", "--format", "comfy", "--block=128,128") == 2
    wrong = "argument --block: block=(128, 128) is no block of 'comfy'; it must be one of [(-1, -1)]"
    assert wrong in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "square") == run(tmp_path, tmp_path / "whole", "--block=-1,-1") == 0
    for source, format, remedy in (
        ("square", "mxfp8", "or 'torchao', or quantize it in --block=1,32\n"),
        (
            "whole",
            "modelopt",
            "use another format, or quantize it in --block=128,128 or --block=1,32 or --block=1,-1\n",
        ),
    ):
        assert run(tmp_path / source, tmp_path / format, "--format", format) == 1
        assert capsys.readouterr().err.endswith(remedy)
        block = remedy.split()[-1]
        assert run(tmp_path / source, tmp_path / format, "--format", format, block) == 0


@pytest.mark.parametrize("include", [(), ("lm_head.weight", "layer.weight")])
def test_the_head_is_named_as_left_unless_it_is_converted(tmp_path: Path, include: tuple[str, ...]) -> None:
    tensors = {"lm_head.weight": torch.randn(256, 128), "layer.weight": torch.randn(128, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    convert(tmp_path / "model.safetensors", tmp_path / "out", Options(include=include))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ([] if include else ["lm_head"])
    with safe_open(str(tmp_path / "out" / "model.safetensors"), "pt") as file:
        assert ("lm_head.weight_scale_inv" in file.keys()) is bool(include)  # noqa: SIM118


def test_what_the_system_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "in")
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "in", tmp_path / "file") == 1
    assert capsys.readouterr().err.endswith(f"convert: {tmp_path / 'file'} is a file; name a folder for the output\n")
    assert run(tmp_path / "in", tmp_path / "file" / "out") == 1
    assert capsys.readouterr().err.endswith(f"convert: {tmp_path / 'file' / 'out'}: Not a directory\n")
    assert run(tmp_path / "in", tmp_path / ("a" * 300)) == 1
    assert capsys.readouterr().err.endswith(f"convert: {tmp_path / ('a' * 300)}: File name too long\n")
    assert run("Qwen/Qwen3-8B", tmp_path / "out") == 1
    assert "hf download Qwen/Qwen3-8B --local-dir Qwen/Qwen3-8B" in capsys.readouterr().err


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "--overwrite" in capsys.readouterr().out
    assert run(tmp_path, tmp_path / "out", "--block", "64,64") == 2
    assert "'64,64' is no block of a weight N,K; choose from 128,128" in capsys.readouterr().err
    assert run(tmp_path / "gone", tmp_path / "out") == 1
    assert "gone does not exist" in capsys.readouterr().err


# A model of transformers.


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small Llama in bf16, and its converted checkpoint."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder / "in", max_shard_size="1MB")
    assert run(folder / "in", folder / "out") == 0
    return model, folder / "out"


def test_a_layer_of_a_model(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    loaded = fp8fn.load_blockwise(folder)
    parameters = dict(model.named_parameters())
    assert set(loaded) == set(parameters)
    converted = {name for name, value in loaded.items() if isinstance(value, fp8fn.ScaledTensor)}
    assert converted == {name for name in parameters if "_proj.weight" in name}
    x = torch.randn(5, 256).bfloat16()
    name = "model.layers.1.mlp.up_proj.weight"
    w = scaled(loaded[name])
    expected = (x.float() @ fp8fn.dequantize(w, torch.float32).T).bfloat16()
    torch.testing.assert_close(fp8fn.gemm(x, w.mT), expected)
    assert fp8fn.error(x @ parameters[name].T, fp8fn.gemm(x, w.mT)).snr_db > 30


def test_transformers_loads_the_result(llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it dequantizes, and demands accelerate, which it does not use.

    It takes a block to be a size divided by its number of scales: the model's sizes are multiples of 128.
    """
    _, folder = llama
    from transformers import LlamaForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    if not hasattr(quantizer_finegrained_fp8, "is_accelerate_available"):
        pytest.skip("this version of transformers asks for accelerate elsewhere")
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    model, found = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    if torch.cuda.is_available():
        pytest.skip("on a GPU it keeps FP8, in layers that this test does not compare")
    loaded = fp8fn.load_blockwise(folder)
    for name, parameter in model.named_parameters():
        value = loaded[name]
        expected = fp8fn.dequantize(value) if isinstance(value, fp8fn.ScaledTensor) else value
        assert torch.equal(parameter, expected), name
