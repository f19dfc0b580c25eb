"""`load_blockwise`: values, order, memory, blocks from configs and shapes, and files that are damaged or disagree."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fp8fn
from fp8fn.ops.layout import BLOCKS, Block, scale_shape

pytest.importorskip("safetensors")
from safetensors.torch import save, save_file

E4M3 = torch.float8_e4m3fn


def quantized(*shape: int, block: Block = (128, 128), name: str = "layer.weight") -> dict[str, Tensor]:
    """A weight and its scales, as a checkpoint holds them."""
    q = fp8fn.quantize(torch.randn(shape), block, dtype=E4M3)
    return {name: q.data.contiguous(), f"{name}_scale_inv": q.scale.contiguous()}


def values(tensors: Mapping[str, Tensor], name: str = "layer.weight") -> Tensor:
    """The convention in its own words: each element by the scale of its block of 128 x 128."""
    data, scale = tensors[name].float(), tensors[f"{name}_scale_inv"].float()
    spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return data * spread[..., : data.shape[-2], : data.shape[-1]]


def write_index(folder: Path, files: Mapping[str, Mapping[str, Tensor]], **changes: str) -> Path:
    """Shards, and an index that says where each tensor is but for `changes`."""
    for file, tensors in files.items():
        save_file(dict(tensors), folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**weight_map, **changes}}))
    return index


def scaled(value: Any) -> fp8fn.ScaledTensor:
    assert isinstance(value, fp8fn.ScaledTensor)
    return value


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 300), k=st.integers(1, 300), m=st.integers(1, 5), experts=st.integers(0, 2))
def test_a_product_is_that_of_the_convention(
    tmp_path_factory: pytest.TempPathFactory, n: int, k: int, m: int, experts: int
) -> None:
    torch.manual_seed(n + 1000 * k)
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    written = quantized(*(experts,) * bool(experts), n, k)
    save_file(written, path)
    w = scaled(fp8fn.load_blockwise(path)["layer.weight"])
    expected = values(written)
    assert w.block == (128, 128)
    assert torch.equal(fp8fn.dequantize(w, torch.float32), expected)
    x = torch.randn(m, k)
    torch.testing.assert_close(fp8fn.gemm(x, w.mT), x @ expected.mT, rtol=1e-4, atol=1e-4)


def test_other_tensors_come_as_they_are_and_in_order(tmp_path: Path) -> None:
    written = {
        "norm.weight": torch.randn(8).bfloat16(),
        "steps": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "layer.activation_scale": torch.tensor(0.5),
        "half": torch.tensor([1.5]).to(E4M3),
        **quantized(130, 257),
    }
    save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = fp8fn.load_blockwise(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    by_offset = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert list(loaded) == [name for name in by_offset if name != "layer.weight_scale_inv"]
    for name in ("norm.weight", "steps", "empty", "layer.activation_scale"):
        value = loaded[name]
        assert isinstance(value, Tensor)
        assert value.dtype == written[name].dtype
        assert torch.equal(value, written[name])
    assert loaded["half"].data.float().tolist() == [1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_become_float32_exactly_with_rows_that_tma_can_address(tmp_path: Path, dtype: torch.dtype) -> None:
    written = quantized(300, 700)
    written["layer.weight_scale_inv"] = written["layer.weight_scale_inv"].to(dtype)
    save_file(written, tmp_path / "model.safetensors")
    w = scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"])
    assert w.scale.dtype == torch.float32
    assert w.scale.stride() == (8, 1)
    assert torch.equal(w.scale, written["layer.weight_scale_inv"].float())


def test_e8m0_scales_stay(tmp_path: Path) -> None:
    powers = torch.tensor([[0.25, 1.0], [2.0, 4.0], [0.5, 8.0]]).to(torch.float8_e8m0fnu)
    written = {**quantized(300, 200), "layer.weight_scale_inv": powers}
    save_file(written, tmp_path / "model.safetensors")
    w = scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"])
    assert w.scale.dtype == torch.float8_e8m0fnu
    x = torch.randn(3, 200)
    torch.testing.assert_close(fp8fn.gemm(x, w.mT), x @ values(written).T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_follow_from_shapes(tmp_path: Path, block: Block) -> None:
    written = quantized(160, 288, block=block)
    save_file(written, tmp_path / "model.safetensors")
    w = scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"])
    assert w.block == block
    expected = fp8fn.ScaledTensor(written["layer.weight"], written["layer.weight_scale_inv"], block)
    assert torch.equal(fp8fn.dequantize(w), fp8fn.dequantize(expected))


def test_one_scale_for_a_tensor(tmp_path: Path) -> None:
    written = {**quantized(2, 160, 288), "layer.weight_scale_inv": torch.tensor(0.5)}
    save_file(written, tmp_path / "model.safetensors")
    w = scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"])
    assert w.block == (-1, -1)
    assert torch.equal(fp8fn.dequantize(w, torch.float32), written["layer.weight"].float() / 2)


def test_experts_without_the_word_weight(tmp_path: Path) -> None:
    save_file(quantized(3, 200, 150, name="mlp.experts.gate_up_proj"), tmp_path / "model.safetensors")
    loaded = fp8fn.load_blockwise(tmp_path)
    assert list(loaded) == ["mlp.experts.gate_up_proj"]
    assert scaled(loaded["mlp.experts.gate_up_proj"]).scale.shape == (3, 2, 2)


def test_the_config_decides_or_disagrees(tmp_path: Path) -> None:
    save_file(quantized(256, 384), tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    for quantization in (None, {}, {"weight_block_size": None}, {"weight_block_size": [128, 128]}):
        config.write_text(json.dumps({"quantization_config": quantization}))
        assert scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"]).block == (128, 128)
    config.write_text(json.dumps({"quantization_config": {"weight_block_size": [1, 128]}}))
    message = r"'layer.weight_scale_inv' has shape \(2, 3\).*\(256, 384\).*\(1, 128\).*config.json.*\(256, 3\)"
    with pytest.raises(ValueError, match=message):
        fp8fn.load_blockwise(tmp_path)
    config.write_text(json.dumps({"quantization_config": {"weight_block_size": [64, 64]}}))
    with pytest.raises(ValueError, match=r"config.json: weight_block_size=\[64, 64\] is no block"):
        fp8fn.load_blockwise(tmp_path)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        fp8fn.load_blockwise(tmp_path)


@pytest.mark.parametrize(
    "sizes",
    [
        [128.0, 128.0], [128, 128.0], ["128", "128"], "128,128", "ab", 128, 128.0, True, [True, 128], [128], [],
        [128, 128, 128], [-128, 128], [-2, -2], [0, 0], [128, None], [[128], [128]], {"0": 128, "1": 128}, {},
        [math.nan, 128], [1e999, 128], [10**30, 128],
    ],
    ids=repr,
)  # fmt: skip
def test_a_block_size_is_two_ints(tmp_path: Path, sizes: object) -> None:
    """Also where the value equals the right one in Python: 128.0 == 128 and True == 1."""
    save_file(quantized(128, 256, block=(1, 128)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": sizes}}))
    with pytest.raises(ValueError, match=r"config\.json: weight_block_size=") as error:
        fp8fn.load_blockwise(tmp_path)
    said = f"={json.loads(json.dumps(sizes))!r} is no block of fp8fn; it must be a list of two ints, one of [[1, 128], "
    assert said in str(error.value)


@pytest.mark.parametrize("quantization", [[], "fp8", 128, True])
def test_a_quantization_config_is_an_object(tmp_path: Path, quantization: object) -> None:
    save_file(quantized(256, 384), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ValueError, match="must be a JSON object") as error:
        fp8fn.load_blockwise(tmp_path)
    assert f"config.json: quantization_config={quantization!r} must" in str(error.value)


def test_an_index_names_its_shards_in_order(tmp_path: Path) -> None:
    first, second = quantized(130, 140, name="b.weight"), quantized(150, 160, name="a.weight")
    # The weight in one shard, its scales in another.
    second["b.weight_scale_inv"], first["bias"] = first.pop("b.weight_scale_inv"), torch.ones(3)
    index = write_index(tmp_path, {"z.safetensors": first, "y.safetensors": second})
    for path in (index, str(index), tmp_path):
        loaded = fp8fn.load_blockwise(path)
        assert set(loaded) == {"bias", "b.weight", "a.weight"}
        assert list(loaded)[-1] == "a.weight"
        for name in ("a.weight", "b.weight"):
            assert torch.equal(fp8fn.dequantize(scaled(loaded[name]), torch.float32), values({**first, **second}, name))


def test_data_are_the_mapped_file_s(tmp_path: Path) -> None:
    """4 GiB, of which a page is read; a write is the process's own."""
    path = tmp_path / "model.safetensors"
    shape, scales = (32768, 131072), (256, 1024)
    size, extra = 2**32, 4 * 256 * 1024
    entries = {
        "layer.weight_scale_inv": {"dtype": "F32", "shape": scales, "data_offsets": [0, extra]},
        "layer.weight": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [extra, extra + size]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + torch.ones(scales).numpy().tobytes())
        file.truncate(8 + len(header) + extra + size)
    code = """if True:
        import resource, sys, torch, fp8fn
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        before = peak()
        w = fp8fn.load_blockwise(sys.argv[1])["layer.weight"]
        assert w.shape == (32768, 131072) and w.data[-1, -1].float() == 0
        w.data.view(torch.uint8)[0, 0] = 1
        print(peak() - before)
    """
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 200
    with path.open("rb") as file:
        file.seek(8 + len(header) + extra)
        assert file.read(1) == b"\0"


