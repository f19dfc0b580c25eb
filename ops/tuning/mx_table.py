"""The tables of what was measured of `mx_mm`'s and `moe_gemm`'s problems, and what they say of a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fp8fn.ops.cuda.gemm import gemv_mx, mx_tiles
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.hip import envelope
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.kernel import Named
from fp8fn.ops.sort_tokens import most_tiles
from fp8fn.ops.targets import Chip, fp8_dtypes, hopper_fault, native_e4m3, target_of_chip
from fp8fn.ops.tuning import mx_triton
from fp8fn.ops.tuning.measured import Form, Key, candidate_name, check_sizes, verdict
from fp8fn.ops.tuning.mx import MoeProblem, Problem

# Kernels of `fp8fn.ops.mx_mm` on targets without those in CUDA C++, in its order: name, `accepts`, `configure`.
_KERNELS: Final[tuple[tuple[str, Callable[[Problem], str | None], Callable[[Problem], Any]], ...]] = (
    ("hip_gemv", envelope.accepts_gemv, envelope.configure_gemv),
    ("hip_mfma", envelope.accepts_mfma, envelope.configure_mfma),
    ("triton_few", mx_triton.accepts_few, mx_triton.configure_few),
    ("triton_tma", mx_triton.accepts_tma, mx_triton.configure_tma),
    ("triton_scaled", mx_triton.accepts_scaled, mx_triton.configure_scaled),
    ("triton_widened", mx_triton.foreign, mx_triton.configure_widened),
)
_SPLITS: Final = (1, 2, 4, 8)
_ROWS: Final = (16, 32, 64, 128)  # numbers of rows for each of which a kernel may have another tile
_STEP: Final = 128  # elements of K in one matrix instruction of `mxfp8_mfma`


def _mx_problem(key: Key, chip: Chip) -> Problem:
    m, n, k, constant = key
    check_sizes(M=m, N=n, K=k)
    if type(constant) is not bool:
        raise ValueError(f"has {constant!r:.40} as constant, which has to be true or false")
    target = target_of_chip(chip)
    dtype = native_e4m3(target)
    return Problem(m, n, k, target, a_dtype=dtype, b_dtype=dtype, constant=constant)


def _mx_space(problem: Problem) -> Iterator[tuple[str, Any, str | None]]:
    """Kernels, configurations, and why one is not timed, on targets without kernels in CUDA C++.

    The kernels in HIP as aiter sweeps them, beside every tile that Triton's kernels have for some number of rows.
    """
    for name, accepts, configure in _KERNELS:
        if accepts(problem) is not None:
            continue
        own = configure(problem)
        yield name, own, None
        others: list[Any] = []
        if name == "hip_mfma":
            others = [replace(own, n_sub=n, k_splits=parts) for n in (1, 2, 4) for parts in _SPLITS]
        elif name == "triton_few":
            others = [replace(own, BN=bn, SPLITS=parts) for bn in (32, 64) for parts in _SPLITS]
        elif name == "triton_tma":
            others = list(mx_triton.candidates_tma(problem.target))
        elif name.startswith("triton"):
            others = [configure(replace(problem, m=rows)) for rows in _ROWS]
        for config in dict.fromkeys(others):
            if config != own:
                yield name, config, _mx_fault(problem, config)


def _mx_fault(problem: Problem, config: Any) -> str | None:
    """Why a configuration is not worth timing, or None."""
    splits = config.k_splits if isinstance(config, HipConfig) else config.SPLITS
    steps = -(-problem.k // (_STEP if isinstance(config, HipConfig) else config.BK))
    if splits > 1 and steps < 2 * splits:
        return f"{splits} parts of {steps} steps of K are too short for a second pass"
    rows = 0 if isinstance(config, HipConfig) else config.BM
    return f"half of the tile's rows are past M={problem.m}" if rows > 16 and rows >= 2 * problem.m else None


def _mx_pruned(problem: Problem) -> Mapping[str, str]:
    """The reasons of `_mx_space`; on Hopper each kernel's own list has none to give."""
    if hopper_fault(problem.target) is None:
        return {}
    return {candidate_name(kernel, config): why for kernel, config, why in _mx_space(problem) if why is not None}


