"""Models that `save_weights` must refuse before it writes: names that clash, and tensors that no file can hold."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8fn
from fp8fn import FP8Weight
from fp8fn.checkpoint.conversion.convert import convert
from fp8fn.checkpoint.conversion.options import Options
from fp8fn.ops.layout import Block
from support.fp8_weights import make

pytest.importorskip("safetensors")
from safetensors.torch import load_file

# Each format with a block that it can write.
FORMATS: dict[str, Block] = {
    "deepseek": (128, 128), "autofp8": (-1, -1), "mxfp8": (1, 32), "compressed-tensors": (1, -1), "modelopt": (1, -1),
    "torchao": (1, -1), "scaled_fp8": (-1, -1), "comfy": (-1, -1),
}  # fmt: skip


class Model(nn.Module):
    """A linear layer in FP8, a norm, and parameters of any names."""

    def __init__(self, block: Block = (128, 128), own: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128, bias=False)
        self.norm = nn.LayerNorm(128, bias=False)
        self.attn = nn.Module()
        fp8fn.quantize_weights(self, block=block, scale="e8m0" if block == (1, 32) else "fp32")
        for name, value in (own or {}).items():
            module, _, leaf = name.rpartition(".")
            self.get_submodule(module).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def refused(model: nn.Module, folder: Path, message: str, error: type[Exception] = ValueError, **options: Any) -> None:
    """The error names the tensors, and nothing is written."""
    with pytest.raises(error, match=re.escape(message)):
        fp8fn.save_weights(model, folder, **options)
    assert not list(folder.glob("*"))


@pytest.mark.parametrize("format", FORMATS)
def test_scales_of_the_models_own_are_loaded_again(format: str, tmp_path: Path) -> None:
    """`logit_scale` has a form of its own in no format, beside a `logit` or alone."""
    own = {
        "logit": torch.randn(3), "logit_scale": torch.randn(3), "attn.k": torch.randn(2, 2).bfloat16(),
        "attn.k_scale": torch.randn(2), "attn.v_scale": torch.zeros(()), "attn.temperature_scale": torch.randn(4),
    }  # fmt: skip
    model = Model(FORMATS[format], own)
    fp8fn.save_weights(model, tmp_path, format=format)
    empty = Model(FORMATS[format], {name: torch.zeros_like(value) for name, value in own.items()})
    result = fp8fn.load_weights(empty, tmp_path)
    assert result.layout.format == format
    assert result.layout.input_scales == {}
    for name, value in model.named_parameters():
        assert torch.equal(_plain(empty.get_parameter(name)), _plain(value)), name
    fp8fn.save_weights(empty, tmp_path / "again", format=result.layout)
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys()
    for name, stored in first.items():
        assert torch.equal(_plain(stored), _plain(second[name])), name


def _plain(x: Tensor) -> Tensor:
    dense = x.dequantize(torch.float32) if isinstance(x, FP8Weight) else x.detach()
    return dense.view(torch.uint8) if dense.element_size() == 1 else dense


@pytest.mark.parametrize(
    ("format", "name", "words"),
    [
        ("deepseek", "fc.weight_scale_inv", "the name of the scales of fc.weight in 'deepseek'"),
        ("deepseek", "fc.weight_scale", "'autofp8' would name the scales of fc.weight so"),
        ("deepseek", "fc.scale_weight", "'scaled_fp8' would name the scales of fc.weight so"),
        ("deepseek", "fc.activation_scale", "the name of the scale of activations of fc.weight"),
        ("deepseek", "norm.weight_scale_inv", "'deepseek' reads it as scales of norm.weight"),
        ("deepseek", "attn.weight_scale_inv", "'deepseek' reads it as scales of attn.weight"),
        ("compressed-tensors", "fc.weight_scale", "the name of the scales of fc.weight"),
        ("compressed-tensors", "fc.weight_scale_inv", "'deepseek' would name the scales of fc.weight so"),
        ("compressed-tensors", "fc.input_scale", "the name of the scale of activations of fc.weight"),
        ("compressed-tensors", "norm.weight_scale", "'compressed-tensors' reads it as scales of norm.weight"),
        ("modelopt", "fc.weight_scale", "the name of the scales of fc.weight in 'modelopt'"),
        ("comfy", "fc.weight_scale", "the name of the scales of fc.weight in 'comfy'"),
        ("autofp8", "fc.weight_scale", "the name of the scales of fc.weight in 'autofp8'"),
        ("mxfp8", "fc.weight_scale_inv", "the name of the scales of fc.weight in 'mxfp8'"),
        ("torchao", "fc._weight_qdata", "the name of the data of fc.weight in 'torchao'"),
        ("torchao", "fc._weight_scale", "the name of the scales of fc.weight in 'torchao'"),
        ("torchao", "attn._k_scale", "'torchao' reads it as scales of attn._k_qdata"),
        ("scaled_fp8", "fc.scale_weight", "the name of the scales of fc.weight in 'scaled_fp8'"),
        ("scaled_fp8", "scaled_fp8", "the name of the marker of 'scaled_fp8'"),
    ],
)
def test_a_name_of_a_weights_part_is_refused(format: str, name: str, words: str, tmp_path: Path) -> None:
    model = Model(FORMATS[format], {name: torch.full((128, 1), 3.0)})
    refused(model, tmp_path, f"save_weights: {name} is a tensor of its own, and {words}", format=format)


def test_parts_of_two_weights_with_one_name_are_refused(tmp_path: Path) -> None:
    model = nn.ParameterDict({name: nn.Parameter(make(128, 128), False) for name in ("a", "a_scale_inv")})
    refused(model, tmp_path, "the scales of a in 'deepseek' and the data of a_scale_inv in 'deepseek' would both be")


@pytest.mark.parametrize("beside", [False, True])
def test_an_fp8_weight_in_two_parameters_is_saved(beside: bool, tmp_path: Path) -> None:
    """As of transformers' own FP8 layers, alone or beside an `FP8Weight`."""
    data, scale = torch.randn(128, 128).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    model = Model() if beside else nn.Module()
    for name, value in (("weight", data), ("weight_scale_inv", scale)):
        model.register_parameter(name, nn.Parameter(value, requires_grad=False))
    fp8fn.save_weights(model, tmp_path)
    loaded = fp8fn.load_blockwise(tmp_path)["weight"]
    assert isinstance(loaded, fp8fn.ScaledTensor)
    assert torch.equal(loaded.dequantize(torch.float32), data.float() / 2)