def test_on_a_device_rows_are_padded(tmp_path: Path, device: torch.device) -> None:
    written = {**quantized(130, 257), "bias": torch.ones(130)}
    save_file(written, tmp_path / "model.safetensors")
    for where in (device, torch.device("meta")):
        loaded = fp8fn.load_blockwise(tmp_path, device=where)
        w = scaled(loaded["layer.weight"])
        assert {w.data.device.type, w.scale.device.type, loaded["bias"].device.type} == {where.type}
        assert w.data.stride() == ((257, 1) if where.type == "cpu" else (272, 1))
        assert w.scale.stride() == (4, 1)
    w = scaled(fp8fn.load_blockwise(tmp_path, device=device)["layer.weight"])
    assert torch.equal(fp8fn.dequantize(w, torch.float32).cpu(), values(written))


def test_importing_fp8fn_brings_no_safetensors() -> None:
    code = "import sys, fp8fn; print([name for name in sys.modules if name.startswith('safetensors')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_without_safetensors_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(quantized(130, 257), tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        fp8fn.load_blockwise(tmp_path)


# Scales that no weight can have.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0])
def test_a_scale_must_be_finite_and_positive(tmp_path: Path, dtype: torch.dtype, wrong: float) -> None:
    written = quantized(300, 200)
    scale = written["layer.weight_scale_inv"].to(dtype)
    scale[1, 1] = scale[2, 0] = wrong
    files = {
        "1.safetensors": {"layer.weight": written["layer.weight"]},
        "2.safetensors": {"layer.weight_scale_inv": scale},
    }
    write_index(tmp_path, files)
    with pytest.raises(ValueError, match=r"2\.safetensors: tensor 'layer.weight_scale_inv' has 2 of 6 scales") as error:
        fp8fn.load_blockwise(tmp_path)
    assert f"the first is {wrong} at [1, 1]. Every scale must be finite and positive" in str(error.value)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -2.0])
