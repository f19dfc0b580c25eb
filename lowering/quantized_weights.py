"""Weights that the recipe must leave alone: they are quantized or sharded already.

FP8 data is multiplied as it is, by the exact pass where that knows the spelling: quantizing what was dequantized from
it rounds twice. A tensor subclass (torchao's quantized tensors, DTensor) has its own meaning of each op, and none of
fp8fn's; AOTAutograd unwraps it below the recipe, where the exact pass sees its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.ops.formats import short_name

# What these give is no weight, whatever they read: substrings of the names of products and of look-ups.
_PRODUCTS: Final = ("mm", "matmul", "linear", "einsum", "attention", "embedding", "conv1d", "conv2d", "conv3d")


def why_not_operands(x: Any, weight: Any, outer: Mapping[Node, Node]) -> str | None:
    """The reason why the recipe takes no product of these two, or None; `outer` as in `find_gemms`."""
    for name, node in (("weight", weight), ("input", x)):
        operand = value(node)
        if operand is not None and is_traceable_wrapper_subclass(operand):
            kind = type(operand)
            if kind.__module__.startswith("torch.distributed"):  # importing DTensor takes a second and a half
                return f"the {name} is sharded, a {kind.__name__}, which the recipe does not take"
            return f"the {name} is of the tensor subclass {kind.__name__}; the recipe takes plain tensors alone"
    source = quantized_source(weight, outer)
    if source is None:
        return None
    dtype = short_name(tensor_of(source).dtype)
    return f"the weight is {dtype} data with scales already, which the recipe never quantizes again"


def quantized_source(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The quantized data that a weight is computed from, however that is spelled; None of plain weights."""
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
        elif not _is_product(current):
            pending += current.all_input_nodes
    return None


def _is_quantized(tensor: Tensor) -> bool:
    """FP8, and integers in the shape of a matrix; a mask is bool, and indices are a vector."""
    if tensor.dtype.is_floating_point:
        return tensor.dtype.itemsize == 1 and tensor.dtype != torch.float8_e8m0fnu  # which scales are of
    return tensor.dtype != torch.bool and not tensor.dtype.is_complex and tensor.ndim >= 2


def _is_product(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and any(product in name for product in _PRODUCTS)
