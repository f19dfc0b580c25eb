"""Few rows by an MX-FP8 weight by TMA and wgmma: what it accepts, its configuration, its launch (`mx_tiles.cu`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product as every
from typing import Final

from torch import Tensor

from fp8fn.ops.cuda.gemm import gemv_mx
from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.limits import PREFETCHED, RESERVED, SHARED_LIMIT, ceil_power_of_two, floor_power_of_two
from fp8fn.ops.cuda.operands import ELEMENT, FP8, WGMMA_FP8, batch_step, tma_batch
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import round_up
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.tuning.mx import Problem

STAGE_K: Final = 128  # elements of K in a stage
_MOST_CLUSTER: Final = 8
_FEW_BLOCKS: Final = 3  # in a cluster
_MOST_STEPS: Final = 64  # stages of a block, for whose scales there is room


@dataclass(frozen=True)
class MxTilesConfig:
    """How blocks divide a product; `mx_tiles.cu` says what each does.

    `ROWS` of a by `16 * WARPS_N` columns of b, `WARPS_K` warps for each along K, `STAGES` of K in flight, `DEPTH`
    products of a warpgroup at once, `CLUSTER` blocks along K, `RESIDENT` blocks on a multiprocessor at once; `LATE`,
    when the next launch may begin.
    """

    ROWS: int
    WARPS_N: int = 4
    WARPS_K: int = 1
    STAGES: int = 5
    CLUSTER: int = 1
    RESIDENT: int = 2
    DEPTH: int = 2
    LATE: bool = False

    @property
    def BN(self) -> int:
        return 16 * self.WARPS_N

    @property
    def least_stages(self) -> int:
        """As many as make a ring, and have room for the sums after."""
        sums = self.WARPS_K * self.ROWS * (self.BN + 4) * 4
        return max(2, -(-sums // ((self.ROWS + self.BN) * STAGE_K)))

    @property
    def threads(self) -> int:
        return 32 * (self.WARPS_N * self.WARPS_K + 1)

    def shared(self, k: int) -> int:
        """Bytes of shared memory: stages, sums that arrive, barriers, and the scales of a block's part of K."""
        stages = self.STAGES * (self.ROWS + self.BN) * STAGE_K
        arriving = self.ROWS * self.BN * 4 + self.CLUSTER * 8 if self.CLUSTER > 1 else 0
        steps = -(-(k // STAGE_K) // self.CLUSTER)
        scales_of_a = 4 * 4 * (20 if self.ROWS == 64 else self.ROWS // 4) * 4 + 16
        return round_up(stages + arriving + self.STAGES * 16 + 8, 16) + steps * (scales_of_a + self.BN * 8)

    def __str__(self) -> str:
        warps = f"{self.WARPS_N}x{self.WARPS_K}"
        return (
            f"{self.ROWS}x{self.BN} warps{warps} stages{self.STAGES} depth{self.DEPTH} cluster{self.CLUSTER} "
            f"resident{self.RESIDENT}{' late' * self.LATE}"
        )


def accepts(problem: Problem) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    if (reason := gemv_mx.accepts(problem)) is not None:
        return reason
    if problem.k % STAGE_K:
        return f"K={problem.k} is no multiple of {STAGE_K}"
    if not problem.in_boxes:
        return "an operand does not lie as bulk copies take it"
    if not problem.words:
        return "the scales of a line do not lie in words of four"
    config = configure(problem)
    if config.least_stages > config.STAGES:
        return f"the scales of K={problem.k} do not fit into shared memory"
    return None


def untuned(problem: Problem) -> str | None:
    """None where it was the faster one on an H200, else why not: few rows are multiplied sooner than copied."""
    if problem.constant or problem.m > 16:
        return None
    if problem.m <= 8 or configure(problem).CLUSTER > _FEW_BLOCKS:
        return f"M={problem.m} by a weight that may not be read early is faster in smaller pieces"
    return None


def configure(problem: Problem) -> MxTilesConfig:
    """By what was timed on an H200 at the shapes of decoding.

    Up to 16 rows by a constant weight: small blocks, so that those of the launch before leave room for as many. Up to
    32 a block for each multiprocessor, beside those of the next launch; 64 by short K are two tiles of 32. Else
    seven for four multiprocessors, or three each where clusters of eight make as many. Clusters of many blocks take
    half of a multiprocessor each: of thirds, three would lie on some, and none on others. More than 32 rows are divided
    among two warpgroups of one block where K is short, or among two pairs of blocks where those fill three each.
    """
    n, k, cores = problem.n, problem.k, problem.target.cores
    rows = min(8 * ceil_power_of_two(-(-problem.m // 8)), gemv_mx.MOST_ROWS)
    tiles, steps = -(-n // 64) * problem.batch, k // STAGE_K

    def clusters(blocks: int) -> int:
        """Blocks along K, of `blocks` in all; one has scales for few steps and something to do."""
        return min(max(1, blocks // tiles, -(-steps // _MOST_STEPS)), max(1, steps // 2), _MOST_CLUSTER)

    if rows <= 16 and problem.constant:
        late = rows == 16 and steps >= 16
        return _with_stages(MxTilesConfig(rows, CLUSTER=clusters(cores * 5 // 2), RESIDENT=4, LATE=late), k)
    if problem.constant and rows == 32 and tiles <= cores * 11 // 10:
        cluster = clusters(cores * 11 // 10)
        if floor_power_of_two(cluster) * _MOST_STEPS >= steps:
            cluster = floor_power_of_two(cluster)
        return _with_stages(MxTilesConfig(rows, 4, 2, 0, cluster, LATE=True), k)
    if problem.constant and rows == 64 and 2 * cores < 4 * tiles <= 3 * cores and steps <= 12:
        return _with_stages(MxTilesConfig(32, 4, 2, 0, LATE=True), k)
    cluster = clusters(cores * 7 // 4)
    if 2 * cores < tiles * _MOST_CLUSTER <= 3 * cores and steps >= 4 * _MOST_CLUSTER:
        cluster = _MOST_CLUSTER
    few = cluster <= _FEW_BLOCKS
    resident = 3 if few or tiles * cluster > 2 * cores else 2
    if rows == 64 and 2 * cores < 4 * tiles <= 3 * cores and steps >= 16:
        config = MxTilesConfig(32, 4, 2, 0, 2, 3, 1)
    elif rows == 64 and few:
        config = MxTilesConfig(rows, 4, 2, 0, clusters(cores), 1)
    elif rows == 64:
        config = MxTilesConfig(rows, 4, 1, 0, cluster, resident)
    else:
        config = MxTilesConfig(rows, 4, 2, 0, cluster, resident, 1 if rows == 32 and resident == 3 else 2)
    return _with_stages(config, k)


def candidates(problem: Problem) -> tuple[MxTilesConfig, ...]:
    """The configurations to measure a problem in, the default one first: other clusters along K, and residents."""
    default, k = configure(problem), problem.k
    steps = k // STAGE_K
    found, late = [default], (False, True) if problem.constant else (False,)
    for cluster, resident, later in every(range(1, _MOST_CLUSTER + 1), (1, 2, 3, 4), late):
        if -(-steps // _MOST_STEPS) <= cluster <= max(1, steps // 2):
            found.append(_with_stages(replace(default, CLUSTER=cluster, RESIDENT=resident, LATE=later, STAGES=0), k))
    return tuple(dict.fromkeys(config for config in found if config.least_stages <= config.STAGES))


def _with_stages(config: MxTilesConfig, k: int) -> MxTilesConfig:
    """With as many as there is room for and something to put into; fewer blocks a multiprocessor if need be."""
    each = -(-(k // STAGE_K) // config.CLUSTER)
    for resident in range(config.RESIDENT, 0, -1):
        room = SHARED_LIMIT // resident - RESERVED - replace(config, STAGES=0).shared(k)
        stages = min(room // ((config.ROWS + config.BN) * STAGE_K + 16), max(each, config.least_stages))
        if stages >= config.least_stages or resident == 1:
            break
    return replace(config, STAGES=max(stages, 0), RESIDENT=resident)


def along_k(scale: Tensor) -> bool:
    """Whether the four of 128 of K, of a line of `scale (B?, lines, K / 32)`, are a word in memory."""
    return scale.stride(-1) == 1 and scale.shape[-1] > 1 and _has_words(scale)


def has_words(scale: Tensor) -> bool:
    """Whether `scale (B?, lines, K / 32)` loads as words, along K or from line to line."""
    return along_k(scale) or _has_words(scale.mT)


def _has_words(scale: Tensor) -> bool:
    *steps, step = scale.stride()
    aligned = all(stride % 4 == 0 for size, stride in zip(scale.shape, steps, strict=False) if size > 1)
    return (step == 1 or scale.shape[-1] == 1) and aligned and scale.data_ptr() % 4 == 0


def plan(product: ScaledProduct, config: MxTilesConfig) -> tuple[CudaLaunch]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`, nothing empty; see `accepts`.

    `out` and `bias` are contiguous. A 2-D operand serves a whole batch. A constant b is read early.
    """
    (a, a_scale, _), (b, b_scale, _), out, bias = product.a, product.b, product.out, product.bias
    m, n, k, batch, target, constant = product.m, product.n, product.k, product.batch, product.target, product.constant
    macros: dict[str, int | str] = {
        "A_FP8": FP8[a.dtype],
        "B_FP8": FP8[b.dtype],
        "A_SCALES_ALONG_K": int(along_k(a_scale)),
        "B_SCALES_ALONG_K": int(along_k(b_scale.mT)),
        "OUT": ELEMENT[out.dtype],
        "BIAS": 0 if bias is None else ELEMENT[bias.dtype],
    }
    options = {
        "ROWS": config.ROWS, "TILES": 1, "WARPS_N": config.WARPS_N, "WARPS_K": config.WARPS_K,
        "STAGES": config.STAGES, "DEPTH": config.DEPTH, "CLUSTER": config.CLUSTER, "RESIDENT": config.RESIDENT,
        "W_CONSTANT": int(constant), "LATE": int(config.LATE),
    }  # fmt: skip
    grid = -(-n // config.BN) * config.CLUSTER, -(-m // config.ROWS), batch
    resident = min(grid[0] * grid[1] * batch, target.cores * config.RESIDENT)
    return (
        CudaLaunch(
            kernel=CudaKernel(
                "mx_tiles.cu", "mx_tiles", (*macros.items(), *options.items()),
                (Wgmma(config.ROWS, WGMMA_FP8[b.dtype], WGMMA_FP8[a.dtype]),),
            ),
            grid=grid,
            threads=config.threads,
            shared=config.shared(k),
            args={
                "a": TensorMap(tma_batch(a), (1, config.ROWS, STAGE_K), 128),
                "b": TensorMap(tma_batch(b.mT), (1, config.BN, STAGE_K), 128),
                "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "out": out, "M": m, "N": n, "K": k,
                "prefetched": PREFETCHED // (resident * config.BN * STAGE_K),
                "a_batched": int(a.dim() == 3), "b_batched": int(b.dim() == 3),
                "as_batch": batch_step(a_scale), "as_m": a_scale.stride(-2), "as_k": a_scale.stride(-1),
                "bs_batch": batch_step(b_scale), "bs_n": b_scale.stride(-1), "bs_k": b_scale.stride(-2),
            },
            target=target,
            options=options,
            overlaps=True,
            constant=("b", "b_scale") if constant else (),
            late=config.LATE,
        ),
    )  # fmt: skip
