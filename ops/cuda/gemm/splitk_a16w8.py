"""9 to 128 rows by an FP8 weight, K shared by clusters: what it accepts, its configuration, its launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm import gemv_a16w8
from fp8fn.ops.cuda.gemm.a16w8_tiles import LEAST_STAGES, STEP, arriving_bytes, scale_bytes, stages_of
from fp8fn.ops.cuda.gemm.operands import as_batch, as_matrix, column_steps, map_fault, types_of
from fp8fn.ops.cuda.gemm.wgmma import wgmma_source
from fp8fn.ops.cuda.limits import (
    PREFETCHED,
    RESERVED,
    SHARED_LIMIT,
    ceil_power_of_two,
    floor_power_of_two,
    largest_cluster,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import Target

_MOST_CLUSTER: Final = 8
_SHORT: Final = 4  # stages of K
_FEW: Final = 8  # rows


@dataclass(frozen=True)
class Config:
    """How blocks divide a product; `splitk_a16w8.cu` says what each does.

    `ROWS` of x by `16 * WARPS_N` columns of w, `STAGES` of K in flight, `CLUSTER` blocks along K, `RESIDENT` blocks on
    a multiprocessor at once; `LATE`, when the next launch may begin; `HELD` stages of the weight are widened ahead:
    blocks have equally long parts then, and as many stages.
    """

    ROWS: int
    WARPS_N: int = 4
    STAGES: int = 0
    CLUSTER: int = 1
    RESIDENT: int = 2
    LATE: bool = False
    HELD: int = 0

    @property
    def BN(self) -> int:
        return 16 * self.WARPS_N

    @property
    def threads(self) -> int:
        return 32 * (self.WARPS_N + (not self.HELD))

    @property
    def stage(self) -> int:
        """Bytes of shared memory: both operands and two barriers."""
        return (self.BN + 2 * self.ROWS) * STEP + 16

    def steps(self, k: int) -> int:
        """The most that a block has."""
        return -(-stages_of(k) // self.CLUSTER)

    def shared(self, k: int, w_block: Block) -> int:
        """Bytes of shared memory: stages, sums that arrive, barriers, and the scales of a block's part of K."""
        arriving = arriving_bytes(self.ROWS, self.WARPS_N, self.CLUSTER)
        return self.STAGES * self.stage + arriving + 24 + scale_bytes(self.steps(k), self.BN, w_block)

    def __str__(self) -> str:
        late = " late" * self.LATE + f" held{self.HELD}" * (self.HELD > 0)
        return f"{self.ROWS}x{self.BN} stages{self.STAGES} cluster{self.CLUSTER} resident{self.RESIDENT}{late}"


class Whole(NamedTuple):
    """Where the whole of a block's part of K is in flight: by `fewest` to `most` blocks on 132 multiprocessors.

    Of the divisions `along` K it is the first whose parts have that many `stages` each.
    """

    fewest: int
    most: int
    config: Config
    stages: range
    along: range = range(16, 0, -1)


