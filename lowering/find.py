"""Finds the matrix products of a Dynamo graph: their operands, their weights, and their source lines."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8fn.lowering import attention, find_grouped
from fp8fn.lowering.find_grouped import Groups
from fp8fn.lowering.graph.nodes import given_tensor, source_of, tensor_of, value
from fp8fn.lowering.quantized_weights import quantized_source, why_not_operands
from fp8fn.ops.torch_private.core import HigherOrderOperator, linear, pytree
from fp8fn.site import Site

_LINEAR: Final = (F.linear, linear)
# Functions and methods by their names: the op, and the names by which a call may give its tensors.
_TENSORS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    **dict.fromkeys(("matmul", "__matmul__", "linalg_matmul"), ("matmul", ("input", "other"))),
    **dict.fromkeys(("mm", "bmm"), ("matmul", ("input", "mat2"))),
    "addmm": ("addmm", ("input", "mat1", "mat2")),
    "baddbmm": ("baddbmm", ("input", "batch1", "batch2")),
    "addbmm": ("addbmm", ("input", "batch1", "batch2")),
    "inner": ("inner", ("input", "other")),
    "tensordot": ("tensordot", ("a", "b")),
}
_FUNCTIONS: Final = {
    operator.matmul, torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm,
    torch.inner, torch.functional.tensordot, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm,
    torch.Tensor.addmm, torch.Tensor.baddbmm, torch.Tensor.addbmm, torch.Tensor.inner,
}  # fmt: skip
# An `inner` or a `tensordot` with a weight is spelled as a matmul before, where it is one.
_UNMATCHED: Final = ("addbmm", "inner", "tensordot")

# Products that are listed but not substituted, with a remedy.
_OTHERS: Final[Mapping[Any, str]] = {
    torch.bilinear: "bilinear has a matrix for each output: spell it with torch.einsum or torch.matmul",
    **dict.fromkeys(
        (torch.conv1d, torch.conv2d, torch.conv3d),
        "a convolution: one of kernel size 1 is F.linear with channels as the last dimension",
    ),
    **dict.fromkeys((torch.lstm, torch.lstm_cell), "the weights of an LSTM are multiplied inside PyTorch's kernel"),
    **dict.fromkeys((torch.gru, torch.gru_cell), "the weights of a GRU are multiplied inside PyTorch's kernel"),
    **dict.fromkeys(
        (torch.rnn_tanh, torch.rnn_relu, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        "the weights of an RNN are multiplied inside PyTorch's kernel",
    ),
    **dict.fromkeys(
        (torch.linalg.multi_dot, torch.functional.chain_matmul),
        "a chain of products, whose order PyTorch chooses: spell each product with torch.matmul",
    ),
}

# Each row reads its own copy of a weight, which takes longer than the product in any format.
GATHERED: Final = (
    "its weights are gathered, one matrix for each row: sort the rows by expert and call torch._grouped_mm; of "
    "transformers, model.set_experts_implementation('grouped_mm')"
)

# Calls of a nested graph, `(graph, ..., *inputs)`: checkpointed regions and regions that are compiled once.
REGIONS: Final = (
    torch.ops.higher_order.tag_activation_checkpoint,
    torch.ops.higher_order.wrap,
    torch.ops.higher_order.invoke_subgraph,
)

ACTIVATIONS: Final = "no parameter: activation by activation"

# Views and casts that may stand between a parameter and its product.
_VIEWS: Final = {
    "t", "T", "mT", "H", "mH", "adjoint", "numpy_T", "matrix_H", "transpose", "permute", "swapaxes", "view", "reshape",
    "flatten", "unsqueeze", "squeeze", "expand", "contiguous", "clone", "detach", "alias", "to", "type", "float",
    "half", "bfloat16", "double", "getattr", "select", "unbind", "chunk", "split", "narrow", "unflatten", "movedim",
    "moveaxis", "swapdims", "tensor_split", "split_with_sizes", "view_as", "reshape_as", "expand_as", "type_as",
}  # fmt: skip


class Sum(NamedTuple):
    """`alpha * product + beta * term`, as `addmm` and `baddbmm` compute it."""

    term: Node
    alpha: Any
    beta: Any


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One product of a graph, `a` by the weight `b`; `flipped` if the weight is the left operand, `c = (aᵀ bᵀ)ᵀ`.

    `total` is the sum that the product is a term of, if it adds more than a bias. `groups` describes the groups of a
    `torch._grouped_mm`; `parameter` is the graph input of the weight, if known. A product in a region that is called
    several times is found once, with the number of `calls`: `parameters` are those of all calls, and `weights` their
    names.
    """

    node: Node
    a: Node
    b: Node
    bias: Node | None
    transposed: bool
    flipped: bool
    site: Site
    reason: str | None
    groups: Groups | None = None
    parameter: Node | None = None
    total: Sum | None = None
    parameters: tuple[Node, ...] = ()
    weights: tuple[str, ...] = ()
    calls: int = 1

    @property
    def in_each_call(self) -> list[Gemm]:
        """The product once for each call of its region, with the weight of that call if all have one."""
        if len(self.parameters) != self.calls:
            return [self] * self.calls
        own = zip(self.parameters, self.weights, strict=True)
        return [replace(self, parameter=given, site=replace(self.site, weight=name)) for given, name in own]

    @property
    def source(self) -> str:
        """`file:line` of the user's code, or `""` if PyTorch did not record it."""
        return source_of(self.node)


