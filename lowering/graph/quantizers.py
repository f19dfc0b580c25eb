"""The quantizers of a graph, the readers of their inputs, and merging several quantizers of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import arguments_of, input_of, tensor_of
from fp8fn.lowering.graph.views import Size, as_matrix, aten, equal, same_sizes, sized
from fp8fn.ops import targets
from fp8fn.ops.cuda.limits import TMA_ALIGNMENT
from fp8fn.ops.layout import Block, known_block, swap
from fp8fn.ops.operands import Quantized

RESHAPES: Final = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SINGLE: Final = torch.ops.fp8fn.quantize.default
_DUAL: Final = torch.ops.fp8fn.quantize_dual.default
_GROUPED: Final = torch.ops.fp8fn.quantize_grouped.default
_GROUPED_DUAL: Final = torch.ops.fp8fn.quantize_grouped_dual.default


@dataclass(frozen=True)
class Quantizer:
    """`fp8fn::quantize` or `fp8fn::quantize_dual` of `x (..., M, N)`, or a form of groups of rows, and its results."""

    node: Node
    x: Node
    block: Block
    dtype: torch.dtype
    scale: str
    dual_block: Block | None = None
    """The second block of `quantize_dual`; None is the transpose of `block`."""
    column_major: bool | None = None
    """The layout of `quantize`'s data in square blocks; None is the layout of `x`."""
    offsets: Node | None = None
    """The ends of groups of rows, for `quantize_grouped` and `quantize_grouped_dual`."""

    @property
    def dual(self) -> bool:
        return self.node.target in (_DUAL, _GROUPED_DUAL)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block of each result."""
        return (self.block, self.dual_block or swap(self.block)) if self.dual else (self.block,)

    @property
    def form(self) -> tuple[Any, ...]:
        """The block, the type, the scale format, and the second block or the layout if it is given.

        These are the last arguments of a fused op.
        """
        last = self.dual_block if self.dual else self.column_major
        return (self.block, self.dtype, self.scale, *(() if last is None else (last,)))

    @property
    def beside(self) -> dict[str, Any]:
        """The second block or the layout as keyword arguments, if it is given."""
        given = {"dual_block": self.dual_block, "column_major": self.column_major}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(self.x.meta["val"].shape)

    @property
    def outs(self) -> tuple[Tensor, ...]:
        return tuple(self.node.meta["val"])

    @property
    def device(self) -> torch.device:
        return tensor_of(self.x).device

    def place_in(self, other: Quantizer) -> int | None:
        """The place of this quantizer's results among those of `other`, a quantizer of the same tensor, or None."""
        if other.dual and not self.dual:
            places = [place for place, block in enumerate(other.blocks) if block == self.block]
        else:
            places = [0] if (self.dual, self.blocks) == (other.dual, other.blocks) else []
        for place in places:
            if all(same_layout(mine, its) for mine, its in zip(self.outs, other.outs[2 * place :], strict=False)):
                return 2 * place
        return None


def find_quantizers(graph: Graph) -> list[Quantizer]:
    """All quantizers that compute the largest magnitudes themselves, in the graph's order."""
    nodes = (node for node in graph.nodes if node.op == "call_function" and node.target in (_SINGLE, _DUAL))
    return [as_quantizer(node) for node in nodes if arguments_of(node)["amax"] is None]


def find_grouped_quantizers(graph: Graph) -> list[Quantizer]:
    """All quantizers of groups of rows, in the graph's order."""
    return [as_quantizer(node) for node in graph.nodes if node.target in (_GROUPED, _GROUPED_DUAL)]


def as_quantizer(node: Node) -> Quantizer:
    """The input and the format of a call of a quantizer."""
    given = arguments_of(node)
    x, (rows, columns) = given["x"], given["block"]
    dtype = given["dtype"] or targets.native_e4m3(targets.target_of(x.meta["val"].device))
    dual_block = given.get("dual_block")  # `quantize` has none
    beside = None if dual_block is None else (dual_block[0], dual_block[1])
    return Quantizer(
        node, x, (rows, columns), dtype, given["scale"], beside, given.get("column_major"), given.get("offsets")
    )


def reshaped_of(node: Node) -> Node:
    """The tensor that `node` is a reshape of."""
    while node.target in RESHAPES:
        node = input_of(node)
    return node


def like(graph: Graph, node: Node, x: Node) -> Node:
    """`node` reshaped to the matrix `x`, which has its elements in the same order."""
    source = reshaped_of(node)
    for known in (node, source):
        if same_sizes(tensor_of(known).shape, tensor_of(x).shape):
            return known
    return call(graph, aten.reshape.default, node, as_matrix(tensor_of(x).shape))


