"""9 to 128 rows by an FP8 weight, K shared by clusters: what it accepts, its configuration, its launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product as every
from typing import Final

import torch

from fp8fn.ops.cuda.gemm import gemv_a16w8
from fp8fn.ops.cuda.gemm.a16w8_tiles import LEAST_STAGES, STAGE_K, ClusterConfig, arriving_bytes, scale_bytes, stages_of
from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.limits import (
    MOST_BLOCKS,
    PREFETCHED,
    RESERVED,
    SHARED_LIMIT,
    ceil_power_of_two,
    floor_power_of_two,
    largest_cluster,
)
from fp8fn.ops.cuda.operands import column_steps, map_fault, tma_batch, weight_product_types
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.tuning.divisions import Division, Divisions, read
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

_MOST_CLUSTER: Final = 8
_SHORT: Final = 4  # stages of K
_FEW: Final = 8  # rows
_BLOCK_STEPS: Final = 4  # stages of K that take as long as a block's start and the exchange of its sums, estimated


@dataclass(frozen=True)
class SplitKConfig(ClusterConfig):
    """A ring of stages that hold both operands."""

    @property
    def stage(self) -> int:
        """Bytes of shared memory: both operands and two barriers."""
        return (self.BN + 2 * self.ROWS) * STAGE_K + 16

    def shared(self, k: int, w_block: Block) -> int:
        """Bytes of shared memory: stages, sums that arrive, barriers, and the scales of a block's part of K."""
        arriving = arriving_bytes(self.ROWS, self.WARPS_N, self.CLUSTER)
        return self.STAGES * self.stage + arriving + 24 + scale_bytes(self.steps(k), self.BN, w_block)


@cache
def divisions() -> Divisions[SplitKConfig]:
    """Divisions with the whole of a block's part of K in flight, as were timed on an H200."""
    return read("splitk_a16w8.json", SplitKConfig)


