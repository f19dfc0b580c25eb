"""The configurations of Hopper's product that are worth considering for a problem, and their names in tables."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Final

from fp8fn.ops.cuda.scaled_mm import BK, Config
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
# By the kinds of the scales. With one of each along K: two temporaries hold 0.9x of one at 128x128. Where they hold
# along all of K, two are one accumulated further, so that they cost no registers: 192x128 and 128x192 spill 74 and 94
# elsewhere, not here.
_BY_KIND: Final[dict[tuple[str, str], tuple[Config, ...]]] = {
    ("VECTOR", "BLOCK"): (Config(), Config(BN=192, DEPTH=1)),
    ("VECTOR", "VECTOR"): (Config(DEPTH=1), Config(BN=192, DEPTH=1)),
}
_UNSCALED: Final = (Config(), Config(BN=192), Config(MATH=3))
_FEWEST_BLOCKS: Final = 4  # of K, in a part: under that the pipeline does not fill
_NAME: Final = re.compile(r"(\d+)x(\d+)d([12])(?:g(\d+))?(?:p(\d+))?")


def tiles(problem: Problem) -> tuple[Config, ...]:
    """The tiles for the problem's scales, K in one part; none of them spills."""
    return _EVERYWHERE + _BY_KIND.get(problem.kinds, _UNSCALED)


def candidates(problem: Problem, cores: int) -> tuple[Config, ...]:
    """The tiles, and where one leaves half of the `cores` idle or more, K in parts for it."""
    found = []
    for tile in tiles(problem):
        found.append(tile)
        for parts in _parts(tile_count(problem, tile), -(-problem.k // BK), cores):
            found.append(replace(tile, PARTS=parts))
    return tuple(found)


def tile_count(problem: Problem, config: Config) -> int:
    """Output tiles, of all batches; each counts once for every part of K."""
    return -(-problem.m // config.BM) * -(-problem.n // config.BN) * problem.batch * config.PARTS


def _parts(count: int, blocks: int, cores: int) -> list[int]:
    """Into how many parts K may be cut: as many as keep to one wave, and powers of two below."""
    most = min(cores // count, blocks // _FEWEST_BLOCKS) if 2 * count < cores else 1
    return sorted({most, *(2**i for i in range(1, 5) if 2**i < most)} - {0, 1})


def config_name(config: Config) -> str:
    """`"192x128d1"`: tile and temporaries, `g` the group where it is not 8, `p` the parts where there are several."""
    group = "" if config.GROUP == Config.GROUP else f"g{config.GROUP}"
    parts = "" if config.PARTS == 1 else f"p{config.PARTS}"
    return f"{config.BM}x{config.BN}d{config.DEPTH}{group}{parts}"


@cache
def config_of(name: str) -> Config:
    """The configuration of a name; ValueError where it is none of these tiles."""
    match = _NAME.fullmatch(name)
    if match is not None:
        bm, bn, depth, group, parts = (int(text) if text else 0 for text in match.groups())
        for tile in (*_EVERYWHERE, *(tile for more in _BY_KIND.values() for tile in more), *_UNSCALED):
            if (bm, bn, depth) == (tile.BM, tile.BN, tile.DEPTH):
                return replace(tile, GROUP=group or tile.GROUP, PARTS=parts or 1)
    raise ValueError(f"{name!r} names no configuration")
