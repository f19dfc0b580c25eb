"""The table of what was measured of `mm_a16w8`'s problems, and what it says of a product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, mm_a16w8, splitk_a16w8
from fp8fn.ops.cuda.gemm.operands import INPUTS, SCALES
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.formats import short_name
from fp8fn.ops.kernel import Named
from fp8fn.ops.products import WeightProduct
from fp8fn.ops.targets import Chip, chip_of
from fp8fn.ops.tuning.measured import Form, Key, check_sizes, lookup
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

_TYPES: Final[dict[str, torch.dtype]] = {short_name(dtype): dtype for dtype in INPUTS}


def candidates(problem: WeightProblem) -> Mapping[str, Sequence[Any]]:
    """The configurations of each kernel that computes a problem, whose operands lie as kernels take them."""
    found = {
        "cuda_splitk": splitk_a16w8.candidates(problem),
        "cuda_tiles": a16w8_tiles.candidates(problem),
        "cuda_gemv": gemv_a16w8.candidates(problem),
        "cuda_many": mm_a16w8.candidates(problem),
    }
    return {name: configs for name, configs in found.items() if configs}


def key_of(problem: WeightProblem) -> Key:
    """M up to the next power of two: of so many rows no kernel has another configuration."""
    m = ceil_power_of_two(problem.m)
    block, dtype = problem.block, short_name(problem.x_dtype)
    return m, problem.n, problem.k, problem.batch, block, dtype, problem.constant


def _problem(key: Key, chip: Chip) -> WeightProblem:
    m, n, k, batch, block, dtype, constant = key
    check_sizes(M=m, N=n, K=k, batch=batch)
    if block not in list(SCALES):
        raise ValueError(f"has {block!r:.40} as block, which has to be one of {', '.join(map(str, SCALES))}")
    if dtype not in list(_TYPES):
        raise ValueError(f"has {dtype!r:.40} as x_type, which has to be one of {', '.join(_TYPES)}")
    if type(constant) is not bool:
        raise ValueError(f"has {constant!r:.40} as constant, which has to be true or false")
    return WeightProblem(m, n, k, batch, block, _TYPES[dtype], True, constant, chip.multiprocessors)


FORM: Final = Form(
    op="mm_a16w8",
    keys=("M", "N", "K", "batch", "block", "x_type", "constant"),
    problem=_problem,
    candidates=candidates,
)


def named(product: WeightProduct, chip: Chip | None = None) -> Named | None:
    """The verdict of the tables of a chip, by default that of the operands, on a product."""
    chip = chip or chip_of(product.x.device, product.target)
    problem = weight_problem(product)
    if chip is None or not problem.k_lines or problem.x_dtype not in INPUTS:
        return None
    found = lookup(FORM, chip, key_of(problem))
    if found is None:
        return None
    row, name = found
    return Named(row.kernel, name, lambda _: row.config)
