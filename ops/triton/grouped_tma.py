"""Products of groups by TMA on Blackwell: of rows, contiguous or the first of each expert's matrix, and along K.

A box of rows may begin at any of them, and has those of the next group too: rows are independent, and only a group's
own are stored. Along K, where groups begin at multiples of less than a box, as always in MX, a group's last box has
tokens of the next group, and passes through registers, which keep its own. The places of tiles, the scales but those of
MX, and the stores are those of ops/triton/scaled_grouped_mm.py.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8fn.ops.cuda.operands import map_fault, tma_batch
from fp8fn.ops.groups import most_tokens, unit_of
from fp8fn.ops.layout import WHOLE, is_mx
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import OCP
from fp8fn.ops.triton.boxes import boxes, load_box
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
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.scaled_grouped_mm import formats_of
from fp8fn.ops.triton.swizzle_scales import LINES, SCRATCH, plan_swizzle, stored_boxes, swizzled_boxes, tma_scales
from fp8fn.ops.triton.tile_order import grouped_tile, scaled, tile_scales
from fp8fn.ops.triton.views import ceil_div, is_wide
from fp8fn.ops.tuning.mx_triton import copies_scales, few_steps

# Depth of a tile, as of ops/triton/scaled_mm_tma.py.
_BK: Final = 128
_LEAST_ROWS: Final = 65
_ARCHITECTURES: Final = (100, 103, 120)
# Architectures whose FP8 instruction reads operands from shared memory along either axis.
_EITHER_AXIS: Final = (100, 103)


@triton.jit
def grouped_rows_tma(
    a, b, out, a_scale, b_scale, bias, offsets, M, N, K, E, out_e, out_m, as_e, as_m, as_k, bs_e, bs_k, bs_n, bias_e,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    A_M: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, B_TURNED: tl.constexpr,
    EVEN_N: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """One tile, as of `grouped_rows_mm`; `a (E or 1, M, K)` and `b (E, N, K)`, with `B_TURNED` `(E, K, N)`, are boxes.

    With formats the scales are boxes too, swizzled on sm120 as well: a box of scales as they are stored would begin at
    any byte, and Triton takes multiples of 16.
    """
    place, tile_n = grouped_tile(tl.program_id(0), places(M, E, BM, MASKED), tl.cdiv(N, BN), GROUP)
    group, start_m, end = tile_rows(offsets, place, M, E, BM, GROUPS, MASKED)
    if MASKED:
        matrix = group
        stop = M
        out += group.to(tl.int64) * out_e
        if not ZEROS and start_m >= end:
            return
    else:
        matrix = 0
        stop = end
        if start_m >= end:
            return
    expert = tl.minimum(group, E - 1)
    start_n = tile_n * BN
    offset_m = start_m + tl.arange(0, BM)
    offset_n = start_n + tl.arange(0, BN)
    if A_FORMAT is None:
        if MASKED:
            a_scale += group.to(tl.int64) * as_e
        b_scale += expert.to(tl.int64) * bs_e

    acc = tl.zeros((BM, BN), tl.float32)
    multiplied = start_m < end if MASKED else group < E
    for k in range(tl.where(multiplied, tl.cdiv(K, BK), 0)):
        a_tile = tl.reshape(a.load([matrix, start_m, k * BK]), (BM, BK))
        if B_TURNED:
            b_tile = tl.reshape(b.load([expert, k * BK, start_n]), (BK, BN))
        else:
            b_tile = tl.reshape(b.load([expert, start_n, k * BK]), (BN, BK)).T
        if A_FORMAT is not None:
            block_n = expert * tl.cdiv(N, 128) + tile_n * (BN // 128)
            a_stored = tma_scales(a_scale, place, 0, 0, k, BM, BK, True)
            b_stored = tma_scales(b_scale, block_n, 0, 0, k, BN, BK, True)
            acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, b_tile, b_stored, B_FORMAT, acc)
        else:
            product = tl.dot(a_tile, b_tile)
            acc += promoted(
                product, a_scale, b_scale, k * BK, start_m, offset_m, end, as_m, as_k, start_n, offset_n, N, bs_k, bs_n,
                A_M, A_K, B_K, B_N, BM, BN, EVEN_N,
            )  # fmt: skip

    acc = with_whole_scales(
        acc, a_scale, b_scale, start_m, offset_m, end, as_m, start_n, offset_n, N, bs_n, A_M, A_K, B_K, B_N, BM, BN,
        EVEN_N,
    )  # fmt: skip
    if bias is not None:
        row = bias + expert.to(tl.int64) * bias_e
        acc += tl.load(row + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    acc = tl.where(in_product(group, offset_m, end, E, MASKED), acc, 0.0)
    store_rows(out, acc, offset_m, start_n, stop, N, out_m, BM, BN, HALVES)


@triton.jit
def grouped_k_tma(
    a, b, out, a_scale, b_scale, bias, offsets, M, N, T, E, out_e, out_m, as_m, as_k, bs_k, bs_n, bias_e,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    A_M: tl.constexpr, B_N: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SWIZZLED: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One tile, as of `grouped_k_mm` with spread tokens.

    `a (M, K)`, with `A_TURNED` `(K, M)`, and `b (N, K)`, with `B_TURNED` `(K, N)`, are boxes. With formats the scales
    are boxes too: as they are stored, a row for each `UNIT` tokens, or swizzled, each group from a block of its own.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = grouped_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    start, end = borders(offsets, group, T, E)
    tokens = tl.maximum(end - start, 0)
    start_m = tile_m * BM
    start_n = tile_n * BN
    offset_m = start_m + tl.arange(0, BM)
    offset_n = start_n + tl.arange(0, BN)
    origin = (start // UNIT + group) * UNIT
    place = start // BK + group
    if A_FORMAT is None:
        a_scale += place.to(tl.int64) * as_k
        b_scale += place.to(tl.int64) * bs_k
    A_VECTOR: tl.constexpr = A_M % BM != 0
    B_VECTOR: tl.constexpr = B_N % BN != 0

    if UNIT == BK:
        whole = tl.cdiv(tokens, BK)  # zeros follow the last token
    else:
        whole = tokens // BK
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(whole):
        a_tile, b_tile = _along_k(a, b, start_m, start_n, origin + k * BK, A_TURNED, B_TURNED)
        if A_FORMAT is not None:
            a_stored = _scales_along_k(a_scale, start_m, origin, place, k, BM, BK, SWIZZLED)
            b_stored = _scales_along_k(b_scale, start_n, origin, place, k, BN, BK, SWIZZLED)
            acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, b_tile, b_stored, B_FORMAT, acc)
        else:
            a_value = tile_scales(a_scale, start_m, offset_m, M, as_m, A_M, BM, EVEN_M)
            b_value = tile_scales(b_scale, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
            acc += scaled(tl.dot(a_tile, b_tile), a_value, b_value, A_VECTOR, B_VECTOR)
            a_scale += as_k
            b_scale += bs_k
    if UNIT != BK:  # noqa: SIM102 - known when the kernel is compiled
        if whole * BK < tokens:
            inside = tl.arange(0, BK) < tokens - whole * BK
            a_tile, b_tile = _along_k(a, b, start_m, start_n, origin + whole * BK, A_TURNED, B_TURNED)
            a_tile = selected(a_tile, inside[None, :])
            b_tile = selected(b_tile, inside[:, None])
            if A_FORMAT is not None:
                a_stored = _scales_along_k(a_scale, start_m, origin, place, whole, BM, BK, SWIZZLED)
                b_stored = _scales_along_k(b_scale, start_n, origin, place, whole, BN, BK, SWIZZLED)
                if not SWIZZLED:  # among swizzled ones zeros follow a group's last
                    own = tl.arange(0, BK // 32) * 32 < tokens - whole * BK
                    a_stored = tl.where(own[None, :], a_stored, 0)
                    b_stored = tl.where(own[None, :], b_stored, 0)
                acc = tl.dot_scaled(a_tile, a_stored, A_FORMAT, b_tile, b_stored, B_FORMAT, acc)
            else:
                a_value = tile_scales(a_scale, start_m, offset_m, M, as_m, A_M, BM, EVEN_M)
                b_value = tile_scales(b_scale, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
                acc += scaled(tl.dot(a_tile, b_tile), a_value, b_value, A_VECTOR, B_VECTOR)

    if bias is not None:
        row = bias + group.to(tl.int64) * bias_e
        acc += tl.load(row + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
    store_rows(out + group.to(tl.int64) * out_e, acc, offset_m, start_n, M, N, out_m, BM, BN, HALVES)


@triton.jit
def _along_k(a, b, start_m, start_n, token, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr):
    """The K tile from `token` on, `(BM, BK)` of a and `(BK, BN)` of b."""
    if A_TURNED:
        a_tile = a.load([token, start_m]).T
    else:
        a_tile = a.load([start_m, token])
    if B_TURNED:
        b_tile = b.load([token, start_n])
    else:
        b_tile = b.load([start_n, token]).T
    return a_tile, b_tile


@triton.jit
def _scales_along_k(scales, start, origin, place, k, LINES: tl.constexpr, BK: tl.constexpr, SWIZZLED: tl.constexpr):
    """The stored scales `(LINES, BK // 32)` of K tile `k` of the group from token `origin`, or block `place`, on."""
    if SWIZZLED:
        tile = tma_scales(scales, start // 128, 0, 0, place + k, LINES, BK, True)
    else:
        tile = load_box(scales, 0, origin // 32 + k * (BK // 32), start).T
    return tile


def accepts(product: ScaledProduct) -> str | None:
    """None where `plan_grouped_tma` takes these operands, else the reason why not."""
    (a, a_scale, a_block), (b, b_scale, b_block), target = product.a, product.b, product.target
    if target.backend != "cuda" or target.arch not in _ARCHITECTURES:
        return f"{target.name} is none of {', '.join(f'sm{arch}' for arch in _ARCHITECTURES)}"
    if a.dtype not in OCP or b.dtype not in OCP:
        return f"{a.dtype} and {b.dtype} are not both types of the tensor core"
    if product.m == 0 or product.k == 0:
        return "M is 0" if product.m == 0 else "K is 0"  # TMA has no map of a tensor without elements
    in_mx = is_mx(a_scale, a_block, b_scale, b_block)
    along_k = b.dim() == 2
    if along_k and a_block[1] != _BK and not in_mx:
        return f"blocks {a_block} and {b_block}: groups along K are taken in blocks of {_BK} tokens, or in MX"
    if not in_mx and not {a_block[1], b_block[0]} <= {_BK, WHOLE}:
        return f"blocks {a_block} and {b_block}: a scale must hold for {_BK} or all elements along K"
    either = target.arch in _EITHER_AXIS and not in_mx
    if (fault := map_fault(a)) is not None and not (either and along_k and map_fault(a.mT) is None):
        return f"a {fault}"
    if (fault := map_fault(b.mT)) is not None and not (either and map_fault(b) is None):
        return f"b.mT {fault}"
    if along_k and in_mx and not copies_scales(target):
        for name, scale in (("a_scale.mT", a_scale.mT), ("b_scale", b_scale)):
            if (fault := map_fault(scale)) is not None:
                return f"{name} {fault}"
    if is_wide(*(x[0] if x.dim() == 3 else x for x in (product.out, a_scale, b_scale))):
        return "an element of out or of the scales lies at an offset of more than 32 bits"  # such a form would spill
    return None


def untuned(product: ScaledProduct) -> str | None:
    """Why the kernel should not serve where no table names it, or None: groups of few rows, or scales of few K tiles.

    `accepts` takes groups of few rows, because a table's row for M rows serves every product of more than M / 2 rows.
    """
    a, b, groups = product.a, product.b, (product.group_ends if product.counts is None else product.counts).shape[0]
    rows, depth, along_k = product.mean_rows, product.k, b.data.dim() == 2
    if along_k:
        rows, depth = product.m, product.k // groups
        if rows < _LEAST_ROWS:
            return f"M is {rows}, below {_LEAST_ROWS}"
    elif rows < _LEAST_ROWS:
        return f"a group has {rows} rows in the mean, below {_LEAST_ROWS}"
    if not is_mx(a.scale, a.block, b.scale, b.block) or (along_k and not copies_scales(product.target)):
        return None
    config = configured(product)
    tiles = groups * ceil_div(rows, config.BM) * ceil_div(product.n, config.BN)
    return few_steps(ceil_div(depth, _BK), tiles, product.target)


def configured(product: ScaledProduct) -> GemmConfig:
    """The default, which was never timed."""
    return candidates(product)[0]


def candidates(product: ScaledProduct) -> tuple[GemmConfig, ...]:
    """Configurations worth timing, the default first; none spills, and none was timed."""
    a, b, target = product.a, product.b, product.target
    if is_mx(a.scale, a.block, b.scale, b.block):
        wide = () if target.arch == 120 else (GemmConfig(128, 256, 8, 3), GemmConfig(128, 128, 8, 5))
        return (GemmConfig(128, 128, 8, 3), *wide)
    if target.arch == 120:
        return (GemmConfig(128, 64, 8, 3), GemmConfig(64, 64, 4, 3), GemmConfig(64, 128, 8, 3))
    if b.block[1] == 1 and b.block[0] != WHOLE:
        # With a vector of scales of b for each K tile 128 columns spill where N is partial.
        even = b.data.dim() == 2 and product.m % 128 == 0 and product.n % 128 == 0
        return (GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 4), *([GemmConfig(128, 128, 8, 3)] if even else []))
    return (GemmConfig(128, 128, 8, 3), GemmConfig(128, 64, 8, 3), GemmConfig(128, 128, 8, 4))


def plan_grouped_tma(product: ScaledProduct, config: GemmConfig | None = None) -> tuple[TritonLaunch, ...]:
    """The launches of a product that `accepts` takes; see `plan_scaled_grouped_mm` for what else holds."""
    config = config or configured(product)
    return _plan_rows(product, config) if product.b.data.dim() == 3 else _plan_k(product, config)


def _plan_rows(product: ScaledProduct, config: GemmConfig) -> tuple[TritonLaunch, ...]:
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, target, masked = product.bias, product.target, product.counts is not None
    offsets = product.group_ends if product.counts is None else product.counts
    m, n, k, groups = product.m, product.n, product.k, offsets.shape[0]
    formats, turned = formats_of(product), map_fault(b.mT) is not None
    before: tuple[TritonLaunch, ...] = ()
    scales: dict[str, Tensor | TensorDescriptor] = {"a_scale": storage(a_scale), "b_scale": storage(b_scale)}
    if formats["A_FORMAT"] is not None:
        assert config.BM == LINES
        before = (plan_swizzle(product),)
        scales.update(swizzled_boxes(before[0], (config.BM, config.BN), _BK))
    tiles_m = groups * ceil_div(m, config.BM) if masked else m // config.BM + groups + 1
    multiply = TritonLaunch(
        kernel=grouped_rows_tma,
        grid=(tiles_m * ceil_div(n, config.BN), 1, 1),
        args={
            "a": TensorDescriptor.from_tensor(tma_batch(a), [1, config.BM, _BK]), "b": _box_of(b, config.BN, turned),
            "out": out, **scales, "bias": bias, "offsets": offsets, "M": m, "N": n, "K": k, "E": groups,
            **strides_of_rows(product),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": _BK, "GROUP": config.GROUP, "GROUPS": places_of(groups),
            "A_M": a_block[0], "A_K": a_block[1], "B_K": b_block[0], "B_N": b_block[1], **formats,
            "B_TURNED": turned, "EVEN_N": n % config.BN == 0,
            "HALVES": config.HALVES, "MASKED": masked, "ZEROS": product.zeros,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        target=target,
        binds={**(SCRATCH if before else {}), **({"offsets": "counts"} if masked else {})},
    )  # fmt: skip
    return *before, multiply


def _plan_k(product: ScaledProduct, config: GemmConfig) -> tuple[TritonLaunch, ...]:
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, offsets = product.bias, product.group_ends
    a_scale, b_scale = storage(a_scale), storage(b_scale)
    m, n, k, groups, size = product.m, product.n, product.k, offsets.shape[0], a_block[1]
    a_turned, b_turned = map_fault(a) is not None, map_fault(b.mT) is not None
    formats, lines = formats_of(product), (config.BM, config.BN)
    before: tuple[TritonLaunch, ...] = ()
    scales: dict[str, Tensor | TensorDescriptor] = {"a_scale": a_scale, "b_scale": b_scale}
    if formats["A_FORMAT"] is not None:
        before = (plan_swizzle(product),) if copies_scales(product.target) else ()
        scales.update(swizzled_boxes(before[0], lines, _BK) if before else stored_boxes(product, lines, _BK))
    multiply = TritonLaunch(
        kernel=grouped_k_tma,
        grid=(groups * ceil_div(m, config.BM) * ceil_div(n, config.BN), 1, 1),
        args={
            "a": boxes(a.mT, _BK, config.BM) if a_turned else boxes(a, config.BM, _BK),
            "b": boxes(b, _BK, config.BN) if b_turned else boxes(b.mT, config.BN, _BK), "out": out,
            **scales, "bias": bias, "offsets": offsets, "M": m, "N": n, "T": most_tokens(k, groups, size),
            "E": groups, "out_e": out.stride(0), "out_m": out.stride(1),
            "as_m": a_scale.stride(0), "as_k": a_scale.stride(1), "bs_k": b_scale.stride(0), "bs_n": b_scale.stride(1),
            "bias_e": 0 if bias is None else bias.stride(0),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": _BK, "UNIT": unit_of(k, groups, size),
            "GROUP": config.GROUP, "A_M": a_block[0], "B_N": b_block[1], **formats, "SWIZZLED": bool(before),
            "A_TURNED": a_turned, "B_TURNED": b_turned,
            "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0, "HALVES": config.HALVES,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        target=product.target,
        binds=SCRATCH if before else {},
    )  # fmt: skip
    return *before, multiply


def _box_of(b: Tensor, columns: int, turned: bool) -> TensorDescriptor:
    """Boxes of a K tile by `columns` of one expert, along the axis in which `b (E, K, N)` is contiguous."""
    if turned:
        return TensorDescriptor.from_tensor(tma_batch(b), [1, _BK, columns])
    return TensorDescriptor.from_tensor(tma_batch(b.mT), [1, columns, _BK])
