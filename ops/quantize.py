"""The ops `fp8fn::quantize` and `fp8fn::quantize_dual`: schema, checks, and dispatch to the reference or a kernel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import BLOCKS, Block, contracts_rows, empty_data, empty_scale, is_square, known_block, swap

QUANTIZE_SCHEMA: Final = (
    'quantize(Tensor x, int[2] block, ScalarType? dtype=None, str scale="fp32") -> (Tensor, Tensor)'
)
QUANTIZE_DUAL_SCHEMA: Final = (
    'quantize_dual(Tensor x, int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32")'
    " -> (Tensor, Tensor, Tensor, Tensor)"
)

_log = logging.getLogger("fp8fn")


def check_quantize(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str = "quantize"
) -> tuple[Block, torch.dtype]:
    """The block as a tuple and the element type, or the error that says which argument is wrong and what would work."""
    pair = known_block(block)
    if pair is None:
        given = tuple(block)
        raise ValueError(f"{name}: block={given} is not a block of fp8fn; use one of {BLOCKS} (-1 is a whole axis)")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: x has dtype {x.dtype}; use bfloat16, float16 or float32, x.to(torch.float32) for one")
    if x.ndim < 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it needs at least two dimensions, x[None] for one")
    if scale not in SCALE_FORMATS:
        raise ValueError(f"{name}: scale={scale!r} is not a scale format; use one of {SCALE_FORMATS}")
    if dtype is None:
        dtype = targets.native_e4m3(targets.target_of(x.device))
    elif dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: dtype={dtype} is not an FP8 type; use one of {FP8_DTYPES}")
    return pair, dtype


def check_dual_block(block: Block) -> None:
    if is_square(block):
        raise ValueError(f"quantize_dual: block={block} is its own transpose; quantize once, and use .mT of the result")


def quantize_reference(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    return reference.quantize(x, pair, fp8, scale)


def quantize_kernel(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    if not _kernel_takes(x, fp8):
        return reference.quantize(x, pair, fp8, scale)
    from fp8fn.ops.triton.quantize import plan_quantize

    data, scales = empty_data(x, pair, fp8), empty_scale(x, pair, scale)
    for launch in plan_quantize(
        _as_batch(x), _as_batch(data), _as_batch(scales), pair, scale, targets.target_of(x.device)
    ):
        launch.run()
    return data, scales


def quantize_dual_reference(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    check_dual_block(pair)
    return reference.quantize_dual(x, pair, fp8, scale)


def quantize_dual_kernel(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    check_dual_block(pair)
    if contracts_rows(pair):
        col, col_scale, row, row_scale = quantize_dual_kernel(x, swap(pair), fp8, scale)
        return row, row_scale, col, col_scale
    if pair not in ((1, 128), (1, 32)):  # a whole row or column does not fit on chip: two launches, two reads
        return *quantize_kernel(x, pair, fp8, scale), *quantize_kernel(x, swap(pair), fp8, scale)
    if not _kernel_takes(x, fp8):
        return reference.quantize_dual(x, pair, fp8, scale)
    from fp8fn.ops.triton.quantize_dual import plan_quantize_dual

    row, row_scale = empty_data(x, pair, fp8), empty_scale(x, pair, scale)
    col, col_scale = empty_data(x, swap(pair), fp8), empty_scale(x, swap(pair), scale)
    target = targets.target_of(x.device)
    rows, columns = (_as_batch(row), _as_batch(row_scale)), (_as_batch(col), _as_batch(col_scale))
    plan_quantize_dual(_as_batch(x), *rows, *columns, pair, scale, target).run()
    return row, row_scale, col, col_scale


def _kernel_takes(x: Tensor, dtype: torch.dtype) -> bool:
    target = targets.target_of(x.device)
    targets.check_supported(target, x.device)
    if x.numel() == 0:
        return False
    if dtype not in targets.fp8_dtypes(target):
        _log.debug("quantize: %s has no kernel on %s; plain PyTorch serves", dtype, target.name)
        return False
    return True


def _as_batch(x: Tensor) -> Tensor:
    """Leading dimensions as one: `(..., M, N)` → `(B, M, N)`; a matrix stays one."""
    return x if x.ndim <= 3 else x.flatten(0, -3)