def test_one_scale_of_a_tensor_must_be_finite_and_positive(tmp_path: Path, wrong: float) -> None:
    written = {**quantized(2, 160, 288), "layer.weight_scale_inv": torch.tensor(wrong)}
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has 1 of 1 scales that are NaN, infinite, zero or negative") as error:
        fp8fn.load_blockwise(tmp_path)
    assert f"the first is {wrong} at []." in str(error.value)


def test_an_e8m0_scale_must_not_be_nan(tmp_path: Path) -> None:
    """0xFF is NaN; 0x00 is 2**-127 and 0xFE 2**127, which are scales."""
    codes = torch.tensor([[0x00, 0xFE], [0x7F, 0xFF], [1, 0xFF]], dtype=torch.uint8)
    written = {**quantized(300, 200), "layer.weight_scale_inv": codes.view(torch.float8_e8m0fnu)}
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'layer.weight_scale_inv' has 2 of 6 scales.*the first is nan at \[1, 1\]"):
        fp8fn.load_blockwise(tmp_path)
    codes[codes == 0xFF] = 0xFE
    save_file(written, tmp_path / "model.safetensors")
    loaded = scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"]).scale
    assert loaded.view(torch.uint8).tolist() == [[0x00, 0xFE], [0x7F, 0xFE], [1, 0xFE]]


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).smallest_normal, 1e-45, torch.finfo(torch.float32).max])
def test_small_and_large_scales_are_scales(tmp_path: Path, least: float) -> None:
    written = {**quantized(300, 200), "layer.weight_scale_inv": torch.full((3, 2), least)}
    save_file(written, tmp_path / "model.safetensors")
    loaded = scaled(fp8fn.load_blockwise(tmp_path)["layer.weight"]).scale
    assert torch.equal(loaded, torch.full((3, 2), least))


