"""A sharded checkpoint, and `convert` of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import fp8fn
from fp8fn import cli


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


def scaled(value: Any) -> fp8fn.ScaledTensor:
    assert isinstance(value, fp8fn.ScaledTensor)
    return value


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
