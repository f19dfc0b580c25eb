"""Few rows by an FP8 weight on Hopper in CUDA C++: what it accepts, its configuration, its launch (`gemv_a16w8.cu`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from fp8fn.ops.cuda.limits import (
    LARGEST,
    MOST_BLOCKS,
    RESERVED,
    SHARED_LIMIT,
    ceil_power_of_two,
    floor_power_of_two,
)
from fp8fn.ops.cuda.operands import (
    SCALES,
    SIXTEEN_BITS,
    batch_step,
    column_steps,
    has_pieces,
    is_k_contiguous,
    map_fault,
    weight_product_types,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import round_up
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import OCP, hopper_fault
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

# Rows of x: past them a tile of a larger kernel reads the weight fewer times.
MOST_ROWS: Final = 128
_WARPS: Final = 8
_LARGEST_CLUSTER: Final = 8


@dataclass(frozen=True)
class GemvConfig:
    """How blocks divide a product; `gemv_a16w8.cu` says what each does.

    `ROWS` of x and `16 * TILES` columns of w a warp, `WARPS_N` x `WARPS_K` warps a block, `CLUSTER` blocks along K,
    `UNROLL` units in flight, `RESIDENT` blocks on a multiprocessor at once.
    """

    ROWS: int = 8
    TILES: int = 1
    WARPS_N: int = 1
    WARPS_K: int = 8
    UNROLL: int = 4
    CLUSTER: int = 1
    RESIDENT: int = 3

    @property
    def BN(self) -> int:
        return 16 * self.TILES * self.WARPS_N

    @property
    def threads(self) -> int:
        return 32 * self.WARPS_N * self.WARPS_K

    def __str__(self) -> str:
        warps = f"{self.WARPS_N}x{self.WARPS_K}"
        return f"{self.ROWS}x{self.BN} warps{warps} unroll{self.UNROLL} cluster{self.CLUSTER} resident{self.RESIDENT}"


def accepts(product: WeightProduct) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    product = product.as_matrix()
    x, (w, w_scale, w_block), bias, out = product.x, product.w, product.bias, product.out
    target = product.target
    if (reason := hopper_fault(target)) is not None:
        return reason
    if x.dtype not in SIXTEEN_BITS:
        return f"x has dtype {x.dtype}, not 16 bits"
    if w.dtype not in OCP:
        return f"w has dtype {w.dtype}"
    if w_block not in SCALES or w_scale.dtype != torch.float32:
        return f"scales of {w_scale.dtype} in blocks of {w_block} are not float32 ones that hold along K"
    rows = MOST_ROWS if is_k_contiguous(w) else MOST_ROWS // 4
    if out.shape[-2] > rows:
        return f"x has {out.shape[-2]} rows a matrix, more than {rows}"
    if (fault := map_fault(w.mT if is_k_contiguous(w) else w)) is not None:
        return f"w {fault}"
    if out.dim() == 3 and out.shape[0] > MOST_BLOCKS:
        return f"a batch of {out.shape[0]} is more than a grid has"
    given = (each for each in (x, product.up, w, w_scale, bias) if each is not None)
    strides = [step for each in given for step in each.stride()]
    if max(*x.shape, *w.shape, *strides) > LARGEST:
        return "a size or a stride is past 32 bits"
    return None


def configure(product: WeightProduct) -> GemvConfig:
    """The default configuration of a product; see `choose_config`."""
    return choose_config(weight_problem(product))


def choose_config(problem: WeightProblem) -> GemvConfig:
    """The default: blocks so that all multiprocessors wait for memory at once, and no more rows of x than needed."""
    m, n, batches, k_contiguous, cores = problem.m, problem.n, problem.batch, problem.k_lines, problem.cores
    rows = min(8 * ceil_power_of_two(-(-m // 8)), 64 if k_contiguous else 16)
    units = -(-problem.k // (64 if k_contiguous else 32))
    if k_contiguous and rows <= 32:
        return choose_few(m, n, units, batches, rows, cores)
    return _choose_many(m, n, units, batches, rows, k_contiguous, cores)


def candidates(problem: WeightProblem) -> tuple[GemvConfig, ...]:
    """The configurations to measure a problem in, the default one first: others share K by other clusters."""
    if problem.m > (MOST_ROWS if problem.k_lines else MOST_ROWS // 4):
        return ()
    default = choose_config(problem)
    units = -(-problem.k // (64 if problem.k_lines else 32))
    clusters = [c for c in (1, 2, 4, 8) if c == 1 or c * default.WARPS_K <= units]
    others = (replace(default, CLUSTER=c, RESIDENT=r) for c in clusters for r in range(1, default.RESIDENT + 1))
    return tuple(dict.fromkeys([default, *others]))


def choose_few(m: int, n: int, units: int, batches: int, rows: int, cores: int) -> GemvConfig:
    """Up to 32 rows of x by a weight whose columns are lines: by what was timed on an H200 at the shapes of decoding.

    Every block reads its part of x: one row costs little, so that K is shared by the warps of a block; more rows are
    read by wide blocks, and K is shared by a cluster. One wave of blocks is fastest, of three on two multiprocessors.
    """
    wanted = cores * (19 if 1 < m <= 8 else 14) // 10

    def divide(wide: int) -> tuple[int, int, int]:
        """Warps side by side, warps along K, blocks before K is shared by clusters."""
        warps_k = min(_WARPS // wide, floor_power_of_two(units))
        warps_n = min(_WARPS // warps_k, ceil_power_of_two(-(-n // 16)))
        return warps_n, warps_k, -(-n // (16 * warps_n)) * -(-m // rows) * batches

    def most_clusters(warps_k: int) -> int:
        return min(_LARGEST_CLUSTER, floor_power_of_two(max(units // warps_k, 1)))

    if m <= 8 and batches == 1 and _is_large(n, units, cores):  # many waves, so that none is waited for
        warps_n, warps_k, blocks = divide(1 if m == 1 else 2)
        cluster = 1 if blocks >= wanted else min(2, most_clusters(warps_k))
        unroll = min(4, -(-units // (warps_k * cluster)))
        return GemvConfig(rows, 1, warps_n, warps_k, unroll, cluster, 3 if blocks > 6 * cores else 2)
    wide = 1 if m == 1 else 4 if m <= 8 else 8
    warps_n, warps_k, blocks = divide(wide)
    # In a batch each block reads another x.
    while wide > 1 and (blocks < cores if batches > 1 else blocks * most_clusters(warps_k) < wanted):
        wide //= 2
        warps_n, warps_k, blocks = divide(wide)
    while wide < _WARPS and blocks > 3 * cores:
        wide *= 2
        warps_n, warps_k, blocks = divide(wide)
    tiles = 2 if rows > 8 and blocks > 3 * cores and 32 * warps_n <= n else 1
    cluster = 1
    while cluster < most_clusters(warps_k) and blocks * cluster < (cores // 2 if batches > 1 else wanted):
        cluster *= 2
    each = -(-units // (warps_k * cluster))
    many = blocks * cluster > 2 * cores
    unroll = 1 if tiles == 2 or blocks * cluster > (3 if m == 1 else 2.25) * cores else 2
    return GemvConfig(rows, tiles, warps_n, warps_k, min(unroll, each), cluster, 3 if many and 1 < m <= 16 else 2)


def _is_large(n: int, units: int, cores: int) -> bool:
    """Whether a weight of lines along K is more than two launches can hold on all multiprocessors at once."""
    return -(-n // 16) * units > 120 * cores


def _choose_many(m: int, n: int, units: int, batches: int, rows: int, k_contiguous: bool, cores: int) -> GemvConfig:
    """Wide blocks read x seldom: its bytes are at most those of the weight. Then K is shared by warps, as long as each
    has two units of it and one wave of blocks does it, and by a cluster, until two multiprocessors have three blocks.
    """
    tiles = (2 if units > 16 else 1) if k_contiguous else 8
    width = 16 * tiles
    needed = 2 * min(m, rows)  # columns

    def blocks(warps_k: int) -> int:
        return -(-n // (width * _WARPS // warps_k)) * -(-m // rows) * batches

    warps_k = _WARPS
    while warps_k > 1 and (
        2 * warps_k > units or width * _WARPS // warps_k < needed or (units < 8 * warps_k and blocks(warps_k) > cores)
    ):
        warps_k //= 2
    warps_n = min(_WARPS // warps_k, ceil_power_of_two(-(-n // width)))
    cluster = 1
    while cluster < _LARGEST_CLUSTER and 2 * blocks(warps_k) * cluster < 3 * cores and units > 2 * warps_k * cluster:
        cluster *= 2
    each = -(-units // (warps_k * cluster))
    unroll = tiles if k_contiguous else 2 if rows == 8 else 1
    # One block on a multiprocessor: the registers of two would spill.
    return GemvConfig(rows, tiles, warps_n, warps_k, min(unroll, each), cluster, 1)


def plan(product: WeightProduct, config: GemvConfig) -> tuple[CudaLaunch]:
    """The launch of a product that `accepts` accepts, of which nothing is empty. `constant` has no effect."""
    product = product.as_matrix()
    m, n, k, x, w = product.m, product.n, product.k, product.x, product.w.data
    k_contiguous = is_k_contiguous(w)
    chunk, received, shared = _chunk_that_fits(m, k, k_contiguous, config)
    macros = {
        **weight_product_types(product),
        "K_CONTIGUOUS": int(k_contiguous),
        "EVEN_K": int(k % 16 == 0),
        "X_PIECES": int(has_pieces(x)),
    }
    options = {
        "ROWS": config.ROWS, "TILES": config.TILES, "WARPS_N": config.WARPS_N, "WARPS_K": config.WARPS_K,
        "UNROLL": config.UNROLL, "CLUSTER": config.CLUSTER, "RESIDENT": config.RESIDENT, "K_CHUNK": chunk,
    }  # fmt: skip
    return (
        CudaLaunch(
            kernel=CudaKernel("gemv_a16w8.cu", "gemv_a16w8", (*macros.items(), *options.items())),
            grid=(-(-n // config.BN) * config.CLUSTER, -(-m // config.ROWS), product.batch),
            threads=config.threads,
            shared=shared,
            args={
                "x": x, "w": w, "w_scale": product.w.scale, "bias": product.bias, "out": product.out,
                "M": m, "N": n, "K": k, "received": received,
                "x_batch": batch_step(x), "x_m": x.stride(-2), "x_k": x.stride(-1),
                "w_batch": batch_step(w), "w_line": w.stride(-1 if k_contiguous else -2),
                **column_steps(product),
            },
            target=product.target,
            options={**options, "K_CONTIGUOUS": int(k_contiguous)},
            overlaps=True,
        ),
    )  # fmt: skip


def _chunk_that_fits(m: int, k: int, k_contiguous: bool, config: GemvConfig) -> tuple[int, int, int]:
    padding, unit = (16, 64) if k_contiguous else (64, 32)
    rows = min(m, config.ROWS)
    held = config.ROWS if config.ROWS > 8 else rows
    return divide_memory(rows, held * 128 * 2, held * padding, k, unit, config)


def divide_memory(rows: int, part: int, padding: int, k: int, unit: int, config: GemvConfig) -> tuple[int, int, int]:
    """How much of K of x lies in shared memory at a time, where sums arrive there, and its bytes.

    There is room for x, `part` bytes for 128 of K and `padding` beside them, and for sums of `rows` rows.
    """
    sums = config.WARPS_K * rows * (config.BN + 4) * 4
    # A share of the pairs of sums from each block.
    arriving = 0 if config.CLUSTER == 1 else -(-rows * config.BN // 2 // config.CLUSTER) * config.CLUSTER * 8
    limit = SHARED_LIMIT // config.RESIDENT - RESERVED - arriving
    most = max(1, (limit - padding) // part)
    units = -(-k // unit)
    parts = min(-(-(-(-units // config.CLUSTER) * unit) // 128), most)
    received = round_up(max(sums, parts * part + padding), 16)
    return parts * 128, received, received + arriving
