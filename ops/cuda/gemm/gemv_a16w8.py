"""Few rows by an FP8 weight on Hopper in CUDA C++: what it accepts, its configuration, its launch (`gemv_a16w8.cu`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm.scaled_mm import LARGEST, OUT, SHARED_LIMIT, TYPES, map_fault, round_up
from fp8fn.ops.cuda.runtime.call_cache import Call, Step, geometry
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.targets import OCP, Target

INPUTS: Final = {torch.bfloat16: "Element::BF16", torch.float16: "Element::FP16"}
SCALES: Final[dict[Block, str]] = {(128, 128): "BLOCK", (128, 1): "VECTOR", (WHOLE, 1): "LINE", (WHOLE, WHOLE): "LINE"}
# Rows of x: past them a tile of a larger kernel reads the weight fewer times.
MOST_ROWS: Final = 128
_MOST_BLOCKS: Final = 65535  # of a grid's second and third axis
RESERVED: Final = 1 << 10  # of each block's shared memory, by the driver
_WARPS: Final = 8
_LARGEST_CLUSTER: Final = 8


@dataclass(frozen=True)
class Config:
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


def accepts(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out: Tensor, target: Target
) -> str | None:
    """None where `plan` takes these operands, else the reason why not."""
    if target.backend != "cuda" or target.arch != 90:
        return f"{target.name} is not sm90"
    if x.dtype not in INPUTS:
        return f"x has dtype {x.dtype}, not 16 bits"
    if w.dtype not in OCP:
        return f"w has dtype {w.dtype}"
    if w_block not in SCALES or w_scale.dtype != torch.float32:
        return f"scales of {w_scale.dtype} in blocks of {w_block} are not float32 ones that hold along K"
    x, out = as_matrix(x, w, bias, out)
    rows = MOST_ROWS if is_k_contiguous(w) else MOST_ROWS // 4
    if out.shape[-2] > rows:
        return f"x has {out.shape[-2]} rows a matrix, more than {rows}"
    if (fault := map_fault(w.mT if is_k_contiguous(w) else w)) is not None:
        return f"w {fault}"
    if out.dim() == 3 and out.shape[0] > _MOST_BLOCKS:
        return f"a batch of {out.shape[0]} is more than a grid has"
    strides = (*x.stride(), *w.stride(), *w_scale.stride(), *(() if bias is None else bias.stride()))
    if max(*x.shape, *w.shape, *strides) > LARGEST:
        return "a size or a stride is past 32 bits"
    return None


def is_k_contiguous(w: Tensor) -> bool:
    """Whether the columns of `w (B?, K, N)` are lines in memory, as `nn.Linear` keeps them; or single elements."""
    return w.shape[-2] == 1 or (w.stride(-2) == 1 and (w.stride(-1) != 1 or w.shape[-1] == 1))


def has_pieces(x: Tensor) -> bool:
    """Whether the rows of `x` load by 16 bytes."""
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return aligned and all(step % 8 == 0 for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)


def as_matrix(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor]:
    """`x` and `out`; a batch of `x` whose rows follow one another, by one weight, is one matrix."""
    one_weight = x.dim() == 3 and w.dim() == 2 and (bias is None or bias.dim() == 1)
    if one_weight and (x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x.flatten(0, 1), out.flatten(0, 1)
    return x, out


def choose_config(m: int, n: int, k: int, batches: int, k_contiguous: bool, cores: int) -> Config:
    """The default: blocks so that all multiprocessors wait for memory at once, and no more rows of x than needed."""
    rows = min(8 * ceil_power_of_two(-(-m // 8)), 64 if k_contiguous else 16)
    units = -(-k // (64 if k_contiguous else 32))
    if k_contiguous and rows <= 32:
        return choose_few(m, n, units, batches, rows, cores)
    return _choose_many(m, n, units, batches, rows, k_contiguous, cores)


def choose_few(m: int, n: int, units: int, batches: int, rows: int, cores: int) -> Config:
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
        return Config(rows, 1, warps_n, warps_k, unroll, cluster, 3 if blocks > 6 * cores else 2)
    wide = 1 if m == 1 else 4 if m <= 8 else 8
    warps_n, warps_k, blocks = divide(wide)
    # Of a batch each block reads another x.
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
    return Config(rows, tiles, warps_n, warps_k, min(unroll, each), cluster, 3 if many and 1 < m <= 16 else 2)


def _is_large(n: int, units: int, cores: int) -> bool:
    """Whether a weight of lines along K is more than two launches can hold on all multiprocessors at once."""
    return -(-n // 16) * units > 120 * cores


def floor_power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def ceil_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _choose_many(m: int, n: int, units: int, batches: int, rows: int, k_contiguous: bool, cores: int) -> Config:
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
    return Config(rows, tiles, warps_n, warps_k, min(unroll, each), cluster, 1)


def plan(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out: Tensor, target: Target,
    config: Config | None = None,
) -> CudaLaunch:  # fmt: skip
    """The launch of `out (B?, M, N) = x (B?, M, K) @ (w (B?, K, N) * w_scale) + bias`, nothing empty; see `accepts`.

    `out` is contiguous. A 2-D operand serves a whole batch; `bias` is `(N)`, `(B, N)` or `(B, 1, N)`.
    """
    x, out = as_matrix(x, w, bias, out)
    (m, n), k = out.shape[-2:], x.shape[-1]
    batches = out.shape[0] if out.dim() == 3 else 1
    k_contiguous = is_k_contiguous(w)
    config = config or choose_config(m, n, k, batches, k_contiguous, target.cores)
    chunk, received, shared = _chunk_that_fits(m, k, k_contiguous, config)
    macros = {
        **types_of(x, w, w_block, bias, out), "K_CONTIGUOUS": int(k_contiguous), "EVEN_K": int(k % 16 == 0),
        "X_PIECES": int(has_pieces(x)),
    }  # fmt: skip
    options = {
        "ROWS": config.ROWS, "TILES": config.TILES, "WARPS_N": config.WARPS_N, "WARPS_K": config.WARPS_K,
        "UNROLL": config.UNROLL, "CLUSTER": config.CLUSTER, "RESIDENT": config.RESIDENT, "K_CHUNK": chunk,
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("gemv_a16w8.cu", "gemv_a16w8", (*macros.items(), *options.items())),
        grid=(-(-n // config.BN) * config.CLUSTER, -(-m // config.ROWS), batches),
        threads=config.threads,
        shared=shared,
        args={
            "x": x, "w": w, "w_scale": w_scale, "bias": bias, "out": out, "M": m, "N": n, "K": k,
            "received": received,
            "x_batch": batch_step(x), "x_m": x.stride(-2), "x_k": x.stride(-1),
            "w_batch": batch_step(w), "w_line": w.stride(-1 if k_contiguous else -2),
            **column_steps(w_scale, w_block, bias),
        },
        target=target,
        options={**options, "K_CONTIGUOUS": int(k_contiguous)},
        overlaps=True,
    )  # fmt: skip


def call(launch: CudaLaunch, out: Tensor) -> Call:
    """A planned launch as a call on tensors of the same kinds: `(x, w, w_scale)`, and `bias` where it had one."""
    has_bias = launch.args["bias"] is not None
    pointers = (0, 1, 2, 3 if has_bias else None, 4 if has_bias else 3)
    return Call((Step(launch.prepare(), pointers),), (geometry(out),), 1)


def types_of(x: Tensor, w: Tensor, w_block: Block, bias: Tensor | None, out: Tensor) -> dict[str, int | str]:
    """The macros that say what the operands are."""
    return {
        "INPUT": INPUTS[x.dtype], "FP8": f"Fp8::{TYPES[w.dtype].upper()}", "SCALE": SCALES[w_block],
        "OUT": OUT[out.dtype], "BIAS": 0 if bias is None else OUT[bias.dtype],
    }  # fmt: skip


def column_steps(w_scale: Tensor, w_block: Block, bias: Tensor | None) -> dict[str, int]:
    """The arguments that say where scales and biases of columns lie, in the order of the kernels."""
    return {
        "s_batch": batch_step(w_scale), "s_k": w_scale.stride(-2), "s_n": scale_step(w_scale, w_block),
        "bias_batch": 0 if bias is None or bias.dim() == 1 else bias.stride(0),
        "bias_n": 0 if bias is None else bias.stride(-1),
    }  # fmt: skip


def batch_step(x: Tensor) -> int:
    """From a matrix to the next; 0 where one serves the whole batch."""
    return x.stride(0) if x.dim() == 3 else 0


def scale_step(w_scale: Tensor, w_block: Block) -> int:
    """From the scale of a column, or a block of them, to the next; 0 where one serves all."""
    return 0 if w_block == (WHOLE, WHOLE) else w_scale.stride(-1)


def _chunk_that_fits(m: int, k: int, k_contiguous: bool, config: Config) -> tuple[int, int, int]:
    padding, unit = (16, 64) if k_contiguous else (64, 32)
    rows = min(m, config.ROWS)
    held = config.ROWS if config.ROWS > 8 else rows
    return divide_memory(rows, held * 128 * 2, held * padding, k, unit, config)


def divide_memory(rows: int, part: int, padding: int, k: int, unit: int, config: Config) -> tuple[int, int, int]:
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
