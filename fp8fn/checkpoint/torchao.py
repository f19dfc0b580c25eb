"""torchao's safetensors: a tensor subclass's parts under names of their own, and its attributes in the file's metadata.

The metadata has an entry for each tensor, JSON of `_type`, `_data` (the attributes) and `_tensor_data_names`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from fp8fn.checkpoint.blocks import CHANNEL, E4M3, GROUP, MX, SQUARE, TENSOR
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
from fp8fn.ops.layout import WHOLE, Block, known_block

NAMES: Final = "tensor_names"  # the key of the metadata's list
_PARTS: Final = ["qdata", "scale"]
# The parts of a weight whose activations have a static scale, in torchao's order: optional ones first.
_STATIC: Final = ["act_quant_scale", *_PARTS]
PLAIN: Final = json.dumps({"_type": "Tensor"})  # the entry of a tensor that is no subclass


def _read(declared: Declared) -> Schemes:
    def scheme(weight: str, shape: Sequence[int]) -> Scheme:
        note = declared.metadata.get(weight)
        try:
            entry = json.loads(str(note))
            kind, data = entry["_type"], entry["_data"]
            parts = entry["_tensor_data_names"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UnknownScheme(f"no scheme: the file's metadata for {weight!r} is {shortened(str(note))!r}") from None
        words = f"torchao's {shortened(str(kind))}"
        static = parts == _STATIC and kind == "Float8Tensor"
        if not isinstance(data, dict) or not (static or parts == _PARTS):
            raise UnknownScheme(f"{words} of parts {shortened(str(parts))}")
        if kind == "Float8Tensor":
            return Scheme(_block(data.get("block_size"), shape, words), _activations(data, static, words), words)
        if kind == "MXTensor" and _value(data.get("elem_dtype")) == "float8_e4m3fn" and data.get("block_size") == 32:
            if data.get("is_swizzled_scales"):
                raise UnknownScheme(f"{words} with swizzled scales")
            return Scheme(MX, Activations(MX) if data.get("act_quant_kwargs") else None, words, E4M3)
        raise UnknownScheme(words)

    return scheme


def _value(encoded: Any) -> Any:
    """The value of an encoded type or enumeration."""
    return encoded.get("_data") if isinstance(encoded, dict) else encoded


def _block(sizes: object, shape: Sequence[int], words: str) -> Block:
    """The block of a `block_size`, which writes a whole axis as its size."""
    if sizes is None or sizes == []:
        return TENSOR
    if not isinstance(sizes, list) or len(sizes) < 2 or not all(type(size) is int for size in sizes):
        raise UnknownScheme(f"{words} of block_size {shortened(repr(sizes))}")
    rows, columns = sizes[-2:]
    if (rows, columns) != SQUARE and columns == shape[-1]:
        rows, columns = (WHOLE if rows == shape[-2] and rows != 1 else rows), WHOLE
    block = known_block((rows, columns))
    if block is None:
        raise UnknownScheme(f"{words} of block_size {shortened(repr(sizes))}")
    return block


def _activations(data: dict[str, Any], static: bool, words: str) -> Activations | None:
    arguments = _value(data.get("act_quant_kwargs"))
    if arguments is None:
        return None
    granularity = arguments.get("granularity") if isinstance(arguments, dict) else None
    kind = granularity.get("_type") if isinstance(granularity, dict) else None
    if kind == "PerBlock":
        sizes = _value(granularity)
        block = known_block(sizes.get("block_size")) if isinstance(sizes, dict) else None
    else:
        block = {"PerRow": CHANNEL, "PerTensor": TENSOR}.get(str(kind))
    if block is None:
        raise UnknownScheme(f"{words} with activations {shortened(json.dumps(granularity))}")
    return Activations(block, static)


def _encoded(kind: str, data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data}


def _granularity(block: Block) -> dict[str, Any]:
    if block == CHANNEL:
        return _encoded("PerRow", {"dim": -1})
    return _encoded("PerTensor", {}) if block == TENSOR else _encoded("PerBlock", {"block_size": list(block)})


_E4M3_NOTE: Final = _encoded("torch.dtype", "float8_e4m3fn")
_MM: Final = _encoded("Float8MMConfig", {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False})
_AUTO: Final = _encoded("KernelPreference", "AUTO")


def _note(shape: tuple[int, ...], layout: WeightLayout, dtype: torch.dtype) -> str:
    """The metadata's entry of a weight."""
    asked = layout.activations
    stands_for = _encoded("torch.dtype", str(dtype).removeprefix("torch."))
    if layout.block == MX:
        kwargs: dict[str, Any] = {
            "elem_dtype": _E4M3_NOTE,
            "block_size": 32,
            "scaling_mode": _encoded("ScaleCalculationMode", "FLOOR"),
        }
        inputs = _encoded(
            "QuantizeTensorToMXKwargs", {**kwargs, "kernel_preference": _AUTO, "is_swizzled_scales": False}
        )
        data: dict[str, Any] = {
            "act_quant_kwargs": inputs if asked else None, "elem_dtype": _E4M3_NOTE, "block_size": 32,
            "orig_dtype": stands_for, "kernel_preference": _AUTO, "is_swizzled_scales": False,
        }  # fmt: skip
        return json.dumps({**_encoded("MXTensor", data), "_tensor_data_names": _PARTS})
    sizes = [size if b == WHOLE else b for size, b in zip(shape[-2:], layout.block, strict=True)]
    arguments: dict[str, Any] = {
        "float8_dtype": _E4M3_NOTE,
        "granularity": _granularity(asked.block if asked else CHANNEL),
        "mm_config": _MM,
    }
    arguments |= {"hp_value_lb": None, "hp_value_ub": None, "kernel_preference": _AUTO}
    data = {
        "block_size": [1] * (len(shape) - 2) + sizes, "mm_config": _MM,
        "act_quant_kwargs": _encoded("QuantizeTensorToFloat8Kwargs", arguments) if asked else None,
        "kernel_preference": _AUTO, "dtype": stands_for,
    }  # fmt: skip
    # torchao waits for a weight whose tensors in the file are not as many as the names here.
    parts = _STATIC if asked and asked.static else _PARTS
    return json.dumps({**_encoded("Float8Tensor", data), "_tensor_data_names": parts})


