"""A scaled product as tuning sees it: sizes, how its scales lie, and element types; the key of every table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Final

import torch

from fp8fn.ops.cuda.gemm.scaled_mm import BK, scale_kind
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale, swap
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.targets import Chip, Target

PRODUCTS: Final = ("forward", "dgrad", "wgrad")
_BLOCKS: Final[dict[str, Block]] = {"VECTOR": (1, BK), "BLOCK": (BK, BK), "LINE": (1, WHOLE), "WHOLE": (WHOLE, WHOLE)}


@dataclass(frozen=True)
class Problem:
    """`out (batch, m, n) = a (batch, m, k) @ b (batch, k, n)`.

    `a_scale` and `b_scale` are the kinds of `scaled_mm.cu`; tables hold the pairs of `KINDS`, and no `fast` product,
    whose sums over K may stay in the tensor core. A bias is no part of the problem: it adds to each candidate alike.
    """

    m: int
    n: int
    k: int
    a_scale: str = "VECTOR"
    b_scale: str = "BLOCK"
    batch: int = 1
    a_type: torch.dtype = torch.float8_e4m3fn
    b_type: torch.dtype = torch.float8_e4m3fn
    out_type: torch.dtype = torch.bfloat16
    fast: bool = False

    @property
    def kinds(self) -> tuple[str, str]:
        return self.a_scale, self.b_scale

    @property
    def blocks(self) -> tuple[Block, Block]:
        return _BLOCKS[self.a_scale], swap(_BLOCKS[self.b_scale])

    @cached_property
    def place(self) -> tuple[float, float, float]:
        """The logarithms of the sizes, by whose distance problems are near each other."""
        return log(self.m), log(self.n), log(self.k)

    @property
    def is_scaled_along_k(self) -> bool:
        """Whether a scale of either operand changes along K, so that each K tile is promoted."""
        return not {"VECTOR", "BLOCK"}.isdisjoint(self.kinds)

    @property
    def operations(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    def plain(self) -> Problem:
        """The same with the types that tables are measured with: FP8 types run at one rate, as do 16-bit outputs."""
        out_type = torch.bfloat16 if self.out_type == torch.float16 else self.out_type
        return replace(self, a_type=torch.float8_e4m3fn, b_type=torch.float8_e4m3fn, out_type=out_type)

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        (a_rows, a_k), (b_k, b_columns) = (("all" if s == WHOLE else s for s in block) for block in self.blocks)
        fast = " fast" if self.fast else ""
        return f"{batch}{self.m},{self.n},{self.k} {a_rows}x{a_k}·{b_k}x{b_columns}{fast}"


def problem_of(product: ScaledProduct) -> Problem:
    """The problem of operands that `cuda.scaled_mm.accepts`; groups count as a batch of the product over all tokens."""
    a, b = product.a, product.b
    return Problem(
        m=a.data.shape[-2], n=product.n, k=product.k,
        a_scale=scale_kind(*a.block), b_scale=scale_kind(b.block[1], b.block[0]),
        batch=product.batch if product.offsets is None else product.offsets.shape[0],
        a_type=a.data.dtype, b_type=b.data.dtype, out_type=product.out.dtype, fast=product.fast,
    )  # fmt: skip


def linear_problems(m: int, n: int, k: int, recipe: Recipe) -> dict[str, Problem]:
    """The three products of `x (m, k) @ w (n, k)ᵀ` and its backward, as `fp8fn.ops.gemm` makes them on Hopper."""
    x, w, g = recipe.activation_block, recipe.weight_block, recipe.gradient_block
    x_type, w_type, g_type = (
        torch.float8_e4m3fn if dtype is None else dtype
        for dtype in (recipe.activation_dtype, recipe.weight_dtype, recipe.gradient_dtype)
    )

    def problem(m: int, n: int, k: int, a: Block, b: Block, a_type: torch.dtype, b_type: torch.dtype) -> Problem:
        kinds = scale_kind(*a), scale_kind(b[1], b[0])
        if "OTHER" in kinds:
            raise ValueError(
                f"no kernel in CUDA C++ multiplies blocks {a} by {b}; use blockwise, rowwise or tensorwise"
            )
        return Problem(m, n, k, *kinds, a_type=a_type, b_type=b_type)

    forward = problem(m, n, k, x, w, x_type, w_type)
    return {
        "forward": replace(forward, fast=recipe.accumulate == "fast"),
        "dgrad": problem(m, k, n, g, w, g_type, w_type),
        "wgrad": problem(n, k, m, g, recipe.wgrad_block, g_type, x_type),
    }


def empty_product(
    problem: Problem, device: torch.device | str, target: Target, chip: Chip | None = None
) -> ScaledProduct:
    """Uninitialised operands, in memory as the quantizers lay them; `meta` to plan without a device."""
    (a_block, b_block), batch = problem.blocks, (problem.batch,) if problem.batch > 1 else ()
    a_like = torch.empty(*batch, problem.m, problem.k, device="meta")
    b_like = torch.empty(*batch, problem.n, problem.k, device="meta").mT
    a, b = (
        torch.empty_strided(laid.shape, laid.stride(), dtype=laid.dtype, device=device)
        for laid in (
            empty_data(a_like, a_block, problem.a_type),
            empty_data(b_like, b_block, problem.b_type, column_major=True),
        )
    )
    left = Quantized(a, empty_scale(a, a_block, "fp32", column_major=False), a_block)
    right = Quantized(b, empty_scale(b, b_block, "fp32", column_major=True), b_block)
    out = torch.empty(*batch, problem.m, problem.n, dtype=problem.out_type, device=device)
    return ScaledProduct(a=left, b=right, out=out, target=target, fast=problem.fast, chip=chip)
