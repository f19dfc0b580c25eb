"""How long a configuration takes, by a count of k-blocks and bytes; its job is the ranking.

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

from functools import lru_cache
from math import ceil, hypot
from typing import Final

from fp8fn.ops.cuda.gemm.scaled_mm import BK, Config
from fp8fn.ops.tuning.candidates import candidates, config_name, tile_count
from fp8fn.ops.tuning.problem import Problem

# Nanoseconds of a k-block of 128 where each multiprocessor works on one, by tile and temporaries. The L2's rate is in
# them: 64x64 asks for 10 TB/s. At 1.7 GHz the tensor core alone needs 452 for 192x128 and 602 for 128x256.
_FORWARD_NS: Final = {
    "192x128d1": 612, "128x256d1": 875, "128x192d1": 645, "128x128d2": 452, "128x64d2": 242,
    "64x256d1": 577, "64x192d1": 470, "64x128d2": 281, "64x64d2": 209,
}  # fmt: skip
# A scale for each column of b more to load and to multiply by: 238 ns at 192x128 and 160 at 128x128 were measured, so
# about 9.6 for 1000 elements of the tile.
_COLUMN_SCALES_NS: Final = 9.6e-3
# Without scales along K: less by what promoting every fourth block only saves. Not fitted: of seven small products that
# were timed, all but one rank as with these.
_UNSCALED_NS: Final = {
    "192x128d1": 640, "192x128d2": 625, "128x256d1": 870, "128x192d2": 610, "128x128d2": 430, "128x64d2": 300,
    "64x256d1": 560, "64x192d1": 450, "64x128d2": 305, "64x64d2": 250,
}  # fmt: skip
_MEASURED_DEPTH_1_NS: Final = 470  # 128x128 with one temporary: wgrad's 630 less its column scales

_ALONE: Final = 0.65  # the time of a k-block where no other multiprocessor works, to that where all do
_LAUNCH_US: Final = 5.6  # with 3 µs of the events around it
_EPILOGUE_US: Final = 0.28 / (128 * 128)  # of an element of a tile
_HBM: Final = 4.2  # MB a µs
_L2_BYTES: Final = 30e6  # what stays of an operand while the other streams through
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


def block_ns(problem: Problem, config: Config) -> float:
    """Nanoseconds of a k-block of one tile."""
    tile = f"{config.BM}x{config.BN}d{config.DEPTH}"
    if not problem.is_scaled_along_k:
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
    blocks = ceil(ceil(problem.k / BK) / config.SPLIT)
    compute, epilogue = blocks * block_ns(problem, config) / 1e3, _EPILOGUE_US * config.BM * config.BN
    written = problem.batch * problem.m * problem.n
    moved = bytes_read(problem, config) + written * problem.out_dtype.itemsize
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
def ranked(problem: Problem, cores: int) -> tuple[Config, ...]:
    """The candidates, that of the least time first."""
    times = {config: microseconds(problem, config, cores) for config in candidates(problem, cores)}
    return tuple(sorted(times, key=lambda config: (times[config], config_name(config))))