def _declare(contents: Contents) -> dict[str, Json]:
    first = next(iter(contents.weights.values()))
    notes = {name: _note(contents.shapes[name], w, contents.dtypes[name]) for name, w in contents.weights.items()}
    notes |= dict.fromkeys(contents.others, PLAIN)
    section = {
        "include_input_output_embeddings": False,
        "modules_to_not_convert": modules(contents.left),
        "quant_method": "torchao",
        "quant_type": {"default": _config(first)},
        "untie_embedding_weights": False,
    }
    return {"config.json": section, "metadata": {**notes, NAMES: json.dumps(list(notes))}}


def _config(layout: WeightLayout) -> dict[str, Any]:
    """torchao's configuration that makes such weights."""
    if layout.block == MX:
        data = {
            "block_size": 32,
            "activation_dtype": _E4M3_NOTE,
            "weight_dtype": _E4M3_NOTE,
            "kernel_preference": _AUTO,
        }
        return {**_encoded("MXDynamicActivationMXWeightConfig", data), "_version": 1}
    if layout.activations is None:
        return {**_encoded("Float8WeightOnlyConfig", {"weight_dtype": _E4M3_NOTE}), "_version": 2}
    granularity = [_granularity(layout.activations.block), _granularity(layout.block)]
    data = {"activation_dtype": _E4M3_NOTE, "weight_dtype": _E4M3_NOTE, "granularity": granularity, "mm_config": _MM}
    return {**_encoded("Float8DynamicActivationFloat8WeightConfig", data), "_version": 2}


TORCHAO: Final = Format(
    name="torchao",
    methods=("torchao", None),
    data=Spelling("{prefix}_{leaf}_qdata"),
    scale=Spelling("{prefix}_{leaf}_scale"),
    input_scale=Spelling("{prefix}_{leaf}_act_quant_scale"),
    beside=re.compile(r"(?!)"),
    forms={
        CHANNEL: ScaleForm(activations=CHANNEL),
        TENSOR: ScaleForm(activations=TENSOR, may_be_static=True),
        SQUARE: ScaleForm(activations=GROUP),
        MX: ScaleForm(dtype=torch.float8_e8m0fnu, activations=MX),
    },
    read=_read,
    declare=_declare,
    weight_only=True,
)
