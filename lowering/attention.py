"""Replaces PyTorch's attention by its products: Dynamo traces `nn.MultiheadAttention` as a single node."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node, Proxy
from torch.overrides import TorchFunctionMode

from fp8fn.ops.torch_private.core import FakeTensor, pytree

_log = logging.getLogger("fp8fn")

# A copy without the check for overrides: the original would report itself to the recorder as a single call.
_ATTENTION: Final = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _native_attention(  # noqa: PLR0913  an op's signature
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, in_weight: Tensor, in_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The computation of `torch._native_multi_head_attention`, which reads every mask as a boolean one."""
    if query.is_nested:
        raise NotImplementedError("its sequences are nested")
    masks: dict[str, Tensor] = {}
    if mask is not None:
        # A mask that merges both kinds, (B, heads, L, S), has a matrix for each head of each sequence.
        both = mask_type not in (0, 1)
        masks["key_padding_mask" if mask_type == 1 else "attn_mask"] = (
            mask.to(torch.bool).expand(query.size(0), num_heads, -1, -1).flatten(0, 1) if both else mask.to(torch.bool)
        )
    # Self-attention multiplies by all of `in_weight` at once; the function recognizes it by its identical inputs.
    turned = query.transpose(0, 1)
    key, value = (turned if x is query else x.transpose(0, 1) for x in (key, value))
    out, weights = _ATTENTION(
        turned, key, value, embed_dim, num_heads, in_weight, in_bias, None, None, False, 0.0, out_weight, out_bias,
        training=False, need_weights=need_weights, average_attn_weights=average, **masks,
    )  # fmt: skip
    return out.transpose(0, 1), weights


def _encoder_layer(  # noqa: PLR0913  an op's signature
    x: Tensor, embed_dim: int, num_heads: int, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    gelu: bool, norm_first: bool, eps: float, norm1_weight: Tensor, norm1_bias: Tensor, norm2_weight: Tensor,
    norm2_bias: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """The computation of `torch._transformer_encoder_layer_fwd`."""
    weights = (in_weight, in_bias, out_weight, out_bias)

    def attention(x: Tensor) -> Tensor:
        return _native_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, mask_type=mask_type)[0]

    def mlp(x: Tensor) -> Tensor:
        up = F.linear(x, up_weight, up_bias)
        return F.linear(F.gelu(up) if gelu else F.relu(up), down_weight, down_bias)

    def norm1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm1_weight, norm1_bias, eps)

    def norm2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm2_weight, norm2_bias, eps)

    if norm_first:
        x = x + attention(norm1(x))
        return x + mlp(norm2(x))
    x = norm1(x + attention(x))
    return norm2(x + mlp(x))


_SPELLED: Final[Mapping[Any, Callable[..., Any]]] = {
    F.multi_head_attention_forward: _ATTENTION,
    torch._native_multi_head_attention: _native_attention,
    torch._transformer_encoder_layer_fwd: _encoder_layer,
}
REASON: Final = "attention_reason"


def spell_attention(gm: GraphModule) -> None:
    """Replaces each attention node by the calls inside it; `meta[REASON]` of a remaining node says why it remains."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for target, function in _SPELLED.items():
                for node in module.graph.find_nodes(op="call_function", target=target):
                    _spell(node, function)


def _spell(node: Node, function: Callable[..., Any]) -> None:
    before = set(node.graph.nodes)
    try:
        with node.graph.inserting_before(node):
            made = _recorded(node, function)
    except (NotImplementedError, RuntimeError, TypeError, KeyError) as error:
        for extra in reversed([each for each in node.graph.nodes if each not in before]):
            node.graph.erase_node(extra)
        node.meta[REASON] = f"{node.target.__name__} is not taken apart: {str(error).partition(chr(10))[0]}"  # type: ignore[union-attr]
        _log.info("%s", node.meta[REASON])
        return
    if isinstance(made, Node):
        node.replace_all_uses_with(made)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _recorded(node: Node, function: Callable[..., Any]) -> Any:
    """Adds the function's calls before `node` and returns the nodes of its results."""
    args, kwargs = pytree.tree_map_only(Node, lambda each: each.meta["example_value"], (node.args, node.kwargs))
    recorder = Recorder(node)
    # Use the mode of Dynamo's trace: the backend runs under another mode.
    mode = next((x.fake_mode for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)), None)
    if mode is None:
        raise NotImplementedError("its operands were not traced")
    with mode, enable_python_dispatcher(), torch.no_grad(), _autocast_of(node), recorder:
        results = function(*args, **kwargs)
    users = {user.target for user in node.users}
    if isinstance(results, tuple) and users - {operator.getitem}:
        raise NotImplementedError("its results are used as one tuple")
    return recorder.nodes_of(results)


