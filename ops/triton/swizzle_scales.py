"""Scales of MX in the order in which sm100 copies them to tensor memory, and their loads by TMA.

`tcgen05.cp` takes scales from shared memory in blocks of 128 lines by 4 scales along K: 32 rows of 16 bytes, row `i`
with the scales of lines `i`, `i + 32`, `i + 64` and `i + 96`. Triton 3.6 and 3.7 copy scales in this order by
`tcgen05.cp`, and each `tcgen05.mma` waits for the one before it. Scales in any other order go through registers, and
each product waits for itself: a K tile of 128x128x128 with 8 warps then has 10 barriers instead of 5, two loads from
global memory that nothing hides, four stores to shared memory, two `ldmatrix` and two `tcgen05.st` instead of two
`tcgen05.cp` (SASS, by Triton 3.7.1). Loaded by TMA as they lie, they cost 16 loads of single bytes and 9 barriers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8fn.ops.groups import STEP, most_tokens, spread_blocks
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.boxes import boxes, load_box
from fp8fn.ops.triton.group_tiles import borders, group_at, places, places_of, tile_rows
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.views import batched, ceil_div, is_wide

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
    a_scale, b_scale, a_swizzled, b_swizzled, offsets, M, N, K, E, as_e, as_m, as_k, bs_e, bs_n, bs_k, blocks_k,
    DEEP: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, ALONG_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`DEEP` blocks along K of 128 lines of a, or past those of b, which has one matrix or several.

    With `offsets`, lines of a are the rows of one tile of one group, as of `grouped_rows_mm`. `MASKED`: a has `E`
    matrices, of `M` rows each, or as many as `offsets` says. `ALONG_K`: at the `offsets` groups of `K` tokens together
    end, as of `grouped_k_mm`, and each has blocks of its own; then `DEEP` is 1.
    """
    block = tl.program_id(0)
    if ALONG_K:
        blocks_m = tl.cdiv(M, 128)
    else:
        blocks_m = places(M, E, 128, MASKED)
    first = tl.program_id(1) * DEEP
    if ALONG_K:
        scale_k, inside_k = _of_group(offsets, first, K, E, GROUPS)
    else:
        scale_k = first * 4 + tl.arange(0, 4 * DEEP)
        inside_k = scale_k * 32 < K
    if block < blocks_m:
        if ALONG_K or offsets is None:
            group = block // tl.cdiv(M, 128)
            start = block % tl.cdiv(M, 128) * 128
            end = M
        else:
            group, start, end = tile_rows(offsets, block, M, E, 128, GROUPS, MASKED)
        if MASKED:
            a_scale += group.to(tl.int64) * as_e
        _swizzle(a_scale, a_swizzled, block, start, end, first, scale_k, inside_k, as_m, as_k, blocks_k, DEEP, WIDE)
    else:
        block -= blocks_m
        blocks_n = tl.cdiv(N, 128)
        b_scale += (block // blocks_n).to(tl.int64) * bs_e
        start = block % blocks_n * 128
        _swizzle(b_scale, b_swizzled, block, start, N, first, scale_k, inside_k, bs_n, bs_k, blocks_k, DEEP, WIDE)


@triton.jit
def _of_group(offsets, block, T, E, GROUPS: tl.constexpr):
    """Where the 4 scales of a block along K are stored, those of group `g` from `start // 32 + g` on, and which exist.

    The blocks of group `g` are those from `start // 128 + g` on.
    """
    group, first = group_at(offsets, block, T, E, 128, GROUPS)
    start, end = borders(offsets, group, T, E)
    scale = (block - first) * 4 + tl.arange(0, 4)
    return start // 32 + group + scale, (group < E) & (scale >= 0) & (scale * 32 < end - start)


@triton.jit
def _swizzle(
    scale, swizzled, block, start, end, first, scale_k, inside_k, step, step_k, blocks_k,
    DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The lines from `start` on as the blocks of row `block`; scales of no line or no element are 0."""
    line = start + tl.arange(0, 128)
    inside = (line[:, None] < end) & inside_k[None, :]
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
def tma_scales(scales, block, matrix, start, k, LINES: tl.constexpr, BK: tl.constexpr, SWIZZLED: tl.constexpr):
    """The stored scales `(LINES, BK // 32)` of K tile `k`: those of row `block` of blocks, or of lines from `start`.

    `block` counts through all matrices of a batch, and `start` in matrix `matrix`.
    """
    if SWIZZLED:
        blocks = scales.load([block, k * (BK // 128), 0, 0])
        lines = tl.trans(tl.reshape(blocks, (LINES // 128, BK // 128, 32, 4, 4)), 0, 3, 2, 1, 4)
        tile = tl.reshape(lines, (LINES, BK // 32))
    else:
        tile = load_box(scales, matrix, k * (BK // 32), start).T
    return tile


def plan_swizzle(product: ScaledProduct, into: Mapping[str, Tensor] | None = None) -> TritonLaunch:
    """The launch that swizzles the scales of a product, by default into memory of its own.

    The product is one of two matrices or batches, of groups of rows in tiles of 128, or of groups along K.
    """
    m, n, k, masked = product.m, product.n, product.k, product.offsets is None
    offsets = product.counts if masked else product.offsets
    a_scale, b_scale = batched(storage(product.a.scale)), batched(storage(product.b.scale))
    along_k = not masked and product.b.data.dim() == 2
    groups = a_scale.shape[0] if offsets is None else offsets.shape[0]
    blocks_m = ceil_div(m, LINES) * groups if masked else m // LINES + groups + 1
    blocks_n, blocks_k = ceil_div(n, LINES) * b_scale.shape[0], ceil_div(k, DEPTH)
    deep = 1 if along_k else _DEEP
    if along_k:
        k = most_tokens(k, groups, STEP)
        blocks_m, blocks_k = ceil_div(m, LINES), spread_blocks(k, groups)
    swizzled = into or {
        name: torch.empty((blocks, blocks_k, 2, _BYTES // 2), dtype=torch.uint8, device=product.out.device)
        for name, blocks in zip(SCRATCH.values(), (blocks_m, blocks_n), strict=True)
    }
    return TritonLaunch(
        kernel=swizzle_scales,
        grid=(blocks_m + blocks_n, ceil_div(blocks_k, deep), 1),
        args={
            "a_scale": a_scale, "b_scale": b_scale, **swizzled, "offsets": offsets,
            "M": m, "N": n, "K": k, "E": groups,
            "as_e": a_scale.stride(0), "as_m": a_scale.stride(1), "as_k": a_scale.stride(2),
            "bs_e": b_scale.stride(0), "bs_n": b_scale.stride(2), "bs_k": b_scale.stride(1), "blocks_k": blocks_k,
        },
        constexprs={
            "DEEP": deep, "GROUPS": places_of(groups), "MASKED": masked, "ALONG_K": along_k,
            "WIDE": is_wide(a_scale, b_scale, *swizzled.values()),
        },
        options={"num_warps": 4},
        target=product.target,
        prepares=True,
        scratch=tuple(swizzled),
        binds={"offsets": "counts"} if product.counts is not None else {},
    )  # fmt: skip


def swizzled_boxes(swizzle: TritonLaunch, lines: tuple[int, int], depth: int) -> dict[str, TensorDescriptor]:
    """Boxes of what a launch swizzles, for tiles of `lines` of a and of b by `depth` elements."""
    return {
        name: TensorDescriptor.from_tensor(swizzle.args[swizzled], [count // LINES, depth // DEPTH, 2, _BYTES // 2])
        for (name, swizzled), count in zip(SCRATCH.items(), lines, strict=True)
    }


def stored_boxes(product: ScaledProduct, lines: tuple[int, int], depth: int) -> dict[str, TensorDescriptor]:
    """Boxes of the scales of both operands as the quantizers store them, contiguous along the lines."""
    scales = storage(product.a.scale).mT, storage(product.b.scale)
    return {name: boxes(scale, depth // 32, count) for name, scale, count in zip(SCRATCH, scales, lines, strict=True)}
