"""Multiplies a gathered sequence while it is gathered: async tensor parallelism.

    data, scale = all_gather(cat([data, scale]))    # one rank's rows in FP8 and their exponents; becomes
    rows, rows_scale = quantize(dequantize(data, scale), (1, 128))
    q, k, v = (scaled_mm(rows, rows_scale, b, b_scale) for b, b_scale in weights)
                     ↓
    data, scale, (q, k, v) = gather_scaled_mm(local_data, local_scale, weights)

The products read the gathered bytes. Quantizing them again would keep their values, since scales are powers of two, but
for values that become subnormal where rounding raised the largest of a block to the next power of two.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, input_of, source_of, tensor_of
from fp8fn.lowering.graph.quantizers import RESHAPES, Quantizer, find_quantizers, reshaped_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten
from fp8fn.ops.torch_private import collectives

NAME: Final = "async_tp"
_BLOCK: Final = (1, 128)
_CAST: Final = torch.ops.prims.convert_element_type.default
_PRODUCT: Final = torch.ops.fp8fn.scaled_mm.default
_GATHER: Final = collectives.all_gather.default
_WAIT: Final = collectives.wait.default
# Bounds of a type: a value beyond them is quantized to the bits that were gathered.
_BOUNDS: Final = (aten.clamp.default, aten.clamp_max.default, aten.clamp_min.default)
_CHANGED: Final = "what is gathered is changed before it is dequantized"


@dataclass(frozen=True)
class _Gathered:
    """Rows of which each rank holds some, and their exponents; `data` and `scale` are made of the gathered bytes."""

    wait: Node
    data: Node
    scale: Node

    @property
    def started(self) -> Node:
        return input_of(self.wait)

    @property
    def local(self) -> tuple[Node, Node]:
        """This rank's data as bytes, and its scales, whose exponents are sent."""
        packed: Any = _packed(self.wait)
        data, exponents = packed.args[0]
        return data, _behind(exponents, (_CAST, aten.__rshift__.Scalar, aten.view.dtype))

    @property
    def group(self) -> tuple[Any, Any]:
        return self.started.args[1], self.started.args[2]


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Replaces what it can, and reports each quantizer that reads a gathered sequence."""
    for quantizer in find_quantizers(graph):
        node, x = quantizer.node, reshaped_of(quantizer.x)
        wait = _wait_behind(x)
        if wait is None:
            continue
        m, k = quantizer.shape[-2:]
        name, source, target = str(node), source_of(node), str(node.target)
        reason, made = _rewrite(graph, quantizer, x)
        yield Substitution(NAME, name, source, target, (m, 0, k), made, reason)


def _wait_behind(x: Node) -> Node | None:
    """The all-gather that elementwise operations, views, slices and concatenations make `x` of, if any."""
    pending, seen = [x], set()
    through = (*RESHAPES, _CAST, aten.mul.Tensor, aten.view.dtype, aten.slice.Tensor, aten.cat.default,
               aten.split.Tensor, aten.index.Tensor, operator.getitem, aten.clone.default, *_BOUNDS)  # fmt: skip
    while pending:
        node = pending.pop()
        if node.target is _WAIT:
            return node if input_of(node).target is _GATHER else None
        if node not in seen and node.target in through:
            seen.add(node)
            pending += node.all_input_nodes
    return None


def _rewrite(graph: Graph, quantizer: Quantizer, x: Node) -> tuple[str | None, str]:
    """Why the graph stays as it is, or None, and the name of the op that was made."""
    if quantizer.block != _BLOCK or quantizer.scale != "pow2":
        return f"what is gathered is quantized in {quantizer.block} with scale={quantizer.scale!r}", ""
    found = _dequantized(x)
    if isinstance(found, str):
        return found, ""
    dtype = tensor_of(found.data).dtype
    if dtype != quantizer.dtype:
        return f"{dtype} is gathered, and {quantizer.dtype} is multiplied", ""
    products = _products(quantizer)
    place, at = {node: i for i, node in enumerate(graph.nodes)}, found.wait
    products = [node for node in products if not _depends(_operands(node), {found.started})]
    if not products:
        return "no product reads the rows as they are gathered", ""
    form = _form(products[0])
    products = [node for node in products if _form(node) == form]
    for node in _later([*found.local, *(x for p in products for x in _operands(p))], at, place):
        at.prepend(node)
    return None, _emit(graph, found, products)


def _keeps_bits(clamp: Node, become: Sequence[Node]) -> bool:
    """Whether bounds are the largest numbers of a type that the clamp's values `become`: quantizers keep their bits."""
    largest = min(torch.finfo(tensor_of(node).dtype).max for node in (clamp, *become))
    bounds = (*clamp.args[1:], *clamp.kwargs.values())
    return all(isinstance(bound, int | float) and abs(bound) >= largest for bound in bounds if bound is not None)


def _dequantized(x: Node) -> _Gathered | str:
    """The gathered data and scales that `x` is the product of, or why it is none."""
    product: Any = x
    behind: list[Node] = []
    while product.target in (_CAST, *_BOUNDS):
        if product.target in _BOUNDS and not _keeps_bits(product, behind):
            return _CHANGED
        behind.append(product)
        product = product.args[0]
    if product.target is not aten.mul.Tensor:
        return "16 bits are gathered: use the styles of fp8fn.distributed"
    data, scale = product.args
    if data.target is aten.index.Tensor:
        data, scale = scale, data
    cast: Any = data.args[0] if data.target is _CAST else data
    if cast.target is not aten.view.dtype or scale.target is not aten.index.Tensor or not _by_blocks(scale):
        return "what is gathered is not dequantized by rows of 128"
    scale = input_of(scale)
    wait, other = _whole(input_of(cast)), _whole(_behind(scale, (aten.view.dtype, aten.__lshift__.Scalar, _CAST)))
    if isinstance(wait, str) or wait is not other:
        return wait if isinstance(wait, str) else _CHANGED
    packed: Any = _packed(wait)
    if packed.target is not aten.cat.default or len(packed.args[0]) != 2:
        return _CHANGED
    return _Gathered(wait, cast, scale)


