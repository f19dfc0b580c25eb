"""The configurations of Hopper's product that are worth considering for a problem, and their names in tables."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Final

from fp8fn.ops.cuda.gemm.scaled_mm import BK, Config
from fp8fn.ops.tuning.problem import Problem

X: Final = Config(MATH=3, DEPTH=1)
W: Final = Config(BN=256, SLICES_N=2, DEPTH=1)
SMALLEST: Final = Config(MATH=1, BN=64)
_EVERYWHERE: Final = (
    X, W,
    Config(BN=64),
    Config(MATH=1),
    SMALLEST,
    Config(MATH=1, BN=192, DEPTH=1),
    Config(MATH=1, BN=256, SLICES_N=2, DEPTH=1),
)  # fmt: skip
# By whether scales change along K, and from column to column. With one of each along K: two temporaries hold 0.9x of
# one at 128x128. Where they hold along all of K, two are one accumulated further, so that they cost no registers:
# 192x128 and 128x192 spill 74 and 94 elsewhere, not here.
_SCALED: Final = (Config(), Config(BN=192, DEPTH=1))
_SCALED_BY_COLUMN: Final = (Config(DEPTH=1), Config(BN=192, DEPTH=1))
_UNSCALED: Final = (Config(), Config(BN=192), Config(MATH=3))
_FEWEST_BLOCKS: Final = 4  # of K, in a share: under that the pipeline does not fill
# Which share of the multiprocessors clusters of a size occupy at once: each lies within one GPC, and those differ.
_RESIDENT_CLUSTERS: Final = {2: 1.0, 4: 0.9, 8: 0.9}
_LARGEST_GROUP: Final = 64  # rows of tiles; past 64 of 64 rows no L2 holds what they share
_LARGEST_SPLIT: Final = 128 * 128  # elements of a tile whose sums leave room for stages
_NAME: Final = re.compile(r"(\d+)x(\d+)d([12])(?:g(\d+))?(?:s(\d+))?")


def tiles(problem: Problem) -> tuple[Config, ...]:
    """The tiles for the problem's scales, K in one part; none of them spills."""
    if not problem.is_scaled_along_k:
        return _EVERYWHERE + _UNSCALED
    if problem.b_scale != "VECTOR":
        return _EVERYWHERE + _SCALED
    found = _EVERYWHERE + _SCALED_BY_COLUMN
    return tuple(tile for tile in found if tile != X) if problem.a_scale == "BLOCK" else found  # X spills 2


def candidates(problem: Problem, cores: int) -> tuple[Config, ...]:
    """The tiles, and where one leaves half of the `cores` idle or more, K shared by clusters for it."""
    found = []
    for tile in tiles(problem):
        found.append(tile)
        for split in _splits(tile, tile_count(problem, tile), -(-problem.k // BK), cores):
            found.append(replace(tile, SPLIT=split))
    return tuple(found)


def runs(problem: Problem, config: Config) -> bool:
    """Whether the kernel can multiply a problem in a configuration, however slowly."""
    if replace(config, SPLIT=1, GROUP=Config.GROUP) not in tiles(problem) or config.GROUP > _LARGEST_GROUP:
        return False
    return config.SPLIT == 1 or _can_share(config, -(-problem.k // BK), config.SPLIT)


def tile_count(problem: Problem, config: Config) -> int:
    """Output tiles, of all batches; each counts once for every block of threads that shares its K."""
    return -(-problem.m // config.BM) * -(-problem.n // config.BN) * problem.batch * config.SPLIT


def _splits(tile: Config, count: int, blocks: int, cores: int) -> list[int]:
    """By how many blocks K of a tile may be shared, all of them resident at once; an owner has 16 rows or more.

    None where a tile is several products, which take turns at the registers: 1.2 to 1.4x the time of the fastest tile.
    """
    return [
        split
        for split, share in _RESIDENT_CLUSTERS.items()
        if count * split <= share * cores and _can_share(tile, blocks, split)
    ]


def _can_share(tile: Config, blocks: int, split: int) -> bool:
    """Whether `split` blocks of threads can share the `blocks` of K of a tile, resident at once or not."""
    small = tile.BM * tile.BN <= _LARGEST_SPLIT and tile.SLICES_N == 1
    return small and blocks >= split * _FEWEST_BLOCKS and tile.BM % (16 * split) == 0


def config_name(config: Config) -> str:
    """`"192x128d1"`: tile and temporaries, `g` the group where it is not 8, `s` the blocks that share K."""
    group = "" if config.GROUP == Config.GROUP else f"g{config.GROUP}"
    split = "" if config.SPLIT == 1 else f"s{config.SPLIT}"
    return f"{config.BM}x{config.BN}d{config.DEPTH}{group}{split}"


@cache
def config_of(name: str) -> Config:
    """The configuration of a name; ValueError where it is none of these tiles."""
    match = _NAME.fullmatch(name)
    if match is not None:
        bm, bn, depth, group, split = (int(text) if text else 0 for text in match.groups())
        for tile in (*_EVERYWHERE, *_SCALED, *_SCALED_BY_COLUMN, *_UNSCALED):
            if (bm, bn, depth) == (tile.BM, tile.BN, tile.DEPTH):
                return replace(tile, GROUP=group or tile.GROUP, SPLIT=split or 1)
    raise ValueError(f"{name!r} names no configuration")