# Files that are damaged.


def test_a_file_cut_off_anywhere_names_itself_and_the_tensor(tmp_path: Path) -> None:
    written = {**quantized(20, 30), "norm.weight": torch.ones(9)}
    whole = save(written)
    path = tmp_path / "model.safetensors"
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    for length in [*range(begin + 20), *range(begin + 20, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors: no whole safetensors file: it ends after") as error:
            fp8fn.load_blockwise(path)
        if length >= begin:
            end, name = min((begin + entry["data_offsets"][1], name) for name, entry in header.items()
                            if begin + entry["data_offsets"][1] > length)  # fmt: skip
            assert f"after {length} bytes, and tensor {name!r} at {end}" in str(error.value)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=r"model\.safetensors: no whole safetensors file"):
        fp8fn.load_blockwise(path)


def test_no_flipped_bit_of_a_header_is_another_error(tmp_path: Path) -> None:
    """A bit may make another valid header, of another name for one; or it is an error that names the file."""
    whole = save({**quantized(20, 30), "norm.weight": torch.ones(9)}, {"format": "pt"})
    path = tmp_path / "model.safetensors"
    begin = 8 + int.from_bytes(whole[:8], "little")
    messages = []
    for position in range(begin):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            fp8fn.load_blockwise(path)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > begin / 2
    assert all("model.safetensors: " in message for message in messages)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"\x0a" + b"\0" * 7 + b"not json!!", b"PK\x03\x04" + b"\0" * 60]
)
def test_garbage_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: no whole safetensors file"):
        fp8fn.load_blockwise(tmp_path)


