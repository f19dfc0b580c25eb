"""The portable scaled product: pointer loads, any strides, any block format, any processor that multiplies FP8."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl

from fp8fn.ops.layout import WHOLE, Block, swap
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.tile_order import grouped_tile, on_chiplet, scaled, tile_scales
from fp8fn.ops.triton.views import batch_stride, batched, ceil_div, is_wide
from fp8fn.ops.tuning.amd_kernels import SCALED_MM

# The smallest extent along K of a scale: that of the smallest tile that `tl.dot` multiplies in FP8.
_LEAST_K: Final = 32
# With at most 168 registers a thread three blocks of `_HOPPER` find room on a multiprocessor. On an H200 (2026-11-29),
# at (8192, 28672, 4096): 928 TFLOP/s; in bands of 8 rows of tiles 881, and 776 with as many registers as ptxas takes.
# Beside the sums of a K tile, scales by columns of `b` spill 6 registers, and so do masked rows with 64-bit offsets or
# with a bias and float32 results. Masked columns and K tiles would spill too, and operands that are turned on their way
# are slow with it.
_THREE_BLOCKS: Final = (("maxnreg", 168),)
_HOPPER: Final = GemmConfig(64, 128, 4, 3, GROUP=32)


@triton.jit
def scaled_mm(
    a, b, out, a_scale, b_scale, bias, M, N, K, a_b, a_m, a_k, b_b, b_k, b_n,
    out_b, out_m, out_n, as_b, as_m, as_k, bs_b, bs_k, bs_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    A_M: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr,
    XCDS: tl.constexpr, WGRAD_TRANS_STORE: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of one matrix of the batch; `WGRAD_TRANS_STORE` is for an `out` that is column-major."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    tile = on_chiplet(tl.program_id(0), tl.num_programs(0), XCDS)
    batch = tile // (tiles_m * tiles_n)
    tile_m, tile_n = grouped_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    offset_k = tl.arange(0, BK)
    if WIDE:
        batch = batch.to(tl.int64)
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        offset_k = offset_k.to(tl.int64)
    offset_m = tile_m * BM + tl.arange(0, BM)
    offset_n = tile_n * BN + tl.arange(0, BN)
    a_pointers = a + batch * a_b + offset_m[:, None] * a_m + offset_k[None, :] * a_k
    b_pointers = b + batch * b_b + offset_k[:, None] * b_k + offset_n[None, :] * b_n
    a_scale += batch * as_b
    b_scale += batch * bs_b
    A_VECTOR: tl.constexpr = A_M != -1 and A_M % BM != 0
    B_VECTOR: tl.constexpr = B_N != -1 and B_N % BN != 0

    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        if EVEN_K and EVEN_M:
            a_tile = tl.load(a_pointers)
        elif EVEN_K:
            a_tile = tl.load(a_pointers, mask=offset_m[:, None] < M, other=0.0)
        else:
            a_tile = tl.load(a_pointers, mask=(offset_m[:, None] < M) & (offset_k[None, :] < K - k * BK), other=0.0)
        if EVEN_K and EVEN_N:
            b_tile = tl.load(b_pointers)
        elif EVEN_K:
            b_tile = tl.load(b_pointers, mask=offset_n[None, :] < N, other=0.0)
        else:
            b_tile = tl.load(b_pointers, mask=(offset_k[:, None] < K - k * BK) & (offset_n[None, :] < N), other=0.0)
        product = tl.dot(a_tile, b_tile)
        if A_K == -1 and B_K == -1:
            acc += product
        elif A_K == -1:
            b_value = tile_scales(b_scale + k * BK // B_K * bs_k, tile_n * BN, offset_n, N, bs_n, B_N, BN, EVEN_N)
            acc += scaled(product, 1.0, b_value, False, B_VECTOR)
        elif B_K == -1:
            a_value = tile_scales(a_scale + k * BK // A_K * as_k, tile_m * BM, offset_m, M, as_m, A_M, BM, EVEN_M)
            acc += scaled(product, a_value, 1.0, A_VECTOR, False)
        else:
            a_value = tile_scales(a_scale + k * BK // A_K * as_k, tile_m * BM, offset_m, M, as_m, A_M, BM, EVEN_M)
            b_value = tile_scales(b_scale + k * BK // B_K * bs_k, tile_n * BN, offset_n, N, bs_n, B_N, BN, EVEN_N)
            acc += scaled(product, a_value, b_value, A_VECTOR, B_VECTOR)
        a_pointers += BK * a_k
        b_pointers += BK * b_k

    if A_K == -1:
        a_value = tile_scales(a_scale, tile_m * BM, offset_m, M, as_m, A_M, BM, EVEN_M)
        acc = scaled(acc, a_value, 1.0, A_VECTOR, False)
    if B_K == -1:
        b_value = tile_scales(b_scale, tile_n * BN, offset_n, N, bs_n, B_N, BN, EVEN_N)
        acc = scaled(acc, 1.0, b_value, False, B_VECTOR)
    if bias is not None:
        acc += tl.load(bias + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    if WGRAD_TRANS_STORE:
        # Turned in LDS, so that neighbours of a column leave in stores of 16 bytes and not one by one.
        out_pointers = out + batch * out_b + offset_n[:, None] * out_n + offset_m[None, :] * out_m
        turned = tl.trans(result)
        if EVEN_M and EVEN_N:
            tl.store(out_pointers, turned)
        else:
            tl.store(out_pointers, turned, mask=(offset_n[:, None] < N) & (offset_m[None, :] < M))
    elif HALVES:
        # A lane of gfx942 holds 4 neighbours of a row: stores of 8 bytes. Halves are no layout of the matrix
        # instruction, so they pass through LDS and leave in stores of 16.
        left, right = tl.split(tl.permute(tl.reshape(result, (BM, 2, BN // 2)), (0, 2, 1)))
        half_n = tile_n * BN + tl.arange(0, BN // 2)
        _store(out + batch * out_b, left, offset_m, half_n, M, N, out_m, out_n, EVEN_M and EVEN_N)
        _store(out + batch * out_b, right, offset_m, half_n + BN // 2, M, N, out_m, out_n, EVEN_M and EVEN_N)
    else:
        _store(out + batch * out_b, result, offset_m, offset_n, M, N, out_m, out_n, EVEN_M and EVEN_N)


@triton.jit
def _store(out, tile, offset_m, offset_n, M, N, out_m, out_n, EVEN: tl.constexpr):
    pointers = out + offset_m[:, None] * out_m + offset_n[None, :] * out_n
    if EVEN:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=(offset_m[:, None] < M) & (offset_n[None, :] < N))


def plan_scaled_mm(product: ScaledProduct, config: GemmConfig | None = None) -> tuple[TritonLaunch]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`; a 2-D operand serves a whole batch.

    `out` is row-major bfloat16, float16 or float32. ValueError for a scale that changes with every element along K.
    """
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, target = product.bias, product.target
    check_blocks(a_block, b_block)
    config, reason = (config, "") if config else configured(product)
    names = ("a", "a_scale", "b", "b_scale")
    if config.WGRAD_TRANS_STORE:
        if bias is not None:
            raise ValueError("WGRAD_TRANS_STORE computes outᵀ, to which a bias by columns cannot be added: use False")
        a, a_scale, a_block, b, b_scale, b_block = b.mT, b_scale.mT, swap(b_block), a.mT, a_scale.mT, swap(a_block)
        out, names = out.mT, (*names[2:], *names[:2])
    a, a_scale = batched(a), batched(storage(a_scale))
    b, b_scale = batched(b), batched(storage(b_scale))
    out = batched(out)
    batch, m, n = out.shape
    k = a.shape[2]
    finite = [size for size in (a_block[1], b_block[0]) if size != WHOLE]
    bk = min(finite, default=128)  # one scale for each side of a K tile
    launch = TritonLaunch(
        kernel=scaled_mm,
        grid=(batch * ceil_div(m, config.BM) * ceil_div(n, config.BN), 1, 1),
        args={
            "a": a, "b": b, "out": out, "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "M": m, "N": n, "K": k,
            "a_b": batch_stride(a, batch), "a_m": a.stride(1), "a_k": a.stride(2),
            "b_b": batch_stride(b, batch), "b_k": b.stride(1), "b_n": b.stride(2),
            "out_b": out.stride(0), "out_m": out.stride(1), "out_n": out.stride(2),
            "as_b": batch_stride(a_scale, batch), "as_m": a_scale.stride(1), "as_k": a_scale.stride(2),
            "bs_b": batch_stride(b_scale, batch), "bs_k": b_scale.stride(1), "bs_n": b_scale.stride(2),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": bk, "GROUP": config.GROUP,
            "A_M": a_block[0], "A_K": a_block[1], "B_K": b_block[0], "B_N": b_block[1],
            "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0, "EVEN_K": k % bk == 0,
            "WIDE": is_wide(a, b, out, a_scale, b_scale), "HALVES": config.HALVES,
            "XCDS": config.XCDS, "WGRAD_TRANS_STORE": config.WGRAD_TRANS_STORE,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)},
        target=target,
        reason=reason,
        binds=dict(zip(("a", "a_scale", "b", "b_scale"), names, strict=True)),
    )  # fmt: skip
    return (launch,)


