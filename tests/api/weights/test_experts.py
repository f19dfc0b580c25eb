"""Experts that files hold as one matrix each: `load_weights` joins them, and `save_weights` writes them so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.layout import Block
from support.checkpoints import run
from support.expert_models import CONFIGS
from support.fp8_weights import same, values
from support.ranks import a_rank_of

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

NAMES: Final = ("qwen3_moe", "deepseek_v3", "mixtral")
GATE: Final = {
    "qwen3_moe": "model.layers.0.mlp.experts.{}.gate_proj.weight",
    "deepseek_v3": "model.layers.0.mlp.experts.{}.gate_proj.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.{}.w1.weight",
}
UP: Final = "model.layers.0.mlp.experts.{}.up_proj.weight"
FUSED: Final = "model.layers.0.mlp.experts.gate_up_proj"
IDS: Final = torch.arange(24).view(2, 12) * 37 % 160
FILE: Final = "model.safetensors"


def initialized(name: str, **changed: Any) -> Any:
    config = CONFIGS[name]()
    for key, value in changed.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def build(name: str, **changed: Any) -> Any:
    """A model in bfloat16 with random parameters and buffers, of the types that `from_pretrained` gives them."""
    model = initialized(name, **changed)
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module.e_score_correction_bias = torch.randn(4)
    return model


def quantized(name: str, block: Block = (128, 128), **changed: Any) -> Any:
    model = build(name, **changed)
    fp8fn.quantize_weights(model, block=block)
    return model


def empty(name: str, **changed: Any) -> Any:
    with torch.device("meta"):
        return initialized(name, **changed)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS, use_cache=False).logits
    return out


def check_same(model: Any, other: Any) -> None:
    """Equal names, types and bits of two models."""
    found, wanted = (each.state_dict() for each in (model, other))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, FP8Weight):
            assert same(found[name], value), name
        else:
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
    assert torch.equal(logits(model), logits(other))


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Writes a checkpoint's tensors again with other values; None removes one. `__` stands for a dot."""
    tensors = load_file(folder / FILE)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / FILE, {"format": "pt"})


def key(name: str) -> str:
    return name.replace(".", "__")


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves_in_16_bits(name: str, tmp_path: Path) -> None:
    model, loaded = build(name), empty(name)
    model.save_pretrained(tmp_path)
    assert GATE[name].format(3) in load_file(tmp_path / FILE)
    report = fp8fn.load_weights(loaded, tmp_path)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    check_same(loaded, model)
    fp8fn.save_weights(loaded, tmp_path / "again")
    assert load_file(tmp_path / "again" / FILE).keys() == load_file(tmp_path / FILE).keys()
    with torch.inference_mode():  # in which views do not know their base
        again = empty(name)
        fp8fn.load_weights(again, tmp_path / "again")
    check_same(again, model)


