"""Many rows by an FP8 weight on Hopper in CUDA C++: what it accepts, its configuration, its launch (`mm_a16w8.cu`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemv_a16w8 import INPUTS, SCALES, as_matrix, call
from fp8fn.ops.cuda.launch import CudaLaunch, TensorMap
from fp8fn.ops.cuda.nvrtc import CudaKernel
from fp8fn.ops.cuda.scaled_mm import BK, LARGEST, OUT, TYPES, as_batch, map_fault
from fp8fn.ops.cuda.wgmma import wgmma_source
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.targets import OCP, Target

__all__ = ["BN", "Config", "accepts", "call", "plan"]

BN: Final = 128  # columns of w in a tile
_OUT_ROWS: Final = 32
_STAGE_BARRIERS: Final = 16
_OUT_BYTES: Final = 4 * _OUT_ROWS * 128


@dataclass(frozen=True)
class Config:
    """Tiles of `WIDTH * SLICES` rows of x, `STAGES` k-blocks in flight, `GROUP` rows of tiles walked together."""

    WIDTH: int = 128
    SLICES: int = 2
    STAGES: int = 2
    GROUP: int = 8

    @property
    def BM(self) -> int:
        return self.WIDTH * self.SLICES

    @property
    def shared(self) -> int:
        return self.STAGES * (BK * BN + 2 * BK * self.BM + _STAGE_BARRIERS) + _OUT_BYTES


_LARGEST: Final = Config()
# Slower than two slices of 128 rows, which have no registers left for a scale a column, or for scales and a bias.
_NARROW: Final = Config(64, 4, 2)
_SMALLEST: Final = Config(64, 1, 6)


def tiles(m: int, n: int, batches: int, config: Config) -> int:
    return -(-m // config.BM) * -(-n // BN) * batches


def choose_config(m: int, n: int, batches: int, w_block: Block, has_bias: bool, cores: int) -> Config:
    """The largest tile that leaves at most a third of the multiprocessors without one, as was timed on an H200."""
    kind = SCALES[w_block]
    largest = _NARROW if kind == "VECTOR" or (kind == "BLOCK" and has_bias) else _LARGEST
    for config in (largest, Config(128, 1, 4)):
        if tiles(m, n, batches, config) * 3 >= 2 * cores and m > config.BM // 2:
            return config
    return _SMALLEST


def is_starved(m: int, n: int, batches: int, cores: int) -> bool:
    """Whether there are so few tiles, none of which shares K, that four of five multiprocessors have none."""
    return tiles(m, n, batches, _SMALLEST) * 5 < cores


def accepts(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out: Tensor, target: Target
) -> str | None:
    """None where `plan` takes these operands, else the reason why not."""
    if target.backend != "cuda" or target.arch != 90:
        return f"{target.name} is not sm90"
    if x.dtype not in INPUTS or out.dtype == torch.float32:
        return f"x has dtype {x.dtype} and out {out.dtype}, not both 16 bits"
    if w.dtype not in OCP:
        return f"w has dtype {w.dtype}"
    if w_block not in SCALES or w_scale.dtype != torch.float32:
        return f"scales of {w_scale.dtype} in blocks of {w_block} are not float32 ones that hold along K"
    x, out = as_matrix(x, w, bias, out)
    for name, operand in (("x", x), ("w.mT", w.mT), ("out", out)):
        if (fault := map_fault(operand)) is not None:
            return f"{name} {fault}"
    strides = (*w_scale.stride(), *(() if bias is None else bias.stride()))
    if max(*x.shape, *w.shape, *strides) > LARGEST:
        return "a size or a stride is past 32 bits"
    if out.shape[-1] * out.element_size() % 16:  # the last piece of 16 bytes would reach past the end
        return f"N={out.shape[-1]} is no multiple of 8"
    return None


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
    config = config or choose_config(m, n, batches, w_block, bias is not None, target.cores)
    kind = "bf16" if x.dtype == torch.bfloat16 else "f16"
    macros: dict[str, int | str] = {
        "INPUT": INPUTS[x.dtype], "FP8": f"Fp8::{TYPES[w.dtype].upper()}", "SCALE": SCALES[w_block],
        "WIDTH": config.WIDTH, "SLICES": config.SLICES, "STAGES": config.STAGES, "GROUP": config.GROUP,
        "OUT": OUT[out.dtype], "BIAS": 0 if bias is None else OUT[bias.dtype],
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel(
            "mm_a16w8.cu", "mm_a16w8", tuple(macros.items()),
            wgmma_source(config.WIDTH, kind, kind, a_in_registers=True),
        ),
        grid=(min(tiles(m, n, batches, config), target.cores), 1, 1),
        threads=3 * 128,
        shared=config.shared,
        args={
            "x": TensorMap(as_batch(x), (1, config.BM, 64), 128), "w": TensorMap(as_batch(w.mT), (1, BN, BK), 128),
            "w_scale": w_scale, "bias": bias, "out": TensorMap(as_batch(out), (1, _OUT_ROWS, 64), 128),
            "problem": (m, n, k, batches, 1), "x_batched": int(x.dim() == 3), "w_batched": int(w.dim() == 3),
            "s_batch": w_scale.stride(0) if w_scale.dim() == 3 else 0, "s_k": w_scale.stride(-2),
            "s_n": 0 if w_block == (WHOLE, WHOLE) else w_scale.stride(-1),
            "bias_batch": 0 if bias is None or bias.dim() == 1 else bias.stride(0),
            "bias_n": 0 if bias is None else bias.stride(-1),
        },
        target=target,
        options={"BM": config.BM, "BN": BN, "SLICES": config.SLICES, "STAGES": config.STAGES},
        overlaps=True,
    )  # fmt: skip
