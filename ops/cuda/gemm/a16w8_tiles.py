"""Few rows by an FP8 weight by TMA and wgmma: what it accepts, its configuration, its launch (`a16w8_tiles.cu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product as every
from typing import Final

import torch

from fp8fn.ops.cuda.gemm import gemv_a16w8
from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.limits import PREFETCHED, RESERVED, SHARED_LIMIT, ceil_power_of_two, largest_cluster
from fp8fn.ops.cuda.operands import (
    ELEMENT,
    FP8,
    PARTS,
    SCALES,
    WGMMA_FP8,
    beside_fault,
    has_pieces,
    is_k_contiguous,
    scale_step,
    strides_of_scales,
    tma_batch,
)
from fp8fn.ops.cuda.runtime.launch import Argument, CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block, round_up
from fp8fn.ops.operands import BESIDE, WeightProduct
from fp8fn.ops.tuning.divisions import Division, Divisions, read
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

STAGE_K: Final = 128  # elements of K in a stage
_PIECE: Final = 8  # elements of x that a thread loads at a time
MOST_ROWS: Final = 16
LEAST_STAGES: Final = 2  # in a ring
_MOST_AHEAD: Final = 6
_LONG: Final = 8  # stages of K, of a block's part that may not be read early
# Clusters, by their blocks, that find room at once on an H200 with two blocks on a multiprocessor: of 4 blocks 56 do,
# and 64 do not; of 7 blocks 36 do not.
_ROOM: Final = {4: 56, 6: 39, 7: 35, 8: 30}


@dataclass(frozen=True)
class ClusterConfig:
    """How blocks divide a product; `a16w8_tiles.cu` and `splitk_a16w8.cu` say what each does.

    `ROWS` of x by `16 * WARPS_N` columns of w, `STAGES` of K in flight, `CLUSTER` blocks along K, `RESIDENT` blocks on
    a multiprocessor at once; `LATE`, when the next launch may begin; `HELD` stages of the weight, which are widened
    ahead: blocks have equally long parts then, and as many stages.
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

    def steps(self, k: int) -> int:
        """The most that a block has."""
        return -(-stages_of(k) // self.CLUSTER)

    def __str__(self) -> str:
        late = " late" * self.LATE + f" held{self.HELD}" * (self.HELD > 0)
        return f"{self.ROWS}x{self.BN} stages{self.STAGES} cluster{self.CLUSTER} resident{self.RESIDENT}{late}"


@dataclass(frozen=True)
class A16W8TilesConfig(ClusterConfig):
    """`READY` of the held stages, of a constant weight, come before x is waited for; `X_OVER`: x overwrites them."""

    RESIDENT: int = 4
    READY: int = 0
    X_OVER: bool = False

    def shared(self, k: int, w_block: Block, parts: int) -> int:
        """Bytes of shared memory: stages, sums that arrive, barriers, and x and scales of a block's part of K."""
        steps, arriving = self.steps(k), arriving_bytes(self.ROWS, self.WARPS_N, self.CLUSTER)
        before = round_up(self.STAGES * (self.BN * STAGE_K + 16) + arriving + 8, 1024)
        x = steps * self.ROWS * ((0 if self.X_OVER else parts * STAGE_K) + 4)
        return before + x + scale_bytes(steps, self.BN, w_block)

    def __str__(self) -> str:
        return f"{super().__str__()}{f' ready{self.READY}' * (self.HELD > 0)}{' over' * self.X_OVER}"


def arriving_bytes(rows: int, warps_n: int, cluster: int) -> int:
    """Shared memory for the sums that a cluster's blocks send to one (`exchange.cuh`)."""
    return cluster * -(-warps_n // cluster) * 16 * rows * 4 if cluster > 1 else 0


def scale_bytes(steps: int, columns: int, w_block: Block) -> int:
    """Shared memory for the scales of a block's part of K, `steps` stages (`a16w8.cuh`)."""
    kind = SCALES[w_block]
    return 4 * (steps * columns if kind == "VECTOR" else steps * columns // 64 if kind == "BLOCK" else columns)


def stages_of(k: int) -> int:
    """Stages that K takes, of which the last one may have zeros behind it."""
    return -(-k // STAGE_K)


@cache
def divisions() -> Divisions[A16W8TilesConfig]:
    """Divisions that hold weights in registers, as were timed on an H200."""
    return read("a16w8_tiles.json", A16W8TilesConfig)


def accepts(product: WeightProduct) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    if (reason := gemv_a16w8.accepts(product)) is not None:
        return reason
    product = product.as_matrix()
    x, w, out = product.x, product.w.data, product.out
    if out.dtype == torch.float32:
        return "out of float32 shows what the tensor core's accumulators drop"
    if out.dim() == 3:
        return f"a batch of {out.shape[0]}"
    if out.shape[0] > MOST_ROWS:
        return f"x has {out.shape[0]} rows, more than {MOST_ROWS}"
    if x.shape[-1] % _PIECE:
        return f"K={x.shape[-1]} is no multiple of {_PIECE}"
    if not is_k_contiguous(w):
        return "columns of w are not contiguous"
    if not all(map(has_pieces, (x,) if product.up is None else (x, product.up))):
        return "rows of x do not begin at multiples of 16 bytes"
    config = configure(replace(product, constant=False))
    if config.STAGES < LEAST_STAGES:
        return f"x of K={x.shape[-1]} does not fit into shared memory"
    return None


def accepts_beside(product: WeightProduct) -> str | None:
    """None for products by several weights that `plan` takes in one launch, else the reason why not."""
    if product.up is not None:
        return "its rows are computed"
    if (reason := beside_fault(product, accepts)) is not None:
        return reason
    if None in _scale_steps(product):
        return strides_of_scales(product)
    return accepts(product)  # in the configuration of all columns, which needs more memory than that of each


def _scale_steps(product: WeightProduct) -> tuple[int | None, int | None]:
    """The strides of all weights' scales along K and along columns; None where two differ.

    The stride of an axis of size 1 does not matter: that of scales of channels, along K, is the number of columns.
    """
    scales = [product.w.scale, *(each.w.scale for each in product.beside)]
    s_k, s_n = ({scale.stride(axis) for scale in scales if scale.shape[axis] > 1} for axis in (-2, -1))
    s_k, s_n = s_k or {product.w.scale.stride(-2)}, s_n or {scale_step(product.w)}
    return s_k.pop() if len(s_k) == 1 else None, s_n.pop() if len(s_n) == 1 else None


def untuned(product: WeightProduct) -> str | None:
    """None where it was the faster one on an H200, else why not."""
    n, k, constant = product.n, product.k, product.constant
    rows = product.m * product.batch
    if rows == 1 and 1024 < k <= 2048 and 4096 <= n <= 6144 and not constant:
        return "one row by short columns of a weight that may not be read early is faster in registers"
    if rows <= 8 and (k < STAGE_K or (k == STAGE_K and n <= 3072)) and not constant:
        return "up to eight rows by no more than a stage of a weight that may not be read early are faster in registers"
    return None


def configure(product: WeightProduct) -> A16W8TilesConfig:
    """The default configuration of a product, see `choose_config`; that of several is that of their columns' number.

    Ahead of several is a kernel of another library, as compiled graphs have it, behind which held stages are no gain.
    """
    columns = product.n + sum(each.out.shape[-1] for each in product.beside)
    return choose_config(weight_problem(product)._replace(n=columns), held=not product.beside)


def choose_config(problem: WeightProblem, *, held: bool = True) -> A16W8TilesConfig:
    """By what was timed on an H200, in chains of products, at the shapes of decoding and of larger models.

    Of a constant weight a block holds its part where the blocks of two launches find room at once, so that those of the
    next one have theirs when x is there; of short K the blocks are few and wide, and those of several launches do. Else
    it has four stages at best, 128 columns wide, for each tile reads x anew, where that makes enough blocks. Else a
    part takes more time than x does, and fewer blocks along K have longer ones.

    Of others too the blocks of two launches find room at once, unless their parts would be too long, and the next
    launch begins late: what it asks for would delay this one. Parts of two stages, or three, are held.
    """
    n, k, w_block, cores, constant = problem.n, problem.k, problem.block, problem.cores, problem.constant
    rows, steps, parts = 8 if problem.m <= 8 else 16, stages_of(k), PARTS[problem.x_dtype]
    wide, narrow = -(-n // 128), -(-n // 64)
    most = max(1, min(8, steps // 2))
    late = not constant or (rows == 16 and steps >= 16)

    def fitted(warps: int, cluster: int, resident: int) -> A16W8TilesConfig:
        return _with_stages(A16W8TilesConfig(rows, warps, 0, cluster, resident, late), k, w_block, parts)

    if held and (found := _held(rows, problem)) is not None:
        return found
    if constant:
        if rows == 16 and cores < wide * 8 <= narrow * 8 <= 3 * cores and 16 <= steps <= 48:
            return fitted(4, 8, 3)
        if wide * most < (cores if rows == 8 else cores * 7 // 10):
            return fitted(4, most, 3 if rows == 8 else 2)
        cluster = min(4, most) if wide >= cores else min(most, -(-steps // 4))
        # With two blocks on a multiprocessor 30 clusters of 8 are resident, with three 45.
        crowded = cluster == 8 and 30 < wide <= 45
        if crowded and steps > 48:
            cluster, crowded = 6, False
        if not crowded and steps <= 32 and _ROOM.get(cluster, wide) < wide <= 64:
            crowded = rows == 8 and cluster == 6 and wide < 56
            if not crowded:
                cluster = 4 if wide <= _ROOM[4] else 3
        return fitted(8, cluster, 3 if crowded else 2)

    if 5 * wide * most < 2 * cores:
        return fitted(4, most, 2)
    if wide >= cores:
        return fitted(8, min(4, most), 2)
    # The most blocks along K that have equally much each and are not more than multiprocessors.
    cluster = max(c for c in range(1, most + 1) if c == 1 or (steps % c == 0 and wide * c <= cores))
    if steps > _LONG * cluster:
        # Wider blocks leave some multiprocessors idle, and all find room at once where clusters of 6 would not.
        alone = min(most, cores * 13 // (15 * -(-n // 192)))
        if alone >= 3 and steps <= 12 * alone and 11 * wide > 3 * cores:
            config = fitted(12, alone, 1)
            return replace(config, STAGES=min(config.STAGES, 4))
        return fitted(8, min(most, 6, -(-steps // 4)), 2)
    if rows == 8 and (cluster <= 2 or steps <= 4 * cluster) and 10 * narrow * cluster <= 17 * cores:
        resident = 2 if steps <= 4 * cluster else 3 if 2 * narrow * cluster <= 3 * cores else 4
        return fitted(4, cluster, resident)
    # Early where two launches all but fill the chip: 36 of 39 clusters of 6.
    late = cluster != 6 or 4 * wide * cluster <= 3 * cores or steps <= 4 * cluster
    # With two blocks on a multiprocessor a second launch of that many clusters would find no room.
    crowded = cluster >= 4 and steps <= 4 * cluster and 20 * wide * cluster > 19 * cores
    return fitted(8, cluster, 3 if crowded else 2)


def _held(rows: int, problem: WeightProblem) -> A16W8TilesConfig | None:
    """The first of the table whose blocks are neither too few nor too many."""
    for division, config in _that_fit(rows, problem):
        if division.has(-(-problem.n // config.BN) * config.CLUSTER, problem.cores):
            return config
    return None


def _all_held(rows: int, problem: WeightProblem) -> Iterator[A16W8TilesConfig]:
    """The divisions of the table with about as many blocks as multiprocessors, whatever the table's own bounds are."""
    for _, config in _that_fit(rows, problem):
        if problem.cores <= 4 * -(-problem.n // config.BN) * config.CLUSTER <= 16 * problem.cores:
            yield config


def _that_fit(rows: int, problem: WeightProblem) -> Iterator[tuple[Division[A16W8TilesConfig], A16W8TilesConfig]]:
    """The divisions of the table whose blocks have equally long parts and find room.

    A division without STAGES holds the whole of a block's part.
    """
    k, cores, parts = problem.k, problem.cores, PARTS[problem.x_dtype]
    for division in divisions().get((problem.constant, rows), ()):
        for cluster, stages in division.parts(stages_of(k)):
            config = division.config
            # A stage takes 16 registers of a thread, and so do the sums of a third part of 16 rows, of two stages.
            full = parts == 3 and config.ROWS == 16 and config.HELD > 3
            count = min(config.HELD, stages) - full
            config = replace(config, CLUSTER=cluster, STAGES=stages, HELD=count, READY=min(config.READY, count))
            room = SHARED_LIMIT // config.RESIDENT - RESERVED
            if cluster <= largest_cluster(cores) and config.shared(k, problem.block, parts) <= room:
                yield division, config


def candidates(problem: WeightProblem) -> tuple[A16W8TilesConfig, ...]:
    """The configurations to measure a problem in, the default one first; at most 16 rows by lines along K."""
    if problem.m > MOST_ROWS or problem.batch > 1 or not problem.k_lines or problem.k % _PIECE:
        return ()
    k, parts, rows = problem.k, PARTS[problem.x_dtype], 8 if problem.m <= 8 else 16
    found = [choose_config(problem), *_all_held(rows, problem)]
    late = (False, True) if problem.constant else (True,)
    for warps, cluster, resident, later in every((4, 8, 12), range(1, 9), (2, 3), late):
        if cluster <= stages_of(k) // 2 or cluster == 1:
            found.append(
                _with_stages(A16W8TilesConfig(rows, warps, 0, cluster, resident, later), k, problem.block, parts)
            )
    return tuple(dict.fromkeys(config for config in found if (1 if config.HELD else LEAST_STAGES) <= config.STAGES))


def _with_stages(config: A16W8TilesConfig, k: int, w_block: Block, parts: int) -> A16W8TilesConfig:
    """With as many as there is room for and something to put into; fewer blocks a multiprocessor if need be.

    Two stages' sums take `parts * ROWS` registers of a thread; more blocks than leave it 42 beside them would spill.
    """
    wanted = min(config.steps(k), 3)
    for resident in range(config.RESIDENT, 0, -1):
        config = replace(config, STAGES=0, RESIDENT=resident)
        room = (SHARED_LIMIT // resident - RESERVED - config.shared(k, w_block, parts)) // 1024 * 1024
        stages = min(room // (config.BN * STAGE_K + 16), max(config.steps(k), LEAST_STAGES))
        if stages >= wanted and parts * config.ROWS + 42 <= 65536 // (resident * config.threads):
            break
    return replace(config, STAGES=max(stages, 0))


def plan(product: WeightProduct, config: A16W8TilesConfig) -> tuple[CudaLaunch]:
    """The launch of a product that `accepts` accepts, of which nothing is empty."""
    product = product.as_matrix()
    m, n, k, target, constant = product.m, product.n, product.k, product.target, product.constant
    x, (w, w_scale, w_block), bias, out = product.x, product.w, product.bias, product.out
    rows = min(ceil_power_of_two(m), config.ROWS)
    items, threads = rows * config.steps(k), 32 * config.WARPS_N
    lanes = 16 if 16 * items <= threads and threads // 16 % rows == 0 else 8  # for all to have work
    macros: dict[str, int | str] = {
        "INPUT": ELEMENT[x.dtype], "A_FP8": "Fp8::E4M3", "B_FP8": FP8[w.dtype],
        "TAIL": int(k % STAGE_K > 0), "SCALE": SCALES[w_block], "OUT": ELEMENT[out.dtype],
        "BIAS": 0 if bias is None else ELEMENT[bias.dtype], "GATED": int(product.up is not None),
        "BESIDE": len(product.beside),
    }  # fmt: skip
    options = {
        "ROWS": config.ROWS, "TILES": 1, "WARPS_N": config.WARPS_N, "WARPS_K": 1,
        "STAGES": config.STAGES, "X_ROWS": rows, "LANES": lanes,
        "AHEAD": min(-(-items * lanes // threads), _MOST_AHEAD), "CLUSTER": config.CLUSTER,
        "RESIDENT": config.RESIDENT, "W_CONSTANT": int(constant), "LATE": int(config.LATE),
        "HELD": config.HELD, "READY": config.READY, "X_OVER": int(config.X_OVER),
    }  # fmt: skip
    s_k, s_n = _scale_steps(product)
    box, tiles_n = (1, config.BN, STAGE_K), -(-n // config.BN)
    others: dict[str, Argument] = {}
    for name, (weight, its_bias, its_out) in zip(BESIDE, product.beside, strict=False):
        columns = its_out.shape[-1]
        tiles_n += -(-columns // config.BN)
        others |= {
            f"w_{name}": TensorMap(tma_batch(weight.data.mT), box, 128), f"w_{name}_scale": weight.scale,
            f"bias_{name}": its_bias, f"out_{name}": its_out, f"n_{name}": columns,
        }  # fmt: skip
    grid = tiles_n * config.CLUSTER, -(-m // config.ROWS), 1
    wgmma = Wgmma(PARTS[x.dtype] * config.ROWS, WGMMA_FP8[w.dtype], "e4m3")
    resident = min(grid[0] * grid[1], target.cores * config.RESIDENT)
    return (
        CudaLaunch(
            kernel=CudaKernel(
                "a16w8_tiles.cu", "a16w8_tiles", (*macros.items(), *options.items()),
                (wgmma, replace(wgmma, a_in_registers=True)) if config.HELD else (wgmma,),
            ),
            grid=grid,
            threads=config.threads,
            shared=config.shared(k, w_block, PARTS[x.dtype]),
            args={
                "x": x, "w": TensorMap(tma_batch(w.mT), box, 128), "w_scale": w_scale, "bias": bias,
                "out": out, "M": m, "n": n, "K": k, "prefetched": PREFETCHED // (resident * config.BN * STAGE_K),
                "x_m": x.stride(-2), "s_k": s_k, "s_n": s_n,
                "bias_n": 0 if bias is None else bias.stride(-1),
                "up": product.up, "up_m": 0 if product.up is None else product.up.stride(-2), **others,
            },
            target=target,
            options=options,
            overlaps=True,
            constant=("w", "w_scale", *(name for name in others if name.startswith("w_"))) if constant else (),
            binds={} if product.up is None else {"x": "gate"},
            late=config.LATE,
        ),
    )  # fmt: skip
