"""Inductor's partitioner with fp8fn's choice of saved values: the only file that uses the partitioner's private parts.

`min_cut_rematerialization_partition` asks `choose_saved_values_set` where to cut the joint graph, and extracts the two
graphs at that cut. Here the answer is changed in between, by `fp8fn.lowering.saved`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node

from fp8fn.lowering.saved import SavePlan, shrink
from fp8fn.lowering.saved.cut import Cut, written
from fp8fn.lowering.saved.exact import parameters_of_region

_CHOOSE: Final = "choose_saved_values_set"
_LOCK: Final = threading.RLock()


def fault() -> str | None:
    """The private part of the partitioner that this release of PyTorch lacks, or None."""
    choose = getattr(partitioners, _CHOOSE, None)
    partition = getattr(partitioners, "min_cut_rematerialization_partition", None)
    info = getattr(partitioners, "NodeInfo", None)
    if choose is None or [*inspect.signature(choose).parameters][:3] != ["joint_graph", "node_info", "memory_budget"]:
        return f"{_CHOOSE}(joint_graph, node_info, memory_budget)"
    if partition is None or _CHOOSE not in partition.__code__.co_names:
        return f"min_cut_rematerialization_partition that calls {_CHOOSE}"
    names = {"is_required_fw", "required_bw_nodes", "tangents_closure", "static_lifetime_input_nodes"}
    missing = names - {*getattr(info, "__dataclass_fields__", ()), *vars(info or object)}
    return f"NodeInfo.{min(missing)}" if missing else None


if (_missing := fault()) is not None:
    raise ImportError(
        f"fp8fn.lowering.inductor.partitioner: torch {torch.__version__} has no torch._functorch.partitioners."
        f"{_missing}; use PyTorch 2.11 to 2.14, or options={{'save': 'all'}}, which leaves the partitioner alone"
    )


class Partitioner(CustomPartitionerFn):
    """Inductor's hook; its uuid keeps graphs that were cut otherwise out of the caches."""

    def __init__(self, plan: SavePlan, sources: Any) -> None:
        self.plan, self.sources = plan, sources

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        with _choosing(self._choose):
            forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        return forward, backward

    def uuid(self) -> Any:
        return ("fp8fn", self.sources, self.plan)

    def _choose(self, chosen: list[Node], graph: Graph, info: Any, budget: float) -> list[Node]:
        # The output node depends on gradients too, but it reads the forward's results.
        backward = frozenset(node for node in info.tangents_closure if node.op != "output")
        changed = written(graph)
        forward = {node for node in graph.nodes if info.is_required_fw(node)}
        parameters = _parameters(graph, frozenset(info.static_lifetime_input_nodes))
        cut = Cut(
            graph=graph,
            saved=dict.fromkeys(chosen),
            parameters=parameters.union(parameters_of_region(graph, forward)) - changed,
            written=changed,
            forward=forward,
            backward=backward,
            roots=backward | frozenset(node for node in info.required_bw_nodes if node.op != "output"),
        )
        return shrink(cut, self.plan, budget)


def _parameters(graph: Graph, static: frozenset[Node]) -> frozenset[Node]:
    """The inputs that live as long as the model; `static` are those that PyTorch takes for them.

    PyTorch (2.11 to 2.14) numbers inputs before it takes tensor subclasses apart, and these numbers name other nodes
    behind the first subclass that has two tensors, such as an `FP8Weight`.
    """
    primals = [node for node in graph.find_nodes(op="placeholder") if str(node.target).startswith("primals")]
    numbers = {number for number, node in enumerate(primals) if node in static}
    return frozenset(node for place, node in enumerate(primals) if _number(node, place) in numbers)


def _number(node: Node, place: int) -> int:
    """The number of an input, or of the subclass that it is a part of."""
    source: Any = node.meta.get("desc")
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "idx", place)


@contextmanager
def _choosing(choose: Callable[[list[Node], Graph, Any, float], list[Node]]) -> Iterator[None]:
    """Passes the saved values that PyTorch's partitioner chooses inside through `choose`."""
    with _LOCK:
        plain = getattr(partitioners, _CHOOSE)

        def replaced(joint_graph: Graph, node_info: Any, memory_budget: float = 1) -> list[Node]:
            chosen = plain(joint_graph, node_info, memory_budget=memory_budget)
            return choose(chosen, joint_graph, node_info, memory_budget)

        setattr(partitioners, _CHOOSE, replaced)
        try:
            yield
        finally:
            setattr(partitioners, _CHOOSE, plain)
