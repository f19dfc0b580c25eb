"""The tiles of Hopper's product, and how long a configuration takes by a count of k-blocks and bytes: the ranking.

A block of threads walks over its tiles one after the other, so that a product takes as long as the block with the
most tiles: `waves = ceil(tiles / multiprocessors)`. A tile takes its k-blocks, `block_ns` each, and an epilogue that
nothing hides. A wave's bytes come at `_HBM`. The two overlap: their time is the root of the sum of their squares. A
wave that leaves multiprocessors idle is faster for the others, down to `_ALONE`: they share caches and power.

Constants were fitted by least squares of the logarithms to the medians in `tests/ops/test_tuning_model.py`, taken on
an H200, warm and in turn: 9 % rms over 8 µs to 4 ms. The configuration ranked first is within 2 % of the fastest in
the mean, within 7 % for each shape; small ones repeat to 5 to 10 %. Power is not modelled: a clock that sinks does so
for every candidate, nearly by the same factor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil, fsum, hypot, log
from typing import Final

from fp8fn.ops.cuda.gemm.scaled_mm import BK, ScaledMmConfig
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import Chip, chip_of
from fp8fn.ops.tuning.nearest import nearest
from fp8fn.ops.tuning.problem import Problem, problem_of

X: Final = ScaledMmConfig(MATH=3, DEPTH=1)
W: Final = ScaledMmConfig(BN=256, SLICES_N=2, DEPTH=1)
TALL: Final = ScaledMmConfig(SLICES_M=2, DEPTH=1)
SMALLEST: Final = ScaledMmConfig(MATH=1, BN=64)
# The tiles by the kinds of the scales, with the nanoseconds that a k-block of 128 takes where each multiprocessor works
# on one. None of the tiles spills. The L2's rate is in the times: 64x64 asks for 10 TB/s. At 1.7 GHz the tensor core
# alone needs 452 for 192x128 and 602 for 128x256. Those of 128x256 and 256x128 are 192x128's by their ratio on an H100,
# since they have early starts.
_BLOCK_NS: Final[dict[ScaledMmConfig, float]] = {
    X: 612,
    W: 835,
    TALL: 820,
    ScaledMmConfig(BN=192, DEPTH=1): 645,
    ScaledMmConfig(): 452,
    ScaledMmConfig(BN=64): 242,
    ScaledMmConfig(MATH=1, BN=256, SLICES_N=2, DEPTH=1): 577,
    ScaledMmConfig(MATH=1, BN=192, DEPTH=1): 470,
    ScaledMmConfig(MATH=1): 281,
    SMALLEST: 209,
}
# A scale for each column of b is loaded and multiplied besides: 238 ns at 192x128 and 160 at 128x128 were measured, so
# about 9.6 for 1000 elements of the tile. At 128x128 two temporaries take 1.1 times as long as one, which takes 630. On
# an H100 256x128 takes 8 % longer beside 192x128 than where squares of b have scales.
_COLUMN_SCALES_NS: Final = 9.6e-3
_VECTOR_NS: Final[dict[ScaledMmConfig, float]] = {
    tile: ns + _COLUMN_SCALES_NS * tile.BM * tile.BN
    for tile, ns in {**_BLOCK_NS, W: 860, TALL: 885, ScaledMmConfig(DEPTH=1): 470}.items()
    if tile != ScaledMmConfig()
}
# Products of groups where squares of b have scales: for rows 128x256 has 0.86 to 0.95 of 192x128's speed on an H100.
_GROUPED_NS: Final = {**_BLOCK_NS, W: 875}
# Without scales along K: less by what promoting every fourth block only saves. Not fitted: of seven small products that
# were timed, all but one rank as with these; 192x128's warpgroups take turns since. Two temporaries are one accumulated
# further and cost no registers: 192x128 and 128x192 spill 74 and 94 elsewhere, not here.
_UNSCALED_NS: Final[dict[ScaledMmConfig, float]] = {
    X: 612,
    ScaledMmConfig(MATH=3): 625,
    W: 870,
    ScaledMmConfig(BN=192): 610,
    ScaledMmConfig(): 430,
    ScaledMmConfig(BN=64): 300,
    ScaledMmConfig(MATH=1, BN=256, SLICES_N=2, DEPTH=1): 560,
    ScaledMmConfig(MATH=1, BN=192, DEPTH=1): 450,
    ScaledMmConfig(MATH=1): 305,
    SMALLEST: 250,
}
# Where all of K may stay in the tensor core's accumulator there is room for wider tiles. From 18 products on an H100.
_FAST_NS: Final[dict[ScaledMmConfig, float]] = {
    ScaledMmConfig(BN=256, DEPTH=0): 805,
    ScaledMmConfig(MATH=3, BN=192, DEPTH=0): 910,
    ScaledMmConfig(MATH=3, DEPTH=0): 595,
    ScaledMmConfig(BN=192, DEPTH=0): 620,
    ScaledMmConfig(DEPTH=0): 430,
    ScaledMmConfig(BN=64, DEPTH=0): 290,
    ScaledMmConfig(MATH=1, DEPTH=0): 310,
    ScaledMmConfig(MATH=1, BN=64, DEPTH=0): 215,
}
# With scales of blocks of a the 64 rows of a warpgroup lie in one block. With those of columns of b besides X spills 2
# registers.
_BLOCKS_NS: Final = {tile: ns for tile, ns in _BLOCK_NS.items() if tile.SLICES_M == 1}
_BLOCK_VECTOR_NS: Final = {tile: ns for tile, ns in _VECTOR_NS.items() if tile != X and tile.SLICES_M == 1}
_FEWEST_BLOCKS: Final = 4  # k-blocks in a share: with fewer the pipeline does not fill
# The share of the multiprocessors that clusters of a size occupy at once: each lies within one GPC, and those differ.
_RESIDENT_CLUSTERS: Final = {2: 1.0, 4: 0.9, 8: 0.9}
_LARGEST_GROUP: Final = 64  # rows of tiles; past 64 of 64 rows no L2 holds what they share
# Heights of bands that are tuned beside 8. The model does not tell them apart: for 86 of the 201 products that were
# timed in them on an H100 one of these was chosen, 2.4 % faster than the best in bands of 8 in the geometric mean.
_GROUPS: Final = (4, 5, 12)
_WAVES: Final = 2  # that a product has at least, for the height of its bands to matter
# Tiles of which two blocks side by side may share a. On an H100 that is 2 % faster where K is 4096 or more, and 5 %
# slower at 1536; the model does not tell these apart either.
_PAIRED: Final = (TALL,)
# Bands for groups of tokens: five of eight products on an H100 were 1.03 times as fast as in bands of 8, two 0.99 to 1.
_GROUP_OF_GROUPS: Final = {X: 3}
# The tile whose three warpgroups may do without turns. On an H200 (2026-11-28) that is 4 to 5 % faster at
# 8192,28672,4096, 8192,8192,28672 and 16384,8192,8192, 3 to 7 % at 22 products of groups, and up to 5 % at 24 batches;
# on an H100 turns were 3 to 9 % faster. 128x128 is 3 % slower without them.
_FREE: Final = (X,)
_FREE_GAIN: Final = 0.96  # its time without turns to that with them
_FREE_ON: Final = Chip("NVIDIA H200", 132)
_IN_TURNS_ON: Final = Chip("NVIDIA H100 80GB HBM3", 132)
_INVARIANT_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # that share one division of K
_LARGEST_SPLIT: Final = 128 * 128  # elements of a tile whose sums leave room for stages
_NAME: Final = re.compile(r"(\d+x\d+d[012](?:[ab]\d+|f)?)(?:g([1-9]\d*))?(?:s([1-9]\d*))?")


def tile_ns(problem: Problem) -> Mapping[ScaledMmConfig, float]:
    """The tiles for the problem's scales, K in one part, each with the nanoseconds of a k-block."""
    if not problem.is_scaled_along_k:
        return _FAST_NS if problem.fast else _UNSCALED_NS
    if problem.a_scale == "BLOCK":
        return _BLOCK_VECTOR_NS if problem.b_scale == "VECTOR" else _BLOCKS_NS
    return _VECTOR_NS if problem.b_scale == "VECTOR" else _BLOCK_NS


