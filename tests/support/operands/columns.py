"""Launches that quantize whole columns, with outputs in which what is left out shows."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize import stream_columns, walk_columns
from fp8fn.ops.cuda.quantize.quantize import Quantized
from fp8fn.ops.cuda.quantize.quantize_columns import Tile
from fp8fn.ops.cuda.quantize.stream_columns import (
    Stream,
)
from fp8fn.ops.cuda.quantize.walk_columns import Walk
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import empty_data, empty_scale
from fp8fn.ops.targets import SM90

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Config: TypeAlias = "tuple[Tile, int | None] | Stream | Walk | None"


def planned(x: Tensor, out: Quantized, scale: str, offsets: Tensor | None, config: Config) -> tuple[CudaLaunch, ...]:
    if config is None:
        return columns.plan(x, out, scale, SM90, offsets)
    if isinstance(config, Stream):
        clusters = None if x.is_cuda else 2  # each with panel after panel
        return (stream_columns.plan_part(x, out, scale, SM90, offsets, config, clusters),)
    if isinstance(config, Walk):
        assert offsets is not None
        return (walk_columns.plan(x, out, scale, SM90, offsets, config, None if x.is_cuda else 3),)
    return (columns.plan_panels(x, out, scale, SM90, offsets, *config),)


def empty(x: Tensor, offsets: Tensor | None, dtype: torch.dtype = E4M3, scale: str = "fp32") -> Quantized:
    """Outputs in which what is left out shows."""
    if offsets is None:
        out = Quantized(empty_data(x, (-1, 1), dtype), empty_scale(x, (-1, 1), scale))
    else:
        out = Quantized(*empty_grouped(x, offsets.shape[0], (-1, 1), dtype, scale))
    for part in out:
        part.view(torch.uint8).fill_(0x55)
    return out


def run(launches: tuple[CudaLaunch, ...]) -> None:
    from fp8fn.ops.cuda.runtime.launch import pointers

    for launch in launches:
        launch.prepare().launch(pointers(launch.args))
