"""The scaled product by TMA, on Hopper and Blackwell: persistent programs, promotion to float32 after every k-block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from fp8fn.ops.cuda.operands import map_fault
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import BY_TMA, OCP, Target
from fp8fn.ops.triton.boxes import boxes, load_box, store_box
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scale import storage
from fp8fn.ops.triton.scaled_mm import check_blocks
from fp8fn.ops.triton.tile_order import grouped_tile, scaled, tile_scales
from fp8fn.ops.triton.views import batch_stride, batched, ceil_div, is_wide

# Depth of a tile: 128 bytes, the widest swizzle of TMA and the extent of a scale along K.
_BK: Final = 128
# Fewer rows leave a 64-row instruction of the tensor core mostly empty: the pointer kernel has tiles of 16.
_LEAST_ROWS: Final = 65


@dataclass(frozen=True)
class TmaConfig:
    """Tile and compiler options of `scaled_mm_tma`.

    `OCCUPANCY` programs share a multiprocessor, so that one promotes while another multiplies. `SPLIT` stores the tile
    as two halves, which needs half the shared memory for the output. `FLATTEN` fuses the loops over tiles and over K.
    `AHEAD` loads the scales of the next k-block while this one's product runs. `PROMOTE = False` leaves scales that
    hold for all of K to the accumulator of the tensor core, which keeps about 14 bits.
    """

    BM: int = 128
    BN: int = 128
    num_warps: int = 8
    num_stages: int = 4
    GROUP: int = 8
    OCCUPANCY: int = 1
    SPLIT: bool = False
    FLATTEN: bool = False
    AHEAD: bool = False
    PROMOTE: bool = True


# Two small programs a multiprocessor, so that one promotes under the other's products, or one program whose fused loops
# load the next tile under its epilogue. H200, warm, TFLOP/s of HIDING and DEFAULT at (M, N, K): forward
# (8192, 28672, 4096) 1003 and 922, (8192, 8192, 28672) 818 and 786, (4096, 4096, 4096) 813 and 892; wgrad, where two
# vectors of scales make promotion twice as long, (28672, 4096, 8192) 741 and 650.
DEFAULT: Final = TmaConfig(FLATTEN=True, GROUP=16)
HIDING: Final = TmaConfig(BM=64, num_warps=4, OCCUPANCY=2)
_MANY_TILES: Final = 4096
# Blackwell's were never timed. On sm100 `tcgen05.mma` has its rate from 128 rows on. Fused loops spill 2 to 418
# registers where b has a vector of scales for each K tile. With vectors on both sides 128 columns with both masks
# spill 6.
VECTORS: Final = TmaConfig()
_MASKED_VECTORS: Final = TmaConfig(BN=64)
_DEEP: Final = TmaConfig(BN=64, num_stages=5)
# On sm120 a multiprocessor has 100 KiB of shared memory: room for two such programs.
SMALL: Final = TmaConfig(BM=64, num_warps=4, num_stages=2, OCCUPANCY=2)
# Architectures whose FP8 instruction reads operands from shared memory along either axis.
_EITHER_AXIS: Final = (100, 103)


@triton.jit
def scaled_mm_tma(
    a, b, out, a_scale, b_scale, bias, B, M, N, K, out_b, out_m, as_b, as_m, as_k, bs_b, bs_k, bs_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    A_M: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr, B_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, OUT_TMA: tl.constexpr, WIDE: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr, AHEAD: tl.constexpr, PROMOTE: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    """Tiles `program, program + PROGRAMS, ...`; `a (M, K)`, `b (N, K)` and, with OUT_TMA, `out` are descriptors.

    With `A_TURNED` a is `(K, M)`, and with `B_TURNED` b is `(K, N)`. `BATCHED`: `out` is `B` matrices, and so is each
    operand whose boxes have three axes.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    blocks_k = tl.cdiv(K, BK)
    A_VECTOR: tl.constexpr = A_M != -1 and A_M % BM != 0
    B_VECTOR: tl.constexpr = B_N != -1 and B_N % BN != 0
    A_PER_K: tl.constexpr = A_K != -1
    B_PER_K: tl.constexpr = B_K != -1
    for tile in tl.range(tl.program_id(0), B * tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        matrix = 0
        place = tile
        a_scales = a_scale
        b_scales = b_scale
        if BATCHED:
            matrix = tile // (tiles_m * tiles_n)
            place = tile % (tiles_m * tiles_n)
            a_scales += matrix.to(tl.int64) * as_b
            b_scales += matrix.to(tl.int64) * bs_b
        tile_m, tile_n = grouped_tile(place, tiles_m, tiles_n, GROUP)
        start_m = tile_m * BM
        start_n = tile_n * BN
        offset_m = start_m + tl.arange(0, BM)
        offset_n = start_n + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        if AHEAD and A_PER_K:
            a_next = tile_scales(a_scales, start_m, offset_m, M, as_m, A_M, BM, EVEN_M)
        if AHEAD and B_PER_K:
            b_next = tile_scales(b_scales, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
        for k in range(blocks_k):
            if A_TURNED:
                a_tile = load_box(a, matrix, k * BK, start_m).T
            else:
                a_tile = load_box(a, matrix, start_m, k * BK)
            if B_TURNED:
                b_tile = load_box(b, matrix, k * BK, start_n)
            else:
                b_tile = load_box(b, matrix, start_n, k * BK).T
            a_value = 1.0
            b_value = 1.0
            if A_PER_K:
                if AHEAD:
                    a_value = a_next
                    following = tl.minimum(k + 1, blocks_k - 1)
                    a_next = tile_scales(a_scales + following * as_k, start_m, offset_m, M, as_m, A_M, BM, EVEN_M)
                else:
                    a_value = tile_scales(a_scales + k * as_k, start_m, offset_m, M, as_m, A_M, BM, EVEN_M)
            if B_PER_K:
                if AHEAD:
                    b_value = b_next
                    following = tl.minimum(k + 1, blocks_k - 1)
                    b_next = tile_scales(b_scales + following * bs_k, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
                else:
                    b_value = tile_scales(b_scales + k * bs_k, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
            if A_PER_K or B_PER_K:
                product = tl.dot(a_tile, b_tile)
                acc += scaled(product, a_value, b_value, A_VECTOR and A_PER_K, B_VECTOR and B_PER_K)
            elif PROMOTE:
                acc += tl.dot(a_tile, b_tile)
            else:
                acc = tl.dot(a_tile, b_tile, acc)

        if not A_PER_K:
            a_whole = tile_scales(a_scales, start_m, offset_m, M, as_m, A_M, BM, EVEN_M)
            acc = scaled(acc, a_whole, 1.0, A_VECTOR, False)
        if not B_PER_K:
            b_whole = tile_scales(b_scales, start_n, offset_n, N, bs_n, B_N, BN, EVEN_N)
            acc = scaled(acc, 1.0, b_whole, False, B_VECTOR)
        if bias is not None:
            acc += tl.load(bias + offset_n, mask=offset_n < N, other=0.0).to(tl.float32)[None, :]
        if OUT_TMA:
            if SPLIT:
                left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
                store_box(out, left, matrix, start_m, start_n)
                store_box(out, right, matrix, start_m, start_n + BN // 2)
            else:
                store_box(out, acc, matrix, start_m, start_n)
        else:
            rows = offset_m[:, None]
            if WIDE:
                rows = rows.to(tl.int64)
            inside = (offset_m[:, None] < M) & (offset_n[None, :] < N)
            matrix_out = out
            if BATCHED:
                matrix_out += tl.cast(matrix, tl.int64) * out_b
            tl.store(matrix_out + rows * out_m + offset_n[None, :], acc.to(out.dtype.element_ty), mask=inside)


def accepts(product: ScaledProduct) -> str | None:
    """None where `plan_scaled_mm_tma` takes these operands, else the reason why not."""
    (a, _, a_block), (b, _, b_block), target = product.a, product.b, product.target
    if target.backend != "cuda" or target.arch not in BY_TMA:
        return f"{target.name} is none of {', '.join(f'sm{arch}' for arch in BY_TMA)}"
    if product.batch > 1 and target.arch == 90:
        return "a batch on sm90 would spill 8 registers in partial tiles"  # 4095 by 4093, rowwise
    if a.dtype not in OCP or b.dtype not in OCP:
        return f"{a.dtype} and {b.dtype} are not both types of the tensor core"
    if not {a_block[1], b_block[0]} <= {_BK, WHOLE}:
        return f"blocks {a_block} and {b_block}: a scale must hold for {_BK} or all elements along K"
    if product.m < _LEAST_ROWS:
        return f"M is {product.m}, below {_LEAST_ROWS}"
    if product.k == 0:
        return "K is 0"
    for name, operand in (("a", a), ("b.mT", b.mT)):
        turned = target.arch in _EITHER_AXIS and map_fault(operand.mT) is None
        if not turned and (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    return None


def plan_scaled_mm_tma(product: ScaledProduct, config: TmaConfig | None = None) -> tuple[TritonLaunch]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`; see `accepts`.

    A 2-D operand serves a whole batch. K is contiguous in both, except on sm100, where either axis may be.
    """
    (a, a_scale, a_block), (b, b_scale, b_block), out = product.a, product.b, product.out
    bias, target = product.bias, product.target
    check_blocks(a_block, b_block)
    batch, m, n, k = product.batch, product.m, product.n, product.k
    config = config or choose_config(m, n, a_block, b_block, target)
    a_turned, b_turned = map_fault(a) is not None, map_fault(b.mT) is not None
    a_scale, b_scale = batched(storage(a_scale)), batched(storage(b_scale))
    through_tma = map_fault(out) is None
    width = config.BN // 2 if config.SPLIT else config.BN
    tiles = batch * ceil_div(m, config.BM) * ceil_div(n, config.BN)
    programs = min(tiles, config.OCCUPANCY * target.cores)
    launch = TritonLaunch(
        kernel=scaled_mm_tma,
        grid=(programs, 1, 1),
        args={
            "a": boxes(a.mT, _BK, config.BM) if a_turned else boxes(a, config.BM, _BK),
            "b": boxes(b, _BK, config.BN) if b_turned else boxes(b.mT, config.BN, _BK),
            "out": boxes(out, config.BM, width) if through_tma else out,
            "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "B": batch, "M": m, "N": n, "K": k,
            "out_b": out.stride(0) if batch > 1 else 0, "out_m": out.stride(-2),
            "as_b": batch_stride(a_scale, batch), "as_m": a_scale.stride(1), "as_k": a_scale.stride(2),
            "bs_b": batch_stride(b_scale, batch), "bs_k": b_scale.stride(1), "bs_n": b_scale.stride(2),
        },
        constexprs={
            "BM": config.BM, "BN": config.BN, "BK": _BK, "GROUP": config.GROUP, "PROGRAMS": programs,
            "A_M": a_block[0], "A_K": a_block[1], "B_K": b_block[0], "B_N": b_block[1],
            "EVEN_M": m % config.BM == 0, "EVEN_N": n % config.BN == 0,
            "OUT_TMA": through_tma, "WIDE": is_wide(out[0] if out.dim() == 3 else out),
            "SPLIT": config.SPLIT, "FLATTEN": config.FLATTEN, "AHEAD": config.AHEAD, "PROMOTE": config.PROMOTE,
            "A_TURNED": a_turned, "B_TURNED": b_turned, "BATCHED": batch > 1,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        target=target,
    )  # fmt: skip
    return (launch,)


def choose_config(m: int, n: int, a_block: Block, b_block: Block, target: Target) -> TmaConfig:
    """The configuration for a shape and its scales."""
    if target.arch == 120:
        return SMALL
    if target.arch in _EITHER_AXIS:
        if not _is_vector(b_block[1], b_block[0]):
            return DEFAULT
        masked = m % VECTORS.BM and n % VECTORS.BN
        return _MASKED_VECTORS if masked and _is_vector(*a_block) else VECTORS
    return HIDING if a_block[0] == b_block[1] == 1 or ceil_div(m, 128) * ceil_div(n, 128) >= _MANY_TILES else DEFAULT


def configs(product: ScaledProduct) -> tuple[TmaConfig, ...]:
    """The default configuration of a product, then the other candidates."""
    a_block, b_block, target = product.a.block, product.b.block, product.target
    default = choose_config(product.m, product.n, a_block, b_block, target)
    vectors = _is_vector(b_block[1], b_block[0])
    found = dict.fromkeys((default, *candidates(target, vectors)))
    if product.batch > 1 and vectors and target.arch in _EITHER_AXIS:
        del found[_DEEP]  # spills 2 registers
    return tuple(found)


def _is_vector(lines: int, along_k: int) -> bool:
    """Whether an operand has a vector of scales for each K tile; its block has `lines` by `along_k` elements."""
    return lines == 1 and along_k != WHOLE


def candidates(target: Target, vectors: bool) -> tuple[TmaConfig, ...]:
    """Configurations worth timing, where b has `vectors` of scales for each K tile or not; none of them spills."""
    if target.arch == 120:
        return (
            SMALL,
            TmaConfig(BM=64, num_warps=4, num_stages=3),
            TmaConfig(num_stages=2),
            TmaConfig(BN=64, num_stages=3),
            TmaConfig(BN=64, num_stages=2),
        )
    if target.arch in _EITHER_AXIS:
        fused = () if vectors else (DEFAULT, TmaConfig(num_stages=3, SPLIT=True, FLATTEN=True))
        return (
            *fused,
            VECTORS,
            TmaConfig(GROUP=16),
            TmaConfig(num_stages=3),
            TmaConfig(num_stages=5, SPLIT=True),
            TmaConfig(BN=64, OCCUPANCY=2, num_stages=3),
            _DEEP,
        )
    return (
        DEFAULT,
        HIDING,
        TmaConfig(),
        TmaConfig(num_stages=3, FLATTEN=True),
        TmaConfig(num_stages=5, SPLIT=True),
        TmaConfig(AHEAD=True),
        TmaConfig(BM=64, num_warps=4, num_stages=4, OCCUPANCY=2, GROUP=16),
        TmaConfig(BM=64, num_warps=4, num_stages=4, OCCUPANCY=2, SPLIT=True, AHEAD=True),
        TmaConfig(BM=64, num_warps=4, num_stages=2, OCCUPANCY=3),
        TmaConfig(BN=64, num_warps=4, num_stages=4, OCCUPANCY=2),
    )
