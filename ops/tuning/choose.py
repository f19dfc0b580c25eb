"""Hopper's configuration of a scaled product: by the user's table, the shipped one, or the model."""

from __future__ import annotations

from dataclasses import dataclass

from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.kernel import Named
from fp8fn.ops.products import ScaledProduct
from fp8fn.ops.targets import chip_of
from fp8fn.ops.tuning import grouped
from fp8fn.ops.tuning.candidates import config_of
from fp8fn.ops.tuning.model import ranked
from fp8fn.ops.tuning.problem import Problem, problem_of
from fp8fn.ops.tuning.table import Table, lookup, tables


@dataclass(frozen=True)
class Measured:
    """The configuration that a table has for a problem, the table's name, and whether cuBLASLt was the faster one."""

    config: ScaledMmConfig
    source: str
    peer_wins: bool = False


def measured(problem: Problem, known: tuple[Table, ...]) -> Measured | None:
    """The entry of the first of the `known` tables that has the problem."""
    found = lookup(problem, known)
    if found is None:
        return None
    # With other types than those measured the library may do otherwise, the tile does not.
    return Measured(config_of(found.entry.config), found.table.name, found.exact and found.entry.peer_wins)


def named(product: ScaledProduct) -> Named | None:
    """The kernel and the configuration that a table of the product's chip names."""
    found = measured(problem_of(product), tables(product.chip or chip_of(product.a.data.device, product.target)))
    if found is None:
        return None
    if found.peer_wins and cublaslt.allowed() and cublaslt.accepts(product) is None:
        return Named("cublaslt", found.source, lambda config: config)
    return Named("cuda", found.source, lambda _: found.config)


def modelled(product: ScaledProduct) -> ScaledMmConfig:
    """The configuration of the least time by the model."""
    problem, cores = problem_of(product), product.target.cores
    if product.offsets is not None:
        return grouped.choose_config(problem, cores, jagged_m=product.b.data.dim() == 3)
    return ranked(problem, cores)[0]
