"""How a pass changes a graph: a new call, a tensor whose axes are put in order, one node in the place of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch.fx import Graph, Node

from fp8fn.lowering.graph.views import Size, aten, equal


def arranged(graph: Graph, node: Node, order: Sequence[int], shape: Sequence[Size]) -> Node:
    """`node` with its axes in `order`, those of one element left out, as `shape`."""
    rest = [axis for axis in range(node.meta["val"].dim()) if axis not in order]
    if [*order] != sorted(order):
        node = call(graph, aten.permute.default, node, [*rest, *order])
    if len(node.meta["val"].shape) != len(shape) or not all(map(equal, node.meta["val"].shape, shape)):
        node = call(graph, aten.reshape.default, node, list(shape))
    return node


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call at the graph's insertion point, with what it gives as a fake tensor."""
    node = graph.call_function(target, args, kwargs)
    values = pytree.tree_map_only(Node, lambda arg: arg.meta["val"], args)
    node.meta["val"] = target(*values, **kwargs)  # on fake tensors, which bring their mode
    return node


def replace(graph: Graph, node: Node, out: Node) -> None:
    """`out` in the place of `node`, whose shape, type and strides it has."""
    old, new = node.meta["val"], out.meta["val"]
    assert (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()), (node, old, new)
    for key, meta in node.meta.items():
        # Of "eager_input_vals" Inductor takes the strides that an op's arguments must have: those were another's.
        if key not in ("val", "tensor_meta", "original_aten", "eager_input_vals"):
            out.meta.setdefault(key, meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