def _mx_candidates(problem: Problem) -> Mapping[str, Sequence[Any]]:
    """On Hopper those in CUDA C++, elsewhere those of the other kernels."""
    if hopper_fault(problem.target) is not None:
        timed: dict[str, list[Any]] = {}
        for kernel, config, reason in _mx_space(problem):
            if reason is None:
                timed.setdefault(kernel, []).append(config)
        return timed
    found: dict[str, Sequence[Any]] = {}
    if mx_tiles.accepts(problem) is None:
        found["cuda_tiles"] = mx_tiles.candidates(problem)
    if gemv_mx.accepts(problem) is None:
        found["cuda_gemv"] = gemv_mx.candidates(problem)
    return found


# As aiter has it: a kernel in HIP serves where it is faster than Triton's by 3 %.
_HANDICAP: Final = dict.fromkeys(("hip_gemv", "hip_mfma", "hip_moe"), 1.03)
MX_FORM: Final = Form("mx_mm", ("M", "N", "K", "constant"), _mx_problem, _mx_candidates, _mx_pruned, _HANDICAP)


def mx_key(problem: Problem) -> Key:
    """M up to the next power of two; `constant` has no effect but on Hopper."""
    constant = problem.constant and hopper_fault(problem.target) is None
    return ceil_power_of_two(problem.m), problem.n, problem.k, constant


def mx_named(problem: Problem) -> Named | None:
    """The verdict of the tables of the problem's chip; a batch is never measured."""
    return None if problem.chip is None or problem.batch > 1 else verdict(MX_FORM, problem.chip, mx_key(problem))


def _moe_problem(key: Key, chip: Chip) -> MoeProblem:
    ids, n, k, experts, block_m = key
    check_sizes(ids=ids, N=n, K=k, experts=experts, block_m=block_m)
    tiles, target = most_tiles(ids, experts, block_m), target_of_chip(chip)
    dtype = native_e4m3(target)
    return MoeProblem(
        ids=ids, n=n, k=k, experts=experts, tiles=max(tiles, 1), block_m=block_m, target=target, a_dtype=dtype,
        w_dtype=dtype,
    )  # fmt: skip


def _moe_candidates(problem: MoeProblem) -> Mapping[str, Sequence[Any]]:
    """On Hopper those in CUDA C++, elsewhere the HIP kernel's two widths, and Triton's tile with narrow columns too."""
    if hopper_fault(problem.target) is not None:
        if problem.w_dtype not in fp8_dtypes(problem.target):
            return {}
        from fp8fn.ops.triton.moe_gemm import configure

        own = configure(problem)
        tiles = [replace(own, BN=n, num_stages=stages) for n in (32, 64) for stages in (2, 3) if n <= own.BN]
        found: dict[str, list[Any]] = {"triton_moe": list(dict.fromkeys((own, *tiles)))}
        if envelope.accepts_moe(problem) is None:
            hip = envelope.configure_moe(problem)
            found["hip_moe"] = list(dict.fromkeys((hip, *(replace(hip, block_n=n) for n in (8, 16)))))
        return found
    return {"cuda_moe": gemv_mx.candidates_moe(problem)} if gemv_mx.accepts_moe(problem) is None else {}


MOE_FORM: Final = Form(
    "moe_gemm", ("ids", "N", "K", "experts", "block_m"), _moe_problem, _moe_candidates, handicap=_HANDICAP
)


def moe_key(problem: MoeProblem) -> Key:
    """The ids up to the next power of two."""
    return ceil_power_of_two(problem.ids), problem.n, problem.k, problem.experts, problem.block_m


def moe_named(problem: MoeProblem) -> Named | None:
    """The verdict of the tables of the problem's chip on a product in MX-FP8."""
    if problem.chip is None or problem.a_block != (1, 32):
        return None
    return verdict(MOE_FORM, problem.chip, moe_key(problem))
