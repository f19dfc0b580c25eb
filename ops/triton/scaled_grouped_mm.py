"""The portable grouped products: groups of rows each by its own matrix, and groups along K each summed for itself.

Nothing of a launch depends on where the groups end. For rows a program finds its group on the device: with tiles of
`BM` rows group `g` takes the places from `start_g // BM + g` on (ops/groups.py says why that is room enough), and what
lies past the last group is one group more, of zeros. In a batch whose experts have the first rows of their matrix, as
many as `counts` says, each tile of the batch has a program, and those without a row multiply nothing.

Where the matrix instruction takes scales (sm100's `tcgen05.mma`, sm120's `mma`, gfx950's MFMA), it takes those of MX,
and a K tile holds several blocks. Elsewhere a K tile is one block, whose scales multiply its product.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from fp8fn.ops.groups import ROWS, most_tokens, unit_of
from fp8fn.ops.layout import WHOLE, is_mx
from fp8fn.ops.mx_mm import has_lines
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.group_tiles import (
    borders,
    in_product,
    places,
    places_of,
    promoted,
    selected,
    store_rows,
    strides_of_rows,
    tile_rows,
    with_whole_scales,
)
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mx_mm_scaled import FORMATS
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.scaled_mm import choose_config
from fp8fn.ops.triton.tile_order import grouped_tile, scaled, tile_scales
from fp8fn.ops.triton.views import ceil_div, is_wide
from fp8fn.ops.tuning.amd import is_aligned
from fp8fn.ops.tuning.amd_kernels import GROUPED_K
from fp8fn.ops.tuning.mx import Problem
from fp8fn.ops.tuning.mx_triton import accepts_scaled, configure_scaled


@triton.jit
def grouped_rows_mm(
    a, b, out, a_scale, b_scale, bias, offsets, M, N, K, E, a_e, a_m, a_k, b_e, b_k, b_n, out_e, out_m,
    as_e, as_m, as_k, bs_e, bs_k, bs_n, bias_e,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    A_M: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr,
    MASKED: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of the rows of one group; `GROUPS` is a power of two above `E`.

    `A_FORMAT` and `B_FORMAT` are the types where the matrix instruction takes the scales, else None. `MASKED`: each of
    `E` matrices of `M` rows has its first ones in the product, and `offsets` are their counts. `ZEROS`: the tiles of
    the other rows are written.
    """
    place, tile_n = grouped_tile(tl.program_id(0), places(M, E, BM, MASKED), tl.cdiv(N, BN), GROUP)
    group, start_m, end = tile_rows(offsets, place, M, E, BM, GROUPS, MASKED)
    if MASKED:
        stop = M
        a += group.to(tl.int64) * a_e
        a_scale += group.to(tl.int64) * as_e
        out += group.to(tl.int64) * out_e
        if not ZEROS and start_m >= end:
            return
    else:
        stop = end
        if start_m >= end:
            return
    expert = tl.minimum(group, E - 1).to(tl.int64)
    offset_k = tl.arange(0, BK)
    if WIDE:
        start_m = start_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        offset_k = offset_k.to(tl.int64)
    offset_m = start_m + tl.arange(0, BM)
    offset_n = tile_n * BN + tl.arange(0, BN)
    a_pointers = a + offset_m[:, None] * a_m + offset_k[None, :] * a_k
    b_pointers = b + expert * b_e + offset_k[:, None] * b_k + offset_n[None, :] * b_n
    b_scale += expert * bs_e

    acc = tl.zeros((BM, BN), tl.float32)
    multiplied = start_m < end if MASKED else group < E
    for k in range(tl.where(multiplied, tl.cdiv(K, BK), 0)):
        if EVEN_K:
            a_tile = tl.load(a_pointers, mask=offset_m[:, None] < end, other=0.0)
        else:
            a_tile = tl.load(a_pointers, mask=(offset_m[:, None] < end) & (offset_k[None, :] < K - k * BK), other=0.0)
        if EVEN_K and EVEN_N:
            b_tile = tl.load(b_pointers)
        elif EVEN_K:
            b_tile = tl.load(b_pointers, mask=offset_n[None, :] < N, other=0.0)
        else:
            b_tile = tl.load(b_pointers, mask=(offset_k[:, None] < K - k * BK) & (offset_n[None, :] < N), other=0.0)
        if A_FORMAT is not None:
            a_stored = mx_scales(a_scale, offset_m, end, k * BK, K, as_m, as_k, BK)
            b_stored = mx_scales(b_scale, offset_n, N, k * BK, K, bs_n, bs_k, BK)
            acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, b_tile, b_stored, B_FORMAT, acc)
        else:
            product = tl.dot(a_tile, b_tile)
            acc += promoted(
                product, a_scale, b_scale, k * BK, start_m, offset_m, end, as_m, as_k, tile_n * BN, offset_n, N, bs_k,
                bs_n, A_M, A_K, B_K, B_N, BM, BN, EVEN_N,
            )  # fmt: skip
        a_pointers += BK * a_k
        b_pointers += BK * b_k

    acc = with_whole_scales(
        acc, a_scale, b_scale, start_m, offset_m, end, as_m, tile_n * BN, offset_n, N, bs_n, A_M, A_K, B_K, B_N, BM, BN,
        EVEN_N,
    )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + expert * bias_e + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    acc = tl.where(in_product(group, offset_m, end, E, MASKED), acc, 0.0)
    store_rows(out, acc, offset_m, tile_n * BN, stop, N, out_m, BM, BN, HALVES)


