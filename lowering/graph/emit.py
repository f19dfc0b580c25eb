"""Changes to a graph: adding calls, rearranging the axes of a tensor, and replacing a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from fp8fn.lowering.graph.views import Size, aten, same_sizes
from fp8fn.ops.torch_private.core import pytree


def arranged(graph: Graph, node: Node, order: Sequence[int], shape: Sequence[Size]) -> Node:
    """Adds nodes that permute the axes of `node` to `order`, without axes of size 1, and reshape it to `shape`."""
    rest = [axis for axis in range(node.meta["val"].dim()) if axis not in order]
    if [*order] != sorted(order):
        node = call(graph, aten.permute.default, node, [*rest, *order])
    if not same_sizes(node.meta["val"].shape, shape):
        node = call(graph, aten.reshape.default, node, list(shape))
    return node


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a call at the graph's insertion point, with its result as a fake tensor."""
    node = graph.call_function(target, args, kwargs)
    values = pytree.tree_map_only(Node, lambda arg: arg.meta["val"], args)
    node.meta["val"] = target(*values, **kwargs)  # the fake tensors bring their mode
    return node


def mark(node: Node, key: str, value: int) -> None:
    """Marks a node of Dynamo's graph, and thereby all nodes of the graphs that PyTorch makes of it."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def replace(graph: Graph, node: Node, out: Node) -> None:
    """Replaces `node` by `out`, which has the same shape, type and strides."""
    old, new = node.meta["val"], out.meta["val"]
    assert (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()), (node, old, new)
    for key, meta in node.meta.items():
        # Inductor takes the required strides of an op's arguments from "eager_input_vals", which are those of `node`.
        if key not in ("val", "tensor_meta", "original_aten", "eager_input_vals"):
            out.meta.setdefault(key, meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
