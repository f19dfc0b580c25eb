"""What every pattern reports and does alike: a `Substitution` for each product, and the exchange of a node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node

if TYPE_CHECKING:  # `explain` imports this file with fp8fn, and views bring SymPy: half a second
    from fp8fn.lowering.graph.views import Size


@dataclass(frozen=True)
class Substitution:
    """What became of one product: the op `made` in its place, or the `reason` why it was left alone.

    `origin` is the node of Dynamo's graph that the product comes of, `backward` whether by differentiation.
    """

    pattern: str
    node: str
    source: str
    target: str
    shape: tuple[Size, Size, Size]
    made: str
    reason: str | None
    origin: str = ""
    backward: bool = False


def origin_of(node: Node) -> tuple[str, bool]:
    """The node of Dynamo's graph, `""` where PyTorch did not keep it, and whether this one is of its backward."""
    forward, backward = (node.meta.get(key) for key in ("source_fn_stack", "fwd_source_fn_stack"))
    stack = forward or backward
    return (str(stack[-1][0]) if stack else "", not forward and bool(backward))


def source_of(node: Node) -> str:
    """`file:line` of the innermost frame that is no installed package's, or not PyTorch's; `""` where none was kept."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [line for line in lines if "/site-packages/" not in line[0]]
    users = users or [line for line in lines if "/site-packages/torch/" not in line[0]] or lines
    return f"{users[-1][0].rsplit('/', 1)[-1]}:{users[-1][1]}" if users else ""


def arguments_of(node: Node) -> dict[str, Any]:
    """An op's arguments by name, with the defaults of its schema, which differs between releases of PyTorch."""
    given = {}
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = node.args[place] if place < len(node.args) else argument.default_value
        given[argument.name] = node.kwargs.get(argument.name, default)
    return given


def triton_function(node: Node) -> Any:
    """The Python function of the Triton kernel that a `triton_kernel_wrapper_functional` launches."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    while hasattr(kernel, "fn"):  # below an autotuner and heuristics
        kernel = kernel.fn
    return kernel


def replace(graph: Graph, node: Node, out: Node) -> None:
    """`out` in the place of `node`, whose shape, type and strides it has."""
    old, new = node.meta["val"], out.meta["val"]
    assert (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()), (node, old, new)
    for key, meta in node.meta.items():
        # Of "eager_input_vals" Inductor takes the strides that an op's arguments must have: those were another's.
        if key not in ("val", "tensor_meta", "original_aten", "eager_input_vals"):
            out.meta.setdefault(key, meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
