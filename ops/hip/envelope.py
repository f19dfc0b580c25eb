"""The MX products that the HIP kernels take, and their default division of one: pure functions of the problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.targets import Target
from fp8fn.ops.tuning.mx import MoeProblem, Problem

if TYPE_CHECKING:
    from fp8fn.ops.hip.launch import HipLaunch

ARCH: Final = "gfx950"
# A kernel's offsets from an address are signed 32-bit ones.
MOST_BYTES: Final = 2**31 - 1
GEMV_ROWS: Final = 16
MFMA_ROWS: Final = 64
# From 8 rows on, the vector units are as slow as memory on the model: 16 flops a byte at 8 TB/s are 128 of 157 TFLOP/s.
_CROSSOVER: Final = 8
# Rows up to which the matrix kernel precedes Triton's where nothing was measured.
_UNTUNED_ROWS: Final = 16
_TILE: Final = 16
_INSTRUCTION_K: Final = 128
_IN_FLIGHT: Final = 4 * 4 * _INSTRUCTION_K  # elements of K that the 4 waves of a block of 16 columns load at a time
MOST_SPLITS: Final = 8
_MOST_BLOCKS: Final = 2**24 - 1  # blocks of 256 threads, whose number has 32 bits


def accepts_gemv(problem: Problem) -> str | None:
    """None for a problem that `mxfp8_gemv` computes, else the reason why not."""
    return _refuses_dense(problem, GEMV_ROWS, 32)


def accepts_mfma(problem: Problem) -> str | None:
    """None for a problem that `mxfp8_mfma` computes, else the reason why not."""
    return _refuses_dense(problem, MFMA_ROWS, _INSTRUCTION_K)


def untuned_gemv(problem: Problem) -> str | None:
    """None where `mxfp8_gemv` is the default, else why `mxfp8_mfma` is."""
    if problem.m >= _CROSSOVER and accepts_mfma(problem) is None:
        return f"M={problem.m} is {_CROSSOVER} or more, for the matrix instruction"
    return None


def untuned_mfma(problem: Problem) -> str | None:
    """None where `mxfp8_mfma` needs no table to precede Triton."""
    return f"M={problem.m} is above {_UNTUNED_ROWS}, for tables alone" if problem.m > _UNTUNED_ROWS else None


def configure_gemv(problem: Problem) -> HipConfig:
    """As many rows as the next power of two."""
    return HipConfig(rows=1 << (problem.m - 1).bit_length())


def configure_mfma(problem: Problem) -> HipConfig:
    """Wide blocks where every core has one of them, else narrow ones, and K in parts until every core has one.

    A part is no less than what a block has in flight at once: the second pass costs a launch.
    """

    def blocks(n_sub: int) -> int:
        return problem.batch * -(-problem.n // (_TILE * n_sub))

    cores = problem.target.cores
    n_sub = next((n_sub for n_sub in (4, 2) if blocks(n_sub) >= cores), 1)
    splits, in_flight = 1, _IN_FLIGHT // n_sub
    while splits < MOST_SPLITS and blocks(n_sub) * splits < cores and problem.k >= 2 * splits * in_flight:
        splits *= 2
    return HipConfig(n_sub=n_sub, k_splits=splits)


def accepts_moe(problem: MoeProblem) -> str | None:
    """None for a problem that `mxfp8_moe` computes, else the reason why not."""
    if problem.a_block != (1, 32):
        return f"blocks of {problem.a_block} are not those of MX"
    parts = -(-problem.block_m // _TILE)
    return _refusal(
        problem.target, (problem.a_dtype, problem.w_dtype), problem.k, 32, problem.k_lines, problem.largest,
        problem.tiles * parts * -(-problem.n // 8),
    )  # fmt: skip


def untuned_moe(problem: MoeProblem) -> str | None:
    """None where `mxfp8_moe` is the default: few ids, and more where they are spread over many experts.

    The bounds are those that aiter reports for its kernels of this kind, on an MI355X.
    """
    most = 8 if problem.k < 1024 else 64 if problem.experts >= 128 else 16
    if problem.ids > most:
        return f"{problem.ids} ids are above {most}, for K={problem.k} and {problem.experts} experts"
    return None


def configure_moe(problem: MoeProblem) -> HipConfig:
    """Narrow blocks where the tiles that may hold an id do not give every core a wide one."""
    blocks = min(problem.tiles, problem.ids) * -(-problem.n // 16)
    return HipConfig(block_n=16 if blocks >= problem.target.cores else 8)


def fault(launch: HipLaunch) -> str | None:
    """Why the kernel of a launch can't be compiled or loaded here, or None."""
    return launch.fault()


def _refuses_dense(problem: Problem, rows: int, multiple: int) -> str | None:
    refusal = _refusal(
        problem.target, (problem.a_dtype, problem.b_dtype), problem.k, multiple, problem.k_lines, problem.largest,
        problem.batch * -(-problem.n // 4),
    )  # fmt: skip
    return refusal or (f"M={problem.m} is above {rows}" if problem.m > rows else None)


def _refusal(
    target: Target, dtypes: tuple[torch.dtype, ...], k: int, multiple: int, k_lines: bool, largest: int, blocks: int
) -> str | None:
    if target.name != ARCH:
        return f"{target.name} is not {ARCH}"
    for dtype in dtypes:
        if dtype != torch.float8_e4m3fn:
            return f"{dtype} is not float8_e4m3fn"
    if k % multiple or k == 0:
        return f"K={k} is no multiple of {multiple}"
    if not k_lines:
        return "the K of an operand is not in consecutive bytes from a multiple of 16"
    if largest > MOST_BYTES:
        return f"a tensor spans {largest} bytes, past 32-bit offsets"
    if blocks > _MOST_BLOCKS:
        return f"{blocks} blocks are more than a grid has"
    return None
