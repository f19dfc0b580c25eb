"""Replaces `torch._scaled_mm` and `torch.nn.functional.scaled_mm` where fp8fn's kernel is faster.

    y = torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16)
    y = F.scaled_mm(a, b, scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128)

Products with tensorwise, rowwise, 1x128 and 128x128 scales become `fp8fn::scaled_mm`. On a GPU the tuning table says
which kernel is faster; without an entry, products with block scales are replaced, and those with tensorwise and rowwise
scales are not. On a CPU every exact substitution is made: speed does not matter there, and PyTorch has no CPU product
with block scales. Partial sums are float32, as with `use_fast_accum=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, source_of, value
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import Size, aten, equal, same_sizes
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm.scaled_mm import KINDS, scale_kind
from fp8fn.ops.formats import INPUT_DTYPES, short_name
from fp8fn.ops.layout import WHOLE, Block, scale_shape, swap
from fp8fn.ops.targets import Target, chip_of, hopper_fault
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import Table, lookup, tables

NAME: Final = "scaled_mm"
PRODUCTS: Final = (aten._scaled_mm.default, aten._scaled_mm_v2.default)
# The pairs of scalings in ATen's order (get_joint_scaling in ScaledBlas.cpp); ATen uses the first pair that fits.
_PAIRS: Final[tuple[tuple[Block, Block], ...]] = (
    ((WHOLE, WHOLE), (WHOLE, WHOLE)),
    ((1, WHOLE), (WHOLE, 1)),
    ((128, 128), (128, 1)),
    ((1, 128), (128, 128)),
    ((1, 128), (128, 1)),
)
# The block of a by torch.nn.functional.ScalingType; b has the transposed block.
_RECIPES: Final[dict[int, Block]] = {0: (WHOLE, WHOLE), 1: (1, WHOLE), 4: (1, 128), 5: (128, 128)}
_RECIPE_NAMES: Final = {
    ("WHOLE", "WHOLE"): "tensorwise",
    ("LINE", "LINE"): "rowwise",
    ("VECTOR", "BLOCK"): "blockwise",
    ("VECTOR", "VECTOR"): "blockwise",
}


@dataclass(frozen=True)
class Side:
    """An operand; `turned` if its scales are stored as those of the transposed data."""

    data: Node
    scale: Node
    block: Block
    turned: bool = False

    @property
    def scale_shape(self) -> tuple[Size, ...]:
        return scale_shape(self.data.meta["val"].shape, self.block)

    def fits(self) -> bool:
        """Whether the shape of the scales fits the block; scales of 128x128 may be padded to 4 along K."""
        wanted, scale = self.scale_shape, self.scale.meta["val"]
        if WHOLE in self.block:
            return equal(scale.numel(), prod(wanted))
        found = scale.shape[::-1] if self.turned else scale.shape
        if len(found) != 2:
            return False
        padded = [size + -size % 4 if self.block == (128, 128) else size for size in wanted]
        return all(equal(f, w) or equal(f, p) for f, w, p in zip(found, wanted, padded, strict=True))

    def emit(self, graph: Graph) -> tuple[Node, Node, Block]:
        """Adds the nodes that make the operand one of `fp8fn::scaled_mm`, at the graph's insertion point."""
        wanted, scale = self.scale_shape, self.scale
        if WHOLE in self.block:
            if not same_sizes(scale.meta["val"].shape, wanted):
                scale = call(graph, aten.reshape.default, scale, list(wanted))
            return self.data, scale, self.block
        if self.turned:
            scale = call(graph, aten.permute.default, scale, [1, 0])
        for dim, size in enumerate(wanted):
            if not equal(scale.meta["val"].shape[dim], size):
                scale = call(graph, aten.slice.Tensor, scale, dim, 0, size)
        return self.data, scale, self.block


@dataclass(frozen=True)
class Product:
    """The arguments of a call of either op, without its output's type."""

    a: Side
    b: Side
    bias: Node | None
    fast: bool

    @property
    def kinds(self) -> tuple[str, str]:
        return scale_kind(*self.a.block), scale_kind(*swap(self.b.block))


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Replaces calls where this is exact and not slower, and reports each call."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in PRODUCTS:
            continue
        found = _read(node)
        reason = found if isinstance(found, str) else _why_not(node, found)
        (m, k), n = node.args[0].meta["val"].shape, node.args[1].meta["val"].shape[1]
        made = "" if reason or isinstance(found, str) else _emit(graph, node, found)
        yield Substitution(NAME, str(node), source_of(node), str(node.target), (m, n, k), made, reason)


