"""Multiplies an activation once by the weights of several layers, and their gradients once by these weights.

    q, k, v = x @ wqᵀ, x @ wkᵀ, x @ wvᵀ        # x @ [wq; wk; wv]ᵀ
    of_x = of_q @ wq + of_k @ wk + of_v @ wv    # [of_q, of_k, of_v] @ [wq; wk; wv]
    of_wq, of_wk, of_wv = of_qᵀ @ x, …          # [of_q, of_k, of_v]ᵀ @ x

The weights stay parameters of their own: their quantizers, and those of the gradients, write parts of one operand. Wide
products have fewer waves that do not fill the device, and the sums of dgrad cost no launches. Outputs and gradients of
weights keep their bits. dgrad sums in float32, where autograd adds results that are rounded to 16 bits.

The pattern runs last on the forward and backward graphs that Inductor compiles, and only where the estimate of a Hopper
GPU says that one product is faster.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fp8fn.lowering.costs import size_of
from fp8fn.lowering.graph.emit import call
from fp8fn.lowering.graph.nodes import arguments_of, input_of, place_of, source_of, tensor_of, value
from fp8fn.lowering.graph.quantizers import RESHAPES, Quantizer, as_quantizer, reshaped_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten, divides, equal, same_sizes
from fp8fn.lowering.patterns.saved_silu_mul import depends, move_behind
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm.scaled_mm import scale_kind
from fp8fn.ops.layout import Block, known_block, swap
from fp8fn.ops.quantize import SQUARE
from fp8fn.ops.targets import chip_of
from fp8fn.ops.tuning.estimate import product_us
from fp8fn.ops.tuning.problem import Problem

NAME: Final = "sibling_products"
# The number of tensors that `quantize_joined` takes, and what their widths are multiples of.
MOST: Final = 3
UNIT: Final = 128
_ROW: Final[Block] = (1, 128)
_ops: Final = torch.ops.fp8fn
_PRODUCT: Final = _ops.scaled_mm.default
_SINGLE, _DUAL = _ops.quantize.default, _ops.quantize_dual.default
_TURNS: Final = (aten.permute.default, aten.t.default, aten.transpose.int)
_VIEWS: Final = (
    *RESHAPES, *_TURNS, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.expand.default,
    aten.alias.default, aten.split.Tensor,
)  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """Data and scales of a product, results of a quantizer from `place` on, or their transposes if `turned`."""

    quantizer: Quantizer
    place: int
    turned: bool

    @staticmethod
    def of(data: Any, scale: Any) -> Operand | None:
        turned = data.target in _TURNS
        if turned:
            if scale.target not in _TURNS:
                return None
            data, scale = input_of(data), input_of(scale)
        if data.target is not operator.getitem or scale.target is not operator.getitem:
            return None
        made, place = input_of(data), place_of(data)
        if made is not input_of(scale) or place_of(scale) != place + 1 or made.target not in (_SINGLE, _DUAL):
            return None
        quantizer = as_quantizer(made)
        if arguments_of(made)["amax"] is not None or len(quantizer.shape) != 2:
            return None
        return Operand(quantizer, place, turned)


@dataclass(frozen=True)
class Product:
    """A product of two matrices without a bias: data and scales of both, and the type of its result."""

    node: Node
    a: tuple[Node, Node]
    a_block: Block
    b: tuple[Node, Node]
    b_block: Block
    dtype: torch.dtype

    @staticmethod
    def of(node: Node) -> Product | None:
        given = arguments_of(node)
        a_block, b_block = known_block(tuple(given["a_block"])), known_block(tuple(given["b_block"]))
        if given["bias"] is not None or a_block is None or b_block is None or tensor_of(node).dim() != 2:
            return None
        a, b = (given["a"], given["a_scale"]), (given["b"], given["b_scale"])
        return Product(node, a, a_block, b, b_block, tensor_of(node).dtype)

    @property
    def problem(self) -> Problem | None:
        """The sizes and kinds for the estimate; None where a size or a kind is not known."""
        a, b = tensor_of(self.a[0]), tensor_of(self.b[0])
        a_scale, b_scale = scale_kind(*self.a_block), scale_kind(*swap(self.b_block))
        m, n, k = map(size_of, (a.shape[0], b.shape[1], a.shape[1]))
        if m is None or n is None or k is None or "OTHER" in (a_scale, b_scale):
            return None
        return Problem(m, n, k, a_scale, b_scale, a_type=a.dtype, b_type=b.dtype, out_type=self.dtype)


@dataclass(frozen=True)
class Backward:
    """The products of one layer's gradient `of_y (M, N)`: by the weight, a term of a sum, and by the activation."""

    gradient: Quantizer
    weight: Quantizer
    dgrad: Product
    wgrad: Product


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Merges siblings that are estimated to be faster as one, and reports each group by its first product."""
    products = [found for node in graph.find_nodes(op="call_function", target=_PRODUCT) if (found := Product.of(node))]
    for siblings in _forward_siblings(products):
        forward = [product for product, _ in siblings]
        yield _report(forward, _why_slower(n=forward) or _merge_forward(graph, siblings))
    for root, terms in list(_sums(graph, products)):
        dgrad, wgrad = [term.dgrad for term in terms], [term.wgrad for term in terms]
        yield _report(dgrad, _why_slower(k=dgrad, m=wgrad) or _merge_backward(graph, root, terms))


def _report(products: Sequence[Product], reason: str | None) -> Substitution:
    first = products[0]
    (m, k), n = tensor_of(first.a[0]).shape, tensor_of(first.b[0]).shape[1]
    made = "" if reason else f"{len(products)} products as one"
    return Substitution(NAME, str(first.node), source_of(first.node), str(first.a[0]), (m, n, k), made, reason)


def _why_slower(**siblings: Sequence[Product]) -> str | None:
    """Why products stay as they are, given by the size that adds up, or None. On a CPU all are merged, as for tests."""
    device = tensor_of(next(iter(siblings.values()))[0].node).device
    target = targets.target_of(device)
    chip = chip_of(device, target)
    if target.backend == "cpu" or (target.name == "sm90" and chip is None):
        return None
    if chip is None or target.name != "sm90":
        return f"not estimated for {target.name}"
    apart = joined = 0.0
    for size, products in siblings.items():
        problems = [found for product in products if (found := product.problem) is not None]
        if len(problems) != len(products):
            return "a size is not known"
        apart += sum(product_us(problem, chip)[0] for problem in problems)
        whole: dict[str, Any] = {size: sum(getattr(problem, size) for problem in problems)}
        joined += product_us(replace(problems[0], **whole), chip)[0]
    return None if joined < apart else f"slower as one: {joined:.0f} µs, {apart:.0f} apart"


# ---- forward --------------------------------------------------------------------------------------------------------


def _forward_siblings(products: Sequence[Product]) -> list[list[tuple[Product, Quantizer]]]:
    """Products of one activation with weights that are quantized in square blocks for nothing else."""
    alike: dict[Any, list[tuple[Product, Quantizer]]] = {}
    for product in products:
        weight = Operand.of(*product.b)
        if weight is not None and not weight.turned and _is_weight(weight):
            form = _form(weight.quantizer)
            alike.setdefault((*product.a, product.a_block, product.dtype, *form), []).append(
                (product, weight.quantizer)
            )
    groups = (group[start : start + MOST] for group in alike.values() for start in range(0, len(group), MOST))
    return [group for group in groups if len(group) > 1]


def _is_weight(operand: Operand) -> bool:
    quantizer = operand.quantizer
    return (
        quantizer.node.target is _SINGLE
        and quantizer.block == SQUARE
        and _fits(quantizer)
        and _is_read_once(quantizer.node)
    )


def _fits(quantizer: Quantizer) -> bool:
    rows, width = quantizer.shape
    return divides(UNIT, width) and not equal(rows, 0)


def _is_read_once(quantizer: Node) -> bool:
    """Whether each result of a quantizer has one reader, behind a transposition or not."""
    for item in quantizer.users:
        node = item
        while len(node.users) == 1 and (user := next(iter(node.users))).target in _TURNS:
            node = user
        if len(node.users) != 1:
            return False
    return True


def _form(quantizer: Quantizer) -> tuple[Any, ...]:
    """What must be equal for tensors that are quantized beside each other."""
    (rows, _), data = quantizer.shape, quantizer.outs[0]
    return str(rows), quantizer.dtype, quantizer.scale, tensor_of(quantizer.x).dtype, _is_column_major(data)


def _is_column_major(data: Tensor) -> bool:
    return equal(data.stride(0), 1)


def _merge_forward(graph: Graph, siblings: Sequence[tuple[Product, Quantizer]]) -> str | None:
    products, weights = [product for product, _ in siblings], [quantizer for _, quantizer in siblings]
    nodes = [product.node for product in products]
    if any(depends(weight.x, nodes) for weight in weights):
        return "a weight is computed from a sibling's product"
    first = products[0]
    _advance(graph, [weight.x for weight in weights], first.node)
    with graph.inserting_before(first.node):
        joined = _results(graph, _join(graph, _ops.quantize_joined.default, weights))
        new = call(graph, _PRODUCT, *first.a, first.a_block, *joined, first.b_block, None, first.dtype)
    _replace_by_parts(graph, nodes, new, 1)
    return None


# ---- backward -------------------------------------------------------------------------------------------------------


def _sums(graph: Graph, products: Sequence[Product]) -> Iterator[tuple[Node, list[Backward]]]:
    """Sums of gradients of one activation, each with the terms that have equal formats."""
    known = {product.node: product for product in products}
    wgrads: dict[Node, Product] = {}
    for product in products:
        a = Operand.of(*product.a)
        if a is not None and a.turned and a.place == 2:
            wgrads[a.quantizer.node] = product
    inner: set[Node] = set()
    for root in reversed(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if root in inner or not _is_sum(root, root):
            continue
        alike: dict[Any, list[Backward]] = {}
        for term in _terms(root, inner):
            dgrad = known.get(reshaped_of(term))
            found = None if dgrad is None else _backward(term, dgrad, wgrads)
            if found is not None and found.dgrad.dtype == tensor_of(root).dtype:
                forms = *_form(found.gradient), *_form(found.weight)
                key = (*found.wgrad.b, found.wgrad.b_block, found.wgrad.dtype, *forms)
                alike.setdefault(key, []).append(found)
        groups = [group[:MOST] for group in alike.values() if len(group) > 1]
        if groups:
            yield root, groups[0]


def _terms(root: Node, inner: set[Node]) -> Iterator[Node]:
    """The terms of a sum; adds that only the sum reads are among `inner`, and not its terms."""
    for term in root.args:
        assert isinstance(term, Node)
        source = reshaped_of(term)
        if source.target is aten.add.Tensor and _is_private(term) and _is_sum(source, root):
            inner.add(source)
            yield from _terms(source, inner)
        else:
            yield term


def _is_sum(node: Node, root: Node) -> bool:
    """Whether an add is one of tensors alone, and has the type of `root` and its size, as each of them has."""
    out, terms = tensor_of(root), [value(arg) for arg in node.args]
    alike = all(x is not None and same_sizes(x.shape, out.shape) for x in terms)
    return alike and not node.kwargs and tensor_of(node).dtype == out.dtype


def _is_private(node: Any) -> bool:
    """Whether nothing but one reader sees a tensor, through reshapes."""
    while node.target in RESHAPES:
        if len(node.users) != 1:
            return False
        node = input_of(node)
    return len(node.users) == 1


def _backward(term: Node, dgrad: Product, wgrads: dict[Node, Product]) -> Backward | None:
    a, weight = Operand.of(*dgrad.a), Operand.of(*dgrad.b)
    if a is None or a.turned or a.place or weight is None or not weight.turned or not _is_weight(weight):
        return None
    gradient = a.quantizer
    wgrad = wgrads.get(gradient.node)
    dual = gradient.node.target is _DUAL and gradient.block == _ROW and gradient.dual_block is None
    if wgrad is None or not dual or not _is_private(term) or not _is_read_once(gradient.node) or not _fits(gradient):
        return None
    return Backward(gradient, weight.quantizer, dgrad, wgrad)


def _merge_backward(graph: Graph, root: Node, terms: Sequence[Backward]) -> str | None:
    first, gradients = terms[0], [term.gradient for term in terms]
    weights = [term.weight for term in terms]
    early = [*(weight.x for weight in weights), *first.wgrad.b, *(gradient.x for gradient in gradients)]
    nodes = [term.wgrad.node for term in terms]
    if any(depends(node, (root, *nodes)) for node in early):
        return "an operand is computed from the sum of the gradients"
    _advance(graph, early, root)
    with graph.inserting_before(root):
        made = _results(graph, _join(graph, _ops.quantize_joined_dual.default, gradients))
        rows, columns = made[:2], [_turned(graph, part) for part in made[2:]]
        right = [_turned(graph, part) for part in _results(graph, _join(graph, _ops.quantize_joined.default, weights))]
        dgrad, wgrad = first.dgrad, first.wgrad
        of_x = call(graph, _PRODUCT, *rows, dgrad.a_block, *right, dgrad.b_block, None, dgrad.dtype)
        of_weights = call(graph, _PRODUCT, *columns, wgrad.a_block, *wgrad.b, wgrad.b_block, None, wgrad.dtype)
        parts, merged = list(_terms(root, set())), {term.dgrad.node for term in terms}
        total = _reshaped_as(graph, next(part for part in parts if reshaped_of(part) is dgrad.node), of_x)
        for part in parts:
            if reshaped_of(part) not in merged:
                total = call(graph, aten.add.Tensor, total, part)
    for key, meta in root.meta.items():
        if key not in ("val", "tensor_meta", "eager_input_vals"):
            total.meta.setdefault(key, meta)
    root.replace_all_uses_with(total)
    move_behind(graph, of_weights, nodes)
    _replace_by_parts(graph, nodes, of_weights, 0)
    return None


def _reshaped_as(graph: Graph, node: Node, x: Node) -> Node:
    """`x` after the reshapes that lead to `node`."""
    if node.target not in RESHAPES:
        return x
    source = input_of(node)
    inner = _reshaped_as(graph, source, x)
    return graph.node_copy(node, lambda arg: inner if arg is source else arg)


# ---- both -----------------------------------------------------------------------------------------------------------


def _join(graph: Graph, op: Any, quantizers: Sequence[Quantizer]) -> Node:
    """The quantizer of tensors beside each other in the format that all have."""
    first = quantizers[0]
    tensors = [quantizer.x for quantizer in quantizers]
    layout = [] if first.dual else [_is_column_major(first.outs[0])]
    return call(graph, op, *tensors, *[None] * (MOST - len(tensors)), first.block, first.dtype, first.scale, *layout)


def _results(graph: Graph, node: Node) -> list[Node]:
    return [call(graph, operator.getitem, node, place) for place in range(len(node.meta["val"]))]


def _turned(graph: Graph, node: Node) -> Node:
    return call(graph, aten.permute.default, node, [1, 0])


def _advance(graph: Graph, nodes: Iterable[Node], before: Node) -> None:
    """Moves nodes before another one, with what they are computed from."""
    earlier = set(takewhile(lambda node: node is not before, graph.nodes))
    needed, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in earlier and node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    for node in list(graph.nodes):
        if node in needed:
            before.prepend(node)


def _replace_by_parts(graph: Graph, nodes: Sequence[Node], whole: Node, axis: int) -> None:
    """Replaces products by the parts of one beside each other along `axis`."""
    after, start = whole.next, 0
    for node in nodes:
        stop = start + int(tensor_of(node).shape[axis])
        with graph.inserting_before(after):
            part = call(graph, aten.slice.Tensor, whole, axis, start, stop)
        for key, meta in node.meta.items():
            if key not in ("val", "tensor_meta", "eager_input_vals", "original_aten"):
                part.meta.setdefault(key, meta)
                whole.meta.setdefault(key, meta)
        node.replace_all_uses_with(part)
        _restride(part)
        start = stop


def _restride(node: Node) -> None:
    """Traces views of a tensor again, which lies otherwise than it did; a view that is none becomes a reshape."""
    for user in list(node.users):
        user.meta.pop("eager_input_vals", None)
        if user.target not in _VIEWS:
            continue
        arguments = map_arg((user.args, user.kwargs), lambda arg: arg.meta["val"])
        try:
            found = user.target(*arguments[0], **arguments[1])
        except (RuntimeError, ValueError):
            user.target = aten.reshape.default
            found = user.target(*arguments[0], **arguments[1])
        user.meta["val"] = found
        _restride(user)
