"""Counters that a graph advances by one number are advanced in one launch.

    layer.cumulative_length.add_(1)  # in each layer of transformers' StaticCache

is a kernel of its own in every layer of a decoding step: 1.7 us on an H200, where a product takes about ten.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.nodes import tensor_of

aten: Final = torch.ops.aten
# More elements keep a kernel of their own busy.
_MOST_ELEMENTS: Final = 1024


class _Advance(NamedTuple):
    """The nodes of `write = copy_(counter, total)` with `total = counter + step`."""

    write: Node
    counter: Node
    total: Node
    step: int | float


def advance_together(graph: Graph) -> None:
    """Makes one addition of all that add the same number to a small input and write it back, in place."""
    groups: defaultdict[Any, list[_Advance]] = defaultdict(list)
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        if (found := _advance(write)) is not None:
            counter = tensor_of(found.counter)
            groups[counter.device, counter.dtype, type(found.step), found.step].append(found)
    for group in groups.values():
        if len(group) > 1:
            _add(graph, group)


def _advance(write: Node) -> _Advance | None:
    """The addition that a copy writes back, of a number to a small input, if no other node reads the sum; else None."""
    counter, total = write.args
    if not isinstance(counter, Node) or counter.op != "placeholder" or not isinstance(total, Node):
        return None
    if total.target != aten.add.Tensor or total.kwargs or total.args[0] is not counter or len(total.users) > 1:
        return None
    step, size = total.args[1], tensor_of(counter).numel()
    if not isinstance(step, (int, float)) or not isinstance(size, int) or size > _MOST_ELEMENTS:
        return None
    return _Advance(write, counter, total, step) if tensor_of(total).dtype == tensor_of(counter).dtype else None


def _add(graph: Graph, group: list[_Advance]) -> None:
    """Adds before the first write: what the graph reads of a counter is its value at the start."""
    with graph.inserting_before(group[0].write):
        added = graph.call_function(aten._foreach_add.Scalar, ([each.counter for each in group], group[0].step))
        added.meta["val"] = [each.total.meta["val"] for each in group]
        for place, each in enumerate(group):
            item = graph.call_function(operator.getitem, (added, place))
            item.meta.update(each.total.meta)
            each.write.args = (each.counter, item)
            graph.erase_node(each.total)
