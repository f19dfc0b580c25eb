"""Computes the products of the same rows by two or three FP8 weights in one launch.

    q, k, v = (project(x) for project in (q_proj, k_proj, v_proj))    # fp8fn::mm_a16w8_siblings

The pattern runs on the graphs that Inductor compiles, after those that take gate and up of many rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import replace
from fp8fn.lowering.graph.nodes import arguments_of, input_of, source_of, tensor_of
from fp8fn.lowering.graph.quantizers import begins_aligned, reshaped_of, weight_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import same_sizes, sized
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm.a16w8_tiles import MOST_ROWS
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.sibling_products import FEWEST_SIBLINGS, MOST_SIBLING_ROWS, MOST_SIBLINGS, serves_siblings

NAME: Final = "sibling_products"
_PRODUCT: Final = torch.ops.fp8fn.mm_a16w8.default
_OP: Final = torch.ops.fp8fn.mm_a16w8_siblings.default
_GIVEN: Final = ("placeholder", "get_attr")
_PARTS: Final = ("w", "w_scale", "bias")


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Reports each product that has siblings, products of the same rows by other FP8 weights."""
    families: dict[Any, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_PRODUCT):
        given = arguments_of(node)
        if _is_plain(given):
            w = tensor_of(given["w"])
            bias = given["bias"] and tensor_of(given["bias"]).dtype
            key = reshaped_of(given["x"]), w.dtype, w.shape[0], (*given["w_block"],), given["constant"], bias
            families.setdefault(key, []).append(node)
    for family in families.values():
        for first in range(0, len(family), MOST_SIBLINGS):
            siblings = family[first : first + MOST_SIBLINGS]
            if len(siblings) >= FEWEST_SIBLINGS:
                yield from _joined(graph, siblings)


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether a product's rows stay in 16 bits, as few do whatever the op's argument says, and may share a launch."""
    x, w = tensor_of(given["x"]), tensor_of(given["w"])
    sizes = (*x.shape, *w.shape)
    return (
        len(sizes) == 4
        and all(isinstance(size, int) for size in sizes)
        and 0 < x.shape[0] <= (MOST_SIBLING_ROWS if given["activations"] == "16bit" else MOST_ROWS)
        and not given["batch_invariant"]
        and given["out_dtype"] in (None, x.dtype)
    )


def _joined(graph: Graph, siblings: list[Node]) -> Iterator[Substitution]:
    given = [arguments_of(node) for node in siblings]
    reason, made = _why_not(given), ""
    m, k = tensor_of(given[0]["x"]).shape
    found = [
        (str(node), source_of(node), (m, tensor_of(each["w"]).shape[1], k))
        for node, each in zip(siblings, given, strict=True)
    ]
    if reason is None:
        weights = [[each[name] for each in given] for name in _PARTS]
        for node in filter(None, chain(*weights)):
            _move(node, siblings[0])
        with graph.inserting_before(siblings[0]):
            all_of = graph.call_function(
                _OP, (given[0]["x"], *weights, [*given[0]["w_block"]], *[True] * given[0]["constant"])
            )
            all_of.meta["val"] = [node.meta["val"] for node in siblings]
            parts = [graph.call_function(operator.getitem, (all_of, i)) for i in range(len(siblings))]
        for node, part in zip(siblings, parts, strict=True):
            part.meta["val"] = node.meta["val"]
            replace(graph, node, part)
        made = str(_OP)
    for name, at, shape in found:
        yield Substitution(NAME, name, at, str(_PRODUCT), shape, made, reason)


def _views(node: Node) -> list[Node]:
    """The views, of views, of the graph's input that `node` is, the first one first; empty where it is none.

    A view at a place that the graph computes is none, since it must follow what computes the place.
    """
    views: list[Node] = []
    while getattr(node.target, "is_view", False) and all(each.op in _GIVEN for each in node.all_input_nodes[1:]):
        views.insert(0, node)
        node = input_of(node)
    return views if node.op in _GIVEN else []


def _move(node: Node, before: Node) -> None:
    """Moves the views of an input that `node` is ahead of a node that may precede them."""
    for view in _views(node):
        if before < view:
            before.prepend(view)


def _why_not(given: list[dict[str, Any]]) -> str | None:
    x = tensor_of(given[0]["x"])
    if not all(same_sizes(tensor_of(each["x"]).shape, x.shape) for each in given):
        return "their rows differ in shape"
    parts = [part for each in given[1:] for name in _PARTS if (part := each[name]) is not None]
    if not all(part.op in _GIVEN or _views(part) for part in parts):
        return "a weight or a bias is computed in the graph"
    target = targets.target_of(x.device)
    if target.backend == "cpu":
        return None
    rows, weights = sized(x), [weight for each in given if (weight := weight_of(each)) is not None]
    biases = [None if each["bias"] is None else sized(tensor_of(each["bias"])) for each in given]
    if (
        rows is None
        or len(weights) < len(given)
        or any(row is None and each["bias"] is not None for row, each in zip(biases, given, strict=True))
    ):
        return "a size is not known"
    if not all(begins_aligned(node) for node in (given[0]["x"], *(each["w"] for each in given))):
        return "x or a weight does not begin at a multiple of 16 bytes"
    reason = serves_siblings(rows, weights, biases, target, constant=given[0]["constant"]) or nvrtc.unavailable()
    return None if reason is None else f"no kernel for it: {reason}"
