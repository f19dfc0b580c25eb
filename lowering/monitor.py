"""The backend's option `monitor`: the statistics of a model's FP8 operands while it trains."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fp8fn.lowering.recipe_pass import Decision
from fp8fn.ops.monitor import State
from fp8fn.ops.statistics import OPERANDS, Column

# A layer's gradient underflows if this share of its elements becomes zero in FP8.
UNDERFLOW: Final = 0.1
_LOG: Final = logging.getLogger("fp8fn")
_REMEDY: Final = 'torch.compile(model, backend="fp8fn", options={"monitor": 100})'
_order: Final = itertools.count(1)
_monitors: Final[weakref.WeakSet[Monitor]] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class OperandStatistics:
    """The statistics of one operand of a layer, in one step: an entry of `read_monitor`.

    Args:
        saturated: Share of elements with `|x| > fp8_max * scale`, which saturate.
        flushed: Share of elements that are 0 in FP8 and not in `x`.
        amax: The largest `|x|`; NaN if `x` has a NaN.
        snr_db: `10 log10(Σ x² / Σ (x - q)²)`; inf if no element has an error.
        exact: Whether `x` itself was read. If not, `x` was in no memory: `flushed` counts all zeros, `saturated` is an
            upper bound, `amax` is that of the FP8 data, and `snr_db` is estimated from the spacing of the FP8 numbers.
        step: How many steps came before, counted from 0.

    Raises:
        TypeError: A field is missing, or given by its position.

    Example:
        >>> fp8fn.OperandStatistics(saturated=0.0, flushed=0.25, amax=1.0, snr_db=30.0, exact=True, step=0).flushed
        0.25
    """

    saturated: float
    flushed: float
    amax: float
    snr_db: float
    exact: bool
    step: int


@dataclass
class _Clock:
    """The steps of a model's graphs with the same weights, and the layers that were warned about."""

    steps: int
    warned: set[str]


@dataclass
class _Copy:
    """Rows on their way to the host, and the events that say when they have arrived."""

    tables: list[Tensor]
    events: list[torch.cuda.Event]

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)


