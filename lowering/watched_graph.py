"""`WatchedGraph`: counts the steps of a compiled graph, and measures its operands in some of them."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8fn.lowering.operand_statistics import UNDERFLOW, Statistics, statistics_of
from fp8fn.lowering.recipe_pass import Decision
from fp8fn.ops.monitor import State
from fp8fn.ops.statistics import OPERANDS, Column
from fp8fn.ops.torch_private.core import graph_task, saving_hooks

_LOG: Final = logging.getLogger("fp8fn")
_order: Final = itertools.count(1)
_graphs: Final[weakref.WeakSet[WatchedGraph]] = weakref.WeakSet()


@dataclass
class Clock:
    """The steps of all graphs with the same weights, and the layers that were warned about."""

    steps: int = 0
    warned: set[str] = field(default_factory=set)


@dataclass
class _Copy:
    """Rows on their way to the host, and the events that say when they have arrived."""

    tables: list[Tensor]
    events: list[torch.cuda.Event]

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)


@dataclass(eq=False)
class WeightSet:
    """The weights of one model that runs a graph, and the model's statistics.

    Args:
        graph: Graph that the model runs.
        weights: Weight of each product, if it is known.
        clock: Steps of the model.
        begun: When the last step with statistics began, in the order of all models' such steps.
        tables: Rows, while the graph's own hold those of another model.
    """

    graph: WatchedGraph
    weights: tuple[weakref.ref[Tensor] | None, ...]
    clock: Clock
    begun: int = 0
    tables: list[Tensor] | None = None

    def parameters(self) -> Iterator[Tensor]:
        """The weights that still exist."""
        for ref in self.weights:
            weight = None if ref is None else ref()
            if weight is not None:
                yield weight

    def read(self, names: Mapping[int, str]) -> dict[str, dict[str, Statistics]]:
        """The statistics by layer and operand; `names` are the parameters' names by id."""
        tables = list(self.graph.state.tables.values()) if self.tables is None else self.tables
        found = self.named([table.cpu() for table in tables], names)
        self.warn(found)
        return found

    def named(self, tables: Sequence[Tensor], names: Mapping[int, str]) -> dict[str, dict[str, Statistics]]:
        """The statistics by layer and operand; of several products with one weight, the later are `name#2`, …"""
        rows: dict[int, list[float]] = {}
        for table in tables:
            rows.update((row, values) for row, values in enumerate(table.tolist()) if values[Column.ELEMENTS])
        found: dict[str, dict[str, Statistics]] = {}
        uses: dict[str, int] = {}
        for product, (ref, name) in enumerate(zip(self.weights, self.graph.names, strict=True)):
            name = names.get(id(None if ref is None else ref()), name)
            uses[name] = uses.get(name, 0) + 1
            operands = {}
            for row, operand in enumerate(OPERANDS, product * len(OPERANDS)):
                values = rows.get(self.graph.state.same.get(row, row))
                if values is not None:
                    operands[operand] = statistics_of(values)
            if operands:
                found[name if uses[name] == 1 else f"{name}#{uses[name]}"] = operands
        return found

    def warn(self, found: Mapping[str, Mapping[str, Statistics]]) -> None:
        """Logs each layer whose gradient underflows, once."""
        for name, operands in found.items():
            gradient = operands.get("gradient")
            if gradient is None or not gradient.flushed > UNDERFLOW or name in self.clock.warned:
                continue
            self.clock.warned.add(name)
            _LOG.warning(
                "monitor: the gradient of %s underflows: %s%.0f %% of its elements were flushed to zero in step %d "
                "(amax %.3g); scale the loss, or use a recipe with smaller blocks or with e5m2 gradients",
                name, "" if gradient.exact else "up to ", 100 * gradient.flushed, gradient.step, gradient.amax,
            )  # fmt: skip


def _computed_again() -> bool:
    """Whether `torch.utils.checkpoint` computes a step's forward again: in a backward, to save what it left out.

    A reentrant checkpoint saves nothing by hooks, and its only call with gradients is the one in the backward.
    """
    saving = saving_hooks(False)
    return saving is not None and graph_task() != -1


