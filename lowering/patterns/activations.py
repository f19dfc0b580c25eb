"""Products by FP8 weights that ask for FP8 activations: a static number of rows decides while the graph is compiled.

    fp8fn::mm_a16w8(x, weight, …, activations="fp8")  # or "fp8_fast"

The op decides at each call how it reads `x`. A product of known size becomes the same quantizer and product in the
graph, so that equal quantizers are merged and the quantizer is fused with what computes `x`. The bits stay the same.
A product of groups, `fp8fn::grouped_mm_a16w8`, stays one op.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, source_of, tensor_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten
from fp8fn.ops.activations import activation_block, is_fast, why_16_bits
from fp8fn.ops.layout import is_mx, known_block
from fp8fn.ops.operands import Quantized

NAME: Final = "activations"
_OPS: Final = torch.ops.fp8fn


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Reports each product that asks for FP8 activations, and how it reads them."""
    products = (_OPS.mm_a16w8.default, _OPS.grouped_mm_a16w8.default)
    for node in [node for op in products for node in graph.find_nodes(op="call_function", target=op)]:
        given = arguments_of(node)
        if given["activations"] == "16bit":
            continue
        name, at, target = str(node), source_of(node), str(node.target)
        shape = tensor_of(given["x"]).shape[:-1], tensor_of(given["w"]).shape[-1], tensor_of(given["x"]).shape[-1]
        # `torch.Size.numel()` would turn a symbolic size into an int, and so make the graph serve one length only.
        yield Substitution(NAME, name, at, target, (math.prod(shape[0]), *shape[1:]), _read(graph, node, given), None)


def _read(graph: Graph, node: Node, given: dict[str, Any]) -> str:
    """The op that multiplies in the end, and how it reads the activations."""
    x, bias = tensor_of(given["x"]), given["bias"]
    block = known_block(given["w_block"])
    assert block is not None
    if any(not isinstance(size, int) for size in (*x.shape, *tensor_of(given["w"]).shape)):
        return f"{node.target}, activations in 16 bits or FP8: the rows decide at each call"
    weight = Quantized(tensor_of(given["w"]), tensor_of(given["w_scale"]), block)
    grouped = node.target is _OPS.grouped_mm_a16w8.default
    options = {"groups": weight.data.shape[0]} if grouped else {"batch_invariant": given["batch_invariant"]}
    reason = why_16_bits(x, weight, **options)
    if reason is not None:
        return f"{node.target}, activations in 16 bits: {reason}"
    if grouped or (bias is not None and tensor_of(bias).ndim > 1):
        return f"{node.target}, activations in FP8"
    made = _emit(graph, node, given, activation_block(block))
    return f"{made}, activations in FP8"


def _emit(graph: Graph, node: Node, given: dict[str, Any], block: tuple[int, int]) -> str:
    x, w, w_scale, w_block = (given[name] for name in ("x", "w", "w_scale", "w_block"))
    out_dtype = given["out_dtype"] or tensor_of(x).dtype
    scale = "fp32" if tensor_of(w_scale).dtype == torch.float32 else "e8m0"
    with graph.inserting_before(node):
        one_matrix = tensor_of(w).ndim == 2 and tensor_of(x).ndim == 3
        rows = call(graph, aten.reshape.default, x, [-1, tensor_of(x).shape[-1]]) if one_matrix else x
        quantizer = call(graph, _OPS.quantize.default, rows, [*block], None, scale)
        data, x_scale = (call(graph, operator.getitem, quantizer, place) for place in range(2))
        invariant = given["batch_invariant"]
        fast = is_fast(given["activations"], invariant)
        if not invariant and is_mx(tensor_of(x_scale), block, tensor_of(w_scale), tuple(w_block)):
            out = call(graph, _OPS.mx_mm.default, data, x_scale, w, w_scale, given["bias"], out_dtype)
        else:
            sides = (data, x_scale, [*block], w, w_scale, [*w_block])
            flags = (False, True) if fast else (True,) * invariant
            out = call(graph, _OPS.scaled_mm.default, *sides, given["bias"], out_dtype, *flags)
        made = str(out.target)
        if one_matrix:
            out = call(graph, aten.reshape.default, out, [*tensor_of(node).shape])
    replace(graph, node, out)
    return made
