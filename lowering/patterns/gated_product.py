"""Computes `silu(gate) * up` of many rows in the launch of both products by FP8 weights: one kernel in place of three.

    F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)                         # fp8fn::mm_a16w8_silu_mul

The pattern runs on the graphs that Inductor compiles, because only these show all readers of a tensor: a backward needs
gate and up. The op rounds both products to the type of `x`, and the result once, as Inductor's kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, source_of, tensor_of
from fp8fn.lowering.graph.quantizers import begins_aligned, reshaped_of, weight_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten, same_sizes, sized
from fp8fn.lowering.patterns.producers import SiluMul, find_silu_mul, unread_beside
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.mm_a16w8 import FEWEST_GATED_ROWS, serves_gated_product
from fp8fn.ops.sibling_products import serves_siblings

NAME: Final = "gated_product"
_PRODUCT: Final = torch.ops.fp8fn.mm_a16w8.default
_OP: Final = torch.ops.fp8fn.mm_a16w8_silu_mul.default
_CAST: Final = torch.ops.prims.convert_element_type.default
# Rows up to which both products of rows that are split into FP8 parts (`parts_a16w8.py`), and Inductor's kernel behind
# them, were faster on an H200.
_MOST_SPLIT_ROWS: Final = 384
_PLAIN: Final = {"bias": None, "activations": "16bit", "batch_invariant": False}


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Reports each `silu(gate) * up` of two products by FP8 weights."""
    for product in list(graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
        if (found := find_silu_mul(product)) is None:
            continue
        parts = [reshaped_of(part) for part in found.inputs]
        if any(part.target is not _PRODUCT for part in parts):
            continue
        rows = _rounded(product, found)
        gate, up = (arguments_of(part) for part in parts)
        reason = _why_not(rows, parts, gate, up)
        x, w = tensor_of(gate["x"]), tensor_of(gate["w"])
        name, at, made = str(rows), source_of(rows), ""
        if reason is None:
            with graph.inserting_before(rows):
                new = call(graph, _OP, gate["x"], *_weight(gate), *_weight(up), [*gate["w_block"]])
                if not same_sizes(tensor_of(new).shape, tensor_of(rows).shape):
                    new = call(graph, aten.reshape.default, new, list(tensor_of(rows).shape))
            unused = _gone(rows) - {rows}
            replace(graph, rows, new)
            for node in sorted(unused, reverse=True):  # later patterns would find the products
                graph.erase_node(node)
            made = str(_OP)
        yield Substitution(NAME, name, at, str(_PRODUCT), (x.shape[-2], w.shape[-1], x.shape[-1]), made, reason)


def _weight(given: dict[str, Any]) -> tuple[Node, Node]:
    return given["w"], given["w_scale"]


def _rounded(product: Node, found: SiluMul) -> Node:
    """`product`, or its only reader if that rounds it to the type of gate."""
    (reader, *others) = [*product.users] or [product]
    wanted = tensor_of(found.gate).dtype
    if others or tensor_of(product).dtype == wanted or reader.target is not _CAST or reader.args[1] != wanted:
        return product
    return reader


def _why_not(rows: Node, parts: list[Node], gate: dict[str, Any], up: dict[str, Any]) -> str | None:
    x = tensor_of(gate["x"])
    sizes = (*x.shape, *tensor_of(gate["w"]).shape, *tensor_of(up["w"]).shape)
    if len(sizes) != 6 or not all(isinstance(size, int) for size in sizes):
        return "they are no products of matrices of known sizes"
    if x.shape[0] < FEWEST_GATED_ROWS:
        return f"M={x.shape[0]} rows, fewer than {FEWEST_GATED_ROWS}"
    if parts[0] is parts[1]:
        return "gate and up are one product"
    if reshaped_of(gate["x"]) is not reshaped_of(up["x"]) or not same_sizes(x.shape, tensor_of(up["x"]).shape):
        return "gate and up are products of two tensors"
    for given in (gate, up):
        if any(given[name] != value for name, value in _PLAIN.items()) or given["out_dtype"] not in (None, x.dtype):
            return "a product has a bias, FP8 activations or another output type, or is batch-invariant"
    if tensor_of(rows).dtype != x.dtype:
        return f"silu(gate) * up is {tensor_of(rows).dtype} and x {x.dtype}"
    if not {*parts} <= _gone(rows):
        return "another reads gate or up, or a step between them and their product"
    if tensor_of(gate["w"]).dtype != tensor_of(up["w"]).dtype or [*gate["w_block"]] != [*up["w_block"]]:
        return "the weights differ in type or block"
    if not tensor_of(rows).is_contiguous():
        return "silu(gate) * up lies otherwise than the op's result"
    return _why_no_kernel(gate, up)


def _why_no_kernel(gate: dict[str, Any], up: dict[str, Any]) -> str | None:
    target = targets.target_of(tensor_of(gate["x"]).device)
    if target.backend == "cpu":
        return None
    x, of_gate, of_up = sized(tensor_of(gate["x"])), weight_of(gate), weight_of(up)
    if x is None or of_gate is None or of_up is None:
        return "a size is not known"
    if not all(begins_aligned(node) for node in (gate["x"], gate["w"], up["w"])):
        return "x or a weight does not begin at a multiple of 16 bytes"
    reason = serves_gated_product(x, of_gate, of_up, target) or nvrtc.unavailable()
    if reason is not None:
        return f"no kernel for it: {reason}"
    if x.shape[0] <= _MOST_SPLIT_ROWS and serves_siblings(x, (of_gate, of_up), (None, None), target) is None:
        return f"M={x.shape[0]} rows are split into FP8 parts for both products"
    return None


def _gone(rows: Node) -> set[Node]:
    """The nodes that become unused when `rows` is no longer computed."""
    gone: set[Node] = set()
    for node in rows.all_input_nodes:
        gone |= unread_beside(rows, node, ())
    return gone
