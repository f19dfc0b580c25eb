"""`save_weights`: a model with `FP8Weight`s as a safetensors checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8fn.arguments import checked
from fp8fn.checkpoint.files import DTYPES, Json, read_json
from fp8fn.checkpoint.format import CheckpointLayout, Contents, Format, WeightLayout
from fp8fn.checkpoint.formats import FORMATS, drop_declarations
from fp8fn.checkpoint.plan import check_names, declaration, new_layout, stored_scale, takes_static
from fp8fn.checkpoint.write import write_file
from fp8fn.ops.formats import SCALE_DTYPES, short_name
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.sharded import is_sharded
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.weights.experts import Pieces, piece_of, pieces_in_files
from fp8fn.weights.fp8_weight import FP8Weight
from fp8fn.weights.quantize import check_module

_SHARD_BYTES: Final = 5 * 10**9  # the size of transformers' shards


def _format(op: str, name: str, value: object) -> None:
    if isinstance(value, CheckpointLayout) or (isinstance(value, str) and value in FORMATS):
        return
    remedy = f"use {', '.join(map(repr, FORMATS))}, or the layout that load_weights returned"
    if value is None or isinstance(value, str):
        raise ValueError(f"{op}: {name}={value!r} is not a format; {remedy}")
    raise TypeError(f"{op}: {name} is {kind_of(value)}; {remedy}, loaded.layout")


def _folder(op: str, name: str, value: object) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{op}: {name}={value!r} is {kind_of(value)}; use a folder, a str or an os.PathLike")


def _input_scales(op: str, name: str, value: object) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{op}: {name} is {kind_of(value)}; use a dict from names of weights to scales, or None")


@checked(model=check_module, path=_folder, format=_format, input_scales=_input_scales)
def save_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str | CheckpointLayout = "deepseek",
    input_scales: Mapping[str, Tensor | float] | None = None,
) -> None:
    """Writes a model's parameters and persistent buffers as a safetensors checkpoint, FP8 weights as they are.

    The format decides the names of scales, their types and what config.json declares; docs/guides/checkpoints.md has a
    table of formats. Checkpoints over 5 GB are sharded, with an index. A tied tensor is written once, under its first
    name. A model of transformers is written under the names of its `save_pretrained`, experts as one matrix each.

    Args:
        model: Module whose tensors are written.
        path: Folder, which is made if it does not exist. Its config.json is extended; without one, `model.config` is
            written.
        format: "deepseek" (DeepSeek-V3, Qwen3-FP8), "compressed-tensors", "modelopt", "torchao", "mxfp8", "autofp8",
            "comfy" or "scaled_fp8"; or the `layout` that `load_weights` returned, which writes the same bytes again.
        input_scales: Static scales of activations, by the weight's name; those of the layout by default.

    Shape:
        `input_scales[name] ()`.

    Raises:
        ValueError: The format does not exist, or cannot declare the weights' blocks; a block crosses the border between
            two matrices of a file; a tensor has the name of an FP8 weight's part, or is on the meta device; or the
            folder's config.json is damaged.
        TypeError: No safetensors file can hold a tensor, or an argument has a wrong type.
        NotImplementedError: A tensor is sharded.
        FileExistsError: The folder holds a checkpoint already, or `path` is a file.

    Example:
        >>> import tempfile
        >>> model, folder = torch.nn.Sequential(torch.nn.Linear(256, 256)), tempfile.mkdtemp()
        >>> report = fp8fn.quantize_weights(model)
        >>> fp8fn.save_weights(model, folder)
        >>> list(fp8fn.load_blockwise(folder))
        ['0.bias', '0.weight']
    """
    _format("save_weights", "format", format)
    _check_storable(_state(model, {}))
    stored = pieces_in_files(model)
    state = _state(model, stored)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"save_weights: path={str(folder)!r} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(entry.name for entry in folder.iterdir() if ".safetensors" in entry.suffixes)
    if present:
        raise FileExistsError(f"save_weights: {folder} has {present[0]} already; use another folder, or remove it")
    given = {file: scale for name, scale in (input_scales or {}).items() for file in stored.get(name, (name,))}
    config = _config(folder, model)
    plan = _planned(state, format, given)
    shards = list(_sharded(plan))
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    # Sorted, because safetensors gives a file's metadata in another order each time.
    metadata = {"format": "pt", **dict(sorted(plan.declared.get("metadata", {}).items()))}
    texts = _texts(plan, config)
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = {}
    # Files get their names once all are written, the tensors last: no tensors stand beside an older declaration.
    files = {name: folder / f".{name}.partial" for name in (*texts, *names)}
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    try:
        for name, shard in zip(names, shards, strict=True):
            tensors = {part: tensor for key in shard for part, tensor in plan.parts(key)}
            sizes.update((part, tensor.nbytes) for part, tensor in tensors.items())
            owners.update(dict.fromkeys(tensors, name))
            write_file(files[name], tensors, metadata)
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": owners}
            texts["model.safetensors.index.json"] = index
        for name, content in texts.items():
            files[name].write_bytes((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
        for name, file in files.items():
            file.replace(folder / name)
    except BaseException:
        for file in files.values():
            file.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class _Plan:
    """The tensors to write by the model's names, and how the FP8 weights among them are stored."""

    format: Format
    state: Mapping[str, Tensor]
    weights: Mapping[str, WeightLayout]
    input_scales: Mapping[str, Tensor]
    declared: Mapping[str, Json]

    def parts(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """A tensor as a file holds it, on the CPU: an FP8 weight's data, its scales, and the scale of activations."""
        value = self.state[name]
        if not isinstance(value, FP8Weight):
            yield name, value.cpu().resolve_conj().resolve_neg().contiguous()
            return
        scaled = value.scaled
        yield self.format.data.of(name), scaled.data.view(torch.uint8).cpu().contiguous().view(scaled.dtype)
        yield self.format.scale.of(name), stored_scale(scaled.scale, self.weights[name], name)
        if name in self.input_scales and self.format.input_scale.of(name) not in self.state:
            yield self.format.input_scale.of(name), self.input_scales[name].cpu().contiguous()

    def size(self, name: str) -> int:
        value = self.state[name]
        if isinstance(value, FP8Weight):
            return value.scaled.data.numel() + 4 * value.scaled.scale.numel()
        return value.numel() * value.element_size()


def _state(model: nn.Module, stored: Pieces) -> dict[str, Tensor]:
    """The tensors by their names in files, each once."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            whole = value.detach()
            if name not in stored:
                state[name] = whole
            for file, piece in stored.get(name, {}).items():
                state[file] = piece_of(name, whole, file, piece)
    return state


def _check_storable(state: Mapping[str, Tensor]) -> None:
    """Raises an error that names the first tensor whose values are not here, or that no safetensors file can hold."""
    stored = tuple(dict.fromkeys(DTYPES.values()))
    for name, value in state.items():
        if is_sharded(value):
            raise NotImplementedError(
                f"save_weights: {name} is a DTensor, of which each rank holds a part; save a module that is not "
                "sharded, with each parameter's full_tensor(), or with get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
            )
        if value.is_meta:
            raise ValueError(f"save_weights: {name} is on the meta device and has no values; load the model first")
        if value.layout != torch.strided or not (isinstance(value, FP8Weight) or value.dtype in stored):
            kind = short_name(value.dtype) if value.layout == torch.strided else f"in the layout {value.layout}"
            raise TypeError(
                f"save_weights: {name} is {kind}, which safetensors files cannot hold; use a dense tensor of "
                f"{', '.join(map(short_name, stored))}"
            )


def _planned(
    state: dict[str, Tensor], format: str | CheckpointLayout, input_scales: Mapping[str, Tensor | float]
) -> _Plan:
    kept = format if isinstance(format, CheckpointLayout) else None
    chosen = FORMATS[kept.format if kept else str(format)]
    scaled = {name: value.scaled for name, value in state.items() if isinstance(value, FP8Weight)}
    given = {name: _as_scale(name, value, scaled) for name, value in input_scales.items()}
    static = kept.input_scales if kept else {}
    stay = {
        name: scale
        for name, scale in static.items()
        if name in scaled and (_is_kept(kept, name, scaled[name]) or takes_static(chosen, scaled[name].block))
    }
    inputs = {**stay, **given}
    weights = {}
    for name, value in scaled.items():
        if kept is not None and _is_kept(kept, name, value) and name not in given:
            weights[name] = kept.weights[name]
            continue
        if value.dtype not in chosen.dtypes:
            raise ValueError(f"save_weights: {name} is {value.dtype}, and '{chosen.name}' declares {chosen.dtypes[0]}")
        powers = value.scale.dtype == SCALE_DTYPES[1]
        try:
            weights[name] = new_layout(
                chosen,
                name,
                value.shape,
                value.block,
                static=name in inputs,
                powers=powers,
            )
        except ValueError as error:
            raise ValueError(f"save_weights: {error}") from None
    others = [name for name in state if name not in scaled]
    # A module's own parameters may be the scales of activations and the other tensors that the layout has.
    own = {chosen.input_scale.of(name) for name in static if name not in given}.union(kept.beside if kept else ())
    try:
        check_names(chosen, scaled.keys(), {name: state[name].dtype for name in others if name not in own})
    except ValueError as error:
        raise ValueError(f"save_weights: {error}") from None
    same = kept is not None and weights == kept.weights
    extra = {
        name: tensor
        for name, tensor in (kept.beside if kept else {}).items()
        if name not in state and (same or not chosen.declaring.fullmatch(name))
    }
    if scaled and not same:
        extra |= dict.fromkeys(chosen.markers, torch.empty(0, dtype=chosen.dtypes[0], device="cpu"))
    left = [name for name in others if name.endswith(".weight") and state[name].ndim in (2, 3)]
    if kept is not None and same:
        declared: Mapping[str, Json] = kept.declared
    else:
        types = {name: state[name].dtype for name in weights}
        sizes = {name: tuple(value.shape) for name, value in scaled.items()}
        try:
            declared = declaration(chosen, Contents(weights, sizes, types, others, left))
        except ValueError as error:
            raise ValueError(f"save_weights: {error}") from None
    return _Plan(chosen, {**state, **extra}, weights, inputs, declared)


def _is_kept(layout: CheckpointLayout | None, name: str, value: ScaledTensor) -> bool:
    """Whether a weight still has the blocks of its layout."""
    return layout is not None and name in layout.weights and layout.weights[name].block == value.block


def _as_scale(name: str, value: Tensor | float, scaled: Mapping[str, ScaledTensor]) -> Tensor:
    if name not in scaled:
        raise ValueError(f"save_weights: input_scales has {name!r}, which is no FP8 weight of the model")
    try:
        scale = torch.as_tensor(value, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        what = f"input_scales[{name!r}]={value!r} is {kind_of(value)}"
        raise TypeError(f"save_weights: {what}; use a float, or a tensor of one element") from None
    if scale.numel() != 1 or not 0 < scale.item() < float("inf"):
        raise ValueError(f"save_weights: input_scales[{name!r}]={value!r} must be one finite and positive number")
    return scale


def _sharded(plan: _Plan) -> Iterator[list[str]]:
    shard: list[str] = []
    total = 0
    for name in plan.state:
        if shard and total + plan.size(name) > _SHARD_BYTES:
            yield shard
            shard, total = [], 0
        shard.append(name)
        total += plan.size(name)
    yield shard


def _texts(plan: _Plan, config: dict[str, Any] | None) -> dict[str, Any]:
    """The contents of the files beside the tensors, by name."""
    texts: dict[str, Any] = {
        name: content for name, content in plan.declared.items() if name not in ("config.json", "metadata")
    }
    section = plan.declared.get("config.json")
    if config is None and section is None:
        return texts
    content = dict(config or {})
    if plan.weights:  # an older declaration is not theirs
        content.pop("quantization_config", None)
        drop_declarations(content)
    texts["config.json"] = content if section is None else {**content, "quantization_config": section}
    return texts


def _config(folder: Path, model: nn.Module) -> dict[str, Any] | None:
    """The content of config.json: what is there, or what the model has, or None."""
    path = folder / "config.json"
    own: Any = getattr(model, "config", None)
    if path.exists():
        return read_json(path)
    if not hasattr(own, "to_json_string"):
        return None
    content: dict[str, Any] = json.loads(own.to_json_string())
    if not content.get("architectures"):  # a config made in Python has none, and servers look the model up by it
        content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return content
