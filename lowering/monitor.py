"""`read_monitor` and `write_monitor`: the statistics of a model's FP8 operands while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final, Protocol

from torch import nn

from fp8fn.lowering.operand_statistics import Statistics
from fp8fn.lowering.watched_graph import watching
from fp8fn.ops.kinds import kind_of

_REMEDY: Final = 'torch.compile(model, backend="fp8fn", options={"monitor": 100})'


def read_monitor(model: nn.Module) -> dict[str, dict[str, Statistics]]:
    """Reads the last statistics of a model that was compiled with the backend's option `monitor`.

    With `options={"monitor": 100}`, every 100th training step, the first one included, measures the operands of each
    layer in FP8. A step is a call of the compiled model with gradients enabled, a micro-batch for one. Calls under
    `torch.no_grad()` are neither measured nor counted. The call waits for the GPU. A layer whose gradient underflows,
    with more than 10 % of its elements flushed to zero, is logged once as a warning, in training too.

    Args:
        model: The compiled model, or the module that was compiled.

    Returns:
        `Statistics` by layer and operand: the name of the weight as `explain` shows it, and "activation",
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
        raise TypeError(f"read_monitor: model is {kind_of(model)}; pass the compiled model or its module")
    module = getattr(model, "_orig_mod", model)
    names = {
        id(parameter): name.replace("_orig_mod.", "") for name, parameter in module.named_parameters()
    }  # fmt: skip
    runs = watching(names)
    if not runs:
        raise RuntimeError(
            f"read_monitor: no compiled graph with this model's weights has a monitor; compile it with {_REMEDY} and "
            "run a training step first"
        )
    if all(run.graph.given_up for run in runs):
        raise RuntimeError(
            "read_monitor: several modules of this model share one compiled graph, so that their layers cannot be told "
            f"apart; compile the model as a whole, {_REMEDY}"
        )
    found: dict[str, dict[str, Statistics]] = {}
    for run in runs:
        if not run.graph.given_up:
            for name, operands in run.read(names).items():
                found.setdefault(name, {}).update(operands)
    if not found:
        raise RuntimeError("read_monitor: no training step has been measured since the model was compiled; run one")
    order = {name: place for place, name in enumerate(names.values())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0].partition("#")[0], len(order))))


class ScalarWriter(Protocol):
    """Anything that takes numbers by tag and step, `torch.utils.tensorboard.SummaryWriter` for one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def write_monitor(
    writer: ScalarWriter, statistics: Mapping[str, Mapping[str, Statistics]], step: int | None = None
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
        >>> found = fp8fn.Statistics(saturated=0.0, flushed=0.5, amax=2.0, snr_db=31.0, exact=True, step=100)
        >>> fp8fn.write_monitor(Printer(), {"fc.weight": {"gradient": found}})
        fp8/fc.weight/gradient/saturated 0.0 100
        fp8/fc.weight/gradient/flushed 0.5 100
        fp8/fc.weight/gradient/amax 2.0 100
        fp8/fc.weight/gradient/snr_db 31.0 100
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            f"write_monitor: writer is {kind_of(writer)} without add_scalar; pass a "
            "torch.utils.tensorboard.SummaryWriter"
        )
    quantities = [field.name for field in fields(Statistics) if field.name not in ("exact", "step")]
    for layer, operands in statistics.items():
        for operand, found in operands.items():
            for quantity in quantities:
                at = found.step if step is None else step
                writer.add_scalar(f"fp8/{layer}/{operand}/{quantity}", getattr(found, quantity), at)
