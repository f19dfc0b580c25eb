"""Replaces torchao's blockwise FP8 training: the quantizers and products of `Float8BlockwiseLinear`.

    x_fp8, x_scale = triton_fp8_blockwise_act_quant_lhs(x)
    w_fp8, w_scale = triton_fp8_blockwise_weight_quant_transposed_rhs(w)
    y = triton_fp8_gemm_1x128_128x128(x_fp8, w_fp8, x_scale, w_scale)

torch.compile traces through torchao's Triton ops: a joint graph contains their kernels, as
`triton_kernel_wrapper_functional` with the memory that they write. With other decompositions it contains the ops. Both
become fp8fn's ops. A tensor that forward and backward quantize along rows and along columns is quantized once, by
`fp8fn::quantize_dual`.

torchao's scale is `1 / s` with `s = float32(FP8_MAX / amax)`; fp8fn's is `amax / FP8_MAX`. The two may differ by one
ulp of float32, and a byte of the data may then differ if its quotient is close to the midpoint of two FP8 numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import call, replace
from fp8fn.lowering.graph.nodes import arguments_of, input_of, source_of, triton_function, value
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.graph.views import aten, equal, same_sizes
from fp8fn.lowering.patterns.scaled_mm import Side, why_slower
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm.scaled_mm import scale_kind
from fp8fn.ops.formats import INPUT_DTYPES, short_name
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.targets import chip_of
from fp8fn.ops.tuning.table import tables

NAME: Final = "torchao"
# For each quantizer: whether blocks are square, whether the result is for columns, and whether it is transposed.
QUANTIZERS: Final = {
    f"triton_fp8_blockwise_{name}": kind
    for name, kind in {
        "act_quant_lhs": (False, False, False),
        "act_quant_rhs": (False, True, False),
        "act_quant_transposed_lhs": (False, True, True),
        "weight_quant_rhs": (True, True, False),
        "weight_quant_transposed_rhs": (True, False, True),
    }.items()
}
PRODUCTS: Final[dict[str, Block]] = {
    "triton_fp8_gemm_1x128_128x128": (128, 128),
    "triton_fp8_gemm_1x128_128x1": (128, 1),
}
_SCALED_MM: Final = "blockwise_scaled_mm"
_RESHAPES: Final = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default)

_TURNS: Final = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Called:
    """A call of one of torchao's ops: its arguments, and the nodes of its results, by name."""

    node: Node
    name: str
    given: dict[str, Any]
    outs: dict[str, list[Node]] = field(default_factory=dict)

    @property
    def block_size(self) -> Any:
        return self.given.get("block_size", 128)

    def first(self, name: str) -> Node:
        return self.outs[name][0]


def substitute(graph: Graph) -> Iterator[Substitution]:
    """Replaces quantizers and products, and reports each product."""
    nodes = [node for node in graph.nodes if _read(node) is not None]
    if not nodes:
        return
    for node in nodes:  # each node is read again, since its arguments may have been replaced
        _settle(graph, _called(node))
    loose = _replace_quantizers(graph, [_called(node) for node in nodes])
    for node in nodes:
        if not node._erased and _called(node).name not in QUANTIZERS:
            yield _replace_product(graph, _called(node))
    for node in graph.find_nodes(op="call_function", target=torch.ops.fp8fn.scaled_mm.default):
        node.args = tuple(_simplest(arg, loose) if isinstance(arg, Node) else arg for arg in node.args)
    graph.eliminate_dead_code()


def _called(node: Node) -> Called:
    found = _read(node)
    assert found is not None
    return found


def _read(node: Node) -> Called | None:
    if node.op != "call_function":
        return None
    if node.target is triton_kernel_wrapper_functional:
        return _read_kernel(node)
    if getattr(node.target, "namespace", "") != "torchao":
        return None
    name = node.target._schema.name.removeprefix("torchao::")  # type: ignore[union-attr]
    if not _is_ours(name):
        return None
    given = arguments_of(node)
    if name in PRODUCTS or name == _SCALED_MM:
        return Called(node, name, given, {"c": [node]})
    return Called(node, name, given, _items(node, {0: "y", 1: "s"}))


