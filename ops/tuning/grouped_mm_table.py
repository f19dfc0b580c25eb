"""The table of what was measured of products of groups: the tile, and how many rows of tiles a band has.

On Hopper it is the kernel in CUDA C++ that is tuned, on other processors Triton's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product as combinations
from typing import Any, Final, NamedTuple

import torch

from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.groups import ROWS, empty_grouped, unit_of
from fp8fn.ops.kernel import Named
from fp8fn.ops.layout import WHOLE, Block, empty_scale, swap
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.targets import Chip, Target, chip_of, hopper_fault, native_e4m3, target_of_chip
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.tuning.amd import config_of, is_aligned
from fp8fn.ops.tuning.amd_kernels import GROUPED_K, SCALED_MM
from fp8fn.ops.tuning.measured import Form, Key, candidate_name, check_sizes, verdict
from fp8fn.ops.tuning.model import config_name, grouped_microseconds, grouped_tiles, modelled, takes_turns
from fp8fn.ops.tuning.problem import problem_of
from fp8fn.ops.tuning.tile_space import memory_fault


class Layout(NamedTuple):
    """Whether groups are of rows of a, or else of K, the blocks of a and b, and the axis along which experts lie."""

    of_rows: bool
    a: Block
    b: Block
    b_axis: str = "K"


# By the name in a table. One result of experts in squares serves both axes but on Hopper: for dgrad they are "turned".
# The gradient of weights in lines of K, as `nn.Parameter`s of (E, N, K) are, is the transpose of gradients by tokens:
# there the squares of tokens are b's.
LAYOUTS: Final[Mapping[str, Layout]] = {
    "rows": Layout(True, (1, ROWS), (ROWS, ROWS)),
    "turned rows": Layout(True, (1, ROWS), (ROWS, ROWS), "N"),
    "rowwise": Layout(True, (1, WHOLE), (WHOLE, 1)),
    "tokens": Layout(False, (1, ROWS), (ROWS, 1)),
    "squares": Layout(False, (1, ROWS), (ROWS, ROWS)),
    "squares of a": Layout(False, (ROWS, ROWS), (ROWS, 1)),
}
# Rows of tiles in a band, beside those that the model takes.
_BANDS: Final = (3, 4, 5, 8, 12)
_BEHIND: Final = 1.25  # tiles that the model has this far behind its best are not timed
_TRITON_BANDS: Final = (8, 4)
# Rows, columns, warps and stages of Triton's tiles beside the defaults.
_TILES: Final = (
    (16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8),
)  # fmt: skip
# Registers that a candidate's code spills, by Triton 3.7.1 (tests/ops/test_grouped_mm_table.py compiles all others).
_SPILLS: Final[Mapping[tuple[str, str, str], int]] = {
    ("sm89", "rows", "128x128w8s3"): 4,
    ("sm89", "turned rows", "64x128w4s3"): 6,
    ("sm89", "turned rows", "64x128w4s4"): 6,
    ("sm89", "turned rows", "128x128w8s3"): 8,
    ("sm100", "turned rows", "128x64w8s3"): 2,
    ("sm100", "turned rows", "128x64w8s4"): 2,
    ("sm120", "rows", "128x128w8s3"): 2,
    ("sm120", "turned rows", "64x64w8s3"): 2,
    ("sm120", "turned rows", "64x128w4s3"): 2,
    ("sm120", "turned rows", "64x128w4s4"): 2,
    ("sm120", "turned rows", "64x128w8s3"): 2,
    ("sm120", "turned rows", "64x128w8s4"): 2,
}


class GroupsProblem(NamedTuple):
    """`(m, k) @ (groups, k, n)` of rows, or `(m, k) @ (k, n)` in groups of K tokens, in one of the `LAYOUTS`."""

    layout: str
    m: int
    n: int
    k: int
    groups: int
    target: Target
    chip: Chip | None = None

    def product(self, device: torch.device | str = "meta") -> ScaledProduct:
        """Uninitialised operands."""
        (of_rows, a_block, b_block, axis), dtype = LAYOUTS[self.layout], native_e4m3(self.target)
        if of_rows:
            a = torch.empty(self.m, self.k, dtype=dtype, device=device)
            lines = (self.n, self.k) if axis == "K" else (self.k, self.n)
            b = torch.empty(self.groups, *lines, dtype=dtype, device=device)
            b = b.mT if axis == "K" else b
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
            a=left, b=right, target=self.target, chip=self.chip,
            offsets=torch.empty(self.groups, dtype=torch.int32, device=device),
            out=torch.empty(shape, dtype=torch.bfloat16, device=device),
        )  # fmt: skip


def _on(device: torch.device | str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in parts]


def space(problem: GroupsProblem) -> Iterator[tuple[str, Any, str | None]]:
    """Each kernel's configurations and why one is not timed, or None; the default is the first that is timed."""
    return _cuda_space(problem) if hopper_fault(problem.target) is None else _triton_space(problem)


def _cuda_space(problem: GroupsProblem) -> Iterator[tuple[str, ScaledMmConfig, str | None]]:
    product = problem.product()
    if cuda.accepts(product) is not None:
        return
    sizes, of_rows, cores = problem_of(product), LAYOUTS[problem.layout].of_rows, problem.target.cores
    own = modelled(product)
    yield "cuda", own, None
    times = {
        tile: grouped_microseconds(sizes, tile, cores, jagged_m=of_rows)
        for tile in grouped_tiles(sizes, jagged_m=of_rows)
    }
    least = min(times.values())
    for tile in sorted(times, key=lambda tile: (times[tile], config_name(tile))):
        behind = times[tile] / least
        reason = f"modelled at {behind:.2f}x of the best" if behind > _BEHIND else None
        for band in _BANDS:
            if band != tile.GROUP and band * tile.BM >= problem.m:
                continue
            for turns in (True, False) if takes_turns(sizes, tile) else (True,):
                config = replace(tile, GROUP=band, TURNS=turns)
                if config != own:
                    yield "cuda", config, reason


