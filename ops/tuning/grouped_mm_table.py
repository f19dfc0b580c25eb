"""The table of what was measured of products of groups on Hopper: the tile, and how many rows of tiles a band has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.groups import ROWS, empty_grouped, unit_of
from fp8fn.ops.kernel import Named
from fp8fn.ops.layout import WHOLE, Block, empty_scale, swap
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import ScaledProduct
from fp8fn.ops.targets import Chip, Target, chip_of, hopper_fault, native_e4m3, target_of_chip
from fp8fn.ops.tuning.measured import Form, Key, candidate_name, check_sizes, verdict
from fp8fn.ops.tuning.model import config_name, grouped_microseconds, grouped_tiles, modelled
from fp8fn.ops.tuning.problem import problem_of

KERNEL: Final = "cuda"


class Layout(NamedTuple):
    """Whether groups are of rows of a, or else of K, and the blocks of a and b."""

    of_rows: bool
    a: Block
    b: Block


# By the name in a table. The gradient of weights in lines of K, as `nn.Parameter`s of (E, N, K) are, is the transpose
# of gradients by tokens: there the squares of tokens are b's.
LAYOUTS: Final[Mapping[str, Layout]] = {
    "rows": Layout(True, (1, ROWS), (ROWS, ROWS)),
    "rowwise": Layout(True, (1, WHOLE), (WHOLE, 1)),
    "tokens": Layout(False, (1, ROWS), (ROWS, 1)),
    "squares": Layout(False, (1, ROWS), (ROWS, ROWS)),
    "squares of a": Layout(False, (ROWS, ROWS), (ROWS, 1)),
}
# Rows of tiles in a band, beside those that the model takes.
_BANDS: Final = (3, 4, 5, 8, 12)
_BEHIND: Final = 1.25  # tiles that the model has this far behind its best are not timed


class GroupsProblem(NamedTuple):
    """`(m, k) @ (groups, k, n)` of rows, or `(m, k) @ (k, n)` in groups of K tokens, in one of the `LAYOUTS`."""

    layout: str
    m: int
    n: int
    k: int
    groups: int
    target: Target

    def product(self, device: torch.device | str = "meta") -> ScaledProduct:
        """Uninitialised operands."""
        (of_rows, a_block, b_block), dtype = LAYOUTS[self.layout], native_e4m3(self.target)
        if of_rows:
            a = torch.empty(self.m, self.k, dtype=dtype, device=device)
            b = torch.empty(self.groups, self.n, self.k, dtype=dtype, device=device).mT
            left = Quantized(a, empty_scale(a, a_block, "fp32"), a_block)
            right = Quantized(b, empty_scale(b, b_block, "fp32"), b_block)
        else:
            tokens = torch.empty(self.k, max(self.m, self.n), device="meta")
            (a, a_scale), (b, b_scale) = (
                _on(device, empty_grouped(tokens[:, :columns], self.groups, block, dtype, "fp32"))
                for columns, block in ((self.m, swap(a_block)), (self.n, b_block))
            )
            left, right = Quantized(a.mT, a_scale.mT, a_block), Quantized(b, b_scale, b_block)
        shape = (self.m, self.n) if of_rows else (self.groups, self.m, self.n)
        return ScaledProduct(
            a=left, b=right, target=self.target,
            offsets=torch.empty(self.groups, dtype=torch.int32, device=device),
            out=torch.empty(shape, dtype=torch.bfloat16, device=device),
        )  # fmt: skip


def _on(device: torch.device | str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in parts]


def space(problem: GroupsProblem) -> Iterator[tuple[ScaledMmConfig, str | None]]:
    """Each configuration and why it is not timed, or None; the model's own first. None where no kernel is tuned."""
    product = problem.product()
    if cuda.accepts(product) is not None:
        return
    sizes, of_rows, cores = problem_of(product), LAYOUTS[problem.layout].of_rows, problem.target.cores
    own = modelled(product)
    yield own, None
    times = {
        tile: grouped_microseconds(sizes, tile, cores, jagged_m=of_rows)
        for tile in grouped_tiles(sizes, jagged_m=of_rows)
    }
    least = min(times.values())
    for tile in sorted(times, key=lambda tile: (times[tile], config_name(tile))):
        behind = times[tile] / least
        reason = f"modelled at {behind:.2f}x of the best" if behind > _BEHIND else None
        for band in _BANDS:
            config, usual = replace(tile, GROUP=band), band == tile.GROUP
            if config != own and (usual or band * tile.BM < problem.m):
                yield config, reason


def _problem(key: Key, chip: Chip) -> GroupsProblem:
    layout, m, n, k, groups = key
    check_sizes(M=m, N=n, K=k, groups=groups)
    if layout not in list(LAYOUTS):
        raise ValueError(f"has {layout!r:.40} as product, which has to be one of {', '.join(LAYOUTS)}")
    return GroupsProblem(layout, m, n, k, groups, target_of_chip(chip))


def _candidates(problem: GroupsProblem) -> Mapping[str, Sequence[Any]]:
    timed = [config for config, reason in space(problem) if reason is None]
    return {KERNEL: timed} if timed else {}


def _pruned(problem: GroupsProblem) -> Mapping[str, str]:
    return {candidate_name(KERNEL, config): reason for config, reason in space(problem) if reason is not None}


FORM: Final = Form("scaled_grouped_mm", ("product", "M", "N", "K", "groups"), _problem, _candidates, _pruned)


def default(problem: GroupsProblem) -> str:
    """The name of the configuration that serves where no table has the problem."""
    return candidate_name(KERNEL, modelled(problem.product()))


def key_of(product: ScaledProduct) -> Key | None:
    """The tokens up to the next power of two: their number changes from step to step.

    The extent of the spread layout tells the tokens in whole units, where they are summed over.
    """
    of_rows, groups = product.b.data.ndim == 3, product.group_ends.shape[0]
    blocks = Layout(of_rows, product.a.block, product.b.block)
    layout = next((name for name, known in LAYOUTS.items() if known == blocks), None)
    if layout is None or not product.out.numel() or not product.k:
        return None
    if of_rows:
        return layout, ceil_power_of_two(product.m), product.n, product.k, groups
    tokens = product.k - unit_of(product.k, groups) * groups
    return layout, product.m, product.n, ceil_power_of_two(max(tokens, 1)), groups


def named(product: ScaledProduct) -> Named | None:
    """The verdict of the tables of the operands' GPU; Triton's kernel on other processors is not tuned."""
    if hopper_fault(product.target) is not None:
        return None
    chip = product.chip or chip_of(product.a.data.device, product.target)
    return None if chip is None else verdict(FORM, chip, key_of(product))
