"""How FP8 weights are stored in a format, and what the format declares of them: for saving and converting."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from fp8fn.checkpoint.blocks import MX, TENSOR
from fp8fn.checkpoint.files import Json
from fp8fn.checkpoint.format import Activations, Contents, Format, WeightLayout, shapes
from fp8fn.checkpoint.formats import FORMATS
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.layout import Block

_RENAME: Final = "rename it, or use another format"


def takes_static(format: Format, block: Block) -> bool:
    """Whether activations of weights in these blocks may have a static scale in the format."""
    form = format.forms.get(block)
    return form is not None and (form.static or form.may_be_static)


def new_layout(
    format: Format, name: str, shape: Sequence[int], block: Block, *, static: bool, powers: bool, remedy: str = ""
) -> WeightLayout:
    """How a format stores a weight; `powers`: its scales are e8m0, which only MX blocks keep as exponents.

    Raises ValueError where it has no such blocks, or needs a scale of activations, or has none. `remedy` is what the
    message offers beside another format, in place of `input_scales`.
    """
    form = format.forms.get(block)
    if form is None:
        able = [repr(other.name) for other in FORMATS.values() if block in other.forms]
        others = f"use {' or '.join(able)}" if able else "quantize it in another block"
        others += f", or {remedy}" if remedy else ""
        raise ValueError(f"{name} has blocks of {block}, and '{format.name}' has only {list(format.forms)}; {others}")
    if form.static and not static:
        usual = "pass input_scales={name: scale}, or use another block or format"
        raise ValueError(
            f"{name} has blocks of {block}, for which '{format.name}' declares a static scale of activations; "
            f"{f'use another format, or {remedy}' if remedy else usual}"
        )
    if static and not takes_static(format, block):
        raise ValueError(
            f"{name} has blocks of {block}, for which '{format.name}' has no static scale of activations; leave "
            f"input_scales out, or use blocks of {TENSOR}"
        )
    activations = None if form.activations is None else Activations(form.activations)
    if static:
        activations = Activations(TENSOR, static=True)
    dtype = torch.uint8 if powers and block == MX and form.dtype == torch.float32 else form.dtype
    possible = shapes(shape, block)
    grid, stored = possible["grid"], possible[form.shape]
    # Experts have a scale each, for which a shape of one scale has no room.
    return WeightLayout(block, stored if math.prod(stored) == math.prod(grid) else grid, dtype, activations)


def declaration(format: Format, contents: Contents) -> dict[str, Json]:
    """What a format declares of a checkpoint. Raises ValueError for several schemes where it can declare one."""
    schemes: dict[object, str] = {}
    for name, weight in contents.weights.items():
        schemes.setdefault((weight.block, weight.activations), name)
    if not contents.weights:
        return {}
    if len(schemes) > 1 and not format.mixed:
        first, second = list(schemes.values())[:2]
        one, other = (contents.weights[name] for name in (first, second))
        words = (
            f"{first} has blocks of {one.block} and {second} of {other.block}"
            if one.block != other.block
            else f"{first} has activations of {one.activations} and {second} of {other.activations}"
        )
        raise ValueError(f"{words}, and '{format.name}' declares one block for all weights; use 'compressed-tensors'")
    return format.declare(contents)


def check_names(format: Format, weights: Collection[str], others: Mapping[str, torch.dtype]) -> None:
    """Raises ValueError where other tensors have the names of a weight's parts, or a reader would take them for scales.

    `others` are the types of the tensors that are no FP8 weights, by name.
    """
    if not weights:
        return
    owners: dict[str, str] = dict.fromkeys(format.markers, f"the marker of '{format.name}'")
    parts = (format.data, "data"), (format.scale, "scales"), (format.input_scale, "scale of activations")
    for weight in weights:
        for spelling, words in parts:
            name, part = spelling.of(weight), f"the {words} of {weight} in '{format.name}'"
            if name in owners:
                raise ValueError(f"{owners[name]} and {part} would both be {name}; rename one of them")
            owners[name] = part
    for name in others:
        if name in owners:
            raise ValueError(f"{name} is a tensor of its own, and the name of {owners[name]}; {_RENAME}")
        for other in FORMATS.values():
            weight_of = other.scale.weight(name)
            if weight_of is None:
                continue
            data = other.data.of(weight_of)
            dtype = torch.float8_e4m3fn if data in owners else others.get(data)
            spelled_so = other.scale.template == format.scale.template
            if spelled_so and data not in owners and dtype in FP8_DTYPES:
                continue  # an FP8 weight in two parameters, as of transformers' own layers
            if spelled_so and not other.may_be_own(weight_of, dtype):
                raise ValueError(
                    f"{name} is a tensor of its own, and '{format.name}' reads it as scales of {data}; {_RENAME}"
                )
            if not spelled_so and dtype in FP8_DTYPES:
                raise ValueError(
                    f"{name} is a tensor of its own, and '{other.name}' would name the scales of {data} so; {_RENAME}"
                )


def stored_scale(scale: Tensor, layout: WeightLayout, name: str) -> Tensor:
    """A weight's scales as the file holds them, on the CPU.

    Scales that a 16-bit type of the file cannot hold are float32: readers take either.
    """
    values = scale.float().cpu()
    if math.prod(layout.scale_shape) == 1 != values.numel() and bool((values == values.flatten()[0]).all()):
        values = values.flatten()[:1]
    values = values.reshape(layout.scale_shape if math.prod(layout.scale_shape) == values.numel() else values.shape)
    powers = layout.scale_dtype in (torch.uint8, torch.float8_e8m0fnu)
    dtype = torch.float8_e8m0fnu if powers else layout.scale_dtype
    stored = values.to(dtype).clone(memory_format=torch.contiguous_format)
    if torch.equal(stored.float(), values):
        return stored.view(torch.uint8) if layout.scale_dtype == torch.uint8 else stored
    if powers:
        raise ValueError(
            f"{name} has scales that are no powers of two, which its format stores by their exponents; quantize it "
            "with scale='e8m0'"
        )
    return values.clone(memory_format=torch.contiguous_format)
