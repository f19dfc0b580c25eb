"""Pieces of the kernels of groups: which tile has which rows, the scales of a K tile, and the stores."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.triton.tile_order import scaled, tile_scales


@triton.jit
def places(M, E, BM: tl.constexpr, MASKED: tl.constexpr):
    """The number of tiles along M that groups may have."""
    if MASKED:
        number = tl.cdiv(M, BM) * E
    else:
        number = M // BM + E + 1
    return number


@triton.jit
def tile_rows(offsets, place, M, E, BM: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr):
    """The group that takes a place, the first row of its tile, and the group's end."""
    if MASKED:
        tiles_m = tl.cdiv(M, BM)
        group = place // tiles_m
        start_m = place % tiles_m * BM
        end = tl.minimum(tl.maximum(tl.load(offsets + group), 0), M)
    else:
        group, first = group_at(offsets, place, M, E, BM, GROUPS)
        start, end = borders(offsets, group, M, E)
        start_m = start + (place - first) * BM
    return group, start_m, end


@triton.jit
def promoted(
    product, a_scale, b_scale, first, start_m, offset_m, end, as_m, as_k, start_n, offset_n, N, bs_k, bs_n,
    A_M: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """The product of the K tile from `first` on, times those of its scales that don't hold for all of K."""
    A_VECTOR: tl.constexpr = A_M != -1
    B_VECTOR: tl.constexpr = B_N != -1 and B_N % BN != 0
    if A_K == -1 and B_K == -1:
        result = product
    elif A_K == -1:
        b_value = tile_scales(b_scale + first // B_K * bs_k, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
        result = scaled(product, 1.0, b_value, False, B_VECTOR)
    elif B_K == -1:
        a_value = tile_scales(a_scale + first // A_K * as_k, start_m, offset_m, end, as_m, A_M, BM, False)
        result = scaled(product, a_value, 1.0, A_VECTOR, False)
    else:
        a_value = tile_scales(a_scale + first // A_K * as_k, start_m, offset_m, end, as_m, A_M, BM, False)
        b_value = tile_scales(b_scale + first // B_K * bs_k, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
        result = scaled(product, a_value, b_value, A_VECTOR, B_VECTOR)
    return result


@triton.jit
def with_whole_scales(
    acc, a_scale, b_scale, start_m, offset_m, end, as_m, start_n, offset_n, N, bs_n,
    A_M: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """The sum over K times the scales that hold for all of K."""
    if A_K == -1:
        a_value = tile_scales(a_scale, start_m, offset_m, end, as_m, A_M, BM, False)
        acc = scaled(acc, a_value, 1.0, A_M != -1, False)
    if B_K == -1:
        b_value = tile_scales(b_scale, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
        acc = scaled(acc, 1.0, b_value, False, B_N != -1 and B_N % BN != 0)
    return acc


@triton.jit
def in_product(group, offset_m, end, E, MASKED: tl.constexpr):
    """Which rows of a tile are in the product. The scale of a token past the last group may be NaN."""
    if MASKED:
        inside = offset_m[:, None] < end
    else:
        inside = group < E
    return inside


@triton.jit
def group_at(offsets, place, M, E, BM: tl.constexpr, GROUPS: tl.constexpr):
    """The group that takes a place, and its first one: the last group that begins at or before it."""
    index = tl.arange(0, GROUPS)
    starts = tl.load(offsets + index - 1, mask=(index > 0) & (index <= E), other=0)
    first = tl.minimum(tl.maximum(starts, 0), M) // BM + index
    begun = (first <= place) & (index <= E)
    group = tl.sum(begun.to(tl.int32), 0) - 1
    return group, tl.sum(tl.where(index == group, first, 0), 0)


@triton.jit
def borders(offsets, group, M, E):
    """A group's first token and the one behind its last, within the `M` there are; group `E` is what is left."""
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group, mask=group < E, other=M)
    return tl.minimum(tl.maximum(start, 0), M), tl.minimum(tl.maximum(end, 0), M)


@triton.jit
def store_rows(out, acc, offset_m, start_n, end, N, out_m, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr):
    """Rows before `end`; in halves where that makes 16-byte stores of 8-byte ones (ops/triton/scaled_mm.py)."""
    result = acc.to(out.dtype.element_ty)
    rows = out + offset_m[:, None] * out_m
    if HALVES:
        left, right = tl.split(tl.permute(tl.reshape(result, (BM, 2, BN // 2)), (0, 2, 1)))
        half_n = start_n + tl.arange(0, BN // 2)
        other_n = half_n + BN // 2
        tl.store(rows + half_n[None, :], left, mask=(offset_m[:, None] < end) & (half_n[None, :] < N))
        tl.store(rows + other_n[None, :], right, mask=(offset_m[:, None] < end) & (other_n[None, :] < N))
    else:
        offset_n = start_n + tl.arange(0, BN)
        tl.store(rows + offset_n[None, :], result, mask=(offset_m[:, None] < end) & (offset_n[None, :] < N))


@triton.jit
def selected(tile, inside):
    """The elements of an FP8 tile that are inside, and zeros."""
    kept = tl.where(inside, tile.to(tl.uint8, bitcast=True), 0)
    return kept.to(tl.uint8).to(tile.dtype, bitcast=True)


def places_of(groups: int) -> int:
    """The least power of two above `groups`: a place for each, and one for what is left."""
    return 1 << groups.bit_length()


def strides_of_rows(product: ScaledProduct) -> dict[str, int]:
    """The strides of the output, the scales and the bias, by the names of the kernels' arguments."""
    out, bias, a_scale, b_scale = product.out, product.bias, product.a.scale, product.b.scale
    masked = product.counts is not None
    return {
        "out_e": out.stride(0) if masked else 0, "out_m": out.stride(-2),
        "as_e": a_scale.stride(0) if masked else 0, "as_m": a_scale.stride(-2), "as_k": a_scale.stride(-1),
        "bs_e": b_scale.stride(0), "bs_k": b_scale.stride(1), "bs_n": b_scale.stride(2),
        "bias_e": 0 if bias is None else bias.stride(0),
    }  # fmt: skip
