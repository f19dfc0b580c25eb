"""Formats whose config says `quant_method: fp8` or `mxfp8`: DeepSeek's and Qwen's, MiniMax's, and AutoFP8's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from fp8fn.checkpoint.blocks import E4M3, GROUP, MX, SQUARE, TENSOR
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
)
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.layout import BLOCKS, WHOLE, Block, known_block


def declared_block(sizes: object, where: str) -> Block:
    """The block of a list of two sizes in a config."""
    whole = isinstance(sizes, list) and all(type(size) is int for size in sizes)  # 128.0 == 128, and True == 1
    block = known_block(sizes) if whole else None
    if block is None:
        raise ValueError(
            f"{where}={shortened(repr(sizes))} is no block of fp8fn; it must be a list of two ints, one of "
            f"{list(map(list, BLOCKS))}"
        )
    return block


def _read(declared: Declared) -> Schemes:
    config, path = declared.config, declared.path
    kind = config.get("fmt", "e4m3")
    words = "" if declared.method is None else f"{declared.method} {kind} ({path})"
    if kind not in ("e4m3", "float8_e4m3fn"):

        def unknown(weight: str, shape: Sequence[int]) -> Scheme:
            raise UnknownScheme(words)

        return unknown
    sizes = config.get("weight_block_size")
    block = None if sizes is None else declared_block(sizes, f"{path}: weight_block_size")
    activations = _activations(path, config.get("activation_scheme"), block)
    # Files without a config declare no type.
    return _same_for_all(Scheme(block, activations, words, FP8_DTYPES if declared.method is None else E4M3))


def _activations(path: Path | None, scheme: object, block: Block | None) -> Activations | None:
    if scheme is None:
        return None
    if scheme == "static":
        return Activations(TENSOR, static=True)
    if scheme != "dynamic":
        raise ValueError(f"{path}: activation_scheme={shortened(repr(scheme))} must be 'dynamic' or 'static'")
    return Activations((1, WHOLE if block is None else block[1]))


def _read_mx(declared: Declared) -> Schemes:
    return _same_for_all(Scheme(MX, Activations(MX), f"mxfp8 ({declared.path})", E4M3))


def _same_for_all(scheme: Scheme) -> Schemes:
    return lambda weight, shape: scheme


def _declare(method: str, left: str) -> Callable[[Contents], dict[str, Json]]:
    def declare(contents: Contents) -> dict[str, Json]:
        first = next(iter(contents.weights.values()))
        static = first.activations is not None and first.activations.static
        section: dict[str, Any] = {
            "activation_scheme": "static" if static else "dynamic",
            "fmt": "e4m3",
            left: modules(contents.left),
        }
        section["quant_method"] = method
        section["weight_block_size"] = None if first.block == TENSOR else list(first.block)
        return {"config.json": section}

    return declare


DEEPSEEK: Final = Format(
    name="deepseek",
    methods=("fp8", None),
    scale=Spelling("{name}_scale_inv"),
    input_scale=Spelling("{stem}activation_scale"),
    forms={
        SQUARE: ScaleForm(activations=GROUP),
        GROUP: ScaleForm(activations=GROUP),
        MX: ScaleForm(activations=MX),
        TENSOR: ScaleForm("batch", activations=(1, WHOLE), may_be_static=True),
    },
    read=_read,
    declare=_declare("fp8", "modules_to_not_convert"),
)
MXFP8: Final = Format(
    name="mxfp8",
    methods=("mxfp8",),
    scale=Spelling("{name}_scale_inv"),
    input_scale=Spelling("{stem}activation_scale"),
    forms={MX: ScaleForm(dtype=torch.uint8, activations=MX)},
    read=_read_mx,
    declare=_declare("mxfp8", "ignored_layers"),
)
AUTOFP8: Final = Format(
    name="autofp8",
    methods=("fp8",),
    scale=Spelling("{name}_scale"),
    input_scale=Spelling("{stem}input_scale"),
    forms={TENSOR: ScaleForm("batch", activations=(1, WHOLE), may_be_static=True)},
    read=_read,
    declare=_declare("fp8", "ignored_layers"),
)
