"""Replaces `torch.einsum` with a parameter by its product: `bsd,dhe->bshe` is `(b, s, d) @ (d, h e)`.

`torch.tensordot` and `torch.inner` with a parameter are spelled as einsums first.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import cmp_to_key
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fp8fn.contraction import Product, as_product
from fp8fn.lowering.graph.nodes import tensor_of
from fp8fn.lowering.graph.views import equal, is_less

# Each function, and the names of its arguments.
_CONTRACTIONS: Final = {
    "inner": (torch.inner, ("input", "other")),
    "tensordot": (torch.functional.tensordot, ("a", "b", "dims")),
}


def reduce_einsums(gm: GraphModule, is_weight: Callable[[Any], bool]) -> None:
    """Replaces each einsum of two operands, one of which is a weight, by `torch.matmul`, in place."""
    for node in list(gm.graph.nodes):
        if (name := _name(node)) in _CONTRACTIONS:
            _spell_as_einsum(node, name, is_weight)
    for node in gm.graph.find_nodes(op="call_function", target=torch.functional.einsum):
        if node.kwargs or len(node.args) < 2 or not isinstance(node.args[0], str):
            continue
        listed = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], Sequence) else node.args[1:]
        if len(listed) != 2 or not all(isinstance(operand, Node) for operand in listed):
            continue
        a, b = listed
        equation = node.args[0]
        if is_weight(a) and not is_weight(b):
            terms, arrow, out = equation.partition("->")
            a, b, equation = b, a, ",".join(reversed(terms.split(","))) + arrow + out
        if not is_weight(b):
            continue
        product = as_product(equation, tensor_of(a).dim(), tensor_of(b).dim(), batched=True)
        if product is not None and not product.repeats(tensor_of(a).shape, tensor_of(b).shape):
            _spell(gm.graph, node, a, b, product)


def _name(node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return next((name for name, (target, _) in _CONTRACTIONS.items() if node.target is target), "")


def _spell_as_einsum(node: Node, name: str, is_weight: Callable[[Any], bool]) -> None:
    """Turns an `inner`, over both last axes, or a `tensordot`, over those of `dims`, with a weight into an einsum."""
    given = {**dict(zip(_CONTRACTIONS[name][1], node.args, strict=False)), **node.kwargs}
    a, b, dims = (given.pop(each, None) for each in ("a", "b", "dims"))
    a, b = given.pop("input", a), given.pop("other", b)
    if given or not isinstance(a, Node) or not isinstance(b, Node) or not (is_weight(a) or is_weight(b)):
        return
    left, right = tensor_of(a).dim(), tensor_of(b).dim()
    if min(left, right) < 1 or left + right > len(string.ascii_letters) or isinstance(dims, Node):
        return
    count: Any = 2 if dims is None else dims
    if name == "inner":
        pairs = [(left - 1, right - 1)]
    elif isinstance(count, int):
        pairs = list(zip(range(left - count, left), range(count), strict=True))
    else:
        pairs = list(zip(*count, strict=True))
    one, other = list(string.ascii_letters[:left]), list(string.ascii_letters[left : left + right])
    for axis, partner in pairs:
        other[partner] = one[axis]
    out = [letter for letter in (*one, *other) if (letter in one) != (letter in other)]
    node.op, node.target = "call_function", torch.functional.einsum
    node.args, node.kwargs = (f"{''.join(one)},{''.join(other)}->{''.join(out)}", a, b), {}


def _spell(graph: Graph, node: Node, a: Node, b: Node, product: Product) -> None:
    def call(target: Callable[..., Any], *args: Any) -> Node:
        made = graph.call_function(target, args)
        made.meta.update(node.meta)
        examples = map_arg(args, lambda each: each.meta["example_value"])
        if target is torch.matmul:  # autocast gives both operands the type of the result
            examples = tuple(example.to(tensor_of(node).dtype) for example in examples)
        made.meta["example_value"] = target(*examples)
        return made

    def in_order(x: Node, order: tuple[int, ...]) -> Node:
        return x if list(order) == sorted(order) else call(torch.permute, x, order)

    def size(x: Node, axis: int) -> int | Node:
        known = tensor_of(x).shape[axis]
        return known if isinstance(known, int) else call(torch.Tensor.size, x, axis)

    batch = product.batch
    rows = product.a[batch : len(product.a) - product.contracted]
    if batch + product.contracted == len(product.b) or (batch and not rows):
        return
    with graph.inserting_before(node):
        columns = tuple(size(b, axis) for axis in product.b[batch + product.contracted :])
        left, right = in_order(a, product.a), in_order(b, product.b)
        if product.contracted > 1:
            left = call(torch.flatten, left, -product.contracted)
            right = call(torch.flatten, right, batch, batch + product.contracted - 1)
        if len(columns) > 1:
            right = call(torch.flatten, right, batch + 1)
        if batch:  # a batch of matrices has three dimensions
            left = call(torch.flatten, left, batch, -2) if len(rows) > 1 else left
            left, right = (call(torch.flatten, x, 0, batch - 1) if batch > 1 else x for x in (left, right))
        out = call(torch.matmul, left, right)
        if len(columns) > 1:
            out = call(torch.unflatten, out, -1, columns)
        if batch and len(rows) > 1:
            out = call(torch.unflatten, out, 1, tuple(size(a, axis) for axis in rows))
        if batch > 1:
            out = call(torch.unflatten, out, 0, tuple(size(b, axis) for axis in product.b[:batch]))
        out = in_order(out, product.out)
        if (order := _other_layout(tensor_of(out), tensor_of(node))) is not None:
            out = in_order(call(torch.ops.aten.contiguous.default, in_order(out, order)), _inverse(order))
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _other_layout(found: Tensor, wanted: Tensor) -> tuple[int, ...] | None:
    """The axes of `wanted`, those of the largest strides first; None if `found` is known to have the same strides."""
    axes, strides = range(wanted.dim()), wanted.stride()
    if all(equal(found.stride(axis), strides[axis]) or equal(wanted.shape[axis], 1) for axis in axes):
        return None

    def compare(one: int, other: int) -> int:
        return is_less(strides[one], strides[other]) - is_less(strides[other], strides[one])

    return tuple(sorted(axes, key=cmp_to_key(compare)))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))
