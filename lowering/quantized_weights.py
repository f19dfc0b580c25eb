"""Weights that the recipe leaves alone because they are already quantized.

Quantizing a dequantized weight again would round twice; the exact pass multiplies its FP8 data directly if it knows the
spelling. An `FP8Weight` defines its products itself. A DTensor has rules for fp8fn's ops. Another tensor subclass
(torchao's quantized tensors) defines its own meaning of each op and none for fp8fn's ops. AOTAutograd unwraps the
subclass after the recipe pass, so that the exact pass sees its parts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.ops.formats import short_name
from fp8fn.ops.sharded import plain_of
from fp8fn.ops.torch_private.core import is_traceable_wrapper_subclass
from fp8fn.weights import FP8Weight
from fp8fn.weights.fp8_weight import is_gathered

# Substrings of the names of products and look-ups. Their results are activations, whatever they read.
_PRODUCTS: Final = ("mm", "matmul", "linear", "einsum", "attention", "embedding", "conv1d", "conv2d", "conv3d")
_PICKING_METHODS: Final = ("__getitem__", "index_select", "gather")


def why_not_operands(x: Any, weight: Any, outer: Mapping[Node, Node]) -> str | None:
    """The reason why the recipe does not take a product of these operands, or None; `outer` as in `find_gemms`."""
    for name, node in (("weight", weight), ("input", x)):
        operand = plain_of(value(node))
        if operand is not None and is_traceable_wrapper_subclass(operand):
            kind: type = type(operand)
            if name == "weight" and is_gathered(operand):
                return None
            if kind is FP8Weight:
                return f"the {name} is an FP8Weight, whose own data multiplies activations in their own type"
            return f"the {name} is of the tensor subclass {kind.__name__}; the recipe takes plain tensors and DTensors"
    source = quantized_source(weight, outer)
    if source is None:
        return None
    dtype = short_name(tensor_of(source).dtype)
    return f"the weight is {dtype} data with scales already, which the recipe never quantizes again"


def quantized_source(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The quantized data that a weight is computed from, in any spelling; None for a plain weight."""
    seen: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if not isinstance(current, Node) or current in seen:
            continue
        seen.add(current)
        tensor = value(current)
        if tensor is not None and _is_quantized(tensor):
            return current
        if current in outer:
            pending.append(outer[current])
        elif _picks_rows(current):
            pending.append(current.args[0])
        elif not _is_product(current):
            pending += current.all_input_nodes
    return None


def _is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor is FP8 data or a matrix of integers; masks are bool, and indices are vectors."""
    if tensor.dtype.is_floating_point:
        return tensor.dtype.itemsize == 1 and tensor.dtype != torch.float8_e8m0fnu  # the type of scales
    return tensor.dtype != torch.bool and not tensor.dtype.is_complex and tensor.ndim >= 2


def _picks_rows(node: Node) -> bool:
    """Whether a node indexes a tensor by integers that nothing has quantized; those of a vector are codes."""
    if node.target not in (operator.getitem, torch.index_select, torch.gather, *_PICKING_METHODS) or not node.args:
        return False
    indexed = value(node.args[0])
    return indexed is None or indexed.ndim != 1


def _is_product(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and any(product in name for product in _PRODUCTS)