# Files that disagree.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer.weight_scale_inv": None}, r"'layer.weight' is e4m3fn and has no scales: 'layer.weight_scale_inv'"),
        ({"layer.weight": None}, r"'layer.weight_scale_inv' has the scales of 'layer.weight', which is not there"),
        ({"layer.weight": torch.ones(200, 300)}, r"'layer.weight' is float32\[200, 300\] and has scales"),
        ({"layer.weight": torch.ones(200).to(E4M3)}, r"'layer.weight' is e4m3fn\[200\] and has scales"),
        ({"layer.weight_scale_inv": torch.ones(3, 2)}, r".*inv' has shape \(3, 2\).*\(200, 300\).*needs \(2, 3\)"),
        ({"layer.weight_scale_inv": torch.ones(6)}, r".*inv' has shape \(6,\).*\(200, 300\).*needs \(2, 3\)"),
        ({"layer.weight_scale_inv": torch.ones(1, 2, 3)}, r".*inv' has shape \(1, 2, 3\).*needs \(2, 3\)"),
        ({"layer.weight_scale_inv": torch.ones(2, 3).double()}, r".*inv' is float64; scales must be float32, bfloat16"),
        ({"layer.weight_scale_inv": torch.ones(2, 3).to(E4M3)}, r".*inv' is e4m3fn; scales must be float32, bfloat16"),
        ({"layer.weight_scale_inv": torch.ones(2, 3).int()}, r".*inv' is int32; scales must be float32, bfloat16"),
    ],
)
def test_a_weight_and_scales_that_do_not_fit(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    written = {name: tensor for name, tensor in {**quantized(200, 300), **change}.items() if tensor is not None}
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {message}"):
        fp8fn.load_blockwise(tmp_path)


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    one, two = quantized(130, 140), {"norm.weight": torch.ones(3), "bias": torch.ones(3)}
    files = {"1.safetensors": one, "2.safetensors": two}
    write_index(tmp_path, files, bias="3.safetensors")
    with pytest.raises(FileNotFoundError, match=r"index.json: tensor 'bias' is said to be in '3.safetensors', which"):
        fp8fn.load_blockwise(tmp_path)
    write_index(tmp_path, files, gone="2.safetensors")
    with pytest.raises(ValueError, match=r"index.json: tensor 'gone' is said to be in '2.safetensors', which does not"):
        fp8fn.load_blockwise(tmp_path)
    write_index(tmp_path, files, bias="1.safetensors")
    with pytest.raises(ValueError, match=r"index.json: tensor 'bias' is said to be in '1.safetensors', which does not"):
        fp8fn.load_blockwise(tmp_path)
    write_index(tmp_path, files, bias="../2.safetensors")
    write_index(tmp_path, {**files, "1.safetensors": {**one, "bias": torch.ones(3)}})
    with pytest.raises(ValueError, match=r"2\.safetensors: tensor 'bias' is in 1\.safetensors too"):
        fp8fn.load_blockwise(tmp_path)
    index = write_index(tmp_path, files)
    save_file({**two, "more": torch.ones(1)}, tmp_path / "2.safetensors")
    with pytest.raises(ValueError, match=r"2\.safetensors: tensor 'more' is not in the index"):
        fp8fn.load_blockwise(tmp_path)
    for text, message in (("[]", "holds a list"), ("{", "not JSON"), ("{}", "no weight_map"), ("[" * 9999, "not JSON")):
        index.write_text(text)
        with pytest.raises(ValueError, match=rf"index\.json: .*{message}"):
            fp8fn.load_blockwise(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors does not exist"):
        fp8fn.load_blockwise(tmp_path / "gone.safetensors")
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors and no"):
        fp8fn.load_blockwise(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"has 2 files \*\.safetensors \(a\.safetensors, b\.safetensors\)"):
        fp8fn.load_blockwise(tmp_path)
    assert list(fp8fn.load_blockwise(tmp_path / "b.safetensors")) == ["x"]


@pytest.mark.parametrize(
    "file",
    [
        "../2.safetensors", "/2.safetensors", "sub/2.safetensors", "./2.safetensors", "2.safetensors/", "..", ".", "",
        None, 2, ["2.safetensors"], {},
    ],
    ids=repr,
)  # fmt: skip
def test_an_index_names_files_beside_itself(tmp_path: Path, file: object) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder, folder / "sub"):
        save_file({"bias": torch.ones(3)}, place / "2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"bias": file}}))
    with pytest.raises(ValueError, match=r"index\.json: tensor 'bias' is said to be in ") as error:
        fp8fn.load_blockwise(folder)
    assert f"said to be in {file!r}; that must be a file beside the index" in str(error.value)


@pytest.mark.parametrize("file", ["gone.safetensors", "a" * 300 + ".safetensors", "a\0b", "\ud800"])
def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"bias": file}}))
    shown = file if len(file) < 80 else "a" * 40 + "..." + "a" * 28 + ".safetensors"
    with pytest.raises(FileNotFoundError, match="tensor 'bias' is said to be in ") as error:
        fp8fn.load_blockwise(tmp_path)
    assert f"is said to be in {shown!r}, which does not exist" in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    index = write_index(tmp_path, {"1.safetensors": {"bias": torch.ones(3)}})
    (tmp_path / "1.safetensors").unlink()
    (tmp_path / "1.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match=r"1\.safetensors is a folder; its name is that of a safetensors file"):
        fp8fn.load_blockwise(tmp_path)
    index.unlink()
    index.mkdir()
    save_file({"bias": torch.ones(3)}, tmp_path / "2.safetensors")
    # A folder's own name does not make it a file of the checkpoint.
    assert list(fp8fn.load_blockwise(tmp_path)) == ["bias"]
    (tmp_path / "config.json").mkdir()
    with pytest.raises(IsADirectoryError, match=r"config\.json cannot be read: Is a directory"):
        fp8fn.load_blockwise(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to("gone.json")
    with pytest.raises(FileNotFoundError, match=r"config\.json cannot be read: No such file"):
        fp8fn.load_blockwise(tmp_path)


@pytest.mark.parametrize("function", ["scandir", "read_bytes", "safe_open"])
def test_what_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Root, as which CI runs, may read everything; so the system's answer is given here."""
    import safetensors

    write_index(tmp_path, {"1.safetensors": {"bias": torch.ones(3)}})

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    owner, name = {
        "scandir": (os, tmp_path.name),
        "read_bytes": (Path, "model.safetensors.index.json"),
        "safe_open": (safetensors, "1.safetensors"),
    }[function]
    monkeypatch.setattr(owner, function, refuse)
    with pytest.raises(PermissionError, match=rf"{name} cannot be read: Permission denied$") as error:
        fp8fn.load_blockwise(tmp_path)
    assert str(error.value).startswith(str(tmp_path))


def test_a_model_of_the_hub_is_to_be_downloaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "hf download Qwen/Qwen3-8B-FP8 --local-dir Qwen/Qwen3-8B-FP8"
    for path in ("Qwen/Qwen3-8B-FP8", Path("Qwen/Qwen3-8B-FP8")):
        with pytest.raises(FileNotFoundError, match=f"^Qwen/Qwen3-8B-FP8 does not exist; .*first: {command}$"):
            fp8fn.load_blockwise(path)
    # The folder that the command makes is then found.
    (tmp_path / "Qwen" / "Qwen3-8B-FP8").mkdir(parents=True)
    save_file({"bias": torch.ones(3)}, tmp_path / "Qwen" / "Qwen3-8B-FP8" / "model.safetensors")
    assert list(fp8fn.load_blockwise("Qwen/Qwen3-8B-FP8")) == ["bias"]
    for path in ("Qwen/gone.safetensors", "Qwen/gone.index.json", "../gone/x", "/gone/x", "a/b/c", "gone", "a/b c"):
        with pytest.raises(FileNotFoundError, match=r"does not exist; pass a safetensors file.*or their folder$"):
            fp8fn.load_blockwise(path)


def test_paths_that_no_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, shown in (("a" * 300, "a" * 40 + r"\.\.\." + "a" * 40), ("a\0b", "a\0b"), ("", r"\.")):
        with pytest.raises(FileNotFoundError, match=f"^{shown} (does not exist; pass a safetensors file|has no)"):
            fp8fn.load_blockwise(path)
    for value, kind in ((None, "NoneType"), (b"model.safetensors", "bytes"), (3, "int"), ([tmp_path], "list")):
        with pytest.raises(TypeError, match=f"path must be a str or an os.PathLike, not {kind}"):
            fp8fn.load_blockwise(value)  # type: ignore[arg-type]


def test_a_device_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="device type at start of device string: foo"):
        fp8fn.load_blockwise(tmp_path / "gone.safetensors", device="foo")


# The parsers turn any input into tensors, or into an error of ours that begins with a path.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F8_E4M3", "F32", "F16", "F8_E8M0", "F4", "BOOL", "?"]) | JSON,
        "shape": st.lists(st.integers(0, 4) | st.integers(), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 32) | st.integers() | st.floats(), min_size=1, max_size=3) | JSON,
    }
)
NAMES = st.sampled_from(["w", "w_scale_inv", "__metadata__"]) | st.text(max_size=6)


