"""The tables of what was measured of `mx_mm`'s and `moe_gemm`'s problems, and what they say of a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fp8fn.ops.cuda.gemm import gemv_mx, mx_tiles
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.kernel import Named
from fp8fn.ops.sort_tokens import most_tiles
from fp8fn.ops.targets import SM90, Chip
from fp8fn.ops.tuning.measured import Form, Key, check_sizes, lookup
from fp8fn.ops.tuning.mx import MoeProblem, Problem


def _mx_problem(key: Key, chip: Chip) -> Problem:
    m, n, k, constant = key
    check_sizes(M=m, N=n, K=k)
    if type(constant) is not bool:
        raise ValueError(f"has {constant!r:.40} as constant, which has to be true or false")
    return Problem(m, n, k, replace(SM90, multiprocessors=chip.multiprocessors), constant=constant)


def _mx_candidates(problem: Problem) -> Mapping[str, Sequence[Any]]:
    """In CUDA C++."""
    found: dict[str, Sequence[Any]] = {}
    if mx_tiles.accepts(problem) is None:
        found["cuda_tiles"] = mx_tiles.candidates(problem)
    if gemv_mx.accepts(problem) is None:
        found["cuda_gemv"] = gemv_mx.candidates(problem)
    return found


MX_FORM: Final = Form("mx_mm", ("M", "N", "K", "constant"), _mx_problem, _mx_candidates)


def mx_key(problem: Problem) -> Key:
    """M up to the next power of two."""
    return ceil_power_of_two(problem.m), problem.n, problem.k, problem.constant


def mx_named(problem: Problem) -> Named | None:
    """The verdict of the tables of the problem's chip; a batch is never measured."""
    return None if problem.chip is None or problem.batch > 1 else _named(MX_FORM, problem.chip, mx_key(problem))


def _moe_problem(key: Key, chip: Chip) -> MoeProblem:
    ids, n, k, experts, block_m = key
    check_sizes(ids=ids, N=n, K=k, experts=experts, block_m=block_m)
    target = replace(SM90, multiprocessors=chip.multiprocessors)
    tiles = most_tiles(ids, experts, block_m)
    return MoeProblem(ids=ids, n=n, k=k, experts=experts, tiles=max(tiles, 1), block_m=block_m, target=target)


def _moe_candidates(problem: MoeProblem) -> Mapping[str, Sequence[Any]]:
    """In CUDA C++."""
    return {"cuda_moe": gemv_mx.candidates_moe(problem)} if gemv_mx.accepts_moe(problem) is None else {}


MOE_FORM: Final = Form("moe_gemm", ("ids", "N", "K", "experts", "block_m"), _moe_problem, _moe_candidates)


def moe_key(problem: MoeProblem) -> Key:
    """The ids up to the next power of two."""
    return ceil_power_of_two(problem.ids), problem.n, problem.k, problem.experts, problem.block_m


def moe_named(problem: MoeProblem) -> Named | None:
    """The verdict of the tables of the problem's chip on a product in MX-FP8."""
    if problem.chip is None or problem.a_block != (1, 32):
        return None
    return _named(MOE_FORM, problem.chip, moe_key(problem))


def _named(form: Form, chip: Chip, key: Key) -> Named | None:
    found = lookup(form, chip, key)
    if found is None:
        return None
    row, name = found
    return Named(row.kernel, name, lambda _: row.config)
