"""Attention of one query token reads keys and values before the model repeats them for its query heads.

    key = key[:, :, None].expand(B, KV, G, S, D).reshape(B, KV * G, S, D)  # likewise the value
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # query (B, KV * G, 1, D)

copies keys and values G times. `enable_gqa=True` makes PyTorch's kernels read them where they are, and the result
differs by the order of sums alone. With a mask, 32 query heads, 8 key heads and 2048 tokens that takes 14 us, where
copies and attention take 61; with 8 sequences 32 and 366 (H200, cuDNN). Queries of more tokens were not measured.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.backends import cuda
from torch.fx import GraphModule, Node

from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.lowering.graph.views import Dim, Run, View, equal, expanded, identity, merged, reshaped
from fp8fn.ops import targets
from fp8fn.ops.torch_private.core import FakeTensor

_DEFAULTS: Final = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
    "enable_gqa": False,
}  # fmt: skip
# Architectures on which PyTorch prefers cuDNN's kernel; on others it comes after products of repeated keys.
_PREFER_CUDNN: Final = (90, 100)
_RESHAPES: Final = ("contiguous", "flatten", "reshape", "unflatten", "unsqueeze", "view")
_CHOICES: Final = (0.0, -torch.inf)
_EXPANDS: Final = ("broadcast_to", "expand", "expand_as")


def group_queries(gm: GraphModule) -> None:
    """Groups the query heads of each attention of one token whose keys and values are repeated, in place."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    # PyTorch's memory-efficient kernel, for one, may be the only one that `sdpa_kernel` allows, also in a region.
    if any(_chooses_kernels(node) for graph in graphs for node in graph.nodes):
        return
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
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
    if any(len(chain) == 1 or _may_be_written(chain, after=chain[-2], before=node) for chain in chains):
        return
    key, val = (chain[-1] for chain in chains)
    # Repeated keys broadcast a query of one head, which `enable_gqa` refuses.
    if not equal(tensor_of(query).shape[1], tensor_of(operands[1]).shape[1]):
        return
    if tensor_of(key).shape[1] != tensor_of(val).shape[1] or not _has_kernel(query, key, val, mask):
        return
    node.args = (query, key, val)
    node.kwargs = {"attn_mask": mask and _added(mask, node, tensor_of(query).dtype), "scale": scale, "enable_gqa": True}
    for each in dict.fromkeys([*chains[0][:-1], *chains[1][:-1]]):
        if not each.users:
            each.graph.erase_node(each)


def _added(mask: Node, node: Node, dtype: torch.dtype) -> Node:
    """The values that a boolean mask stands for, computed once for all attentions of a graph; another mask as it is.

    PyTorch computes them in each attention, and Inductor merges equal nodes only in graphs with a backward.
    """
    found = tensor_of(mask)
    if found.dtype != torch.bool or _may_be_written([mask], after=mask, before=node):
        return mask
    for where in mask.users:
        if where.target is torch.where and where.args == (mask, *_CHOICES):
            for made in where.users:
                if made.target == "to" and made.args == (where, dtype):
                    return made
    assert isinstance(found, FakeTensor)
    with mask.graph.inserting_after(mask):
        where = mask.graph.call_function(torch.where, (mask, *_CHOICES))
    with mask.graph.inserting_after(where):
        made = mask.graph.call_method("to", (where, dtype))
    with found.fake_mode:
        where.meta["example_value"] = torch.where(found, *_CHOICES)
        made.meta["example_value"] = where.meta["example_value"].to(dtype)
    return made


def _has_kernel(query: Node, key: Node, val: Node, mask: Node | None) -> bool:
    """Whether PyTorch reads keys of several query heads without a copy; on a CPU the kernel is always the same one."""
    if tensor_of(query).device.type == "cpu":
        return True
    if mask is not None and not isinstance(value(mask), FakeTensor):
        return False
    q, k, v = map(tensor_of, (query, key, val))
    given = cuda.SDPAParams(q, k, v, None if mask is None else tensor_of(mask), 0.0, False, True)
    if targets.target_of(q.device).arch in _PREFER_CUDNN and cuda.can_use_cudnn_attention(given):
        return True
    return mask is None and cuda.can_use_flash_attention(given)


def _chooses_kernels(node: Node) -> bool:
    """Whether a node enters or leaves the context `torch.nn.attention.sdpa_kernel`."""
    return getattr(node.target, "__name__", "") == "_sdpa_kernel"


def _is_one(size: Any) -> bool:
    """Whether a size is the number 1; a symbolic size is not, and gets no guard."""
    return isinstance(size, int) and size == 1


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


def _may_be_written(tensors: Sequence[Node], *, after: Node, before: Node) -> bool:
    """Whether a node between two others may write into one of the tensors."""
    memory = {_memory_of(each) for each in tensors}
    each = after.next
    while each is not before:
        reads = each.target is F.scaled_dot_product_attention or ("out" not in each.kwargs and _called(each))
        if (not reads or _called(each).endswith("_")) and not memory.isdisjoint(map(_memory_of, each.all_input_nodes)):
            return True
        each = each.next
    return False


def _memory_of(node: Node) -> int | None:
    found = value(node)
    return found.untyped_storage()._cdata if isinstance(found, FakeTensor) else None
