"""`torch.einsum` with a parameter as the product that it is: `bsd,dhe->bshe` is `(b, s, d) @ (d, h e)`."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node


class Product(NamedTuple):
    """How the axes of the operands and of the result are put in order; `contracted` of them are summed over.

    `a` brings the contracted axes to the end, `b` to the front; `out` puts the free ones of both where they belong.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    contracted: int


def as_product(equation: str, a_ndim: int, b_ndim: int) -> Product | None:
    """The product that an equation of two operands is, None where it is more, a batch of them or a sum besides."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    spare = "".join(letter for letter in string.ascii_letters if letter not in equation)
    lead = spare[: a_ndim - len(terms[0].replace("...", ""))] if "..." in terms[0] else ""
    a, b, out = terms[0].replace("...", lead), terms[1], out.replace("...", lead)
    if (len(a), len(b)) != (a_ndim, b_ndim) or any(len(set(term)) != len(term) for term in (a, b, out)):
        return None
    contracted = [axis for axis in a if axis in b]
    free = [[axis for axis in term if axis not in contracted] for term in (a, b)]
    if not contracted or sorted(free[0] + free[1]) != sorted(out):
        return None
    return Product(
        a=tuple(map(a.index, free[0] + contracted)),
        b=tuple(map(b.index, contracted + free[1])),
        out=tuple(map((free[0] + free[1]).index, out)),
        contracted=len(contracted),
    )


def reduce_einsums(gm: GraphModule, is_weight: Callable[[Any], bool]) -> None:
    """Spells the einsums of two operands, of which one is a weight, with `torch.matmul`, in place."""
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
        product = as_product(equation, _value(a).dim(), _value(b).dim())
        if product is not None:
            _spell(gm.graph, node, a, b, product)


def _spell(graph: Graph, node: Node, a: Node, b: Node, product: Product) -> None:
    def call(target: Callable[..., Any], *args: Any) -> Node:
        made = graph.call_function(target, args)
        made.meta.update(node.meta)
        made.meta["example_value"] = target(*(_value(arg) if isinstance(arg, Node) else arg for arg in args))
        return made

    def in_order(x: Node, order: tuple[int, ...]) -> Node:
        return x if list(order) == sorted(order) else call(torch.permute, x, order)

    columns = tuple(_value(b).shape[axis] for axis in product.b[product.contracted :])
    if not columns:
        return
    with graph.inserting_before(node):
        left, right = in_order(a, product.a), in_order(b, product.b)
        if product.contracted > 1:
            left = call(torch.flatten, left, -product.contracted)
            right = call(torch.flatten, right, 0, product.contracted - 1)
        if len(columns) > 1:
            right = call(torch.flatten, right, 1)
        out = call(torch.matmul, left, right)
        if len(columns) > 1:
            out = call(torch.unflatten, out, -1, columns)
        out = in_order(out, product.out)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _value(node: Node) -> Tensor:
    found: Tensor = node.meta["example_value"]
    return found
