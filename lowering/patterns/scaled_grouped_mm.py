"""Replaces `torch._scaled_grouped_mm`, the product of groups in FP8 with rowwise scales.

    y = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16)

The substitute is `fp8fn::scaled_grouped_mm`, which computes the same float32 sums. Groups of rows are `a (M, K)` by
`b (E, K, N)`, with `scale_a (M,)` and `scale_b (E, N)`; groups of K are `a (M, K)` by `b (K, N)`, with
`scale_a (E * M,)` and `scale_b (E * N,)`. PyTorch has no CPU kernel, so on a CPU the call is always replaced. On a GPU
it is replaced only with the backend's `where="*"`, because no measurement shows that fp8fn's kernel is faster.
`torch.compile` cannot trace `torch.nn.functional.scaled_grouped_mm`, which is another op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, source_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import Size, aten, equal
from fp8fn.ops import targets
from fp8fn.ops.formats import INPUT_DTYPES, short_name
from fp8fn.ops.layout import WHOLE, Block

NAME: Final = "scaled_grouped_mm"
PRODUCT: Final = aten._scaled_grouped_mm.default
_BLOCKS: Final[tuple[Block, Block]] = ((1, WHOLE), (WHOLE, 1))


def substitute(graph: Graph, everything: bool = False) -> Iterator[Substitution]:
    """Replaces calls exactly, on a GPU only with `everything`, and reports each call."""
    for node in graph.find_nodes(op="call_function", target=PRODUCT):
        given = arguments_of(node)
        reason = _why_not(node, given) or _why_not_faster(node, given, everything)
        a, b = (node.args[place].meta["val"] for place in (0, 1))
        made = "" if reason else _emit(graph, node, given)
        shape = (a.shape[-2], b.shape[-1], a.shape[-1])
        yield Substitution(NAME, str(node), source_of(node), str(node.target), shape, made, reason)


def _why_not(node: Node, given: dict[str, Any]) -> str | None:
    """The reason why `fp8fn::scaled_grouped_mm` cannot compute the call, or None."""
    a, b, out = given["self"].meta["val"], given["mat2"].meta["val"], node.meta["val"]
    for name in ("bias", "scale_result"):
        if given[name] is not None:
            return f"{name} is given: leave it out"
    if given["offs"] is None or a.dim() != 2:
        return f"operands of {a.dim()} and {b.dim()} dimensions; fp8fn takes (M, K) by (E, K, N), and (M, K) by (K, N)"
    for name, shape in zip(("scale_a", "scale_b"), _scale_shapes(given), strict=True):
        scale = given[name].meta["val"]
        if scale.dtype != torch.float32 or not equal(scale.numel(), shape[0] * shape[1]):
            return f"{name} is {short_name(scale.dtype)} {tuple(scale.shape)}; fp8fn takes float32, one for each row"
    if out.dtype not in INPUT_DTYPES:
        return f"the output is {short_name(out.dtype)}: pass out_dtype=torch.bfloat16, float16 or float32"
    if not out.is_contiguous():
        return f"PyTorch pads its rows of N={out.shape[-1]} to 16 bytes: use an N that fills them"
    target = targets.target_of(out.device)
    for data in (a, b):
        if data.dtype not in targets.fp8_dtypes(target):
            return f"{target.name} has no kernel of fp8fn for {short_name(data.dtype)}"
    return None


def _why_not_faster(node: Node, given: dict[str, Any], everything: bool) -> str | None:
    if everything or targets.target_of(node.meta["val"].device).backend == "cpu":
        return None
    fast = ", and here with fast accumulation" if given["use_fast_accum"] else ""
    return f"by rows PyTorch's product of groups is not measured to be slower{fast}; where='*' takes it"


def _scale_shapes(given: dict[str, Any]) -> tuple[tuple[Size, Size], tuple[Size, Size]]:
    """PyTorch's shapes of the scales: `(1, M)`, `(E, N)` for groups of rows, `(E, M)`, `(E, N)` for groups of K."""
    a, b, groups = given["self"].meta["val"], given["mat2"].meta["val"], given["offs"].meta["val"].shape[0]
    return ((1 if b.dim() == 3 else groups), a.shape[0]), (groups, b.shape[-1])


def _emit(graph: Graph, node: Node, given: dict[str, Any]) -> str:
    """Replaces the product and returns the name of the substitute's op."""
    left, right = _scale_shapes(given)
    with graph.inserting_before(node):
        a_scale = call(graph, aten.reshape.default, given["scale_a"], list(left))
        a_scale = call(graph, aten.permute.default, a_scale, [1, 0])
        experts = given["mat2"].meta["val"].dim() == 3
        wanted = [right[0], 1, right[1]] if experts else list(right)
        b_scale = call(graph, aten.reshape.default, given["scale_b"], wanted)
        operands = (given["self"], a_scale, _BLOCKS[0], given["mat2"], b_scale, _BLOCKS[1], given["offs"])
        out = call(graph, torch.ops.fp8fn.scaled_grouped_mm.default, *operands, None, node.meta["val"].dtype)
    replace(graph, node, out)
    return str(out.target)
