"""The table of formats, and the format of a checkpoint: by its config, then by the names of its tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fp8fn.checkpoint.comfy import COMFY, SCALED_FP8
from fp8fn.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from fp8fn.checkpoint.files import Checkpoint, Shard, read_json, shortened
from fp8fn.checkpoint.format import Declared, Format
from fp8fn.checkpoint.fp8 import AUTOFP8, DEEPSEEK, MXFP8
from fp8fn.checkpoint.modelopt import MODELOPT
from fp8fn.checkpoint.torchao import TORCHAO
from fp8fn.ops.formats import FP8_DTYPES

# The first format whose scales are spelled so is taken, where several share a method or the lack of one.
FORMATS: Final[Mapping[str, Format]] = {
    format.name: format
    for format in (DEEPSEEK, AUTOFP8, MXFP8, COMPRESSED_TENSORS, MODELOPT, TORCHAO, SCALED_FP8, COMFY)
}
METHODS: Final = sorted({method for format in FORMATS.values() for method in format.methods if method is not None})
# The names of a declaration in config.json, or in its `text_config`; the second is that of older compressed-tensors.
_SECTIONS: Final = ("quantization_config", "compression_config")

# Names of tensors that mark a scheme that is not read, and the scheme's name.
_OTHERS: Final = (
    (re.compile(r"(?:.*\.)?g_idx|.*weight_g_idx"), "GPTQ with activation order (g_idx)"),
    (re.compile(r"(?:.*\.)?qzeros|.*weight_zero_point"), "asymmetric integers (zero points)"),
    (re.compile(r"(?:.*\.)?qweight"), "packed integers (GPTQ or AWQ)"),
    (re.compile(r".*\.weight_packed"), "packed four-bit weights"),
    (re.compile(r".*weight_scale_2|.*weight_global_scale"), "NVFP4 (two levels of scales)"),
    (re.compile(r".*_proj_blocks"), "MXFP4 blocks"),
    (re.compile(r".*\.quant_state\.bitsandbytes__.*|.*\.weight\.absmax"), "bitsandbytes"),
    (re.compile(r".*\.SCB"), "bitsandbytes' int8"),
    (re.compile(r".*\.pre_quant_scale"), "smoothed activations (pre_quant_scale)"),
)


def read_declared(checkpoint: Checkpoint, owners: Mapping[str, Shard]) -> Declared:
    """The declarations of the files beside the tensors, and of the metadata of the shards."""
    metadata: dict[str, Any] = {}
    for shard in dict.fromkeys(owners.values()):
        metadata.update(shard.metadata)
    path = checkpoint.folder / "config.json"
    config = _section(path)
    files = {} if config is None else {path.name: config}
    method = None if config is None else config.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise ValueError(f"{path}: quant_method={shortened(repr(method))} must be a string")
    exported = checkpoint.folder / "hf_quant_config.json"  # NVIDIA's, also beside a config.json that says nothing
    if method in (None, "modelopt") and os.path.lexists(exported):
        files[exported.name] = read_json(exported)
        if method is None:
            path, config, method = exported, dict(files[exported.name]), "modelopt"
    return Declared(path, method, config or {}, metadata, files, owners)


def _section(path: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a config.json, None where there is none.

    Older files of compressed-tensors call it `compression_config`; models of several parts have it in `text_config`.
    """
    if not os.path.lexists(path):  # a broken link is an error, not a checkpoint without a config
        return None
    config = read_json(path)
    places: tuple[tuple[str, Any], ...] = ("", config), ("text_config.", config.get("text_config"))
    for prefix, part in places:
        for name in _SECTIONS if isinstance(part, dict) else ():
            section = part.get(name)
            if section is not None and not isinstance(section, dict):
                raise ValueError(f"{path}: {prefix}{name}={shortened(repr(section))} must be a JSON object")
            if section is not None:
                return {"quant_method": "compressed-tensors", **section} if name == "compression_config" else section
    return None


def drop_declarations(config: dict[str, Any]) -> None:
    """Removes the declarations of a config.json that a new `quantization_config` at its top would contradict."""
    config.pop("compression_config", None)
    if isinstance(config.get("text_config"), dict):
        for name in _SECTIONS:
            config["text_config"].pop(name, None)


def format_of(owners: Mapping[str, Shard], declared: Declared) -> Format:
    """The format of a checkpoint. Raises ValueError where it has a scheme that no format has, or two formats."""
    for name, shard in owners.items():
        for pattern, scheme in _OTHERS:
            if pattern.fullmatch(name):
                raise _not_read(shard, name, scheme)
    possible = [format for format in FORMATS.values() if declared.method in format.methods]
    if not possible:
        scheme = f"quant_method {shortened(declared.method or '')!r} of {declared.path}"
        name = next(iter(owners))
        raise _not_read(owners[name], name, scheme)
    found = {format.name: _first_scale(format, owners) for format in FORMATS.values()}
    chosen = next((format for format in possible if found[format.name] is not None), possible[0])
    for format in FORMATS.values():
        other = found[format.name]
        if other is not None and format.scale.template != chosen.scale.template:
            first = found[chosen.name]
            by = f"{first!r} is of {chosen.name}" if first else f"{declared.path} declares {chosen.name}"
            raise ValueError(
                f"{owners[other].path}: tensor {other!r} has scales as {format.name} names them, and {by}; a "
                "checkpoint has one format"
            )
    return chosen


def _not_read(shard: Shard, name: str, scheme: str) -> ValueError:
    return ValueError(
        f"{shard.path}: tensor {name!r} is of a checkpoint in {scheme}, which fp8fn does not read; it reads 16-bit "
        f"checkpoints and those of {', '.join(METHODS)}"
    )


def _first_scale(format: Format, owners: Mapping[str, Shard]) -> str | None:
    """The first tensor that is a scale of an FP8 weight in the format's spelling."""
    for name in owners:
        weight = format.scale.weight(name)
        data = None if weight is None else format.data.of(weight)
        if data is not None and data in owners and owners[data].kind(data)[0] in FP8_DTYPES:
            return name
    return None