# By rows, the first that fits: of a constant weight, and of others.
_WHOLE: Final = {
    16: (
        Whole(36, 72, Config(16, 8, RESIDENT=1, HELD=6), range(2, 3), range(1, 2)),
        Whole(36, 56, Config(16, 8, RESIDENT=1, HELD=6), range(3, 7), range(1, 2)),
        Whole(44, 56, Config(16, 8, RESIDENT=1, HELD=6), range(2, 4), range(8, 1, -1)),
        Whole(44, 56, Config(16, 8, RESIDENT=1, HELD=6), range(6, 7), range(4, 1, -1)),
        Whole(16, 132, Config(16, HELD=6), range(1, 4), range(1, 2)),
        Whole(44, 132, Config(16, HELD=6), range(4, 6), range(1, 2)),
        Whole(20, 132, Config(16, HELD=6), range(1, 4), range(8, 1, -1)),
        Whole(20, 132, Config(16, HELD=6), range(4, 6), range(8, 3, -1)),
        Whole(20, 96, Config(16, HELD=6), range(1, 5), range(12, 8, -1)),
        Whole(20, 96, Config(16, HELD=6), range(4, 5), range(16, 12, -1)),
        Whole(120, 132, Config(16, HELD=6), range(4, 5), range(2, 4)),
        Whole(132, 190, Config(16, RESIDENT=3, HELD=3), range(1, 2), range(8, 2, -1)),
        Whole(132, 264, Config(16, RESIDENT=3, HELD=3), range(1, 2), range(1, 2)),
        Whole(190, 264, Config(16, RESIDENT=3, HELD=3), range(4, 5), range(1, 2)),
        Whole(190, 264, Config(16, HELD=6), range(8, 9), range(1, 2)),
        Whole(20, 150, Config(16, HELD=6), range(7, 9), range(16, 12, -1)),
    ),
    32: (
        Whole(44, 64, Config(32, 8, RESIDENT=1, HELD=5), range(2, 7), range(1, 2)),
        Whole(16, 132, Config(32, HELD=5), range(1, 4), range(1, 2)),
        Whole(30, 132, Config(32, HELD=5), range(4, 6), range(1, 2)),
        Whole(60, 132, Config(32, HELD=5), range(6, 7), range(1, 2)),
        Whole(60, 132, Config(16, HELD=6), range(1, 5), range(16, 8, -1)),
        Whole(60, 264, Config(16, RESIDENT=3, HELD=3), range(2, 4), range(8, 1, -1)),
        Whole(80, 264, Config(16, RESIDENT=3, HELD=3), range(1, 2), range(12, 1, -1)),
        Whole(80, 200, Config(16, HELD=6), range(4, 6), range(8, 1, -1)),
        Whole(132, 232, Config(16, RESIDENT=3, HELD=3), range(4, 5), range(16, 8, -1)),
        Whole(60, 150, Config(16, HELD=6), range(7, 9), range(16, 12, -1)),
        Whole(110, 150, Config(32, RESIDENT=3, HELD=2, LATE=True), range(3, 5), range(4, 1, -1)),
        Whole(132, 232, Config(32, HELD=5), range(4, 7), range(8, 1, -1)),
        Whole(132, 232, Config(16, HELD=6), range(4, 5), range(8, 1, -1)),
        Whole(190, 264, Config(32, HELD=5), range(4, 5), range(1, 2)),
        Whole(60, 110, Config(32, HELD=5, LATE=True), range(4, 7), range(8, 1, -1)),
        Whole(20, 60, Config(32, HELD=5, LATE=True), range(2, 5), range(16, 1, -1)),
        Whole(40, 100, Config(32, 8, RESIDENT=1, HELD=5, LATE=True), range(7, 9), range(16, 1, -1)),
    ),
    64: (
        Whole(16, 200, Config(32, HELD=5), range(2, 4), range(1, 2)),
        Whole(16, 132, Config(32, HELD=5), range(4, 6), range(1, 2)),
        Whole(16, 170, Config(32, HELD=5), range(6, 7), range(1, 2)),
        Whole(60, 200, Config(32, HELD=5, LATE=True), range(2, 7), range(2, 9)),
        Whole(30, 60, Config(32, HELD=5, LATE=True), range(2, 5), range(8, 1, -1)),
        Whole(60, 200, Config(32, HELD=5, LATE=True), range(2, 7), range(9, 17)),
        Whole(16, 132, Config(64, HELD=4, LATE=True), range(2, 5), range(1, 2)),
        Whole(56, 84, Config(32, 8, RESIDENT=1, HELD=5, LATE=True), range(7, 9), range(8, 1, -1)),
    ),
    128: (
        Whole(16, 100, Config(32, HELD=5), range(2, 7), range(1, 2)),
        Whole(100, 132, Config(32, HELD=5, LATE=True), range(2, 7), range(1, 2)),
        Whole(44, 200, Config(32, HELD=5, LATE=True), range(3, 7), range(2, 9)),
        Whole(56, 200, Config(64, HELD=4, LATE=True), range(2, 5), range(1, 2)),
    ),
}
_WHOLE_LATE: Final = {
    16: (
        Whole(16, 100, Config(16, HELD=6, LATE=True), range(1, 4)),
        Whole(100, 150, Config(16, RESIDENT=3, HELD=3, LATE=True), range(1, 4), range(8, 0, -1)),
        Whole(150, 210, Config(16, RESIDENT=3, HELD=3, LATE=True), range(1, 2)),
        Whole(110, 132, Config(16, RESIDENT=3, HELD=3, LATE=True), range(4, 5), range(2, 3)),
        Whole(16, 132, Config(16, RESIDENT=3, HELD=3, LATE=True), range(4, 5), range(16, 12, -1)),
        Whole(16, 132, Config(16, HELD=6, LATE=True), range(7, 8), range(16, 12, -1)),
        Whole(132, 264, Config(16, RESIDENT=3, HELD=3, LATE=True), range(1, 2), range(1, 2)),
    ),
    32: (
        Whole(16, 168, Config(16, RESIDENT=3, HELD=3, LATE=True), range(1, 4)),
        Whole(168, 210, Config(16, RESIDENT=3, HELD=3, LATE=True), range(1, 2)),
        Whole(60, 132, Config(16, HELD=6, LATE=True), range(4, 5), range(16, 8, -1)),
        Whole(16, 100, Config(32, HELD=5, LATE=True), range(1, 4), range(1, 5)),
        Whole(60, 84, Config(32, HELD=5, LATE=True), range(1, 5), range(12, 0, -1)),
    ),
}


