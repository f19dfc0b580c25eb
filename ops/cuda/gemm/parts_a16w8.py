"""9 rows or more by an FP8 weight on Hopper, in two launches: rows split into FP8 parts, and their products.

Batch-invariant products by a large weight are computed here whatever the number of their rows. So are groups of rows by
experts, of 16 rows or more in the mean, and of fewer where K is large and the weights are few.

A bfloat16 has 8 significant bits and an e4m3 value 4: two of these add up to it (`split_rows.cu`). The tensor core
multiplies both by the weight as it lies in memory (`scaled_mm.cu`), whereas `mm_a16w8.cu` and `splitk_a16w8.cu` widen
the weight to 16 bits. In FP8 the tensor core computes two products in the time of one of 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import fsum, log
from typing import Final

import torch

from fp8fn.ops.cuda.gemm import mm_a16w8, scaled_mm
from fp8fn.ops.cuda.gemm.scaled_mm import BK, ScaledMmConfig
from fp8fn.ops.cuda.limits import LARGEST, MOST_BLOCKS
from fp8fn.ops.cuda.operands import (
    ELEMENT,
    PARTS,
    SCALES,
    SIXTEEN_BITS,
    beside_fault,
    is_k_contiguous,
    map_fault,
    strides_of_scales,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import round_up
from fp8fn.ops.operands import BESIDE, Quantized, ScaledProduct, WeightProduct
from fp8fn.ops.targets import OCP, hopper_fault
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

_OCTET: Final = 8  # columns of a lane of `split_rows.cu`
_THREADS: Final = 128
_BOX_ROWS: Final = 8  # in memory, of which TMA loads a box has a multiple
# Rows up to which this kernel was faster than the others on an H200, and up to which it was where estimates say so.
_MOST_ROWS: Final = {torch.bfloat16: 256, torch.float16: 64}
_MOST_ESTIMATED: Final = {torch.bfloat16: 768, torch.float16: 64}
# Pairs of rows and elements: from so many rows on, it was faster by weights of so many elements or more.
_FEWEST: Final = ((9, 40_000_000), (17, 3_500_000))
_INVARIANT_SIZE: Final = _FEWEST[-1][1]
# Tiles, each with two times in microseconds, of two parts on an H200: of a K tile, and of all else that a tile takes.
TILES: Final = {
    ScaledMmConfig(MATH=1, BN=32): (0.159, 1.9),
    ScaledMmConfig(MATH=1, BN=64): (0.178, 2.1),
    ScaledMmConfig(MATH=1, BN=96): (0.249, 2.3),
    ScaledMmConfig(MATH=1, BN=128): (0.316, 2.1),
    ScaledMmConfig(MATH=1, BN=192, DEPTH=1): (0.643, 1.9),
    ScaledMmConfig(MATH=2, BN=64): (0.400, 1.3),
    ScaledMmConfig(MATH=2, BN=96): (0.537, 2.0),
    ScaledMmConfig(MATH=2, BN=128): (0.665, 1.4),
    ScaledMmConfig(MATH=2, BN=192, DEPTH=1): (0.998, 1.3),
    ScaledMmConfig(MATH=2, BN=256, SLICES_N=2, DEPTH=1): (1.330, 1.9),
    ScaledMmConfig(MATH=2, SLICES_M=2, BN=128, DEPTH=1): (1.330, 2.5),
}
# Groups of rows: the tiles; the rows of a group from which on Triton's kernel took longer; and the K from which on it
# did for fewer rows, by weights that together have no more columns.
_TILE_OF_GROUPS: Final = ScaledMmConfig(MATH=1, BN=128)
_TILE_OF_LARGE_GROUPS: Final = ScaledMmConfig(MATH=2, BN=256, SLICES_N=2, DEPTH=1)
_MOST_OF_SMALL_GROUPS: Final = 128
_FEWEST_OF_GROUPS: Final = 16
_LEAST_K_OF_FEW: Final = 2560
_MOST_COLUMNS_OF_FEW: Final = 1 << 17
_EXCHANGE: Final = {1: 0.0, 2: 1.2, 4: 2.0}  # microseconds, for 64 columns, by the blocks that share K
_CLUSTERED: Final = 0.75  # the part of the multiprocessors that find room in clusters of four blocks
_LEAST_K: Final = 1024
_MOST_SINGLE: Final = 256  # rows up to which tiles of one warpgroup were timed
_MOST_IN_TWO_STAGES: Final = 160 << 10  # bytes
_RATE: Final = 4e6  # elements of a weight in a microsecond, at most
_SPLIT_RATE: Final = 0.83e6  # elements of many rows that are split in a microsecond
_START: Final = 3.6  # microseconds
_INVARIANT_ROWS: Final = tuple(1 << i for i in range(9))  # for which one division of K is chosen


def accepts(product: WeightProduct) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    product = product.as_matrix()
    x, (w, _, w_block), bias = product.x, product.w, product.bias
    if (reason := hopper_fault(product.target)) is not None:
        return reason
    if x.dtype not in SIXTEEN_BITS:
        return f"x has dtype {x.dtype}, not 16 bits"
    if x.dim() == 3 or (w.dim() == 3 and product.offsets is None):
        return "it is a batch"
    if product.k % _OCTET or product.k > MOST_BLOCKS * _THREADS * _OCTET:
        return f"K={product.k} is no multiple of {_OCTET}, or past the blocks of a grid"
    if max(x.stride(-2), product.m + 256) > LARGEST:
        return f"x has {product.m} rows, {x.stride(-2)} apart"
    if not is_k_contiguous(w):
        return "columns of w are not contiguous"
    for name, operand in (("x", x), ("w.mT", w.mT)):
        if (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    if w.dtype not in OCP or w_block not in SCALES:
        return f"w has dtype {w.dtype} and blocks of {w_block}"
    if bias is not None and bias.dim() != w.dim() - 1:
        return f"bias has shape {tuple(bias.shape)}"
    if bias is not None and bias.stride(-1) != 1 and bias.shape[-1] != 1:
        return f"bias has strides {bias.stride()}"
    return scaled_mm.accepts(_of_parts(product, product.m, product.m, device="meta"))


def accepts_beside(product: WeightProduct) -> str | None:
    """None for products by several weights that `plan` takes in one launch after the split, else the reason why not."""
    if (reason := beside_fault(product, accepts)) is not None:
        return reason
    strides = {weight.scale.stride() for weight in (product.w, *(each.w for each in product.beside))}
    if SCALES[product.w.block] == "BLOCK" and len(strides) > 1:
        return strides_of_scales(product)
    return accepts(product)


def untuned(product: WeightProduct) -> str | None:
    """None where it was the fastest one on an H200, and where sums of the FP8 unit have as many bits as the output."""
    if product.out.dtype == torch.float32:
        return "out has dtype torch.float32, of more bits than the FP8 unit's sums"
    problem = _problem(product)
    if problem.m > (most := _MOST_ESTIMATED[problem.x_dtype]):
        return f"M={problem.m} rows of {problem.x_dtype} are more than {most}"
    if problem.m > _MOST_ROWS[problem.x_dtype] and mm_a16w8.accepts(product) is None:
        own = _microseconds(problem, choose_config(problem)) + problem.m * problem.k / _SPLIT_RATE
        others = fsum(mm_a16w8.estimate(problem._replace(n=n)) for n in _widths(product))
        if own > others:
            return f"the split rows take {own:.0f} µs, and tiles in 16 bits {others:.0f} µs, estimated"
    fewest = next((size for rows, size in reversed(_FEWEST) if problem.m >= rows), None)
    if fewest is None:
        return f"M={problem.m} is few rows"
    if problem.k < _LEAST_K:
        return f"K={problem.k} is short"
    if problem.n * problem.k < fewest:
        return f"a weight of {problem.n * problem.k} elements is small for M={problem.m}"
    return None


def accepts_invariant(product: WeightProduct) -> str | None:
    """None where `plan` takes the product, and would take any number of its rows; else the reason why not.

    Where rows lie as `accepts` asks, the weight and the bias decide alone.
    """
    product = product.as_matrix()
    x, out = product.x.dtype, product.out.dtype
    if x != torch.bfloat16 or out == torch.float32:
        return f"x has dtype {x} and out {out}, not bfloat16 and 16 bits"
    if product.k < _LEAST_K or product.n * product.k < _INVARIANT_SIZE:
        return f"a weight of {product.k} x {product.n} elements is small"
    return accepts(product)


def configure(product: WeightProduct) -> ScaledMmConfig:
    """The default configuration of a product; see `choose_config`."""
    return choose_config(_problem(product))


def untuned_groups(product: WeightProduct) -> str | None:
    """None where groups of rows were multiplied faster than by Triton's kernel on an H200, else the reason why not."""
    if product.out.dtype == torch.float32 or product.x.dtype != torch.bfloat16:
        return f"x has dtype {product.x.dtype} and out {product.out.dtype}, and bfloat16 alone was timed"
    groups, rows = _groups(product)
    if rows < _FEWEST_OF_GROUPS and (product.k < _LEAST_K_OF_FEW or groups * product.n > _MOST_COLUMNS_OF_FEW):
        return f"{rows} rows a group are few for {groups} weights of {product.k} x {product.n}"
    return None


