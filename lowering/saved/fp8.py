"""Keeps activations in FP8 between forward and backward, where nothing but elementwise ops reads them in the backward.

These are the inputs of an MLP's activation function: `gate` and `up` of `silu(gate) * up`, `h` of `gelu(h)`. The
forward quantizes them in blocks of (1, 128) and computes with the unquantized values. The backward computes with
`data * scale`. Gradients differ by FP8's rounding of these values. A value that the forward also sums, as a norm sums
the residual stream, stays in 16 bits.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any, Final

import torch
from torch.fx import Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.lowering.graph.quantizers import elementwise
from fp8fn.lowering.graph.views import aten, divides
from fp8fn.lowering.saved.cut import QUANTIZERS, Cut, is_cheap, is_large, is_result_of, is_tagged, nbytes
from fp8fn.ops.code_cache import warn_once
from fp8fn.ops.layout import Block

BLOCK: Final[Block] = (1, 128)
_CAST: Final = torch.ops.prims.convert_element_type.default
_16_BIT: Final = (torch.bfloat16, torch.float16)
_FLOATS: Final = (*_16_BIT, torch.float32)
# Their relative error grows with their argument, or near a point of it, beyond the argument's own.
_SENSITIVE: Final = (
    aten.sin.default, aten.cos.default, aten.tan.default, aten.asin.default, aten.acos.default, aten.atanh.default,
    aten.log.default, aten.log2.default, aten.log10.default, aten.erfinv.default, aten.pow.Scalar,
)  # fmt: skip


def keep_in_fp8(cut: Cut) -> int:
    """Saves values in FP8 and computes the backward from them; returns how many bytes fewer are kept."""
    again = cut.made_again()
    returned = set(cut.graph.output_node().all_input_nodes)
    fitting = [
        node for node in cut.saved if node not in returned and _fits(node) and _only_elementwise(cut, node, again)
    ]
    chosen = [node for node in fitting if tensor_of(node).dtype in _16_BIT]
    if fitting and not any(x is not None and x.dtype in _16_BIT for x in map(value, cut.saved)):
        warn_once("save='fp8' keeps nothing in FP8: it takes values of 16 bits, and these are float32; use autocast")
    stand_ins: dict[Node, Node] = {}
    dropped = 0
    for node in chosen:
        stand_ins[node], parts = _quantized(cut, node)
        cut.replace_saved([node], *parts)
        dropped += nbytes(node) - sum(map(nbytes, parts))
    _read(cut, stand_ins, again)
    return dropped


def _fits(node: Node) -> bool:
    x = value(node)
    if x is None or node.op != "call_function" or is_tagged(node) or x.dtype not in _FLOATS or x.dim() < 2:
        return False
    unknown = sum(not isinstance(size, int) for size in x.shape)  # a shape has room for one -1
    return unknown <= 1 and divides(BLOCK[1], x.shape[-1]) and x.stride(-1) == 1 and is_large(node)


def _only_elementwise(cut: Cut, node: Node, again: dict[Node, None]) -> bool:
    """Whether only elementwise ops of the backward read a value, also through what the backward makes again of it."""
    seen, pending, reads = {node}, [node], False
    while pending:
        for user in pending.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user.target in _SENSITIVE and (user in cut.backward or user in again):
                return False
            if user in cut.backward:
                if not elementwise(user):
                    return False
                reads = True
            elif user.target in QUANTIZERS:  # its results are products' operands
                continue
            elif is_cheap(user):
                if user not in cut.saved:
                    pending.append(user)
            elif user in again or torch.Tag.reduction in getattr(user.target, "tags", ()) or _is_mean(user):
                return False
    return reads


def _is_mean(node: Node) -> bool:
    return node.target in (aten.mean.dim, aten.var_mean.correction, aten.native_layer_norm.default)


def _quantized(cut: Cut, node: Node) -> tuple[Node, tuple[Node, Node]]:
    """The node that stands for a value in the backward, and the data and scales that the forward saves."""
    graph, x = cut.graph, tensor_of(node)
    width = x.shape[-1]
    after: Any = node.next
    with graph.inserting_before(after):
        rows = node if x.dim() == 2 else call(graph, aten.reshape.default, node, [-1, width])
        quantizer = call(graph, torch.ops.fp8fn.quantize.default, rows, BLOCK)
        data, scale = (call(graph, operator.getitem, quantizer, place) for place in (0, 1))
        cut.forward.update((rows, quantizer, data, scale))
        blocks = call(graph, aten.reshape.default, data, [-1, width // BLOCK[1], BLOCK[1]])
        blocks = call(graph, _CAST, blocks, torch.float32)
        blocks = call(graph, aten.mul.Tensor, blocks, call(graph, aten.unsqueeze.default, scale, -1))
        out = call(graph, _CAST, blocks, x.dtype)
        out = call(graph, aten.reshape.default, out, _sizes(x))
    return out, (data, scale)


def _sizes(x: torch.Tensor) -> list[int]:
    """The shape with -1 for its symbolic sizes, since graphs hold no symbolic numbers."""
    known = [size for size in x.shape if isinstance(size, int)]
    if len(known) == x.dim():
        return known
    assert len(known) == x.dim() - 1, "`_fits` takes one symbolic size"
    assert prod(known) > 0
    return [size if isinstance(size, int) else -1 for size in x.shape]


def _read(cut: Cut, stand_ins: dict[Node, Node], again: dict[Node, None]) -> None:
    """Lets the backward read `stand_ins`, by copies of the nodes that it makes again of the replaced values."""
    replaced = dict(stand_ins)
    for node in list(cut.graph.nodes):
        if node not in again or node in replaced or not any(source in replaced for source in node.all_input_nodes):
            continue
        if not (is_cheap(node) or node.target in QUANTIZERS or is_result_of(node, QUANTIZERS)):
            continue
        with cut.graph.inserting_after(node):
            replaced[node] = cut.graph.node_copy(node, lambda source: replaced.get(source, source))
    for node, copy in replaced.items():
        for user in [user for user in node.users if user in cut.backward]:
            user.replace_input_with(node, copy)
