"""The portable product of 16- or 32-bit activations and an FP8 weight, converted on its way to the tensor core.

A tile is computed transposed, `outᵀ = wᵀ xᵀ`: so the weight is the left operand, the one that Hopper's wgmma takes from
registers, where it has just been converted. The scale multiplies the float32 sum wherever it is constant along the
tile's part of K, and is free. Where it changes with every element of K, as in the input's gradient of a weight that was
quantized by channels, the weight itself is multiplied, and rounded to the type of `x`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.overlap import overlapping, overlaps, wait
from fp8fn.ops.triton.scale import scale_value, storage
from fp8fn.ops.triton.tile_order import grouped_tile, tile_scales
from fp8fn.ops.triton.views import batch_stride, batched, ceil_div, is_wide
from fp8fn.ops.tuning import amd
from fp8fn.ops.tuning.amd_kernels import MM_A16W8

if TYPE_CHECKING:
    from fp8fn.ops.tuning.weight import WeightProblem


@dataclass(frozen=True)
class A16W8Config:
    """Tile and compiler options of `mm_a16w8`."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    GROUP: int = 8
    options: tuple[tuple[str, int], ...] = field(default=())


@triton.jit
def mm_a16w8(
    x, w, out, w_scale, bias, M, N, K, x_b, x_m, x_k, x_step, w_b, w_k, w_n, w_step, out_b, out_m,
    s_b, s_k, s_n, bias_b, bias_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, S_K: tl.constexpr, S_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, TRANS_STORE: tl.constexpr,
    BY_FLOAT32: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of one matrix of the batch; a scale holds for `S_K x S_N` elements of `w`."""
    wait(OVERLAPS)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = grouped_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    if WIDE:
        batch = batch.to(tl.int64)
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
    offset_m = tile_m * BM + tl.arange(0, BM)
    offset_n = tile_n * BN + tl.arange(0, BN)
    acc = weight_tile(
        x + batch * x_b, w + batch * w_b, w_scale + batch * s_b, offset_m, M, tile_n * BN, N, K,
        x_m, x_k, x_step, w_k, w_n, w_step, s_k, s_n, BM, BN, BK, S_K, S_N, EVEN_M, EVEN_N, EVEN_K, WIDE, BY_FLOAT32,
    )  # fmt: skip
    if bias is not None:
        acc = with_bias(acc, bias + batch * bias_b, offset_n, N, bias_n)
    store_tile(out + batch * out_b, acc, offset_m, M, offset_n, N, out_m, EVEN_M, EVEN_N, TRANS_STORE)


@triton.jit
def weight_tile(
    x, w, w_scale, offset_m, end_m, start_n, N, K, x_m, x_k, x_step, w_k, w_n, w_step, s_k, s_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S_K: tl.constexpr, S_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, BY_FLOAT32: tl.constexpr,
):  # fmt: skip
    """The sums `(BN, BM)` of rows `offset_m` before `end_m` of one matrix, and of `BN` columns from `start_n` on.

    With BY_FLOAT32, FP8 goes to bfloat16 by float32, else directly.
    """
    offset_n = start_n + tl.arange(0, BN)
    offset_k = tl.arange(0, BK)
    if WIDE:
        offset_k = offset_k.to(tl.int64)
    x_pointers = x + offset_k[:, None] * x_k + offset_m[None, :] * x_m
    w_pointers = w + offset_n[:, None] * w_n + offset_k[None, :] * w_k
    kind: tl.constexpr = x.dtype.element_ty
    # A float32 product is too slow to show the time of a multiplication, which keeps its sums in the caller's range.
    ON_WEIGHT: tl.constexpr = kind == tl.float32
    VECTOR: tl.constexpr = S_N != -1 and S_N % BN != 0

    # A scale that is one number is loaded one K tile ahead, so that no product waits for it. A vector of scales, or one
    # more number beside float32, would spill registers in some configurations.
    AHEAD: tl.constexpr = S_K > 1 and not VECTOR and not ON_WEIGHT
    if AHEAD:
        scale = tile_scales(w_scale, start_n, offset_n, N, s_n, S_N, BN, EVEN_N)

    acc = tl.zeros((BN, BM), tl.float32)
    steps = tl.cdiv(K, BK)
    for k in range(steps):
        if AHEAD:
            k_scale = w_scale + tl.cast(tl.minimum(k + 1, steps - 1) * BK // S_K, tl.int64) * s_k
            next_scale = tile_scales(k_scale, start_n, offset_n, N, s_n, S_N, BN, EVEN_N)
        if EVEN_K and EVEN_M:
            x_tile = tl.load(x_pointers)
        elif EVEN_K:
            x_tile = tl.load(x_pointers, mask=offset_m[None, :] < end_m, other=0.0)
        else:
            x_tile = tl.load(x_pointers, mask=(offset_k[:, None] < K - k * BK) & (offset_m[None, :] < end_m), other=0.0)
        if EVEN_K and EVEN_N:
            w_tile = tl.load(w_pointers)
        elif EVEN_K:
            w_tile = tl.load(w_pointers, mask=offset_n[:, None] < N, other=0.0)
        else:
            w_tile = tl.load(w_pointers, mask=(offset_n[:, None] < N) & (offset_k[None, :] < K - k * BK), other=0.0)
        if S_K == 1:
            scale = _scales_along_k(w_scale, start_n, k * BK, N, K, s_n, s_k, S_N, BN, BK, WIDE)
            if kind == tl.float16:
                power, inverse = _power_above(scale)
                scaled = (w_tile.to(tl.float32) * (scale * inverse)).to(kind)
                acc += tl.dot(scaled, x_tile) * power
            else:
                scaled = (w_tile.to(tl.float32) * scale).to(kind)
                acc = tl.dot(scaled, x_tile, acc, input_precision="ieee")
        elif ON_WEIGHT or S_K != -1:
            if not AHEAD:
                k_scale = w_scale + (0 if S_K == -1 else tl.cast(k * BK // S_K, tl.int64) * s_k)
                scale = _column(tile_scales(k_scale, start_n, offset_n, N, s_n, S_N, BN, EVEN_N), VECTOR)
            if ON_WEIGHT:
                acc = tl.dot(w_tile.to(kind) * scale, x_tile, acc, input_precision="ieee")
            else:
                acc += tl.dot(_in_16_bits(w_tile, kind, BY_FLOAT32), x_tile) * scale
        else:
            acc = tl.dot(_in_16_bits(w_tile, kind, BY_FLOAT32), x_tile, acc)
        if AHEAD:
            scale = next_scale
        x_pointers += x_step
        w_pointers += w_step

    if S_K == -1 and not ON_WEIGHT:
        acc *= _column(tile_scales(w_scale, start_n, offset_n, N, s_n, S_N, BN, EVEN_N), VECTOR)
    return acc


@triton.jit
def _in_16_bits(tile, kind: tl.constexpr, BY_FLOAT32: tl.constexpr):
    """FP8 values in the type of `x`, which holds each of them exactly."""
    if BY_FLOAT32 and kind == tl.bfloat16:
        result = tile.to(tl.float32).to(kind)
    else:
        result = tile.to(kind)
    return result


@triton.jit
def with_bias(acc, bias, offset_n, N, bias_n):
    """The sums of a tile, with a bias for each column added."""
    return acc + tl.load(bias + offset_n * bias_n, mask=offset_n < N, other=0.0).to(tl.float32)[:, None]


@triton.jit
def store_tile(
    out, acc, offset_m, end_m, offset_n, N, out_m,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, TRANS_STORE: tl.constexpr,
):  # fmt: skip
    """Stores a tile `(BN, BM)`, of rows before `end_m`."""
    result = acc.to(out.dtype.element_ty)
    if TRANS_STORE:
        # A lane of AMD's holds neighbours in a column, to be stored singly; turned in LDS they leave by 16 bytes.
        pointers = out + offset_m[:, None] * out_m + offset_n[None, :]
        if EVEN_M and EVEN_N:
            tl.store(pointers, tl.trans(result))
        else:
            tl.store(pointers, tl.trans(result), mask=(offset_m[:, None] < end_m) & (offset_n[None, :] < N))
    else:
        pointers = out + offset_n[:, None] + offset_m[None, :] * out_m
        if EVEN_M and EVEN_N:
            tl.store(pointers, result)
        else:
            tl.store(pointers, result, mask=(offset_n[:, None] < N) & (offset_m[None, :] < end_m))


@triton.jit
def _column(scale, VECTOR: tl.constexpr):
    """A vector over N as a column of `(BN, BM)`; a number as it is."""
    if VECTOR:
        result = scale[:, None]
    else:
        result = scale
    return result


@triton.jit
def _scales_along_k(
    w_scale, start_n, start_k, N, K, s_n, s_k, S_N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr
):
    """One scale for each element of K in a tile of `wᵀ`: `(BN, BK)`, or `(1, BK)` where they are constant along N."""
    ROWS: tl.constexpr = 1 if S_N == -1 or S_N % BN == 0 else BN // S_N
    # Past the edges the last scale again: there it meets zeros, or what is not stored.
    index_k = tl.minimum(start_k + tl.arange(0, BK), K - 1)
    index_n = tl.arange(0, ROWS)
    if S_N != -1:
        index_n = tl.minimum(start_n // S_N + index_n, tl.cdiv(N, S_N) - 1)
    if WIDE:
        index_n = index_n.to(tl.int64)
        index_k = index_k.to(tl.int64)
    scale = scale_value(tl.load(w_scale + index_n[:, None] * s_n + index_k[None, :] * s_k))
    if ROWS > 1:
        scale = tl.reshape(tl.broadcast_to(scale[:, None, :], (ROWS, BN // ROWS, BK)), (BN, BK))
    return scale


@triton.jit
def _power_above(scale):
    """`2 ** e` above the largest scale of each row, and `2 ** -e`: in that unit a float16 tile does not overflow."""
    exponent = tl.max(scale.to(tl.int32, bitcast=True) & 0x7F800000, axis=1, keep_dims=True)
    power = tl.minimum(exponent, 252 << 23) + (1 << 23)  # 2 ** 126 at most, so that the inverse is normal
    return power.to(tl.float32, bitcast=True), ((254 << 23) - power).to(tl.float32, bitcast=True)


def plan_mm_a16w8(product: WeightProduct, config: A16W8Config) -> tuple[TritonLaunch]:
    """The launch of a product whose `N` and `K` are at least 1; `out` is bfloat16, float16 or float32.

    `constant` has no effect.
    """
    product = product.as_matrix()
    (w, w_scale, w_block), bias, target = product.w, product.bias, product.target
    x, out, w, w_scale = batched(product.x), batched(product.out), batched(w), batched(storage(w_scale))
    batch, m, n = out.shape
    k = x.shape[2]
    if bias is not None:
        bias = bias.expand(batch, n) if bias.ndim == 1 else bias.reshape(batch, n)
    bk = config.BK
    return (
        TritonLaunch(
            kernel=mm_a16w8,
            grid=(batch * ceil_div(m, config.BM) * ceil_div(n, config.BN), 1, 1),
            args={
                "x": x, "w": w, "out": out, "w_scale": w_scale, "bias": bias, "M": m, "N": n, "K": k,
                "x_b": batch_stride(x, batch), "x_m": x.stride(1), "x_k": x.stride(2), "x_step": bk * x.stride(2),
                "w_b": batch_stride(w, batch), "w_k": w.stride(1), "w_n": w.stride(2), "w_step": bk * w.stride(1),
                "out_b": out.stride(0), "out_m": out.stride(1),
                "s_b": batch_stride(w_scale, batch), "s_k": w_scale.stride(1), "s_n": w_scale.stride(2),
                "bias_b": 0 if bias is None else bias.stride(0), "bias_n": 0 if bias is None else bias.stride(1),
            },
            constexprs={
                "BM": config.BM, "BN": config.BN, "BK": bk, "GROUP": config.GROUP, "S_K": w_block[0], "S_N": w_block[1],
                "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0, "EVEN_K": k % bk == 0,
                "WIDE": is_wide(x, w, out, w_scale), "TRANS_STORE": target.backend == "hip",
                "BY_FLOAT32": by_float32(target), "OVERLAPS": overlaps(target),
            },
            options={
                "num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options),
                **overlapping(target),
            },
            target=target,
        ),
    )  # fmt: skip


def by_float32(target: Target) -> bool:
    """Whether FP8 goes to bfloat16 by float32.

    Triton's direct conversion is an F2F for each element on Hopper and Blackwell, an instruction of a low rate. By
    float32 it is none; on sm89 the code is nearly the same either way. AMD has direct instructions.
    """
    return target.backend == "cuda"


def configure(product: WeightProduct) -> A16W8Config:
    """The default configuration of a product; see `choose_config`."""
    product = product.as_matrix()
    columns, aligned = product.n * product.batch, in_lines(product)
    return choose_config(product.m, columns, product.w.block, product.x.dtype, product.target, aligned=aligned)


def is_aligned(product: WeightProduct | WeightProblem) -> bool:
    """Whether the lines of a contiguous `x` and weight are multiples of 16, so that no load is of single bytes."""
    return product.k % 16 == 0 and product.n % 16 == 0


def in_lines(product: WeightProduct) -> bool:
    """Whether no load of `x` and the weight, where they lie, is of single elements, as of slices of wider rows."""
    return is_aligned(product) and amd.is_aligned(product.x, product.w.data, product.out)


def choose_config(
    m: int, n: int, w_block: Block, dtype: torch.dtype, target: Target, *, aligned: bool = True
) -> A16W8Config:
    """The default configuration.

    None spills at the sizes of tests/kernels/mm_a16w8/test_op.py; up to 6 registers do at some sizes off the tiles' on
    sm89, sm100 and sm120 with a scale for each element of K, and in float32.

    Up to 64 rows, or 32 on Hopper, the weight's bytes decide: deep tiles, and narrow ones where wide ones would leave
    cores idle. For more rows the products and the conversion decide: the more rows share a converted tile, the fewer
    tiles are converted. Hopper takes fewer rows where tall tiles would leave cores idle.
    """
    per_element = w_block[0] == 1
    # A scale holds for the whole depth of a tile, or for one element.
    depth = 64 if per_element else 128 if w_block[0] == WHOLE else min(w_block[0], 128)
    if target.arch in (89, 120) and not aligned and m > 32:
        depth = min(depth, 32)  # 64 deep spills 2 to 14 registers
    if dtype == torch.float32:
        few = A16W8Config(BM=16, BN=64, BK=32, num_warps=4, num_stages=2)
        tile = few if m <= 16 else A16W8Config(BM=64, BN=64, BK=32, num_warps=8, num_stages=3)
    elif target.arch == 90 and aligned:
        tile = _tile_on_hopper(m, n, depth, per_element, target.cores)
    elif m <= 64:
        tile = _tile_of_few_rows(m, n, depth, target, aligned)
    elif target.backend == "hip":
        # Triton 3.6 fails to compile 4 warps for bfloat16 by N-contiguous lines with one scale for each element of K on
        # gfx942. With a scale for 32 columns 8 warps spill 1 to 45 registers, and on gfx950 by Triton 3.8 1 or 2.
        one = w_block[1] == WHOLE or w_block[1] >= 128
        warps = 8 if target.arch == "gfx942" and per_element and one else 4
        tile = A16W8Config(BM=128, BN=128, BK=min(depth, 64), num_warps=warps, num_stages=2)
    else:
        # Lines that are no multiples of 16 are loaded by single bytes: with 128 columns 2 to 98 registers spill. On
        # sm89 and sm120 64 deep tiles spill 4 to 6 with a scale for each element of K.
        shallow = per_element and target.arch not in (90, 100, 103)
        tile = A16W8Config(
            BM=128, BN=128 if aligned else 64, BK=32 if shallow else min(depth, 64), num_warps=8, num_stages=3
        )
    return replace(tile, options=MM_A16W8.get(str(target.arch), ()))


def _tile_of_few_rows(m: int, n: int, depth: int, target: Target, aligned: bool) -> A16W8Config:
    """The tile for up to 64 rows."""
    rows = max(16, ceil_power_of_two(m))
    columns = 64 if ceil_div(n, 64) >= target.cores else 32
    if target.backend == "hip":
        return A16W8Config(BM=rows, BN=columns, BK=depth, num_warps=4, num_stages=2)
    if rows == 64:  # by 4 warps it spills 2 registers on sm100
        return A16W8Config(BM=64, BN=columns, BK=min(depth, 64), num_warps=8, num_stages=4)
    if not aligned:
        depth = min(depth, 64)  # 128 deep spills 12 to 130 registers on sm90
    return A16W8Config(BM=rows, BN=columns, BK=depth, num_warps=4, num_stages=3 if rows == 32 else 4)


def _tile_on_hopper(m: int, n: int, depth: int, per_element: bool, cores: int) -> A16W8Config:
    """The tile by what was timed on an H200. Lines that are not aligned would spill 2 to 58 registers."""
    wide = ceil_div(n, 64)
    if m <= 16 and wide < cores:
        return A16W8Config(BM=16, BN=32, BK=depth, num_warps=2, num_stages=4)
    if m <= 32:
        columns = 64 if m <= 16 or 2 * wide >= cores else 32
        return A16W8Config(BM=16 if m <= 16 else 32, BN=columns, BK=depth, num_warps=4, num_stages=3)
    if per_element and m > 64:
        return A16W8Config(BM=128, BN=128, BK=depth, num_warps=8, num_stages=3)
    bm = 64
    if not per_element:
        # 1.19x as fast as 128 columns by 8 warps, over nine shapes; 32 and 64 rows for few tiles 1.2x to 1.4x.
        rows = ceil_power_of_two(m)  # tuning's key has one configuration for all M up to the next power of two
        tall = [bm for bm in (128, 64) if bm <= rows and rows // bm * wide >= 0.9 * cores]
        bm = tall[0] if tall else 32
    return A16W8Config(BM=bm, BN=64, BK=depth, num_warps=4, num_stages=3)
