"""Operands of the quantizers on Hopper: what the kernels can address, element types as macros, the size of the L2."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.limits import MOST_BLOCKS
from fp8fn.ops.operands import Quantization
from fp8fn.ops.targets import OCP, hopper_fault

# Columns that a thread loads and stores at once.
OCTET: Final = 8
LARGEST_INT32: Final = 2**31 - 1
# Rows of a tile of `quantize.cu`; no more than `MOST_BLOCKS` tiles lie below each other.
TILE_ROWS: Final = 128
L2_BYTES: Final = 50 * 2**20
_ALIGNMENT: Final = 16
_INPUTS: Final = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
_FP8: Final = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}


def hardware_fault(q: Quantization) -> str | None:
    """Why no kernel of this folder quantizes on the target, or to the element type, or None."""
    if (reason := hopper_fault(q.target)) is not None:
        return reason
    if q.dtype not in OCP:
        return f"{q.dtype} is no type of the hardware"
    return None


def rows_fault(x: Tensor, name: str = "x", more_blocks: int = 0) -> str | None:
    """Why kernels cannot address the rows of `x (..., M, N)`, in more blocks than it has, or None."""
    m, n = x.shape[-2:]
    matrices = math.prod(x.shape[:-2])
    if x.stride(-1) != 1 and n > 1:
        return f"{name} has strides {x.stride()}, none of the last two 1"
    if max(m, n, x.stride(-2)) > LARGEST_INT32:
        return f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, past 32 bits"
    if max(-(-m // TILE_ROWS) + more_blocks, matrices) > MOST_BLOCKS:
        return f"{name} has shape {tuple(x.shape)}, more than {MOST_BLOCKS} blocks of rows or matrices"
    step = m * x.stride(-2)
    for size, stride in zip(x.shape[-3::-1], x.stride()[-3::-1], strict=True):
        if size > 1 and stride != step:
            return f"{name} has strides {x.stride()}: its matrices do not follow each other"
        step *= size
    return None


def offsets_fault(q: Quantization) -> str | None:
    """Why kernels cannot read the offsets, or None; also None without groups."""
    if q.offsets is None or q.offsets.is_contiguous():
        return None
    return f"offsets has stride {q.offsets.stride(0)}, not 1"


def outgrows_l2(x: Tensor, times: int = 1) -> bool:
    """Whether `x` has more bytes than the L2 of a Hopper chip, or so many times as many.

    If so, loads of `x` may carry a hint to leave the L2 last, and stores then leave the L2 sooner, which is faster the
    larger `x` is. After `x` was written, a part of it is still in the L2, which counts for more if `x` is only a few
    times larger than the L2.
    """
    return x.numel() * x.element_size() > times * L2_BYTES


def is_aligned(x: Tensor) -> bool:
    """Whether every 8 columns from a multiple of 8 on load by 16 bytes; a `meta` tensor's address is 0."""
    return x.data_ptr() % _ALIGNMENT == 0 and (x.dim() == 1 or x.stride(-2) * x.element_size() % _ALIGNMENT == 0)


def input_type(x: Tensor) -> str:
    return f"Element::{_INPUTS[x.dtype]}"


def types(q: Quantization) -> dict[str, int | str]:
    """The macros of the element types."""
    return {
        "INPUT": input_type(q.x),
        "FP8": f"Fp8::{_FP8[q.dtype]}",
        "FORMAT": f"Format::{q.scale.upper()}",
    }
