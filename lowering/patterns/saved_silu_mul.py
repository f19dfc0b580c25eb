"""Merges the quantizers around `silu(gate) * up` of a training step that keeps `gate` and `up` in FP8.

    forward    quantize_silu_mul(gate, up), quantize(gate), quantize(up)    # fp8fn::quantize_silu_mul_saved
    backward   quantize_silu_mul(gate, up), quantize_dual(of_gate), quantize_dual(of_up)
               # of gate and up in FP8: fp8fn::quantize_silu_mul_backward

`lowering.saved` lets the forward quantize `gate` and `up`, and the backward dequantize them. Of each element the
forward's launches move 11 bytes and the merged one 7, the backward's 25 and 9.

The backward's gradients are those of autograd's formula, whose factors are found in any order. The op computes them
from the values that are kept, which the graph would round to 16 bits first. The forward's results keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.dequantized import FLOATS, Operand, find_operand
from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import arguments_of, input_of, place_of, source_of, tensor_of, value
from fp8fn.lowering.graph.quantizers import (
    RESHAPES,
    Quantizer,
    find_quantizers,
    like,
    readers,
    replace_quantizer,
    reshaped_of,
    same_layout,
)
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten, same_sizes, sized
from fp8fn.lowering.patterns.producers import find_silu_mul
from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import silu_mul
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.layout import Block, contracts_rows, is_square, known_block, swap
from fp8fn.ops.operands import SILU_MUL, Quantization, Quantized
from fp8fn.ops.quantize import SQUARE
from fp8fn.ops.silu_mul import SAVED_BLOCK, SavedSiluMul, SiluMulBackward

NAME: Final = "saved_silu_mul"
_CAST: Final = torch.ops.prims.convert_element_type.default
_ops: Final = torch.ops.fp8fn
SINGLE, DUAL = _ops.quantize_silu_mul.default, _ops.quantize_silu_mul_dual.default
_SAVED, BACKWARD = _ops.quantize_silu_mul_saved.default, _ops.quantize_silu_mul_backward.default


@dataclass(frozen=True)
class Product:
    """A quantizer of `silu(gate) * up`, and the one of its results that is read: from `place` on, in `block`."""

    node: Node
    gate: Node
    up: Node
    place: int
    block: Block
    dtype: torch.dtype
    scale: str

    @property
    def outs(self) -> tuple[Tensor, ...]:
        return tuple(self.node.meta["val"][self.place : self.place + 2])

    @property
    def target(self) -> targets.Target:
        return targets.target_of(tensor_of(self.gate).device)


@dataclass(frozen=True)
class Gradients:
    """The quantizers of the gradients of `gate` and of `up`, and the gradient that both come from."""

    of_gate: Quantizer
    of_up: Quantizer
    grad: Node


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Merges where all parts of a forward or of a backward are there, and reports each."""
    products = [
        found
        for node in graph.nodes
        if node.op == "call_function" and node.target in (SINGLE, DUAL)
        if (found := product_of(node)) is not None
    ]
    products += [found for quantizer in find_quantizers(graph) if (found := _apart(graph, quantizer)) is not None]
    for product in products:
        name, at = str(product.node), source_of(product.node)
        gate, up = find_operand(product.gate), find_operand(product.up)
        if gate is not None and up is not None:
            parts = _gradients(graph, product)
            if parts is None:
                continue
            made, reason = _merge_backward(graph, product, (gate, up), parts)
        else:
            kept = _kept(graph, product)
            if kept is None:
                continue
            made, reason = _merge_forward(graph, product, kept)
        m, k = tensor_of(product.gate).shape
        yield Substitution(NAME, name, at, str(product.gate), (m, 0, k), made, reason)


