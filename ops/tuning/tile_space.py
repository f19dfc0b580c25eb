"""Triton's scaled product as tuning sees it on any processor: the problem, its candidates, and why others are none.

On AMD the candidates are Primus-Turbo's own space (96 of forward, 144 of dgrad, 96 of wgrad) and those that fp8fn has
figures of. Theirs deals runs of 32 or 64 tiles to a chiplet; here a chiplet has one run, or none of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product as combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.layout import WHOLE, Block, empty_scale
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.targets import Target, hopper_fault, native_e4m3
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.tuning import amd
from fp8fn.ops.tuning.amd_model import PROCESSORS, Cost, Kernel, Processor, product_time

if TYPE_CHECKING:
    from fp8fn.ops.triton.scaled_mm_tma import TmaConfig

# The products of a layer: a_block, b_block, and the axes along which a and b are contiguous.
LAYOUTS: Final[Mapping[str, tuple[Block, Block, str, str]]] = {
    "forward": ((1, 128), (128, 128), "K", "K"),
    "dgrad": ((1, 128), (128, 128), "K", "N"),
    "wgrad": ((1, 128), (128, 1), "K", "K"),
    "TN": ((1, 128), (128, 1), "M", "N"),
    "rowwise": ((1, WHOLE), (WHOLE, 1), "K", "K"),
}
_BK: Final = 128
_LANE: Final = 4  # bytes of a register
# Candidates that a model with the chip's rates has this far behind its best are not timed.
_BEHIND: Final = 2.0
# Registers that a candidate's code spills, by Triton 3.7.1 (tests/ops/test_tuning_targets.py compiles all others).
_SPILLS: Final[Mapping[tuple[str, str, str], int]] = {
    ("gfx942", "dgrad", "256x128w8s2n16k1"): 6,
    ("sm120", "wgrad", "128x64w8s3"): 2,
    ("sm120", "wgrad", "128x64w8s4"): 2,
}
# Bytes of shared memory that one program may take, by the major compute capability.
_SHARED: Final[Mapping[int, int]] = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10, 11: 227 << 10, 12: 99 << 10}
_MOST_REGISTERS: Final = 255


class TileProblem(NamedTuple):
    """`out (batch, m, n) = a (batch, m, k) @ b (batch, k, n)`, one of the `LAYOUTS`, on a target."""

    layout: str
    m: int
    n: int
    k: int
    target: Target
    batch: int = 1

    def product(self, device: torch.device | str = "meta") -> ScaledProduct:
        """Uninitialised operands."""
        a_block, b_block, a_axis, b_axis = LAYOUTS[self.layout]
        lead = (self.batch,) if self.batch > 1 else ()
        dtype = native_e4m3(self.target)

        def matrix(rows: int, columns: int, turned: bool) -> Tensor:
            x = torch.empty(*lead, *((columns, rows) if turned else (rows, columns)), dtype=dtype, device=device)
            return x.mT if turned else x

        a, b = matrix(self.m, self.k, a_axis == "M"), matrix(self.k, self.n, b_axis == "K")
        return ScaledProduct(
            a=Quantized(a, empty_scale(a, a_block, "fp32"), a_block),
            b=Quantized(b, empty_scale(b, b_block, "fp32"), b_block),
            out=torch.empty(*lead, self.m, self.n, dtype=torch.bfloat16, device=device),
            target=self.target,
        )


class Candidate(NamedTuple):
    """A configuration of a kernel, and why it is not timed, or None."""

    kernel: str
    config: GemmConfig | TmaConfig
    pruned: str | None


@lru_cache(maxsize=256)
def space(problem: TileProblem) -> tuple[Candidate, ...]:
    """Every candidate of a problem, the default first, and then by the model's time where there is a model."""
    from fp8fn.ops.triton import scaled_mm, scaled_mm_tma

    product = problem.product()
    found: list[tuple[str, GemmConfig | TmaConfig]] = []
    if scaled_mm_tma.accepts(product) is None:
        found += [("triton_tma", config) for config in scaled_mm_tma.configs(product)]
    found.append(("triton", scaled_mm.configured(product)[0]))
    rules = _amd_rules(problem) if problem.target.arch in PROCESSORS else _nvidia_rules(problem)
    unique: dict[tuple[str, object], Candidate] = {}
    for candidate in (*(Candidate(kernel, config, None) for kernel, config in found), *rules):
        unique.setdefault((candidate.kernel, candidate.config), candidate)
    return tuple(unique.values())


