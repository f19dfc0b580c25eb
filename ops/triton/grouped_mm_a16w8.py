"""The portable product of groups of 16- or 32-bit rows with their experts' FP8 weights.

Each tile is one of `mm_a16w8`'s, of rows of one group. The grid depends on shapes alone: a group of `n` rows gets the
tiles from place `start // BM + group` on, and programs of places without rows end at once.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.triton.group_tiles import borders, group_at, places_of
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mm_a16w8 import (
    A16W8Config,
    by_float32,
    choose_config,
    in_lines,
    store_tile,
    weight_tile,
    with_bias,
)
from fp8fn.ops.triton.overlap import overlapping, overlaps, wait
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.tile_order import grouped_tile
from fp8fn.ops.triton.views import ceil_div, is_wide


@triton.jit
def grouped_mm_a16w8(
    x, w, out, w_scale, bias, offsets, M, N, K, E, x_m, x_k, x_step, w_e, w_k, w_n, w_step, out_m,
    s_e, s_k, s_n, bias_e, bias_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    S_K: tl.constexpr, S_N: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    TRANS_STORE: tl.constexpr, BY_FLOAT32: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of the rows of one group; `GROUPS` is a power of two above `E`."""
    wait(OVERLAPS)
    place, tile_n = grouped_tile(tl.program_id(0), M // BM + E + 1, tl.cdiv(N, BN), GROUP)
    group, first = group_at(offsets, place, M, E, BM, GROUPS)
    start, end = borders(offsets, group, M, E)
    start_m = start + (place - first) * BM
    if start_m >= end:
        return
    if WIDE:
        start_m = start_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
    offset_m = start_m + tl.arange(0, BM)
    offset_n = tile_n * BN + tl.arange(0, BN)
    if group == E:  # rows past the last group
        zeros = tl.zeros((BN, BM), tl.float32)
        store_tile(out, zeros, offset_m, end, offset_n, N, out_m, False, EVEN_N, TRANS_STORE)
        return
    expert = group.to(tl.int64)
    acc = weight_tile(
        x, w + expert * w_e, w_scale + expert * s_e, offset_m, end, tile_n * BN, N, K,
        x_m, x_k, x_step, w_k, w_n, w_step, s_k, s_n, BM, BN, BK, S_K, S_N, False, EVEN_N, EVEN_K, WIDE, BY_FLOAT32,
    )  # fmt: skip
    if bias is not None:
        acc = with_bias(acc, bias + expert * bias_e, offset_n, N, bias_n)
    store_tile(out, acc, offset_m, end, offset_n, N, out_m, False, EVEN_N, TRANS_STORE)


def plan_grouped_mm_a16w8(product: WeightProduct, config: A16W8Config) -> tuple[TritonLaunch]:
    """The launch of a product of groups of rows; `M`, `N`, `K` and `E` are at least 1, and `offsets` is contiguous."""
    x, (w, w_scale, w_block), out = product.x, product.w, product.out
    bias, offsets, target = product.bias, product.group_ends, product.target
    w_scale, bk = storage(w_scale), config.BK
    (m, k), n, groups = x.shape, product.n, offsets.shape[0]
    return (
        TritonLaunch(
            kernel=grouped_mm_a16w8,
            grid=((m // config.BM + groups + 1) * ceil_div(n, config.BN), 1, 1),
            args={
                "x": x, "w": w, "out": out, "w_scale": w_scale, "bias": bias, "offsets": offsets,
                "M": m, "N": n, "K": k, "E": groups,
                "x_m": x.stride(0), "x_k": x.stride(1), "x_step": bk * x.stride(1),
                "w_e": w.stride(0), "w_k": w.stride(1), "w_n": w.stride(2), "w_step": bk * w.stride(1),
                "out_m": out.stride(0), "s_e": w_scale.stride(0), "s_k": w_scale.stride(1), "s_n": w_scale.stride(2),
                "bias_e": 0 if bias is None else bias.stride(0), "bias_n": 0 if bias is None else bias.stride(1),
            },
            constexprs={
                "BM": config.BM, "BN": config.BN, "BK": bk, "GROUP": config.GROUP, "GROUPS": places_of(groups),
                "S_K": w_block[0], "S_N": w_block[1], "EVEN_N": n % config.BN == 0, "EVEN_K": k % bk == 0,
                "WIDE": is_wide(x, w[0], out, w_scale[0]), "TRANS_STORE": target.backend == "hip",
                "BY_FLOAT32": by_float32(target), "OVERLAPS": overlaps(target),
            },
            options={
                "num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options),
                **overlapping(target),
            },
            target=target,
        ),
    )  # fmt: skip


def configure(product: WeightProduct) -> A16W8Config:
    """The configuration for the mean number of rows in a group, and the columns of all experts that may have rows."""
    groups, target, aligned = product.group_ends.shape[0], product.target, in_lines(product)
    rows, columns = ceil_div(product.m, groups), product.n * min(groups, product.m)
    config = choose_config(rows, columns, product.w.block, product.x.dtype, target, aligned=aligned)
    along_k = product.w.data.stride(1) == 1
    if target.arch == 90 and aligned and along_k and (config.BM, config.BN, config.BK) == (16, 64, 128):
        # 1.06x as fast as 4 warps on an H200, over routed tokens by 128 and 256 experts: more tiles are resident. By
        # weights whose lines run along N, two warps spill 2 to 22 registers.
        config = replace(config, num_warps=2)
    return config
