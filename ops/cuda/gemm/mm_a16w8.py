"""Many rows by an FP8 weight on Hopper in CUDA C++: what it accepts, its configuration, its launch (`mm_a16w8.cu`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm import splitk_a16w8
from fp8fn.ops.cuda.gemm.scaled_mm import BK
from fp8fn.ops.cuda.gemm.wgmma import Wgmma
from fp8fn.ops.cuda.limits import LARGEST, SHARED_LIMIT
from fp8fn.ops.cuda.operands import (
    SCALES,
    SIXTEEN_BITS,
    column_steps,
    map_fault,
    tma_batch,
    weight_product_types,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import Block
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import OCP, hopper_fault
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

_OUT_ROWS: Final = 32
_PART: Final = _OUT_ROWS * 128  # bytes of 64 columns of an output
_STAGE_BARRIERS: Final = 16


@dataclass(frozen=True)
class ManyRowsConfig:
    """How `MATH` warpgroups compute tiles of `WIDTH * SLICES` rows of x and `64 * MATH / K_PARTS` columns of w.

    `mm_a16w8.cu` says what each does: `STAGES` k-blocks in flight; `RESIDENT` blocks on a multiprocessor (0: a
    persistent one); `GROUP` rows of tiles walked together. GATED: the tile has 64 columns of a product by two weights.
    """

    WIDTH: int = 128
    SLICES: int = 2
    STAGES: int = 2
    GROUP: int = 8
    MATH: int = 2
    RESIDENT: int = 0
    K_PARTS: int = 1
    TURNS: bool = False
    GATED: bool = False

    @property
    def BM(self) -> int:
        return self.WIDTH * self.SLICES

    @property
    def BN(self) -> int:
        return 64 if self.GATED else self.w_lines

    @property
    def w_lines(self) -> int:
        """The columns of weights in a stage."""
        return 64 * self.MATH // self.K_PARTS

    @property
    def threads(self) -> int:
        return 128 * (self.MATH + (self.RESIDENT == 0))

    @property
    def slices_in_flight(self) -> int:
        return self.STAGES * self.SLICES

    @property
    def pairs(self) -> int:
        """The parts of gate and up in shared memory: those of a tile, as far as there is room."""
        if not self.GATED:
            return 0
        return min(self.BM // _OUT_ROWS, (SHARED_LIMIT - self._stages) // (2 * _PART + _STAGE_BARRIERS))

    @property
    def shared(self) -> int:
        outputs = self.pairs * (2 * _PART + _STAGE_BARRIERS) if self.GATED else self.BN // 32 * _PART
        return self._stages + outputs

    @property
    def _stages(self) -> int:
        """The bytes of stages."""
        w, x = BK * self.w_lines + _STAGE_BARRIERS, 2 * BK * self.WIDTH + _STAGE_BARRIERS
        return self.STAGES * w + self.slices_in_flight * x

    def blocks(self, tiles: int, cores: int) -> int:
        """The number of blocks in a launch."""
        return tiles if self.RESIDENT else min(tiles, cores)

    def __str__(self) -> str:
        marks = " turns" * self.TURNS + f" parts{self.K_PARTS}" * (self.K_PARTS > 1) + " gated" * self.GATED
        return f"{self.BM}x{self.BN}/{self.SLICES} stages{self.STAGES} resident{self.RESIDENT} group{self.GROUP}{marks}"


_SMALLEST: Final = ManyRowsConfig(64, 1, 6, TURNS=True)
_SQUARE: Final = ManyRowsConfig(128, 1, 4, TURNS=True)
_TALL: Final = ManyRowsConfig(160, TURNS=True)
# Tiles for more than 128 rows by the kind of scales, each with two times in microseconds on an H200: of a K tile, and
# of all else that a tile takes. Of two tiles with as many rows the faster one is here.
_TIMES: Final = {
    "BLOCK": {
        _SMALLEST: (0.61, 1.6),
        _SQUARE: (0.93, 1.6),
        ManyRowsConfig(160, 1, 3, TURNS=True): (1.08, 1.8),
        ManyRowsConfig(192, 1, 3, TURNS=True): (1.22, 1.9),
        ManyRowsConfig(224, 1, TURNS=True): (1.35, 2.1),
        ManyRowsConfig(256, 1, TURNS=True): (1.39, 2.2),
        ManyRowsConfig(96, 3, TURNS=True): (1.62, 2.8),
        _TALL: (1.71, 3.0),
    },
    "VECTOR": {
        _SMALLEST: (0.70, 1.4),
        _SQUARE: (1.02, 1.6),
        ManyRowsConfig(96, 2, 3, TURNS=True): (1.29, 1.9),
        ManyRowsConfig(128, 2, TURNS=True): (1.55, 2.2),
        _TALL: (1.83, 2.6),
    },
    "LINE": {
        _SMALLEST: (0.55, 1.6),
        _SQUARE: (0.85, 1.6),
        ManyRowsConfig(160, 1, 3, TURNS=True): (0.95, 2.0),
        ManyRowsConfig(192, 1, 3, TURNS=True): (1.09, 1.9),
        ManyRowsConfig(224, 1, TURNS=True): (1.21, 2.1),
        ManyRowsConfig(256, 1, TURNS=True): (1.33, 2.4),
        ManyRowsConfig(96, 3, TURNS=True): (1.55, 2.7),
        _TALL: (1.65, 3.0),
    },
}
# Narrow tiles whose two warpgroups share K, for one wave of blocks; any scales.
_HALVES: Final = {
    ManyRowsConfig(64, 1, 4, K_PARTS=2, RESIDENT=1): (0.45, 0.1),
    ManyRowsConfig(128, 1, 4, K_PARTS=2, RESIDENT=1): (0.62, 0.1),
}
FEW: Final = 32  # rows
_SHORT: Final = 4  # k-blocks: as many as all are in flight


def tiles(m: int, n: int, batches: int, config: ManyRowsConfig) -> int:
    return -(-m // config.BM) * -(-n // config.BN) * batches


def configure(product: WeightProduct) -> ManyRowsConfig:
    """The default configuration of a product; see `choose_config`."""
    return choose_config(weight_problem(product))


def choose_config(problem: WeightProblem) -> ManyRowsConfig:
    """The tile for more than 128 rows whose waves take the least time; for fewer, as was timed on an H200.

    For 65 to 128 rows: one of 128 rows where these leave at most a third of the multiprocessors without a tile. Else
    narrow ones whose two warpgroups share K, if they are one wave of blocks, and always where K is short.
    """
    m, n, k, batches, cores = problem.m, problem.n, problem.k, problem.batch, problem.cores
    if m <= FEW:
        return _choose_few(m, n, -(-k // BK), batches, cores)
    if m > 128:
        return min(_tiles_of_many(problem), key=lambda config: _microseconds(problem, config))
    if k <= BK:
        return _choose_once(m, n, batches, cores)
    if k <= BK * _SHORT:
        return _choose_short(m, n, -(-k // BK), batches, cores)
    if m > 64 and 3 * tiles(m, n, batches, _SQUARE) >= 2 * cores:
        return _SQUARE
    narrow = [*_HALVES][m > 64]
    if tiles(m, n, batches, narrow) <= cores:
        return narrow
    return _SQUARE if m > 64 else _SMALLEST


def estimate(problem: WeightProblem) -> float:
    """The microseconds of the default configuration of more than 128 rows on an H200."""
    return _microseconds(problem, choose_config(problem))


def _tiles_of_many(problem: WeightProblem) -> list[ManyRowsConfig]:
    """Those for more than 128 rows."""
    m, n, batches, cores = problem.m, problem.n, problem.batch, problem.cores
    return [*_TIMES[SCALES[problem.block]], *(tile for tile in _HALVES if tiles(m, n, batches, tile) <= cores)]


def _microseconds(problem: WeightProblem, config: ManyRowsConfig) -> float:
    of_k_tile, beside = (_HALVES if config in _HALVES else _TIMES[SCALES[problem.block]])[config]
    waves = -(-tiles(problem.m, problem.n, problem.batch, config) // problem.cores)
    return waves * (-(-problem.k // BK) * of_k_tile + beside)


def configure_gated(product: WeightProduct) -> ManyRowsConfig:
    """The tile of a product with as many columns as gate and up have together, of those that all pairs of parts fit in.

    Beside 320 rows, whose stages leave room for 4 of 10 pairs, the multiplying warpgroups would wait for the SiLU.
    """
    problem = weight_problem(product)
    problem = problem._replace(n=2 * problem.n)
    best = min(_gated_tiles(problem.block), key=lambda config: _microseconds(problem, config))
    return replace(best, GATED=True)


@cache
def _gated_tiles(block: Block) -> tuple[ManyRowsConfig, ...]:
    """Tiles of 128 rows or more that find room for all pairs of their parts; lower ones were not timed."""
    return tuple(
        config
        for config in _TIMES[SCALES[block]]
        if config.BM >= _SQUARE.BM and replace(config, GATED=True).pairs == config.BM // _OUT_ROWS
    )


def candidates(problem: WeightProblem) -> tuple[ManyRowsConfig, ...]:
    """The configurations to measure a problem in, the default one first; more than 16 rows, or those of a batch."""
    if (problem.m <= 16 and problem.batch == 1) or not problem.k_lines:
        return ()
    few = (
        [ManyRowsConfig(32, 1, 4, K_PARTS=2, RESIDENT=2), ManyRowsConfig(32, 1, 4, RESIDENT=2)]
        if problem.m <= FEW
        else []
    )
    large = [config for config in _TIMES[SCALES[problem.block]] if problem.m > config.BM // 2]
    return tuple(dict.fromkeys([choose_config(problem), *large, _SMALLEST, *_HALVES, *few]))


def _choose_few(m: int, n: int, blocks: int, batches: int, cores: int) -> ManyRowsConfig:
    """Up to 32 rows: two warpgroups share K as long as two blocks on each multiprocessor do it, else the columns."""
    if blocks == 1:
        return ManyRowsConfig(32, 1, 1, MATH=1, RESIDENT=4)
    shared = ManyRowsConfig(32, 1, min(blocks, 4), K_PARTS=2, RESIDENT=2)
    return shared if n <= 64 or tiles(m, n, batches, shared) <= 2 * cores else replace(shared, K_PARTS=1)


def _choose_once(m: int, n: int, batches: int, cores: int) -> ManyRowsConfig:
    """For one k-block: four blocks a multiprocessor, of 64 rows if blocks of 128 would be one or two for each."""
    wide = ManyRowsConfig(128, 1, 1, MATH=1, RESIDENT=4)
    if m <= 64 or cores < tiles(m, n, batches, wide) <= 2 * cores:
        return ManyRowsConfig(64, 1, 1, MATH=1, RESIDENT=4)
    return wide


def _choose_short(m: int, n: int, blocks: int, batches: int, cores: int) -> ManyRowsConfig:
    """For a few k-blocks: two warpgroups share them, and the tile is the smallest that makes one wave of blocks."""
    for width, most in ((32, cores // 2), (64, cores), (128, cores if m > 64 else 0)):
        config = ManyRowsConfig(width, 1, blocks, K_PARTS=2, RESIDENT=1 if width > 32 else 2)
        if tiles(m, n, batches, config) <= most:
            return config
    if m > 64:
        once = ManyRowsConfig(128, 1, 2, RESIDENT=1)
        return once if tiles(m, n, batches, once) <= cores else _SQUARE
    return ManyRowsConfig(64, 1, blocks, K_PARTS=1 if blocks == 2 else 2, RESIDENT=2)


def configure_invariant(_: WeightProduct) -> ManyRowsConfig:
    """The largest tile whose products are promoted as `splitk_a16w8` does it."""
    return _SQUARE


def why_not_invariant(product: WeightProduct) -> str | None:
    """Why the kernel does not take over many rows of a batch-invariant product, or None.

    Sums have the bits of `splitk_a16w8` where that kernel has K in one part and promotes each K tile.
    """
    problem = weight_problem(product)
    if not splitk_a16w8.sums_whole_k(product):
        return "K is shared by a cluster"
    if SCALES[problem.block] == "LINE" or problem.k <= BK:
        return "products are promoted by one scale for all of K"
    if 3 * tiles(problem.m, problem.n, problem.batch, _SQUARE) < 2 * problem.cores or problem.m <= _SQUARE.BM // 2:
        return f"M={problem.m} is few rows"
    return splitk_a16w8.accepts_invariant(product) or accepts(product)


def is_slow(problem: WeightProblem) -> bool:
    """Whether `gemv_a16w8` was the faster one on an H200: up to 16 rows, unless those of a batch have a short K."""
    m, batches = problem.m, problem.batch
    if m > 16:
        return False
    if batches == 1:
        return True
    blocks, count = -(-problem.k // BK), tiles(m, problem.n, batches, ManyRowsConfig(FEW, 1, K_PARTS=2))
    if m > 8:
        return blocks > _SHORT
    return blocks > 1 or count > 4 * problem.cores or (m == 1 and not problem.constant)


def accepts(product: WeightProduct) -> str | None:
    """None for a product that `plan` takes, else the reason why not."""
    product = product.as_matrix()
    x, (w, w_scale, w_block), bias, out = product.x, product.w, product.bias, product.out
    target = product.target
    if (reason := hopper_fault(target)) is not None:
        return reason
    if x.dtype not in SIXTEEN_BITS or out.dtype == torch.float32:
        return f"x has dtype {x.dtype} and out {out.dtype}, not both 16 bits"
    if w.dtype not in OCP:
        return f"w has dtype {w.dtype}"
    if w_block not in SCALES or w_scale.dtype != torch.float32:
        return f"scales of {w_scale.dtype} in blocks of {w_block} are not float32 ones that hold along K"
    for name, operand in (("x", x), ("w.mT", w.mT), ("out", out)):
        if (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    strides = (*w_scale.stride(), *(() if bias is None else bias.stride()))
    if max(*x.shape, *w.shape, *strides) > LARGEST:
        return "a size or a stride is past 32 bits"
    if out.shape[-1] * out.element_size() % 16:  # the last piece of 16 bytes would reach past the end
        return f"N={out.shape[-1]} is no multiple of 8"
    return None


def accepts_gated(product: WeightProduct) -> str | None:
    """None where `plan` takes `silu(x @ w) * (x @ w_up)`, and each product alone has large tiles; else why not."""
    gate, up = product.w, product.w_up
    assert up is not None
    if (gate.block, gate.data.shape, gate.data.dtype) != (up.block, up.data.shape, up.data.dtype):
        return "w and w_up differ in shape, type or block"
    if column_steps(product) != column_steps(replace(product, w=up)):
        return f"the scales of w have strides {gate.scale.stride()} and those of w_up {up.scale.stride()}"
    if product.bias is not None or product.out.dtype != product.x.dtype:
        return "it has a bias or another output type"
    if (reason := accepts(product)) is not None:
        return reason
    if (reason := accepts(replace(product, w=up))) is not None:
        return f"w_up: {reason}"
    problem = weight_problem(product)
    if problem.m <= _SQUARE.BM:
        return f"M={problem.m} is few rows"
    if (config := choose_config(problem)).RESIDENT or config.MATH != 2:
        return f"each product is one of small tiles, {config}"
    return None


def plan(product: WeightProduct, config: ManyRowsConfig) -> tuple[CudaLaunch]:
    """The launch of a product that `accepts` accepts, of which nothing is empty.

    A constant weight is read early by small tiles: of larger ones with more of K than is in flight it did not pay.
    """
    assert (product.w_up is not None) == config.GATED
    product = product.as_matrix()
    m, n, k, batches, target, constant = (
        product.m, product.n, product.k, product.batch, product.target, product.constant
    )  # fmt: skip
    x, w, out = product.x, product.w.data, product.out
    in_flight = config.RESIDENT > 0 and k <= BK * config.STAGES
    early = constant and config.RESIDENT > 0 and (in_flight or config.BM <= FEW)
    kind = "bf16" if x.dtype == torch.bfloat16 else "f16"
    macros = weight_product_types(product)
    w_box = (1, config.BN, BK)
    of_up: dict[str, TensorMap | Tensor] = {}
    if product.w_up is not None:
        of_up = {"w_up": TensorMap(tma_batch(product.w_up.data.mT), w_box, 128), "w_up_scale": product.w_up.scale}
    options = {
        "MATH": config.MATH, "K_PARTS": config.K_PARTS, "WIDTH": config.WIDTH, "SLICES": config.SLICES,
        "W_STAGES": config.STAGES, "X_STAGES": config.slices_in_flight,
        "TURNS": int(config.TURNS), "ONCE": int(k <= BK), "PERSISTENT": int(config.RESIDENT == 0),
        "IN_FLIGHT": int(in_flight), "RESIDENT": max(config.RESIDENT, 1),
        "GROUP": config.GROUP, "W_CONSTANT": int(early), "PAIRS": config.pairs,
    }  # fmt: skip
    return (
        CudaLaunch(
            kernel=CudaKernel(
                "mm_a16w8.cu", "mm_a16w8", (*macros.items(), *options.items()),
                (Wgmma(config.WIDTH, kind, kind, a_in_registers=True),),
            ),
            grid=(config.blocks(tiles(m, n, batches, config), target.cores), 1, 1),
            threads=config.threads,
            shared=config.shared,
            args={
                "x": TensorMap(tma_batch(x), (1, config.WIDTH, 64), 128),
                "w": TensorMap(tma_batch(w.mT), w_box, 128),
                "w_scale": product.w.scale, "bias": product.bias,
                "out": TensorMap(tma_batch(out), (1, _OUT_ROWS, 64), 128),
                "problem": (m, n, k, batches), "x_batched": int(x.dim() == 3), "w_batched": int(w.dim() == 3),
                **column_steps(product), **of_up,
            },
            target=target,
            options=options,
            overlaps=True,
            constant=("w", "w_scale") if constant else (),
        ),
    )  # fmt: skip
