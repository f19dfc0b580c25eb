"""Weights' names in the compiled model, where Dynamo traces one of its modules alone.

Behind a graph break Dynamo begins anew in an inner module, where a weight is called `up.weight`. The module that
`torch.compile` was given is then on Python's stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule

from fp8fn.lowering.find import Gemm
from fp8fn.lowering.graph.nodes import given_tensor

# The frame in which a module runs its `forward`, and that of the function that `torch.compile` returns.
_CALL: Final = (nn.modules.module.__file__, "_call_impl")
_COMPILED: Final = (torch._dynamo.eval_frame.__file__, "compile_wrapper")


class Names:
    """Names of a module's parameters, all of each: tied ones have several."""

    def __init__(self, module: nn.Module | None) -> None:
        named = () if module is None else module.named_parameters(remove_duplicate=False)
        self._names: dict[int, list[str]] = {}
        for name, parameter in named:
            # A layer that is compiled by itself is wrapped in a module with this name.
            self._names.setdefault(id(parameter), []).append(name.replace("_orig_mod.", ""))

    def of(self, weight: object, name: str) -> str:
        """The weight's name in the module; `name` if that is one of its names, or if the module lacks the weight."""
        names = self._names.get(id(weight), [name])
        return name if name in names else names[0]


def named_in_model(gemms: Iterable[Gemm]) -> list[Gemm]:
    """The products, with the names of their weights in the module that is being compiled."""
    names = Names(_outermost(sys._getframe()))
    found = []
    for gemm in gemms:
        weight = None if gemm.parameter is None else given_tensor(gemm.parameter)
        site = replace(gemm.site, weight=names.of(weight, gemm.site.weight))
        weights = (names.of(given_tensor(node), name) for node, name in zip(gemm.parameters, gemm.weights, strict=True))
        found.append(replace(gemm, site=site, weights=tuple(weights)))
    return found


def watch_weights(
    gm: GraphModule, gemms: Sequence[Gemm], forward: Callable[..., Any], again: Callable[[Sequence[str]], None]
) -> Callable[..., Any]:
    """`forward`, which also calls `again` with the products' names when the graph first runs with other weights.

    Layers behind a graph break share one graph: their weights are its inputs.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    places = [inputs.index(gemm.parameter) if gemm.parameter in inputs else None for gemm in gemms]
    listed = [gemm.site.weight for gemm in gemms]
    runs = {tuple(listed)}

    def watched(*args: Any) -> Any:
        names = Names(_outermost(sys._getframe()))
        given = [None if place is None else args[place] for place in places]
        now = tuple(names.of(weight, name) for weight, name in zip(given, listed, strict=True))
        if now not in runs:
            runs.add(now)
            again(now)
        return forward(*args)

    return watched


def _outermost(frame: FrameType | None) -> nn.Module | None:
    """The outermost module that runs below `torch.compile`'s own function, or None."""
    module = None
    while frame is not None:
        here = (frame.f_code.co_filename, frame.f_code.co_name)
        if here == _COMPILED:
            return module
        if here == _CALL:
            module = frame.f_locals.get("self")
        frame = frame.f_back
    return None
