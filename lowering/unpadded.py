"""A graph whose attention reads a mask of its batch is compiled without the mask, for batches without padding.

    model(input_ids, attention_mask=torch.ones(2, 4096))        # of a batch that has no padding

transformers computes the mask of attention from `attention_mask`, which tokenizers and collators return for each batch.
In a graph its values are not known, but where they are all one the mask is causal, and attention is computed in a third
of the time without it. If they are one in the first call, then the graph is compiled without masks. Each call reads
whether they still are, for which the host waits until the device has the mask. A batch with padding compiles the graph
again, with the masks, and such batches go there.

Where PyTorch makes the length of a batch a variable, a mask is computed once for each length, to see whether it is
causal, and both graphs are compiled at once: PyTorch takes no guards on a variable after the first call's compilation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from copy import copy, deepcopy
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8fn.lowering.causal_masks import Droppable, drop, droppable, kind_of
from fp8fn.lowering.costs import size_of
from fp8fn.lowering.graph.nodes import given_tensor, set_given_tensor, tensor_of, value
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.sharded import is_sharded
from fp8fn.ops.torch_private.core import (
    CompileContext,
    FakeTensor,
    HopDispatchSetCache,
    TracingContext,
    compile_context,
    is_functorch_wrapped_tensor,
    tracing,
)

Compile: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

_TYPES: Final = (torch.bool, torch.uint8, torch.int32, torch.int64)
_MOST_ELEMENTS: Final = 1 << 22
# The multiplications of scores in a forward below which the wait may take longer than masks do: training takes 2.3 ms
# more with 3.4e10 of them, 1.2 ms less with 6.9e10, and 20 ms less with 5.5e11 (H200). Fewer are not worth a second
# compilation either.
_LEAST_WORK: Final = 10**11
_LOG: Final = logging.getLogger("fp8fn")


def by_padding(gm: GraphModule, inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """The graph, compiled; `inputs` are those of the first call."""
    masks = _masks_without_padding(gm, inputs)
    if not masks:
        return compile_graph(gm, inputs)
    masked, promise = _Masked(gm, inputs, compile_graph), _Promise(gm, masks, _vary(inputs))
    drop(gm, masks)
    _LOG.info("attentions that do without a mask in batches without padding, as the first one: %d", len(masks))
    if _vary(inputs):
        _LOG.info("sizes are variables: the graph with masks is compiled now, while its guards on them are taken")
        masked.compile(inputs)
    unmasked = compile_graph(gm, inputs)

    def call(*args: Any) -> Any:
        return (unmasked if promise.holds(args) else masked)(*args)

    return call


def _masks_without_padding(gm: GraphModule, inputs: Sequence[Any]) -> list[Droppable]:
    """The attentions that do without their masks by the sizes of the first call, and if what is ones in it stays so."""
    if any(isinstance(each, FakeTensor) for each in inputs) or any(map(_communicates, gm.modules())):
        return []  # the values of a graph that is compiled in parts are not there yet
    known = zip(gm.graph.find_nodes(op="placeholder"), map(_known, inputs), strict=True)
    given = {node: each for node, each in known if each is not None}
    masks = droppable(gm, given) if given else []  # constant masks were looked at before
    costly = _vary(inputs) or any(map(_waits, masks))
    return masks if not costly or sum(map(_work, masks)) >= _LEAST_WORK else []


def _vary(inputs: Sequence[Any]) -> bool:
    """Whether sizes are variables, for which there are two graphs from the beginning."""
    return any(isinstance(each, (torch.SymInt, torch.SymFloat)) for each in inputs)


def _known(given: Any) -> Tensor | int | None:
    """A variable's number in the first call, or a tensor of ones; None of other inputs."""
    return size_of(given) if isinstance(given, torch.SymInt) else given if _may_tell_padding(given) else None


class _Promise:
    """Attentions do without masks if a call gives ones, and sizes for which the masks are those of the first call.

    A mask of no more tokens than a window is causal, and one of more tokens is not. The sizes are numbers among the
    graph's inputs, and the shapes of the ones, for a mask may be computed from these alone.
    """

    def __init__(self, gm: GraphModule, masks: Sequence[Droppable], vary: bool) -> None:
        read = frozenset().union(*(each.read for each in masks))
        places = {i: node for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in read}
        self._ones = [i for i, node in places.items() if value(node) is not None]
        self._vary = vary
        self._allowed: dict[tuple[Any, ...], bool] = {}
        if vary:  # a copy, for the graph loses what computes the masks
            copies = {node.name: node for node in deepcopy(gm.graph).nodes}
            self._read = {i: copies[node.name] for i, node in places.items()}
            # A mask that a region computes reads no input.
            known = {mask: each.kind for each in masks for mask in each.masks if mask.graph is gm.graph}
            self._kinds = {copies[mask.name]: kind for mask, kind in known.items()}

    def holds(self, args: Sequence[Any]) -> bool:
        return self._allows(args) and _are_ones([args[i] for i in self._ones])

    def _allows(self, args: Sequence[Any]) -> bool:
        """Whether the masks are the same by the sizes of this call; they are computed once for each."""
        if not self._vary:
            return True
        sizes = tuple(args[i].shape if i in self._ones else args[i] for i in self._read)
        if sizes not in self._allowed and not graph_capture.capturing():
            given = {node: args[i] for i, node in self._read.items()}
            self._allowed[sizes] = all(kind_of(mask, given) == kind for mask, kind in self._kinds.items())
        return self._allowed.get(sizes, False)


