"""Finds language-model heads by their use: logits are sensitive to FP8, and a head's name does not always tell."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fp8fn.lowering.find import Gemm, parameter_of, region_of
from fp8fn.lowering.graph.nodes import given_tensor
from fp8fn.site import why_sensitive

_TAKES: Final = "where='*' takes it too"
_DEEPEST: Final = 32  # ends the search at a module that holds itself


class Heads:
    """The embeddings of a graph, or, if it has none, those of the model around a weight."""

    def __init__(self, gm: GraphModule, gemms: Sequence[Gemm]) -> None:
        self._tables = set(_tables(gm, {}))
        self._rows = max((_rows(table) for table in self._tables), default=0)
        self._names = Counter(_in_layers(name) for gemm in gemms for name in gemm.weights or [gemm.site.weight])
        self._modules: Modules | None = None

    def why(self, gemm: Gemm) -> str | None:
        """The reason to leave a product in bf16 by default because it is a head, or None."""
        parameter = gemm.parameter
        if parameter is None:
            return None
        if not self._tables.isdisjoint(gemm.parameters or [parameter]):
            return f"sensitive: an embedding reads the weight too; {_TAKES}"
        # A head occurs once. A repeated layer may have as many columns as the vocabulary has tokens.
        once = self._names[_in_layers(gemm.site.weight)] == 1
        if once and gemm.site.n == self._rows:
            return _vocabulary(self._rows)
        if once and not self._tables:
            return self._why_outside(gemm, parameter)
        return None

    def _why_outside(self, gemm: Gemm, parameter: Node) -> str | None:
        """`why` from the modules around the weight, for a head that is compiled alone or behind a graph break."""
        weight = given_tensor(parameter)
        if weight is None:
            return None
        if self._modules is None:
            self._modules = Modules()
        owners = self._modules.owners(weight)
        if any(isinstance(owner, nn.Embedding) for owner in owners):
            return f"sensitive: an embedding reads the weight too; {_TAKES}"
        for owner in owners:
            for name, root in self._modules.paths(owner):
                reason = why_sensitive(f"{name}.weight", gemm.site.n, gemm.site.k)
                if reason is not None:
                    return reason
                tables = [module.num_embeddings for module in root.modules() if isinstance(module, nn.Embedding)]
                if root is not owner and gemm.site.n == max(tables, default=0):
                    return _vocabulary(gemm.site.n)
        return None


def _vocabulary(rows: Any) -> str:
    return f"sensitive: N={rows} is the vocabulary of the model's embedding; {_TAKES}"


class Modules:
    """All modules in memory and their parents, at the time of construction.

    Only Python's garbage collector knows the parents of a module. Walking its objects takes tens of ms, so a
    compilation does it at most once.
    """

    def __init__(self) -> None:
        self._all: list[nn.Module] = []
        self._parents: dict[int, list[tuple[nn.Module, str]]] = {}
        for found in gc.get_objects():
            if issubclass(type(found), nn.Module) and "_parameters" in found.__dict__:
                self._all.append(found)
                for name, child in found._modules.items():
                    self._parents.setdefault(id(child), []).append((found, name))

    def owners(self, weight: Tensor) -> list[nn.Module]:
        """The modules that have `weight` among their own parameters."""
        return [module for module in self._all if any(parameter is weight for parameter in module._parameters.values())]

    def paths(self, module: nn.Module, below: tuple[str, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
        """A module's names in its outermost parents; the wrapper of `torch.compile` adds no name."""
        if id(module) not in self._parents or len(below) > _DEEPEST:
            yield ".".join(name for name in below if name != "_orig_mod"), module
        else:
            for parent, name in self._parents[id(module)]:
                yield from self.paths(parent, (name, *below))


def _tables(gm: GraphModule, outer: Mapping[Node, Node]) -> Iterator[Node]:
    """The parameters that the embeddings of a graph and of its nested regions read."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if (inner := region_of(gm, node)) is not None:
            yield from _tables(inner[0], {**outer, **inner[1]})
        elif getattr(node.target, "__name__", "").startswith("embedding"):
            found = (parameter_of(arg, outer) for arg in (*node.args, *node.kwargs.values()))
            yield from (table for table in found if table is not None)


def _rows(table: Node) -> int:
    rows = table.meta["example_value"].shape[0]
    return rows if isinstance(rows, int) else 0


def _in_layers(weight: str) -> str:
    return re.sub(r"\b\d+\b", "*", weight)
