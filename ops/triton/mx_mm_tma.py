"""The MX product by TMA on Blackwell: sm100's `tcgen05.mma` and sm120's `mma`, which take scales.

On sm100 a launch before it swizzles the scales (ops/triton/swizzle_scales.py), which then reach tensor memory by
`tcgen05.cp`; on sm120 the tensor core takes them from registers, and they are loaded as they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.boxes import boxes, load_box, matrix_of
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mx_mm_scaled import FORMATS
from fp8fn.ops.triton.swizzle_scales import SCRATCH, plan_swizzle, stored_boxes, swizzled_boxes, tma_scales
from fp8fn.ops.triton.tile_order import grouped_tile
from fp8fn.ops.triton.views import ceil_div, is_wide
from fp8fn.ops.tuning.mx import MxConfig
from fp8fn.ops.tuning.mx_triton import copies_scales


@triton.jit
def mx_mm_tma(
    a, b, out, a_scale, b_scale, bias, M, N, K, out_b, out_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SWIZZLED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BATCHED: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile; `a (B?, M, K)`, `b (B?, N, K)` and the scales are descriptors, whose boxes end in zeros.

    `BATCHED`: `out` is a batch, and so is each operand whose boxes have three axes.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    matrix = 0
    place = tl.program_id(0)
    if BATCHED:
        matrix = place // (tiles_m * tiles_n)
        place = place % (tiles_m * tiles_n)
        out += matrix.to(tl.int64) * out_b
    tile_m, tile_n = grouped_tile(place, tiles_m, tiles_n, GROUP)
    block_m = matrix_of(a, matrix) * tl.cdiv(M, 128) + tile_m * (BM // 128)
    block_n = matrix_of(b, matrix) * tl.cdiv(N, 128) + tile_n * (BN // 128)
    start_m = tile_m * BM
    start_n = tile_n * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a_tile = load_box(a, matrix, start_m, k * BK)
        b_tile = load_box(b, matrix, start_n, k * BK)
        a_stored = tma_scales(a_scale, block_m, matrix, start_m, k, BM, BK, SWIZZLED)
        b_stored = tma_scales(b_scale, block_n, matrix, start_n, k, BN, BK, SWIZZLED)
        acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, b_tile.T, b_stored, B_FORMAT, acc)

    offset_m = start_m + tl.arange(0, BM)
    offset_n = start_n + tl.arange(0, BN)
    if bias is not None:
        acc += tl.load(bias + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    rows = offset_m[:, None]
    if WIDE:
        rows = rows.to(tl.int64)
    pointers = out + rows * out_m + offset_n[None, :]
    if EVEN:
        tl.store(pointers, acc.to(out.dtype.element_ty))
    else:
        inside = (offset_m[:, None] < M) & (offset_n[None, :] < N)
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=inside)


def plan_mx_mm_tma(product: ScaledProduct, config: MxConfig) -> tuple[TritonLaunch, ...]:
    """The launches of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`; a 2-D operand serves a whole batch.

    K is contiguous in both operands, and is not 0.
    """
    a, b, out, target = product.a, product.b, product.out, product.target
    batch, m, n, k = product.batch, product.m, product.n, product.k
    before, lines = (plan_swizzle(product),) if copies_scales(target) else (), (config.BM, config.BN)
    scales = swizzled_boxes(before[0], lines, config.BK) if before else stored_boxes(product, lines, config.BK)
    multiply = TritonLaunch(
        kernel=mx_mm_tma,
        grid=(batch * ceil_div(m, config.BM) * ceil_div(n, config.BN), 1, 1),
        args={
            "a": boxes(a.data, config.BM, config.BK), "b": boxes(b.data.mT, config.BN, config.BK), "out": out, **scales,
            "bias": product.bias, "M": m, "N": n, "K": k, "out_b": out.stride(0) if batch > 1 else 0,
            "out_m": out.stride(-2),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": config.BK, "GROUP": config.GROUP,
            "A_FORMAT": FORMATS[a.data.dtype], "B_FORMAT": FORMATS[b.data.dtype], "SWIZZLED": bool(before),
            "EVEN": m % config.BM == 0 and n % config.BN == 0, "WIDE": is_wide(out[0] if out.dim() == 3 else out),
            "BATCHED": batch > 1,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        target=target,
        binds=SCRATCH if before else {},
    )  # fmt: skip
    return *before, multiply
