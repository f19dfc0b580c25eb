"""Gives each of fp8fn's products in a graph `batch_invariant=True`: its rows must not depend on other rows."""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of

_OPS: Final = torch.ops.fp8fn
_GROUPED: Final = (_OPS.scaled_grouped_mm.default, _OPS.moe_gemm.default)


def mark(graph: Graph) -> None:
    """Sets the argument; NotImplementedError for a product of groups, which has no such kernel."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _GROUPED:
            raise NotImplementedError(
                f"batch_invariant=True: {node.target} has no batch-invariant kernel; leave groups alone by where="
            )
        if node.target is _OPS.mx_mm.default:
            given = arguments_of(node)
            sides = (given["a"], given["a_scale"], [1, 32], given["b"], given["b_scale"], [32, 1])
            _replace(graph, node, _OPS.scaled_mm.default, (*sides, given["bias"], given["out_dtype"], True))
        elif node.target is _OPS.grouped_mm_a16w8.default:
            given = arguments_of(node)
            if given["activations"] != "16bit":  # the rows would decide, and the product in FP8 has no such kernel
                given["activations"] = "16bit"
                _replace(graph, node, node.target, tuple(given.values()))
        elif node.target in (_OPS.mm_a16w8.default, _OPS.scaled_mm.default):
            given = arguments_of(node)
            if not given["batch_invariant"]:
                given["batch_invariant"] = True
                if given.get("fast_accumulation"):  # a permission, which one order of sums overrules
                    given["fast_accumulation"] = False
                _replace(graph, node, node.target, tuple(given.values()))


def _replace(graph: Graph, node: Node, target: object, args: tuple[object, ...]) -> None:
    with graph.inserting_before(node):
        replace(graph, node, call(graph, target, *args))
