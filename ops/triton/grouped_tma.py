"""Products of groups of rows by TMA on Blackwell: contiguous groups, or the first rows of each expert's matrix.

A box of a may begin at any row, and has those of the next group too: rows are independent, and only a group's own are
stored. The places of tiles, the scales and the stores are those of ops/triton/scaled_grouped_mm.py.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8fn.ops.cuda.gemm.operands import as_batch, map_fault
from fp8fn.ops.layout import WHOLE
from fp8fn.ops.mx_mm import is_mx
from fp8fn.ops.products import ScaledProduct
from fp8fn.ops.targets import OCP
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.group_tiles import (
    in_product,
    places,
    places_of,
    promoted,
    store_rows,
    strides_of_rows,
    tile_rows,
    with_whole_scales,
)
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.scaled_grouped_mm import formats_of
from fp8fn.ops.triton.swizzle_scales import LINES, SCRATCH, plan_swizzle, swizzled_boxes, tma_scales
from fp8fn.ops.triton.tile_order import grouped_tile
from fp8fn.ops.triton.views import ceil_div, is_wide
from fp8fn.ops.tuning.mx_triton import few_steps

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
            a_stored = tma_scales(a_scale, place, 0, k, BM, BK, True)
            b_stored = tma_scales(b_scale, block_n, 0, k, BN, BK, True)
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


def accepts(product: ScaledProduct) -> str | None:
    """None where `plan_grouped_tma` takes these operands, else the reason why not."""
    (a, a_scale, a_block), (b, b_scale, b_block), target = product.a, product.b, product.target
    if target.backend != "cuda" or target.arch not in _ARCHITECTURES:
        return f"{target.name} is none of {', '.join(f'sm{arch}' for arch in _ARCHITECTURES)}"
    if b.dim() == 2:
        return "groups are along K"
    if a.dtype not in OCP or b.dtype not in OCP:
        return f"{a.dtype} and {b.dtype} are not both types of the tensor core"
    if product.m == 0 or product.k == 0:
        return "M is 0" if product.m == 0 else "K is 0"  # TMA has no map of a tensor without elements
    in_mx = is_mx(a_scale, a_block, b_scale, b_block)
    if not in_mx and not {a_block[1], b_block[0]} <= {_BK, WHOLE}:
        return f"blocks {a_block} and {b_block}: a scale must hold for {_BK} or all elements along K"
    if (fault := map_fault(a)) is not None:
        return f"a {fault}"
    turned = target.arch in _EITHER_AXIS and not in_mx and map_fault(b) is None
    if not turned and (fault := map_fault(b.mT)) is not None:
        return f"b.mT {fault}"
    if is_wide(*(x[0] if x.dim() == 3 else x for x in (product.out, a_scale, b_scale))):
        return "an element of out or of the scales lies at an offset of more than 32 bits"  # such a form would spill
    return None


def untuned(product: ScaledProduct) -> str | None:
    """Why the kernel should not serve where no table names it, or None: groups of few rows, or scales of few K tiles.

    `accepts` takes groups of few rows, because a table's row for M rows serves every product of more than M / 2 rows.
    """
    if product.mean_rows < _LEAST_ROWS:
        return f"a group has {product.mean_rows} rows in the mean, below {_LEAST_ROWS}"
    a, b = product.a, product.b
    if not is_mx(a.scale, a.block, b.scale, b.block):
        return None
    config = configured(product)
    tiles = b.data.shape[0] * ceil_div(product.mean_rows, config.BM) * ceil_div(product.n, config.BN)
    return few_steps(ceil_div(product.k, _BK), tiles, product.target)


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
        # With a vector of scales of b for each K tile 128 columns spill 20 to 52 where N is partial.
        return (GemmConfig(128, 64, 8, 3), GemmConfig(128, 64, 8, 4))
    return (GemmConfig(128, 128, 8, 3), GemmConfig(128, 64, 8, 3), GemmConfig(128, 128, 8, 4))


def plan_grouped_tma(product: ScaledProduct, config: GemmConfig | None = None) -> tuple[TritonLaunch, ...]:
    """The launches of `out (M, N) = a (M, K) @ b (E, K, N)`, or of `out (E, M, N) = a (E, M, K) @ b (E, K, N)`.

    See `accepts`, and `plan_scaled_grouped_mm` for what else holds.
    """
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, target, masked = product.bias, product.target, product.counts is not None
    offsets = product.group_ends if product.counts is None else product.counts
    m, n, k, groups = product.m, product.n, product.k, offsets.shape[0]
    config = config or configured(product)
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
            "a": TensorDescriptor.from_tensor(as_batch(a), [1, config.BM, _BK]), "b": _box_of(b, config.BN, turned),
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


def _box_of(b: Tensor, columns: int, turned: bool) -> TensorDescriptor:
    """Boxes of a K tile by `columns` of one expert, along the axis in which `b (E, K, N)` is contiguous."""
    if turned:
        return TensorDescriptor.from_tensor(as_batch(b), [1, _BK, columns])
    return TensorDescriptor.from_tensor(as_batch(b.mT), [1, columns, _BK])