def check_blocks(a_block: Block, b_block: Block) -> None:
    """ValueError where a scale holds for fewer than `_LEAST_K` elements along K."""
    for name, block, along_k, remedy in (
        ("a_block", a_block, a_block[1], "quantize a in blocks (1, 128)"),
        ("b_block", b_block, b_block[0], "quantize b in blocks (128, 1)"),
    ):
        if along_k != WHOLE and along_k < _LEAST_K:
            raise ValueError(f"{name} is {block}: a scale must hold for at least {_LEAST_K} elements along K: {remedy}")


def configured(product: ScaledProduct) -> tuple[GemmConfig, str]:
    """The configuration, and who chose it where that is not the default."""
    from fp8fn.ops.tuning import amd

    a, b, out, n, k, target = product.a, product.b, product.out, product.n, product.k, product.target
    if target.arch in amd.CANDIDATES and out.numel() and k:
        kind = amd.product_of(a.data, a.block, b.data, b.block)
        if kind is not None:
            rows, aligned = out.numel() // n, amd.is_aligned(a.data, b.data, out)
            has_bias = product.bias is not None
            choice = amd.choose(kind, rows, n, k, str(target.arch), bias=has_bias, aligned=aligned)
            return choice.config, choice.reason
    config = choose_config(product.m, n, k, target, aligned=amd.is_aligned(a.data, b.data, out))
    return replace(config, options=_THREE_BLOCKS) if config == _HOPPER and _fits_three_blocks(product) else config, ""


