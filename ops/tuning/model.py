"""How long a configuration takes, by a count of k-blocks and bytes; its job is the ranking.

A block of threads walks over its tiles one after the other, so that a product takes as long as the block with the
most tiles: `waves = ceil(tiles / multiprocessors)`. A tile takes its k-blocks, `block_ns` each, and an epilogue that
nothing hides. A wave's bytes come at `_HBM`. The two overlap: their time is the root of the sum of their squares.

Constants were fitted by least squares of the logarithms to the medians in `tests/test_tuning.py`, taken on an H200,
warm and in turn: 6 % rms over 12 µs to 4 ms, and for each of those shapes the configuration ranked first is within 5 %
of the fastest. Power is not modelled: a clock that sinks does so for every candidate, nearly by the same factor.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, hypot
from typing import Final

from fp8fn.ops.cuda.scaled_mm import BK, Config
from fp8fn.ops.tuning.candidates import candidates, config_name, tile_count
from fp8fn.ops.tuning.problem import Problem

# Nanoseconds of a k-block of 128 where each multiprocessor works on one, by tile and temporaries. The L2's rate is in
# them: 64x64 asks for 8 TB/s. At 1.7 GHz the tensor core alone needs 452 for 192x128 and 602 for 128x256.
_FORWARD_NS: Final = {
    "192x128d1": 612, "128x256d1": 875, "128x192d1": 645, "128x128d2": 452, "128x64d2": 309,
    "64x256d1": 573, "64x192d1": 466, "64x128d2": 319, "64x64d2": 257,
}  # fmt: skip
# A scale for each column of b more to load and to multiply by: 238 ns at 192x128 and 160 at 128x128 were measured, so
# about 9.6 for 1000 elements of the tile.
_COLUMN_SCALES_NS: Final = 9.6e-3
# Without scales along K nothing is measured yet: less by what promoting every fourth block only saves.
_UNSCALED_NS: Final = {
    "192x128d1": 640, "192x128d2": 625, "128x256d1": 870, "128x192d2": 610, "128x128d2": 430, "128x64d2": 300,
    "64x256d1": 560, "64x192d1": 450, "64x128d2": 305, "64x64d2": 250,
}  # fmt: skip
_MEASURED_DEPTH_1_NS: Final = 470  # 128x128 with one temporary: wgrad's 630 less its column scales

_LAUNCH_US: Final = 4.7  # with 3 µs of the events around it
_EPILOGUE_US: Final = 0.3 / (128 * 128)  # of an element of a tile
_HBM: Final = 3.0  # MB a µs of short reads; a copy of 512 MB reaches 4.27
_L2: Final = 5.5
_L2_BYTES: Final = 30e6  # what stays of an operand while the other streams through
_PARTS_US: Final = 4.0  # the launch that adds the parts

# The (M, N, K) that the constants were fitted to, forward and of wgrad.
FITTED: Final = frozenset({
    (4096, 4096, 4096), (8192, 6144, 4096), (8192, 28672, 4096), (16384, 8192, 8192), (8192, 8192, 28672),
    (6144, 4096, 8192), (28672, 4096, 8192), (8192, 8192, 16384),
    (128, 7168, 2048), (64, 24576, 1536), (4096, 2112, 7168), (4096, 2176, 7168),
})  # fmt: skip


def block_ns(problem: Problem, config: Config) -> float:
    """Nanoseconds of a k-block of one tile."""
    tile = f"{config.BM}x{config.BN}d{config.DEPTH}"
    if problem.b_scale in ("LINE", "WHOLE"):
        return float(_UNSCALED_NS[tile])
    forward = float(_MEASURED_DEPTH_1_NS if tile == "128x128d1" else _FORWARD_NS[tile])
    return forward + (_COLUMN_SCALES_NS * config.BM * config.BN if problem.b_scale == "VECTOR" else 0.0)


def bytes_read(problem: Problem, config: Config) -> float:
    """From HBM: a once, and b once for every `GROUP` rows of tiles, unless it stays in the L2."""
    a, b = problem.m * problem.k, problem.n * problem.k
    passes = ceil(ceil(problem.m / config.BM) / config.GROUP) if b > _L2_BYTES else 1
    return float(problem.batch * (a + b * passes))


def microseconds(problem: Problem, config: Config, cores: int) -> float:
    """The time of a product on `cores` multiprocessors, behind an emptied L2, launch included."""
    count = tile_count(problem, config)
    blocks = ceil(ceil(problem.k / BK) / config.PARTS)
    compute = blocks * block_ns(problem, config) / 1e3 + _EPILOGUE_US * config.BM * config.BN
    written = problem.batch * problem.m * problem.n
    moved = bytes_read(problem, config) + written * (problem.out_dtype.itemsize if config.PARTS == 1 else 0)
    waves, rest = divmod(count, cores)
    each = moved / count / (_HBM * 1e6)
    time = _LAUNCH_US + waves * hypot(compute, each * cores)
    if rest:
        time += hypot(compute, each * rest)
    if config.PARTS > 1:
        time += _PARTS_US + written * 2 * 4 * config.PARTS / (_L2 * 1e6)
    return time


@lru_cache(maxsize=4096)
def ranked(problem: Problem, cores: int) -> tuple[Config, ...]:
    """The candidates, that of the least time first."""
    times = {config: microseconds(problem, config, cores) for config in candidates(problem, cores)}
    return tuple(sorted(times, key=lambda config: (times[config], config_name(config))))
