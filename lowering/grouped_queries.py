"""Attention of one query token in groups: the query heads that share a key head become rows of one product.

    key = key[:, :, None].expand(B, KV, G, S, D).reshape(B, KV * G, S, D)  # likewise the value
    out = F.scaled_dot_product_attention(query, key, value)  # query (B, KV * G, 1, D)

copies keys and values G times. A query (B, KV, G, D) reads them where they are, and the result differs by the order of
sums alone. With 8 key heads and G = 4, the copies and the expanded mask take 8 of the 105 µs of a layer of a decoding
step (H200). Queries of more tokens were not measured.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8fn.lowering.attention import spell
from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.lowering.graph.views import Dim, Run, View, equal, expanded, identity, merged, reshaped
from fp8fn.ops.torch_private.core import FakeTensor

_log = logging.getLogger("fp8fn")
_DEFAULTS: Final = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
    "enable_gqa": False,
}  # fmt: skip
_RESHAPES: Final = ("contiguous", "flatten", "reshape", "unflatten", "unsqueeze", "view")
_EXPANDS: Final = ("broadcast_to", "expand", "expand_as")


def group_queries(gm: GraphModule) -> None:
    """Groups the query heads of each attention of one token whose keys and values are repeated, in place."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                _group(node)


def _group(node: Node) -> None:
    given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_DEFAULTS, node.args, strict=False)), **node.kwargs}
    query, mask, scale = given["query"], given["attn_mask"], given["scale"]
    operands = [query, given["key"], given["value"]]
    if any(not isinstance(value(each), FakeTensor) or tensor_of(each).dim() != 4 for each in operands):
        return
    if len(given) > len(_DEFAULTS) or given["dropout_p"] != 0 or given["is_causal"] is not False:
        return
    if isinstance(scale, Node) or not _is_one(tensor_of(query).shape[2]):
        return
    chains = [_repeats(each) for each in operands[1:]]
    key, val = (chain[-1] for chain in chains)
    heads, shared, others = (tensor_of(each).shape[1] for each in (query, key, val))
    if not all(isinstance(each, int) for each in (heads, shared, others)) or shared != others:
        return
    if not 0 < shared < heads or any(_may_be_written(chain, node) for chain in chains):
        return
    masks = _heads_of_mask(mask)
    if masks not in (1, heads):
        return

    def attention(query: Tensor, key: Tensor, val: Tensor, mask: Tensor | None) -> Tensor:
        split = (shared, heads // shared)
        if mask is not None and masks > 1:
            mask = mask.squeeze(-2).unflatten(-2, split)
        grouped = query.squeeze(2).unflatten(1, split)
        out = F.scaled_dot_product_attention(grouped, key, val, attn_mask=mask, scale=scale)
        out = out.flatten(1, 2).unsqueeze(2)
        if not _same_layout(out, tensor_of(node)):
            raise NotImplementedError("the result would have another layout")
        return out

    if reason := spell(node, attention, (query, key, val, mask), {}):
        _log.info("the queries of %s are not grouped: %s", node.name, reason)
        return
    for each in dict.fromkeys([*chains[0][:-1], *chains[1][:-1]]):
        if not each.users:
            each.graph.erase_node(each)


def _is_one(size: Any) -> bool:
    """Whether a size is the number 1; a symbolic size is not, and gets no guard."""
    return isinstance(size, int) and size == 1


def _heads_of_mask(mask: Any) -> int:
    """The number of heads that a mask of one query token has; 0 for other masks."""
    if mask is None:
        return 1
    found = value(mask)
    if not isinstance(found, FakeTensor) or found.dim() < 2 or not _is_one(found.shape[-2]):
        return 0
    heads = found.shape[-3] if found.dim() > 2 else 1
    return heads if isinstance(heads, int) else 0


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether each view of `other` is possible of `one` too; the stride of an axis of size 1 has no effect."""
    axes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(equal(size, 1) or equal(step, before) for size, step, before in axes)


def _repeats(node: Node) -> list[Node]:
    """The nodes, last one first, that repeat each head of a tensor, and the tensor: `[node]` if none do."""
    chain, out = [node], tensor_of(node)
    while (given := _viewed(chain[-1])) is not None:
        chain.append(given)
        found = tensor_of(given)
        if found.dim() == 4 and found.dtype == out.dtype and _is_repeated(chain, found.shape[1], out.shape[1]):
            return chain
    return [node]


def _is_repeated(chain: Sequence[Node], heads: Any, repeated: Any) -> bool:
    """Whether the first node of a chain is the last one with each of its heads repeated in place."""
    if not isinstance(heads, int) or not isinstance(repeated, int) or not 0 < heads < repeated or repeated % heads:
        return False
    whole = identity(tensor_of(chain[-1]).shape)
    wanted = (whole[0], Dim(repeated, (*whole[1].runs, Run(repeated // heads, None))), *whole[2:])
    view: View | None = whole
    for each in reversed(chain[:-1]):
        view = None if view is None else _after(view, each)
    return view is not None and len(view) == 4 and all(map(_same_runs, view, wanted))


def _same_runs(one: Dim, other: Dim) -> bool:
    runs, others = merged(one.runs), merged(other.runs)
    return len(runs) == len(others) and all(
        a.axis == b.axis and equal(a.size, b.size) and equal(a.step, b.step) for a, b in zip(runs, others, strict=True)
    )


def _called(node: Node) -> str:
    """The name of the method, or of the function of `torch`, that a node calls; `""` for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if node.op == "call_function" and node.target in (getattr(torch, name, None), operator.getitem) else ""


def _viewed(node: Node) -> Node | None:
    """The tensor that a node reshapes, expands or repeats; None if it does something else."""
    name = _called(node)
    known = name in (*_RESHAPES, *_EXPANDS) or (name == "repeat_interleave" and _times(node) is not None)
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        known = all(each in (None, Ellipsis, slice(None)) for each in index)
    given = node.args[0] if known and node.args else None
    return given if isinstance(given, Node) and value(given) is not None else None


def _times(node: Node) -> tuple[int, int] | None:
    """How often a `repeat_interleave` repeats each element, and the axis."""
    given = {**dict(zip(("self", "repeats", "dim"), node.args, strict=False)), **node.kwargs}
    times, dim = given.get("repeats"), given.get("dim")
    return (times, dim % tensor_of(node).dim()) if isinstance(times, int) and isinstance(dim, int) else None


def _after(view: View, node: Node) -> View | None:
    shape = tensor_of(node).shape
    if (repeated := _times(node) if _called(node) == "repeat_interleave" else None) is not None:
        times, dim = repeated
        runs = (*view[dim].runs, Run(times, None))
        return (*view[:dim], Dim(shape[dim], runs), *view[dim + 1 :])
    return expanded(view, shape) if _called(node) in _EXPANDS else reshaped(view, shape)


def _may_be_written(chain: Sequence[Node], node: Node) -> bool:
    """Whether the tensor that a chain repeats may change between the chain's first view of it and `node`."""
    memory = _memory_of(chain[-1])
    each = chain[-2].next if len(chain) > 1 else node
    while each is not node:
        reads = each.target is F.scaled_dot_product_attention or ("out" not in each.kwargs and _called(each))
        if (not reads or _called(each).endswith("_")) and memory in map(_memory_of, each.all_input_nodes):
            return True
        each = each.next
    return False


def _memory_of(node: Node) -> int | None:
    found = value(node)
    return found.untyped_storage()._cdata if isinstance(found, FakeTensor) else None