def configure_groups(product: WeightProduct) -> ScaledMmConfig:
    """The default tile for the rows of a group in the mean, as were timed on an H200."""
    _, rows = _groups(product)
    return _TILE_OF_GROUPS if rows <= _MOST_OF_SMALL_GROUPS else _TILE_OF_LARGE_GROUPS


def _groups(product: WeightProduct) -> tuple[int, int]:
    """The number of groups that may have rows, and the rows of one of them in the mean: what the host can tell."""
    groups = min(product.group_ends.shape[0], product.m)
    return groups, -(-product.m // groups)


def configure_invariant(product: WeightProduct) -> ScaledMmConfig:
    """The fastest tile, as far as it is known, of those that divide K as the weight's shape says.

    In all of them a row's sum is the same: each K tile is promoted, and the parts of K are added in order.
    """
    problem = _problem(product)
    return _fastest(problem, _one_split(problem._replace(m=1)))


@lru_cache(maxsize=4096)
def _one_split(problem: WeightProblem) -> int:
    """The blocks that share K for every number of rows: those of the least time, in geometric mean over 1 to 256."""

    def time(split: int) -> float:
        problems = [problem._replace(m=m) for m in _INVARIANT_ROWS]
        return fsum(log(_microseconds(each, _fastest(each, split))) for each in problems)

    return min((split for split in _EXCHANGE if split <= problem.cores and _alike(problem, split)), key=time)


def _fastest(problem: WeightProblem, split: int) -> ScaledMmConfig:
    return min(_alike(problem, split), key=lambda config: _microseconds(problem, config))


def _problem(product: WeightProduct) -> WeightProblem:
    """The problem of one weight that has the columns of `w` and of those beside it."""
    return weight_problem(product)._replace(n=sum(_widths(product)))


def _widths(product: WeightProduct) -> list[int]:
    """The columns of each weight."""
    return [product.n, *(each.out.shape[-1] for each in product.beside)]


def choose_config(problem: WeightProblem) -> ScaledMmConfig:
    """The tile, and the number of blocks that share its K, whose waves take the least time, as far as it is known."""
    return min(_configs(problem), key=lambda config: _microseconds(problem, config))


def candidates(problem: WeightProblem) -> tuple[ScaledMmConfig, ...]:
    """The configurations to measure a problem in, the default one first; from 9 rows on, of no batch."""
    fewest = min(rows for rows, _ in _FEWEST)
    if problem.m < fewest or problem.batch > 1 or not problem.k_lines or problem.x_dtype not in PARTS:
        return ()
    return tuple(sorted(_configs(problem), key=lambda config: _microseconds(problem, config))[:8])


def _configs(problem: WeightProblem) -> list[ScaledMmConfig]:
    """Tiles that are more than half full; K is shared where the tiles of one wave are too few."""
    return [
        config
        for split in _EXCHANGE
        for config in _alike(problem, split)
        if split == 1 or _tiles(problem, config) * split <= problem.cores
    ]


def _alike(problem: WeightProblem, split: int) -> list[ScaledMmConfig]:
    """Tiles that are more than half full, whose K so many blocks share."""
    found = []
    for tile in TILES:
        half_empty = tile.BM > 64 and 2 * problem.m <= tile.BM
        if half_empty or (tile.MATH == 1 and problem.m > _MOST_SINGLE) or not fits(tile, PARTS[problem.x_dtype]):
            continue
        if split == 1 or (shares_k(tile) and -(-problem.k // BK) >= 2 * split):
            found.append(replace(tile, SPLIT=split))
    return found


def fits(tile: ScaledMmConfig, parts: int) -> bool:
    """Whether two stages and the output find room in shared memory."""
    return 2 * (parts * tile.BM + tile.BN) * BK <= _MOST_IN_TWO_STAGES


def shares_k(tile: ScaledMmConfig) -> bool:
    """Whether blocks of a cluster may share its K, and were timed so."""
    return tile.BN <= 128 and tile.SLICES_M == 1


def _tiles(problem: WeightProblem, tile: ScaledMmConfig) -> int:
    return -(-problem.m // tile.BM) * -(-problem.n // tile.BN)


def _microseconds(problem: WeightProblem, config: ScaledMmConfig) -> float:
    """An estimate: the waves of blocks, or the weight's way from memory, whichever takes longer."""
    of_k_tile, beside = TILES[replace(config, SPLIT=1)]
    places = max(int(problem.cores * (_CLUSTERED if config.SPLIT > 2 else 1.0)), 1)
    waves = -(-_tiles(problem, config) * config.SPLIT // places)
    steps = -(-problem.k // (BK * config.SPLIT))
    multiplied = waves * (steps * of_k_tile + beside + _EXCHANGE[config.SPLIT] * config.BN / 64)
    # Among configurations that all wait for the weight, the one that multiplies fastest costs the least.
    return max(multiplied, problem.n * problem.k / _RATE + _START) + 0.05 * multiplied


def _of_parts(product: WeightProduct, rows: int, scales: int, device: torch.device | str) -> ScaledProduct:
    """The product of the parts, allocated here with so many rows and scales of rows, by the weight."""
    x, k = product.x, product.k
    count = PARTS[x.dtype]
    data = torch.empty(count, rows, round_up(k, 16), dtype=torch.float8_e4m3fn, device=device)[..., :k]
    scale = torch.empty(-(-k // BK), round_up(scales, 4), dtype=torch.float32, device=device).mT
    return ScaledProduct(
        a=Quantized(data, scale, (1, BK)), b=product.w, bias=product.bias, out=product.out, target=product.target,
        offsets=product.offsets, parts=count, beside=product.beside,
    )  # fmt: skip


def plan(product: WeightProduct, config: ScaledMmConfig) -> tuple[CudaLaunch, CudaLaunch]:
    """The launches of a product that `accepts` accepts, of which nothing is empty."""
    product = product.as_matrix()
    # TMA takes long to fill rows and scales past the end with zeros, so that those of the last tile are allocated, in
    # boxes that have no fewer than 8 rows. Rows past M stay unwritten, and products with them are not stored.
    rows = round_up(product.m, _BOX_ROWS if product.m <= config.BM else config.BM)
    if product.offsets is not None:  # a group's last tile begins anywhere
        rows = product.m + config.BM
    x, scaled = product.x, _of_parts(product, rows, round_up(rows, config.BM), device=product.x.device)
    data, scale, _ = scaled.a
    macros: dict[str, int | str] = {"INPUT": ELEMENT[x.dtype], "PARTS": scaled.parts, "THREADS": _THREADS}
    split = CudaLaunch(
        kernel=CudaKernel("split_rows.cu", "split_rows", tuple(macros.items())),
        grid=(product.m, -(-product.k // (_THREADS * _OCTET)), 1),
        threads=_THREADS,
        shared=0,
        args={
            "x": x, "data": data, "scale": scale, "K": product.k, "x_m": x.stride(-2),
            "rows": rows, "data_m": data.stride(-2), "scale_k": scale.stride(-1),
        },
        target=product.target,
        options=macros,
        overlaps=True,
        late=True,
        prepares=True,
        scratch=("data", "scale"),
    )  # fmt: skip
    (multiply,) = scaled_mm.plan(scaled, config)
    binds = {"a": "data", "a_scale": "scale", "b": "w", "b_scale": "w_scale"}
    for name in BESIDE:
        binds |= {f"b_{name}": f"w_{name}", f"b_scale_{name}": f"w_{name}_scale"}
    return split, replace(multiply, binds={**multiply.binds, **binds})
