"""Launches that quantize whole columns."""

from __future__ import annotations

from typing import TypeAlias

from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize import stream_columns, walk_columns
from fp8fn.ops.cuda.quantize.quantize_columns import ColumnsConfig
from fp8fn.ops.cuda.quantize.stream_columns import StreamConfig
from fp8fn.ops.cuda.quantize.walk_columns import WalkConfig
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.operands import Quantization
from fp8fn.ops.quantize import QUANTIZE
from fp8fn.ops.quantize_grouped import QUANTIZE_GROUPED

WholeColumnsConfig: TypeAlias = "tuple[ColumnsConfig, int | None] | StreamConfig | WalkConfig | None"


def planned(q: Quantization, config: WholeColumnsConfig = None) -> tuple[CudaLaunch, ...]:
    if config is None:
        launches = (QUANTIZE if q.offsets is None else QUANTIZE_GROUPED).plan(q)
        return tuple(launch for launch in launches if isinstance(launch, CudaLaunch))
    if isinstance(config, StreamConfig):
        clusters = None if q.x.is_cuda else 2  # each with panel after panel
        return (stream_columns.plan_part(q, config, clusters),)
    if isinstance(config, WalkConfig):
        return walk_columns.plan(q, config, None if q.x.is_cuda else 3)
    return columns.plan(q, *config)


def run(launches: tuple[CudaLaunch, ...]) -> None:
    from fp8fn.ops.cuda.runtime.launch import pointers

    for launch in launches:
        launch.prepare().launch(pointers(launch.args))