def find_gemms(gm: GraphModule, outer: Mapping[Node, Node] | None = None) -> Iterator[Gemm]:
    """Yields every product of the graph and of its nested regions, with a reason for each that FP8 cannot take.

    `outer` maps the inputs of a region to the nodes of the graph around it. A region's product is replaced for all its
    calls, or left with the first reason.
    """
    found: dict[Node, list[Gemm]] = {}
    for gemms in _in_each_call(gm, {} if outer is None else outer):
        first = found.setdefault(gemms[0].node, gemms)
        if first is not gemms:
            kept = gemms if first[0].reason is None and gemms[0].reason is not None else first
            calls = *(first[0].parameters or [first[0].parameter]), gemms[0].parameter
            parameters = tuple(parameter for parameter in calls if parameter is not None)
            weights = tuple(map(weight_name, parameters))
            count = first[0].calls + 1
            found[gemms[0].node] = [replace(each, parameters=parameters, weights=weights, calls=count) for each in kept]
    for gemms in found.values():
        yield from gemms


def _in_each_call(gm: GraphModule, outer: Mapping[Node, Node]) -> Iterator[list[Gemm]]:
    """The products of each node that has any, again for each call of the region that it is in."""
    for node in gm.graph.nodes:
        operands = _operands(node)
        in_groups = find_grouped.operands(node)
        if in_groups is not None:
            yield [_classify_grouped(node, outer, in_groups)]
        elif node.op == "call_function" and (node.target in _OTHERS or attention.REASON in node.meta):
            if gemms := list(_classify_other(node, outer)):
                yield gemms
        elif operands is not None:
            gemm = _classify(node, outer, operands)
            if gemm is not None:
                yield [gemm]
        elif (inner := region_of(gm, node)) is not None:
            yield from _in_each_call(inner[0], {**outer, **inner[1]})
        elif isinstance(node.target, HigherOrderOperator):
            for _, same in itertools.groupby(_of_other_region(gm, node, outer), key=lambda each: each.node):
                yield list(same)


def _of_other_region(gm: GraphModule, node: Node, outer: Mapping[Node, Node]) -> Iterator[Gemm]:
    """The products with a weight inside of control flow, or of the forward of a `torch.autograd.Function`."""
    name = str(node.target)
    own_backward = name == "autograd_function_apply"
    reason = f"inside of torch.{name}: move it out, or call fp8fn.linear there"
    if own_backward:
        reason = "inside of a torch.autograd.Function, which computes its own backward: call fp8fn.gemm there"
    given = [each for each in pytree.tree_leaves(node.args) if isinstance(each, Node)]
    graphs = {each: getattr(gm, str(each.target), None) for each in given if each.op == "get_attr"}
    regions = [graph for graph in graphs.values() if isinstance(graph, GraphModule)]
    operands = [each for each in given if not isinstance(graphs.get(each), GraphModule)]
    for region in regions[:1] if own_backward else regions:
        inputs = region.graph.find_nodes(op="placeholder")
        around = {**outer, **dict(zip(reversed(inputs), reversed(operands), strict=False))}
        for gemm in find_gemms(region, around):
            if gemm.parameter is not None:
                yield replace(gemm, reason=why_not_operands(gemm.a, gemm.b, around) or reason)


def regions(
    gm: GraphModule, outer: Mapping[Node, Node] | None = None
) -> Iterator[tuple[GraphModule, Mapping[Node, Node]]]:
    """The graph and each nested region, with the nodes around it that give its inputs."""
    outer = {} if outer is None else outer
    yield gm, outer
    for node in gm.graph.nodes:
        if (inner := region_of(gm, node)) is not None:
            yield from regions(inner[0], {**outer, **inner[1]})