def _triton_space(problem: GroupsProblem) -> Iterator[tuple[str, GemmConfig, str | None]]:
    from fp8fn.ops.triton import grouped_tma
    from fp8fn.ops.triton.scaled_grouped_mm import configured

    product = problem.product()
    if grouped_tma.accepts(product) is None:
        reason = grouped_tma.untuned(product)
        for config in grouped_tma.candidates(product):
            yield "triton_tma", config, reason
    own = configured(product)
    yield "triton", own, None
    for config, band in combinations(_triton_tiles(problem.target), _TRITON_BANDS):
        config = replace(config, GROUP=band)
        if config != own:
            yield "triton", config, _fault(problem, config)


def _triton_tiles(target: Target) -> Sequence[GemmConfig]:
    """The tiles of Triton's other products on AMD, and those of `_TILES` in three or four stages on NVIDIA GPUs."""
    if target.arch not in SCALED_MM:
        return [GemmConfig(*tile, stages) for tile, stages in combinations(_TILES, (3, 4))]
    names = (*(name for _, name in SCALED_MM[str(target.arch)]), GROUPED_K[str(target.arch)])
    own = map(config_of, names)
    kpack = (("kpack", 2),) if target.arch == "gfx942" else ()
    others = (
        GemmConfig(bm, bn, 4 if bm == 128 else 8, stages, options=(("matrix_instr_nonkdim", side), *kpack))
        for bm, bn, stages, side in combinations((128, 256), (64, 128), (1, 2), (16, 32))
    )
    return tuple(dict.fromkeys((*own, *others)))


def _fault(problem: GroupsProblem, config: GemmConfig) -> str | None:
    """Why a configuration of Triton's is not worth timing, or can't run."""
    of_rows, target = LAYOUTS[problem.layout].of_rows, problem.target
    rows = -(-problem.m // problem.groups) if of_rows else problem.m
    if (reason := memory_fault(config, target.arch)) is not None:
        return reason
    if config.BM > 16 and 2 * rows <= config.BM:
        return f"half of the tile's rows are past the {rows} of a group"
    spills = _SPILLS.get((target.name, problem.layout, config.code))
    return None if spills is None else f"spills {spills} registers"


def _problem(key: Key, chip: Chip) -> GroupsProblem:
    layout, m, n, k, groups = key
    check_sizes(M=m, N=n, K=k, groups=groups)
    if layout not in list(LAYOUTS):
        raise ValueError(f"has {layout!r:.40} as product, which has to be one of {', '.join(LAYOUTS)}")
    target = target_of_chip(chip)
    odd = [size for size in _lines(layout, m, n, k) if size % ROWS]
    if odd and hopper_fault(target) is not None:
        raise ValueError(f"has a size of {odd[0]}: products are found by multiples of {ROWS} alone")
    return GroupsProblem(layout, m, n, k, groups, target, chip)


def _lines(layout: str, m: int, n: int, k: int) -> tuple[int, int]:
    """The sizes that do not change from step to step."""
    return (n, k) if LAYOUTS[layout].of_rows else (m, n)


def _candidates(problem: GroupsProblem) -> Mapping[str, Sequence[Any]]:
    timed: dict[str, list[Any]] = {}
    for kernel, config, reason in space(problem):
        if reason is None:
            timed.setdefault(kernel, []).append(config)
    return timed


def _pruned(problem: GroupsProblem) -> Mapping[str, str]:
    return {candidate_name(kernel, config): why for kernel, config, why in space(problem) if why is not None}


FORM: Final = Form("scaled_grouped_mm", ("product", "M", "N", "K", "groups"), _problem, _candidates, _pruned)


def default(problem: GroupsProblem) -> str:
    """The name of the configuration that serves where no table has the problem."""
    kernel, config = next((kernel, config) for kernel, config, reason in space(problem) if reason is None)
    return candidate_name(kernel, config)


def key_of(product: ScaledProduct) -> Key | None:
    """The tokens up to the next power of two: their number changes from step to step.

    The extent of the spread layout tells the tokens in whole units, where they are summed over.
    """
    of_rows, groups = product.b.data.ndim == 3, product.group_ends.shape[0]
    on_hopper = hopper_fault(product.target) is None  # where experts are laid along K before they are multiplied
    axis = "N" if of_rows and not on_hopper and product.b.data.stride(-2) != 1 else "K"
    blocks = Layout(of_rows, product.a.block, product.b.block, axis)
    layout = next((name for name, known in LAYOUTS.items() if known == blocks), None)
    if layout is None or not product.out.numel() or not product.k:
        return None
    if not on_hopper and not _is_even(layout, product):
        return None
    if of_rows:
        return layout, ceil_power_of_two(product.m), product.n, product.k, groups
    tokens = product.k - unit_of(product.k, groups) * groups
    return layout, product.m, product.n, ceil_power_of_two(max(tokens, 1)), groups


def _is_even(layout: str, product: ScaledProduct) -> bool:
    """Whether Triton's loads are whole and wide, as those of what is measured; spread tokens always are along K."""
    if any(size % ROWS for size in _lines(layout, product.m, product.n, product.k)):
        return False
    return not LAYOUTS[layout].of_rows or is_aligned(product.a.data, product.b.data, product.out)


def named(product: ScaledProduct) -> Named | None:
    """The verdict of the tables of the operands' GPU."""
    chip = product.chip or chip_of(product.a.data.device, product.target)
    return None if chip is None else verdict(FORM, chip, key_of(product))
