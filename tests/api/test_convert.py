"""`python -m fp8fn convert`: values, what is chosen, interruption, refusals, and how transformers reads the result."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fp8fn
from fp8fn import cli
from fp8fn.checkpoint import Shard
from fp8fn.cli import convert
from fp8fn.cli.convert import Options

pytest.importorskip("safetensors")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn


def run(*argv: str | Path) -> int:
    """The command's exit status."""
    try:
        return cli.main(["convert", *map(str, argv)])
    except SystemExit as leave:
        return int(leave.code or 0)


def checkpoint(folder: Path, shards: int = 3) -> dict[str, Tensor]:
    """A sharded bf16 checkpoint of two weights a shard, and files beside it."""
    folder.mkdir()
    everything: dict[str, Tensor] = {}
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {
            f"layers.{shard}.up.weight": torch.randn(200, 300).bfloat16(),
            f"layers.{shard}.down.weight": torch.randn(300, 200).bfloat16(),
            f"layers.{shard}.norm.weight": torch.randn(301).bfloat16(),
        }
        save_file(tensors, folder / name, {"format": "pt", "by": "a test"})
        weight_map.update(dict.fromkeys(tensors, name))
        everything.update(tensors)
    index = {"metadata": {"total_size": 1, "total_parameters": 5}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "other"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / "notes.bin").write_bytes(b"0")
    return everything


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.double(), b.double())


def scaled(value: Any) -> fp8fn.ScaledTensor:
    assert isinstance(value, fp8fn.ScaledTensor)
    return value


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 200), min_size=2, max_size=2),
    experts=st.integers(0, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    block=st.sampled_from([(128, 128), (1, 128), (1, 32)]),
    scale=st.sampled_from(["fp32", "pow2"]),
)
def test_what_is_written_is_what_quantize_gives(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], experts: int, dtype: torch.dtype, block: Any, scale: Any
) -> None:
    folder = tmp_path_factory.mktemp("convert")
    x = torch.randn(*(experts,) * bool(experts), *shape).to(dtype)
    others = {"a": torch.tensor(3), "b": torch.empty(0, 3), "odd": torch.arange(5, dtype=torch.int8)}
    save_file({"w": x, **others}, folder / "in.safetensors")
    options = Options(block, scale, include=("w",))
    convert.convert(folder / "in.safetensors", folder / "out", options)
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
    monkeypatch.setattr(convert, "_SLICE", 300 * 200)
    monkeypatch.setattr(convert, "_COPY", 64)
    convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options())
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
    convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options())
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
    assert not Options(exclude=("*.weight", "*.bias")).take(name, x)
    assert Options(include=("*",)).take(name, x) is (x.ndim in (2, 3))
    assert not Options().take(name, x.int())


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


# Interruption.


def failing(after: int, failure: Callable[[], None]) -> Callable[..., fp8fn.ScaledTensor]:
    """`quantize` that fails at its call number `after`."""
    calls = 0

    def quantize(*args: Any, **kwargs: Any) -> fp8fn.ScaledTensor:
        nonlocal calls
        calls += 1
        if calls > after:
            failure()
        return fp8fn.quantize(*args, **kwargs)

    return quantize


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", range(6))
def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(convert, "quantize", failing(after, interrupt))
        capsys.readouterr()
        assert run(tmp_path / "in", tmp_path / "out") == 130
    message = "python -m fp8fn convert: interrupted; run the same command again to resume"
    assert capsys.readouterr().err.splitlines()[-1] == message
    unfinished = tmp_path / "out" / ".unfinished"
    assert (tmp_path / "out").exists() is (after > 1)  # nothing is left where no file was complete
    unfinished.mkdir(parents=True, exist_ok=True)
    assert os.listdir(tmp_path / "out") == [unfinished.name]
    whole, left = content(tmp_path / "whole"), content(unfinished)
    assert len(left) == after // 2
    assert all(whole[name] == data for name, data in left.items())
    made = {path.name: path.stat().st_ino for path in unfinished.iterdir()}
    capsys.readouterr()
    assert run(tmp_path / "in", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert f"{3 - after // 2} written now, {after // 2} complete before" in text
    kept = "kept, of this source and these options, and with the right checksums: " + ", ".join(sorted(left))
    assert [line for line in text.splitlines() if line.startswith("kept")] == [kept] * bool(left)
    assert "written again" not in text
    assert content(tmp_path / "out") == whole
    assert all((tmp_path / "out" / name).stat().st_ino == inode for name, inode in made.items())


def test_what_a_killed_run_leaves_has_no_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in")
    code = """if True:
        import os, signal, sys, fp8fn
        from fp8fn import cli
        from fp8fn.cli import convert
        calls = []
        def quantize(*args, **kwargs):
            calls.append(0)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return fp8fn.quantize(*args, **kwargs)
        convert.quantize = quantize
        cli.main(["convert", *sys.argv[1:]])
    """
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "in", tmp_path / "out"], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    # A lock whose holder is gone is none.
    assert sorted(os.listdir(tmp_path / "out")) == [".fp8fn-convert.lock", ".unfinished"]
    left = sorted(os.listdir(tmp_path / "out" / ".unfinished"))
    assert len(left) == 2
    assert left[0].startswith(".model-00002-of-00003.safetensors.")
    assert left[0].endswith(".partial")
    assert left[1] == "model-00001-of-00003.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(convert, "quantize", failing(0, interrupt))
        assert run(tmp_path / "in", tmp_path / "out") == 130
    assert os.listdir(tmp_path / "out" / ".unfinished") == left[1:]
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out" / ".unfinished").exists()