def region_of(gm: GraphModule, node: Node) -> tuple[GraphModule, dict[Node, Node]] | None:
    """The nested graph that a node of `gm` calls, and what the node gives for each of its inputs."""
    if node.op != "call_function" or node.target not in REGIONS:
        return None
    region = getattr(gm, str(node.args[0].target))  # type: ignore[union-attr]
    inputs = region.graph.find_nodes(op="placeholder")
    given = node.args[len(node.args) - len(inputs) :]
    return region, dict(zip(inputs, given, strict=True))


class Operands(NamedTuple):
    """A call that computes `a @ b + bias`; `transposed` if `b` is `(N, K)`; `reason` to leave it alone, if any.

    `scales` are those of the product and of the bias.
    """

    op: str
    a: Any
    b: Any
    bias: Any = None
    transposed: bool = False
    reason: str | None = None
    scales: tuple[Any, Any] = (1, 1)


def _operands(node: Node) -> Operands | None:
    args, kwargs = node.args, node.kwargs
    if node.op == "call_function":
        if node.target in _LINEAR:
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            return Operands("linear", x, weight, args[2] if len(args) > 2 else kwargs.get("bias"), transposed=True)
        if node.target is torch.functional.einsum:
            tensors = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, Node) and value(arg) is not None]
            if len(tensors) >= 2:
                return Operands("einsum", tensors[-2], tensors[-1], reason="einsum is not matched")
        if node.target in _FUNCTIONS:
            return _named(node, _name(node))
    elif node.op == "call_method" and not _TENSORS.keys().isdisjoint((_name(node), _name(node).removesuffix("_"))):
        return _named(node, _name(node))
    return None


def _named(node: Node, name: str) -> Operands | None:
    """The operands of a product of `_TENSORS`, given by place or by name; `addmm_` writes into its first one."""
    in_place = name not in _TENSORS
    op, names = _TENSORS[name.removesuffix("_") if in_place else name]
    # PyTorch takes scales before the tensors too, `addmm(beta, input, alpha, mat1, mat2)`, and a type after them.
    positional = len(node.args)
    given = node.args if positional <= len(names) else [arg for arg in node.args if value(arg) is not None]
    tensors, others = list(given[: len(names)]), dict(node.kwargs)
    tensors += [others.pop(each) for each in names[len(tensors) :] if each in others]
    if len(tensors) < len(names):
        return None
    scales = others.pop("alpha", 1), others.pop("beta", 1)
    reason = None
    if in_place:
        reason = f"{name} writes into its input: spell it with torch.{op}"
    elif op in _UNMATCHED:
        reason = f"{op} is not matched"
    elif positional > len(names):
        reason = f"{name} with {positional} positional arguments is not matched: give all but the tensors by name"
    elif others:
        reason = f"{name} with {', '.join(others)} is not matched"
    bias = tensors[0] if len(tensors) > 2 else None
    return Operands(op, tensors[-2], tensors[-1], bias, reason=reason, scales=scales)


def _classify(node: Node, outer: Mapping[Node, Node], given: Operands) -> Gemm | None:
    op, a, b, bias, transposed, reason, scales = given
    left, right, out = value(a), value(b), value(node)
    if left is None or right is None or out is None or left.ndim < 1 or right.ndim < 1:
        return None
    parameter = parameter_of(b, outer) or differentiated(b, outer)
    flipped = False
    if (
        parameter is None
        and op == "matmul"
        and left.ndim == 2
        and right.ndim >= 2
        and parameter_of(a, outer) is not None
    ):
        parameter, flipped = parameter_of(a, outer), True
        a, b, left, right = b, a, right.mT, left.mT
    k, n = right.shape[-2:] if right.ndim > 1 else (right.shape[0], 1)
    if transposed:
        k, n = n, k
    total = None
    if op in ("addmm", "baddbmm") and not (scales == (1, 1) and _is_row(value(bias), n)):
        total, bias = Sum(bias, *scales), None
    gathered = None if parameter is not None else _gathered(a, outer) or _gathered(b, outer)
    if parameter is None and op in (*_UNMATCHED, "einsum") and parameter_of(a, outer) is None:
        reason = None  # a product of two activations stays in any spelling
    if reason is None:
        fault = _why_not_shape(op, left, right, value(bias), parameter) or _why_not_types(left, right, out)
        reason = fault if gathered is None else GATHERED
    if parameter is not None or gathered is not None:
        reason = reason or why_not_operands(a, b, outer)
    elif (computed := _computed(b, outer) or _computed(a, outer)) is not None:
        reason = why_not_operands(a, b, outer) or computed
    elif reason == ACTIVATIONS:
        reason = _view_of_weight(b, outer) or _view_of_weight(a, outer) or reason
    parameter = parameter or gathered
    batch = _product(right.shape[:-2])
    rows = left.shape[-2] if right.ndim > 2 and left.ndim > 1 else _product(left.shape[:-1])
    name = "" if parameter is None else weight_name(parameter)
    site = Site(op=op, m=rows, n=n, k=k, batch=batch, dtype=left.dtype, device=left.device, weight=name)
    return Gemm(
        node=node, a=a, b=b, bias=bias, transposed=transposed, flipped=flipped, site=site, reason=reason,
        parameter=parameter, total=total,
    )  # fmt: skip


