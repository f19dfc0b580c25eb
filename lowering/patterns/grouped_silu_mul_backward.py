"""Computes and quantizes the gradient of experts' `silu(gate) * up` in one launch.

    hidden = torch._grouped_mm(x, w_gate_up, offsets)
    gate, up = hidden.chunk(2, -1)
    quantize_grouped_dual(cat([of_gate, of_up], -1), offsets)    # fp8fn::quantize_silu_mul_grad_grouped_dual

`gate` and `up` are the halves of one product, so that autograd concatenates their gradients. The launch moves 10 bytes
for an element of `silu(gate) * up`; a kernel that Inductor generates and the quantizer move 18. The op rounds once, to
FP8, whereas the graph also rounds to 16 bits before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import input_of, place_of, source_of, tensor_of
from fp8fn.lowering.graph.quantizers import (
    Quantizer,
    computed,
    find_grouped_quantizers,
    like,
    readers,
    replace_quantizer,
    reshaped_of,
    same_layout,
)
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten, equal, same_sizes, sized
from fp8fn.lowering.patterns.saved_silu_mul import Formula, unserved
from fp8fn.lowering.patterns.silu_mul_backward import gates, is_matrix
from fp8fn.ops import targets
from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.operands import SILU_MUL_GRAD, Quantization

NAME: Final = "grouped_silu_mul_backward"
_OP: Final = torch.ops.fp8fn.quantize_silu_mul_grad_grouped_dual.default
_SPLITS: Final = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class Gradient:
    """The quantizer of the gradient of `hidden`, whose halves are `gate` and `up`, and what it is computed from."""

    quantizer: Quantizer
    halves: tuple[Node, Node]
    grad: Node
    hidden: Node
    offsets: Node

    @property
    def target(self) -> targets.Target:
        return targets.target_of(self.quantizer.device)


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Fuses where the gradient is only quantized, and reports each gradient."""
    found = find_grouped_quantizers(graph)
    known = gates(graph) if found else []
    for quantizer in found:
        gradient = _gradient(quantizer, known)
        if gradient is None or not _is_written(gradient.hidden):
            continue
        name, at, (m, k) = str(quantizer.node), source_of(quantizer.node), quantizer.shape
        made, reason = _fuse(graph, gradient)
        yield Substitution(NAME, name, at, str(gradient.hidden), (m, 0, k), made, reason)


def _gradient(quantizer: Quantizer, known: list[Node]) -> Gradient | None:
    """The parts of a quantized gradient of one of the `known` gates and of its `up`, or None."""
    halves = _concatenated(quantizer)
    if halves is None or quantizer.offsets is None:
        return None
    of_gate, of_up = halves
    m, both = quantizer.shape
    for gate in known:
        formula = Formula(gate, None)
        grads, factors = formula.rest(of_up, "up"), formula.rest(of_gate, "gate")
        if len(grads) != 1 or len(factors) != 2 or grads[0] not in factors:
            continue
        (grad,) = grads
        factors.remove(grad)
        hidden = _whole(gate, factors[0])
        if hidden is not None and is_matrix(grad, (m, both // 2)) and is_matrix(hidden, (m, both)):
            return Gradient(quantizer, halves, grad, hidden, quantizer.offsets)
    return None


def _is_written(hidden: Node) -> bool:
    """Whether a tensor lies in memory: no kernel of Inductor's computes it, or another op reads one of its halves."""
    if not computed(reshaped_of(hidden)):
        return True
    halves = (half for split in readers(hidden) if split.target in _SPLITS for half in split.users)
    return any(not computed(reader) for half in halves for reader in readers(half))


def _concatenated(quantizer: Quantizer) -> tuple[Node, Node] | None:
    """The two tensors of equal widths that lie beside each other in what is quantized both ways."""
    x = quantizer.x
    if not quantizer.dual or x.target is not aten.cat.default or x.args[1:] not in ((1,), (-1,)):
        return None
    parts: Any = x.args[0]
    if len(parts) != 2 or not same_sizes(*(tensor_of(part).shape for part in parts)):
        return None
    return parts[0], parts[1]


def _whole(gate: Node, up: Node) -> Node | None:
    """The tensor of which `gate` is the first half of each row and `up` the second, or None."""
    if gate.target is not operator.getitem or up.target is not operator.getitem:
        return None
    split = input_of(gate)
    if split is not input_of(up) or split.target not in _SPLITS or (place_of(gate), place_of(up)) != (0, 1):
        return None
    hidden = input_of(split)
    x, parts = tensor_of(hidden), (tensor_of(gate), tensor_of(up))
    return hidden if all(part.dim() == x.dim() and equal(2 * part.shape[-1], x.shape[-1]) for part in parts) else None


def _fuse(graph: Graph, gradient: Gradient) -> tuple[str, str | None]:
    quantizer = gradient.quantizer
    reason = _fault(gradient)
    if reason is not None:
        return "", reason
    with graph.inserting_before(quantizer.node):
        grad, hidden = like(graph, gradient.grad, gradient.halves[0]), like(graph, gradient.hidden, quantizer.x)
        new = call(graph, _OP, grad, hidden, gradient.offsets, *quantizer.form)
    if not all(map(same_layout, new.meta["val"], quantizer.outs)):
        graph.erase_node(new)
        return "", "its result lies otherwise than the op's"
    replace_quantizer(graph, quantizer.node, new)
    return str(new.target), None


def _fault(gradient: Gradient) -> str | None:
    quantizer = gradient.quantizer
    kinds = {tensor_of(node).dtype for node in (gradient.grad, gradient.hidden, quantizer.x)}
    if len(kinds) != 1:
        return f"hidden and its gradients have the types {sorted(map(str, kinds))}, not one"
    for node, reader in ((quantizer.x, quantizer.node), *((half, quantizer.x) for half in gradient.halves)):
        others = [other for other in readers(node) if other is not reader]
        if others:
            return f"{others[0]} reads a gradient too, so that it has to be written"
    m, both = quantizer.shape
    hidden, grad = sized(tensor_of(gradient.hidden), (m, both)), sized(tensor_of(gradient.grad), (m, both // 2))
    offsets = sized(tensor_of(gradient.offsets))
    if hidden is None or grad is None or offsets is None:
        return "a size is not known"
    given = Quantization(
        x=hidden, other=grad, source=SILU_MUL_GRAD, offsets=offsets, block=quantizer.block, dtype=quantizer.dtype,
        scale=quantizer.scale, dual=True, target=gradient.target,
    )  # fmt: skip
    return unserved(gradient.target, quantize.accepts(given))
