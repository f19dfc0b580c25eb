"""`load_weights` and `save_weights`: values, meta modules, ties, PyTorch's reports, and errors that load nothing."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from support.accuracy import snr
from support.fp8_weights import make, same, values

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 256)
        self.up = nn.Linear(256, 320)
        self.down = nn.Linear(320, 256, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 256, 256) / 16)
        self.head = nn.Linear(256, 300, bias=False)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x @ self.experts[1])


def tensors(tied: bool = False) -> dict[str, Tensor]:
    """A checkpoint's contents, written by hand."""
    written: dict[str, Tensor] = {
        "embed.weight": torch.randn(300, 256).bfloat16(), "up.bias": torch.randn(320).bfloat16(),
        "count": torch.tensor([5, 6, 7]),
    }  # fmt: skip
    for name, shape in (("up.weight", (320, 256)), ("down.weight", (256, 320)), ("experts", (2, 256, 256))):
        q = fp8fn.quantize(torch.randn(shape), (128, 128), dtype=E4M3)
        written[name], written[f"{name}_scale_inv"] = q.data.contiguous(), q.scale.contiguous()
    if not tied:
        written["head.weight"] = torch.randn(300, 256).bfloat16()
    return written


def expected(written: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The model in float32, by the convention in its own words."""

    def dense(name: str) -> Tensor:
        scale = written[f"{name}_scale_inv"].repeat_interleave(128, -2).repeat_interleave(128, -1)
        data = written[name].float()
        return data * scale[..., : data.shape[-2], : data.shape[-1]]

    table = written["embed.weight"].float()
    x = table[ids]
    x = x + torch.relu(x @ dense("up.weight").T + written["up.bias"].float()) @ dense("down.weight").T
    return x @ dense("experts")[1] @ written.get("head.weight", table).float().T


def shards(folder: Path, written: dict[str, Tensor]) -> Path:
    """Two shards and an index; a weight and its scales in different shards."""
    names = sorted(written)
    weight_map = {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: written[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def state(model: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(t), t._version) for name, t in (*model.named_parameters(), *model.named_buffers())]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_a_sharded_checkpoint(start: str, tied: bool, tmp_path: Path) -> None:
    written = tensors(tied)
    with torch.device(start):
        model = Model(tied=tied)
    if start == "meta":
        model.cache = torch.zeros(2)
    report = fp8fn.load_weights(model, shards(tmp_path, written))
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    for name in ("up.weight", "down.weight", "experts"):
        w = model.get_parameter(name)
        assert isinstance(w, FP8Weight)
        assert (w.dtype, w.scaled.block, w.requires_grad) == (torch.float32, (128, 128), False)
        assert torch.equal(w.scaled.data.view(torch.uint8), written[name].view(torch.uint8))
        assert torch.equal(w.scaled.scale, written[f"{name}_scale_inv"])
    assert model.embed.weight.requires_grad
    assert (model.head.weight is model.embed.weight) == tied
    assert model.count.tolist() == [5, 6, 7]  # type: ignore[operator, union-attr]
    ids = torch.tensor([[1, 299, 7]])
    assert snr(model(ids), expected(written, ids)) > 100


def test_dtype_and_the_users_bf16_model(tmp_path: Path) -> None:
    written = tensors()
    save_file(written, tmp_path / "model.safetensors")
    model = Model().bfloat16()
    fp8fn.load_weights(model, tmp_path)
    other = Model()
    fp8fn.load_weights(other, tmp_path / "model.safetensors", dtype=BF16, device="cpu")
    for each in (model, other):
        assert {p.dtype for p in each.parameters()} == {BF16}
        assert torch.equal(each.embed.weight, written["embed.weight"])
        assert each.count.dtype == torch.int64  # type: ignore[union-attr]
    ids = torch.tensor([[1, 299, 7]])
    assert torch.equal(model(ids), other(ids))
    assert snr(model(ids).float(), expected(written, ids)) > 35


def test_a_user_of_strict_false(tmp_path: Path) -> None:
    written = tensors()
    del written["head.weight"]
    save_file({**written, "other": torch.ones(1)}, tmp_path / "model.safetensors")
    model = Model()
    head = model.head.weight
    report = fp8fn.load_weights(model, tmp_path, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["head.weight"], ["other"])
    assert model.head.weight is head


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(written: dict[str, Tensor]) -> None:
        del written[name]

    return change


def _with(**added: Tensor) -> Callable[[dict[str, Tensor]], None]:
    def change(written: dict[str, Tensor]) -> None:
        written.update({name.replace("__", "."): value for name, value in added.items()})

    return change


ERRORS: dict[str, tuple[Callable[[dict[str, Tensor]], None], type[Exception], str]] = {
    "missing": (_without("head.weight"), RuntimeError, 'Missing key(s) in state_dict: "head.weight"'),
    "unexpected": (_with(other=torch.ones(1)), RuntimeError, 'Unexpected key(s) in state_dict: "other"'),
    "shape": (_with(up__bias=torch.ones(3)), RuntimeError, "size mismatch for up.bias"),
    "no scales": (_without("up.weight_scale_inv"), ValueError, "has no scales"),
    "NaN scales": (
        _with(up__weight_scale_inv=torch.full((3, 2), torch.nan)), ValueError, "are NaN, infinite, zero or negative"
    ),
    "wrong scales": (_with(up__weight_scale_inv=torch.ones(5, 7)), ValueError, "has shape (5, 7)"),
    "scales alone": (_without("up.weight"), ValueError, "has the scales of 'up.weight', which is not there"),
}  # fmt: skip


def test_tensors_that_a_class_of_transformers_does_without(tmp_path: Path) -> None:
    """Such as DeepSeek-V3's layers that predict several tokens."""
    save_file({**tensors(), "layers.61.norm": torch.ones(4)}, tmp_path / "model.safetensors")
    model = Model()
    model._keys_to_ignore_on_load_unexpected = [r"layers\.61.*"]  # type: ignore[assignment]
    assert fp8fn.load_weights(model, tmp_path).unexpected_keys == []
    model._keys_to_ignore_on_load_unexpected = [r"layers\.62.*"]  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "layers.61.norm"'):
        fp8fn.load_weights(model, tmp_path)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_leaves_the_module_as_it_was(name: str, tmp_path: Path) -> None:
    change, error, message = ERRORS[name]
    written = tensors()
    change(written)
    save_file(written, tmp_path / "model.safetensors")
    model = Model()
    before = state(model)
    with pytest.raises(error, match=re.escape(message)):
        fp8fn.load_weights(model, tmp_path)
    assert state(model) == before


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_integers_are_no_floating_point_values(start: str, strict: bool, tmp_path: Path) -> None:
    """Without scales their values are lost; integers of the model's own are loaded."""
    wrong = {"embed.weight": torch.int8, "head.weight": torch.uint8, "up.bias": torch.int64, "mean": torch.int32}
    for number, (name, dtype) in enumerate(wrong.items()):
        written = {**tensors(), "mean": torch.full((2,), 3.0)}
        folder = tmp_path / str(number)
        folder.mkdir()
        for value, error in (
            (written[name], None),
            (written[name].to(dtype), f"{name} is {dtype}".replace("torch.", "")),
        ):
            save_file({**written, name: value}, folder / "model.safetensors")
            with torch.device(start):
                model = Model()
                model.register_buffer("mean", torch.zeros(2))
            model.cache = torch.zeros(2)
            before = state(model)
            if error is None:
                assert fp8fn.load_weights(model, folder, strict=strict).missing_keys == []
                assert model.get_buffer("count").tolist() == [5, 6, 7]
                assert model.get_buffer("mean").tolist() == [3, 3]
            else:
                with pytest.raises(RuntimeError, match=rf"{error} without scales in .*model\.safetensors, and float32"):
                    fp8fn.load_weights(model, folder, strict=strict)
                assert state(model) == before


def test_tensors_that_are_no_floating_point_numbers_get_the_models_type(tmp_path: Path) -> None:
    """As after `load_state_dict`: positions that a cast of a whole model made floats are integers again."""
    stored = {
        "ids": torch.tensor([2.0, 3.0]).bfloat16(), "mask": torch.tensor([1, 0], dtype=torch.uint8),
        "count": torch.tensor([5, 6, 7], dtype=torch.int32), "phase": torch.tensor([2.0, 3.0]),
    }  # fmt: skip
    save_file({**tensors(), **stored}, tmp_path / "model.safetensors")
    model = Model()
    own = {
        "ids": torch.zeros(2, dtype=torch.int64), "mask": torch.zeros(2, dtype=torch.bool), "count": torch.arange(3),
        "phase": torch.zeros(2, dtype=torch.complex64),
    }  # fmt: skip
    for name, value in own.items():
        model.register_buffer(name, value)
    fp8fn.load_weights(model, tmp_path, dtype=BF16)
    for name, value in own.items():
        loaded = model.get_buffer(name)
        assert loaded.dtype == value.dtype, name
        assert torch.equal(loaded, stored[name].to(value.dtype)), name


@pytest.mark.parametrize("dtype", [E4M3, torch.float64, torch.int32], ids=str)
def test_a_type_that_no_product_returns_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """In FP8 without scales, the embedding and the norms would lose their values."""
    save_file(tensors(), tmp_path / "model.safetensors")
    model = Model()
    before = state(model)
    with pytest.raises(TypeError, match=rf"load_weights: dtype={dtype} is not an output type"):
        fp8fn.load_weights(model, tmp_path, dtype=dtype)
    assert state(model) == before


def test_the_report_reads_as_pytorchs(tmp_path: Path) -> None:
    written = tensors()
    del written["head.weight"]
    written["other"] = torch.ones(1)
    written["up.bias"] = torch.ones(3)
    save_file(written, tmp_path / "model.safetensors")
    plain = {name: torch.zeros(value.shape) for name, value in written.items() if "scale" not in name}
    found = []
    for load in (lambda m: fp8fn.load_weights(m, tmp_path), lambda m: m.load_state_dict(plain)):
        with pytest.raises(RuntimeError) as raised:
            load(Model())
        found.append(str(raised.value))
    assert found[0] == found[1]


def test_the_report_is_copied_and_pickled_with_its_layout(tmp_path: Path) -> None:
    """As ranks send each other objects."""
    save_file(tensors(), tmp_path / "model.safetensors")
    report = fp8fn.load_weights(Model(), tmp_path)
    for again in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert repr(again) == "<All keys matched successfully>"
        assert again.layout == report.layout
        assert again.layout.weights.keys() == {"up.weight", "down.weight", "experts"}


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    model = Model()
    before = state(model)
    with pytest.raises(ValueError, match="no whole safetensors file"):
        fp8fn.load_weights(model, path)
    assert state(model) == before


def test_ties_that_differ_in_the_file(tmp_path: Path) -> None:
    written = tensors()
    save_file(written, tmp_path / "model.safetensors")
    model = Model(tied=True)
    before = state(model)
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one parameter of the model, and differ"):
        fp8fn.load_weights(model, tmp_path)
    assert state(model) == before
    written["head.weight"] = written["embed.weight"].clone()
    save_file(written, tmp_path / "model.safetensors")
    fp8fn.load_weights(model, tmp_path)
    assert model.head.weight is model.embed.weight


def test_a_meta_buffer_that_no_checkpoint_holds(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
    with pytest.raises(NotImplementedError, match="buffer cache is on the meta device, and is not saved in"):
        fp8fn.load_weights(model, tmp_path)
    assert model.up.weight.is_meta


class Positions(nn.Module):
    """Buffers of a module whose constructor takes no config, as transformers' embeddings of CLIP, BERT and Gemma."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.zeros(256, 256))
        self.register_buffer("ids", torch.arange(256)[None], persistent=False)
        self.register_buffer("factor", torch.tensor(scale), persistent=False)


class Initializing(nn.Module):
    """A model that initializes its modules, and with them the buffers named in `knows`; one of them by its parent."""

    def __init__(self, knows: tuple[str, ...] = ("ids", "factor")) -> None:
        super().__init__()
        self.knows, self.positions = knows, Positions(16.0)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Positions):
            nn.init.ones_(module.weight)
            torch.randn(())  # as an initialization draws numbers
            if "ids" in self.knows:
                module.ids.copy_(torch.arange(256)[None])  # type: ignore[operator]
        if isinstance(module, Initializing) and "factor" in self.knows:
            module.positions.factor.copy_(torch.tensor(module.positions.scale))  # type: ignore[operator]


@pytest.mark.parametrize("inside", [False, True])
def test_meta_buffers_that_the_model_initializes(tmp_path: Path, inside: bool) -> None:
    """The innermost model that has `_init_weights` is asked, and no parameter is initialized."""
    kept = Initializing()
    fp8fn.save_weights(nn.Sequential(kept) if inside else kept, tmp_path / "saved")
    with torch.device("meta"):
        model: nn.Module = Initializing()
        if inside:
            model = nn.Sequential(model)
            model._init_weights = lambda module: None  # type: ignore[assignment]
    loaded: Any = model[0] if inside else model  # type: ignore[index]
    loaded.positions.weight = nn.Parameter(torch.full((256, 256), 3.0))  # real already: not initialized either
    state = torch.get_rng_state()
    fp8fn.load_weights(model, tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(loaded.positions.ids, torch.arange(256)[None])
    assert loaded.positions.factor == 16.0
    assert not loaded.positions.weight.any()


def test_a_meta_buffer_that_the_model_does_not_initialize(tmp_path: Path) -> None:
    fp8fn.save_weights(Initializing(), tmp_path / "saved")
    with torch.device("meta"):
        model = Initializing(knows=("ids",))
    with pytest.raises(NotImplementedError, match=r"buffer positions\.factor is on the meta device"):
        fp8fn.load_weights(model, tmp_path / "saved")


def test_wrong_arguments(tmp_path: Path) -> None:
    for error, message, arguments, keywords in (
        (TypeError, "load_weights: model is a str", ("a", tmp_path), {}),
        (TypeError, "dtype=torch.float64 is not an output type", (Model(), tmp_path), {"dtype": torch.float64}),
        (FileNotFoundError, "has no *.safetensors", (Model(), tmp_path), {}),
        (ValueError, "load_weights: device='gpu' is no device of PyTorch; use", (Model(), tmp_path), {"device": "gpu"}),
        (
            TypeError,
            "load_weights: device=torch.bfloat16 is a dtype; use",
            (Model(), tmp_path),
            {"device": torch.bfloat16},
        ),
    ):
        with pytest.raises(error, match=re.escape(message)):
            fp8fn.load_weights(*arguments, **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_saved_and_loaded(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8fn.weights import save

    model = Model(tied=tied).bfloat16()
    fp8fn.quantize_weights(model)
    ids = torch.tensor([[1, 299, 7]])
    for number, limit in enumerate((10**9, 150_000)):
        monkeypatch.setattr(save, "_SHARD_BYTES", limit)
        folder = tmp_path / str(number)
        fp8fn.save_weights(model, folder)
        assert (folder / "model.safetensors").exists() == (limit == 10**9)
        assert not list(folder.glob("*.partial"))
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["weight_block_size"] == [128, 128]
        assert config["modules_to_not_convert"] == (["embed"] if tied else ["embed", "head"])
        again = Model(tied=tied).bfloat16()
        fp8fn.load_weights(again, folder)
        for name, p in model.named_parameters():
            q = again.get_parameter(name)
            assert same(p, q) if isinstance(p, FP8Weight) else torch.equal(p, q)
        assert torch.equal(model(ids), again(ids))
        with pytest.raises(FileExistsError, match=r"has model.*\.safetensors.* already; use another folder"):
            fp8fn.save_weights(model, folder)


def test_a_checkpoint_comes_back_byte_for_byte(tmp_path: Path) -> None:
    written = tensors()
    (tmp_path / "first").mkdir()
    save_file(written, tmp_path / "first" / "model.safetensors")
    model = Model().bfloat16()
    fp8fn.load_weights(model, tmp_path / "first")
    fp8fn.save_weights(model, tmp_path / "second")
    found = load_file(tmp_path / "second" / "model.safetensors")
    assert set(found) == set(written)
    for name, value in written.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_lazily_negated_and_conjugated_tensors_are_saved_with_their_values(tmp_path: Path) -> None:
    ones = torch.ones(3, 2)
    saved = {
        "negated": torch._neg_view(ones),
        "imaginary": torch.complex(ones, ones).conj().imag.T,
        "conjugated": torch.complex(ones, ones).conj(),
    }
    model = nn.ModuleDict({"fc": nn.Linear(256, 256, bias=False)})
    for name, tensor in saved.items():
        model.register_buffer(name, tensor)
    model.register_parameter("p", nn.Parameter(torch._neg_view(ones)))
    fp8fn.quantize_weights(model)
    fp8fn.save_weights(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["negated"], torch.full((3, 2), -1.0))
    assert torch.equal(found["imaginary"], torch.full((2, 3), -1.0))
    assert torch.equal(found["conjugated"], torch.full((3, 2), 1 - 1j))
    assert torch.equal(found["p"], torch.full((3, 2), -1.0))


def test_scales_of_powers_of_two_are_saved_exactly(tmp_path: Path) -> None:
    model = nn.Linear(256, 128, bias=False)
    model.weight = nn.Parameter(make(128, 256, block=(1, 32), scale="e8m0"), requires_grad=False)
    dense = values(model.weight)
    fp8fn.save_weights(model, tmp_path)
    again = nn.Linear(256, 128, bias=False)
    fp8fn.load_weights(again, tmp_path)
    assert torch.equal(values(again.weight), dense)


def test_weights_that_a_format_cannot_declare(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    fp8fn.quantize_weights(model, where="0.*")
    fp8fn.quantize_weights(model, where="1.*", block=(1, 128))
    with pytest.raises(ValueError, match=r"0\.weight has blocks of \(128, 128\) and 1\.weight of \(1, 128\)"):
        fp8fn.save_weights(model, tmp_path)
    rows = nn.Sequential(nn.Linear(256, 256))
    fp8fn.quantize_weights(rows, block=(1, -1))
    with pytest.raises(ValueError, match=r"\(1, -1\), and 'deepseek' has only .*; use 'compressed-tensors' or "):
        fp8fn.save_weights(rows, tmp_path)
    with pytest.raises(ValueError, match=r"format='gguf' is not a format; use 'deepseek', "):
        fp8fn.save_weights(rows, tmp_path, format="gguf")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_on_meta(tied: bool, tmp_path: Path) -> None:
    """Its rotary embeddings have buffers that no checkpoint holds: they are made again from the config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=300, tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval()
    report = fp8fn.quantize_weights(model)
    assert len(report.quantized) == 14
    fp8fn.save_weights(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("llama", ["LlamaForCausalLM"])
    with torch.device("meta"):
        empty: Any = transformers.LlamaForCausalLM(config).eval()
    assert fp8fn.load_weights(empty, tmp_path).missing_keys == []
    assert not [name for name, t in (*empty.named_parameters(), *empty.named_buffers()) if t.is_meta]
    assert (empty.lm_head.weight is empty.model.embed_tokens.weight) == tied
    ids = torch.randint(0, 300, (2, 9))
    assert torch.equal(model(ids).logits, empty(ids).logits)
    tokens = [m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, empty)]
    assert torch.equal(*tokens)
