"""The table of what was measured of Triton's quantizers of grouped tokens, whose key has the number of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product as combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.groups import ROWS
from fp8fn.ops.kernel import Named, no_compiler
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.operands import Quantization
from fp8fn.ops.targets import Chip, Target, chip_of, hopper_fault, native_e4m3, target_of_chip
from fp8fn.ops.tuning.measured import Form, Key, candidate_name, check_sizes, verdict

if TYPE_CHECKING:
    from fp8fn.ops.triton.quantize_grouped import GroupedTile

# By the name in a table: the block, and whether rows are written too.
FORMS: Final[Mapping[str, tuple[Block, bool]]] = {
    "columns": ((ROWS, 1), False), "groups": ((WHOLE, 1), False), "dual": ((1, ROWS), True),
}  # fmt: skip
# A thread that keeps more elements spills (`TILE` of the kernel).
_MOST_ELEMENTS: Final = 64
# Tiles that spill with as many, by Triton 3.7.1: on all of a backend, where rows and columns together have 16 warps'
# registers, or on an architecture.
_SPILLS: Final[Mapping[tuple[str | int, str, int, int], str]] = {
    ("cuda", "dual", 256, 16): "spills 6 to 12 registers", (120, "groups", 64, 4): "spills 18 registers",
    (121, "groups", 64, 4): "spills 18 registers",
}  # fmt: skip


class GroupedProblem(NamedTuple):
    """`x (m, n)` in `groups`, written in one of the `FORMS`."""

    form: str
    m: int
    n: int
    groups: int
    target: Target

    @property
    def kernel(self) -> str:
        return "triton_dual" if FORMS[self.form][1] else "triton_blocks"

    def quantization(self, device: torch.device | str = "meta") -> Quantization:
        """Uninitialised tokens and offsets, with outputs."""
        block, dual = FORMS[self.form]
        x = torch.empty(self.m, self.n, dtype=torch.bfloat16, device=device)
        offsets = torch.empty(self.groups, dtype=torch.int32, device=device)
        dtype = native_e4m3(self.target)
        return Quantization(x=x, offsets=offsets, block=block, dtype=dtype, scale="fp32", target=self.target, dual=dual)


def space(problem: GroupedProblem) -> Mapping[GroupedTile, str | None]:
    """Each tile and why it is not timed, or None; the default first."""
    from fp8fn.ops.triton.quantize_grouped import GroupedTile, default_tile

    least = ROWS if FORMS[problem.form][1] else 32
    found: dict[GroupedTile, str | None] = {default_tile(problem.quantization()): None}
    for columns, warps in combinations((least, 2 * least, 4 * least), (2, 4, 8, 16)):
        tile, elements = GroupedTile(columns, warps), ROWS * columns // (warps * problem.target.warp_size)
        reason = None
        if elements > _MOST_ELEMENTS:
            reason = f"{elements} elements a thread spill"
        elif (spills := _spills(problem, tile)) is not None:
            reason = spills
        elif columns >= 2 * problem.n:
            reason = f"half of the tile's columns are past N={problem.n}"
        found.setdefault(tile, reason)
    return found


def _spills(problem: GroupedProblem, tile: GroupedTile) -> str | None:
    keys = (
        (where, problem.form, tile.columns, tile.num_warps) for where in (problem.target.backend, problem.target.arch)
    )
    return next((_SPILLS[key] for key in keys if key in _SPILLS), None)


def _problem(key: Key, chip: Chip) -> GroupedProblem:
    form, m, n, groups = key
    check_sizes(M=m, N=n, groups=groups)
    if form not in list(FORMS):
        raise ValueError(f"has {form!r:.40} as form, which has to be one of {', '.join(FORMS)}")
    return GroupedProblem(form, m, n, groups, target_of_chip(chip))


def _candidates(problem: GroupedProblem) -> Mapping[str, Sequence[Any]]:
    return {problem.kernel: [tile for tile, reason in space(problem).items() if reason is None]}


def _pruned(problem: GroupedProblem) -> Mapping[str, str]:
    return {candidate_name(problem.kernel, tile): why for tile, why in space(problem).items() if why is not None}


FORM: Final = Form("quantize_grouped", ("form", "M", "N", "groups"), _problem, _candidates, _pruned)


def default(problem: GroupedProblem) -> str:
    """The name of the tile that serves where no table has the problem."""
    return candidate_name(problem.kernel, next(iter(space(problem))))


def key_of(q: Quantization) -> Key | None:
    """The tokens up to the next power of two: their number changes from step to step."""
    form = None if q.dual_block else next((name for name, of in FORMS.items() if of == (q.block, q.dual)), None)
    return None if form is None or not q.x.numel() else (form, ceil_power_of_two(q.m), q.n, q.groups)


def named(q: Quantization) -> Named | None:
    """The verdict of the tables of the operands' GPU; on Hopper the kernels in CUDA C++ come first."""
    chip, key = chip_of(q.x.device, q.target), key_of(q)
    if chip is None or key is None or (hopper_fault(q.target) is None and no_compiler() is None):
        return None
    return verdict(FORM, chip, key)
