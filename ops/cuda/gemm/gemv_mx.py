"""Few rows by an MX-FP8 weight on Hopper in CUDA C++: what it accepts, its configuration, its launch (`gemv_mx.cu`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fp8fn.ops.cuda.gemm.gemv_a16w8 import GemvConfig, divide_memory
from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.limits import LARGEST, MOST_BLOCKS, PREFETCHED, ceil_power_of_two, floor_power_of_two
from fp8fn.ops.cuda.operands import ELEMENT, FP8, WGMMA_FP8, batch_step
from fp8fn.ops.cuda.runtime.launch import Argument, CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.operands import RoutedProduct, ScaledProduct
from fp8fn.ops.targets import Target, hopper_fault
from fp8fn.ops.tuning.mx import MoeProblem, Problem

# Rows of a: past them a tile of a larger kernel reads the weight fewer times.
MOST_ROWS: Final = 64
_MOST_TILE: Final = 64  # rows of a that a block multiplies
_MOST_ROUTED: Final = 32  # routed tokens, whose ids a warp has
_WARPS: Final = 8
_UNIT: Final = 64  # elements of K
_MOST_CLUSTER: Final = 8
_MANY: Final = 3  # blocks for each multiprocessor
# Tiles of a warp, warps side by side and warps along K, by the rows of a; the first of which there are enough blocks.
_DIVISIONS: Final = {
    8: ((2, 1, 8), (1, 4, 2), (1, 1, 8)),
    16: ((2, 4, 2), (1, 4, 2), (1, 2, 4), (1, 1, 8)),
    32: ((1, 8, 1), (1, 4, 2)),
    64: ((1, 8, 1), (1, 4, 2)),
}
_MOST_BYTES: Final = 2**31 - 1  # strides are signed 32-bit ones


def accepts(problem: Problem) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    target = problem.target
    if (reason := hopper_fault(target)) is not None:
        return reason
    for dtype in (problem.a_dtype, problem.b_dtype):
        if dtype not in FP8:
            return f"{dtype} is not an FP8 type of {target.name}"
    if problem.m > MOST_ROWS:
        return f"M={problem.m} is above {MOST_ROWS}"
    if problem.k == 0:
        return "K=0 leaves nothing to multiply"
    if not problem.k_lines:
        return "the K of an operand is not in consecutive bytes from a multiple of 16"
    if problem.largest > _MOST_BYTES:
        return f"a tensor spans {problem.largest} bytes, past 32-bit strides"
    if problem.batch > MOST_BLOCKS:
        return f"a batch of {problem.batch} is more than a grid has"
    return None


def configure(problem: Problem) -> GemvConfig:
    """By what was timed on an H200 at the shapes of decoding: blocks so that two multiprocessors have three of them.

    Few rows are read by narrow blocks whose warps share K, more by wide ones; where those are too few, even when
    clusters share K, by the next of `_DIVISIONS`. Past 16 rows four warps multiply together, and clusters leave all
    blocks resident.
    """
    m, n, cores = problem.m, problem.n, problem.target.cores
    rows = min(8 * ceil_power_of_two(-(-m // 8)), _MOST_TILE)
    units, others = -(-problem.k // _UNIT), -(-m // rows) * problem.batch
    if -(-n // (4 * 16)) * others >= _MANY * cores:
        return _in_flight(rows, 4, min(_WARPS // 4, floor_power_of_two(units)), 1, units)
    enough = _enough(cores)
    for tiles, warps_n, shared in _DIVISIONS[rows]:
        warps_k = min(shared, floor_power_of_two(units))
        blocks = -(-n // (16 * tiles * warps_n)) * others
        most = min(_MOST_CLUSTER, max(units // warps_k, 1))
        if rows > 16:
            cluster = max(1, min(most, cores * 5 // 3 // blocks))
        else:
            cluster = min(ceil_power_of_two(-(-enough // blocks)), floor_power_of_two(most))
        small = tiles == 1 and (rows == 8 or (rows == 16 and warps_n >= 4))  # registers are left for three blocks
        resident = 3 if small and blocks * cluster > 2 * cores else 2
        if enough <= blocks * cluster <= resident * cores:
            break
    each = -(-units // (warps_k * cluster))
    # Two tiles, or 64 rows, leave registers for one unit in flight.
    unroll = 2 if tiles == 1 and rows <= 16 else 1
    return GemvConfig(rows, tiles, warps_n, warps_k, min(unroll, each), cluster, resident)


def candidates(problem: Problem) -> tuple[GemvConfig, ...]:
    """The configurations to measure a problem in, the default one first: K is shared by other clusters."""
    return _by_clusters(configure(problem), problem.k)


def candidates_moe(problem: MoeProblem) -> tuple[GemvConfig, ...]:
    """As `candidates`, for routed tokens."""
    return _by_clusters(configure_moe(problem), problem.k)


def _by_clusters(default: GemvConfig, k: int) -> tuple[GemvConfig, ...]:
    units = -(-k // _UNIT)
    clusters = [c for c in range(1, _MOST_CLUSTER + 1) if c == 1 or c * default.WARPS_K <= units]
    found = [default]
    for cluster in clusters:
        each = -(-units // (default.WARPS_K * cluster))
        for resident in range(1, default.RESIDENT + 1):
            unroll = min(default.UNROLL, each)
            found.append(replace(default, CLUSTER=cluster, RESIDENT=resident, UNROLL=unroll))
    return tuple(dict.fromkeys(found))


def _enough(cores: int) -> int:
    """Blocks that keep the memory busy: with fewer, clusters share K."""
    return cores * 14 // 10


def _in_flight(rows: int, warps_n: int, warps_k: int, cluster: int, units: int) -> GemvConfig:
    """The configuration for many waves of blocks, which hide each other's waits: units in flight fill the registers."""
    each = -(-units // (warps_k * cluster))
    return GemvConfig(rows, 1, warps_n, warps_k, min({8: 6, 16: 4, 32: 2, 64: 1}[rows], each), cluster, 2)


def plan(product: ScaledProduct, config: GemvConfig) -> tuple[CudaLaunch]:
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`, nothing empty; see `accepts`.

    `out` and `bias` are contiguous. A 2-D operand serves a whole batch. That b is constant has no effect.
    """
    m = product.m
    sizes: dict[str, Argument] = {
        "sorted_token_ids": None, "expert_ids": None, "num_tokens_post_padded": None, "token_weights": None, "M": m,
    }  # fmt: skip
    routing: dict[str, Argument] = {"experts": 0, "block_m": 0, "a_div": 1}
    tiles = -(-m // config.ROWS)
    return (_launch(product, sizes, routing, rows=m, tiles=tiles, config=config),)


def accepts_moe(problem: MoeProblem) -> str | None:
    """None for a product of routed tokens that `plan_moe` takes, else the reason why not."""
    if problem.a_block != (1, 32):
        return f"blocks of {problem.a_block} are not those of MX"
    if problem.longest_step > LARGEST:
        return f"a stride of {problem.longest_step} is past 32 bits"
    config = configure_moe(problem)
    if problem.tiles * -(-problem.block_m // config.ROWS) > MOST_BLOCKS:
        return f"{problem.tiles} tiles of {problem.block_m} ids are more than a grid has"
    each = Problem(1, problem.n, problem.k, problem.target, 1, problem.a_dtype, problem.w_dtype, 0, problem.k_lines)
    return accepts(each)


def configure_moe(problem: MoeProblem) -> GemvConfig:
    """As many rows as twice an expert's share of the ids; K is shared by a cluster where blocks are too few."""
    share = -(-2 * problem.ids // problem.experts)
    rows = max(8, min(ceil_power_of_two(share), ceil_power_of_two(problem.block_m), _MOST_ROUTED))
    units = -(-problem.k // _UNIT)
    warps_n = min(4, ceil_power_of_two(-(-problem.n // 16)))
    warps_k = min(_WARPS // 4, floor_power_of_two(units))
    blocks = min(problem.tiles, problem.ids) * -(-problem.n // (16 * warps_n))
    enough, cluster = _enough(problem.target.cores), 1
    while cluster < _MOST_CLUSTER and units >= 2 * warps_k * cluster and blocks * cluster <= enough:
        cluster *= 2
    return _in_flight(rows, warps_n, warps_k, cluster, units)


def plan_moe(product: RoutedProduct, config: GemvConfig) -> tuple[CudaLaunch]:
    """The launch that fills the rows of `out` that ids name, of a problem that `accepts_moe` accepts.

    There is a tile and an expert at least.
    """
    routing = product.routing
    sizes: dict[str, Argument] = {**routing._asdict(), "token_weights": product.token_weights, "M": product.ids}
    owners: dict[str, Argument] = {"experts": product.experts, "block_m": routing.block_m, "a_div": product.a_div}
    tiles = routing.tiles * -(-routing.block_m // config.ROWS)
    dense = ScaledProduct(a=product.a, b=product.w, out=product.out, target=product.target)
    # A tile is seldom full: two rows of it are what is asked for at once.
    launch = _launch(dense, sizes, owners, rows=2, tiles=tiles, config=config)
    return (replace(launch, binds={"b": "w", "b_scale": "w_scale"}),)


def _launch(
    product: ScaledProduct, sizes: dict[str, Argument], routing: dict[str, Argument], *, rows: int, tiles: int,
    config: GemvConfig,
) -> CudaLaunch:  # fmt: skip
    """The launch of `tiles` tiles of up to `rows` rows, for each of a batch; of routed tokens where `sizes` has ids."""
    (a, a_scale, _), (b, b_scale, _), out, bias = product.a, product.b, product.out, product.bias
    n, k, target = product.n, product.k, product.target
    batch = 1 if sizes["sorted_token_ids"] is not None else product.batch
    # Four blocks of a: bytes, a gap after each, and scales.
    part = 4 * (config.ROWS * 32 + 16 + config.ROWS * 4)
    chunk, received, shared = divide_memory(config.ROWS, part, 0, k, _UNIT, config)
    pieces = -(-min(rows, config.ROWS) * chunk // (16 * config.threads))
    # As many at once as registers are left for.
    most = 16 if config.RESIDENT == 1 else 8 if config.RESIDENT == 2 and config.ROWS * config.TILES <= 32 else 4
    ahead = min(ceil_power_of_two(pieces), most)
    macros: dict[str, int | str] = {
        "A_FP8": FP8[a.dtype],
        "B_FP8": FP8[b.dtype],
        "EVEN_K": int(k % 16 == 0),
        "ROUTED": int(sizes["sorted_token_ids"] is not None),
        "OUT": ELEMENT[out.dtype],
        "BIAS": 0 if bias is None else ELEMENT[bias.dtype],
    }
    options = {
        "ROWS": config.ROWS, "TILES": config.TILES, "WARPS_N": config.WARPS_N, "WARPS_K": config.WARPS_K,
        "UNROLL": config.UNROLL, "AHEAD": ahead, "CLUSTER": config.CLUSTER, "RESIDENT": config.RESIDENT,
        "K_CHUNK": chunk,
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel(
            "gemv_mx.cu", "gemv_mx", (*macros.items(), *options.items()),
            (Wgmma(config.ROWS, WGMMA_FP8[b.dtype], WGMMA_FP8[a.dtype], a_in_registers=True),),
        ),
        grid=(-(-n // config.BN) * config.CLUSTER, tiles, batch),
        threads=config.threads,
        shared=shared,
        args={
            "a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias, "out": out, **sizes,
            "N": n, "K": k, "received": received, "prefetched": _prefetched(tiles * batch, n, k, target, config),
            "a_batch": batch_step(a), "a_m": a.stride(-2),
            "as_batch": batch_step(a_scale), "as_m": a_scale.stride(-2), "as_k": a_scale.stride(-1),
            "b_batch": batch_step(b), "b_n": b.stride(-1),
            "bs_batch": batch_step(b_scale), "bs_k": b_scale.stride(-2), "bs_n": b_scale.stride(-1), **routing,
        },
        target=target,
        options=options,
        overlaps=True,
    )  # fmt: skip


def _prefetched(tiles: int, n: int, k: int, target: Target, config: GemvConfig) -> int:
    blocks = min(tiles * -(-n // config.BN) * config.CLUSTER, target.cores * config.RESIDENT)
    return min(PREFETCHED // (blocks * config.BN), k)
