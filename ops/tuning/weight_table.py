"""The table of what was measured of `mm_a16w8`'s problems, and what it says of a product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, mm_a16w8, parts_a16w8, splitk_a16w8
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.cuda.operands import SCALES, SIXTEEN_BITS
from fp8fn.ops.formats import short_name
from fp8fn.ops.kernel import Named
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import Chip, chip_of, fp8_dtypes, hopper_fault, target_of_chip
from fp8fn.ops.tuning.measured import Form, Key, check_sizes, verdict
from fp8fn.ops.tuning.weight import WeightProblem, weight_problem

_TYPES: Final[dict[str, torch.dtype]] = {short_name(dtype): dtype for dtype in SIXTEEN_BITS}


def candidates(problem: WeightProblem) -> Mapping[str, Sequence[Any]]:
    """The configurations of each kernel that computes a problem, whose operands lie as kernels take them.

    Those in CUDA C++ on Hopper, elsewhere every tile that Triton's kernel has for some number of rows.
    """
    if hopper_fault(problem.target) is not None:
        return {"triton_mm": _tiles(problem)} if fp8_dtypes(problem.target) else {}
    found = {
        "cuda_parts": parts_a16w8.candidates(problem),
        "cuda_splitk": splitk_a16w8.candidates(problem),
        "cuda_tiles": a16w8_tiles.candidates(problem),
        "cuda_gemv": gemv_a16w8.candidates(problem),
        "cuda_many": mm_a16w8.candidates(problem),
    }
    return {name: configs for name, configs in found.items() if configs}


def _tiles(problem: WeightProblem) -> Sequence[Any]:
    """The default first, then narrower tiles, or deeper pipelines, of as many rows."""
    from fp8fn.ops.triton.mm_a16w8 import choose_config, is_aligned

    rows = (problem.m, *(rows for rows in (16, 32, 64, 128) if rows < 2 * problem.m))
    of = partial(choose_config, aligned=is_aligned(problem))
    tiles = [of(m, problem.n, problem.block, problem.x_dtype, problem.target) for m in rows]
    few = [tile for tile in tiles if tile.BN <= 64]
    more = [replace(tile, BN=bn, num_stages=stages) for tile in few for bn in (32, 64) for stages in (2, 3)]
    return tuple(dict.fromkeys((*tiles, *more)))


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
    sizes = WeightProblem(m, n, k, batch, block, _TYPES[dtype], True, constant, chip.multiprocessors)
    target = target_of_chip(chip)
    return sizes if hopper_fault(target) is None else sizes._replace(target=target)


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
    if chip is None or not problem.k_lines or problem.x_dtype not in SIXTEEN_BITS:
        return None
    if hopper_fault(product.target) is not None:
        problem = problem._replace(constant=False)  # it has no effect there
    return verdict(FORM, chip, key_of(problem))