def test_experts_in_several_files(tmp_path: Path) -> None:
    model, loaded = build("qwen3_moe"), empty("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({file for name, file in files.items() if ".experts." in name}) > 1
    fp8fn.load_weights(loaded, tmp_path)
    check_same(loaded, model)


@pytest.mark.parametrize("fp8", [False, True])
def test_experts_are_joined_where_the_files_are_read(fp8: bool, tmp_path: Path) -> None:
    """Not on PyTorch's default device, which may be a GPU, or meta while the model is built."""
    model = (quantized if fp8 else build)("qwen3_moe")
    fp8fn.save_weights(model, tmp_path)
    loaded = empty("qwen3_moe")
    with torch.device("meta"):
        fp8fn.load_weights(loaded, tmp_path)
    check_same(loaded, model)


@pytest.mark.parametrize("given", [None, torch.bfloat16], ids=str)
def test_what_transformers_keeps_in_float32(given: torch.dtype | None, tmp_path: Path) -> None:
    """DeepSeek-V3's correction of the router chooses experts by differences that bfloat16 does not have."""
    model, loaded, name = build("deepseek_v3"), empty("deepseek_v3"), "model.layers.0.mlp.gate.e_score_correction_bias"
    correction = model.get_buffer(name).copy_(7 + torch.arange(4) / 1024)
    fp8fn.quantize_weights(model)
    fp8fn.save_weights(model, tmp_path)
    assert loaded.get_buffer(name).dtype == torch.bfloat16
    fp8fn.load_weights(loaded, tmp_path, dtype=given)
    assert loaded.get_buffer(name).dtype == torch.float32
    assert torch.equal(loaded.get_buffer(name), correction)
    check_same(loaded, model)


@pytest.mark.parametrize("names", ["weight", nn.Linear.forward, 3, [b"weight", None]], ids=type)
def test_another_modules_attribute_of_that_name(names: Any, tmp_path: Path) -> None:
    class Own(nn.Linear):
        _keep_in_fp32_modules_strict = names

    save_file(Own(8, 4).bfloat16().state_dict(), tmp_path / FILE)
    with torch.device("meta"):
        loaded = Own(8, 4, dtype=torch.bfloat16)
    fp8fn.load_weights(loaded, tmp_path)
    assert (loaded.weight.dtype, loaded.bias.dtype) == (torch.bfloat16, torch.bfloat16)


def test_what_transformers_keeps_in_float32_beside_float16(tmp_path: Path) -> None:
    """T5's second products exceed float16, whose FP8 weights stand for float32 as in `from_pretrained`."""
    config = transformers.T5Config(
        vocab_size=160, d_model=128, d_kv=64, d_ff=256, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    fp8fn.quantize_weights(model)
    fp8fn.save_weights(model, tmp_path)
    for dtype, wanted in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        with torch.device("meta"):
            loaded = transformers.T5ForConditionalGeneration(config).eval().to(dtype)
        fp8fn.load_weights(loaded, tmp_path)
        feed_forward = loaded.encoder.block[0].layer[1].DenseReluDense
        assert (feed_forward.wo.weight.dtype, feed_forward.wi.weight.dtype) == (wanted, dtype)
        assert same(feed_forward.wo.weight, model.encoder.block[0].layer[1].DenseReluDense.wo.weight)


@pytest.mark.parametrize("name", NAMES)
def test_what_convert_writes(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "bf16")
    assert run(tmp_path / "bf16", tmp_path / "fp8") == 0
    loaded = empty(name)
    report = fp8fn.load_weights(loaded, tmp_path / "fp8")
    weight = loaded.get_parameter(FUSED)
    assert isinstance(weight, FP8Weight)
    assert (weight.shape, weight.scaled.scale.shape, weight.requires_grad) == ((4, 256, 256), (4, 2, 2), False)
    assert GATE[name].format(3) in report.layout.recipes
    check_same(loaded, quantized(name))


@pytest.mark.parametrize("name", NAMES)
def test_what_save_weights_writes_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    model, loaded = quantized(name), empty(name)
    fp8fn.save_weights(model, tmp_path / "a")
    report = fp8fn.load_weights(loaded, tmp_path / "a")
    check_same(loaded, model)
    fp8fn.save_weights(loaded, tmp_path / "b", format=report.layout)
    fp8fn.save_weights(loaded, tmp_path / "c")
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for folder in ("b", "c"):
        assert {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} == files


@pytest.mark.parametrize("name", NAMES)
def test_what_save_weights_writes_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    """It dequantizes on a CPU.

    It takes rows divided by scales as the block's rows, so that the 192 rows of DeepSeek's `kv_a_proj_with_mqa` get
    blocks of 96 rows.
    """
    model = quantized(name)
    fp8fn.save_weights(model, tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for place, wanted in model.state_dict().items():
        found = read.state_dict()[place]
        if not isinstance(wanted, FP8Weight):
            assert torch.equal(found, wanted), place
        elif wanted.shape[-2] % 128 == 0:
            assert torch.equal(found, values(wanted).bfloat16()), place
        else:
            assert "kv_a_proj" in place
    # The conversions that `from_pretrained` leaves in the model dequantize; the names are those of the files still.
    fp8fn.quantize_weights(read)
    fp8fn.save_weights(read, tmp_path / "again")
    assert load_file(tmp_path / "again" / FILE).keys() == load_file(tmp_path / FILE).keys()


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_missing_or_too_many(name: str, tmp_path: Path) -> None:
    gone, extra = GATE[name].format(2), GATE[name].format(4)
    fp8fn.save_weights(build(name), tmp_path)
    edit(tmp_path, **{key(gone): None, key(extra): torch.ones(128, 256, dtype=torch.bfloat16)})
    loaded = empty(name)
    message = f'Missing key(s) in state_dict: "{gone}". \n\tUnexpected key(s) in state_dict: "{extra}". '
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fp8fn.load_weights(loaded, tmp_path)
    report = fp8fn.load_weights(loaded, tmp_path, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == ([gone], [extra])
    assert loaded.get_parameter(FUSED).is_meta
    assert not loaded.get_parameter(FUSED.replace("gate_up", "down")).is_meta


def test_another_shape(tmp_path: Path) -> None:
    fp8fn.save_weights(build("qwen3_moe"), tmp_path)
    edit(tmp_path, **{key(UP.format(1)): torch.ones(120, 256, dtype=torch.bfloat16)})
    message = rf"size mismatch for {re.escape(UP.format(1))}: .*\[120, 256\].*\[128, 256\]"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            fp8fn.load_weights(empty("qwen3_moe"), tmp_path, strict=strict)


def test_blocks_that_cross_from_gate_to_up(tmp_path: Path) -> None:
    """192 rows of each: the second block of 128 rows has both."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 192}
    build("qwen3_moe", **sizes).save_pretrained(tmp_path / "bf16")
    assert run(tmp_path / "bf16", tmp_path / "fp8") == 0
    reason = rf"{re.escape(UP.format(0))} is the piece of {FUSED} that begins at its row 192, inside a block of"
    with pytest.raises(ValueError, match=f"load_weights: {reason}"):
        fp8fn.load_weights(empty("qwen3_moe", **sizes), tmp_path / "fp8")
    with pytest.raises(ValueError, match=f"save_weights: {reason}"):
        fp8fn.save_weights(quantized("qwen3_moe", **sizes), tmp_path / "again")
    assert run(tmp_path / "bf16", tmp_path / "rows", "--block=1,128") == 0  # the remedy of both messages
    loaded = empty("qwen3_moe", **sizes)
    fp8fn.load_weights(loaded, tmp_path / "rows")
    check_same(loaded, quantized("qwen3_moe", (1, 128), **sizes))
    assert run(tmp_path / "fp8", tmp_path / "converted", "--block=1,128") == 0
    fp8fn.load_weights(empty("qwen3_moe", **sizes), tmp_path / "converted")


def test_one_scale_for_gate_and_up(tmp_path: Path) -> None:
    model, loaded = quantized("qwen3_moe", (-1, -1)), empty("qwen3_moe")
    fp8fn.save_weights(model, tmp_path)
    fp8fn.load_weights(loaded, tmp_path)
    check_same(loaded, model)
    edit(tmp_path, **{key(UP.format(1) + "_scale_inv"): torch.tensor(2.0)})
    message = f"{GATE['qwen3_moe'].format(1)} and {UP.format(1)} belong to {FUSED} and have different scales"
    with pytest.raises(ValueError, match=re.escape(message)):
        fp8fn.load_weights(empty("qwen3_moe"), tmp_path)


def test_experts_of_two_types(tmp_path: Path) -> None:
    fp8fn.save_weights(quantized("qwen3_moe"), tmp_path)
    name = UP.format(2)
    edit(tmp_path, **{key(name): torch.ones(128, 256, dtype=torch.bfloat16), key(name + "_scale_inv"): None})
    message = rf"is e4m3fn in blocks of \(128, 128\) with scales in float32 and {re.escape(name)} is bfloat16"
    with pytest.raises(ValueError, match=message):
        fp8fn.load_weights(empty("qwen3_moe"), tmp_path)


def test_one_expert(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 1, "num_experts_per_tok": 1}
    model, loaded = quantized("qwen3_moe", **sizes), empty("qwen3_moe", **sizes)
    fp8fn.save_weights(model, tmp_path)
    fp8fn.load_weights(loaded, tmp_path)
    check_same(loaded, model)


@pytest.mark.parametrize("rank", range(2))
def test_sharded_on_the_meta_device(rank: int, tmp_path: Path) -> None:
    """FSDP gives the model another class, and each rank two of four experts."""
    model: Any = quantized("mixtral")
    fp8fn.save_weights(model, tmp_path)
    with a_rank_of(2, rank):
        loaded = empty("mixtral")
        fully_shard(loaded)
        fp8fn.load_weights(loaded, tmp_path)
        for place in (FUSED, FUSED.replace("gate_up", "down")):
            local = loaded.get_parameter(place).to_local()
            assert same(local, model.get_parameter(place)[2 * rank : 2 * rank + 2])


def test_fused_names_in_a_file(tmp_path: Path) -> None:
    """Files that hold a parameter under its own name are read, too."""
    model, loaded = build("mixtral"), empty("mixtral")
    save_file(model.state_dict(), tmp_path / FILE)
    fp8fn.load_weights(loaded, tmp_path)
    check_same(loaded, model)


def test_other_modules_keep_their_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].register_parameter("gate_up_proj", nn.Parameter(torch.randn(2, 256, 128)))
    fp8fn.quantize_weights(model, "*")
    fp8fn.save_weights(model, tmp_path)
    assert load_file(tmp_path / FILE).keys() == {"experts.gate_up_proj", "experts.gate_up_proj_scale_inv"}


def test_a_version_of_transformers_that_names_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model without experts needs no names; one with experts would be misread."""
    monkeypatch.delattr("transformers.core_model_loading.revert_weight_conversion")
    with pytest.raises(NotImplementedError, match=r"does not say how files name the experts of Qwen3MoeForCausalLM"):
        fp8fn.save_weights(quantized("qwen3_moe"), tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    fp8fn.save_weights(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