@pytest.mark.parametrize("after", range(4))
def test_a_run_interrupted_while_files_go_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out", "--scale", "pow2") == 0
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    replace, calls = Path.replace, 0

    def counting(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls > 3 + after:  # the first three end the writing
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counting)
        assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 130
    with pytest.raises(ValueError, match="has 3 files"):
        fp8fn.load_blockwise(tmp_path / "out")
    assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_overwriting_run_leaves_a_good_output_until_all_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before = content(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "quantize", failing(5, interrupt))
        assert run(tmp_path / "in", tmp_path / "out", "--scale", "pow2", "--overwrite") == 130
    assert content(tmp_path / "out") == before
    # What the interrupted run left is neither lost without --overwrite nor taken for this conversion's with it.
    assert run(tmp_path / "in", tmp_path / "out") == 1
    assert len(content(tmp_path / "out" / ".unfinished")) == 2
    assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 0
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", ["tensor", "header", "sync", "name"])
def test_a_full_disk_leaves_the_good_files_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, place: str
) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before, shard = content(tmp_path / "out"), "model-00001-of-00003.safetensors"

    def full(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    owner, name = {
        "tensor": (convert, "_write_bytes"),
        "header": (convert._Plan, "header"),
        "sync": (os, "fsync"),
        "name": (Path, "replace"),
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        # An older conversion, and no folder yet.
        for folder in ("out", "new"):
            capsys.readouterr()
            assert run(tmp_path / "in", tmp_path / folder, "--scale", "pow2", "--overwrite") == 1
            message = capsys.readouterr().err.splitlines()[-1]
            target = tmp_path / folder / ".unfinished" / shard
            assert message.startswith(f"python -m fp8fn convert: {target}: {os.strerror(code)} (")
            assert message.endswith(" MiB are free there); make room and run the same command again to resume")
    assert content(tmp_path / "out") == before
    assert not (tmp_path / "out" / ".unfinished").exists()
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_later_keeps_what_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in")

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(convert, "quantize", failing(3, full))
        assert run(tmp_path / "in", tmp_path / "out") == 1
    assert os.listdir(tmp_path / "out") == [".unfinished"]
    assert os.listdir(tmp_path / "out" / ".unfinished") == ["model-00001-of-00003.safetensors"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave a name, of a file whose bytes were never written."""
    checkpoint(tmp_path / "in")
    synced: dict[int, bytes] = {}
    named: dict[str, bool] = {}
    replace = Path.replace

    def sync(descriptor: int) -> None:
        synced[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def rename(self: Path, target: Path) -> Path:
        named[target.name] = synced.get(self.stat().st_ino) == self.read_bytes()
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert named == dict.fromkeys(os.listdir(tmp_path / "out"), True)
    assert len(named) == 6


# Two at once.


def test_a_second_conversion_into_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, while the first one writes."""
    checkpoint(tmp_path / "in")
    seen: list[tuple[int, str]] = []

    def quantize(*args: Any, **kwargs: Any) -> fp8fn.ScaledTensor:
        if not seen:
            command = ["-m", "fp8fn", "convert", tmp_path / "in", tmp_path / "out", "--overwrite"]
            second = [sys.executable, *command]
            done = subprocess.run(second, capture_output=True, text=True)
            seen.append((done.returncode, done.stderr))
        return fp8fn.quantize(*args, **kwargs)

    monkeypatch.setattr(convert, "quantize", quantize)
    assert run(tmp_path / "in", tmp_path / "out") == 0
    said = f"another convert is writing to {tmp_path / 'out'}; wait until it has ended, or name another folder"
    assert seen == [(1, f"python -m fp8fn convert: {said}\n")]
    assert ".fp8fn-convert.lock" not in os.listdir(tmp_path / "out")
    assert ".unfinished" not in os.listdir(tmp_path / "out")
    monkeypatch.setattr(convert, "quantize", fp8fn.quantize)
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_without_fcntl(tmp_path: Path) -> None:
    """The whole command: `import fp8fn` too."""
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "whole") == 0
    code = """if True:
        import sys, warnings
        sys.modules["fcntl"] = None
        warnings.simplefilter("ignore")
        import fp8fn
        from fp8fn import cli
        from fp8fn.cli import convert
        statuses = []
        def quantize(*args, **kwargs):
            if not statuses:
                statuses.append(None)
                statuses.append(cli.main(["convert", *sys.argv[1:]]))
            return fp8fn.quantize(*args, **kwargs)
        convert.quantize = quantize
        statuses.append(cli.main(["convert", *sys.argv[1:]]))
        assert statuses == [None, 1, 0], statuses
    """
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "in", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"another convert is writing to {tmp_path / 'out'};" in done.stderr
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_folder_is_free_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "quantize", failing(3, interrupt))
        assert run(tmp_path / "in", tmp_path / "out") == 130
    assert run(tmp_path / "in", tmp_path / "out") == 0


# What is kept.


def with_time_of(path: Path, other: Path) -> None:
    """As `touch -d`, images of containers and mounted buckets leave it."""
    time = other.stat().st_mtime_ns
    os.utime(path, ns=(time, time))


def change(tensors: dict[str, Tensor], name: str, position: int) -> dict[str, Tensor]:
    """Other values of one tensor: 4096 bytes, or what it has, from a position on."""
    changed = tensors[name].clone()
    changed.view(-1)[position:][:2048] += 1
    return {**tensors, name: changed}


# A tensor of 2**18 bytes is sampled at both ends and between; a small one whole.
@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("w.weight", 0),
        ("w.weight", 2**17 - 1),
        ("w.weight", 3 * (2**18 - 2**12) // 7 // 2),
        ("bias", 1000),
        ("b.one", 0),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_another_model_of_the_same_shapes_sizes_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, position: int, complete: bool
) -> None:
    """Two fine-tunes: what one left is refused, and replaced where that is asked for."""
    one = {"w.weight": torch.randn(512, 256).bfloat16(), "bias": torch.randn(1001).bfloat16(), "b.one": torch.ones(1)}
    two = change(one, name, position)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    for folder, tensors in (("1", one), ("2", two)):
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        with_time_of(tmp_path / folder / "model.safetensors", tmp_path / "1" / "model.safetensors")
    assert run(tmp_path / "1", tmp_path / "out") == 0
    if not complete:  # as an interrupted run leaves it
        (tmp_path / "out" / ".unfinished").mkdir()
        (tmp_path / "out" / "model.safetensors").rename(tmp_path / "out" / ".unfinished" / "model.safetensors")
    capsys.readouterr()
    assert run(tmp_path / "2", tmp_path / "out") == 1
    message = "model.safetensors is there and not of this conversion: its source has other values; name another folder"
    assert message in capsys.readouterr().err
    assert run(tmp_path / "2", tmp_path / "out", "--overwrite") == 0
    assert "written again: model.safetensors: its source has other values" in capsys.readouterr().out
    assert run(tmp_path / "2", tmp_path / "fresh") == 0
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_another_header_of_the_same_size_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.randn(128, 128)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({f"{name}.weight": w}, tmp_path / name / "model.safetensors")
        with_time_of(tmp_path / name / "model.safetensors", tmp_path / "a" / "model.safetensors")
    assert run(tmp_path / "a", tmp_path / "out") == 0
    capsys.readouterr()
    assert run(tmp_path / "b", tmp_path / "out") == 1
    assert "conversion: its source has other tensors, types, shapes or metadata;" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 1, 2**12, 2**16 - 1, 2**16, 2**16 + 1, 10**6, 2**33 + 7])
