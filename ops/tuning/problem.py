"""A scaled product as tuning sees it: sizes, how its scales lie, and element types; the key of every table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.cuda.gemm.scaled_mm import BK, KINDS, scale_kind
from fp8fn.ops.formats import short_name
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale, swap
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.targets import Target

PRODUCTS: Final = ("forward", "dgrad", "wgrad")
_A_BLOCKS: Final[dict[str, Block]] = {"VECTOR": (1, BK), "LINE": (1, WHOLE), "WHOLE": (WHOLE, WHOLE)}
_B_BLOCKS: Final[dict[str, Block]] = {
    "VECTOR": (BK, 1), "BLOCK": (BK, BK), "LINE": (WHOLE, 1), "WHOLE": (WHOLE, WHOLE),
}  # fmt: skip


class Chip(NamedTuple):
    """A processor as its driver names it. The same name with fewer multiprocessors (a MIG slice) is another chip."""

    name: str
    multiprocessors: int


class Operands(NamedTuple):
    """What `plan` of a kernel takes, but for the target."""

    a: Tensor
    a_scale: Tensor
    a_block: Block
    b: Tensor
    b_scale: Tensor
    b_block: Block
    bias: Tensor | None
    out: Tensor


@dataclass(frozen=True)
class Problem:
    """`out (batch, m, n) = a (batch, m, k) @ b (batch, k, n)`.

    `a_scale` and `b_scale` are the kinds of `scaled_mm.cu`, a pair of `KINDS`; types are short names of dtypes. A bias
    is no part of it: it adds to each candidate alike.
    """

    m: int
    n: int
    k: int
    a_scale: str = "VECTOR"
    b_scale: str = "BLOCK"
    batch: int = 1
    a_type: str = "e4m3fn"
    b_type: str = "e4m3fn"
    out_type: str = "bfloat16"

    @property
    def kinds(self) -> tuple[str, str]:
        return self.a_scale, self.b_scale

    @property
    def blocks(self) -> tuple[Block, Block]:
        return _A_BLOCKS[self.a_scale], _B_BLOCKS[self.b_scale]

    @property
    def out_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.out_type)
        return found

    @property
    def operations(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    def plain(self) -> Problem:
        """The same with the types that tables are measured with: FP8 types run at one rate, as do 16-bit outputs."""
        out_type = "bfloat16" if self.out_type == "float16" else self.out_type
        return replace(self, a_type="e4m3fn", b_type="e4m3fn", out_type=out_type)

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        (a_rows, a_k), (b_k, b_columns) = (("all" if s == WHOLE else s for s in block) for block in self.blocks)
        return f"{batch}{self.m},{self.n},{self.k} {a_rows}x{a_k}·{b_k}x{b_columns}"


def problem_of(a: Tensor, a_block: Block, b: Tensor, b_block: Block, out: Tensor) -> Problem:
    """The problem of operands that `cuda.scaled_mm.accepts`."""
    return Problem(
        m=a.shape[-2], n=b.shape[-1], k=a.shape[-1],
        a_scale=scale_kind(*a_block), b_scale=scale_kind(b_block[1], b_block[0]),
        batch=out.shape[0] if out.dim() == 3 else 1,
        a_type=short_name(a.dtype), b_type=short_name(b.dtype), out_type=short_name(out.dtype),
    )  # fmt: skip


def linear_problems(m: int, n: int, k: int, recipe: Recipe) -> dict[str, Problem]:
    """The three products of `x (m, k) @ w (n, k)ᵀ` and its backward, as `fp8fn.ops.gemm` makes them on Hopper."""
    x, w, g = recipe.activation_block, recipe.weight_block, recipe.gradient_block
    x_type, w_type, g_type = (
        "e4m3fn" if dtype is None else short_name(dtype)
        for dtype in (recipe.activation_dtype, recipe.weight_dtype, recipe.gradient_dtype)
    )

    def problem(m: int, n: int, k: int, a: Block, b: Block, a_type: str, b_type: str) -> Problem:
        kinds = scale_kind(*a), scale_kind(b[1], b[0])
        if kinds not in KINDS or 32 in (*a, *b):
            raise ValueError(
                f"no kernel in CUDA C++ multiplies blocks {a} by {b}; use blockwise, rowwise or tensorwise"
            )
        return Problem(m, n, k, *kinds, a_type=a_type, b_type=b_type)

    return {
        "forward": problem(m, n, k, x, w, x_type, w_type),
        "dgrad": problem(m, k, n, g, w, g_type, w_type),
        "wgrad": problem(n, k, m, g, swap(x), g_type, x_type),
    }


def empty_operands(problem: Problem, device: torch.device | str) -> Operands:
    """Uninitialised operands, in memory as the quantizers lay them; `meta` to plan without a device."""
    (a_block, b_block), batch = problem.blocks, (problem.batch,) if problem.batch > 1 else ()
    a_like = torch.empty(*batch, problem.m, problem.k, device="meta")
    b_like = torch.empty(*batch, problem.n, problem.k, device="meta").mT
    a, b = (
        torch.empty_strided(laid.shape, laid.stride(), dtype=laid.dtype, device=device)
        for laid in (
            empty_data(a_like, a_block, getattr(torch, f"float8_{problem.a_type}")),
            empty_data(b_like, b_block, getattr(torch, f"float8_{problem.b_type}"), column_major=True),
        )
    )
    a_scale = empty_scale(a, a_block, "fp32", column_major=False)
    b_scale = empty_scale(b, b_block, "fp32", column_major=True)
    out = torch.empty(*batch, problem.m, problem.n, dtype=problem.out_dtype, device=device)
    return Operands(a, a_scale, a_block, b, b_scale, b_block, None, out)


def chip_of(device: torch.device, target: Target) -> Chip | None:
    """The chip that a plan is for: that of the tensors, and of `meta` tensors the current one if it is the target."""
    if device.type == "cuda":
        return _chip_of_index(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "meta" and target.multiprocessors and torch.cuda.is_available():
        chip = _chip_of_index(torch.cuda.current_device())
        return chip if chip.multiprocessors == target.multiprocessors else None
    return None


@cache
def _chip_of_index(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    return Chip(str(properties.name), int(properties.multi_processor_count))