@triton.jit
def grouped_k_mm(
    a, b, out, a_scale, b_scale, bias, offsets, M, N, K, T, E, a_m, a_k, b_k, b_n, out_e, out_m,
    as_m, as_k, bs_k, bs_n, bias_e,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    SPREAD: tl.constexpr, A_M: tl.constexpr, B_N: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile of one group's product, summed over its tokens; there are `T` at most in `K` places.

    Spread tokens come in blocks of `SIZE`, the last of which ends with the group's last `UNIT` rows. `A_M` rows of a
    block of a have one scale, and `B_N` columns of a block of b: 1, or `SIZE` in squares. A K tile is one block, or
    with formats, as of `grouped_rows_mm`, several. Others lie where they are, and have one vector for the whole group;
    a tile begins at a multiple of 16 of them, so that loads are wide.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = grouped_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    start, end = borders(offsets, group, T, E)
    if SPREAD:
        block = start // SIZE + group
        origin = (start // UNIT + group) * UNIT
        stop = origin + tl.cdiv(end - start, UNIT) * UNIT
        blocks = tl.cdiv(end - start, BK)
    else:
        block = group
        origin = start // 16 * 16
        blocks = tl.where(start < end, tl.cdiv(end - origin, BK), 0)
    offset_k = origin + tl.arange(0, BK)
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        offset_k = offset_k.to(tl.int64)
    offset_m = tile_m * BM + tl.arange(0, BM)
    offset_n = tile_n * BN + tl.arange(0, BN)
    a_pointers = a + offset_m[:, None] * a_m + offset_k[None, :] * a_k
    b_pointers = b + offset_k[:, None] * b_k + offset_n[None, :] * b_n
    a_scale += block.to(tl.int64) * as_k
    b_scale += block.to(tl.int64) * bs_k
    A_VECTOR: tl.constexpr = A_M % BM != 0
    B_VECTOR: tl.constexpr = B_N % BN != 0

    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(blocks):
        if SPREAD:
            inside = offset_k + k * BK < stop
            if EVEN_M:
                a_tile = tl.load(a_pointers, mask=inside[None, :], other=0.0)
            else:
                a_tile = tl.load(a_pointers, mask=(offset_m[:, None] < M) & inside[None, :], other=0.0)
            if EVEN_N:
                b_tile = tl.load(b_pointers, mask=inside[:, None], other=0.0)
            else:
                b_tile = tl.load(b_pointers, mask=inside[:, None] & (offset_n[None, :] < N), other=0.0)
            if A_FORMAT is not None:
                a_stored = mx_scales(a_scale, offset_m, M, k * BK, stop - origin, as_m, as_k, BK)
                b_stored = mx_scales(b_scale, offset_n, N, k * BK, stop - origin, bs_n, bs_k, BK)
                acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, b_tile, b_stored, B_FORMAT, acc)
            else:
                product = tl.dot(a_tile, b_tile)
                a_value = tile_scales(a_scale, tile_m * BM, offset_m, M, as_m, A_M, BM, EVEN_M)
                b_value = tile_scales(b_scale, tile_n * BN, offset_n, N, bs_n, B_N, BN, EVEN_N)
                acc += scaled(product, a_value, b_value, A_VECTOR, B_VECTOR)
                a_scale += as_k
                b_scale += bs_k
        else:
            token = offset_k + k * BK
            a_tile = tl.load(a_pointers, mask=(offset_m[:, None] < M) & (token[None, :] < K), other=0.0)
            b_tile = tl.load(b_pointers, mask=(token[:, None] < K) & (offset_n[None, :] < N), other=0.0)
            # By a selection: a mask with the group's borders in it would make every load one of single bytes.
            inside = (token >= start) & (token < end)
            acc += tl.dot(selected(a_tile, inside[None, :]), selected(b_tile, inside[:, None]))
        a_pointers += BK * a_k
        b_pointers += BK * b_k

    if not SPREAD:
        a_value = tile_scales(a_scale, tile_m * BM, offset_m, M, as_m, 1, BM, EVEN_M)
        b_value = tile_scales(b_scale, tile_n * BN, offset_n, N, bs_n, 1, BN, EVEN_N)
        acc = tl.where(start < end, scaled(acc, a_value, b_value, True, True), 0.0)
    if bias is not None:
        row = bias + group.to(tl.int64) * bias_e
        acc += tl.load(row + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    store_rows(out + group.to(tl.int64) * out_e, acc, offset_m, tile_n * BN, M, N, out_m, BM, BN, HALVES)


@triton.jit
def mx_scales(scales, lines, end, first, K, step, step_k, BK: tl.constexpr):
    """The stored scales `(lines, BK // 32)` of a K tile from `first` on; those of no line or no element are 0."""
    block_k = (first // 32 + tl.arange(0, BK // 32)).to(lines.dtype)
    inside = (lines[:, None] < end) & (block_k[None, :] * 32 < K)
    return tl.load(scales + lines[:, None] * step + block_k[None, :] * step_k, mask=inside, other=0)


def plan_scaled_grouped_mm(product: ScaledProduct, config: GemmConfig | None = None) -> tuple[TritonLaunch]:
    """The launch of `out (M, N) = a (M, K) @ b (E, K, N)`, or of `out (E, M, N) = a (M, P) @ b (P, N)`; `E` is not 0.

    With counts it is that of `out (E, M, N) = a (E, M, K) @ b (E, K, N)`. `out` is row-major bfloat16, float16 or
    float32, `bias (E, N)` has contiguous rows, `offsets` and `counts` are contiguous.
    """
    plan = _plan_rows if product.b.data.dim() == 3 else _plan_k
    return (plan(product, config),)


def _plan_rows(product: ScaledProduct, config: GemmConfig | None) -> TritonLaunch:
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, target, masked = product.bias, product.target, product.counts is not None
    offsets = product.group_ends if product.counts is None else product.counts
    a_scale, b_scale = storage(a_scale), storage(b_scale)
    (m, k), n, groups = a.shape[-2:], b.shape[2], offsets.shape[0]
    formats = formats_of(product)
    if formats["A_FORMAT"] is not None:
        tile, bk = _scaled_config(product, product.mean_rows, k)
    else:
        tile = configured(product)
        bk = min((size for size in (a_block[1], b_block[0]) if size != WHOLE), default=128)
    config = config or tile
    tiles_m = groups * ceil_div(m, config.BM) if masked else m // config.BM + groups + 1
    matrices = (a[0], out[0], a_scale[0]) if masked else (a, out, a_scale)
    return TritonLaunch(
        kernel=grouped_rows_mm,
        grid=(tiles_m * ceil_div(n, config.BN), 1, 1),
        args={
            "a": a, "b": b, "out": out, "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "offsets": offsets,
            "M": m, "N": n, "K": k, "E": groups,
            "a_e": a.stride(0) if masked else 0, "a_m": a.stride(-2), "a_k": a.stride(-1),
            "b_e": b.stride(0), "b_k": b.stride(1), "b_n": b.stride(2),
            **strides_of_rows(product),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": bk, "GROUP": config.GROUP, "GROUPS": places_of(groups),
            "A_M": a_block[0], "A_K": a_block[1], "B_K": b_block[0], "B_N": b_block[1], **formats,
            "EVEN_N": n % config.BN == 0, "EVEN_K": k % bk == 0,
            "WIDE": is_wide(*matrices, b[0], b_scale[0]), "HALVES": config.HALVES,
            "MASKED": masked, "ZEROS": product.zeros,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)},
        target=target,
        binds={"offsets": "counts"} if masked else {},
    )  # fmt: skip


def _plan_k(product: ScaledProduct, config: GemmConfig | None) -> TritonLaunch:
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, offsets, target = product.bias, product.group_ends, product.target
    a_scale, b_scale = storage(a_scale), storage(b_scale)
    (m, k), n, groups = a.shape, b.shape[1], offsets.shape[0]
    spread = a_block[1] != WHOLE
    size = a_block[1] if spread else ROWS
    formats = formats_of(product)
    if formats["A_FORMAT"] is not None:
        tile, bk = _scaled_config(product, m, k)
    else:
        tile, bk = configured(product), size
    config = config or tile
    return TritonLaunch(
        kernel=grouped_k_mm,
        grid=(groups * ceil_div(m, config.BM) * ceil_div(n, config.BN), 1, 1),
        args={
            "a": a, "b": b, "out": out, "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "offsets": offsets,
            "M": m, "N": n, "K": k, "T": most_tokens(k, groups, size) if spread else k, "E": groups,
            "a_m": a.stride(0), "a_k": a.stride(1), "b_k": b.stride(0), "b_n": b.stride(1),
            "out_e": out.stride(0), "out_m": out.stride(1), "as_m": a_scale.stride(0), "as_k": a_scale.stride(1),
            "bs_k": b_scale.stride(0), "bs_n": b_scale.stride(1), "bias_e": 0 if bias is None else bias.stride(0),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": bk, "SIZE": size,
            "UNIT": unit_of(k, groups, size), "GROUP": config.GROUP, "SPREAD": spread,
            "A_M": a_block[0], "B_N": b_block[1], **formats,
             "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0,
            "WIDE": is_wide(a, b, out[0], a_scale, b_scale), "HALVES": config.HALVES,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)},
        target=target,
    )  # fmt: skip


def formats_of(product: ScaledProduct) -> dict[str, str | None]:
    """The types of both sides if they are in MX and the matrix instruction of the target takes their scales."""
    a, b = product.a, product.b
    if not is_mx(a.scale, a.block, b.scale, b.block) or accepts_scaled(_problem(product, 0, 0)) is not None:
        return {"A_FORMAT": None, "B_FORMAT": None}
    return {"A_FORMAT": FORMATS[a.data.dtype], "B_FORMAT": FORMATS[b.data.dtype]}


def _problem(product: ScaledProduct, m: int, k: int) -> Problem:
    """A group's product as MX kernels are configured for it."""
    a, b = product.a.data, product.b.data
    k_lines = has_lines(a) and has_lines(b.mT)
    return Problem(m, b.shape[-1], k, product.target, a_dtype=a.dtype, b_dtype=b.dtype, k_lines=k_lines)


def _scaled_config(product: ScaledProduct, m: int, k: int) -> tuple[GemmConfig, int]:
    """The tile of `m` rows that the MX product takes, and the elements of its K tile."""
    of = configure_scaled(_problem(product, m, k))
    return GemmConfig(of.BM, of.BN, of.num_warps, of.num_stages, of.GROUP, options=of.options), of.BK


def configured(product: ScaledProduct) -> GemmConfig:
    """The default where no instruction takes the scales; none spills (scaled_grouped_mm/test_triton.py)."""
    return _rows_config(product) if product.b.data.dim() == 3 else _k_config(product)


def _rows_config(product: ScaledProduct) -> GemmConfig:
    a, b, out, target = product.a.data, product.b.data, product.out, product.target
    config = choose_config(product.mean_rows, b.shape[2], b.shape[1], target, aligned=is_aligned(a, b, out))
    if b.stride(1) != 1 and target.arch in (89, 120) and config.BM == 64:
        # The weight is turned around in registers: 6 of them spill from a tile of 128 columns.
        return replace(config, BN=min(config.BN, 64))
    return config


def _k_config(product: ScaledProduct) -> GemmConfig:
    (a, _, a_block), b, target = product.a, product.b.data, product.target
    m, n, spread = product.m, product.n, a_block[1] != WHOLE
    config = choose_config(m, n, ROWS, target, aligned=spread or is_aligned(a, b, b))
    if spread and target.arch in GROUPED_K and m > 64:
        from fp8fn.ops.tuning.amd import config_of

        return config_of(GROUPED_K[str(target.arch)])
    if config.BM == 64 and target.arch == 90 and not spread:
        # Both operands pass through registers: 2 of them spill with 4 warps.
        return replace(config, num_warps=8)
    if config.BM == 64 and target.arch in (89, 120) and (m % config.BM or n % config.BN):
        # The masks of a partial tile take registers: 2 spill with 4 warps.
        return replace(config, num_warps=8)
    return config