def _classify_grouped(node: Node, outer: Mapping[Node, Node], given: Mapping[str, Any]) -> Gemm:
    """Classifies a product of groups. Without offsets it is a batch and needs a known parameter."""
    a, b = given["a"], given["b"]
    left, right = tensor_of(a), tensor_of(b)
    groups = find_grouped.groups_of(left, right, given.get("offsets"))
    reason = groups if isinstance(groups, str) else None
    parameter = parameter_of(b, outer) or first_stacked(b, outer) or parameter_of(quantized_source(b, outer), outer)
    if isinstance(groups, Groups) and groups.offsets is None and parameter is None:
        reason = ACTIVATIONS
    if given.get("bias") is not None:
        reason = "a bias is given, which PyTorch's product of groups does not take either: add it to the output"
    reason = reason or why_not_operands(a, b, outer)
    batched = isinstance(groups, Groups) and groups.offsets is None
    count = groups.count if isinstance(groups, Groups) else 1
    site = Site(
        op=find_grouped.OP, m=left.shape[-2], n=right.shape[-1], k=left.shape[-1], batch=count if batched else 1,
        groups=0 if batched else count, dtype=left.dtype, device=left.device,
        weight="" if parameter is None else weight_name(parameter),
    )  # fmt: skip
    return Gemm(
        node=node, a=a, b=b, bias=None, transposed=False, flipped=False, site=site, reason=reason,
        groups=groups if isinstance(groups, Groups) else None, parameter=parameter,
    )  # fmt: skip


def _classify_other(node: Node, outer: Mapping[Node, Node]) -> Iterator[Gemm]:
    """Yields one product for each weight of a node that is recognized but not substituted."""
    reason = node.meta.get(attention.REASON) or _OTHERS[node.target]
    given = [each for each in node.all_input_nodes if value(each) is not None]
    for b in given:
        weight, left = value(b), value(given[0])
        if weight is None or left is None or weight.ndim < 2 or b is given[0] or parameter_of(b, outer) is None:
            continue
        n, k = weight.shape[0], _product(weight.shape[1:])
        if "conv" in _name(node):
            if any(size != 1 for size in weight.shape[2:]):
                continue
            rows = left.numel() // left.shape[-weight.ndim + 1]
        else:
            rows = _product(left.shape[:-1])
        name = weight_name(b)
        site = Site(op=_name(node), m=rows, n=n, k=k, dtype=left.dtype, device=left.device, weight=name)
        yield Gemm(
            node=node, a=given[0], b=b, bias=None, transposed=True, flipped=False, site=site, reason=reason,
            parameter=parameter_of(b, outer),
        )  # fmt: skip


def _computed(node: Any, outer: Mapping[Node, Node]) -> str | None:
    """The reason to leave a weight alone that is computed from parameters and buffers only, else None.

    The result of a linear layer is an activation even then: learned queries, positions or a probe.
    """
    seen: set[Node] = set()
    waiting, names, parameters = [outer.get(node, node)], [], []
    while waiting:
        each = waiting.pop()
        each = outer.get(each, each)
        if each in seen:
            continue
        seen.add(each)
        if each.target in _LINEAR:
            return None
        if each.op not in ("placeholder", "get_attr"):
            waiting += each.all_input_nodes
        elif isinstance(value(each), torch.nn.Parameter):
            parameters.append(weight_name(each))
        elif _is_buffer(each):
            names.append(weight_name(each))
        elif isinstance(value(each), Tensor):
            return None
    if parameters:
        found = ", ".join(sorted(parameters))
        takes = "linear" if tensor_of(node).ndim <= 2 else "gemm"  # `linear` takes no batch of weights
        return f"computed from a parameter ({found}): fp8fn.{takes} takes it"
    return f"a buffer ({names[0]}), not a parameter: register it as one, with requires_grad=False" if names else None


def _view_of_weight(node: Any, outer: Mapping[Node, Node]) -> str | None:
    """The reason to leave a weight alone that is a view of a parameter already where the graph begins, else None."""
    found = _behind_views(node, outer)
    given = None if found is None else given_tensor(found)
    if given is None or not isinstance(given._base, torch.nn.Parameter):
        return None
    return "a view of a parameter, made before the graph begins: make it in the same graph"


