"""`convert` into a folder that has results: which are kept, and what is not touched."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from safetensors.torch import save_file
from torch import Tensor

import fp8fn
from fp8fn.checkpoint.conversion import identity
from fp8fn.checkpoint.conversion.convert import convert
from fp8fn.checkpoint.conversion.options import Options
from fp8fn.checkpoint.files import Shard
from fp8fn.cli.convert import report
from support.checkpoints import checkpoint, content, run, scaled


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
    pieces = identity._pieces(size)
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
    convert(folder / "in.safetensors", folder / "out", Options(include=("a",)))
    return content(folder / "out")


def test_no_flipped_byte_passes(tmp_path: Path) -> None:
    """A flipped byte of the header, the checksums or any tensor is an error, and nothing is written."""
    before, path = small(tmp_path), tmp_path / "out" / "in.safetensors"
    whole = before[path.name]
    begin = 8 + int.from_bytes(whole[:8], "little")
    for position in (*range(0, begin, 3), *range(begin, len(whole))):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"in\.safetensors is there and not of this conversion: "):
            convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
        assert path.read_bytes() == damaged
    for length in (len(whole) - 1, len(whole) + 1):
        path.write_bytes((whole + b"\0")[:length])
        with pytest.raises(ValueError, match=f"it is damaged: it has {length} bytes of {len(whole)};"):
            convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
    path.write_bytes(whole)
    done = convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
    assert "1 files, 0 written now, 1 complete before" in report(done)


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
        convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options((1, 128), include=("a",)), r"block was null, is \[1, 128\]"),
        (Options(scale="pow2", include=("a",)), 'scale was null, is "pow2"'),
        (Options(include=("*",)), r'include was \["a"\], is \["\*"\]'),
        (Options(include=("a",), exclude=("b",)), r'exclude was \[\], is \["b"\]'),
    ],
)
def test_other_options_are_named(tmp_path: Path, options: Options, reason: str) -> None:
    small(tmp_path)
    with pytest.raises(ValueError, match=f"conversion: it was made with other options: {reason};"):
        convert(tmp_path / "in.safetensors", tmp_path / "out", options)


def test_a_file_that_may_not_be_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, opened = small(tmp_path), Path.open

    def refuse(self: Path, *args: Any) -> Any:
        if self.parent.name == "out":
            raise PermissionError(13, "Permission denied")
        return opened(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(ValueError, match="conversion: it cannot be read: Permission denied; name another folder"):
            convert(tmp_path / "in.safetensors", tmp_path / "out", Options(include=("a",)))
    assert content(tmp_path / "out") == before


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """safetensors gives the metadata in another order each time."""
    save_file({"a": torch.randn(4, 5)}, tmp_path / "in.safetensors", {f"key{i}": str(i) for i in range(20)})
    for out in ("1", "2"):
        convert(tmp_path / "in.safetensors", tmp_path / out, Options(include=("a",)))
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
        convert(tmp_path / "in.safetensors", tmp_path / str(reverse), Options(include=("a",)))
    assert content(tmp_path / "False") == content(tmp_path / "True")


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


@pytest.mark.parametrize("sharded_first", [False, True])
def test_overwriting_leaves_no_file_that_readers_would_find_first(sharded_first: bool, tmp_path: Path) -> None:
    """fp8fn looks for an index first, and transformers for model.safetensors. Files of others stay."""
    checkpoint(tmp_path / "many")
    (tmp_path / "one").mkdir()
    save_file({"w.weight": torch.randn(256, 256)}, tmp_path / "one" / "model.safetensors")
    names = ("many", "one") if sharded_first else ("one", "many")
    assert run(tmp_path / names[0], tmp_path / "out") == 0
    theirs = {"adapter.safetensors": b"theirs", "adapter.safetensors.index.json": b"{}"}
    for name, text in theirs.items():
        (tmp_path / "out" / name).write_bytes(text)
    assert run(tmp_path / names[1], tmp_path / "out", "--overwrite") == 0
    assert run(tmp_path / names[1], tmp_path / "fresh") == 0
    expected = content(tmp_path / "fresh") | theirs
    found = content(tmp_path / "out")
    assert {name: found[name] for name in expected} == expected
    assert not [name for name in found.keys() - expected.keys() if ".safetensors" in name]


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