def tiles(problem: Problem) -> tuple[ScaledMmConfig, ...]:
    """The tiles for the problem's scales, K in one part."""
    return tuple(tile_ns(problem))


def pairs(problem: Problem) -> tuple[ScaledMmConfig, ...]:
    """The tiles of which two blocks may share a, in pairs."""
    return tuple(_paired(tile) for tile in tiles(problem) if tile in _PAIRED)


def candidates(problem: Problem, cores: int) -> tuple[ScaledMmConfig, ...]:
    """The tiles, and where one leaves half of the `cores` idle or more, K shared by clusters for it."""
    found = []
    for tile in tiles(problem):
        found.append(tile)
        for split in _splits(tile, tile_count(problem, tile), -(-problem.k // BK), cores):
            found.append(replace(tile, SPLIT=split))
    return tuple(found)


def runs(problem: Problem, config: ScaledMmConfig) -> bool:
    """Whether the kernel can multiply a problem in a configuration, however slowly."""
    tile = _tile(config)
    if tile not in tile_ns(problem) or config.GROUP > _LARGEST_GROUP:
        return False
    if config.CLUSTER > 1 and (tile not in _PAIRED or config != _paired(config)):
        return False
    if not config.TURNS and not takes_turns(problem, tile):
        return False
    return config.SPLIT == 1 or _can_share(config, -(-problem.k // BK), config.SPLIT)


def banded(problem: Problem, config: ScaledMmConfig, cores: int) -> list[ScaledMmConfig]:
    """Variants of a configuration: without turns and, in a product that is large enough, in other bands and in pairs.

    One for each number of bands: heights that give as many are one walk.
    """
    if config.SPLIT > 1:
        return []
    found, large = {_bands(problem, config): config}, tile_count(problem, config) >= _WAVES * cores
    for group in _GROUPS if large else ():
        if group * config.BM < problem.m:
            other = replace(config, GROUP=group)
            found.setdefault(_bands(problem, other), other)
    paired = [_paired(other) for other in found.values()] if large and config in _PAIRED else []
    free = [replace(other, TURNS=False) for other in found.values()] if takes_turns(problem, config) else []
    return [other for other in (*found.values(), *paired, *free) if other is not config]


def takes_turns(problem: Problem, tile: ScaledMmConfig) -> bool:
    """Whether a tile that may do without turns takes them at a problem by itself, as scaled_mm.cu says."""
    of_both = problem.a_scale == problem.b_scale == "VECTOR"
    return tile in _FREE and problem.is_scaled_along_k and not of_both


def _paired(config: ScaledMmConfig) -> ScaledMmConfig:
    return replace(config, CLUSTER=2, SHARE_B=False)


@cache
def _tile(config: ScaledMmConfig) -> ScaledMmConfig:
    """The tile of a configuration: alone, in the usual bands, K in one part, in turns."""
    usual = ScaledMmConfig()
    return replace(
        config, GROUP=usual.GROUP, SPLIT=usual.SPLIT, CLUSTER=usual.CLUSTER, SHARE_B=usual.SHARE_B, TURNS=usual.TURNS
    )


def _bands(problem: Problem, config: ScaledMmConfig) -> int:
    """Bands that the rows of tiles are walked in, as `tiles.cuh` counts them."""
    rows = ceil(problem.m / config.BM)
    return max(1, (rows + config.GROUP // 2) // config.GROUP)


def tile_count(problem: Problem, config: ScaledMmConfig) -> int:
    """Output tiles, of all batches; each counts once for every block of threads that shares its K.

    A cluster that shares a or b has a tile for each of its blocks, also where the last ones lie outside.
    """
    rows, columns = (config.CLUSTER, 1) if config.SHARE_B else (1, config.CLUSTER)
    clusters = -(-problem.m // (config.BM * rows)) * -(-problem.n // (config.BN * columns))
    return clusters * config.CLUSTER * problem.batch * config.SPLIT


def _splits(tile: ScaledMmConfig, count: int, blocks: int, cores: int) -> list[int]:
    """By how many blocks K of a tile may be shared, all of them resident at once; an owner has 16 rows or more.

    None where a tile is several products, which take turns at the registers: 1.2 to 1.4x the time of the fastest tile.
    """
    return [
        split
        for split, share in _RESIDENT_CLUSTERS.items()
        if count * split <= share * cores and _can_share(tile, blocks, split)
    ]


def _can_share(tile: ScaledMmConfig, blocks: int, split: int) -> bool:
    """Whether `split` blocks of threads can share the `blocks` of K of a tile, resident at once or not."""
    small = tile.BM * tile.BN <= _LARGEST_SPLIT and tile.SLICES_N == 1
    return small and blocks >= split * _FEWEST_BLOCKS and tile.BM % (16 * split) == 0


def config_name(config: ScaledMmConfig) -> str:
    """`"192x128d1"`: tile and temporaries, `a` or `b` the blocks that share it, `f` where warpgroups take no turns, `g`
    the group where it is not 8, `s` the blocks that share K.
    """
    group = "" if config.GROUP == ScaledMmConfig.GROUP else f"g{config.GROUP}"
    split = "" if config.SPLIT == 1 else f"s{config.SPLIT}"
    return f"{_tile_name(config)}{group}{split}"


def _tile_name(config: ScaledMmConfig) -> str:
    shared = "" if config.CLUSTER == 1 else f"{'b' if config.SHARE_B else 'a'}{config.CLUSTER}"
    return f"{config.BM}x{config.BN}d{config.DEPTH}{shared}{'' if config.TURNS else 'f'}"


_TILES: Final = {
    _tile_name(tile): tile
    for tile in (
        *_BLOCK_NS,
        *_VECTOR_NS,
        *_UNSCALED_NS,
        *_FAST_NS,
        *(_paired(tile) for tile in _PAIRED),
        *(replace(tile, TURNS=False) for tile in _FREE),
    )
}


@cache
def config_of(name: str) -> ScaledMmConfig:
    """The configuration of a name; ValueError where it is none of these tiles."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in _TILES:
        raise ValueError(f"{name!r} names no configuration")
    tile = _TILES[match[1]]
    return replace(tile, GROUP=int(match[2] or tile.GROUP), SPLIT=int(match[3] or 1))


_ALONE: Final = 0.65  # the time of a k-block where no other multiprocessor works, to that where all do
_LAUNCH_US: Final = 5.6  # with 3 µs of the events around it
_EPILOGUE_US: Final = 0.28 / (128 * 128)  # for each element of a tile
_COUNTED_ROWS: Final = 1024  # of an expert: with more the tiles of other groups serve
_GROUPED_EPILOGUE_US: Final = 0.3 / (128 * 128)
_HBM: Final = 4.2  # MB a µs
_L2_BYTES: Final = 30e6  # bytes of an operand that stay while the other streams through
_CLUSTER_US: Final = {2: 0.4, 4: 1.0, 8: 2.7}  # its start, and blocks that wait for each other
_SUMS: Final = 23e3  # bytes that a block gets from its cluster in a µs

# The (M, N, K) that the constants were fitted to, forward and of wgrad.
FITTED: Final = frozenset({
    (64, 1536, 24576), (64, 2112, 7168), (64, 7168, 2112), (64, 24576, 1536), (128, 512, 7168), (128, 2048, 7168),
    (128, 2112, 7168), (128, 4096, 7168), (128, 7168, 512), (128, 7168, 2048), (128, 7168, 2112), (128, 7168, 4096),
    (256, 4096, 7168), (256, 7168, 4096), (512, 512, 16384), (512, 16384, 512), (1024, 1024, 16384),
    (1024, 16384, 1024), (4096, 2112, 7168), (4096, 2176, 7168), (4096, 4096, 4096), (6144, 4096, 8192),
    (8192, 6144, 4096), (8192, 8192, 16384), (8192, 8192, 28672), (8192, 28672, 4096), (16384, 8192, 8192),
    (28672, 4096, 8192),
})  # fmt: skip


def block_ns(problem: Problem, config: ScaledMmConfig) -> float:
    """Nanoseconds of a k-block of one tile."""
    return tile_ns(problem)[_tile(config)]


def bytes_read(problem: Problem, config: ScaledMmConfig) -> float:
    """From HBM: a once, and b once for every `GROUP` rows of tiles, unless it stays in the L2."""
    a, b = problem.m * problem.k, problem.n * problem.k
    passes = ceil(ceil(problem.m / config.BM) / config.GROUP) if b > _L2_BYTES else 1
    return float(problem.batch * (a + b * passes))


def microseconds(problem: Problem, config: ScaledMmConfig, cores: int) -> float:
    """The time of a product on `cores` multiprocessors, behind an emptied L2, launch included."""
    count = tile_count(problem, config)
    blocks = ceil(ceil(problem.k / BK) / config.SPLIT)
    compute, epilogue = blocks * block_ns(problem, config) / 1e3, _EPILOGUE_US * config.BM * config.BN
    written = problem.batch * problem.m * problem.n
    moved = bytes_read(problem, config) + written * problem.out_type.itemsize
    waves, rest = divmod(count, cores)
    each = moved / count / (_HBM * 1e6)
    time = _LAUNCH_US + waves * hypot(compute + epilogue, each * cores)
    if rest:
        compute *= _ALONE + (1 - _ALONE) * rest / cores
        time += hypot(compute + epilogue, each * rest)
    if config.SPLIT > 1:
        time += _CLUSTER_US[config.SPLIT] + (config.SPLIT - 1) / config.SPLIT * config.BM * config.BN * 4 / _SUMS
    return time


@lru_cache(maxsize=4096)
def ranked(problem: Problem, cores: int) -> tuple[ScaledMmConfig, ...]:
    """The candidates, that of the least time first."""
    times = {config: microseconds(problem, config, cores) for config in candidates(problem, cores)}
    return tuple(sorted(times, key=lambda config: (times[config], config_name(config))))


def modelled(product: ScaledProduct) -> ScaledMmConfig:
    """The configuration of the least time by the model."""
    problem, cores = problem_of(product), product.target.cores
    free = _is_free(product)
    if product.counts is not None:
        config = counted_config(problem, product.mean_rows, cores)
    elif product.offsets is not None:
        config = grouped_config(problem, cores, jagged_m=product.b.data.dim() == 3)
    else:
        config = dense_config(problem, cores, free=free)
    return replace(config, TURNS=False) if free and takes_turns(problem, _tile(config)) else config


def dense_config(problem: Problem, cores: int, *, free: bool) -> ScaledMmConfig:
    """The candidate of the least time, on a chip where a tile is faster without turns if `free`."""
    there = ranked(problem, cores)
    gains = {tile: _FREE_GAIN for tile in _FREE if free and tile in there and takes_turns(problem, tile)}
    return min((there[0], *gains), key=lambda tile: gains.get(tile, 1) * microseconds(problem, tile, cores))


def in_one_order(product: ScaledProduct) -> ScaledMmConfig:
    """The configuration of the least time among those in which a row's sum has one order, for any number of rows."""
    problem, cores = problem_of(product), product.target.cores
    split = _one_split(replace(problem, m=1, batch=1), cores)
    config = _fastest(problem, cores, split)
    free = split == 1 and _is_free(product) and takes_turns(problem, config)
    return replace(config, TURNS=False) if free else config


def alike(problem: Problem, split: int) -> tuple[ScaledMmConfig, ...]:
    """The tiles that divide K into `split` parts and add the products of K tiles in one order.

    With scales along K each K tile is promoted by itself. Without them `PROMOTE` K tiles are where there are two
    temporaries, so that tiles with one are left out.
    """
    blocks = -(-problem.k // BK)
    return tuple(
        replace(tile, SPLIT=split)
        for tile in tiles(problem)
        if (problem.is_scaled_along_k or tile.DEPTH == 2) and (split == 1 or _can_share(tile, blocks, split))
    )


@lru_cache(maxsize=4096)
def _one_split(problem: Problem, cores: int) -> int:
    """The parts of K for every number of rows: those of the least time in the geometric mean over 1 to 256 rows."""

    def time(split: int) -> float:
        times = (_fastest_us(replace(problem, m=m), cores, split) for m in _INVARIANT_ROWS)
        return fsum(log(us - _LAUNCH_US) for us in times)

    return min((split for split in (1, *_RESIDENT_CLUSTERS) if alike(problem, split)), key=time)


def _fastest(problem: Problem, cores: int, split: int) -> ScaledMmConfig:
    found = alike(problem, split)
    return min(found, key=lambda config: (microseconds(problem, config, cores), config_name(config)))


def _fastest_us(problem: Problem, cores: int, split: int) -> float:
    return microseconds(problem, _fastest(problem, cores, split), cores)


def _is_free(product: ScaledProduct) -> bool:
    """Whether the nearest chip on which both were timed is faster without turns."""
    chip = product.chip or chip_of(product.a.data.device, product.target)
    found = nearest(chip, (_FREE_ON, _IN_TURNS_ON)) if chip is not None else None
    return found is not None and found[0] == _FREE_ON


def grouped_tiles(problem: Problem, *, jagged_m: bool) -> tuple[ScaledMmConfig, ...]:
    """The tiles for products of groups.

    128x192 with squares of b spills 2 registers where it sums over tokens. 256x128 has no early start there, and 0.87
    to 0.91 of 192x128's speed on an H100; and groups of rows begin anywhere, so that the scales of 4 rows more are
    loaded, and a load has 256 at most.
    """
    left_out = {TALL}
    if not jagged_m and problem.b_scale == "BLOCK":
        left_out.add(ScaledMmConfig(BN=192, DEPTH=1))
    return tuple(tile for tile in tiles(problem) if tile not in left_out)


@lru_cache(maxsize=4096)
def grouped_config(problem: Problem, cores: int, *, jagged_m: bool) -> ScaledMmConfig:
    """The tile of the least time, for `problem.batch` groups of m rows together, or of k where not `jagged_m`.

    The groups' sizes are on the device and not known: tokens are taken to be shared evenly, and each group to end in
    half a tile that is its own.
    """
    best = min(
        grouped_tiles(problem, jagged_m=jagged_m),
        key=lambda config: (grouped_microseconds(problem, config, cores, jagged_m=jagged_m), str(config)),
    )
    return replace(best, GROUP=_GROUP_OF_GROUPS.get(best, best.GROUP)) if jagged_m else best


def counted_config(problem: Problem, rows: int, cores: int) -> ScaledMmConfig:
    """The tile for some `rows` of each of the batch's matrices, which the device alone counts.

    Few rows are bound by reading b: the multiprocessor that reads the most columns of it decides. On an H200
    (2026-11-28), at DeepGEMM's shapes that take more than 0.1 ms, what is chosen for 20 and for 192 rows was within 1 %
    of the fastest tile, and for 1024 rows the fastest.
    """
    tiles = {(tile.BM, tile.BN): tile for tile in grouped_tiles(problem, jagged_m=True)}
    if rows <= 64:
        columns = {width: ceil(problem.batch * ceil(problem.n / width) / cores) * width for width in (128, 64)}
        return tiles[64, min(columns, key=columns.__getitem__)]
    if rows <= _COUNTED_ROWS:
        return tiles[128, 128]
    return grouped_config(replace(problem, m=problem.batch * rows), cores, jagged_m=True)


def grouped_microseconds(problem: Problem, config: ScaledMmConfig, cores: int, *, jagged_m: bool) -> float:
    """The time of the multiprocessor with the most tiles."""
    groups = problem.batch
    columns, rows, k = ceil(problem.n / config.BN), problem.m / config.BM, problem.k
    if jagged_m:
        count = ceil(max(rows + 0.5 * groups, groups) * columns)
    else:
        count = groups * ceil(rows) * columns
        k = max(k // groups, 1)
    of_squares = problem.is_scaled_along_k and problem.b_scale != "VECTOR"
    ns = _GROUPED_NS[_tile(config)] if of_squares else block_ns(problem, config)
    tile = ceil(k / BK) * ns / 1e3 + _GROUPED_EPILOGUE_US * config.BM * config.BN
    return ceil(count / cores) * tile