def _packed(wait: Node) -> Node:
    """What each rank sends, without the bytes that make its rows a multiple of 16."""
    sent = input_of(input_of(wait))
    return input_of(sent) if sent.target is aten.constant_pad_nd.default else sent


def _behind(node: Node, targets: Sequence[Any]) -> Node:
    """The node that calls of these targets, the last one first, have made `node` of; where one is missing, the last."""
    for target in targets:
        if node.target is not target:
            break
        node = input_of(node)
    return node


def _by_blocks(scale: Node) -> bool:
    """Whether `scale[..., arange(K) // 128]` repeats each scale of a row 128 times."""
    indices: Any = scale.args[1]
    *leading, last = indices
    if any(index is not None for index in leading) or not isinstance(last, Node):
        return False
    if last.target is not aten.div.Tensor_mode or last.args[1] != _BLOCK[1]:
        return False
    count = input_of(last)
    start = count.kwargs.get("start"), count.kwargs.get("step")
    return last.kwargs.get("rounding_mode") == "floor" and str(count.target) == "prims.iota.default" and start == (0, 1)


def _whole(columns: Node) -> Node | str:
    """The gathered bytes that these are some columns of: ranks' rows follow one another, as the op returns them."""
    if columns.target is not aten.slice.Tensor or columns.args[1] != tensor_of(columns).dim() - 1:
        return _CHANGED
    node = reshaped_of(input_of(columns))
    if node.target is aten.slice.Tensor:
        return "the sequence is ragged: ranks hold different numbers of rows"
    if node.target is aten.cat.default:
        return "a batch of several sequences is gathered: the ranks' rows do not follow one another"
    return node if node.target is _WAIT and input_of(node).target is _GATHER else _CHANGED


def _items(node: Node, place: int) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == place]


def _products(quantizer: Quantizer) -> list[Node]:
    """Products whose left operand is the first result of the quantizer, as a matrix."""
    rows, scales = (_items(quantizer.node, place) for place in (0, 1))
    found = []
    for node in (user for row in rows for user in row.users):
        if node.target is _PRODUCT and node.args[0] in rows and node.args[1] in scales:
            given = arguments_of(node)
            if tensor_of(given["a"]).dim() == 2 and tensor_of(given["b"]).dim() == 2 and node not in found:
                found.append(node)
    return found


def _operands(product: Node) -> list[Node]:
    given = arguments_of(product)
    return [node for node in (given["b"], given["b_scale"], given["bias"]) if node is not None]


def _form(product: Node) -> tuple[Any, ...]:
    """What all products of one op have in common."""
    given = arguments_of(product)
    out_dtype = given["out_dtype"] or torch.bfloat16
    return tuple(given["b_block"]), out_dtype, given["batch_invariant"], given["fast_accumulation"]


def _ancestors(nodes: list[Node]) -> set[Node]:
    pending, seen = list(nodes), set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return seen


def _depends(nodes: list[Node], on: set[Node]) -> bool:
    return not on.isdisjoint(_ancestors(nodes))


def _later(nodes: list[Node], at: Node, place: dict[Node, int]) -> list[Node]:
    """What `nodes` are computed from, themselves included, and follows `at`, in the graph's order."""
    return sorted((node for node in _ancestors(nodes) if place[node] > place[at]), key=place.__getitem__)


def _emit(graph: Graph, gathered: _Gathered, products: list[Node]) -> str:
    form, (size, group) = _form(products[0]), gathered.group
    b_block, out_dtype, *flags = form
    sides = [arguments_of(node) for node in products]
    with graph.inserting_before(gathered.wait):
        a, a_scale = (_matrix(graph, part) for part in gathered.local)
        a = call(graph, aten.view.dtype, a, tensor_of(gathered.data).dtype)
        columns = ([each[name] for each in sides] for name in ("b", "b_scale"))
        arguments = (a, a_scale, *columns, list(b_block), [each["bias"] for each in sides], out_dtype, size, group)
        op = call(graph, torch.ops.fp8fn.gather_scaled_mm.default, *arguments, *flags)
        *whole, outs = (call(graph, operator.getitem, op, place) for place in range(3))
        made = [call(graph, operator.getitem, outs, place) for place in range(len(products))]
        shaped = [
            call(graph, aten.reshape.default, out, list(tensor_of(view).shape))
            for out, view in zip(whole, (gathered.data, gathered.scale), strict=True)
        ]
    for key, meta in products[0].meta.items():
        if key not in ("val", "tensor_meta", "original_aten", "eager_input_vals"):
            op.meta.setdefault(key, meta)
    for product, out in zip(products, made, strict=True):
        replace(graph, product, out)
    for view, out in zip((gathered.data, gathered.scale), shaped, strict=True):
        view.replace_all_uses_with(out)  # what reads them casts or indexes, and takes rows with any strides
        _erase(graph, view)
    return str(op.target)


def _erase(graph: Graph, node: Node) -> None:
    """Erases a node that nothing reads, and then what only it has read, up to the gather."""
    while not node.users:
        source = input_of(node)
        graph.erase_node(node)
        if node.target is _GATHER:
            return
        node = source


def _matrix(graph: Graph, node: Node) -> Node:
    shape = tensor_of(node).shape
    return node if len(shape) == 2 else call(graph, aten.reshape.default, node, [-1, shape[-1]])