def outcome(folder: Path) -> None:
    """Loads a folder of which the files are anything."""
    message, loaded = str(folder), {}
    try:
        loaded = fp8fn.load_blockwise(folder)
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
    assert message.startswith(str(folder))
    for value in loaded.values():
        if isinstance(value, fp8fn.ScaledTensor):
            assert {type(size) for size in value.block} == {int}
            assert bool((value.scale.float() > 0).all())


@settings(deadline=None, max_examples=150)
@given(
    header=st.dictionaries(NAMES, ENTRY | JSON, max_size=3) | JSON,
    data=st.binary(max_size=40),
    extra=st.integers(-3, 3),
)
def test_any_header(tmp_path_factory: pytest.TempPathFactory, header: object, data: bytes, extra: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "any_header"
    folder.mkdir(exist_ok=True)
    text = json.dumps(header).encode()
    content = max(len(text) + extra, 0).to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(content)
    outcome(folder)


@settings(deadline=None, max_examples=150)
@given(
    weight_map=st.dictionaries(NAMES, st.sampled_from(["1.safetensors", "2"]) | JSON) | JSON,
    quantization=st.fixed_dictionaries({"weight_block_size": JSON}) | JSON,
    index=st.none() | JSON,
    config=st.none() | JSON,
)
def test_any_index_and_any_config(
    tmp_path_factory: pytest.TempPathFactory, weight_map: object, quantization: object, index: object, config: object
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any_index"
    folder.mkdir(exist_ok=True)
    save_file(quantized(2, 3, name="w"), folder / "1.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {"quantization_config": quantization}))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index or {"weight_map": weight_map}))
    outcome(folder)
    (folder / "model.safetensors.index.json").unlink()
    outcome(folder)


def test_equal_shapes_of_scales_are_equal_scales() -> None:
    """Why a block can follow from shapes: two blocks with scales of one shape put each element under the same scale."""
    for rows in (1, 2, 31, 32, 33, 127, 128, 129, 300):
        for columns in (1, 2, 32, 33, 128, 129, 300):
            seen: dict[tuple[int, ...], Tensor] = {}
            for block in BLOCKS:
                shape = scale_shape((rows, columns), block)
                data = torch.ones(rows, columns).to(E4M3)
                scale = torch.arange(shape[0] * shape[1]).reshape(shape).float()
                placed = fp8fn.dequantize(fp8fn.ScaledTensor(data, scale, block), torch.float32)
                assert torch.equal(placed, seen.setdefault(shape, placed))