def _communicates(module: Any) -> bool:
    """Whether processes wait for each other in the graph, which each of them would then choose by its own batch.

    Products, `redistribute` and `full_tensor` of DTensors become collectives after Dynamo.
    """
    return isinstance(module, GraphModule) and any(
        "c10d" in str(node.target) or is_sharded(value(node)) for node in module.graph.nodes
    )


def _may_tell_padding(given: Any) -> bool:
    if type(given) is not Tensor or given.dtype not in _TYPES or given.dim() != 2:
        return False
    return 0 < given.numel() <= _MOST_ELEMENTS and _are_ones([given])


def _are_ones(tensors: Collection[Any]) -> bool:
    """Whether all elements of all tensors are one. The host waits for them."""
    if any(type(each) is not Tensor or is_functorch_wrapped_tensor(each) for each in tensors):
        return False
    if graph_capture.capturing():
        return False
    return all(bool((each == 1).all()) for each in tensors)


def _waits(mask: Droppable) -> bool:
    """Whether the host waits for a device that tells it whether there is padding."""
    return tensor_of(mask.node).device.type != "cpu"


def _work(mask: Droppable) -> int:
    """The multiplications of an attention's scores."""
    query, key = (tensor_of(mask.given[name]) for name in ("query", "key"))
    return math.prod(size_of(size) or 0 for size in (*query.shape, key.shape[2]))


class _Masked:
    """The graph with its masks, which is compiled when it is first called."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], compile_graph: Compile) -> None:
        self._graph: GraphModule | None = _copied(gm)
        traced = (value(node) for node in self._graph.graph.find_nodes(op="placeholder"))
        self._inputs = [given if fake is None else fake for fake, given in zip(traced, inputs, strict=True)]
        self._compile = compile_graph
        self._compiled: Callable[..., Any] | None = None
        # PyTorch compiles a backward that is called later in the same way.
        self._traced, self._compiling = copy(TracingContext.try_get()), CompileContext.try_get()
        if self._traced is not None:  # the regions of the other graph have the same names
            self._traced.hop_dispatch_set_cache = HopDispatchSetCache()

    def __call__(self, *args: Any) -> Any:
        if (compiled := self._compiled) is None:
            _LOG.info("a batch has padding: the graph is compiled again, with the masks of its attentions")
            compiled = self.compile(args)
        return compiled(*args)

    def compile(self, args: Sequence[Any]) -> Callable[..., Any]:
        from fp8fn.ops.torch_private.dynamo import compile_lock

        with compile_lock:  # threads may call the model at once, or Dynamo may compile another function
            if self._compiled is None:
                self._compiled = self._compile_masked(args)
                self._graph, self._inputs, self._traced, self._compiling = None, [], None, None
            return self._compiled

    def _compile_masked(self, args: Sequence[Any]) -> Callable[..., Any]:
        if graph_capture.capturing():
            raise RuntimeError(
                'backend="fp8fn": attention_mask decides between two compiled graphs, and the capture of a CUDA graph '
                "can't read it; call the model without attention_mask, or once before with one that has a zero"
            )
        assert self._graph is not None
        # A copy, for passes change it: if compiling fails, or is interrupted, then the next call compiles again.
        graph = _copied(self._graph)
        for node, given in zip(graph.graph.find_nodes(op="placeholder"), args, strict=True):
            if isinstance(given, Tensor) and given_tensor(node) is None:  # a weight that has replaced the traced one
                set_given_tensor(node, given)
        gradients = torch.is_grad_enabled()
        with (
            tracing(self._traced),
            compile_context(self._compiling),
            torch.inference_mode(False),  # it enables gradients
            torch.set_grad_enabled(gradients),
        ):
            return self._compile(graph, self._inputs)


def _copied(gm: GraphModule) -> GraphModule:
    """Another graph with regions of its own, of the same parameters and constants, and with Dynamo's marks."""
    found = GraphModule(gm, deepcopy(gm.graph))
    found.meta = dict(gm.meta)
    for marked, own in ((gm, found), *zip(gm.graph.nodes, found.graph.nodes, strict=True)):
        vars(own).update({name: mark for name, mark in vars(marked).items() if name not in vars(own)})
    for name, region in gm.named_children():
        if isinstance(region, GraphModule):
            setattr(found, name, _copied(region))
    return found
