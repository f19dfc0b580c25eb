"""`load_blockwise`: values, order, memory, blocks from configs and shapes, and files that are damaged or disagree."""

from __future__ import annotations

import json
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
        file.write(len(header).to_bytes(8, "little") + header)
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
    with pytest.raises(ValueError, match=r"index.json: tensor 'bias' is said to be in '../2.safetensors'; that must"):
        fp8fn.load_blockwise(tmp_path)
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
