"""Which kernel multiplies, and in which configuration: by the user's table, the shipped one or the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from torch import Tensor

from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.cublaslt import LibraryLaunch
from fp8fn.ops.cuda.gemm.scaled_mm import Config
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.tuning.candidates import config_of
from fp8fn.ops.tuning.model import ranked
from fp8fn.ops.tuning.problem import Chip, Problem, chip_of, problem_of
from fp8fn.ops.tuning.table import Table, lookup, tables

AnyLaunch: TypeAlias = "TritonLaunch | CudaLaunch | LibraryLaunch"

_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class Choice:
    """A configuration, who chose it, and whether cuBLASLt was measured to be faster."""

    config: Config
    source: str
    peer_wins: bool = False


def choose_config(problem: Problem, cores: int, known: tuple[Table, ...] = ()) -> Choice:
    """The configuration of the first of the `known` tables that has the problem, else the model's."""
    found = lookup(problem, known)
    if found is None:
        return Choice(ranked(problem, cores)[0], "the model")
    # With other types than those measured the library may do otherwise, the tile does not.
    return Choice(config_of(found.entry.config), found.table.name, found.exact and found.entry.peer_wins)


def plan_scaled_mm(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    bias: Tensor | None, out: Tensor, target: Target, chip: Chip | None = None,
) -> AnyLaunch:  # fmt: skip
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`.

    In CUDA C++ where that takes the operands, or by PyTorch where a table says so; else in Triton. `chip` is whose
    tables are read, by default that of the tensors' device; without a device it is the model that chooses.
    """
    operands = (a, a_scale, a_block, b, b_scale, b_block, bias, out, target)
    # Tensors on the CPU are for Triton's interpreter.
    reason = "a is on the CPU" if a.device.type == "cpu" else cuda.accepts(*operands) or nvrtc.unavailable()
    launch: AnyLaunch
    if reason is None:
        choice = choose_config(
            problem_of(a, a_block, b, b_block, out), target.cores, tables(chip or chip_of(a.device, target))
        )
        if choice.peer_wins and cublaslt.allowed() and cublaslt.accepts(*operands) is None:
            launch = cublaslt.plan(*operands, reason=f"faster here by {choice.source}")
        else:
            launch = replace(cuda.plan(*operands, choice.config), reason=f"by {choice.source}")
    else:
        launch = _plan_triton(*operands, reason=reason)
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("scaled_mm %s x %s: %s", tuple(a.shape), tuple(b.shape), launch.describe())
    return launch


def _plan_triton(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    bias: Tensor | None, out: Tensor, target: Target, reason: str,
) -> TritonLaunch:  # fmt: skip
    """The launch in Triton: through TMA where that applies, else by pointers; `reason` is why not in CUDA C++."""
    from fp8fn.ops.triton import scaled_mm, scaled_mm_tma

    operands = (a, a_scale, a_block, b, b_scale, b_block, bias, out, target)
    fault = scaled_mm_tma.accepts(*operands)
    if fault is None:
        return replace(scaled_mm_tma.plan_scaled_mm_tma(*operands), reason=f"no CUDA C++: {reason}")
    because = f"no TMA: {fault}" if fault == reason else f"no CUDA C++: {reason}; no TMA: {fault}"
    launch = scaled_mm.plan_scaled_mm(*operands)
    return replace(launch, reason=f"{launch.reason}; {because}" if launch.reason else because)
