"""`save_weights`: a model with `FP8Weight`s as a safetensors checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fp8fn.arguments import checked
from fp8fn.checkpoint import SCALE_SUFFIX, read_json
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.weights.fp8_weight import FP8Weight
from fp8fn.weights.quantize import check_module

Format: TypeAlias = Literal["deepseek"]

_SHARD_BYTES: Final = 5 * 10**9  # the size of transformers' shards


def _format(op: str, name: str, value: object) -> None:
    if value != "deepseek":
        raise ValueError(f"{op}: {name}={value!r} is not a format; use 'deepseek'")


@checked(model=check_module, format=_format)
def save_weights(model: nn.Module, path: str | os.PathLike[str], *, format: Format = "deepseek") -> None:
    """Writes a model's parameters and persistent buffers as a safetensors checkpoint, FP8 weights as they are.

    "deepseek" is the layout of DeepSeek-V3 and Qwen3-FP8: `X.weight` in FP8, `X.weight_scale_inv` in float32, and
    `quantization_config` in config.json. `load_weights`, `load_blockwise`, transformers, vLLM and SGLang read it.
    Checkpoints over 5 GB are sharded, with an index. A tied tensor is written once, under its first name.

    Args:
        model: Module whose tensors are written.
        path: Folder, which is made if it does not exist. Its config.json is extended; without one, `model.config` is
            written.
        format: Layout of the checkpoint.

    Raises:
        ValueError: The format does not exist, or the weights have blocks that it cannot declare.
        FileExistsError: The folder holds a checkpoint already.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile
        >>> model, folder = torch.nn.Sequential(torch.nn.Linear(256, 256)), tempfile.mkdtemp()
        >>> report = fp8fn.quantize_weights(model)
        >>> fp8fn.save_weights(model, folder)
        >>> list(fp8fn.load_blockwise(folder))
        ['0.bias', '0.weight']
    """
    _format("save_weights", "format", format)
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(entry.name for entry in folder.iterdir() if ".safetensors" in entry.suffixes)
    if present:
        raise FileExistsError(f"save_weights: {folder} has {present[0]} already; use another folder, or remove it")
    state = _state(model)
    config = _config(folder, model, state)
    shards = list(_sharded(state))
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    files = [folder / f".{name}.partial" for name in names]
    try:
        for file, shard in zip(files, shards, strict=True):
            tensors = {name: part for key, value in shard.items() for name, part in _parts(key, value)}
            save_file(tensors, file, {"format": "pt"})
        for file, name in zip(files, names, strict=True):
            file.replace(folder / name)
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise
    if len(shards) > 1:
        owners = {
            part: name
            for shard, name in zip(shards, names, strict=True)
            for key in shard
            for part in _names(key, state[key])
        }
        index = {"metadata": {"total_size": sum(map(_size, state.values()))}, "weight_map": owners}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if config:
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors by name, each once; those that share memory and are not the same tensor are copied by `_parts`."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            state[name] = value.detach()
    return state


def _parts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor as a file holds it: contiguous, on the CPU, with memory of its own."""
    if not isinstance(value, FP8Weight):
        yield name, value.cpu().clone(memory_format=torch.contiguous_format)
        return
    scaled = value.scaled
    data = scaled.data.view(torch.uint8).cpu().clone(memory_format=torch.contiguous_format)
    yield name, data.view(scaled.dtype)
    # In float32, which holds every e8m0 scale: safetensors cannot read e8m0 back.
    yield name + SCALE_SUFFIX, scaled.scale.float().cpu().clone(memory_format=torch.contiguous_format)


def _names(name: str, value: Tensor) -> list[str]:
    return [name, name + SCALE_SUFFIX] if isinstance(value, FP8Weight) else [name]


def _size(value: Tensor) -> int:
    if isinstance(value, FP8Weight):
        return value.scaled.data.numel() + 4 * value.scaled.scale.numel()
    return value.numel() * value.element_size()


def _sharded(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    total = 0
    for name, value in state.items():
        if shard and total + _size(value) > _SHARD_BYTES:
            yield shard
            shard, total = {}, 0
        shard[name] = value
        total += _size(value)
    yield shard


def _config(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Any]:
    """The content of config.json: what is there or what the model has, and the quantization."""
    path = folder / "config.json"
    own: Any = getattr(model, "config", None)
    content = (
        read_json(path) if path.exists() else json.loads(own.to_json_string()) if hasattr(own, "to_json_string") else {}
    )
    weights = {name: value.scaled for name, value in state.items() if isinstance(value, FP8Weight)}
    blocks: dict[Block, str] = {}
    for name, scaled in weights.items():
        blocks.setdefault(scaled.block, name)
        if scaled.dtype != torch.float8_e4m3fn:
            raise ValueError(f"save_weights: {name} is {scaled.dtype}, and 'deepseek' declares torch.float8_e4m3fn")
    for block, name in blocks.items():
        if WHOLE in block:
            raise ValueError(f"save_weights: {name} has blocks of {block}, and 'deepseek' has no whole axis")
    if len(blocks) > 1:
        (first, one), (second, other) = list(blocks.items())[:2]
        raise ValueError(
            f"save_weights: {one} has blocks of {first} and {other} of {second}, and 'deepseek' declares one block for "
            "all weights"
        )
    if not blocks:
        return content
    left = [name for name, value in state.items() if name.endswith(".weight") and value.ndim in (2, 3)]
    modules = [name.removesuffix(".weight") for name in left if name not in weights]
    content["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": modules,
        "quant_method": "fp8",
        "weight_block_size": list(next(iter(blocks))),
    }
    return content