def _fits_three_blocks(product: ScaledProduct) -> bool:
    a, b = product.a, product.b
    even = product.n % _HOPPER.BN == 0 and product.k % 128 == 0
    large = is_wide(a.data, b.data, product.out) or (product.bias is not None and product.out.dtype == torch.float32)
    promoted = a.block[1] != WHOLE or b.block[0] != WHOLE  # scales multiply the sums of each K tile
    crowded = promoted and (b.block[1] == 1 or (large and product.m % _HOPPER.BM != 0))
    return even and not crowded and a.data.stride(-1) == 1 and b.data.stride(-2) == 1


def choose_config(m: int, n: int, k: int, target: Target, *, aligned: bool = True) -> GemmConfig:
    """The default configuration; none of them spills (tests/kernels/test_triton_machine_code.py).

    On NVIDIA GPUs operands that are not `aligned` have tiles of fewer elements a thread: loads of single bytes take
    registers, and the others spill 6 to 1162.
    """
    if target.arch in SCALED_MM:
        from fp8fn.ops.tuning.amd import config_of

        return config_of(next(name for rows, name in SCALED_MM[str(target.arch)] if rows is None or m <= rows))
    if m <= 32:
        return GemmConfig(16 if m <= 16 else 32, 64, 4 if aligned else 8, 4)
    if not aligned:
        return GemmConfig(64, 32 if target.arch in (120, 121) else 64, 8, 3)  # 64 columns spill 2 registers on sm120
    if target.arch == 90:
        return _HOPPER
    if target.arch in (100, 103):
        # 4 warps spill 42 to 208 registers on sm100.
        return GemmConfig(128, 128, 8, 3)
    return GemmConfig(64, 128, 8 if k % 128 else 4, 3)  # with a masked K tile 4 warps spill 2 registers on sm120