def _is_buffer(node: Node) -> bool:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return "_buffers" in str(name() if callable(name) else name)


def _is_row(bias: Tensor | None, n: Any) -> bool:
    return bias is not None and bias.ndim == 1 and bool(bias.shape[0] == n)


def _why_not_shape(op: str, left: Tensor, right: Tensor, bias: Tensor | None, parameter: Node | None) -> str | None:
    if parameter is None:
        return ACTIVATIONS
    if left.ndim < 2 or right.ndim < 2:
        return "a vector is an operand"
    if op == "linear" and right.ndim != 2:
        return "the weight is not a matrix"
    if right.ndim > 2 and left.ndim != right.ndim:
        return "batches of different rank"
    if bias is not None and not _is_row(bias, right.shape[0] if op == "linear" else right.shape[-1]):
        return "the bias is not one row of N"
    return None


def _why_not_types(left: Tensor, right: Tensor, out: Tensor) -> str | None:
    """PyTorch raises an error for operands of two types, but under autocast, whose results have 16 bits.

    A traced `linear` has the wider type; a `matmul` that would raise the error has that of its first operand, and is
    found where that is float32.
    """
    if left.dtype == right.dtype or out.dtype != torch.float32:
        return None
    return f"operands of {left.dtype} and {right.dtype}, which PyTorch multiplies under autocast alone"


def parameter_of(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The parameter behind a chain of views and casts, or None."""
    found = _behind_views(node, outer)
    return found if isinstance(value(found), torch.nn.Parameter) else None


def _behind_views(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The input or the attribute of the graph behind a chain of views and casts, or None."""
    while isinstance(node, Node):
        if node in outer:
            node = outer[node]
            continue
        if node.op in ("placeholder", "get_attr"):
            return node
        if node.op not in ("call_function", "call_method") or not (_name(node) in _VIEWS or _picks(node)):
            return None
        node = node.args[0] if node.args else None
    return None


def differentiated(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The input behind views and casts that `torch.func.grad` differentiates, Parameter or not, or None.

    Such an input is a weight if it is the right operand: `torch.func.grad` of a `functional_call` takes all weights as
    inputs.
    """
    tracked = False
    while isinstance(node, Node):
        node = outer.get(node, node)
        if node.op == "placeholder":
            return node if tracked else None
        name = _name(node)
        tracked = tracked or any("_set_tensor_requires_grad" in _name(each) for each in (node, *node.users))
        if name not in _VIEWS and name not in ("_wrap_for_grad", "_set_tensor_requires_grad") and not _picks(node):
            return None
        node = node.args[0] if node.args else None
    return None


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _picks(node: Node) -> bool:
    """Whether a node is `w[i]` with an index or a slice, which may be known only at run time."""
    if node.target not in (operator.getitem, "__getitem__") or len(node.args) < 2:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(value(i) is None or tensor_of(i).ndim == 0 for i in index)


def _gathered(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The parameter behind a gather of matrices, `w[indices]`, and behind views and casts, or None."""
    while isinstance(node, Node):
        node = outer.get(node, node)
        gathers = node.target in (operator.getitem, "__getitem__") and not _picks(node)
        if node.args and (gathers or _name(node) == "index_select"):
            found = parameter_of(node.args[0], outer)
            return found if found is not None and tensor_of(found).ndim > 2 else None
        if node.op not in ("call_function", "call_method") or _name(node) not in _VIEWS:
            return None
        node = node.args[0] if node.args else None
    return None


def first_stacked(node: Any, outer: Mapping[Node, Node]) -> Node | None:
    """The first parameter of the `torch.stack` or `torch.cat` that makes the weight, or None."""
    while isinstance(node, Node) and node.op in ("call_function", "call_method"):
        first = node.args[0] if node.args else None
        if node.target in (torch.stack, torch.cat) and isinstance(first, Sequence):
            return parameter_of(first[0], outer)
        if _name(node) not in _VIEWS:
            return None
        node = first
    return None


def weight_name(node: Node) -> str:
    """The name of a lifted parameter in `named_parameters()`, such as `"layers.0.fc.weight"`."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = str(name() if callable(name) else name)
    keys = re.findall(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.(\w+)", text)
    parts = [quoted or dotted for quoted, dotted in keys]
    return ".".join(
        part for part in parts[1:] if part not in ("_modules", "_parameters", "_buffers", "__dict__")
    ) or str(node.target)


def _product(sizes: Any) -> Any:
    total = 1
    for size in sizes:
        total = total * size
    return total
