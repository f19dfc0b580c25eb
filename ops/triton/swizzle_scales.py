"""Scales of MX in the order in which sm100 copies them to tensor memory, and the loads of both orders by TMA.

`tcgen05.cp` takes scales from shared memory in blocks of 128 lines by 4 scales along K: 32 rows of 16 bytes, row `i`
with the scales of lines `i`, `i + 32`, `i + 64` and `i + 96`. Triton 3.6 and 3.7 copy scales in this order by
`tcgen05.cp`, and each `tcgen05.mma` waits for the one before it. Scales in any other order go through registers, and
each product waits for itself: a K tile of 128x128x128 with 8 warps then has 10 barriers instead of 5, two loads from
global memory that nothing hides, four stores to shared memory, two `ldmatrix` and two `tcgen05.st` instead of two
`tcgen05.cp` (SASS, by Triton 3.7.1). Loaded by TMA as they lie, they cost 16 loads of single bytes and 9 barriers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8fn.ops.cuda.gemm.operands import as_batch
from fp8fn.ops.products import ScaledProduct
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.views import ceil_div, is_wide

# Lines and elements along K of a block of scales.
LINES: Final = 128
DEPTH: Final = 128
# Bytes of a block, of which a box of TMA takes two halves: its axes have 256 elements at most.
_BYTES: Final = 512
# The scales of each operand, and the argument with the same in blocks.
SCRATCH: Final = {"a_scale": "a_swizzled", "b_scale": "b_swizzled"}
# Blocks along K that a program swizzles.
_DEEP: Final = 8


@triton.jit
def swizzle_scales(
    a_scale, b_scale, a_swizzled, b_swizzled, M, N, K, as_m, as_k, bs_n, bs_k, blocks_k,
    DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`DEEP` blocks along K of 128 lines of a, or past those of b."""
    block = tl.program_id(0)
    blocks_m = tl.cdiv(M, 128)
    if block < blocks_m:
        _swizzle(a_scale, a_swizzled, block, block * 128, M, K, as_m, as_k, blocks_k, DEEP, WIDE)
    else:
        block -= blocks_m
        _swizzle(b_scale, b_swizzled, block, block * 128, N, K, bs_n, bs_k, blocks_k, DEEP, WIDE)


@triton.jit
def _swizzle(scale, swizzled, block, start, end, K, step, step_k, blocks_k, DEEP: tl.constexpr, WIDE: tl.constexpr):
    """The lines from `start` on as the blocks of row `block`; scales of no line or no element are 0."""
    first = tl.program_id(1) * DEEP
    line = start + tl.arange(0, 128)
    scale_k = first * 4 + tl.arange(0, 4 * DEEP)
    inside = (line[:, None] < end) & (scale_k[None, :] * 32 < K)
    if WIDE:
        block = block.to(tl.int64)
        line = line.to(tl.int64)
        scale_k = scale_k.to(tl.int64)
    stored = tl.load(scale + line[:, None] * step + scale_k[None, :] * step_k, mask=inside, other=0)
    ordered = tl.trans(tl.reshape(stored, (4, 32, DEEP, 4)), 2, 1, 0, 3)
    index = tl.arange(0, 512 * DEEP)
    place = swizzled + (block * blocks_k + first) * 512 + index
    tl.store(place, tl.reshape(ordered, (512 * DEEP,)), mask=index < (blocks_k - first) * 512)


@triton.jit
def tma_scales(scales, block, start, k, LINES: tl.constexpr, BK: tl.constexpr, SWIZZLED: tl.constexpr):
    """The stored scales `(LINES, BK // 32)` of K tile `k`: those of row `block` of blocks, or of lines from `start`."""
    if SWIZZLED:
        blocks = scales.load([block, k * (BK // 128), 0, 0])
        lines = tl.trans(tl.reshape(blocks, (LINES // 128, BK // 128, 32, 4, 4)), 0, 3, 2, 1, 4)
        tile = tl.reshape(lines, (LINES, BK // 32))
    else:
        tile = scales.load([k * (BK // 32), start]).T
    return tile


def plan_swizzle(product: ScaledProduct, into: Mapping[str, Tensor] | None = None) -> TritonLaunch:
    """The launch that swizzles the scales of a product of two matrices, by default into memory of its own."""
    m, n, k = product.m, product.n, product.k
    a_scale, b_scale = storage(product.a.scale), storage(product.b.scale)
    blocks_k = ceil_div(k, DEPTH)
    shapes = ((ceil_div(size, LINES), blocks_k, 2, _BYTES // 2) for size in (m, n))
    swizzled = into or {
        name: torch.empty(shape, dtype=torch.uint8, device=product.out.device)
        for name, shape in zip(SCRATCH.values(), shapes, strict=True)
    }
    return TritonLaunch(
        kernel=swizzle_scales,
        grid=(ceil_div(m, LINES) + ceil_div(n, LINES), ceil_div(blocks_k, _DEEP), 1),
        args={
            "a_scale": a_scale, "b_scale": b_scale, **swizzled, "M": m, "N": n, "K": k,
            "as_m": a_scale.stride(-2), "as_k": a_scale.stride(-1),
            "bs_n": b_scale.stride(-1), "bs_k": b_scale.stride(-2), "blocks_k": blocks_k,
        },
        constexprs={"DEEP": _DEEP, "WIDE": is_wide(a_scale, b_scale, *swizzled.values())},
        options={"num_warps": 4},
        target=product.target,
        prepares=True,
        scratch=tuple(swizzled),
    )  # fmt: skip


def swizzled_descriptor(swizzled: Any, lines: int, depth: int) -> TensorDescriptor:
    """Boxes of the blocks of a tile of `lines` by `depth` elements."""
    return TensorDescriptor.from_tensor(swizzled, [lines // LINES, depth // DEPTH, 2, _BYTES // 2])


def lines_descriptor(scale: Tensor, lines: int, depth: int) -> TensorDescriptor:
    """Boxes of the scales `(lines, K / 32)` of a tile as the quantizers store them, contiguous along the lines."""
    return TensorDescriptor.from_tensor(as_batch(storage(scale).mT)[0], [depth // 32, lines])