def test_sampled_pieces_go_from_end_to_end(size: int) -> None:
    pieces = convert._pieces(size)
    assert (pieces[0][0], pieces[-1][1]) == (0, size)
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(pieces)]
    if size <= 2**16:
        assert len(pieces) == 1
    else:
        assert [stop - start for start, stop in pieces] == [2**12] * 8
        assert 0 < max(gaps) - 1 <= min(gaps)


def small(folder: Path) -> dict[str, bytes]:
    """A checkpoint of a few bytes in FP8, from `in.safetensors`."""
    tensors = {"a": torch.randn(4, 5), "b": torch.randn(3).bfloat16(), "empty": torch.empty(0, 2)}
    save_file(tensors, folder / "in.safetensors", {"format": "pt", "by": "a test"})
    convert.convert(folder / "in.safetensors", folder / "out", Options(include=("a",)))
    return content(folder / "out")


def test_no_flipped_byte_passes(tmp_path: Path) -> None:
    """Of the header, of the checksums, and of every tensor; nothing is written."""
    before, path = small(tmp_path), tmp_path / "out" / "in.safetensors"
    whole = before[path.name]
    begin = 8 + int.from_bytes(whole[:8], "little")
    for position in (*range(0, begin, 3), *range(begin, len(whole))):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"in\.safetensors is there and not of this conversion: "):
            convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
        assert path.read_bytes() == damaged
    for length in (len(whole) - 1, len(whole) + 1):
        path.write_bytes((whole + b"\0")[:length])
        with pytest.raises(ValueError, match=f"it is damaged: it has {length} bytes of {len(whole)};"):
            convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
    path.write_bytes(whole)
    text = convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
    assert "1 files, 0 written now, 1 complete before" in text


