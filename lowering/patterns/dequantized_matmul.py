"""Replaces `x @ dequantize(w)` and `dequantize(x) @ dequantize(w)`, the spelling of models without FP8 kernels.

    w = weight.to(bf16) * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    w = (weight.float().view(N // 128, 128, K // 128, 128) * scale[:, None, :, None]).view(N, K).to(bf16)
    y = F.linear(x, w)

A product with one FP8 operand becomes `fp8fn::mm_a16w8`, a product with two becomes `fp8fn::scaled_mm`. Fake
quantization, whose FP8 data is computed in the graph, is replaced as well. The substitute does not round dequantized
values to 16 bits, even where the graph does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.dequantized import Operand, find_operand
from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import source_of, tensor_of, value
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten
from fp8fn.ops import targets
from fp8fn.ops.formats import INPUT_DTYPES, short_name
from fp8fn.ops.layout import swap

NAME: Final = "dequantized_matmul"
PRODUCTS: Final = (aten.mm.default, aten.bmm.default, aten.addmm.default)


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Replaces what it can, and reports each product with a dequantized operand."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in PRODUCTS:
            continue
        bias, a, b = node.args[:3] if node.target is aten.addmm.default else (None, *node.args[:2])
        left, right = find_operand(a), find_operand(b)
        if left is None and right is None:
            continue
        reason = _why_not(node, bias, left, right)
        made = "" if reason else _emit(graph, node, a, b, bias, left, right)
        (m, k), n = a.meta["val"].shape[-2:], b.meta["val"].shape[-1]
        yield Substitution(NAME, str(node), source_of(node), str(node.target), (m, n, k), made, reason)


def _why_not(node: Node, bias: Any, left: Operand | None, right: Operand | None) -> str | None:
    dtype = node.meta["val"].dtype
    if dtype not in INPUT_DTYPES:
        return f"the product is in {short_name(dtype)}"
    if node.target is aten.addmm.default:
        if any(factor != 1 for factor in node.kwargs.values()):
            return "addmm with alpha or beta"
        row = value(bias)
        if row is None or row.dim() != 1 or row.dtype not in INPUT_DTYPES:
            return "the bias is not one row of N"
    for operand in (left, right):
        if operand is not None:
            target = targets.target_of(operand.device)
            if operand.dtype not in targets.fp8_dtypes(target):
                return f"{target.name} has no kernel for {short_name(operand.dtype)}"
    if not _both(left, right):
        one = right or left
        assert one is not None
        along = one.block[0] if one is right else one.block[1]
        if along == 1 and not _is_stored(one.found.data):
            return "a scale for each element of K, of data made in the graph: the product in 16 bits is faster"
    return None


def _both(left: Operand | None, right: Operand | None) -> bool:
    """Whether both operands can enter the product as FP8: several elements of K share a scale."""
    return left is not None and right is not None and left.block[1] != 1 and right.block[0] != 1


def _is_stored(data: Node) -> bool:
    """Whether the data is an input of the graph, rather than computed in it."""
    while data.op == "call_function" and data.args and isinstance(data.args[0], Node) and data.args[0].op != "output":
        if value(data.args[0]) is None or tensor_of(data.args[0]).dtype != tensor_of(data).dtype:
            return False
        data = data.args[0]
    return data.op in ("placeholder", "get_attr")


def _emit(
    graph: Graph, node: Node, a: Node, b: Node, bias: Node | None, left: Operand | None, right: Operand | None
) -> str:
    """Replaces the product and returns the name of the substitute's op."""
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        if left is not None and right is not None and _both(left, right):
            sides = (*left.emit(graph), left.block, *right.emit(graph), right.block)
            out = call(graph, torch.ops.fp8fn.scaled_mm.default, *sides, bias, dtype)
        elif right is not None:
            out = call(graph, torch.ops.fp8fn.mm_a16w8.default, a, *right.emit(graph), right.block, bias, dtype)
        else:
            assert left is not None
            data, scale = (_turned(graph, part) for part in left.emit(graph))
            arguments = (_turned(graph, b), data, scale, swap(left.block), None, dtype)
            out = call(graph, torch.ops.fp8fn.mm_a16w8.default, *arguments)
            name = str(out.target)
            out = call(graph, aten.clone.default, _turned(graph, out), memory_format=torch.contiguous_format)
            if bias is not None:
                out = call(graph, aten.add.Tensor, out, bias)
            replace(graph, node, out)
            return name
    replace(graph, node, out)
    return str(out.target)


def _turned(graph: Graph, node: Node) -> Node:
    dims = list(range(node.meta["val"].dim()))
    return call(graph, aten.permute.default, node, [*dims[:-2], dims[-1], dims[-2]])
