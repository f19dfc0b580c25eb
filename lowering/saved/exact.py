"""Smaller sets of saved values that leave every bit of the gradients as it is.

`drop_weights` saves a parameter, which is there anyway, in place of its FP8 forms. `unexpand` saves what `expand` read:
the keys and values of grouped-query attention, before each is repeated for its queries. `drop_columns` quantizes an
activation for the weight's gradient in the backward, if the backward has the activation's inputs anyway, as it has
`gate` and `up` of `silu(gate) * up`, the output of attention, or the input and the statistics of a norm.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import arguments_of, input_of, is_of_parameter, place_of, tensor_of
from fp8fn.lowering.graph.quantizers import as_quantizer, computed, reshaped_of, same_layout
from fp8fn.lowering.graph.views import aten
from fp8fn.lowering.patterns.producers import Producer, RmsNorm, SiluMul, fusible
from fp8fn.lowering.patterns.producers import fuse as fuse_producer
from fp8fn.lowering.saved.cut import (
    QUANTIZERS,
    WHOLE_VIEWS,
    Cut,
    is_large,
    is_result_of,
    is_tagged,
    moves_of,
    nbytes,
    root_of,
)
from fp8fn.ops.layout import WHOLE, contracts_rows, is_square, known_block, swap

_CAST: Final = torch.ops.prims.convert_element_type.default
_COPIES: Final = (*WHOLE_VIEWS, aten.view.dtype, aten.reshape.default, aten.clone.default, aten.copy.default)
_ops: Final = torch.ops.fp8fn
_SINGLE, _DUAL = _ops.quantize.default, _ops.quantize_dual.default
_PRODUCTS: Final = (_ops.scaled_mm.default, _ops.scaled_grouped_mm.default, _ops.mx_mm.default)
_GROUPED, _GROUPED_DUAL = _ops.quantize_grouped.default, _ops.quantize_grouped_dual.default


def save_roots(cut: Cut) -> None:
    """Saves tensors in place of views of all their elements, so that two views of one tensor are one value."""
    for node in list(cut.saved):
        root = root_of(node)
        if root is not node and root.op == "call_function" and not is_tagged(node) and not is_tagged(root):
            cut.replace_saved([node], root)


def drop_weights(cut: Cut) -> int:
    """Saves parameters in place of their FP8 forms and of copies; returns the bytes of what is not kept any more."""
    dropped = 0
    quantizers: dict[Node, None] = {}
    for node in list(cut.saved):
        found = _quantized_parameter(cut, node)
        if found is not None:
            quantizer, parameter = found
            quantizers[quantizer] = None
        elif (copied := _copied_part(node)) is not None:
            parameter = copied
        else:
            continue
        cut.replace_saved([node], parameter)
        dropped += nbytes(node)
    for quantizer in quantizers:
        if quantizer.target is _DUAL:
            _split_weight(cut, quantizer)
    return dropped


def _quantized_parameter(cut: Cut, node: Node) -> tuple[Node, Node] | None:
    """The quantizer that `node` is a result of and the parameter that it quantizes, also if the parameter is cast."""
    found = _quantized(node)
    if found is None or is_tagged(root_of(node)) or is_tagged(found[0]):
        return None
    return found if found[1] in cut.parameters else None


def _quantized(node: Node) -> tuple[Node, Node] | None:
    """The quantizer that `node` is a result of, and what it quantizes, behind views and casts."""
    node = root_of(node)
    if not is_result_of(node, (_SINGLE, _DUAL)):
        return None
    quantizer = input_of(node)
    x = input_of(quantizer)
    while x.target is _CAST or x.target in WHOLE_VIEWS or x.target is aten.reshape.default:
        x = input_of(x)
    return quantizer, x


def parameters_of_region(graph: Graph, forward: Collection[Node]) -> Iterator[Node]:
    """The inputs of a region's joint graph that are parameters: the weights of the recipe's products."""
    for node in graph.nodes:
        if node in forward and node.target in _PRODUCTS and is_of_parameter(node):
            found = _quantized(arguments_of(node)["b"])
            if found is not None and found[1].op == "placeholder":
                yield found[1]


def _copied_part(node: Node) -> Node | None:
    """The part of a tensor subclass that a saved copy has the elements of: FP8 data turned for the backward.

    A plain input, such as a buffer, may be written later, and its copy is then what the backward needs.
    """
    x = node
    while x.target in _COPIES and not is_tagged(x):
        x = input_of(x, 1 if x.target is aten.copy.default else 0)
    return x if x is not node and hasattr(x.meta.get("desc"), "attr") and nbytes(x) == nbytes(node) else None


def _split_weight(cut: Cut, quantizer: Node) -> None:
    """Quantizes a weight in one orientation in the forward, and in the other one in the backward, where this can be."""
    split = _Split.of(cut, quantizer)
    if split is None:
        return
    with _shared_amax(cut, quantizer) as amax:
        for place in (split.forward, split.backward):
            made = _one_orientation(cut.graph, quantizer, place, amax=amax)
            if made is not None:
                _use(cut, quantizer, place, made, forward=place == split.forward)


@contextmanager
def _shared_amax(cut: Cut, quantizer: Node) -> Iterator[Node | None]:
    """The largest magnitude of a whole matrix for the quantizers of both sides, if a quantizer inside reads it.

    The forward saves these 4 bytes, and the backward reads the matrix once less. None for other blocks, and for a
    matrix that Inductor computes, with whose computation `patterns.given_amax` fuses its magnitude on each side.
    """
    given = arguments_of(quantizer)
    x, whole = given["x"], known_block(tuple(given["block"])) == (WHOLE, WHOLE)
    if not whole or quantizer.target is not _DUAL or computed(reshaped_of(x)):
        yield None
        return
    with cut.graph.inserting_before(quantizer):
        amax = call(cut.graph, _ops.amax.default, x, [WHOLE, WHOLE])
    yield amax
    if amax.users:
        cut.forward.add(amax)
        cut.saved[amax] = None
    else:
        cut.graph.erase_node(amax)


def unexpand(cut: Cut) -> int:
    """Saves the input of `expand` in place of its copied result; returns how many bytes fewer are kept."""
    dropped = 0
    for node in list(cut.saved):
        source = node
        while source.target in WHOLE_VIEWS or source.target in (aten.clone.default, aten.reshape.default):
            source = input_of(source)
        if source.target is not aten.expand.default or is_tagged(node) or is_tagged(source) or not is_large(node):
            continue
        root = root_of(input_of(source))
        if root not in cut.forward or root in cut.written or nbytes(root) >= nbytes(node):
            continue
        dropped += nbytes(node) - (0 if root in cut.saved else nbytes(root))
        cut.replace_saved([node], root)
    return dropped


def drop_columns(cut: Cut, fuse: bool) -> int:
    """Quantizes activations for weights' gradients in the backward; returns how many bytes fewer are kept.

    A dual quantizer that `patterns.producers` would fuse with the product before it rounds once. Both its halves are
    then fused here, so that they round once too. No pass may fuse the halves of another one, which rounds twice: they
    read an alias, behind which no pass that changes bits looks for the producer.
    """
    fused = _fusible(cut) if fuse else {}
    dropped = 0
    for quantizer in [node for node in cut.graph.nodes if node.target in QUANTIZERS[:4] and node in cut.forward]:
        dropped += _drop_columns_of(cut, quantizer, fused)
    return dropped


def _drop_columns_of(cut: Cut, quantizer: Node, fused: Mapping[Node, Producer]) -> int:
    x, producer = input_of(quantizer), fused.get(quantizer)
    if is_tagged(quantizer) or not is_large(x) or any(is_tagged(item) for item in quantizer.users):
        return 0
    items = [node for item in quantizer.users for node in moves_of(item) if node in cut.saved]
    leaves = cut.can_make(x) if items else None
    if leaves is None or leaves.keys() <= cut.parameters or not _pays(x, producer, leaves):
        return 0
    if quantizer.target in (_SINGLE, _GROUPED):
        if quantizer in fused or computed(reshaped_of(x)):
            return 0
    elif not _split_activation(cut, quantizer, producer):
        return 0
    cut.replace_saved(items)
    return sum(map(nbytes, items))


def _pays(x: Node, producer: Producer | None, leaves: Mapping[Node, None]) -> bool:
    """Whether the backward moves few bytes more for each byte that is not kept, to quantize `x` again from `leaves`.

    One op reads a norm's input and writes FP8: the backward moves 3 bytes an element, and the forward 1
    byte fewer. Without this op a kernel writes the norm in 16 bits first: 7 bytes, where no kernel of the backward
    computes the norm anyway, as one computes `silu(gate) * up`. The op needs the statistics that the norm's backward
    reads, for its own would differ from these in bits.
    """
    if isinstance(producer, RmsNorm):
        return root_of(producer.rstd) in leaves or producer.rstd in leaves
    return not any(_is_row_statistic(leaf, x) for leaf in leaves)


def _is_row_statistic(leaf: Node, x: Node) -> bool:
    """Whether a saved value is one number for each row of `x`, so that `x` is the result of a norm."""
    shape = tensor_of(leaf).shape
    return len(shape) > 1 and shape[-1] == 1 and tensor_of(x).shape[-1] != 1


def _split_activation(cut: Cut, quantizer: Node, fused: Producer | None) -> bool:
    split = _Split.of(cut, quantizer)
    if split is None or split.forward != 0:
        return False
    x = input_of(quantizer)
    if fused is None and computed(reshaped_of(x)):
        with cut.graph.inserting_before(quantizer):
            x = call(cut.graph, aten.alias.default, x)
    with _shared_amax(cut, quantizer) as amax:
        made = {place: _one_orientation(cut.graph, quantizer, place, x, fused, amax) for place in (0, 2)}
        if None in made.values():
            for node in made.values():
                if node is not None:
                    cut.graph.erase_node(node)
            return False
        for place, node in made.items():
            assert node is not None
            _use(cut, quantizer, place, node, forward=place == 0)
    return True


@dataclass(frozen=True)
class _Split:
    """The places of the results of a dual quantizer that the forward reads, and of those that the backward reads."""

    forward: int
    backward: int

    @staticmethod
    def of(cut: Cut, quantizer: Node) -> _Split | None:
        """None if one of the two reads both orientations, or neither."""
        sides: dict[bool, set[int]] = {True: set(), False: set()}
        for item in quantizer.users:
            sides[item in cut.forward].add(place_of(item) // 2 * 2)
        if len(sides[True]) != 1 or len(sides[False]) != 1 or sides[True] == sides[False]:
            return None
        return _Split(sides[True].pop(), sides[False].pop())


def _one_orientation(
    graph: Graph, quantizer: Node, place: int, x: Node | None = None, fused: Producer | None = None,
    amax: Node | None = None,
) -> Node | None:  # fmt: skip
    """A quantizer with the results at `place` of a dual one; None if its strides differ or its magnitudes are given.

    It reads `x` in place of the dual one's input, computes the product `fused` itself, and is given `amax`.
    """
    given = arguments_of(quantizer)
    if given.get("amax") is not None:
        return None
    first = block = known_block(tuple(given["block"]))
    assert first is not None
    if place:
        other = given.get("dual_block")
        block = swap(first) if other is None else known_block(tuple(other))
    assert block is not None
    form = (block, given["dtype"], given["scale"])
    # A dual quantizer's first result lies along the sum of its block, the second one along the other axis.
    layout = {"column_major": contracts_rows(first) != bool(place)} if is_square(block) else {}
    with graph.inserting_before(quantizer):
        if quantizer.target is _GROUPED_DUAL and place:
            made = call(graph, _GROUPED, x or given["x"], given["offsets"], *form)
        else:
            made = call(graph, _SINGLE, x or given["x"], *form, amax, **layout)
    if not all(map(same_layout, made.meta["val"], quantizer.meta["val"][place : place + 2])):
        graph.erase_node(made)
        return None
    if fused is None:
        return made
    once = fuse_producer(graph, as_quantizer(made), fused)
    graph.erase_node(made)
    return once


def _use(cut: Cut, quantizer: Node, place: int, made: Node, *, forward: bool) -> None:
    """Reads `made` in place of the results at `place` of a dual quantizer."""
    for item in [item for item in quantizer.users if place_of(item) in (place, place + 1)]:
        with cut.graph.inserting_after(made):
            new = call(cut.graph, operator.getitem, made, place_of(item) - place)
        new.meta = {**item.meta, "val": new.meta["val"]}
        new.meta.pop("eager_input_vals", None)
        item.replace_all_uses_with(new)
        cut.graph.erase_node(item)
        cut.forward.discard(item)
        if forward:
            cut.forward.add(new)
    if forward:
        cut.forward.update([made, *made.all_input_nodes])
    if not quantizer.users:
        cut.graph.erase_node(quantizer)


def _fusible(cut: Cut) -> dict[Node, Producer]:
    """The producer of each quantizer that `patterns.producers` would fuse in the forward that this cut gives."""
    forward = Graph()
    copies: dict[Node, Node] = {}
    needed, pending = set(cut.forward), list(cut.saved)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    for node in cut.graph.nodes:
        if node in needed and node.op != "output":
            copies[node] = forward.node_copy(node, copies.__getitem__)
    returned = [node for node in cut.graph.output_node().all_input_nodes if node in cut.forward]
    forward.output(tuple(copies[node] for node in dict.fromkeys((*returned, *cut.saved))))
    origin = {copy: node for node, copy in copies.items()}
    found = {}
    for quantizer, producer in fusible(forward).items():
        if isinstance(producer, SiluMul):
            producer = SiluMul(origin[producer.gate], origin[producer.up])
        else:
            x, weight, rstd = (origin[node] for node in (producer.x, producer.weight, producer.rstd))
            producer = RmsNorm(x, weight, rstd, producer.eps)
        found[origin[quantizer]] = producer
    return found