def test_a_module_may_own_the_scale_of_activations_that_the_checkpoint_has(tmp_path: Path) -> None:
    model = Model((-1, -1))
    fp8fn.save_weights(model, tmp_path / "a", format="modelopt", input_scales={"fc.weight": 0.5})
    owner = Model((-1, -1), {"fc.input_scale": torch.zeros(())})
    layout = fp8fn.load_weights(owner, tmp_path / "a").layout
    assert owner.get_parameter("fc.input_scale").item() == 0.5
    owner.get_parameter("fc.input_scale").fill_(0.25)
    fp8fn.save_weights(owner, tmp_path / "b", format=layout)
    assert load_file(tmp_path / "b" / "model.safetensors")["fc.input_scale"].item() == 0.25
    refused_scale = {"fc.weight": 0.125}
    with pytest.raises(ValueError, match=r"fc\.input_scale is a tensor of its own"):
        fp8fn.save_weights(owner, tmp_path / "c", format=layout, input_scales=refused_scale)


def test_torchaos_metadata_of_any_name_is_saved_again(tmp_path: Path) -> None:
    """Its keys are the tensors' names, one of which may begin as the metadata of all files does."""
    model = nn.ModuleDict({"format_in": nn.Linear(128, 128)})
    fp8fn.quantize_weights(model, block=(1, -1))
    fp8fn.save_weights(model, tmp_path / "a", format="torchao")
    layout = fp8fn.load_weights(model, tmp_path / "a").layout
    fp8fn.save_weights(model, tmp_path / "b", format=layout)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_blocks_whose_activations_have_no_static_scale(tmp_path: Path) -> None:
    model = Model()
    message = "save_weights: fc.weight has blocks of (128, 128), for which 'deepseek' has no static scale"
    refused(model, tmp_path, message, input_scales={"fc.weight": 0.5})
    whole = Model((-1, -1))
    fp8fn.save_weights(whole, tmp_path / "a", format="modelopt", input_scales={"fc.weight": 0.5})
    layout = fp8fn.load_weights(whole, tmp_path / "a").layout
    fp8fn.save_weights(model, tmp_path / "b", format=layout)  # quantized again, in other blocks
    again = fp8fn.load_weights(Model(), tmp_path / "b").layout
    assert (again.weights["fc.weight"].block, again.input_scales) == ((128, 128), {})


