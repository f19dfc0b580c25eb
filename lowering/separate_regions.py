"""Gives each call of a shared region a graph of its own, so that the monitor tells the calls' products apart."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch.fx import GraphModule, Node

from fp8fn.lowering.find import differentiated, first_stacked, parameter_of, region_of, weight_name
from fp8fn.lowering.graph.emit import mark
from fp8fn.lowering.graph.nodes import PRODUCT, product_of
from fp8fn.lowering.names import named_in_model
from fp8fn.lowering.recipe_pass import Decision

_SUBSTITUTES: Final = (torch.ops.fp8fn.gemm.default, torch.ops.fp8fn.grouped_gemm.default)


def separated(gm: GraphModule, decisions: Sequence[Decision]) -> list[Decision]:
    """Copies regions for their second and later calls, and numbers the substitutes anew; returns their decisions.

    The decision about a product of a later call names the weight of that call.
    """
    numbered = [decision for decision in decisions if decision.reason is None]
    found: list[Decision] = []
    for node, outer in [*_products(gm, {}, set())]:  # all copies have the old numbers
        product = product_of(node)
        assert product is not None, node
        decision = numbered[product]
        mark(node, PRODUCT, len(found))
        b = node.args[1]
        parameter = parameter_of(b, outer) or differentiated(b, outer) or first_stacked(b, outer)
        if parameter is not None and parameter is not decision.gemm.parameter:
            site = replace(decision.gemm.site, weight=weight_name(parameter))
            gemm = replace(decision.gemm, site=site, parameter=parameter, parameters=(), weights=())
            decision = replace(decision, gemm=named_in_model([gemm])[0])
        found.append(decision)
    for module in gm.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    return found


def _products(
    gm: GraphModule, outer: Mapping[Node, Node], seen: set[GraphModule | str]
) -> Iterator[tuple[Node, Mapping[Node, Node]]]:
    """The substitute of each product, once for each call, with the nodes around its graph that give the inputs.

    `seen` are the regions and the identifiers of all calls before.
    """
    for node in list(gm.graph.nodes):
        if (inner := region_of(gm, node)) is not None:
            if inner[0] in seen:
                _copy_region(gm, node, inner[0])
                inner = region_of(gm, node)
                assert inner is not None, node
            if node.target is torch.ops.higher_order.invoke_subgraph:
                _identify(node, seen)
            seen.add(inner[0])
            yield from _products(inner[0], {**outer, **inner[1]}, seen)
        elif node.target in _SUBSTITUTES and product_of(node) is not None:
            yield node, outer


def _copy_region(gm: GraphModule, node: Node, region: GraphModule) -> None:
    """Lets a call have a copy of its region, under another name."""
    first, *given = node.args
    assert isinstance(first, Node), node
    name = _unused(str(first.target), lambda name: hasattr(gm, name))
    gm.add_module(name, copy.deepcopy(region))
    with gm.graph.inserting_before(node):
        node.args = (gm.graph.get_attr(name), *given)


def _identify(node: Node, seen: set[GraphModule | str]) -> None:
    """Gives a call an identifier of its own: PyTorch traces the regions of one identifier once."""
    region, identifier, *given = node.args
    identifier = _unused(str(identifier), seen.__contains__)
    seen.add(identifier)
    node.args = (region, identifier, *given)


def _unused(name: str, used: Callable[[str], bool]) -> str:
    """The name, with a number behind it if it is used."""
    names = (f"{name}_{number}" if number else name for number in itertools.count())
    return next(each for each in names if not used(each))
