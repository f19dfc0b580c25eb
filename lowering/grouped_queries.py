"""Attention reads keys and values before the model repeats them for its query heads.

    key = key[:, :, None].expand(B, KV, G, S, D).reshape(B, KV * G, S, D)  # likewise the value
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # query (B, KV * G, T, D)

copies keys and values G times. `enable_gqa=True` makes PyTorch's kernels read them where they are, as fast as copies,
and the result differs by the order of sums alone. With 32 query heads and 8 key heads, one token and 2048 keys take
14 us with a mask, where copies and attention take 61; with 8 sequences 32 and 366. 8 sequences of 1024 tokens take
156 us, for 354, and with the backward 761, for 997 (H200, cuDNN).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.backends import cuda
from torch.fx import GraphModule, Node

from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.lowering.graph.sdpa import arguments, attentions, memory_of
from fp8fn.lowering.graph.views import Dim, Run, View, equal, expanded, identity, merged, reshaped
from fp8fn.ops import targets
from fp8fn.ops.torch_private.core import FakeTensor

# Architectures on which PyTorch prefers cuDNN's kernel; on others it comes after products of repeated keys.
_PREFER_CUDNN: Final = (90, 100)
_RESHAPES: Final = ("contiguous", "flatten", "reshape", "unflatten", "unsqueeze", "view")
_CHOICES: Final = (0.0, -torch.inf)
_EXPANDS: Final = ("broadcast_to", "expand", "expand_as")


def group_queries(gm: GraphModule) -> None:
    """Groups the query heads of each attention whose keys and values are repeated, in place."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    # PyTorch's memory-efficient kernel, for one, may be the only one that `sdpa_kernel` allows, also in a region.
    if any(_chooses_kernels(node) for graph in graphs for node in graph.nodes):
        return
    for node in attentions(gm):
        _group(node)


def _group(node: Node) -> None:
    given = arguments(node)
    if given is None or given["dropout_p"] != 0 or not isinstance(given["is_causal"], bool):
        return
    query, mask, scale = given["query"], given["attn_mask"], given["scale"]
    operands = [query, given["key"], given["value"]]
    if isinstance(scale, Node) or not isinstance(tensor_of(query).shape[1], int):
        return
    if given["is_causal"] and _is_one(tensor_of(query).shape[2]):
        return
    chains = [_repeats(each) for each in operands[1:]]
    # The backward reads keys and values, which may not be written until then.
    end = node.graph.output_node() if tensor_of(node).requires_grad else node
    if any(len(chain) == 1 or _may_be_written(chain, after=chain[-2], before=end) for chain in chains):
        return
    key, val = (chain[-1] for chain in chains)
    # Repeated keys broadcast a query of one head, which `enable_gqa` refuses.
    if not equal(tensor_of(query).shape[1], tensor_of(operands[1]).shape[1]):
        return
    given |= {"key": key, "value": val}
    if tensor_of(key).shape[1] != tensor_of(val).shape[1] or not _has_kernel(given):
        return
    node.args = (query, key, val)
    node.kwargs = {
        "attn_mask": mask and _added(mask, node, tensor_of(query).dtype), "is_causal": given["is_causal"],
        "scale": scale, "enable_gqa": True,
    }  # fmt: skip
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


def _has_kernel(given: Mapping[str, Any]) -> bool:
    """Whether PyTorch reads keys of several query heads without a copy; on a CPU the kernel is always the same one."""
    q, k, v = (tensor_of(given[name]) for name in ("query", "key", "value"))
    mask = given["attn_mask"]
    if q.device.type == "cpu":
        return True
    if mask is not None and not isinstance(value(mask), FakeTensor):
        return False
    params = cuda.SDPAParams(q, k, v, None if mask is None else tensor_of(mask), 0.0, given["is_causal"], True)
    if targets.target_of(q.device).arch in _PREFER_CUDNN and cuda.can_use_cudnn_attention(params):
        return True
    return mask is None and cuda.can_use_flash_attention(params)


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
    memory = {memory_of(each) for each in tensors}
    each = after.next
    while each is not before:
        reads = each.target is F.scaled_dot_product_attention or ("out" not in each.kwargs and _called(each))
        if (not reads or _called(each).endswith("_")) and not memory.isdisjoint(map(memory_of, each.all_input_nodes)):
            return True
        each = each.next
    return False
