"""Merges the quantizers of the gradients of `silu(gate) * up` in a backward that reads `gate` and `up` in 16 bits.

    quantize_dual(of_gate), quantize_dual(of_up), quantize_silu_mul(gate, up)    # fp8fn::quantize_silu_mul_backward

`lowering.saved` lets the backward quantize the product for the weight's gradient of the layer behind. The merged launch
moves 11 bytes an element; a kernel that Inductor generates, which writes both gradients, and the quantizers move 23.

The product is merged where it is there. Without it (its columns were kept, or cannot be merged) the gradients are
merged all the same and the op's product is not read: so the gradients' bits do not depend on what the forward keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import source_of, tensor_of, value
from fp8fn.lowering.graph.quantizers import (
    Quantizer,
    computed,
    find_quantizers,
    like,
    readers,
    reshaped_of,
    same_layout,
)
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import Size, aten, equal, sized
from fp8fn.lowering.patterns.saved_silu_mul import (
    BACKWARD,
    DUAL,
    SINGLE,
    Formula,
    Product,
    depends,
    product_of,
    replaced,
    source,
    unserved,
)
from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import silu_mul
from fp8fn.ops.layout import contracts_rows, is_square, swap
from fp8fn.ops.quantize import SQUARE
from fp8fn.ops.silu_mul import SiluMulBackward

NAME: Final = "silu_mul_backward"
_DTYPES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Gradients:
    """The quantizers of the gradients of `gate` and of `up`, and the values that both are computed from."""

    of_gate: Quantizer
    of_up: Quantizer
    grad: Node
    gate: Node
    up: Node

    @property
    def inputs(self) -> tuple[Node, Node, Node]:
        return self.grad, self.gate, self.up

    @property
    def target(self) -> targets.Target:
        return targets.target_of(self.of_gate.device)


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Merges where both gradients are only quantized, and reports each pair of gradients."""
    for parts in list(_pairs(graph)):
        name, at = str(parts.of_gate.node), source_of(parts.of_gate.node)
        m, k = parts.of_gate.shape
        made, reason = _merge(graph, parts)
        yield Substitution(NAME, name, at, str(parts.gate), (m, 0, k), made, reason)


def _pairs(graph: Graph) -> Iterator[Gradients]:
    """The gradients of every `gate` and `up` that no kernel of Inductor's computes."""
    quantizers = [
        quantizer
        for quantizer in find_quantizers(graph)
        if quantizer.dual and len(quantizer.shape) == 2 and _fits(quantizer)
    ]
    if len(quantizers) < 2:
        return
    for gate in gates(graph):
        parts = _pair(quantizers, gate)
        if parts is not None and not any(computed(reshaped_of(node)) for node in (parts.gate, parts.up)):
            yield parts


def gates(graph: Graph) -> list[Node]:
    """The tensors that a graph may compute SiLU of, in any spelling."""
    activations = (aten.sigmoid.default, aten.silu.default, aten.neg.default)
    found = (node.args[0] for node in graph.nodes if node.op == "call_function" and node.target in activations)
    return list(dict.fromkeys(map(source, found)))


def _fits(quantizer: Quantizer) -> bool:
    """Whether the op has the quantizer's format."""
    block, beside = quantizer.blocks
    return not is_square(block) and not contracts_rows(block) and beside == swap(block)


def _pair(quantizers: Sequence[Quantizer], gate: Node) -> Gradients | None:
    """The one gradient of `gate` and the one of the factor beside `silu(gate)`, or None."""
    formula = Formula(gate, None)
    of_up = [(quantizer, rest) for quantizer in quantizers if len(rest := formula.rest(quantizer.x, "up")) == 1]
    of_gate = [(quantizer, rest) for quantizer in quantizers if len(rest := formula.rest(quantizer.x, "gate")) == 2]
    if len(of_up) != 1 or len(of_gate) != 1:
        return None
    (up_quantizer, (grad,)), (gate_quantizer, factors) = of_up[0], of_gate[0]
    if grad not in factors:
        return None
    factors.remove(grad)
    parts = Gradients(gate_quantizer, up_quantizer, grad, gate, factors[0])
    return parts if all(is_matrix(node, gate_quantizer.shape) for node in parts.inputs) else None


