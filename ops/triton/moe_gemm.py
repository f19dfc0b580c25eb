"""The portable product of routed tokens with their experts: rows are gathered by id, multiplied, and put where ids say.

A tile of ids has one expert, so a program is a product of few rows, transposed as in `mx_mm`. Nothing of a launch
depends on the routing: programs of tiles that hold nothing, or belong to no expert, end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8fn.ops.operands import RoutedProduct
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mx_mm import load_tile, widened
from fp8fn.ops.triton.scale import scale_value, storage
from fp8fn.ops.triton.views import ceil_div, is_wide
from fp8fn.ops.tuning.mx import MoeProblem, MxConfig

# The least and the most rows of one product; a tile of more ids is as many products.
_LEAST_ROWS, _MOST_ROWS = 16, 128


@triton.jit
def moe_gemm(
    a, w, out, a_scale, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, token_weights,
    ids, N, K, E, block_m, a_div, a_m, a_k, w_e, w_k, w_n, out_m, as_m, as_k, ws_e, ws_k, ws_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MX: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, TRANS_STORE: tl.constexpr,
):  # fmt: skip
    """`BN` columns of `BM` ids of one tile; `BK` is 128 where scales hold for 128 elements along K."""
    tiles_n = tl.cdiv(N, BN)
    parts = tl.cdiv(block_m, BM)
    place = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    tile = place // parts
    if tile * block_m >= tl.load(num_tokens_post_padded):
        return
    expert = tl.load(expert_ids + tile)
    if (expert < 0) | (expert >= E):
        return
    within = place % parts * BM + tl.arange(0, BM)
    row = tl.load(sorted_token_ids + tile * block_m + within, mask=within < block_m, other=-1)
    valid = (row >= 0) & (row < ids)
    source = tl.where(valid, row, 0) // a_div
    expert = expert.to(tl.int64)
    offset_k = tl.arange(0, BK)
    if WIDE:
        row = row.to(tl.int64)
        source = source.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        offset_k = offset_k.to(tl.int64)
    offset_n = tile_n * BN + tl.arange(0, BN)
    a_pointers = a + source[:, None] * a_m + offset_k[None, :] * a_k
    w_pointers = w + expert * w_e + offset_n[:, None] * w_n + offset_k[None, :] * w_k
    w_scale += expert * ws_e
    inside_m = valid[:, None]
    inside_n = offset_n[:, None] < N

    acc = tl.zeros((BN, BM), tl.float32)
    if MX:
        block_k = tl.arange(0, BK // 32)
        as_pointers = a_scale + source[:, None] * as_m + block_k[None, :] * as_k
        ws_pointers = w_scale + offset_n[:, None] * ws_n + block_k[None, :] * ws_k
        for k in range(tl.cdiv(K, BK)):
            left = K - k * BK
            a_tile = load_tile(a_pointers, inside_m, left, BK, 1, False, EVEN_K)
            w_tile = load_tile(w_pointers, inside_n, left, BK, 1, EVEN_N, EVEN_K)
            a_stored = load_tile(as_pointers, inside_m, left, BK // 32, 32, False, EVEN_K)
            w_stored = load_tile(ws_pointers, inside_n, left, BK // 32, 32, EVEN_N, EVEN_K)
            acc = tl.dot(widened(w_tile, w_stored, BN, BK), tl.trans(widened(a_tile, a_stored, BM, BK)), acc)
            a_pointers += BK * a_k
            w_pointers += BK * w_k
            as_pointers += BK // 32 * as_k
            ws_pointers += BK // 32 * ws_k
    else:
        as_pointers = a_scale + source * as_m
        ws_pointers = w_scale + tile_n * BN // 128 * ws_n
        for k in range(tl.cdiv(K, BK)):
            left = K - k * BK
            a_tile = load_tile(a_pointers, inside_m, left, BK, 1, False, EVEN_K)
            w_tile = load_tile(w_pointers, inside_n, left, BK, 1, EVEN_N, EVEN_K)
            scale = scale_value(tl.load(as_pointers, mask=valid, other=0)) * scale_value(tl.load(ws_pointers))
            acc += tl.dot(w_tile, tl.trans(a_tile)) * scale[None, :]
            a_pointers += BK * a_k
            w_pointers += BK * w_k
            as_pointers += as_k
            ws_pointers += ws_k

    if token_weights is not None:
        acc *= tl.load(token_weights + row, mask=valid, other=0.0)[None, :]
    result = acc.to(out.dtype.element_ty)
    if TRANS_STORE:  # as of `mm_a16w8`
        pointers = out + row[:, None] * out_m + offset_n[None, :]
        tl.store(pointers, tl.trans(result), mask=valid[:, None] & (offset_n[None, :] < N))
    else:
        pointers = out + row[None, :] * out_m + offset_n[:, None]
        tl.store(pointers, result, mask=valid[None, :] & inside_n)


def plan_moe_gemm(product: RoutedProduct, config: MxConfig) -> tuple[TritonLaunch]:
    """The launch that fills the rows of `out` that ids name. There is a tile and an expert at least."""
    (a, a_scale, a_block), (w, w_scale, _), out, routing = product.a, product.w, product.out, product.routing
    n, k, target = product.n, product.k, product.target
    a_scale, w_scale = storage(a_scale), storage(w_scale)
    places = routing.tiles * ceil_div(routing.block_m, config.BM)
    return (
        TritonLaunch(
            kernel=moe_gemm,
            grid=(places * ceil_div(n, config.BN), 1, 1),
            args={
                "a": a, "w": w, "out": out, "a_scale": a_scale, "w_scale": w_scale, **routing._asdict(),
                "token_weights": product.token_weights, "ids": product.ids, "N": n, "K": k, "E": product.experts,
                "block_m": routing.block_m, "a_div": product.a_div,
                "a_m": a.stride(0), "a_k": a.stride(1), "w_e": w.stride(0), "w_k": w.stride(1), "w_n": w.stride(2),
                "out_m": out.stride(0), "as_m": a_scale.stride(0), "as_k": a_scale.stride(1),
                "ws_e": w_scale.stride(0), "ws_k": w_scale.stride(1), "ws_n": w_scale.stride(2),
            },
            constexprs={
                "BM": config.BM, "BN": config.BN, "BK": config.BK, "MX": a_block[1] == 32,
                "EVEN_N": n % config.BN == 0, "EVEN_K": k % config.BK == 0,
                "WIDE": is_wide(a, w[0], out, a_scale, w_scale[0]), "TRANS_STORE": target.backend == "hip",
            },
            options={"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)},
            target=target,
        ),
    )  # fmt: skip


def configure(problem: MoeProblem) -> MxConfig:
    """A tile of ids whole, up to 128, and narrow columns where cores would idle; none spills (its tests)."""
    n, k, target = problem.n, problem.k, problem.target
    bm = min(max(triton.next_power_of_2(problem.block_m), _LEAST_ROWS), _MOST_ROWS)
    options = (("matrix_instr_nonkdim", 16),) if target.backend == "hip" else ()
    stages = 2 if target.backend == "hip" else 3
    if k % 16 and target.backend == "cuda":  # loads of single bytes take registers
        return MxConfig(min(bm, 32), 32, 64 if problem.a_block[1] == 32 else 128, 4, 2)
    if bm > 32:  # 128 columns spill 2 to 190 registers
        return MxConfig(bm, 64, 128, 8, 2, options=options)
    bn = 64 if ceil_div(n, 64) * problem.tiles >= target.cores else 32
    return MxConfig(bm, bn, 128, 4, stages, options=options)