class Monitor:
    """Counts the steps of one graph, and makes the operands' rows due at every `every`-th.

    A step is a call of the forward. Its first backward writes the gradients' rows, whenever it runs.
    """

    def __init__(self, every: int, gm: GraphModule, decisions: Sequence[Decision]) -> None:
        gemms = [decision.gemm for decision in decisions if decision.reason is None]
        places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.every = every
        self.weights = tuple(gemm.site.weight for gemm in gemms)
        self.state = State(len(gemms) * len(OPERANDS), (gemm.site.device for gemm in gemms))
        self._places = [None if gemm.parameter is None else places.get(gemm.parameter) for gemm in gemms]
        self._constants = {
            product: _constant(gm, gemm.parameter)
            for product, gemm in enumerate(gemms)
            if gemm.parameter is not None and self._places[product] is None
        }
        self._leader = next((place for place in self._places if place is not None), None)
        self._parameters: list[weakref.ref[Tensor] | None] = []
        self._first: weakref.ref[Tensor] | None = None
        self._clock: _Clock | None = None
        self._copy: _Copy | None = None
        self._copy_next = False
        self.begun = 0
        """When the last step with statistics began, in the order of all monitors' such steps."""
        self.shared = False
        """Whether modules with other weights run the same graph, so that their statistics cannot be told apart."""
        _monitors.add(self)

    def watching(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, with its calls counted."""

        def call(*args: Any) -> Any:
            self.step(args)
            return compiled(*args)

        return call

    def step(self, args: Sequence[Any]) -> None:
        """Called before each forward."""
        if self.shared:
            return
        if self._clock is None or not self._same_weights(args):
            self._bind(args)
            if self.shared or self._clock is None:
                return
        clock = self._clock
        if self._copy_next:
            self._copy_next, self._copy = False, self._copied()
        if self._copy is not None and self._copy.arrived():
            tables, self._copy = self._copy.tables, None
            self._warn(dict(self._named(tables, {})), clock)
        if clock.steps % self.every == 0 and not self._captured():
            self.begun, self._copy_next = next(_order), True
            self.state.begin(clock.steps)
        clock.steps += 1

    def _same_weights(self, args: Sequence[Any]) -> bool:
        return self._leader is None or self._first is None or self._first() is args[self._leader]

    def _bind(self, args: Sequence[Any]) -> None:
        """Takes the weights of a call as those that are watched, unless others are."""
        living = [ref() for ref in self._parameters if ref is not None]
        if self._clock is not None and any(weight is not None for weight in living):
            self.shared = True
            self.state.end()
            _LOG.warning(
                "monitor: several modules share one compiled graph (%s, …), so that their layers cannot be told apart, "
                "and none is monitored; compile the model that contains them as a whole", self.weights[0],
            )  # fmt: skip
            return
        weights = [
            self._constants.get(product) if place is None else args[place] for product, place in enumerate(self._places)
        ]
        self._parameters = [weakref.ref(weight) if isinstance(weight, Tensor) else None for weight in weights]
        if self._leader is not None:
            self._first = self._parameters[self._places.index(self._leader)]
        ids = {id(weight) for weight in weights}
        clocks = (
            other._clock
            for other in _monitors
            if other is not self and not other.shared and any(id(each) in ids for each in other.parameters())
        )
        self._clock = next((clock for clock in clocks if clock is not None), None) or _Clock(0, set())

    def _captured(self) -> bool:
        """Whether the call is captured in a CUDA graph of the user's, which is replayed without this code."""
        on_gpu = any(device.type == "cuda" for device in self.state.devices)
        return on_gpu and torch.cuda.is_current_stream_capturing()

    def parameters(self) -> Iterator[Tensor]:
        """The weights that are watched and still exist."""
        for ref in self._parameters:
            weight = None if ref is None else ref()
            if weight is not None:
                yield weight

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

    def read(self, names: Mapping[int, str]) -> dict[str, dict[str, OperandStatistics]]:
        """The statistics by layer and operand; `names` are the parameters' names by id."""
        found = dict(self._named([table.cpu() for table in self.state.tables.values()], names))
        if self._clock is not None:
            self._warn(found, self._clock)
        return found

    def _named(
        self, tables: Sequence[Tensor], names: Mapping[int, str]
    ) -> Iterator[tuple[str, dict[str, OperandStatistics]]]:
        """The name and the statistics of each layer; of several products with one weight, the later are `name#2`, …"""
        rows: dict[int, list[float]] = {}
        for table in tables:
            rows.update((row, values) for row, values in enumerate(table.tolist()) if values[Column.ELEMENTS])
        uses: dict[str, int] = {}
        for product, name in enumerate(self.weights):
            weight = self._parameters[product] if product < len(self._parameters) else None
            name = names.get(id(None if weight is None else weight()), name)
            uses[name] = uses.get(name, 0) + 1
            operands = {}
            for place, operand in enumerate(OPERANDS, product * len(OPERANDS)):
                values = rows.get(self.state.same.get(place, place))
                if values is not None:
                    operands[operand] = _statistics(values)
            if operands:
                yield (name if uses[name] == 1 else f"{name}#{uses[name]}"), operands

    def _warn(self, found: Mapping[str, Mapping[str, OperandStatistics]], clock: _Clock) -> None:
        for name, operands in found.items():
            gradient = operands.get("gradient")
            if gradient is None or not gradient.flushed > UNDERFLOW or name in clock.warned:
                continue
            clock.warned.add(name)
            _LOG.warning(
                "monitor: the gradient of %s underflows: %s%.0f %% of its elements were flushed to zero in step %d "
                "(amax %.3g); scale the loss, or use a recipe with smaller blocks or with e5m2 gradients",
                name, "" if gradient.exact else "up to ", 100 * gradient.flushed, gradient.step, gradient.amax,
            )  # fmt: skip


def check_every(every: Any) -> int | None:
    """The option `monitor`, None if it is off; an error for what is no number of steps."""
    if every is None or every is False:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"options['monitor'] is {every!r}; use a number of steps, 100 for one, or None for no monitor")
    return every


def monitored(every: int | None, gm: GraphModule, decisions: Sequence[Decision]) -> Monitor | None:
    """A monitor of a graph's products in FP8, whose nodes it numbers; None for a graph that is not trained."""
    taken = [decision for decision in decisions if decision.reason is None]
    if every is None or not taken or not torch.is_grad_enabled():
        return None
    return Monitor(every, gm, taken)


def _constant(gm: GraphModule, node: Node) -> Tensor | None:
    """The parameter that a graph holds itself, instead of taking it as an input."""
    if node.op != "get_attr":
        return None
    found: Any = gm
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tensor) else None


def _statistics(values: Sequence[float]) -> OperandStatistics:
    elements, signal, noise = (values[column] for column in (Column.ELEMENTS, Column.SIGNAL, Column.NOISE))
    if math.isnan(signal) or math.isnan(noise):
        snr = math.nan
    elif noise == 0:
        snr = math.inf
    else:
        snr = 10 * math.log10(signal / noise) if signal else -math.inf
    return OperandStatistics(
        saturated=values[Column.SATURATED] / elements,
        flushed=values[Column.FLUSHED] / elements,
        amax=values[Column.AMAX],
        snr_db=snr,
        exact=bool(values[Column.EXACT]),
        step=int(values[Column.STEP]),
    )


