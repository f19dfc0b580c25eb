"""Finds products of groups in a Dynamo graph: `torch._grouped_mm` under all its names, and transformers' op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fp8fn.lowering.costs import size_of
from fp8fn.ops import gemm, grouped_gemm, scaled_grouped_mm
from fp8fn.ops.formats import short_name
from fp8fn.ops.launch import described
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.recipe import Recipe
from fp8fn.ops.targets import Chip, Target, native_e4m3
from fp8fn.site import Site

OP: Final = "grouped_mm"
# The function takes `input`, the op `self`. Under torch.compile, transformers calls its own op for types other than
# bfloat16, for which Inductor has no grouped product.
_TARGETS: Final = (
    torch._grouped_mm,
    getattr(F, "grouped_mm", None),
    torch.ops.aten._grouped_mm,
    torch.ops.aten._grouped_mm.default,
)
_TRANSFORMERS: Final = "transformers.grouped_mm_fallback"
_PLACES: Final = ("a", "b", "offsets", "bias", "out_dtype")
_NAMES: Final = {"self": "a", "input": "a", "mat_a": "a", "mat2": "b", "mat_b": "b", "weight": "b", "offs": "offsets"}


@dataclass(frozen=True)
class Groups:
    """The groups of a product: their end `offsets (E,)` (None for a batch), their `count` E, and the axis they split.

    `over` is `"M"` for `a (M, K)` by `b (E, K, N)`, `"K"` for `a (M, K)` by `b (K, N)`, and `""` for a batch.
    """

    offsets: Node | None
    count: int
    over: str


def operands(node: Node) -> dict[str, Any] | None:
    """The arguments `a`, `b`, `offsets`, `bias` and `out_dtype` of a product of groups; None for another node."""
    ours = node.target in _TARGETS or str(node.target).removesuffix(".default") == _TRANSFORMERS
    if node.op != "call_function" or not ours:
        return None
    named = {_NAMES.get(name, name): value for name, value in node.kwargs.items()}
    return {**dict(zip(_PLACES, node.args, strict=False)), **named}


def groups_of(left: Tensor, right: Tensor, offsets: Node | None) -> Groups | str:
    """The groups of two operands, or the reason why `fp8fn::grouped_gemm` does not take them."""
    ends = None if offsets is None else offsets.meta.get("example_value")
    if offsets is None:
        if left.ndim == 3 and right.ndim == 3:
            return Groups(None, right.shape[0], "")
        return f"offs is not given with operands of {left.ndim} and {right.ndim} dimensions"
    if not isinstance(ends, Tensor) or ends.dtype != torch.int32:
        kind = short_name(ends.dtype) if isinstance(ends, Tensor) else "no tensor"
        return f"the offsets are {kind}: pass offs.to(torch.int32)"
    if left.ndim == 2 and right.ndim in (2, 3):
        return Groups(offsets, ends.shape[0], "M" if right.ndim == 3 else "K")
    if left.ndim == 3 and right.ndim == 2:
        return "groups of columns: pass b.mT and a.mT for out.mT, whose groups are rows"
    return f"operands of {left.ndim} and {right.ndim} dimensions"


def why_not_recipe(groups: Groups | None, recipe: Recipe) -> str | None:
    """The reason why the recipe cannot quantize by groups, or None."""
    if groups is None or groups.offsets is None:
        return None
    try:
        grouped_gemm.check_recipe("grouped_gemm", recipe)
    except ValueError as error:
        return str(error)
    return None


def kernel_name(
    site: Site, over: str, recipe: Recipe, target: Target, chip: Chip | None, out_dtype: torch.dtype
) -> str:
    """The name of the kernel that multiplies the groups, from the description of its launch; nothing is run.

    The tables that are read are those of `chip`.
    """
    native = native_e4m3(target)
    dtypes = [dtype or native for dtype in (recipe.activation_dtype, recipe.weight_dtype)]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    m, n, k = (size_of(size) or 1 for size in (site.m, site.n, site.k))
    offsets = torch.empty(site.groups, dtype=torch.int32, device="meta")
    if over == "M":
        left = gemm.quantize(empty(m, k), recipe.activation_block, dtypes[0], recipe.scale)
        right = gemm.quantize(empty(site.groups, n, k).mT, recipe.weight_block, dtypes[1], recipe.scale, sums_rows=True)
        out_shape: tuple[int, ...] = m, n
    else:
        args = (recipe.activation_block, dtypes[0], recipe.scale)
        left = grouped_gemm.quantize_grouped(empty(k, m), offsets, *args).mT
        right = grouped_gemm.quantize_grouped(empty(k, n), offsets, args[0], dtypes[1], args[2])
        out_shape = site.groups, m, n
    out = torch.empty(out_shape, dtype=out_dtype, device="meta")
    product = ScaledProduct(a=left, b=right, offsets=offsets, out=out, target=target, chip=chip)
    if (reason := scaled_grouped_mm.SCALED_GROUPED_MM.unserved(product)) is not None:
        return f"reference (plain PyTorch; {reason})"
    return described(scaled_grouped_mm.SCALED_GROUPED_MM.plan(product))