def product_of(node: Node) -> Product | None:
    """None where both results of a dual quantizer are read, or a result is no matrix."""
    given = arguments_of(node)
    places = {place_of(item) // 2 * 2 for item in node.users}
    if len(places) != 1 or tensor_of(given["gate"]).dim() != 2:
        return None
    (place,) = places
    block = known_block(tuple(given["block"]))
    assert block is not None
    if place:
        other = given.get("dual_block")
        beside = swap(block) if other is None else known_block(tuple(other))
        assert beside is not None
        block = beside
    dtype = given["dtype"] or targets.native_e4m3(targets.target_of(tensor_of(given["gate"]).device))
    return Product(node, given["gate"], given["up"], place, block, dtype, given["scale"])


def _apart(graph: Graph, quantizer: Quantizer) -> Product | None:
    """The quantizer of a product that the graph computes, of `gate` and `up` in FP8; None for another quantizer."""
    if quantizer.dual or len(quantizer.shape) != 2:
        return None
    x = reshaped_of(quantizer.x)
    while x.target is aten.alias.default:
        x = reshaped_of(input_of(x))
    found = find_silu_mul(x)
    if found is None:
        return None
    with graph.inserting_before(quantizer.node):
        gate, up = (like(graph, node, quantizer.x) for node in found.inputs)
    if find_operand(gate) is None or find_operand(up) is None:
        return None
    return Product(quantizer.node, gate, up, 0, quantizer.block, quantizer.dtype, quantizer.scale)


# ---- forward --------------------------------------------------------------------------------------------------------


def _kept(graph: Graph, product: Product) -> tuple[Quantizer, Quantizer] | None:
    """The quantizers by which gate and up are kept, or None."""
    found = []
    for node in (product.gate, product.up):
        root = reshaped_of(node)
        kept = [
            quantizer
            for quantizer in find_quantizers(graph)
            if not quantizer.dual
            and reshaped_of(quantizer.x) is root
            and same_sizes(quantizer.shape, tensor_of(node).shape)
            and (quantizer.block, quantizer.scale) == (SAVED_BLOCK, "fp32")
            and quantizer.dtype == targets.native_e4m3(product.target)
        ]
        if len(kept) != 1:
            return None
        found.append(kept[0])
    return found[0], found[1]


def _merge_forward(graph: Graph, product: Product, kept: tuple[Quantizer, Quantizer]) -> tuple[str, str | None]:
    reason = _forward_fault(product)
    old = (product.node, *(quantizer.node for quantizer in kept))
    if reason is None and any(depends(node, old) for node in (product.gate, product.up)):
        reason = "up is computed from a quantized gate, or gate from a quantized up"
    if reason is not None:
        return "", reason
    form = product.block, product.dtype, product.scale
    with graph.inserting_before(product.node):
        new = call(graph, _SAVED, product.gate, product.up, *form)
    return replaced(graph, new, [(product.node, -product.place), (kept[0].node, 2), (kept[1].node, 4)])


def _forward_fault(product: Product) -> str | None:
    gate, up = (sized(tensor_of(node)) for node in (product.gate, product.up))
    if gate is None or up is None:
        return "a size is not known"
    form: dict[str, Any] = {"target": product.target}
    kept = (Quantization(x=x, block=SAVED_BLOCK, dtype=product.dtype, scale="fp32", **form) for x in (gate, up))
    quantization = Quantization(
        x=gate, other=up, source=SILU_MUL, block=product.block, dtype=product.dtype, scale=product.scale, **form
    )
    of_gate, of_up = kept
    return unserved(product.target, silu_mul.accepts_saved(SavedSiluMul(product=quantization, gate=of_gate, up=of_up)))


# ---- backward -------------------------------------------------------------------------------------------------------


def _gradients(graph: Graph, product: Product) -> Gradients | None:
    """The dual quantizers of both gradients, or None where one of them is missing."""
    formula = Formula(source(product.gate), source(product.up))
    found: dict[str, list[tuple[Quantizer, Node]]] = {"gate": [], "up": []}
    for quantizer in find_quantizers(graph):
        if quantizer.dual and quantizer.dual_block is None and len(quantizer.shape) == 2:
            gradient = formula.gradient(quantizer.x)
            if gradient is not None:
                found[gradient[0]].append((quantizer, gradient[1]))
    if len(found["gate"]) != 1 or len(found["up"]) != 1:
        return None
    (of_gate, grad), (of_up, other) = found["gate"][0], found["up"][0]
    return Gradients(of_gate, of_up, grad) if grad is other else None


@dataclass(frozen=True)
class Formula:
    """Autograd's formula: `grad * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))` and `grad * silu(gate)`.

    `up` may be unknown: then it is a factor like any other.
    """

    gate: Node
    up: Node | None

    def gradient(self, x: Node) -> tuple[str, Node] | None:
        """`"gate"` or `"up"`, of which `x` is the gradient, and the gradient that it comes from; else None."""
        for of in ("gate", "up"):
            others = self.rest(x, of)
            if len(others) == 1:
                return of, others[0]
        return None

    def rest(self, x: Node, of: str) -> list[Node]:
        """The factors of `x`, the gradient of `of`, beside those that the formula has; none where it is another."""
        factors = self._factors(x)
        names = [self._name(factor) for factor in factors]
        known = sorted(name for name in names if name)
        forms = [["silu"], ["gate", "sigmoid"]]
        if of == "gate":
            forms = [["sigmoid", "slope", *([] if self.up is None else ["up"])]]
        return [factor for factor, name in zip(factors, names, strict=True) if not name] if known in forms else []

    def _factors(self, x: Node) -> list[Node]:
        """The factors of a product, through its casts and reshapes."""
        x = source(x)
        if x.target is not aten.mul.Tensor or x in (self.gate, self.up) or any(value(arg) is None for arg in x.args):
            return [x]
        return [factor for arg in x.all_input_nodes * (3 - len(x.all_input_nodes)) for factor in self._factors(arg)]

    def _name(self, x: Node) -> str:
        if x is self.gate:
            return "gate"
        if x is self.up:
            return "up"
        if self._is_sigmoid(x):
            return "sigmoid"
        if self._is_slope(x):
            return "slope"
        return "silu" if self._is_silu(x) else ""

    def _is_sigmoid(self, x: Any) -> bool:
        """The op itself, or `1 / (1 + exp(-gate))`, its decomposition before PyTorch 2.13."""
        below = _argument(x, aten.reciprocal.default)
        return _argument(x, aten.sigmoid.default) is self.gate or (below is not None and self._is_below(below))

    def _is_silu(self, x: Node) -> bool:
        """The op itself, or `gate / (1 + exp(-gate))`, its decomposition."""
        if x.target is not aten.div.Tensor:
            return _argument(x, aten.silu.default) is self.gate
        over, below = x.args
        return value(over) is not None and source(over) is self.gate and self._is_below(below)

    def _is_below(self, x: Any) -> bool:
        """`1 + exp(-gate)`."""
        exponential = _argument(_argument(x, aten.add.Tensor, 1), aten.exp.default)
        return _argument(exponential, aten.neg.default) is self.gate

    def _is_slope(self, x: Node) -> bool:
        """`1 + gate * (1 - sigmoid(gate))`."""
        product = _argument(x, aten.add.Tensor, 1)
        factors = [] if product is None or product.target is not aten.mul.Tensor else product.all_input_nodes
        rest = [source(factor) for factor in factors if source(factor) is not self.gate]
        if len(factors) != 2 or len(rest) != 1 or rest[0].target is not aten.sub.Tensor or rest[0].kwargs:
            return False
        one, sigmoid = rest[0].args
        return isinstance(one, int | float) and one == 1 and self._is_sigmoid(source(sigmoid))


def _merge_backward(
    graph: Graph, product: Product, operands: tuple[Operand, Operand], parts: Gradients
) -> tuple[str, str | None]:
    gate, up = operands
    of_gate, of_up = parts.of_gate, parts.of_up
    old = (of_gate.node, of_up.node, product.node)
    reason = _backward_fault(product, operands, parts)
    inputs = (parts.grad, gate.found.data, gate.found.scale, up.found.data, up.found.scale)
    if reason is None and any(depends(node, old) for node in inputs):
        reason = "the gradient is computed from the quantized product"
    if reason is not None:
        return "", reason
    first = next(node for node in graph.nodes if node in (of_gate.node, of_up.node))
    with graph.inserting_before(first):
        grad = like(graph, parts.grad, of_gate.x)
        kept = [part for operand in operands for part in operand.emit(graph)]
        form = of_gate.block, of_gate.dtype, of_gate.scale, product.block, product.dtype
        new = call(graph, BACKWARD, grad, *kept, *form)
    return replaced(graph, new, [(of_gate.node, 0), (of_up.node, 4), (product.node, 8 - product.place)])


def _backward_fault(product: Product, operands: tuple[Operand, Operand], parts: Gradients) -> str | None:
    of_gate, of_up = parts.of_gate, parts.of_up
    if is_square(of_gate.block) or contracts_rows(of_gate.block):
        return f"gradients are quantized in {of_gate.block} first"
    if product.block != SQUARE and not contracts_rows(product.block):
        return f"the product is quantized in {product.block}"
    if any(operand.block != SAVED_BLOCK or operand.found.inverse for operand in operands):
        return f"gate is kept in {operands[0].block} and up in {operands[1].block}, not both in {SAVED_BLOCK}"
    if (of_gate.block, of_gate.form) != (of_up.block, of_up.form) or of_gate.scale != product.scale:
        return f"formats differ: {of_gate.form}, {of_up.form} and {(product.block, product.dtype, product.scale)}"
    for quantizer in (of_gate, of_up):
        if quantizer.x.meta["val"].dtype != tensor_of(parts.grad).dtype:
            return f"a gradient is {quantizer.x.meta['val'].dtype} and the one that it comes from another type"
        others = [reader for reader in readers(reshaped_of(quantizer.x)) if reader is not quantizer.node]
        if others:
            return f"{others[0]} reads a gradient too, so that it has to be written"
    grad = sized(tensor_of(parts.grad), tensor_of(product.gate).shape)
    gate, gate_scale, up, up_scale = (
        sized(tensor_of(node)) for operand in operands for node in (operand.found.data, operand.found.scale)
    )
    if grad is None or gate is None or gate_scale is None or up is None or up_scale is None:
        return "a size is not known"
    given = SiluMulBackward(
        grad=grad, gate=Quantized(gate, gate_scale, SAVED_BLOCK), up=Quantized(up, up_scale, SAVED_BLOCK),
        block=of_gate.block, dtype=of_gate.dtype, scale=of_gate.scale, product_block=product.block,
        product_dtype=product.dtype, target=product.target,
    )  # fmt: skip
    return unserved(product.target, silu_mul.accepts_backward(given))


# ---- both -----------------------------------------------------------------------------------------------------------


def unserved(target: targets.Target, reason: str | None) -> str | None:
    if target.backend == "cpu":
        return None
    reason = reason or nvrtc.unavailable()
    return None if reason is None else f"no kernel for it: {reason}"


def replaced(graph: Graph, new: Node, old: list[tuple[Node, int]]) -> tuple[str, str | None]:
    """Lets `new` stand for quantizers, whose results are so many places further among its own.

    What reads a quantizer that stands before `new` moves behind it.
    """
    for quantizer, shift in old:
        for place in map(place_of, quantizer.users):
            if not same_layout(quantizer.meta["val"][place], new.meta["val"][place + shift]):
                graph.erase_node(new)
                return "", "a result lies otherwise than the op's"
    _move_behind(graph, new, [quantizer for quantizer, _ in old])
    for quantizer, shift in old:
        replace_quantizer(graph, quantizer, new, shift)
    return str(new.target), None


def _move_behind(graph: Graph, new: Node, old: list[Node]) -> None:
    later, last = set(old), new
    for node in list(graph.nodes):
        if node is new:
            return
        if node in later or any(source in later for source in node.all_input_nodes):
            later.add(node)
            last.append(node)
            last = node


def depends(node: Node, on: Iterable[Node]) -> bool:
    """Whether a node is computed from one of others."""
    ends, seen, pending = set(on), {node}, [node]
    while pending:
        current = pending.pop()
        if current in ends:
            return True
        pending += [source for source in current.all_input_nodes if source not in seen]
        seen.update(current.all_input_nodes)
    return False


def source(node: Any) -> Node:
    """`node` before its reshapes, its casts between floating-point types, and products with 1."""
    while (
        node.target in RESHAPES
        or (node.target is _CAST and {node.args[1], tensor_of(node.args[0]).dtype} <= {*FLOATS})
        or (node.target is aten.mul.Tensor and node.args[1] == 1)
    ):
        node = node.args[0]
    found: Node = node
    return found


def _argument(node: Any, target: Any, *rest: Any) -> Node | None:
    """The operand of `node`, a `target` with the other arguments `rest`; None if it is another node."""
    if not isinstance(node, Node):
        return None
    node = source(node)
    if node.target is not target or node.kwargs or node.args[1:] != rest or not isinstance(node.args[0], Node):
        return None
    return source(node.args[0])