def accepts(product: WeightProduct) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    if (reason := gemv_a16w8.accepts(product)) is not None:
        return reason
    product = product.as_matrix()
    for name, operand in (("x", product.x), ("w.mT", product.w.data.mT)):
        if (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    if _ring(weight_problem(replace(product, constant=False))).STAGES < LEAST_STAGES:
        return f"the scales of K={product.k} do not fit into shared memory"
    return None


def untuned(product: WeightProduct) -> str | None:
    """None where it was the fastest one on an H200, else why not: `a16w8_tiles`, `mm_a16w8` or `gemv_a16w8` was."""
    problem = weight_problem(product)
    if _whole(problem) is not None:
        return None
    m, k, batches, cores = problem.m, problem.k, problem.batch, problem.cores
    tiles, steps = _tiles(problem), stages_of(k)
    if m <= _FEW or (m <= 16 and batches == 1):
        return f"M={m} is few rows"
    if steps == 1:
        return f"K={k} is one stage"
    if m <= 32:
        full = tiles > (cores if steps <= 2 * _SHORT else 2 * cores)
    elif m <= 64:
        full = 10 * tiles > (8 if _SHORT < steps <= 8 * _SHORT else 10) * cores
    else:
        full = 2 * tiles > cores
    return f"{tiles} tiles of 64 columns keep most multiprocessors busy" if full else None


def configure(product: WeightProduct) -> SplitKConfig:
    """The default configuration of a product; see `choose_config`."""
    return choose_config(weight_problem(product))


def choose_config(problem: WeightProblem) -> SplitKConfig:
    """By what was timed on an H200, in chains of products: the whole of K in flight where a table has it, or a ring."""
    return _whole(problem) or _ring(problem)


def configure_invariant(product: WeightProduct) -> SplitKConfig:
    """The tile of up to 16, 32, 64 or 128 rows that fits best, with one division of K for every number of rows.

    A row's sum is the same in all of them: wgmma adds the pieces of a K tile, each K tile is promoted, and the parts of
    K are added, in the order of K whatever the tile's rows are.
    """
    problem = weight_problem(product)
    cluster = _invariant_cluster(problem)
    wide = problem.m > 64
    if wide and (config := _invariant(problem, 128, cluster)).STAGES >= LEAST_STAGES:
        return config
    return _invariant(problem, 64 if wide else max(16, ceil_power_of_two(problem.m)), cluster)


def accepts_invariant(product: WeightProduct) -> str | None:
    """None where `plan` takes `configure_invariant`'s configuration for every number of rows, else the reason why not.

    A kernel that refuses one row serves no other number of rows either, nor of matrices of `x` by one weight.
    """
    product = product.as_matrix()
    if product.batch > MOST_BLOCKS:
        return f"a batch of {product.batch} is more than a grid has"
    one = replace(product, x=product.x[..., :1, :], out=product.out[..., :1, :])
    if product.x.ndim == 3 and product.w.data.ndim == 2:
        one = replace(one, x=one.x[:1], out=one.out[:1])
    if (reason := accepts(one)) is not None:
        return reason
    problem = weight_problem(product)
    if _invariant(problem, 64, _invariant_cluster(problem)).STAGES < LEAST_STAGES:
        return f"the scales of K={product.k} do not fit into shared memory"
    return None


def sums_whole_k(product: WeightProduct) -> bool:
    """Whether `configure_invariant` leaves K in one part."""
    return _invariant_cluster(weight_problem(product)) == 1


def _invariant_cluster(problem: WeightProblem) -> int:
    """Blocks along K, from the weight's shape alone: those that are more than the multiprocessors share them."""
    columns, steps = -(-problem.n // 64), stages_of(problem.k)
    if columns > problem.cores:
        return 1

    def time(cluster: int) -> float:
        return max(1.0, columns * cluster / problem.cores) * (-(-steps // cluster) + _BLOCK_STEPS)

    return min(range(1, max(1, min(steps // 2, _MOST_CLUSTER)) + 1), key=time)


def _invariant(problem: WeightProblem, rows: int, cluster: int) -> SplitKConfig:
    """Sums of 128 rows leave registers for one block on a multiprocessor; of fewer rows three took longer than two."""
    resident = 1 if rows == 128 else 2
    return with_stages(SplitKConfig(rows, 4, 0, cluster, resident, LATE=True), problem.k, problem.block)


def candidates(problem: WeightProblem) -> tuple[SplitKConfig, ...]:
    """The configurations to measure a problem in, the default one first; up to 128 rows by lines along K."""
    if not _FEW < problem.m <= gemv_a16w8.MOST_ROWS or not problem.k_lines:
        return ()
    cores, steps, found = problem.cores, stages_of(problem.k), [choose_config(problem)]
    for _, config in _that_fit(problem):
        if cores <= 4 * _blocks(problem, config) <= 16 * cores:
            found.append(config)
    late = (False, True) if problem.constant else (True,)
    for rows, cluster, resident, later in every((32, 64), range(1, _MOST_CLUSTER + 1), (2, 3), late):
        if cluster <= steps // 2 or cluster == 1:
            found.append(with_stages(SplitKConfig(rows, 4, 0, cluster, resident, later), problem.k, problem.block))
    return tuple(dict.fromkeys(config for config in found if (1 if config.HELD else LEAST_STAGES) <= config.STAGES))


def _blocks(problem: WeightProblem, config: SplitKConfig) -> int:
    tiles = -(-problem.n // config.BN) * -(-problem.m // config.ROWS) * problem.batch
    return tiles * config.CLUSTER


def _whole(problem: WeightProblem) -> SplitKConfig | None:
    """The first of the table that divides the product into as many blocks as the table has."""
    for division, config in _that_fit(problem):
        if division.has(_blocks(problem, config), problem.cores):
            return config
    return None


def _that_fit(problem: WeightProblem) -> Iterator[tuple[Division[SplitKConfig], SplitKConfig]]:
    """The divisions of the table that divide K evenly, into blocks that find room."""
    if problem.m <= _FEW:
        return
    for division in divisions().get((problem.constant, max(16, ceil_power_of_two(problem.m))), ()):
        config = division.config
        for cluster, stages in division.parts(stages_of(problem.k)):
            found = replace(config, STAGES=stages, CLUSTER=cluster, HELD=min(config.HELD, stages))
            room = SHARED_LIMIT // config.RESIDENT - RESERVED
            if cluster <= largest_cluster(problem.cores) and found.shared(problem.k, problem.block) <= room:
                yield division, found


def _ring(problem: WeightProblem) -> SplitKConfig:
    """Stages that are filled anew.

    A product with little work has about a block for each multiprocessor. The next launch begins late beside them.
    Else there are as many as find room at once, of four stages of K or more, and the next launch begins late where it
    may not read early, or would put its blocks beside whole tiles. Tiles of 32 rows serve more than 32 where they have
    little work, unless tiles of 64 rows are so few that six blocks share K.
    """
    m, k, cores = problem.m, problem.k, problem.cores
    columns, steps = _tiles(problem), stages_of(k)
    halves = columns * -(-m // 32)
    shared = cores <= 11 * columns and 6 * columns * -(-m // 64) <= cores and steps >= 4 * _SHORT
    rows = 32 if m <= 32 or (halves <= cores and halves * steps < 11 * cores and not shared) else 64
    tiles = columns * -(-m // rows)
    little = tiles * steps < (11 if rows == 32 else 13) * cores
    if rows == 64:
        cluster = _cluster_of_64_rows(tiles, steps, cores, twice=m > 64)
    elif little:
        cluster = floor_power_of_two(cores * 11 // 10 // tiles) if 2 * tiles <= cores else 1
    else:
        cluster = cores * 13 // 5 // tiles
        if cluster <= 1 and tiles <= cores and steps > 8 * _SHORT:
            cluster = 2
    least = 2 if 5 * tiles * (steps // 4) < 2 * cores else 4  # stages of a block
    cluster = max(1, min(cluster, steps // least, _MOST_CLUSTER))
    resident = 3 if rows == 32 and not little and cluster > 1 else 2
    late = little or not problem.constant or cluster == 1 or (rows == 64 and tiles * cluster <= cores)
    return with_stages(SplitKConfig(rows, 4, 0, cluster, resident, late), k, problem.block)


def _cluster_of_64_rows(tiles: int, steps: int, cores: int, *, twice: bool) -> int:
    """Blocks along K: so few that a multiprocessor has one, or so many that it has two.

    Behind a kernel that ends first, two blocks took 1.64 times as long as one alone, and three steps more; five where
    one alone has no other to exchange sums with, and six where two tiles of rows read the weight `twice`.
    """
    alone = max(c for c in range(1, 7) if _find_room(tiles, c, cores, beside=False))
    beside = max(c for c in range(1, _MOST_CLUSTER + 1) if _find_room(tiles, c, cores, beside=True))
    more = 3 if alone > 1 else 6 if twice else 5
    return alone if steps / alone <= 1.64 * steps / beside + more else beside


def _find_room(tiles: int, cluster: int, cores: int, *, beside: bool) -> bool:
    """Whether all blocks find room at once, one on a multiprocessor or two, as was timed on an H200.

    The blocks of a cluster lie within one group of multiprocessors, of which larger clusters leave some without one.
    """
    if cluster <= 2:
        share = 1.95 if beside else 1.0
    elif beside:
        share = 1.65 if cluster % 2 else 1.75
    else:
        share = 0.75
    return cluster == 1 or tiles * cluster <= share * cores


def _tiles(problem: WeightProblem) -> int:
    """Tiles of 64 columns, of all rows."""
    return -(-problem.n // 64) * problem.batch


def with_stages(config: SplitKConfig, k: int, w_block: Block) -> SplitKConfig:
    """With as many as there is room for and something to put into; fewer blocks a multiprocessor if need be."""
    steps = config.steps(k)
    for resident in range(config.RESIDENT, 0, -1):
        room = SHARED_LIMIT // resident - RESERVED - replace(config, STAGES=0).shared(k, w_block)
        stages = min(room // config.stage, max(steps, LEAST_STAGES))
        if stages >= min(steps, 3):
            break
    return replace(config, STAGES=max(stages, 0), RESIDENT=resident)


def plan(product: WeightProduct, config: SplitKConfig) -> tuple[CudaLaunch]:
    """The launch of a product that `accepts` accepts, of which nothing is empty."""
    product = product.as_matrix()
    m, n, k, batches, constant = product.m, product.n, product.k, product.batch, product.constant
    x, w = product.x, product.w.data
    macros = weight_product_types(product)
    options = {
        "ROWS": config.ROWS, "TILES": 1, "WARPS_N": config.WARPS_N, "WARPS_K": 1, "STAGES": config.STAGES,
        "CLUSTER": config.CLUSTER, "RESIDENT": config.RESIDENT, "W_CONSTANT": int(constant), "LATE": int(config.LATE),
        "HELD": config.HELD,
    }  # fmt: skip
    kind = "bf16" if x.dtype == torch.bfloat16 else "f16"
    row_tiles = -(-m // config.ROWS)
    x_rows = -(-m // row_tiles)  # tiles are equally high, so that few rows of the last one are past the end
    grid = -(-n // config.BN) * config.CLUSTER, row_tiles, batches
    resident = min(grid[0] * grid[1] * grid[2], product.target.cores * config.RESIDENT)
    return (
        CudaLaunch(
            kernel=CudaKernel(
                "splitk_a16w8.cu", "splitk_a16w8", (*macros.items(), *options.items()),
                (Wgmma(config.ROWS, kind, kind, a_in_registers=True),),
            ),
            grid=grid,
            threads=config.threads,
            shared=config.shared(k, product.w.block),
            args={
                "x": TensorMap(tma_batch(x), (1, x_rows, 64), 128),
                "w": TensorMap(tma_batch(w.mT), (1, config.BN, STAGE_K), 128),
                "w_scale": product.w.scale, "bias": product.bias, "out": product.out, "M": m, "N": n, "K": k,
                "prefetched": PREFETCHED // (resident * config.BN * STAGE_K),
                "x_rows": x_rows, "x_batched": int(x.dim() == 3), "w_batched": int(w.dim() == 3),
                **column_steps(product),
            },
            target=product.target,
            options=options,
            overlaps=True,
            constant=("w", "w_scale") if constant else (),
            late=config.LATE,
        ),
    )  # fmt: skip