def test_pytorchs_default_device_is_not_that_of_files(tmp_path: Path) -> None:
    model = Model((-1, -1))
    with torch.device("meta"):
        fp8fn.save_weights(model, tmp_path, format="scaled_fp8", input_scales={"fc.weight": 0.5})
        layout = fp8fn.load_weights(model, tmp_path).layout
    assert layout.input_scales["fc.weight"].item() == 0.5
    assert model.fc.weight.device.type == "cpu"


HOLDS = "safetensors files cannot hold; use a dense tensor of bfloat16, float16,"
META = "x is on the meta device and has no values; load the model first"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda: torch.zeros(2, dtype=torch.complex128), TypeError, f"x is complex128, which {HOLDS}"),
        (lambda: torch.eye(3).to_sparse(), TypeError, f"x is in the layout torch.sparse_coo, which {HOLDS}"),
        (lambda: torch.zeros(2, device="meta"), ValueError, META),
        (lambda: make(128, 128).to("meta"), ValueError, META),
    ],
    ids=["complex128", "sparse", "meta", "FP8 on meta"],
)
def test_tensors_that_no_file_can_hold(
    value: Callable[[], Tensor], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = Model()
    model.register_buffer("x", value())
    refused(model, tmp_path / "new", f"save_weights: {message}", error)
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("in_fp8", [False, True])
def test_sharded_models_are_gathered_first(in_fp8: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model, folder = Model() if in_fp8 else nn.ModuleDict({"fc": nn.Linear(128, 128, bias=False)}), tmp_path / "out"
        weight = model.get_parameter("fc.weight")
        fully_shard(model.get_submodule("fc"), mesh=init_device_mesh("cpu", (1,)))
        refused(model, folder, "save_weights: fc.weight is a DTensor, of which each rank holds", NotImplementedError)
        whole: Any = model.get_parameter("fc.weight")
        plain = nn.ModuleDict({"fc": nn.Linear(128, 128, bias=False)})
        plain["fc"].weight = nn.Parameter(whole.full_tensor().detach(), requires_grad=False)
        fp8fn.save_weights(plain, folder)
        stored = fp8fn.load_blockwise(folder)["fc.weight"]
        assert isinstance(stored, fp8fn.ScaledTensor) == in_fp8
        dense = stored.dequantize(torch.float32) if isinstance(stored, fp8fn.ScaledTensor) else stored
        assert torch.equal(dense, _plain(weight))
    finally:
        dist.destroy_process_group()


def test_lazy_views_are_saved_by_their_values(tmp_path: Path) -> None:
    model = Model()
    model.register_buffer("negative", torch._neg_view(torch.ones(3)))
    model.register_buffer("conjugate", torch.complex(torch.ones(3), torch.ones(3)).conj())
    model.register_buffer("turned", torch.randn(3, 4).t())
    fp8fn.save_weights(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("negative", "conjugate", "turned"):
        assert torch.equal(stored[name], model.get_buffer(name)), name


@pytest.mark.parametrize("content", ["{bad", "[1]", ""])
def test_a_damaged_config_is_found_before_anything_is_written(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"config\.json: (not JSON|holds a list)"):
            fp8fn.save_weights(Model(), tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
        assert (tmp_path / "config.json").read_text() == content
    (tmp_path / "config.json").write_text('{"a": 1}')
    fp8fn.save_weights(Model(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).keys() == {"a", "quantization_config"}


def test_wrong_arguments(tmp_path: Path) -> None:
    model = Model((128, 128))
    fp8fn.save_weights(model, tmp_path / "saved")
    loaded = fp8fn.load_weights(Model((128, 128)), tmp_path / "saved")
    name = next(iter(loaded.layout.weights))
    (tmp_path / "file").write_text("kept")
    for error, message, path, keywords in (
        (TypeError, "save_weights: path=None is a NoneType; use a folder", None, {}),
        (FileExistsError, "file' is a file; name a folder", tmp_path / "file", {}),
        (TypeError, "load_weights returned, loaded.layout", tmp_path / "new", {"format": loaded}),
        (ValueError, "format=None is not a format; use 'deepseek'", tmp_path / "new", {"format": None}),
        (TypeError, "input_scales is a list; use a dict", tmp_path / "new", {"input_scales": [1.0]}),
        (
            TypeError,
            f"input_scales[{name!r}]='1' is a str; use a float",
            tmp_path / "new",
            {"format": "autofp8", "input_scales": {name: "1"}},
        ),
    ):
        with pytest.raises(error, match=re.escape(message)):
            fp8fn.save_weights(model, path, **keywords)  # type: ignore[arg-type]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_config_keeps_one_declaration(tmp_path: Path) -> None:
    """Readers take the declaration of the model's text part, or an older one, in place of the new one."""
    old = {"quant_method": "awq"}
    parts = {"quantization_config": old, "compression_config": old}
    (tmp_path / "config.json").write_text(json.dumps({**parts, "text_config": {**parts, "layers": 2}}))
    model = Model((1, -1))
    fp8fn.save_weights(model, tmp_path, format="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.keys() == {"quantization_config", "text_config"}
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["text_config"] == {"layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    convert(tmp_path, tmp_path / "out", Options(format="compressed-tensors"))
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert again.keys() == {"quantization_config", "text_config"}
    assert again["text_config"] == {"text_config": {"layers": 2}}
    loaded = fp8fn.load_blockwise(tmp_path / "out")["fc.weight"]
    assert isinstance(loaded, fp8fn.ScaledTensor)
    assert torch.equal(loaded.dequantize(torch.float32), _plain(model.fc.weight))


@pytest.mark.parametrize("format", ["comfy", "scaled_fp8"])
def test_a_format_without_a_declaration_leaves_no_older_one(format: str, tmp_path: Path) -> None:
    """Such as that of the pretrained model, beside which the FP8 weights could not be read."""
    old = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for number, more in enumerate(({}, {"layers": 2})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**old, **more}))
        fp8fn.save_weights(Model((-1, -1)), folder, format=format)
        assert json.loads((folder / "config.json").read_text()) == more
        assert fp8fn.load_weights(Model(), folder).layout.format == format


@pytest.mark.parametrize("name", ["model.safetensors", "hf_quant_config.json", "config.json"])
def test_a_full_disk_leaves_the_folder_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')

    def opened(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = really(self, mode, *args, **options)
        if name in self.name and mode[0] == "w":
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return file

    really = Path.open
    model = Model((1, -1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(OSError, match="No space left on device"):
            fp8fn.save_weights(model, tmp_path, format="modelopt")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == '{"a": 1}'
    fp8fn.save_weights(model, tmp_path, format="modelopt")
    assert fp8fn.load_weights(Model(), tmp_path).layout.format == "modelopt"


def test_a_linked_config_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    """The files of a snapshot of the Hugging Face Hub's cache are links to those that all snapshots share."""
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "blob")
    fp8fn.save_weights(Model(), tmp_path / "out")
    assert (tmp_path / "blob").read_text() == '{"a": 1}'
    assert json.loads((tmp_path / "out" / "config.json").read_text()).keys() == {"a", "quantization_config"}


def test_names_beyond_ascii_under_any_locale(tmp_path: Path) -> None:
    """config.json is UTF-8, also where Python's own encoding of text files is not."""
    code = (
        "import fp8fn, torch; model = torch.nn.ModuleDict({'\\u0441': torch.nn.Linear(8, 8)}); "
        "model['fc'] = torch.nn.Linear(128, 128); fp8fn.quantize_weights(model); fp8fn.save_weights(model, 'out')"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **ascii_only}, check=True)
    section = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    assert section["modules_to_not_convert"] == ["\u0441"]