def accepts(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out: Tensor, target: Target
) -> str | None:
    """None where `plan` takes these operands, else the reason why not."""
    if (reason := gemv_a16w8.accepts(x, w, w_scale, w_block, bias, out, target)) is not None:
        return reason
    x, out = as_matrix(x, w, bias, out)
    for name, operand in (("x", x), ("w.mT", w.mT)):
        if (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    (m, n), k = out.shape[-2:], x.shape[-1]
    if _ring(m, n, k, out.shape[0] if out.dim() == 3 else 1, w_block, target.cores, False).STAGES < LEAST_STAGES:
        return f"the scales of K={k} do not fit into shared memory"
    return None


def untuned(m: int, n: int, k: int, batches: int, w_block: Block, cores: int, *, constant: bool = False) -> str | None:
    """None where it was the fastest one on an H200, else why not: `a16w8_tiles`, `mm_a16w8` or `gemv_a16w8` was."""
    if _whole(m, n, k, batches, w_block, cores, constant) is not None:
        return None
    tiles, steps = _tiles(n, batches), stages_of(k)
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


def configure(m: int, n: int, k: int, batches: int, w_block: Block, cores: int, *, constant: bool = False) -> Config:
    """By what was timed on an H200, in chains of products: the whole of K in flight where a table has it, or a ring."""
    whole = _whole(m, n, k, batches, w_block, cores, constant)
    return whole or _ring(m, n, k, batches, w_block, cores, constant)


def _whole(m: int, n: int, k: int, batches: int, w_block: Block, cores: int, constant: bool) -> Config | None:
    """The first of the table that divides K evenly, into as many blocks as it has, which find room."""
    if m <= _FEW:
        return None
    steps = stages_of(k)
    for entry in (_WHOLE if constant else _WHOLE_LATE).get(max(16, ceil_power_of_two(m)), ()):
        config = entry.config
        tiles = -(-n // config.BN) * -(-m // config.ROWS) * batches
        for cluster in entry.along:
            stages, rest = divmod(steps, cluster)
            if rest or stages not in entry.stages or cluster > largest_cluster(cores):
                continue
            found = replace(config, STAGES=stages, CLUSTER=cluster, HELD=min(config.HELD, stages))
            room = SHARED_LIMIT // config.RESIDENT - RESERVED
            if entry.fewest * cores <= 132 * tiles * cluster <= entry.most * cores and found.shared(k, w_block) <= room:
                return found
    return None


def _ring(m: int, n: int, k: int, batches: int, w_block: Block, cores: int, constant: bool) -> Config:
    """Stages that are filled anew.

    Of little to do there is about a block for each multiprocessor, beside those of the next launch, which begins late.
    Else there are as many as find room at once, of four stages of K or more, and the next launch begins late where it
    may not read early, or would put its blocks beside whole tiles. 64 rows have half as many blocks: sums take longer.
    """
    columns, steps = _tiles(n, batches), stages_of(k)
    halves = columns * -(-m // 32)
    rows = 32 if m <= 32 or (halves <= cores and halves * steps < 11 * cores) else 64
    tiles = columns * -(-m // rows)
    little = tiles * steps < (11 if rows == 32 else 13) * cores
    if little:
        wanted = cores * 11 // 10 if rows == 32 else cores * 3 // 4
        cluster = floor_power_of_two(wanted // tiles) if 2 * tiles <= cores else 1
    else:
        cluster = (cores * 13 // 5 if rows == 32 else cores * 7 // 4) // tiles
        if cluster <= 1 and tiles <= cores and steps > 8 * _SHORT:
            cluster = 2
    least = 2 if 5 * tiles * (steps // 4) < 2 * cores else 4  # stages of a block
    cluster = max(1, min(cluster, steps // least, _MOST_CLUSTER))
    resident = 3 if rows == 32 and not little and cluster > 1 else 2
    late = little or not constant or cluster == 1
    return with_stages(Config(rows, 4, 0, cluster, resident, late), k, w_block)


def _tiles(n: int, batches: int) -> int:
    """Of 64 columns."""
    return -(-n // 64) * batches


def with_stages(config: Config, k: int, w_block: Block) -> Config:
    """With as many as there is room for and something to put into; fewer blocks a multiprocessor if need be."""
    steps = config.steps(k)
    for resident in range(config.RESIDENT, 0, -1):
        room = SHARED_LIMIT // resident - RESERVED - replace(config, STAGES=0).shared(k, w_block)
        stages = min(room // config.stage, max(steps, LEAST_STAGES))
        if stages >= min(steps, 3):
            break
    return replace(config, STAGES=max(stages, 0), RESIDENT=resident)


def plan(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out: Tensor, target: Target,
    config: Config | None = None, *, constant: bool = False,
) -> CudaLaunch:  # fmt: skip
    """The launch of `out (B?, M, N) = x (B?, M, K) @ (w (B?, K, N) * w_scale) + bias`, nothing empty; see `accepts`.

    `out` is contiguous. A 2-D operand serves a whole batch; `bias` is `(N)`, `(B, N)` or `(B, 1, N)`.
    """
    x, out = as_matrix(x, w, bias, out)
    (m, n), k = out.shape[-2:], x.shape[-1]
    batches = out.shape[0] if out.dim() == 3 else 1
    config = config or configure(m, n, k, batches, w_block, target.cores, constant=constant)
    macros = types_of(x, w, w_block, bias, out)
    options = {
        "ROWS": config.ROWS, "TILES": 1, "WARPS_N": config.WARPS_N, "WARPS_K": 1, "STAGES": config.STAGES,
        "CLUSTER": config.CLUSTER, "RESIDENT": config.RESIDENT, "W_CONSTANT": int(constant), "LATE": int(config.LATE),
        "HELD": config.HELD,
    }  # fmt: skip
    kind = "bf16" if x.dtype == torch.bfloat16 else "f16"
    grid = -(-n // config.BN) * config.CLUSTER, -(-m // config.ROWS), batches
    resident = min(grid[0] * grid[1] * grid[2], target.cores * config.RESIDENT)
    return CudaLaunch(
        kernel=CudaKernel(
            "splitk_a16w8.cu", "splitk_a16w8", (*macros.items(), *options.items()),
            wgmma_source(config.ROWS, kind, kind, a_in_registers=True),
        ),
        grid=grid,
        threads=config.threads,
        shared=config.shared(k, w_block),
        args={
            "x": TensorMap(as_batch(x), (1, config.ROWS, 64), 128),
            "w": TensorMap(as_batch(w.mT), (1, config.BN, STEP), 128),
            "w_scale": w_scale, "bias": bias, "out": out, "M": m, "N": n, "K": k,
            "prefetched": PREFETCHED // (resident * config.BN * STEP),
            "x_batched": int(x.dim() == 3), "w_batched": int(w.dim() == 3),
            **column_steps(w_scale, w_block, bias),
        },
        target=target,
        options=options,
        overlaps=True,
        constant=("w", "w_scale") if constant else (),
        late=config.LATE,
    )  # fmt: skip