def is_matrix(node: Node, shape: Sequence[Size]) -> bool:
    """Whether a tensor `(..., N)` has the elements of the matrix `shape`: none is broadcast."""
    x = value(node)
    if x is None or x.dim() < 2 or not equal(x.shape[-1], shape[1]):
        return False
    rows: Size = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return equal(rows, shape[0])


def _merge(graph: Graph, parts: Gradients) -> tuple[str, str | None]:
    of_gate, of_up = parts.of_gate, parts.of_up
    product = _product(graph, parts)
    reason = _fault(parts, product)
    old = [of_gate.node, of_up.node]
    if reason is None and any(depends(node, old) for node in parts.inputs):
        reason = "gate, up or the gradient is computed from a quantized gradient"
    if reason is not None:
        return "", reason
    form = of_gate.block, of_gate.dtype, of_gate.scale
    columns = (swap(of_gate.block), of_gate.dtype) if product is None else (product.block, product.dtype)
    after = _last(graph, parts.inputs)
    first = next(node for node in graph.nodes if node in old)
    with graph.inserting_before(first if _precedes(graph, after, first) else after.next):
        grad, gate, up = (like(graph, node, of_gate.x) for node in parts.inputs)
        new = call(graph, BACKWARD, grad, gate, None, up, None, *form, *columns)
    places = [(of_gate.node, 0), (of_up.node, 4)]
    if product is not None and _same(product, new):
        places.append((product.node, 8 - product.place))
    return replaced(graph, new, places)


def _product(graph: Graph, parts: Gradients) -> Product | None:
    """The quantizer of the columns of `silu(gate) * up` in the gradients' scales, or None."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (SINGLE, DUAL) or not node.users:
            continue
        product = product_of(node)
        if product is None or (source(product.gate), source(product.up)) != (parts.gate, parts.up):
            continue
        fits = (product.block == SQUARE or contracts_rows(product.block)) and product.scale == parts.of_gate.scale
        if fits and not any(depends(operand, [node]) for operand in parts.inputs):
            return product
    return None


def _same(product: Product, new: Node) -> bool:
    return all(map(same_layout, product.outs, new.meta["val"][8:]))


def _fault(parts: Gradients, product: Product | None) -> str | None:
    of_gate, of_up = parts.of_gate, parts.of_up
    if of_gate.form != of_up.form:
        return f"formats differ: {of_gate.form} and {of_up.form}"
    kinds = {tensor_of(node).dtype for node in (*parts.inputs, of_gate.x, of_up.x)}
    if len(kinds) != 1 or not kinds <= {*_DTYPES}:
        return f"gate, up and their gradients have the types {sorted(map(str, kinds))}, not one of 16 bits"
    for quantizer in (of_gate, of_up):
        others = [reader for reader in readers(reshaped_of(quantizer.x)) if reader is not quantizer.node]
        if others:
            return f"{others[0]} reads a gradient too, so that it has to be written"
    grad, gate, up = (_sized(node, of_gate) for node in parts.inputs)
    if grad is None or gate is None or up is None:
        return "a size is not known"
    given = SiluMulBackward(
        grad=grad, gate=gate, up=up, block=of_gate.block, dtype=of_gate.dtype, scale=of_gate.scale,
        product_block=swap(of_gate.block) if product is None else product.block,
        product_dtype=of_gate.dtype if product is None else product.dtype, target=parts.target,
    )  # fmt: skip
    return unserved(parts.target, silu_mul.accepts_backward(given))


def _sized(node: Node, quantizer: Quantizer) -> Tensor | None:
    return sized(tensor_of(node), quantizer.shape)


def _last(graph: Graph, nodes: Sequence[Node]) -> Node:
    """The last of some nodes in the graph's order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return max(nodes, key=order.__getitem__)


def _precedes(graph: Graph, node: Node, other: Node) -> bool:
    return _last(graph, (node, other)) is other
