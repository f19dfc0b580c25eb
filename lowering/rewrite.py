"""The recipe pass: in a Dynamo graph, products with a parameter become `fp8fn::gemm`, which brings its own backward."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from fp8fn.lowering.einsum import reduce_einsums
from fp8fn.lowering.gemms import Gemm, find_gemms, parameter_of
from fp8fn.ops.recipe import Recipe
from fp8fn.site import Site, Where, why_not, why_not_by_default

_log = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class Decision:
    """What became of one product: `reason` is None where it was substituted."""

    gemm: Gemm
    reason: str | None


def decide(gm: GraphModule, where: Where = None) -> list[Decision]:
    """For every product of the graph, whether it goes to FP8 and why not; an einsum becomes the product that it is."""
    reduce_einsums(gm, lambda node: parameter_of(node, {}) is not None)
    return [Decision(gemm, gemm.reason or _why_not(gemm.site, where)) for gemm in find_gemms(gm)]


def _why_not(site: Site, where: Where) -> str | None:
    return why_not(site, where) or (why_not_by_default(site) if where is None else None)


def rewrite(gm: GraphModule, recipe: Recipe, where: Where = None) -> list[Decision]:
    """Substitutes the eligible products of the graph in place, and returns what was decided for each."""
    decisions = decide(gm, where)
    substitutes: dict[Node, Node] = {}
    for decision in decisions:
        gemm = decision.gemm
        if decision.reason is None:
            substitutes[gemm.node] = _substitute(gemm.node.graph, gemm, recipe, substitutes)
        _log.info(
            "%s %s %s (M,N,K)=(%s,%s,%s): %s",
            gemm.source, gemm.site.op, gemm.site.weight, gemm.site.m, gemm.site.n, gemm.site.k,
            decision.reason or f"fp8fn.gemm, {recipe.key}",
        )  # fmt: skip
    for graph in {decision.gemm.node.graph for decision in decisions if decision.reason is not None} | {gm.graph}:
        graph.lint()
    for module in gm.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    return decisions


def _substitute(graph: Graph, gemm: Gemm, recipe: Recipe, substitutes: dict[Node, Node]) -> Node:
    """Puts `fp8fn::gemm` in the place of one product, whose operands may be substitutes themselves."""
    node = gemm.node
    a, b = (substitutes.get(operand, operand) for operand in (gemm.a, gemm.b))
    bias = gemm.bias if gemm.bias is None else substitutes.get(gemm.bias, gemm.bias)

    def transpose(operand: Node) -> Node:
        # A function: a call_method node would bypass AOTAutograd's cache.
        return graph.call_function(torch.transpose, (operand, -2, -1))

    with graph.inserting_before(node):
        if gemm.flipped:
            a = transpose(a)
        if gemm.transposed or gemm.flipped:
            b = transpose(b)
        out = graph.call_function(torch.ops.fp8fn.gemm.default, (a, b, bias, recipe.key, None))
        if gemm.flipped:
            out = transpose(out)
    out.meta.update(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return out
