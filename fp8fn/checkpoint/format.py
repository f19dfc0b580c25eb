"""`Format`: the declaration of a format of FP8 checkpoints; and the statements of a checkpoint about its weights.

A `Format` is one object of the table in `formats.py`. Loading, saving and converting read it and know no format's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fp8fn.checkpoint.blocks import TENSOR
from fp8fn.checkpoint.files import Json, Shard
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.layout import WHOLE, Block, scale_shape, swap
from fp8fn.ops.recipe import Recipe


class UnknownScheme(ValueError):
    """A weight is stored in a way that no format of the table has; the text names it."""


class Spelling:
    """How a tensor is named after its weight, and the weight after the tensor.

    In the template `{name}` is the weight's name, `a.b.weight`; `{prefix}` is `a.b.` and `{leaf}` is `weight`; `{stem}`
    is `a.b.`, or `a.b_` for a parameter `a.b` of another name, as experts have.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        patterns = {"name": "(?P<name>.+)", "prefix": r"(?P<prefix>(?:.*\.)?)", "leaf": r"(?P<leaf>[^.]+)"}
        patterns["stem"] = r"(?P<stem>|.*[._])"
        parts = re.split(r"\{(\w+)\}", template)
        self._pattern = re.compile("".join(patterns[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)))

    def of(self, weight: str) -> str:
        """The tensor's name."""
        parent, dot, leaf = weight.rpartition(".")
        stem = parent + dot if leaf == "weight" else f"{weight}_"
        return self.template.format(name=weight, prefix=parent + dot, leaf=leaf, stem=stem)

    def weight(self, name: str) -> str | None:
        """The weight whose tensor has this name, or None."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        parts = found.groupdict()
        if "stem" in parts:
            return str(parts["stem"][:-1] if parts["stem"].endswith("_") else f"{parts['stem']}weight")
        return str(parts["name"] if "name" in parts else parts["prefix"] + parts["leaf"])


@dataclass(frozen=True)
class Activations:
    """The FP8 activations that a checkpoint asks for.

    Args:
        block: Block of their scales.
        static: Whether the checkpoint holds the scale; else each call computes it.
    """

    block: Block
    static: bool = False


@dataclass(frozen=True)
class Scheme:
    """The files' scheme of one weight. `block` is None where it follows from shapes; errors quote `words`.

    `dtypes` are the FP8 types that the files declare; any where they declare none.
    """

    block: Block | None = None
    activations: Activations | None = None
    words: str = ""
    dtypes: Sequence[torch.dtype] = FP8_DTYPES


@dataclass(frozen=True)
class WeightLayout:
    """How a checkpoint stores one weight.

    Args:
        block: Block of the scales.
        scale_shape: Shape of the scales in the file.
        scale_dtype: Type of the scales in the file; scales of powers of two may be uint8.
        activations: Activations that the checkpoint asks for; None for 16-bit activations, or where it says nothing.
    """

    block: Block
    scale_shape: tuple[int, ...]
    scale_dtype: torch.dtype
    activations: Activations | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The product that the checkpoint asks for, None for 16-bit activations."""
        if self.activations is None:
            return None
        rows = self.activations.block
        scale: Any = "e8m0" if self.scale_dtype in (torch.uint8, torch.float8_e8m0fnu) else "fp32"
        return Recipe(activation_block=rows, weight_block=swap(self.block), gradient_block=rows, scale=scale)


@dataclass(frozen=True)
class CheckpointLayout:
    """The statements of a checkpoint's files beside the values of its parameters.

    `save_weights(model, path, format=layout)` writes the same bytes again. `recipes` and `input_scales` are what it
    says of activations.

    Args:
        format: Name of the format.
        weights: Layout of each FP8 weight, by its name in the files.
        input_scales: Static scales of activations, by the weight's name in the files.
        beside: The format's other tensors, by their names: scales of a key-value cache, markers.
        declared: What the files declare: the `quantization_config` under "config.json", the metadata of the safetensors
            files under "metadata", another file under its name.

    Shape:
        `input_scales[name] ()` or `(1,)`, as in the file.

    Raises:
        AttributeError: An attribute is assigned: a layout is frozen.

    Example:
        >>> import tempfile
        >>> model, folder = torch.nn.Sequential(torch.nn.Linear(256, 256)), tempfile.mkdtemp()
        >>> report = fp8fn.quantize_weights(model)
        >>> fp8fn.save_weights(model, folder)
        >>> layout = fp8fn.load_weights(model, folder).layout
        >>> layout.format, layout.recipes["0.weight"].key
        ('deepseek', 'blockwise')
    """

    format: str
    weights: Mapping[str, WeightLayout]
    input_scales: Mapping[str, Tensor] = field(default_factory=dict)
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    declared: Mapping[str, Json] = field(default_factory=dict)

    @property
    def recipes(self) -> dict[str, Recipe | None]:
        """The recipe of each FP8 weight's product; None for 16-bit activations, or where the files say nothing."""
        return {name: weight.recipe for name, weight in self.weights.items()}


