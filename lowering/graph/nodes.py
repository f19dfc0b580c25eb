"""Reads a node of a graph: its tensor, its arguments by name, and its origin in the user's code."""

from __future__ import annotations

import re
from typing import Any, Final

from torch import Tensor
from torch.fx import Node
from torch.utils.weak import TensorWeakRef

# The key of a product's number in "custom", which PyTorch copies from Dynamo's graph to the nodes that it makes of it.
PRODUCT: Final = "fp8fn_product"
# Likewise, the key of products whose weight is a parameter, in a region: PyTorch does not tell which of its inputs are.
OF_PARAMETER: Final = "fp8fn_of_parameter"


def value(node: Any) -> Tensor | None:
    """The fake tensor of a node's result; None for other results, and if `node` is no node.

    Dynamo stores it as `example_value`, AOTAutograd as `val`.
    """
    if not isinstance(node, Node):
        return None
    found = node.meta.get("example_value", node.meta.get("val"))
    return found if isinstance(found, Tensor) else None


def tensor_of(node: Any) -> Tensor:
    """The `value` of a node that is known to compute a tensor."""
    found = value(node)
    assert found is not None, node
    return found


def given_tensor(node: Node) -> Tensor | None:
    """The caller's own tensor, of which an input of Dynamo's graph is the trace; None if Dynamo has not kept it."""
    try:
        found = getattr(node.meta.get("grapharg"), "example", None)
    except AssertionError:  # Dynamo's reference is weak, and the tensor is gone
        return None
    return found if isinstance(found, Tensor) else None


def set_given_tensor(node: Node, given: Tensor) -> None:
    """Makes `given` the caller's own tensor, of which this input is the trace.

    The reference is weak, as Dynamo's is: a compiled graph may keep its nodes, and would keep a batch with them.
    """
    node.meta["grapharg"] = _Given(given)


class _Given:
    """Has the attribute of Dynamo's `GraphArg` that `given_tensor` reads."""

    def __init__(self, given: Tensor) -> None:
        self._given = TensorWeakRef(given)

    @property
    def example(self) -> Tensor | None:
        found: Tensor | None = self._given()
        return found


def origin_of(node: Node) -> tuple[str, bool]:
    """The node of Dynamo's graph (`""` if PyTorch did not record it), and whether `node` is part of its backward."""
    forward, backward = (node.meta.get(key) for key in ("source_fn_stack", "fwd_source_fn_stack"))
    stack = forward or backward
    return (str(stack[-1][0]) if stack else "", not forward and bool(backward))


def product_of(node: Node) -> int | None:
    """The number of the product of Dynamo's graph that a node belongs to, if `emit.number` gave it one."""
    found: int | None = (node.meta.get("custom") or {}).get(PRODUCT)
    return found


def is_of_parameter(node: Node) -> bool:
    """Whether a node belongs to a product that `emit.mark` marked as one with a parameter."""
    return OF_PARAMETER in (node.meta.get("custom") or {})


def source_of(node: Node) -> str:
    """`file:line` of the innermost frame outside installed packages, else outside PyTorch; `""` if not recorded."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [line for line in lines if "/site-packages/" not in line[0]]
    users = users or [line for line in lines if "/site-packages/torch/" not in line[0]] or lines
    if not users:
        return ""
    # A cell of a notebook is a file with a number for its name.
    file = "cell" if "/ipykernel_" in users[-1][0] else users[-1][0].rsplit("/", 1)[-1]
    return f"{file}:{users[-1][1]}"


def input_of(node: Node, place: int = 0) -> Node:
    """The argument at `place`, which is a node."""
    found = node.args[place]
    assert isinstance(found, Node), node
    return found


def place_of(item: Node) -> int:
    """The place `i` of a node `results[i]`."""
    found = item.args[1]
    assert isinstance(found, int), item
    return found


def arguments_of(node: Node) -> dict[str, Any]:
    """An op's arguments by name, with the defaults of its schema, which differs between PyTorch releases."""
    given = {}
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = node.args[place] if place < len(node.args) else argument.default_value
        given[argument.name] = node.kwargs.get(argument.name, default)
    return given


def triton_function(node: Node) -> Any:
    """The Python function of the Triton kernel that a `triton_kernel_wrapper_functional` node launches."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    while hasattr(kernel, "fn"):  # below an autotuner and heuristics
        kernel = kernel.fn
    return kernel
