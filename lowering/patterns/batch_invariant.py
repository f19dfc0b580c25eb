"""Gives each of fp8fn's products in a graph `batch_invariant=True`: its rows must not depend on other rows."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of

_OPS: Final = torch.ops.fp8fn
# Each product of groups with the remedy: `where=` decides only about products that the backend quantizes.
_GROUPED: Final = {
    _OPS.scaled_grouped_mm.default: "leave groups alone by where=",
    _OPS.grouped_mm_a16w8.default: "keep the weights of groups in 16 bits, or compile that part without the option",
    _OPS.moe_gemm.default: "compile that part without the option",
}


def mark(graph: Graph) -> None:
    """Sets the argument.

    Raises NotImplementedError for a product of groups, which has no such kernel, and ValueError where rows share the
    scales that a call of `fp8fn.gemm` asks for.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _GROUPED:
            raise NotImplementedError(
                f"batch_invariant=True: {node.target} has no batch-invariant kernel; {_GROUPED[node.target]}"
            )
        if node.target is _OPS.mx_mm.default:
            given = arguments_of(node)
            sides = (given["a"], given["a_scale"], [1, 32], given["b"], given["b_scale"], [32, 1])
            _replace(graph, node, _OPS.scaled_mm.default, (*sides, given["bias"], given["out_dtype"], True))
        elif node.target in (_OPS.mm_a16w8.default, _OPS.scaled_mm.default):
            given = arguments_of(node)
            _check_rows(node, given)
            if not given["batch_invariant"]:
                given["batch_invariant"] = True
                if given.get("fast_accumulation"):  # a permission, which one order of sums overrules
                    given["fast_accumulation"] = False
                _replace(graph, node, node.target, tuple(given.values()))


def _check_rows(node: Node, given: dict[str, Any]) -> None:
    """Raises ValueError for activations that the graph quantizes with scales of several rows.

    A wgrad, whose rows are no rows of the model, reads transposed activations.
    """
    a = given.get("a")
    if not isinstance(a, Node) or a.target is not operator.getitem or given["a_block"][0] == 1:
        return
    quantizer = a.args[0]
    if isinstance(quantizer, Node) and quantizer.target in (_OPS.quantize.default, _OPS.quantize_dual.default):
        raise ValueError(
            f"batch_invariant=True: {node.target} reads activations in blocks of {tuple(given['a_block'])}, whose rows "
            "share scales; use a recipe with activation_block=(1, 128)"
        )


def _replace(graph: Graph, node: Node, target: object, args: tuple[object, ...]) -> None:
    with graph.inserting_before(node):
        replace(graph, node, call(graph, target, *args))