@dataclass(frozen=True)
class Declared:
    """The declarations of a checkpoint's files: the quantization of the config `path`, the metadata of all shards.

    `owners` has the shard of each tensor, for formats that declare in tensors.
    """

    path: Path
    method: str | None
    config: Json
    metadata: Json
    files: Mapping[str, Json]
    owners: Mapping[str, Shard]


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to write: its FP8 weights, their shapes and types, and the names of other tensors.

    `left` are the matrices among the others. A dtype is the one that the weight stands for.
    """

    weights: Mapping[str, WeightLayout]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    others: Sequence[str]
    left: Sequence[str]


Schemes: TypeAlias = Callable[[str, Sequence[int]], Scheme]


@dataclass(frozen=True)
class ScaleForm:
    """How a format writes the scales of one block.

    Args:
        shape: Name of the shape in `SHAPES`.
        dtype: Type of the scales; uint8 holds the exponents of powers of two.
        activations: Block of the dynamic activations that the format declares by default; None: 16 bits.
        static: Whether the format asks for a static scale of activations.
        may_be_static: Whether it may have one. No server multiplies weights in blocks along K by such activations.
    """

    shape: str = "grid"
    dtype: torch.dtype = torch.float32
    activations: Block | None = None
    static: bool = False
    may_be_static: bool = False


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of FP8 checkpoints.

    Args:
        name: Name of the format in `save_weights` and `convert`.
        methods: The `quant_method`s of a config that mark it. With None, names of tensors mark it without a config.
        scale: Spelling of a weight's scales.
        data: Spelling of a weight's data.
        input_scale: Spelling of a static scale of activations.
        beside: Pattern of its other tensors that are no parameters: scales of key-value caches.
        declaring: Pattern of its tensors that declare the weights, as metadata does; another declaration replaces them.
        forms: The blocks that it can write, and how.
        read: What the declaration says of each weight, as a function of its name and shape.
        declare: The declaration of a checkpoint; see `CheckpointLayout.declared`.
        dtypes: FP8 types of its weights.
        mixed: Whether a checkpoint can declare several blocks.
        weight_only: Whether a checkpoint declares for each weight if its activations stay in 16 bits.
        markers: Tensors of no elements that mark the format.
    """

    name: str
    methods: tuple[str | None, ...]
    scale: Spelling
    data: Spelling = field(default_factory=lambda: Spelling("{name}"))
    input_scale: Spelling
    beside: re.Pattern[str] = re.compile(r"(?:.*\.)?[kvq]_scale")
    declaring: re.Pattern[str] = re.compile(r"(?!)")
    forms: Mapping[Block, ScaleForm]
    read: Callable[[Declared], Schemes]
    declare: Callable[[Contents], dict[str, Json]]
    dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    mixed: bool = False
    weight_only: bool = False
    markers: tuple[str, ...] = ()

    def may_be_own(self, weight: str, dtype: torch.dtype | None) -> bool:
        """Whether the tensor that is spelled like the scales of `weight` may be a model's own, or a cache's.

        `logit_scale` stands beside a `logit` of 16 or 32 bits, or alone, and so does `k_scale`. `dtype` is the type of
        what is spelled like the weight's data, None if that is not there.
        """
        if self.scale.template != "{name}_scale" or weight.endswith("weight"):
            return False
        return dtype is None or (dtype.is_floating_point and dtype.itemsize > 1)


def shapes(shape: Sequence[int], block: Block) -> dict[str, tuple[int, ...]]:
    """The shapes in which formats store the scales of a weight, by name."""
    grid = scale_shape(shape, block)
    found = {"grid": grid}
    if block[1] == WHOLE:
        found["rows"] = grid[:-1]  # `(N,)` for `(N, 1)`
    if block == TENSOR:
        found.update(batch=grid[:-2], one=(1,), scalar=())
    if WHOLE not in block:
        found["spread"] = (*grid[:-2], grid[-2], 1, grid[-1], 1)
    return found
