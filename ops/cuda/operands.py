"""Operands as CUDA kernels take them: what TMA, loads and 32 bits can address, types as macros, steps in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.limits import MOST_BLOCKS, TMA_ALIGNMENT
from fp8fn.ops.layout import WHOLE, Block, round_up
from fp8fn.ops.operands import BESIDE, Quantization, Quantized, WeightProduct
from fp8fn.ops.targets import OCP, hopper_fault

# Element types as macros of the kernels, and FP8 types as `wgmma` has them too.
ELEMENT: Final = {torch.bfloat16: "Element::BF16", torch.float16: "Element::FP16", torch.float32: "Element::FP32"}
WGMMA_FP8: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FP8: Final = {dtype: f"Fp8::{name.upper()}" for dtype, name in WGMMA_FP8.items()}
SCALES: Final[dict[Block, str]] = {(128, 128): "BLOCK", (128, 1): "VECTOR", (WHOLE, 1): "LINE", (WHOLE, WHOLE): "LINE"}
SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
# The FP8 values that add up to one of 16 bits, of which bfloat16 has 8 significant ones and float16 11.
PARTS: Final = {torch.bfloat16: 2, torch.float16: 3}
# Columns that a thread loads and stores at once.
OCTET: Final = 8
LARGEST_INT32: Final = 2**31 - 1
# Rows of a tile of `quantize.cu`; no more than `MOST_BLOCKS` tiles lie below each other.
TILE_ROWS: Final = 128
L2_BYTES: Final = 50 * 2**20
_ALIGNMENT: Final = 16


def map_fault(x: Tensor) -> str | None:
    """Why TMA cannot address a matrix or a batch of them, or None."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return f"has stride {x.stride(-1)} along its contiguous axis, not 1"
    for axis in range(x.dim() - 1):
        if x.shape[axis] > 1 and (x.stride(axis) * x.element_size() % TMA_ALIGNMENT or x.stride(axis) == 0):
            return f"has a stride of {x.stride(axis) * x.element_size()} bytes, no multiple of 16"
    if x.shape[-2] > 1 and x.stride(-2) < x.shape[-1]:
        return f"has lines of {x.shape[-1]} elements at a stride of {x.stride(-2)}"
    if x.data_ptr() % TMA_ALIGNMENT:  # meta tensors answer too: their base is 0
        return "starts at an address that is no multiple of 16"
    return None


def tma_batch(x: Tensor) -> Tensor:
    """`(M, K)` → `(1, M, K)`; strides of axes of size 1, which may be anything, become ones that a descriptor takes."""
    batches, (rows, columns) = x.shape[0] if x.dim() == 3 else 1, x.shape[-2:]
    lead = x.stride(-2) if rows > 1 else round_up(columns, TMA_ALIGNMENT // x.element_size())
    return x.as_strided((batches, rows, columns), (x.stride(0) if batches > 1 else lead * rows, lead, 1))


def is_k_contiguous(w: Tensor) -> bool:
    """Whether the columns of `w (B?, K, N)` are lines in memory, as `nn.Linear` keeps them; or single elements."""
    return w.shape[-2] == 1 or (w.stride(-2) == 1 and (w.stride(-1) != 1 or w.shape[-1] == 1))


def has_pieces(x: Tensor) -> bool:
    """Whether the rows of `x` load by 16 bytes."""
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return aligned and all(step % 8 == 0 for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)


def weight_product_types(product: WeightProduct) -> dict[str, int | str]:
    """The macros that say what the operands of a product by a quantized weight are."""
    return {
        "INPUT": ELEMENT[product.x.dtype],
        "FP8": FP8[product.w.data.dtype],
        "SCALE": SCALES[product.w.block],
        "OUT": ELEMENT[product.out.dtype],
        "BIAS": 0 if product.bias is None else ELEMENT[product.bias.dtype],
    }


def beside_fault(product: WeightProduct, accepts: Callable[[WeightProduct], str | None]) -> str | None:
    """Why a kernel cannot multiply `x` by the weights beside the first one in one launch, or None.

    `accepts` tells whether it takes each of them alone. How scales lie is not compared.
    """
    for name, (weight, bias, out) in zip(BESIDE, product.beside, strict=False):
        if (weight.block, weight.data.dtype) != (product.w.block, product.w.data.dtype):
            return f"w and w_{name} differ in block or type"
        if _form(bias) != _form(product.bias):
            return f"the biases of w and w_{name} differ in type or stride, or one has none"
        if (reason := accepts(replace(product, w=weight, bias=bias, out=out, beside=()))) is not None:
            return f"w_{name}: {reason}"
    return None


def _form(bias: Tensor | None) -> tuple[torch.dtype, int] | None:
    return None if bias is None else (bias.dtype, bias.stride(-1))


def strides_of_scales(product: WeightProduct) -> str:
    """The reason that the scales of several weights differ in strides."""
    strides = [weight.scale.stride() for weight in (product.w, *(each.w for each in product.beside))]
    return f"the scales of the weights have strides {' and '.join(map(str, strides))}"


def column_steps(product: WeightProduct) -> dict[str, int]:
    """The arguments that say where scales and biases of columns lie, in the order of the kernels."""
    scale, bias = product.w.scale, product.bias
    return {
        "s_batch": batch_step(scale),
        "s_k": scale.stride(-2),
        "s_n": scale_step(product.w),
        "bias_batch": 0 if bias is None or bias.dim() == 1 else bias.stride(0),
        "bias_n": 0 if bias is None else bias.stride(-1),
    }


def batch_step(x: Tensor) -> int:
    """From a matrix to the next; 0 where one serves the whole batch."""
    return x.stride(0) if x.dim() == 3 else 0


def scale_step(w: Quantized) -> int:
    """From the scale of a column, or a block of them, to the next; 0 where one serves all."""
    return 0 if w.block == (WHOLE, WHOLE) else w.scale.stride(-1)


def hardware_fault(q: Quantization) -> str | None:
    """Why no kernel in CUDA C++ quantizes on the target, or to the element type, or None."""
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


def quantization_types(q: Quantization) -> dict[str, int | str]:
    """The macros that say what a quantizer reads and stores."""
    return {
        "INPUT": ELEMENT[q.x.dtype],
        "FP8": FP8[q.dtype],
        "FORMAT": f"Format::{q.scale.upper()}",
    }
