"""The ops `fp8fn::quantize` and `fp8fn::quantize_dual`: schema, checks, and dispatch to the reference or a kernel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize as cuda
from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.call_cache import keep, kind, recall
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import (
    WHOLE,
    Block,
    as_batch,
    contracts_rows,
    empty_data,
    empty_scale,
    is_column_major,
    is_square,
    known_block,
    swap,
    turned,
    unknown_block,
)

QUANTIZE_SCHEMA: Final = (
    'quantize(Tensor x, int[2] block, ScalarType? dtype=None, str scale="fp32") -> (Tensor, Tensor)'
)
QUANTIZE_DUAL_SCHEMA: Final = (
    'quantize_dual(Tensor x, int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32")'
    " -> (Tensor, Tensor, Tensor, Tensor)"
)

_log = logging.getLogger("fp8fn")


def check_quantize(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str = "quantize", arg: str = "x"
) -> tuple[Block, torch.dtype]:
    """The block as a tuple and the element type, or the error that says which argument is wrong and what would work."""
    pair = known_block(block)
    if pair is None:
        raise unknown_block(f"{name}: block", block)
    if x.dtype not in INPUT_DTYPES:
        remedy = "use bfloat16, float16 or float32, x.to(torch.float32) for one"
        raise TypeError(f"{name}: {arg} has dtype {x.dtype}; {remedy}")
    if x.ndim < 2:
        raise ValueError(f"{name}: {arg} has shape {tuple(x.shape)}; it needs at least two dimensions, x[None] for one")
    if scale not in SCALE_FORMATS:
        raise ValueError(f"{name}: scale={scale!r} is not a scale format; use one of {SCALE_FORMATS}")
    if dtype is None:
        dtype = targets.native_e4m3(targets.target_of(x.device))
    elif dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: dtype={dtype} is not an FP8 type; use one of {FP8_DTYPES}")
    return pair, dtype


def empty_dual(x: Tensor, block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `quantize_dual(x, block)`."""
    column_major = contracts_rows(block)
    return (
        empty_data(x, block, dtype, column_major), empty_scale(x, block, scale, column_major),
        empty_data(x, swap(block), dtype, not column_major), empty_scale(x, swap(block), scale, not column_major),
    )  # fmt: skip


def quantize_reference(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    return reference.quantize(x, pair, fp8, scale)


def quantize_kernel(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    key = ("quantize", pair, fp8, scale, kind(x))
    call = recall(key)
    if call is None:
        if not kernel_takes(x, fp8):
            return reference.quantize(x, pair, fp8, scale)
        target = targets.target_of(x.device)
        kernels = columns if WHOLE in pair else cuda
        if not _cuda_takes(x, pair, fp8, target):
            return _quantize_by_triton(x, pair, fp8, scale, target)
        call = keep(key, kernels.call_quantize(x, pair, fp8, scale, target))
    data, scales = call(x)
    return data, scales


def _quantize_by_triton(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str, target: targets.Target
) -> tuple[Tensor, Tensor]:
    from fp8fn.ops.triton.quantize import plan_quantize

    data, scales = empty_data(x, block, dtype), empty_scale(x, block, scale)
    for launch in plan_quantize(as_batch(x), as_batch(data), as_batch(scales), block, scale, target):
        launch.run()
    return data, scales


def quantize_dual_reference(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    return reference.quantize_dual(x, pair, fp8, scale)


def quantize_dual_kernel(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    if contracts_rows(pair):
        col, col_scale, row, row_scale = quantize_dual_kernel(x, swap(pair), fp8, scale)
        return row, row_scale, col, col_scale
    if WHOLE in pair and not is_square(pair):  # a whole row or column does not fit on chip: two launches, two reads
        return *quantize_kernel(x, pair, fp8, scale), *quantize_kernel(x, swap(pair), fp8, scale)
    key = ("quantize_dual", pair, fp8, scale, kind(x))
    call = recall(key)
    if call is None:
        if not kernel_takes(x, fp8):
            return reference.quantize_dual(x, pair, fp8, scale)
        target = targets.target_of(x.device)
        if not _cuda_takes(x, pair, fp8, target):
            return _quantize_dual_by_triton(x, pair, fp8, scale, target)
        call = keep(key, cuda.call_quantize_dual(x, pair, fp8, scale, target))
    row, row_scale, col, col_scale = call(x)
    return row, row_scale, col, col_scale


def _quantize_dual_by_triton(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str, target: targets.Target
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if is_square(block):
        return _both_sides(x, *_quantize_by_triton(x, block, dtype, scale, target))
    from fp8fn.ops.triton.quantize_dual import DUAL_BLOCKS, plan_quantize_dual

    if block not in DUAL_BLOCKS:  # a whole row or column does not fit on chip: two launches, two reads
        row, row_scale = _quantize_by_triton(x, block, dtype, scale, target)
        return row, row_scale, *_quantize_by_triton(x, swap(block), dtype, scale, target)
    out = empty_dual(x, block, dtype, scale)
    row, row_scale, col, col_scale = (as_batch(t) for t in out)
    plan_quantize_dual(as_batch(x), row, row_scale, col, col_scale, block, scale, target).run()
    return out


def _both_sides(x: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The one result of a square block, which lies as `x` does, and a copy that lies the other way."""
    if is_column_major(x):
        return turned(data, False), turned(scales, False), data, scales
    return data, scales, turned(data, True), turned(scales, True)


def _cuda_takes(x: Tensor, block: Block, dtype: torch.dtype, target: targets.Target) -> bool:
    """Whether the kernels in CUDA C++ serve; Triton's do where they don't."""
    kernels = columns if WHOLE in block else cuda
    reason = kernels.accepts(x, block, dtype, target) or nvrtc.unavailable()
    if reason is not None and _log.isEnabledFor(logging.DEBUG):
        _log.debug("quantize %s in %s by Triton: %s", tuple(x.shape), block, reason)
    return reason is None


def kernel_takes(x: Tensor, dtype: torch.dtype) -> bool:
    target = targets.target_of(x.device)
    targets.check_supported(target, x.device)
    if x.numel() == 0:
        return False
    if dtype not in targets.fp8_dtypes(target):
        _log.debug("quantize: %s has no kernel on %s; plain PyTorch serves", dtype, target.name)
        return False
    return True
