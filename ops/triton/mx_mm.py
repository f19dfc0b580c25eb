"""The portable MX product: FP8 becomes bfloat16 on its way to the tensor core, multiplied by its block's power of two.

An FP8 value has at most four significant bits and a scale one, so their product is exact in bfloat16 (scales below
`2 ** -124` of E4M3, and below `2 ** -117` of E5M2, give multiples of its least value, `2 ** -133`). As in `mm_a16w8` a
tile is computed transposed, `outᵀ = bᵀ aᵀ`, for Hopper takes the left operand from registers. Few rows leave few tiles:
then the sum over K is shared by several programs, whose parts a second launch adds in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import scale_value, storage
from fp8fn.ops.triton.tile_order import grouped_tile
from fp8fn.ops.triton.views import batch_stride, batched, ceil_div, is_wide
from fp8fn.ops.tuning.mx import MxConfig

# Elements of the output that a program of the second launch adds.
_SUMMED = 1024


@triton.jit
def mx_mm(
    a, b, out, a_scale, b_scale, bias, M, N, K, steps, a_b, a_m, a_k, b_b, b_k, b_n, out_s, out_b, out_m,
    as_b, as_m, as_k, bs_b, bs_k, bs_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, TRANS_STORE: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of one matrix of the batch, summed over `steps` tiles of K; one part of the sum a row of y."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = grouped_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    part = tl.program_id(1)
    first = part * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BK))
    offset_k = first * BK + tl.arange(0, BK)
    block_k = first * (BK // 32) + tl.arange(0, BK // 32)
    if WIDE:
        batch = batch.to(tl.int64)
        part = part.to(tl.int64)
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        offset_k = offset_k.to(tl.int64)
        block_k = block_k.to(tl.int64)
    offset_m = tile_m * BM + tl.arange(0, BM)
    offset_n = tile_n * BN + tl.arange(0, BN)
    a_pointers = a + batch * a_b + offset_m[:, None] * a_m + offset_k[None, :] * a_k
    b_pointers = b + batch * b_b + offset_n[:, None] * b_n + offset_k[None, :] * b_k
    as_pointers = a_scale + batch * as_b + offset_m[:, None] * as_m + block_k[None, :] * as_k
    bs_pointers = b_scale + batch * bs_b + offset_n[:, None] * bs_n + block_k[None, :] * bs_k
    inside_m = offset_m[:, None] < M
    inside_n = offset_n[:, None] < N

    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(first, last):
        left = K - k * BK
        a_tile = load_tile(a_pointers, inside_m, left, BK, 1, EVEN_M, EVEN_K)
        b_tile = load_tile(b_pointers, inside_n, left, BK, 1, EVEN_N, EVEN_K)
        a_stored = load_tile(as_pointers, inside_m, left, BK // 32, 32, EVEN_M, EVEN_K)
        b_stored = load_tile(bs_pointers, inside_n, left, BK // 32, 32, EVEN_N, EVEN_K)
        acc = tl.dot(widened(b_tile, b_stored, BN, BK), tl.trans(widened(a_tile, a_stored, BM, BK)), acc)
        a_pointers += BK * a_k
        b_pointers += BK * b_k
        as_pointers += BK // 32 * as_k
        bs_pointers += BK // 32 * bs_k

    if bias is not None:
        acc += tl.load(bias + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[:, None]
    pointers = out + part * out_s + batch * out_b + offset_n[:, None] + offset_m[None, :] * out_m
    result = acc.to(out.dtype.element_ty)
    if TRANS_STORE:  # as of `mm_a16w8`
        pointers = out + part * out_s + batch * out_b + offset_m[:, None] * out_m + offset_n[None, :]
        if EVEN_M and EVEN_N:
            tl.store(pointers, tl.trans(result))
        else:
            tl.store(pointers, tl.trans(result), mask=(offset_m[:, None] < M) & (offset_n[None, :] < N))
    elif EVEN_M and EVEN_N:
        tl.store(pointers, result)
    else:
        tl.store(pointers, result, mask=inside_n & (offset_m[None, :] < M))


@triton.jit
def load_tile(
    pointers, inside, left, COLUMNS: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr
):
    """A tile of data, or with `SPAN = 32` of its scales, of which `left` elements along K exist; zeros elsewhere."""
    if EVEN_K and EVEN:
        tile = tl.load(pointers)
    elif EVEN_K:
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(pointers, mask=inside & (tl.arange(0, COLUMNS)[None, :] * SPAN < left), other=0.0)
    return tile


@triton.jit
def widened(tile, stored, ROWS: tl.constexpr, BK: tl.constexpr):
    """FP8 `(ROWS, BK)` times its scales `(ROWS, BK // 32)`, in bfloat16."""
    blocks = tl.reshape(tile.to(tl.float32), (ROWS, BK // 32, 32)) * scale_value(stored)[:, :, None]
    return tl.reshape(blocks.to(tl.bfloat16), (ROWS, BK))


@triton.jit
def sum_parts(parts, out, bias, N, total, PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """`out = parts[0] + parts[1] + … + bias`, in this order, of `total` elements in rows of `N`."""
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    index = start * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    acc = tl.load(parts + index, mask=inside, other=0.0)
    for _ in tl.static_range(1, PARTS):
        parts += total
        acc += tl.load(parts + index, mask=inside, other=0.0)
    if bias is not None:
        acc += tl.load(bias + index % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, acc.to(out.dtype.element_ty), mask=inside)


def plan_mx_mm(product: ScaledProduct, config: MxConfig) -> tuple[TritonLaunch, ...]:
    """The launches of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`, which is not empty.

    `out` is contiguous bfloat16, float16 or float32, `bias` contiguous; a 2-D operand serves a whole batch.
    """
    target, bias, out = product.target, product.bias, batched(product.out)
    a, a_scale = batched(product.a.data), batched(storage(product.a.scale))
    b, b_scale = batched(product.b.data), batched(storage(product.b.scale))
    batch, m, n = out.shape
    k = a.shape[2]
    steps = max(ceil_div(ceil_div(k, config.BK), config.SPLITS), 1)
    splits = max(ceil_div(ceil_div(k, config.BK), steps), 1)
    shared = splits > 1
    sums = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device) if shared else out[None]
    multiply = TritonLaunch(
        kernel=mx_mm,
        grid=(batch * ceil_div(m, config.BM) * ceil_div(n, config.BN), splits, 1),
        args={
            "a": a, "b": b, "out": sums, "a_scale": a_scale, "b_scale": b_scale, "bias": None if shared else bias,
            "M": m, "N": n, "K": k, "steps": steps,
            **strides(a, b, batch), "out_s": sums.stride(0), "out_b": sums.stride(1),
            "out_m": sums.stride(2), **scale_strides(a_scale, b_scale, batch),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": config.BK, "GROUP": config.GROUP,
            "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0, "EVEN_K": k % config.BK == 0,
            "WIDE": is_wide(a, b, sums, a_scale, b_scale), "TRANS_STORE": target.backend == "hip",
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)},
        target=target,
    )  # fmt: skip
    if not shared:
        return (multiply,)
    total = out.numel()
    summation = TritonLaunch(
        kernel=sum_parts,
        grid=(ceil_div(total, _SUMMED), 1, 1),
        args={"parts": sums, "out": out, "bias": bias, "N": n, "total": total},
        constexprs={"PARTS": splits, "BLOCK": _SUMMED, "WIDE": is_wide(sums)},
        options={"num_warps": 4},
        target=target,
    )
    return multiply, summation


def strides(a: Tensor, b: Tensor, batch: int) -> dict[str, int]:
    """Strides of the data; a matrix beside a batch has a batch stride of 0."""
    return {
        "a_b": batch_stride(a, batch), "a_m": a.stride(1), "a_k": a.stride(2),
        "b_b": batch_stride(b, batch), "b_k": b.stride(1), "b_n": b.stride(2),
    }  # fmt: skip


def scale_strides(a_scale: Tensor, b_scale: Tensor, batch: int) -> dict[str, int]:
    """Strides of the scales; a matrix beside a batch has a batch stride of 0."""
    return {
        "as_b": batch_stride(a_scale, batch), "as_m": a_scale.stride(1), "as_k": a_scale.stride(2),
        "bs_b": batch_stride(b_scale, batch), "bs_k": b_scale.stride(1), "bs_n": b_scale.stride(2),
    }  # fmt: skip