def _read_kernel(node: Node) -> Called | None:
    """Reads a launch of one of torchao's kernels, whose pointers are the tensors of the op."""
    kernel = triton_function(node)
    name = kernel.__name__.removesuffix("_kernel")
    if not kernel.__module__.startswith("torchao.") or not _is_ours(name):
        return None
    arguments: dict[str, Any] = node.kwargs["kwargs"]  # type: ignore[assignment]
    given = {key.removesuffix("_ptr"): arg for key, arg in arguments.items() if key.endswith("_ptr")}
    block_size = arguments.get("BLOCK_SIZE", arguments.get("BLOCK_SIZE_K"))
    return Called(node, name, {**given, "block_size": block_size}, _items(node, {f"{key}_ptr": key for key in given}))


def _is_ours(name: str) -> bool:
    return name in QUANTIZERS or name in PRODUCTS or name == _SCALED_MM


def _items(node: Node, names: dict[Any, str]) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for user in node.users:
        if user.target is operator.getitem and user.args[1] in names:
            found.setdefault(names[user.args[1]], []).append(user)
    return found


def _settle(graph: Graph, called: Called) -> None:
    """Removes what functionalization adds around a kernel: returned inputs, and scatters of the written memory.

    Without a GPU to analyse the kernel, PyTorch assumes that it writes all its tensors.
    """
    if called.node.target is not triton_kernel_wrapper_functional:
        return
    written = ("c",) if called.name in PRODUCTS else ("y", "s")
    for name in [name for name in called.outs if name not in written]:
        for out in called.outs.pop(name):
            out.replace_all_uses_with(called.given[name])
            graph.erase_node(out)
    for out in [out for outs in called.outs.values() for out in outs]:
        for scatter in list(out.users):
            if scatter.target is not aten.as_strided_scatter.default or scatter.args[1] is not out:
                continue
            for view in list(scatter.users):
                strides = view.meta["val"].stride()
                if (
                    view.target is aten.as_strided.default
                    and (*view.args[1:], *view.kwargs.values()) == (*scatter.args[2:], *scatter.kwargs.values())
                    and strides == out.meta["val"].stride()
                ):
                    view.replace_all_uses_with(out)


def _replace_quantizers(graph: Graph, found: list[Called]) -> dict[Node, Node]:
    """Replaces the quantizers. Returns the original of each result that was laid out anew: products take both."""
    groups: dict[Any, list[Called]] = {}
    for called in found:
        if called.name in QUANTIZERS and _quantizes(called):
            x, square = called.given["x"], QUANTIZERS[called.name][0]
            key = _root(x), str(tuple(x.meta["val"].shape)), called.first("y").meta["val"].dtype, square
            groups.setdefault(key, []).append(called)
    loose: dict[Node, Node] = {}
    for (_, _, dtype, square), members in groups.items():
        sides = {QUANTIZERS[called.name][1] for called in members}
        first = members[0]
        with graph.inserting_before(first.node):
            made = _quantized(graph, first.given["x"], square, sides, dtype)
            for called in members:
                _, columns, transposed = QUANTIZERS[called.name]
                for name, part in zip(("y", "s"), made[columns], strict=True):
                    for old in called.outs.get(name, []):
                        node = call(graph, aten.permute.default, part, [1, 0]) if transposed else part
                        out = _laid(graph, node, old)
                        replace(graph, old, out)
                        if out is not node:
                            loose[out] = node
        for called in members:  # not earlier: the first one is the insertion point
            if not called.node.users:
                graph.erase_node(called.node)
    return loose


def _quantizes(called: Called) -> bool:
    """Whether the quantizer is one of 128 and of a type that this library has here."""
    x, y = value(called.given["x"]), called.outs.get("y")
    if x is None or not y or called.block_size != 128 or x.dtype not in INPUT_DTYPES:
        return False
    return x.dim() == 2 and x.is_contiguous() and y[0].meta["val"].dtype in _dtypes(x.device)


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return targets.fp8_dtypes(targets.target_of(device))


def _root(x: Node) -> Node:
    """The tensor that the contiguous `x` is a reshape of."""
    while x.target in _RESHAPES and isinstance(x.args[0], Node):
        x = x.args[0]
    return x


def _quantized(graph: Graph, x: Node, square: bool, sides: set[bool], dtype: torch.dtype) -> dict[bool, list[Node]]:
    """Adds nodes of data and scales for the requested `sides`: rows (False) and columns (True)."""
    block: Block = (128, 128) if square else (1, 128)
    single: Callable[..., Any] = torch.ops.fp8fn.quantize.default
    if sides == {False} or (sides == {True} and not square):
        results = call(graph, single, x, swap(block) if True in sides else block, dtype)
        return {True in sides: [call(graph, operator.getitem, results, place) for place in (0, 1)]}
    results = call(graph, torch.ops.fp8fn.quantize_dual.default, x, block, dtype)
    # Only the dual op stores a square block by columns: the single op keeps the layout of its input.
    return {side: [call(graph, operator.getitem, results, 2 * side + place) for place in (0, 1)] for side in sides}


