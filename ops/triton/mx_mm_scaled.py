"""The MX product where the matrix instruction takes scales: sm100's `tcgen05.mma`, sm120's `mma`, gfx950's MFMA."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mx_mm import load_tile, scale_strides, strides
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.tile_order import grouped_tile
from fp8fn.ops.triton.views import batched, ceil_div, is_wide
from fp8fn.ops.tuning.mx import MxConfig

FORMATS: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def mx_mm_scaled(
    a, b, out, a_scale, b_scale, bias, M, N, K, a_b, a_m, a_k, b_b, b_k, b_n, out_b, out_m,
    as_b, as_m, as_k, bs_b, bs_k, bs_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of one matrix of the batch."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    batch = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = grouped_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    offset_k = tl.arange(0, BK)
    block_k = tl.arange(0, BK // 32)
    if WIDE:
        batch = batch.to(tl.int64)
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

    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        a_tile = load_tile(a_pointers, inside_m, left, BK, 1, EVEN_M, EVEN_K)
        b_tile = load_tile(b_pointers, inside_n, left, BK, 1, EVEN_N, EVEN_K)
        a_stored = load_tile(as_pointers, inside_m, left, BK // 32, 32, EVEN_M, EVEN_K)
        b_stored = load_tile(bs_pointers, inside_n, left, BK // 32, 32, EVEN_N, EVEN_K)
        acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, tl.trans(b_tile), b_stored, B_FORMAT, acc)
        a_pointers += BK * a_k
        b_pointers += BK * b_k
        as_pointers += BK // 32 * as_k
        bs_pointers += BK // 32 * bs_k

    if bias is not None:
        acc += tl.load(bias + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    pointers = out + batch * out_b + offset_m[:, None] * out_m + offset_n[None, :]
    result = acc.to(out.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(pointers, result)
    else:
        tl.store(pointers, result, mask=inside_m & (offset_n[None, :] < N))


def plan_mx_mm_scaled(product: ScaledProduct, config: MxConfig) -> tuple[TritonLaunch]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`, as of `plan_mx_mm`; OCP types only."""
    target, bias, out = product.target, product.bias, batched(product.out)
    formats = {"A_FORMAT": FORMATS[product.a.data.dtype], "B_FORMAT": FORMATS[product.b.data.dtype]}
    a, a_scale = batched(product.a.data), batched(storage(product.a.scale))
    b, b_scale = batched(product.b.data), batched(storage(product.b.scale))
    batch, m, n = out.shape
    k = a.shape[2]
    launch = TritonLaunch(
        kernel=mx_mm_scaled,
        grid=(batch * ceil_div(m, config.BM) * ceil_div(n, config.BN), 1, 1),
        args={
            "a": a, "b": b, "out": out, "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "M": m, "N": n, "K": k,
            **strides(a, b, batch), "out_b": out.stride(0), "out_m": out.stride(1),
            **scale_strides(a_scale, b_scale, batch),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": config.BK, "GROUP": config.GROUP, **formats,
            "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0, "EVEN_K": k % config.BK == 0,
            "WIDE": is_wide(a, b, out, a_scale, b_scale),
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)},
        target=target,
    )  # fmt: skip
    return (launch,)