def begins_aligned(node: Node) -> bool:
    """Whether a kernel may load 16 bytes from the first element on; memory itself begins at such a multiple."""
    begin = tensor_of(node).storage_offset()
    return isinstance(begin, int) and begin * tensor_of(node).itemsize % TMA_ALIGNMENT == 0


def weight_of(given: dict[str, Any]) -> Quantized | None:
    """The weight of a product with these arguments, on `meta`; None if a size is not known."""
    data, scale, block = sized(tensor_of(given["w"])), sized(tensor_of(given["w_scale"])), known_block(given["w_block"])
    return None if data is None or scale is None or block is None else Quantized(data, scale, block)


def readers(node: Node) -> Iterator[Node]:
    """The nodes that read a tensor, directly or through reshapes."""
    for user in node.users:
        if user.target in RESHAPES:
            yield from readers(user)
        else:
            yield user


def computed(node: Node) -> bool:
    """Whether Inductor generates code for a node, so that it can fuse the node with its neighbours."""
    return elementwise(node) or torch.Tag.reduction in _tags(node)


def elementwise(node: Node) -> bool:
    """Whether a node is pointwise, and not merely the cast of a reduction."""
    source: Any = node
    while source.target is torch.ops.prims.convert_element_type.default:
        source = source.args[0]
    return torch.Tag.pointwise in _tags(node) and torch.Tag.reduction not in _tags(source)


def _tags(node: Node) -> Sequence[torch.Tag]:
    return getattr(node.target, "tags", ()) if node.op == "call_function" else ()


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether shapes, types and strides are equal; the stride of an axis of size 1 does not matter."""
    if a.dtype != b.dtype or a.dim() != b.dim():
        return False
    sizes = zip(a.shape, b.shape, a.stride(), b.stride(), strict=True)
    return all(equal(m, n) and (equal(m, 1) or equal(s, t)) for m, n, s, t in sizes)


def replace_quantizer(graph: Graph, old: Node, new: Node, place: int = 0) -> None:
    """Replaces the results of `old` by those of `new` from `place` on."""
    for item in list(old.users):  # each is a getitem
        with graph.inserting_before(item):
            index: Any = item.args[1]
            out = call(graph, item.target, new, index + place)
        for key, meta in item.meta.items():
            if key not in ("val", "tensor_meta", "eager_input_vals"):
                out.meta.setdefault(key, meta)
        item.replace_all_uses_with(out)
        graph.erase_node(item)
    for key, meta in old.meta.items():
        if key not in ("val", "tensor_meta", "original_aten", "eager_input_vals"):
            new.meta.setdefault(key, meta)
    graph.erase_node(old)


def merge_quantizers(graph: Graph) -> int:
    """Merges quantizers of the same tensor to the same format, such as those of q, k and v; returns how many are gone.

    The bits stay the same, so the exact pass may merge them too. AOTAutograd merges equal calls only in graphs with a
    backward, and never merges `quantize` with `quantize_dual`.
    """
    alike: dict[Any, list[Quantizer]] = {}
    for quantizer in find_quantizers(graph):
        key = (reshaped_of(quantizer.x), str(quantizer.shape), quantizer.dtype, quantizer.scale)
        alike.setdefault(key, []).append(quantizer)
    return sum(_merge(graph, group) for group in alike.values() if len(group) > 1)


def _merge(graph: Graph, group: Sequence[Quantizer]) -> int:
    """Merges quantizers of one tensor, given in the graph's order; returns how many are gone."""
    gone, left = 0, sorted(group, key=lambda quantizer: not quantizer.dual)  # stable
    while left:
        lead, *left = left
        places = {id(other): other.place_in(lead) for other in left}
        merged = [other for other in left if places[id(other)] is not None]
        if not merged:
            continue
        left = [other for other in left if places[id(other)] is None]
        first = min((lead, *merged), key=group.index)
        new = lead.node
        if first is not lead:  # its results are needed earlier
            with graph.inserting_before(first.node):
                new = call(graph, lead.node.target, first.x, lead.block, lead.dtype, lead.scale, **lead.beside)
            replace_quantizer(graph, lead.node, new)
            _erase_unread(graph, lead.x)
        for other in merged:
            replace_quantizer(graph, other.node, new, places[id(other)] or 0)
            _erase_unread(graph, other.x)
        gone += len(merged)
    return gone


def _erase_unread(graph: Graph, node: Node) -> None:
    """Erases reshapes that nothing reads, without a pass over the whole graph."""
    while node.target in RESHAPES and not node.users:
        source: Any = node.args[0]
        graph.erase_node(node)
        node = source