def _laid(graph: Graph, node: Node, old: Node) -> Node:
    """`node` with the strides of `old`: fp8fn pads the leading dimension."""
    found, wanted = node.meta["val"], old.meta["val"]
    if same_sizes(found.stride(), wanted.stride()):
        return node
    by_columns = equal(wanted.stride(0), 1) and equal(wanted.stride(1), wanted.shape[0])
    node = call(graph, aten.permute.default, node, [1, 0]) if by_columns else node
    node = call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return call(graph, aten.permute.default, node, [1, 0]) if by_columns else node


def _simplest(node: Node, loose: dict[Node, Node]) -> Node:
    """The node with the values of `node` before it was padded and sliced for cuBLASLt, or laid out for torchao."""
    scatter = node.args[0] if node.target is aten.slice.Tensor else None
    while isinstance(scatter, Node) and scatter.target in _TURNS and scatter.meta["val"].dim() == 2:
        turned = scatter.args[0]
        if not isinstance(turned, Node) or (turned.target, *turned.args[1:]) != (scatter.target, *scatter.args[1:]):
            break
        scatter = turned.args[0]
    if isinstance(scatter, Node) and scatter.target is aten.slice_scatter.default:
        copy, region = scatter.args[1], node.args[1:]
        if isinstance(copy, Node) and copy.target is aten.copy.default and scatter.args[2:] == region:
            source, wanted = value(copy.args[1]), node.meta["val"]
            if source is not None and (source.shape, source.dtype) == (wanted.shape, wanted.dtype):
                node = input_of(copy, 1)
    return loose.get(node, node)


def _replace_product(graph: Graph, called: Called) -> Substitution:
    node, given = called.node, called.given
    (m, k), n = given["a"].meta["val"].shape, given["b"].meta["val"].shape[1]
    found = _sides(called)
    reason = "its scales are not of 1x128 with 128x128 or 128x1" if found is None else _why_not(called, *found)
    made = ""
    if reason is None and found is not None:
        for old in called.outs["c"]:
            with graph.inserting_before(old):
                sides = (*found[0].emit(graph), *found[1].emit(graph))
                out = call(graph, torch.ops.fp8fn.scaled_mm.default, *sides, None, old.meta["val"].dtype)
            replace(graph, old, out)
            made = str(out.target)
        if not node._erased and not node.users:
            graph.erase_node(node)
    return Substitution(NAME, str(node), source_of(node), f"torchao.{called.name}.default", (m, n, k), made, reason)


def _sides(called: Called) -> tuple[Side, Side] | None:
    given = called.given
    if called.name in PRODUCTS:
        return Side(given["a"], given["a_s"], (1, 128)), Side(given["b"], given["b_s"], PRODUCTS[called.name])
    recipes = int(given["scale_recipe_a"]), int(given["scale_recipe_b"])
    if recipes not in ((4, 5), (4, 4)):  # BlockWise1x128 and BlockWise128x128 of torch.nn.functional.ScalingType
        return None
    turned = recipes[1] == 4  # cuBLASLt stores these scales as those of b transposed
    return Side(given["a"], given["a_s"], (1, 128)), Side(
        given["b"], given["b_s"], (128, 1) if turned else (128, 128), turned
    )


def _why_not(called: Called, left: Side, right: Side) -> str | None:
    if called.block_size != 128:
        return f"block_size is {called.block_size}; fp8fn has blocks of 128"
    if not left.fits() or not right.fits():
        return "the scales do not have the shapes of blocks of 128"
    out = called.first("c").meta["val"]
    if out.dtype not in INPUT_DTYPES:
        return f"the output is {short_name(out.dtype)}: use bfloat16, float16 or float32"
    a, b = left.data.meta["val"], right.data.meta["val"]
    for operand in (a, b):
        if operand.dtype not in _dtypes(out.device):
            return f"fp8fn has no kernel for {short_name(operand.dtype)} here"
    target = targets.target_of(out.device)
    if called.name in PRODUCTS or target.backend == "cpu":
        return None
    kinds = scale_kind(*left.block), scale_kind(*swap(right.block))
    return why_slower(a, b, out, kinds, False, target, tables(chip_of(out.device, target)))