def _autocast_of(node: Node) -> AbstractContextManager[Any]:
    """The autocast that was active at the node, derived from the type of its result."""
    out = next(x for x in pytree.tree_leaves(node.meta["example_value"]) if isinstance(x, Tensor))
    given = [each.meta["example_value"] for each in node.all_input_nodes]
    if any(isinstance(x, Tensor) and x.dtype == out.dtype for x in given) or out.device.type == "meta":
        return nullcontext()
    return torch.autocast(out.device.type, out.dtype)


class Recorder(TorchFunctionMode):
    """Adds a node for every PyTorch call that returns a tensor, before `node` and with its metadata."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node, self.graph = node, node.graph
        self.alive: list[Tensor] = []  # keeps the ids of these tensors from being reused
        self.nodes: dict[int, Node] = {}
        self.symbols: dict[Any, Node] = {}
        for each in node.graph.find_nodes(op="placeholder"):
            value = each.meta.get("example_value")
            if isinstance(value, SymInt) and value.node.expr.is_symbol:
                self.symbols[value.node.expr] = each
        for each in node.all_input_nodes:
            value = each.meta["example_value"]
            if isinstance(value, Tensor):
                self.nodes[id(value)] = each

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            return result
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            raise NotImplementedError("it reads a tensor's attribute")
        if id(result) in given and not name.endswith("_"):
            return result  # the tensor itself, such as `contiguous` of a contiguous tensor
        inputs = self._written((args, kwargs))
        if getattr(torch.Tensor, name, None) is func:
            made = self.graph.call_method(name, *inputs)
        else:
            made = self.graph.call_function(func, *inputs)
        self._keep(made, result)
        return result

    def nodes_of(self, results: Any) -> Any:
        if isinstance(results, tuple):
            return tuple(map(self.nodes_of, results))
        return self.nodes[id(results)] if isinstance(results, Tensor) else results

    def _keep(self, made: Node, result: Any) -> None:
        for key, value in self.node.meta.items():
            if key != "example_value":
                made.meta[key] = value
        if stack := self.node.meta.get("source_fn_stack"):
            made.meta["source_fn_stack"] = [*stack[:-1], (made.name, stack[-1][1])]
        made.meta["example_value"] = result
        if isinstance(result, Tensor):
            self.nodes[id(result)] = made
            self.alive.append(result)
            return
        for place, part in enumerate(result):
            self._keep(self.graph.call_function(operator.getitem, (made, place)), part)

    def _written(self, given: Any) -> Any:
        """The arguments, with tensors and symbolic sizes replaced by their nodes."""
        if isinstance(given, Tensor):
            return self.nodes[id(given)]
        if isinstance(given, SymInt):
            return self._size(given)
        if isinstance(given, list | tuple):
            written = [self._written(each) for each in given]
            return written if isinstance(given, list) else tuple(written)
        return {key: self._written(each) for key, each in given.items()} if isinstance(given, dict) else given

    def _size(self, size: SymInt) -> Any:
        from torch.utils._sympy.interp import sympy_interp  # imports SymPy, which takes half a second
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        expr = size.node.expr
        if expr.is_number:
            return int(expr)
        if not expr.free_symbols <= self.symbols.keys():
            raise NotImplementedError(f"the size {expr} is no input of the graph")
        proxies = {symbol: Proxy(self.symbols[symbol]) for symbol in expr.free_symbols}
        before = set(self.graph.nodes)
        found = sympy_interp(PythonReferenceAnalysis, proxies, expr).node
        for each in [each for each in self.graph.nodes if each not in before]:
            each.meta["example_value"] = size
        return found
