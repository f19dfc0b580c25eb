"""The MX products that Triton's kernels take, and their default tiles: pure functions of the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fp8fn.ops import targets
from fp8fn.ops.targets import Target
from fp8fn.ops.tuning.mx import MxConfig, Problem

# Rows of a tile of the kernel that shares a sum over K: the least that a matrix instruction has.
_FEW: Final = 16
_MOST_SPLITS: Final = 8
# sm121 has the instruction of sm120 too, but there Triton 3.7.1 multiplies in bfloat16.
_SCALED: Final = (100, 103, 120, "gfx950")
# Architectures on which scales are copied from shared memory to tensor memory.
_COPIES: Final = (100, 103)
_BY_TMA: Final = (*_COPIES, 120)
# Up to this number of rows half of a tile of 128 is empty.
_FEW_BY_TMA: Final = 64
# K tiles of the programs that a multiprocessor runs in turn. At each the kernel by pointers waits for its scales, some
# 0.3 us by the latency of L2, and a launch that swizzles them takes some 3 us. Neither was ever timed on Blackwell.
_LEAST_TILES: Final = 10


def foreign(problem: Problem) -> str | None:
    for dtype in (problem.a_dtype, problem.b_dtype):
        if dtype not in targets.fp8_dtypes(problem.target):
            return f"{dtype} has no kernel on {problem.target.name}"
    return None


def accepts_few(problem: Problem) -> str | None:
    return foreign(problem) or (f"M={problem.m} is above {_FEW}" if problem.m > _FEW else None)


def configure_few(problem: Problem) -> MxConfig:
    """Narrow tiles and a sum over K in parts, until every core has a program: a weight is read at memory's speed."""
    target = problem.target
    options = (("matrix_instr_nonkdim", 16),) if target.backend == "hip" else ()
    bn = 64 if -(-problem.n // 64) * problem.batch >= target.cores else 32
    config = MxConfig(_FEW, bn, 128, 4, 2 if target.backend == "hip" else 4, options=options)
    tiles, splits = -(-problem.n // bn) * problem.batch, 1
    # Two steps of K for each part at least: the second pass costs a launch.
    while splits < _MOST_SPLITS and tiles * splits < target.cores and problem.k >= 4 * splits * config.BK:
        splits *= 2
    return replace(config, SPLITS=splits)


def accepts_scaled(problem: Problem) -> str | None:
    if problem.target.arch not in _SCALED:
        return f"Triton has no matrix instruction with scales for {problem.target.name}"
    return foreign(problem)


def configure_scaled(problem: Problem) -> MxConfig:
    if problem.target.backend == "hip":
        if problem.m <= 32:
            return MxConfig(32, 64, 256, 4, 2, options=(("matrix_instr_nonkdim", 16),))
        options = (("matrix_instr_nonkdim", 32),)  # tiles of 16 would leave by 8 bytes
        if problem.m <= 64:
            return MxConfig(64, 64, 256, 4, 2, options=options)
        return MxConfig(128, 128, 128, 8, 2, options=options)
    if problem.target.arch == 120:
        return _configure_sm120(problem)
    if problem.k % 16:  # loads of single bytes take registers: 128 deep spills 28 to 172
        return MxConfig(128, 64, 64, 8, 3)
    return MxConfig(128, 64 if problem.m <= 128 else 128, 128, 8, 3)


def _configure_sm120(problem: Problem) -> MxConfig:
    """Tiles for `mma.sync`, which takes operands from registers. A thread block has 99 KiB of shared memory."""
    if not problem.k_lines or problem.k % 16:  # turned around in registers, or loaded by bytes: others spill 2 to 478
        return MxConfig(64, 64, 64, 8, 3)
    if problem.m <= 64:
        bm = 16 if problem.m <= 16 else 32 if problem.m <= 32 else 64
        return MxConfig(bm, 64, 128, 8 if bm == 64 else 4, 3)
    return MxConfig(128, 128, 128, 8, 3)  # 4 warps spill 80


def copies_scales(target: Target) -> bool:
    """Whether `tcgen05.cp` takes the scales of MX, which have to be swizzled for it."""
    return target.arch in _COPIES


def accepts_tma(problem: Problem) -> str | None:
    if problem.target.arch not in _BY_TMA:
        return f"{problem.target.name} is none of {', '.join(f'sm{arch}' for arch in _BY_TMA)}"
    if (reason := foreign(problem)) is not None:
        return reason
    if problem.m <= _FEW_BY_TMA:
        return f"M={problem.m} is {_FEW_BY_TMA} or below"
    if problem.k == 0:
        return "K is 0"
    if not problem.in_boxes:
        return "an operand does not lie as bulk copies take it"
    if not (problem.scales_in_boxes or copies_scales(problem.target)):
        return "the scales do not lie as bulk copies take them"
    return None


def configure_tma(problem: Problem) -> MxConfig:
    return candidates_tma(problem.target)[0]


def candidates_tma(target: Target) -> tuple[MxConfig, ...]:
    """Configurations worth timing, the default first; none was timed, and none spills.

    On sm100 two programs of 101 KiB share a multiprocessor, and one stores while another multiplies.
    """
    if target.arch == 120:
        return (
            MxConfig(128, 128, 128, 8, 3),
            MxConfig(128, 64, 128, 8, 3),  # 64x128 spills 2 where both sides have a partial tile
            MxConfig(64, 64, 128, 4, 3),
        )
    return (
        MxConfig(128, 128, 128, 8, 3),
        MxConfig(128, 128, 128, 4, 3),
        MxConfig(128, 128, 128, 8, 5),
        MxConfig(128, 256, 128, 8, 3),
        MxConfig(128, 256, 128, 8, 4),
        MxConfig(128, 128, 256, 8, 3),
    )


def untuned_tma(problem: Problem) -> str | None:
    """Why the launch that swizzles the scales is not known to pay for itself, or None."""
    if not copies_scales(problem.target):
        return None
    config = configure_tma(problem)
    tiles = problem.batch * -(-problem.m // config.BM) * -(-problem.n // config.BN)
    return few_steps(-(-problem.k // config.BK), tiles, problem.target)


def few_steps(steps: int, tiles: int, target: Target) -> str | None:
    """Why `tiles` of `steps` K tiles each don't pay for a launch that swizzles the scales, or None."""
    steps *= -(-tiles // target.cores)
    if steps >= _LEAST_TILES:
        return None
    return f"{steps} K tiles a multiprocessor are too few for a launch that swizzles the scales"


def configure_widened(problem: Problem) -> MxConfig:
    """As of `mm_a16w8`: deep tiles up to 64 rows, where the weight's bytes decide, and wide ones beyond."""
    target, m = problem.target, problem.m
    options = (("matrix_instr_nonkdim", 16),) if target.backend == "hip" else ()
    # If K is no multiple of 16, loads of single bytes take registers: wide tiles spill 18 to 80 on NVIDIA GPUs.
    if m <= 64 or (problem.k % 16 and target.backend == "cuda"):
        bm = 16 if m <= 16 else 32 if m <= 32 else 64
        bn = 64 if -(-problem.n // 64) * problem.batch >= target.cores else 32
        if target.backend == "hip":
            return MxConfig(bm, bn, 128, 4, 2, options=options)
        # With a partial K tile 4 warps spill 2 registers on sm100.
        warps = 8 if bm == 64 or (target.arch in (100, 103) and problem.k % 128) else 4
        return MxConfig(bm, bn, 64 if bm == 64 else 128, warps, 3)
    if target.backend == "hip":
        return MxConfig(128, 128, 64, 8, 2, options=options)
    return MxConfig(128, 128, 64, 8, 3)