def test_two_flipped_bytes_of_a_finished_file_are_found_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the output they are refused, for someone may have made them; an unfinished file is made again."""
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before, name = content(tmp_path / "out"), "model-00002-of-00003.safetensors"
    damaged = bytearray(before[name])
    damaged[-7] ^= 1
    damaged[-9] ^= 1
    (tmp_path / "out" / name).write_bytes(damaged)
    capsys.readouterr()
    assert run(tmp_path / "in", tmp_path / "out") == 1
    reason = "it is damaged: tensor 'layers.1.up.weight' is not as it was written"
    assert f"{name} is there and not of this conversion: {reason}; name another folder" in capsys.readouterr().err
    (tmp_path / "out" / ".unfinished").mkdir()
    for path in list((tmp_path / "out").glob("*.safetensors")):
        path.rename(path.parent / ".unfinished" / path.name)
    assert run(tmp_path / "in", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "3 files, 1 written now, 2 complete before" in text
    assert f"written again: {name}: {reason}\n" in text
    assert "checksums: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors\n" in text
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "another program wrote it"),
        ({"fp8fn.convert": None}, "another program wrote it"),
        ({"fp8fn.convert.crc32": None}, "its header is damaged"),
        ({"fp8fn.convert.crc32": ""}, "its header is damaged"),
        ({"by": "another"}, "its header is damaged"),
        ({"fp8fn.convert": "0" * 64}, "another version of fp8fn wrote it"),
        ({"fp8fn.convert": "[]"}, "another version of fp8fn wrote it"),
        ({"fp8fn.convert": "{}"}, "another version of fp8fn wrote it"),
    ],
)
def test_why_a_file_is_not_kept(tmp_path: Path, metadata: dict[str, str | None], reason: str) -> None:
    """By its metadata: {} for none, else these keys are others, or, of None, not there."""
    small(tmp_path)
    path = tmp_path / "out" / "in.safetensors"
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    changed = {**header.pop("__metadata__"), **metadata}
    if metadata:
        header["__metadata__"] = {key: value for key, value in changed.items() if value is not None}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[begin:])
    with pytest.raises(ValueError, match=rf"in\.safetensors is there and not of this conversion: {reason};"):
        convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options((1, 128), include=("a",)), r"block was \[128, 128\], is \[1, 128\]"),
        (Options(scale="pow2", include=("a",)), 'scale was "fp32", is "pow2"'),
        (Options(include=("*",)), r'include was \["a"\], is \["\*"\]'),
        (Options(include=("a",), exclude=("b",)), r'exclude was \[\], is \["b"\]'),
    ],
)
def test_other_options_are_named(tmp_path: Path, options: Options, reason: str) -> None:
    small(tmp_path)
    with pytest.raises(ValueError, match=f"conversion: it was made with other options: {reason};"):
        convert.convert(tmp_path / "in.safetensors", tmp_path / "out", options)


def test_a_file_that_may_not_be_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, opened = small(tmp_path), Path.open

    def refuse(self: Path, *args: Any) -> Any:
        if self.parent.name == "out":
            raise PermissionError(13, "Permission denied")
        return opened(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(ValueError, match="conversion: it cannot be read: Permission denied; name another folder"):
            convert.convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
    assert content(tmp_path / "out") == before


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """safetensors gives the metadata in another order each time."""
    save_file({"a": torch.randn(4, 5)}, tmp_path / "in.safetensors", {f"key{i}": str(i) for i in range(20)})
    for out in ("1", "2"):
        convert.convert(tmp_path / "in.safetensors", tmp_path / out, Options(include=("a",)))
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_tensors_of_no_elements_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share an offset, and safetensors lists such tensors in another order in each process."""
    tensors = {"a": torch.randn(4, 5), **{f"empty{i}": torch.empty(0, 8) for i in range(4)}}
    save_file(tensors, tmp_path / "in.safetensors")
    opened = Shard.__init__
    for reverse in (False, True):

        def ordered(self: Shard, path: Path, reverse: bool = reverse) -> None:
            opened(self, path)
            self.names = tuple(sorted(self.names, reverse=reverse))

        monkeypatch.setattr(Shard, "__init__", ordered)
        convert.convert(tmp_path / "in.safetensors", tmp_path / str(reverse), Options(include=("a",)))
    assert content(tmp_path / "False") == content(tmp_path / "True")