def known(problem: TileProblem) -> Mapping[str, Collection[GemmConfig | TmaConfig]]:
    """The configurations that a table may name: those that run, also where the model would not time them.

    A measured row holds whatever the model says on a later day, and no model is asked while a table is read.
    """
    if problem.target.arch not in PROCESSORS:
        found: dict[str, list[GemmConfig | TmaConfig]] = {}
        for candidate in space(problem):
            if candidate.pruned is None:
                found.setdefault(candidate.kernel, []).append(candidate.config)
        return found
    return {"triton": _runs_on_amd(problem)}


def _runs_on_amd(problem: TileProblem) -> Collection[GemmConfig]:
    m, n, k = problem.m * problem.batch, problem.n, problem.k
    names = tuple(amd.candidate_names(problem.layout, m, n, k, str(problem.target.arch)))
    return _without_faults(names, problem.layout, str(problem.target.arch))


@lru_cache(maxsize=64)
def _without_faults(names: tuple[str, ...], layout: str, arch: str) -> Collection[GemmConfig]:
    configs = (*map(amd.config_of, names), *seeds_space(layout))
    return tuple(dict.fromkeys(config for config in configs if _amd_fault(config, layout, arch) is None))


def seeds_space(layout: str) -> Iterator[GemmConfig]:
    """Primus-Turbo's configurations of a product."""
    stages = (1, 2) if layout in ("wgrad", "TN") else (1, 2, 3)
    for bm, bn, kpack, group, xcds, count in combinations((128, 256), (64, 128), (1, 2), (4, 8), (1, 8), stages):
        config = GemmConfig(bm, bn, 4 if bm == 128 else 8, count, group, XCDS=xcds, options=(("kpack", kpack),))
        yield config
        if bm == 256 and layout != "forward":
            yield replace(config, options=(("matrix_instr_nonkdim", 16), *config.options))


def _amd_rules(problem: TileProblem) -> list[Candidate]:
    """Both spaces by their modelled times; what can't run, or is the code of another, is pruned."""
    layout, arch = problem.layout, str(problem.target.arch)
    times = {}
    for config in (*_figured(problem), *seeds_space(layout)):
        reason, us = _amd_fault(config, layout, arch), 0.0
        if reason is None:
            rows, columns = problem.m * problem.batch, problem.n
            shape = (columns, rows, problem.k) if config.WGRAD_TRANS_STORE else (rows, columns, problem.k)
            us = product_time(shape, estimated(config, layout, arch), config.GROUP, config.XCDS, PROCESSORS[arch]).us
        times[config] = us, reason
    least = min(us for us, reason in times.values() if reason is None)
    found = []
    for config, (us, reason) in sorted(times.items(), key=lambda item: item[1][0]):
        if reason is None and us > _BEHIND * least:
            reason = f"modelled at {us:.1f} µs, {us / least:.2f}x of the best"
        found.append(Candidate("triton", config, reason))
    return found


def _figured(problem: TileProblem) -> list[GemmConfig]:
    """The candidates of `amd.CANDIDATES` that don't spill for the problem, in every order of tiles."""
    rows = problem.m * problem.batch
    times = amd.candidate_times(problem.layout, rows, problem.n, problem.k, str(problem.target.arch))
    return [amd.config_of(name) for name in times]


