"""The configuration of a grouped product, by the tiles' times of `fp8fn.ops.tuning.model`.

The groups' sizes are on the device and not known: tokens are taken to be shared evenly, and each group to end in half a
tile that is its own.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Final

from fp8fn.ops.cuda.gemm.scaled_mm import BK, ScaledMmConfig
from fp8fn.ops.tuning.candidates import tiles
from fp8fn.ops.tuning.model import block_ns
from fp8fn.ops.tuning.problem import Problem

_EPILOGUE_US: Final = 0.3 / (128 * 128)  # of an element of a tile, as in the model


@lru_cache(maxsize=4096)
def choose_config(problem: Problem, cores: int, *, jagged_m: bool) -> ScaledMmConfig:
    """The tile of the least time, for `problem.batch` groups of m rows together, or of k where not `jagged_m`."""
    return min(
        tiles(problem), key=lambda config: (microseconds(problem, config, cores, jagged_m=jagged_m), str(config))
    )


def microseconds(problem: Problem, config: ScaledMmConfig, cores: int, *, jagged_m: bool) -> float:
    """The time of the multiprocessor with the most tiles."""
    groups = problem.batch
    columns, rows, k = ceil(problem.n / config.BN), problem.m / config.BM, problem.k
    if jagged_m:
        count = ceil(max(rows + 0.5 * groups, groups) * columns)
    else:
        count = groups * ceil(rows) * columns
        k = max(k // groups, 1)
    tile = ceil(k / BK) * block_ns(problem, config) / 1e3 + _EPILOGUE_US * config.BM * config.BN
    return ceil(count / cores) * tile
