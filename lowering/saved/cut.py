"""`Cut`: a joint graph, and the values at which a partitioner cuts it into a forward and a backward."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.nodes import input_of, tensor_of
from fp8fn.lowering.graph.quantizers import elementwise
from fp8fn.lowering.graph.views import aten

# Views of all elements of their input: whoever keeps one keeps the other.
WHOLE_VIEWS: Final = (
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default,
)  # fmt: skip
_MOVES: Final = (
    *WHOLE_VIEWS, aten.reshape.default, aten.expand.default, aten.clone.default, aten.slice.Tensor, aten.select.int,
    aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default, aten.copy.default, aten.empty_strided.default,
    aten.view.dtype,
)  # fmt: skip
_ops: Final = torch.ops.fp8fn
QUANTIZERS: Final = (
    _ops.quantize.default, _ops.quantize_dual.default, _ops.quantize_grouped.default,
    _ops.quantize_grouped_dual.default, _ops.quantize_silu_mul.default, _ops.quantize_silu_mul_dual.default,
    _ops.quantize_rms_norm.default, _ops.quantize_rms_norm_dual.default,
    _ops.quantize_silu_mul_grouped.default, _ops.quantize_silu_mul_grouped_dual.default,
)  # fmt: skip
# Smaller values cost more launches than they save memory.
LEAST_ELEMENTS: Final = 1 << 16


@dataclass
class Cut:
    """A joint graph, the nodes that forward and backward must compute, and the values that the forward saves.

    Args:
        graph: Joint graph.
        saved: Values that the forward saves, in the partitioner's order.
        parameters: Inputs that live as long as the model and that the graph does not write: saving one costs nothing.
        written: Inputs that the graph writes at its end, such as running statistics. The backward would read what they
            hold then.
        forward: Nodes that the forward's results need.
        backward: Nodes that the gradients are computed by and that depend on the incoming gradients.
        roots: Nodes that the backward must compute or return.
    """

    graph: Graph
    saved: dict[Node, None]
    parameters: frozenset[Node]
    written: frozenset[Node]
    forward: set[Node]
    backward: frozenset[Node]
    roots: frozenset[Node]

    def made_again(self) -> dict[Node, None]:
        """The nodes that the backward computes from saved values, inputs that are not saved among them."""
        found: dict[Node, None] = {}
        pending = [node for node in self.roots if node not in self.backward]
        pending += [source for node in self.backward for source in node.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in found or node in self.saved or node in self.backward:
                continue
            found[node] = None
            pending += node.all_input_nodes
        return found

    def can_make(self, x: Node) -> dict[Node, None] | None:
        """The saved tensors that `x` can be computed from by elementwise ops and moves, or None."""
        leaves: dict[Node, None] = {}
        seen: set[Node] = set()
        pending = [x]
        while pending:
            node = pending.pop()
            if node in seen or _is_size(node):  # `complete` saves the sizes that are read
                continue
            seen.add(node)
            if node in self.saved or node in self.parameters:
                leaves[node] = None
            elif isinstance(node.meta.get("val"), Tensor | tuple | list) or node.op != "placeholder":
                if not is_cheap(node) or is_tagged(node):
                    return None
                pending += node.all_input_nodes
        return leaves

    def replace_saved(self, old: Iterable[Node], *new: Node) -> None:
        for node in old:
            self.saved.pop(node, None)
        self.saved.update(dict.fromkeys(new))

    def complete(self, before: Iterable[Node]) -> None:
        """Saves what the backward reads and cannot make: inputs, sizes, and results of expensive ops.

        `before` holds the nodes that the backward made again before the cut was changed. They stay as they are.
        """
        known = set(before)
        while True:
            missing = [
                node
                for node in self.made_again()
                if node not in known and (node.op == "placeholder" or _is_size(node) or not self._allowed(node))
            ]
            if not missing:
                return
            self.saved.update(dict.fromkeys(missing))

    def _allowed(self, node: Node) -> bool:
        return is_cheap(node) or node.target in QUANTIZERS or is_result_of(node, QUANTIZERS)


def is_cheap(node: Node) -> bool:
    """Whether the backward may compute a node again: elementwise, without random numbers, or moving elements."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_result_of(node, (aten.split.Tensor, aten.split_with_sizes.default))
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return node.target in _MOVES or node.target is aten.full.default or elementwise(node)


def is_tagged(node: Node) -> bool:
    """Whether `torch.utils.checkpoint` decides whether the node is saved."""
    return "recompute" in node.meta


def is_result_of(node: Node, targets: Iterable[Any]) -> bool:
    return node.target is operator.getitem and input_of(node).target in targets


def written(graph: Graph) -> frozenset[Node]:
    """The inputs that a graph writes in place: AOTAutograd leaves of all writes a `copy_` at the end."""
    return frozenset(
        node.args[0]
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.args
        and isinstance(node.args[0], Node)
        and node.args[0].op == "placeholder"
    )


def root_of(node: Node) -> Node:
    """The tensor that `node` is a view of, with the same elements."""
    while node.target in WHOLE_VIEWS and not is_tagged(node):
        node = input_of(node)
    return node


def moves_of(node: Node) -> Iterator[Node]:
    """`node` and the views of it."""
    yield node
    for user in node.users:
        if user.target in WHOLE_VIEWS:
            yield from moves_of(user)


def is_large(node: Node) -> bool:
    """Whether a tensor has enough elements; a size that is not known counts as large."""
    sizes = [size if isinstance(size, int) else size.node.hint for size in tensor_of(node).shape]
    return None in sizes or prod(sizes) >= LEAST_ELEMENTS


def nbytes(node: Node) -> int:
    """The bytes of a tensor, with the sizes that a dynamic graph was traced with."""
    sizes = [size if isinstance(size, int) else size.node.hint or 0 for size in tensor_of(node).shape]
    return prod(sizes) * tensor_of(node).dtype.itemsize


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)