def _amd_fault(config: GemmConfig, layout: str, arch: str) -> str | None:
    """Why a configuration can't run on an architecture, or needs no run of its own."""
    options = dict(config.options)
    if arch == "gfx950" and options.get("kpack", 1) != 1:
        return "kpack has no effect on gfx950: the code is that of kpack=1"
    return memory_fault(config, arch) or _spill_fault(config, layout, arch)


def _spill_fault(config: GemmConfig, layout: str, target: str) -> str | None:
    spills = _SPILLS.get((target, layout, config.code))
    return None if spills is None else f"spills {spills} registers"


def memory_fault(config: GemmConfig, arch: int | str) -> str | None:
    """Why a thread block of an architecture cannot keep the tiles of K of a configuration, or None."""
    if arch in PROCESSORS:
        lds, most = _lds(config), PROCESSORS[str(arch)].lds
        return f"needs {lds} B of LDS, a workgroup has {most}" if lds > most else None
    shared = config.num_stages * (config.BM + config.BN) * _BK
    most = _SHARED.get(int(arch) // 10, min(_SHARED.values()))
    return f"needs {shared} B of shared memory, a block has {most}" if shared > most else None


def _lds(config: GemmConfig) -> int:
    """Bytes of the tiles of K that are kept; one more tile is in registers."""
    return max(config.num_stages - 1, 1) * (config.BM + config.BN) * _BK


def estimated(config: GemmConfig, layout: str, arch: str) -> Kernel:
    """The figures of a configuration's machine code where they are known, else of the tile alone.

    A wave multiplies a rectangle of the tile: it reads that one's rows and columns from LDS, and adds each of its sums
    to the accumulator once a step of K.
    """
    for (known, name), kernel in amd.table(arch).kernels.items():
        if known == layout and name == config.code:
            return kernel
    processor, warps = PROCESSORS[arch], config.num_warps
    moved = (config.BM + config.BN) * _BK / warps
    read = min(config.BM / rows + config.BN / (warps / rows) for rows in (1, 2, 4, 8) if rows <= warps) * _BK
    sums = config.BM * config.BN / 64 / warps
    step = Cost(2 * config.BM * config.BN * _BK / warps / _rate(processor), 2 * sums, read + moved, moved)
    rest = Cost(0.0, 8 * sums, 0.0, 2.0 * config.BM * config.BN / warps)
    return Kernel(config.BM, config.BN, _BK, warps, step, rest, 0.0, int(2 * sums + 64), _lds(config))


def _rate(processor: Processor) -> int:
    """Operations a cycle and SIMD of its fastest FP8 instruction."""
    return max(processor.rates.get("f8f6f4", 0), processor.rates["fp8"])


def _nvidia_rules(problem: TileProblem) -> list[Candidate]:
    """Tiles of 16 to 128 rows by 64 or 128 columns; no model knows these processors, so only limits prune."""
    found = []
    for bm, bn, warps, stages in combinations((16, 32, 64, 128), (64, 128), (4, 8), (2, 3, 4)):
        config, registers = GemmConfig(bm, bn, warps, stages), _LANE * 2 * bm * bn // (32 * warps * _LANE) + 64
        reason = memory_fault(config, problem.target.arch)
        if reason is not None:
            pass
        elif registers > _MOST_REGISTERS:
            reason = f"needs about {registers} registers a thread, a thread has {_MOST_REGISTERS}"
        elif bm * bn < 16 * 16 * warps:
            reason = f"{warps} warps are more than the tile has instructions for"
        elif bm > 16 and bm >= 2 * problem.m:
            reason = f"half of the tile's rows are past M={problem.m}"
        elif hopper_fault(problem.target) is None and bm < 64 <= problem.m:
            reason = "wgmma multiplies 64 rows"
        found.append(Candidate("triton", config, reason or _spill_fault(config, problem.layout, problem.target.name)))
    return found
