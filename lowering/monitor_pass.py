"""The pass that adds a call of `fp8fn::monitor` for each operand of the recipe's products.

The pass runs after all others on the forward and backward graphs that Inductor compiles, and reads no tensor that is
not in memory anyway. The input of a quantizer is in memory, because Inductor calls the quantizer. Where Inductor
generates the quantizer's code, or a fused op computes what it quantizes, statistics come from the op's inputs or from
the FP8 data alone. The graph is otherwise the one that is compiled without the pass, and so are all results.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import arguments_of, input_of, place_of, product_of, tensor_of
from fp8fn.lowering.graph.views import same_sizes
from fp8fn.lowering.inductor import monitor_call
from fp8fn.lowering.saved.cut import QUANTIZERS, WHOLE_VIEWS, is_result_of
from fp8fn.ops.layout import Block, known_block, scale_shape
from fp8fn.ops.statistics import OPERANDS

_ops: Final = torch.ops.fp8fn
_SCALED: Final = (_ops.scaled_mm.default, _ops.scaled_grouped_mm.default)
_MX: Final = _ops.mx_mm.default
_MX_BLOCKS: Final[tuple[Block, Block]] = ((1, 32), (32, 1))
_NORMS: Final = (_ops.quantize_rms_norm.default, _ops.quantize_rms_norm_dual.default)
_GATED: Final = (
    _ops.quantize_silu_mul.default, _ops.quantize_silu_mul_dual.default, _ops.quantize_silu_mul_saved.default,
    _ops.quantize_silu_mul_grouped_dual.default,
)  # fmt: skip
# Their scales are those of groups, not of blocks.
_BY_GROUPS: Final = (_ops.quantize_grouped.default, _ops.quantize_silu_mul_grouped.default)

_TRAINING: Final = threading.local()


@contextmanager
def training(wanted: bool) -> Iterator[None]:
    """Whether a graph that is compiled inside is a forward or a backward; an inference graph is not monitored."""
    before = getattr(_TRAINING, "wanted", False)
    _TRAINING.wanted = wanted
    try:
        yield
    finally:
        _TRAINING.wanted = before


class MonitorPass(CustomGraphPass):
    """Inductor's hook, after the pass `before`.

    Args:
        first: The row of the first product's activation.
        weights: The name of each product's weight.
        always: Whether the calls are captured in CUDA graphs.
        before: Pass that runs first.
    """

    def __init__(self, first: int, weights: tuple[str, ...], always: bool, before: Any = None) -> None:
        self.first, self.weights, self.always, self.before = first, weights, always, before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        if getattr(_TRAINING, "wanted", False) and watch(graph, self.first, self.always):
            monitor_call.install()
            graph.lint()

    def uuid(self) -> Any:
        before = self.before.uuid() if self.before is not None else None
        return ("monitor", self.first, self.weights, self.always, before)


def with_monitor(patches: dict[str, Any], first: int, weights: tuple[str, ...]) -> dict[str, Any]:
    """Inductor's options with this pass after the user's own."""
    from torch._inductor import config

    before = patches.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    always = bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))
    return {**patches, "post_grad_custom_post_pass": MonitorPass(first, weights, always, before)}


@dataclass(frozen=True)
class _Operand:
    """The nodes of FP8 data and scales, and of what the exact values are computed from."""

    data: Node
    scale: Node
    block: Block
    source: str
    inputs: tuple[Node, ...] = ()


def watch(graph: Graph, first: int, always: bool = False) -> int:
    """Adds the calls; returns how many. An operand of several products is measured once, for the rows of all."""
    rows: dict[Node, list[int]] = {}
    operands: dict[Node, _Operand] = {}
    known: set[int] = set()
    for product, kind, operand in _operands(graph):
        row = first + product * len(OPERANDS) + OPERANDS.index(kind)
        if row not in known:  # two products read a gradient, in two orientations
            known.add(row)
            operands.setdefault(operand.data, operand)
            rows.setdefault(operand.data, []).append(row)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for data, operand in operands.items():
        with graph.inserting_after(max((data, operand.scale), key=order.__getitem__)):
            args = (data, operand.scale, [*operand.block], [*operand.inputs], operand.source, rows[data], always)
            graph.call_function(_ops.monitor.default, args).meta["val"] = None
    return len(operands)


def _operands(graph: Graph) -> Iterator[tuple[int, str, _Operand]]:
    """The number of each product that has one, the kind of an operand, and the operand.

    In a backward graph these are the gradients: the operands that depend on the gradients that the graph is given.
    """
    given = _incoming_gradients(graph)
    later = _dependents(given)
    for node in list(graph.nodes):
        product = product_of(node)
        if product is None or node.target not in (*_SCALED, _MX):
            continue
        for kind, operand in zip(OPERANDS, _both(node), strict=False):
            if given and operand[0] not in later:
                continue
            found = _found(graph, *operand)
            if found is not None:
                yield product, "gradient" if given else kind, found


def _incoming_gradients(graph: Graph) -> list[Node]:
    """The gradients that a graph is given.

    PyTorch does not cut the joint graph of a region inside of a region, and does not name the gradients there: they are
    the inputs that no node of the forward reads.
    """
    inputs = graph.find_nodes(op="placeholder")
    named = [node for node in inputs if "tangents" in str(node.target)]
    return named or [node for node in inputs if node.users and all(map(_is_backward, node.users))]


def _is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _dependents(nodes: list[Node]) -> set[Node]:
    """All nodes that are computed from any of `nodes`."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.users
    return found


def _both(node: Node) -> tuple[tuple[Node, Node, Block], tuple[Node, Node, Block]]:
    """The data, the scales and the block of each operand of a product."""
    given = arguments_of(node)
    blocks = _MX_BLOCKS if node.target is _MX else (given["a_block"], given["b_block"])
    first, second = (known_block(tuple(block)) for block in blocks)
    assert first is not None, node
    assert second is not None, node
    return (given["a"], given["a_scale"], first), (given["b"], given["b_scale"], second)


def _found(graph: Graph, data: Node, scale: Node, block: Block) -> _Operand | None:
    """The operand as its quantizer made it, or, where Inductor generates that code, as the product reads it."""
    made = data
    while made.target in WHOLE_VIEWS:
        made = input_of(made)
    if is_result_of(made, (*QUANTIZERS, *_GATED)):
        quantizer = input_of(made)
        if quantizer.target not in _BY_GROUPS:
            return _quantized(graph, quantizer)
    if not same_sizes(tensor_of(scale).shape, scale_shape(tensor_of(data).shape, block)):
        return None
    return _Operand(data, scale, block, "codes")


def _quantized(graph: Graph, quantizer: Node) -> _Operand:
    """The first result of a quantizer, which has the rows that the forward reads, or a gradient's dgrad."""
    parts = {place_of(item): item for item in quantizer.users if item.target is operator.getitem}
    for place in (0, 1):
        if place not in parts:
            with graph.inserting_after(quantizer):
                parts[place] = call(graph, operator.getitem, quantizer, place)
    given = arguments_of(quantizer)
    block = known_block(tuple(given["block"]))
    assert block is not None, quantizer
    if quantizer.target in _GATED:
        return _Operand(parts[0], parts[1], block, "silu_mul", (given["gate"], given["up"]))
    if quantizer.target in _NORMS:
        if given["rstd"] is None:
            return _Operand(parts[0], parts[1], block, "codes")
        return _Operand(parts[0], parts[1], block, "rms_norm", (given["x"], given["weight"], given["rstd"]))
    return _Operand(parts[0], parts[1], block, "x", (given["x"],))