class WatchedGraph:
    """A graph whose operands are measured in every `every`-th step.

    A step is a call of the forward. The first backward that runs after it writes the gradients' rows. Models that
    PyTorch gives one graph take turns: the rows are those of the model that was measured last. If a model runs the
    graph while rows of another one are due, nobody could tell whose gradients the next backward computes, so that the
    graph is then given up.
    """

    def __init__(self, every: int, gm: GraphModule, decisions: Sequence[Decision]) -> None:
        gemms = [decision.gemm for decision in decisions if decision.reason is None]
        places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.every = every
        self.names = tuple(gemm.site.weight for gemm in gemms)
        self.state = State(len(gemms) * len(OPERANDS), (gemm.site.device for gemm in gemms))
        self.given_up = False
        self._places = [None if gemm.parameter is None else places.get(gemm.parameter) for gemm in gemms]
        self._constants = [_constant(gm, gemm.parameter) for gemm in gemms]
        self._leader = next((place for place in self._places if place is not None), None)
        self._models: list[WeightSet] = []
        self._current: WeightSet | None = None
        self._measured: WeightSet | None = None
        self._copy: _Copy | None = None
        self._copy_next = False
        _graphs.add(self)

    def counting(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, with its calls counted."""

        def call(*args: Any) -> Any:
            if not _computed_again():
                self.step(args)
            return compiled(*args)

        return call

    def step(self, args: Sequence[Any]) -> None:
        """Called before each forward."""
        if self.given_up:
            return
        model = self._current
        if model is None or not self._runs(model, args):
            model = self._current = self._model_of(args)
        measured = self._measured
        if measured is not None and measured is not model and self.state.is_unfinished() and [*measured.parameters()]:
            self._give_up()
            return
        if measured is not None:
            self._look(measured)
        if model.clock.steps % self.every == 0 and not self._is_captured():
            self._begin(model)
        model.clock.steps += 1

    def models(self) -> Iterator[WeightSet]:
        """The models that run the graph."""
        for model in self._models:
            if next(model.parameters(), None) is not None:
                yield model

    def _runs(self, model: WeightSet, args: Sequence[Any]) -> bool:
        """Whether a call has the weights of a model; the first one decides."""
        if self._leader is None:
            return True
        ref = model.weights[self._places.index(self._leader)]
        return ref is not None and ref() is args[self._leader]

    def _model_of(self, args: Sequence[Any]) -> WeightSet:
        """The model that makes a call, perhaps a new one."""
        self._models = [*self.models()]
        for model in self._models:
            if self._runs(model, args):
                return model
        weights = [
            constant if place is None else args[place]
            for place, constant in zip(self._places, self._constants, strict=True)
        ]
        ids = {id(weight) for weight in weights if weight is not None}
        others = (model for graph in _graphs if graph is not self for model in graph.models())
        clocks = (model.clock for model in others if any(id(weight) in ids for weight in model.parameters()))
        refs = tuple(weakref.ref(weight) if isinstance(weight, Tensor) else None for weight in weights)
        self._models.append(WeightSet(self, refs, next(clocks, None) or Clock()))
        return self._models[-1]

    def _begin(self, model: WeightSet) -> None:
        if self._measured is not None and self._measured is not model:
            self._measured.tables = self.state.take()
        model.tables = None
        model.begun, self._measured, self._copy_next = next(_order), model, True
        self.state.begin(model.clock.steps)

    def _look(self, measured: WeightSet) -> None:
        """Looks for gradients that underflowed, once their rows have arrived on the host."""
        if self._copy_next:
            self._copy_next, self._copy = False, self._copied()
        if self._copy is not None and self._copy.arrived():
            tables, self._copy = self._copy.tables, None
            measured.warn(measured.named(tables, {}))

    def _copied(self) -> _Copy:
        """Starts to copy the rows to the host, without waiting for the GPU."""
        tables, events = [], []
        for device, table in self.state.tables.items():
            if device.type == "cpu":
                tables.append(table.clone())
                continue
            host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            host.copy_(table, non_blocking=True)
            with torch.cuda.device(device):
                events.append(torch.cuda.Event())
                events[-1].record()
            tables.append(host)
        return _Copy(tables, events)

    def _give_up(self) -> None:
        self.given_up = True
        self.state.end()
        _LOG.warning(
            "monitor: several modules share one compiled graph (%s, …), and one ran its forward before another one's "
            "backward, so that their gradients cannot be told apart and none is monitored; compile the model that "
            "contains them as a whole", self.names[0],
        )  # fmt: skip

    def _is_captured(self) -> bool:
        """Whether the call is captured in a CUDA graph of the user's, which is replayed without this code."""
        on_gpu = any(device.type == "cuda" for device in self.state.devices)
        return on_gpu and torch.cuda.is_current_stream_capturing()


def watched(every: int | None, gm: GraphModule, decisions: Sequence[Decision]) -> WatchedGraph | None:
    """The graph with its products in FP8 watched; None for a graph that is not trained, or without such products."""
    if every is None or not torch.is_grad_enabled() or all(decision.reason is not None for decision in decisions):
        return None
    return WatchedGraph(every, gm, decisions)


def watching(parameters: Mapping[int, str]) -> list[WeightSet]:
    """The models that have any of some parameters, given by id, in the order in which they were measured."""
    models = [model for graph in _graphs for model in graph.models()]
    found = [model for model in models if any(id(weight) in parameters for weight in model.parameters())]
    return sorted(found, key=lambda model: model.begun)


def check_every(every: Any) -> int | None:
    """The option `monitor`, None if it is off; an error for what is no number of steps."""
    if every is None or every is False:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"options['monitor'] is {every!r}; use a number of steps, 100 for one, or None for no monitor")
    return every


def _constant(gm: GraphModule, node: Node | None) -> Tensor | None:
    """The parameter that a graph holds itself, instead of taking it as an input."""
    if node is None or node.op != "get_attr":
        return None
    found: Any = gm
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tensor) else None
