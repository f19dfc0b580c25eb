"""Weights that Dynamo never captured, and that a backend therefore cannot put into FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fp8fn.site import LEAST_K, LEAST_N

_BREAKS: Final = "graph_break"


class Outside(NamedTuple):
    """A weight's name in `named_parameters()`, and why no graph contains it, with a remedy."""

    weight: str
    reason: str


class Seen:
    """Records which weights the graphs of a call read and where Dynamo broke the graph; `watch` each graph."""

    def __init__(self) -> None:
        self._weights: set[int] = set()
        self._breaks = dict(torch._dynamo.utils.counters[_BREAKS])

    def watch(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which also records its inputs: they are the parameters themselves."""

        def watched(*args: Any) -> Any:
            self._weights.update(id(arg) for arg in args if isinstance(arg, Tensor))
            return forward(*args)

        return watched

    def outside(self, model: Any) -> tuple[Outside, ...]:
        """The weights of a module that are large enough for FP8 and that no watched graph has read."""
        if not isinstance(model, nn.Module):
            return ()
        # Looking up a row is no product.
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        read = self._weights | tables
        missed = [(name, w) for name, w in model.named_parameters() if id(w) not in read and _is_weight(w)]
        counted = torch._dynamo.utils.counters[_BREAKS].items()
        breaks = [key for key, count in counted if count > self._breaks.get(key, 0)]
        return tuple(Outside(name, _reason(model, w, breaks)) for name, w in missed)


def _is_weight(w: Tensor) -> bool:
    return w.ndim in (2, 3) and min(w.shape[-2:]) >= min(LEAST_K, LEAST_N)


def _reason(model: nn.Module, w: Tensor, breaks: Iterable[str]) -> str:
    first = next((text.partition("\n")[0] for text in breaks), "")
    reason = f"in no graph, so Python runs it or nothing does{': ' if first else ''}{first}"
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and any(w is each for each in module.parameters()):
            return f"the weights of {type(module).__name__} are multiplied inside PyTorch's kernel, in no graph"
    if not torch._dynamo.config.allow_rnn and any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return f"{reason}; Dynamo runs the code around an RNN in Python: set torch._dynamo.config.allow_rnn = True"
    spelled = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if w.ndim == 3 and spelled == "eager":
        return f"{reason}; use model.set_experts_implementation('grouped_mm')"
    if w.ndim == 3:
        return (
            f"{reason}; sort the rows by expert and call torch._grouped_mm, or compile a loop over experts with "
            "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
        )
    return reason
