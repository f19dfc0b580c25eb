"""`F.scaled_dot_product_attention` in Dynamo's graph: its nodes, their arguments by name, and the memory of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fp8fn.lowering.graph.nodes import value
from fp8fn.ops.torch_private.core import FakeTensor

ATTENTION: Final = F.scaled_dot_product_attention
_DEFAULTS: Final = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
    "enable_gqa": False,
}  # fmt: skip


def attentions(gm: GraphModule) -> Iterator[Node]:
    """All attentions of a graph and of the regions that it calls."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.find_nodes(op="call_function", target=ATTENTION)


def arguments(node: Node) -> dict[str, Any] | None:
    """The arguments by name; None if there are others, or if operands are not matrices of heads, `(B, H, S, D)`."""
    given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_DEFAULTS, node.args, strict=False)), **node.kwargs}
    for name in ("query", "key", "value"):
        found = value(given[name])
        if not isinstance(found, FakeTensor) or found.dim() != 4:
            return None
    return given if len(given) == len(_DEFAULTS) else None


def memory_of(node: Node) -> int | None:
    """The storage of a node's tensor, as a number; None for other results."""
    found = value(node)
    return found.untyped_storage()._cdata if isinstance(found, FakeTensor) else None