def _read(node: Node) -> Product | str:
    """The product, or the reason why fp8fn cannot compute it."""
    given = arguments_of(node)
    a, b, fast = given["self"], given["mat2"], bool(given["use_fast_accum"])
    if given.get("scale_result") is not None:
        return "scale_result is for outputs in FP8, which fp8fn does not write: leave it out"
    if given.get("contraction_dim"):
        return "contraction_dim is given: pass a (M, K) and b (K, N) without it"
    listed = isinstance(given["scale_a"], Sequence)
    scales = [*given["scale_a"], *given["scale_b"]] if listed else [given["scale_a"], given["scale_b"]]
    swizzles = [*(given.get("swizzle_a") or ()), *(given.get("swizzle_b") or ())]
    if len(scales) != 2 or any(map(int, swizzles)) or any(_dtype(scale) != torch.float32 for scale in scales):
        return "its scales are MX or NVFP4 ones, in PyTorch's order; fp8fn takes what fp8fn.quantize(x, (1, 32)) makes"
    if not listed:
        for left, right in _PAIRS:
            sides = Side(a, scales[0], left), Side(b, scales[1], right)
            if sides[0].fits() and sides[1].fits():
                return Product(*sides, given["bias"], fast)
    else:
        kinds = [_RECIPES.get(int(kind)) for kind in (*given["recipe_a"], *given["recipe_b"])]
        if len(kinds) == 2 and kinds[0] is not None and kinds[1] is not None:
            right = swap(kinds[1])
            sides = (
                Side(a, scales[0], kinds[0], turned=kinds[0] == (128, 128)),
                Side(b, scales[1], right, turned=right == (128, 1)),
            )
            if (kinds[0], right) in _PAIRS and sides[0].fits() and sides[1].fits():
                return Product(*sides, given["bias"], fast)
    shapes = " and ".join(str(tuple(scale.meta["val"].shape)) for scale in scales)
    return f"scales of {shapes} are not by tensor, by row or of 1x128 and 128x128 blocks"


def _dtype(node: Any) -> torch.dtype | None:
    found = value(node)
    return None if found is None else found.dtype


def _why_not(node: Node, product: Product) -> str | None:
    out = node.meta["val"]
    if out.dtype not in INPUT_DTYPES:
        return f"the output is {short_name(out.dtype)}: pass out_dtype=torch.bfloat16, float16 or float32"
    if product.bias is not None and _dtype(product.bias) not in INPUT_DTYPES:
        return "the bias is not bfloat16, float16 or float32"
    target = targets.target_of(out.device)
    for side in (product.a, product.b):
        dtype = side.data.meta["val"].dtype
        if dtype not in targets.fp8_dtypes(target):
            return f"{target.name} has no kernel of fp8fn for {short_name(dtype)}"
    if target.backend == "cpu":
        return None
    a, b = product.a.data.meta["val"], product.b.data.meta["val"]
    return why_slower(a, b, out, product.kinds, product.fast, target, tables(chip_of(out.device, target)))


def why_slower(
    a: Tensor, b: Tensor, out: Tensor, kinds: tuple[str, str], fast: bool, target: Target, known: tuple[Table, ...]
) -> str | None:
    """The reason to keep PyTorch's kernel for `out = a (M, K) @ b (K, N)`, or None if fp8fn's is faster."""
    blocks = "VECTOR" in kinds
    if blocks and hopper_fault(target):
        return None  # PyTorch has block scales for Hopper only
    if kinds not in KINDS:
        return "fp8fn multiplies 128x128 by 128x1 without times beside PyTorch: pass b.mT and a.mT for out.mT"
    recipe = _RECIPE_NAMES[kinds]
    if fast and not blocks:
        return f"PyTorch's {recipe} product with fast accumulation is faster; fp8fn's is as use_fast_accum=False"
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return None if blocks else "a size is symbolic, so that no tuning table has it: compile with dynamic=False"
    problem = Problem(*sizes, *kinds, 1, a.dtype, b.dtype, out.dtype)
    found = lookup(problem, known)
    if found is None or not found.exact:
        remedy = f"`python -m fp8fn tune --shapes {','.join(map(str, sizes))} --recipe {recipe}` measures it"
        return None if blocks else f"no tuning table of this device has this {recipe} product: {remedy}"
    entry = found.entry
    if entry.peer_us is None or entry.us < entry.peer_us:
        return None
    return f"cuBLASLt is faster here by {found.table.name}: {entry.peer_us:.1f} against {entry.us:.1f} µs"


def _emit(graph: Graph, node: Node, product: Product) -> str:
    """Replaces the product and returns the name of the substitute's op."""
    with graph.inserting_before(node):
        bias, columns = product.bias, node.meta["val"].shape[1]
        if bias is not None and bias.meta["val"].dim() != 1:
            bias = call(graph, aten.reshape.default, bias, [columns])
        sides = (*product.a.emit(graph), *product.b.emit(graph))
        out = call(graph, torch.ops.fp8fn.scaled_mm.default, *sides, bias, node.meta["val"].dtype)
    replace(graph, node, out)
    return str(out.target)
