"""ComfyUI's files of diffusion models: one scale a weight, spelled `scale_weight` in older and `weight_scale` in newer.

They have no config beside them. The newer ones name the layers in the file's metadata or in a tensor a layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import torch

from fp8fn.checkpoint.blocks import TENSOR
from fp8fn.checkpoint.files import Json, Shard, modules, shortened
from fp8fn.checkpoint.format import Contents, Declared, Format, ScaleForm, Scheme, Schemes, Spelling, UnknownScheme

LAYERS: Final = "_quantization_metadata"  # the key of the metadata that names the layers
_LAYER: Final = "comfy_quant"  # the tensor of a layer with the bytes of its entry, as ComfyUI itself saves models
_FORMATS: Final = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def _read_old(declared: Declared) -> Schemes:
    return lambda weight, shape: Scheme(None, None, "one scale a weight")


def _read(declared: Declared) -> Schemes:
    text = declared.metadata.get(LAYERS)
    try:
        layers = {} if text is None else json.loads(text)["layers"]
        names = {module: layer["format"] for module, layer in layers.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{declared.path}: metadata {LAYERS}={shortened(str(text))!r} names no layers") from None

    def scheme(weight: str, shape: Sequence[int]) -> Scheme:
        module = modules([weight])[0]
        marker = f"{module}.{_LAYER}"
        shard = declared.owners.get(marker)
        kind, place = (names.get(module), LAYERS) if shard is None else (_format(shard, marker), _LAYER)
        if kind is None:
            return Scheme(None, None, "one scale a weight")
        if str(kind) not in _FORMATS:
            raise UnknownScheme(f"{place}'s format {shortened(str(kind))!r}")
        return Scheme(None, None, f"{place}'s format {kind}", (_FORMATS[str(kind)],))

    return scheme


def _format(shard: Shard, marker: str) -> object:
    """The format in a layer's tensor, which holds JSON."""
    try:
        return json.loads(bytes(shard.tensor(marker).flatten().tolist()))["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{shard.path}: tensor {marker!r} holds no JSON object with a format") from None


def _declare_old(contents: Contents) -> dict[str, Json]:
    return {}


def _declare(contents: Contents) -> dict[str, Json]:
    layers = {module: {"format": "float8_e4m3fn"} for module in modules(list(contents.weights))}
    return {"metadata": {LAYERS: json.dumps({"format_version": "1.0", "layers": layers})}}


SCALED_FP8: Final = Format(
    name="scaled_fp8",
    methods=(None,),
    scale=Spelling("{stem}scale_weight"),
    input_scale=Spelling("{stem}scale_input"),
    beside=re.compile(r"(?!)"),
    declaring=re.compile(r"(?:.*\.)?scaled_fp8"),
    forms={TENSOR: ScaleForm("batch", may_be_static=True)},
    read=_read_old,
    declare=_declare_old,
    dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
    markers=("scaled_fp8",),
)
COMFY: Final = Format(
    name="comfy",
    methods=(None,),
    scale=Spelling("{name}_scale"),
    input_scale=Spelling("{stem}input_scale"),
    declaring=re.compile(rf"(?:.*\.)?{_LAYER}"),
    forms={TENSOR: ScaleForm("batch", may_be_static=True)},
    read=_read,
    declare=_declare,
)