# Refusals.


def test_files_of_another_conversion_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before = content(tmp_path / "out")
    assert run(tmp_path / "in", tmp_path / "out", "--scale", "pow2") == 1
    assert "model-00001-of-00003.safetensors is there and not of this conversion" in capsys.readouterr().err
    assert content(tmp_path / "out") == before
    # The source changed since.
    os.utime(tmp_path / "in" / "model-00003-of-00003.safetensors", ns=(1, 1))
    assert run(tmp_path / "in", tmp_path / "out") == 1
    message = "model-00003-of-00003.safetensors is there and not of this conversion: its source was modified since;"
    assert message in capsys.readouterr().err
    assert run(tmp_path / "in", tmp_path / "out", "--overwrite", "--scale", "pow2") == 0
    w = scaled(fp8fn.load_blockwise(tmp_path / "out")["layers.0.up.weight"])
    assert torch.equal(torch.frexp(w.scale).mantissa, torch.full_like(w.scale, 0.5))


def test_a_damaged_output_is_not_taken_for_a_complete_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    before = content(tmp_path / "out")
    name = "model-00002-of-00003.safetensors"
    os.truncate(tmp_path / "out" / name, 5000)
    reason = f"it is damaged: it has 5000 bytes of {len(before[name])}"
    assert run(tmp_path / "in", tmp_path / "out") == 1
    assert f"{name} is there and not of this conversion: {reason};" in capsys.readouterr().err
    assert run(tmp_path / "in", tmp_path / "out", "--overwrite") == 0
    text = capsys.readouterr().out
    assert "1 written now, 2 complete before" in text
    assert f"written again: {name}: {reason}" in text
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["other.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_files_of_others_stay(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("theirs")
    assert run(tmp_path / "in", tmp_path / "out") == 1
    reason = "the input has no file of that name" if name == "other.safetensors" else "its content is another"
    assert f"{name} is there and not of this conversion: {reason}; name another folder" in capsys.readouterr().err
    assert content(tmp_path / "out") == {name: b"theirs"}
    assert os.listdir(tmp_path / "out") == [name]


def test_the_input_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    before = content(tmp_path / "in")
    for source in (tmp_path / "in", tmp_path / "in" / "model-00001-of-00003.safetensors"):
        assert run(source, tmp_path / "in" / ".." / "in", "--overwrite") == 1
        assert "is the folder of the input" in capsys.readouterr().err
    assert content(tmp_path / "in") == before


def test_what_is_fp8_already_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    (tmp_path / "out" / "config.json").unlink()
    assert run(tmp_path / "out", tmp_path / "again") == 1
    assert "is of a checkpoint in FP8 already" in capsys.readouterr().err
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert run(tmp_path / "in", tmp_path / "again") == 1
    assert "config.json: has a quantization_config" in capsys.readouterr().err
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


@pytest.mark.parametrize("block", [(128.0, 128.0), (True, 128), (64, 64), (128, 1), [128, 128], 128, None])
def test_a_block_is_one_of_a_weight_s(block: Any) -> None:
    with pytest.raises(ValueError, match=r"is no block of a weight \(N, K\); it must be one of") as error:
        Options(block)
    assert f"block={block!r} is no block" in str(error.value)


@pytest.mark.parametrize("include", [(), ("lm_head.weight", "layer.weight")])
def test_the_head_is_named_as_left_unless_it_is_converted(tmp_path: Path, include: tuple[str, ...]) -> None:
    tensors = {"lm_head.weight": torch.randn(256, 128), "layer.weight": torch.randn(128, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    convert.convert(tmp_path / "model.safetensors", tmp_path / "out", Options(include=include))
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
