"""The format of NVIDIA's TensorRT Model Optimizer: one algorithm for all layers, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from fp8fn.checkpoint.blocks import CHANNEL, E4M3, MX, SQUARE, TENSOR
from fp8fn.checkpoint.files import Json, modules, shortened
from fp8fn.checkpoint.format import (
    Activations,
    Contents,
    Declared,
    Format,
    ScaleForm,
    Scheme,
    Schemes,
    Spelling,
    UnknownScheme,
    WeightLayout,
)
from fp8fn.ops.layout import Block


class _Algorithm(NamedTuple):
    """A `quant_algo`: the block of a weight, and its activations."""

    block: Block
    activations: Activations | None


_ALGORITHMS: Final[Mapping[str, _Algorithm]] = {
    "FP8": _Algorithm(TENSOR, Activations(TENSOR, static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm(CHANNEL, Activations(CHANNEL)),
    "FP8_PB_WO": _Algorithm(SQUARE, None),
    "MXFP8": _Algorithm(MX, Activations(MX)),
}
_MIXED: Final = "MIXED_PRECISION"


def _read(declared: Declared) -> Schemes:
    config = declared.config
    inner = config.get("quantization")
    section = inner if isinstance(inner, dict) else config
    algorithm = _name(section)
    layers: Any = section.get("quantized_layers")
    if algorithm == _MIXED and not isinstance(layers, dict):
        raise ValueError(f"{declared.path}: quantized_layers={shortened(repr(layers))} must be a JSON object of layers")

    def scheme(weight: str, shape: Sequence[int]) -> Scheme:
        layer = layers.get(modules([weight])[0]) if algorithm == _MIXED else section
        name = _name(layer) if isinstance(layer, dict) else "none"
        words = f"quant_algo {name} ({declared.path})"
        if name not in _ALGORITHMS:
            raise UnknownScheme(words)
        return Scheme(*_ALGORITHMS[name], words, E4M3)

    return scheme


def _name(section: Json) -> str:
    return str(shortened(str(section.get("quant_algo")))).upper()


def _declare(contents: Contents) -> dict[str, Json]:
    names = {weight: _algorithm_of(layout) for weight, layout in contents.weights.items()}
    same = len(set(names.values())) == 1
    section: dict[str, Any] = {"quant_algo": next(iter(names.values())) if same else _MIXED}
    if not same:
        section["quantized_layers"] = {modules([weight])[0]: {"quant_algo": name} for weight, name in names.items()}
    left = modules(contents.left)
    whole = {**section, "kv_cache_quant_algo": None, "exclude_modules": left}
    return {
        "config.json": {**section, "ignore": left, "quant_method": "modelopt"},
        "hf_quant_config.json": {"producer": {"name": "fp8fn"}, "quantization": whole},
    }


def _algorithm_of(layout: WeightLayout) -> str:
    return next(name for name, algorithm in _ALGORITHMS.items() if algorithm.block == layout.block)


MODELOPT: Final = Format(
    name="modelopt",
    methods=("modelopt",),
    scale=Spelling("{name}_scale"),
    input_scale=Spelling("{stem}input_scale"),
    forms={
        CHANNEL: ScaleForm("rows", activations=CHANNEL),
        TENSOR: ScaleForm("batch", activations=TENSOR, static=True),
        SQUARE: ScaleForm("spread"),
        MX: ScaleForm(dtype=torch.uint8, activations=MX),
    },
    read=_read,
    declare=_declare,
    mixed=True,
)