def read_monitor(model: nn.Module) -> dict[str, dict[str, OperandStatistics]]:
    """Reads the last statistics of a model that was compiled with the backend's option `monitor`.

    With `options={"monitor": 100}`, every 100th training step, the first one included, measures the operands of each
    layer in FP8. A step is a call of the compiled model with gradients enabled, a micro-batch for one. Calls under
    `torch.no_grad()` are neither measured nor counted. The call waits for the GPU. A layer whose gradient underflows,
    with more than 10 % of its elements flushed to zero, is logged once as a warning, in training too.

    Args:
        model: The compiled model, or the module that was compiled.

    Returns:
        `OperandStatistics` by layer and operand: the name of the weight as `explain` shows it, and "activation",
        "weight" or "gradient". A second product with the same weight has the name `"….weight#2"`.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: The model has no monitor, or has not run a training step since it was compiled.

    Example:
        >>> layer = torch.nn.Linear(512, 512)
        >>> options = {"monitor": 100, "where": "*"}
        >>> compiled = torch.compile(layer, backend="fp8fn", options=options)
        >>> compiled(torch.randn(128, 512)).sum().backward()
        >>> fp8fn.read_monitor(compiled)["weight"]["gradient"].amax
        1.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"read_monitor: model is a {type(model).__name__}; pass the compiled model or its module")
    module = getattr(model, "_orig_mod", model)
    names = {
        id(parameter): name.replace("_orig_mod.", "") for name, parameter in module.named_parameters()
    }  # fmt: skip
    watching = [
        monitor for monitor in _monitors if any(id(parameter) in names for parameter in monitor.parameters())
    ]  # fmt: skip
    if not watching:
        raise RuntimeError(
            f"read_monitor: no compiled graph with this model's weights has a monitor; compile it with {_REMEDY} and "
            "run a training step first"
        )
    if all(monitor.shared for monitor in watching):
        raise RuntimeError(
            "read_monitor: several modules of this model share one compiled graph, so that their layers cannot be told "
            f"apart; compile the model as a whole, {_REMEDY}"
        )
    found: dict[str, dict[str, OperandStatistics]] = {}
    for monitor in sorted((monitor for monitor in watching if not monitor.shared), key=lambda each: each.begun):
        for name, operands in monitor.read(names).items():
            found.setdefault(name, {}).update(operands)
    if not found:
        raise RuntimeError("read_monitor: no training step has been measured since the model was compiled; run one")
    order = {name: place for place, name in enumerate(names.values())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0].partition("#")[0], len(order))))


class ScalarWriter(Protocol):
    """Anything that takes numbers by tag and step, `torch.utils.tensorboard.SummaryWriter` for one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def write_monitor(
    writer: ScalarWriter, statistics: Mapping[str, Mapping[str, OperandStatistics]], step: int | None = None
) -> None:
    """Writes the result of `read_monitor` to TensorBoard, as `fp8/LAYER/OPERAND/QUANTITY`.

    Args:
        writer: `torch.utils.tensorboard.SummaryWriter`, or any object with its method `add_scalar`.
        statistics: Result of `read_monitor`.
        step: Step to write; by default the step in which each operand was measured.

    Raises:
        TypeError: `writer` has no method `add_scalar`.

    Example:
        >>> class Printer:
        ...     def add_scalar(self, tag, value, step):
        ...         print(tag, value, step)
        >>> found = fp8fn.OperandStatistics(saturated=0.0, flushed=0.5, amax=2.0, snr_db=31.0, exact=True, step=100)
        >>> fp8fn.write_monitor(Printer(), {"fc.weight": {"gradient": found}})
        fp8/fc.weight/gradient/saturated 0.0 100
        fp8/fc.weight/gradient/flushed 0.5 100
        fp8/fc.weight/gradient/amax 2.0 100
        fp8/fc.weight/gradient/snr_db 31.0 100
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"write_monitor: writer is a {type(writer).__name__} without add_scalar; pass a "
            "torch.utils.tensorboard.SummaryWriter"
        )
    quantities = [field.name for field in fields(OperandStatistics) if field.name not in ("exact", "step")]
    for layer, operands in statistics.items():
        for operand, found in operands.items():
            for quantity in quantities:
                at = found.step if step is None else step
                writer.add_scalar(f"fp8/{layer}/{operand}/{quantity}", getattr(found, quantity), at)
