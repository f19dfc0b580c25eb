"""The ops `fp8fn::quantize_grouped` and `fp8fn::quantize_grouped_dual`: no scale holds for tokens of two groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize import quantize_grouped as cuda
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.call_cache import keep, kind, recall
from fp8fn.ops.groups import ROWS, check_ends, check_offsets, empty_grouped
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale, known_block, swap
from fp8fn.ops.quantize import check_quantize, kernel_takes, quantize_kernel

QUANTIZE_GROUPED_SCHEMA: Final = (
    "quantize_grouped(Tensor x, Tensor offsets, int[2] block=[128, 1], ScalarType? dtype=None,"
    ' str scale="fp32") -> (Tensor, Tensor)'
)
QUANTIZE_GROUPED_DUAL_SCHEMA: Final = (
    "quantize_grouped_dual(Tensor x, Tensor offsets, int[2] block=[1, 128], ScalarType? dtype=None,"
    ' str scale="fp32") -> (Tensor, Tensor, Tensor, Tensor)'
)
GROUPED_BLOCKS: Final[tuple[Block, ...]] = ((ROWS, 1), (WHOLE, 1))
DUAL_BLOCKS: Final[tuple[Block, ...]] = ((1, ROWS), (1, WHOLE))

_log = logging.getLogger("fp8fn")


def check_quantize_grouped(
    x: Tensor, offsets: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str,
    name: str = "quantize_grouped", blocks: tuple[Block, ...] = GROUPED_BLOCKS,
) -> tuple[Block, torch.dtype]:  # fmt: skip
    """The block as a tuple and the element type, or the error that says which argument is wrong and what would work."""
    pair = known_block(block)
    if pair not in blocks:
        raise ValueError(f"{name}: block={tuple(block)} is not a block of grouped tokens; use one of {blocks}")
    checked = check_quantize(x, pair, dtype, scale, name)
    if x.ndim != 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it must be (M, N), the tokens of all groups")
    check_offsets(name, offsets, "x", x)
    return checked


def empty_grouped_dual(
    x: Tensor, groups: int, block: Block, dtype: torch.dtype, scale: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `quantize_grouped_dual(x, offsets, block)`."""
    row = empty_data(x, block, dtype), empty_scale(x, block, scale)
    return *row, *empty_grouped(x, groups, swap(block), dtype, scale)


def quantize_grouped_reference(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale)
    check_ends("quantize_grouped", offsets)
    return reference.quantize_grouped(x, offsets, pair, fp8, scale)


def quantize_grouped_dual_reference(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale, "quantize_grouped_dual", DUAL_BLOCKS)
    check_ends("quantize_grouped_dual", offsets)
    return reference.quantize_grouped_dual(x, offsets, pair, fp8, scale)


def quantize_grouped_kernel(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale)
    key = ("quantize_grouped", pair, fp8, scale, kind(x), kind(offsets))
    call = recall(key)
    if call is None:
        if not kernel_takes(x, fp8):
            return reference.quantize_grouped(x, offsets, pair, fp8, scale)
        target = targets.target_of(x.device)
        if not _cuda_takes(x, offsets, pair, fp8, target):
            return _quantize_grouped_by_triton(x, offsets, pair, fp8, scale, target)
        kernels = columns if WHOLE in pair else cuda
        call = keep(key, kernels.call_quantize_grouped(x, offsets, fp8, scale, target))
    data, scales = call(x, offsets)
    return data, scales


def quantize_grouped_dual_kernel(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale, "quantize_grouped_dual", DUAL_BLOCKS)
    if pair[1] == WHOLE:  # neither a whole row nor a whole group fits on chip
        row, row_scale = quantize_kernel(x, pair, fp8, scale)
        return row, row_scale, *quantize_grouped_kernel(x, offsets, swap(pair), fp8, scale)
    key = ("quantize_grouped_dual", fp8, scale, kind(x), kind(offsets))
    call = recall(key)
    if call is None:
        if not kernel_takes(x, fp8):
            return reference.quantize_grouped_dual(x, offsets, pair, fp8, scale)
        target = targets.target_of(x.device)
        if not _cuda_takes(x, offsets, pair, fp8, target):
            return _quantize_grouped_dual_by_triton(x, offsets, pair, fp8, scale, target)
        call = keep(key, cuda.call_quantize_grouped_dual(x, offsets, fp8, scale, target))
    row, row_scale, col, col_scale = call(x, offsets)
    return row, row_scale, col, col_scale


def _cuda_takes(x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, target: targets.Target) -> bool:
    """Whether the kernels in CUDA C++ serve; Triton's do where they don't."""
    if WHOLE in block:
        reason = columns.accepts_grouped(x, offsets, dtype, target) or nvrtc.unavailable()
    else:
        reason = cuda.accepts(x, offsets, dtype, target) or nvrtc.unavailable()
    if reason is not None and _log.isEnabledFor(logging.DEBUG):
        _log.debug("quantize_grouped %s in %s by Triton: %s", tuple(x.shape), block, reason)
    return reason is None


def _quantize_grouped_by_triton(
    x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, scale: str, target: targets.Target
) -> tuple[Tensor, Tensor]:
    from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped

    data, scales = empty_grouped(x, offsets.shape[0], block, dtype, scale)
    for launch in plan_quantize_grouped(x, offsets, data, scales, block, scale, target):
        launch.run()
    return data, scales


def _quantize_grouped_dual_by_triton(
    x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, scale: str, target: targets.Target
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped_dual

    out = empty_grouped_dual(x, offsets.shape[0], block, dtype, scale)
    plan_quantize_grouped_dual(x, offsets, *out, scale, target).run()
    return out
