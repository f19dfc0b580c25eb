"""Computes `silu(gate) * up` of few rows in the product that reads it, by an FP8 weight: one launch in place of two.

    mlp.down_proj(F.silu(gate) * up)                                  # fp8fn::silu_mul_mm_a16w8

The pattern runs on the graphs that Inductor compiles, because only these show all readers of a tensor. The op rounds
the rows to their type, as Inductor's kernel does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, input_of, source_of, tensor_of
from fp8fn.lowering.graph.quantizers import RESHAPES, begins_aligned, computed, like, reshaped_of, weight_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import sized
from fp8fn.lowering.patterns.producers import SiluMul, find_silu_mul, unread_beside
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.mm_a16w8 import MOST_GATED_ROWS, serves_gated

NAME: Final = "gated_rows"
_PRODUCT: Final = torch.ops.fp8fn.mm_a16w8.default
_OP: Final = torch.ops.fp8fn.silu_mul_mm_a16w8.default


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Reports each product of `silu(gate) * up` by an FP8 weight."""
    for node in list(graph.find_nodes(op="call_function", target=_PRODUCT)):
        given = arguments_of(node)
        rows = reshaped_of(given["x"])
        if (found := find_silu_mul(rows)) is None:
            continue
        x, w = tensor_of(given["x"]), tensor_of(given["w"])
        reason = _why_not(node, given, found)
        name, at, made = str(node), source_of(node), ""
        if reason is None:
            with graph.inserting_before(node):
                gate, up = (like(graph, part, given["x"]) for part in found.inputs)
                weight = given["w"], given["w_scale"], [*given["w_block"]]
                new = call(graph, _OP, gate, up, *weight, *[True] * given["constant"])
            replace(graph, node, new)
            made = str(_OP)
        yield Substitution(NAME, name, at, str(_PRODUCT), (x.shape[0], w.shape[-1], x.shape[-1]), made, reason)


def _why_not(node: Node, given: dict[str, Any], found: SiluMul) -> str | None:
    x, w = tensor_of(given["x"]), tensor_of(given["w"])
    if x.ndim != 2 or w.ndim != 2 or not all(isinstance(size, int) for size in (*x.shape, *w.shape)):
        return "it is no product of matrices of known sizes"
    if x.shape[0] > MOST_GATED_ROWS:
        return f"M={x.shape[0]} rows, more than {MOST_GATED_ROWS}"
    if given["bias"] is not None or given["batch_invariant"] or given["out_dtype"] not in (None, x.dtype):
        return "the product has a bias, another output type or is batch-invariant"
    if (fault := found.fault()) is not None or found.gate.meta["val"].dtype != x.dtype:
        return fault or f"gate is {found.gate.meta['val'].dtype} and x {x.dtype}"
    if _read_elsewhere(node, given["x"], found):
        return "another reads silu(gate) * up too, or a part of it, so that a kernel of Inductor's stays"
    if any(computed(_viewed(part)) for part in found.inputs):
        return "Inductor computes gate or up, and fuses silu(gate) * up with it"
    target = targets.target_of(x.device)
    if target.backend == "cpu":
        return None
    gate, up = (sized(part.meta["val"], x.shape) for part in found.inputs)
    weight = weight_of(given)
    if gate is None or up is None or weight is None:
        return "a size is not known"
    if not all(map(begins_aligned, found.inputs)):
        return "gate or up does not begin at a multiple of 16 bytes"
    reason = serves_gated(gate, up, weight, target, constant=given["constant"]) or nvrtc.unavailable()
    return None if reason is None else f"no kernel for it: {reason}"


def _read_elsewhere(node: Node, x: Node, found: SiluMul) -> bool:
    """Whether another node than `node` needs the rows, or a step between gate, up and the rows."""
    gone = unread_beside(node, x, found.inputs)
    steps = [x, *(step for each in gone - {node} for step in each.all_input_nodes)]
    return any(step not in gone and step not in found.inputs for step in steps)


def _viewed(node: Node) -> Node:
    """The tensor that `node` is a view of, or part of."""
    while True:
        view = input_of(node) if node.target is operator.getitem else node
        if not getattr(view.target, "is_view", False) and view.target not in RESHAPES:
            return node
        node = input_of(view)
