"""The pass over joint graphs that replaces products on FP8 data by fp8fn's ops: always exact, never by recipe.

The pass runs with `backend="fp8fn"`, and with plain `torch.compile` inside `substitution()` or after `enable()`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp8fn import meta, ops
from fp8fn.lowering.graph.nodes import origin_of
from fp8fn.lowering.graph.quantizers import merge_quantizers
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.inductor import autotune, extern_call
from fp8fn.lowering.patterns import (
    activations,
    batch_invariant,
    dequantized_matmul,
    scaled_grouped_mm,
    scaled_mm,
    torchao,
    transformers_fp8,
)
from fp8fn.ops import tuning
from fp8fn.version import __version__

PATTERNS: Final[tuple[Callable[[Graph], Iterator[Substitution]], ...]] = (
    scaled_mm.substitute,
    torchao.substitute,
    transformers_fp8.substitute,
    dequantized_matmul.substitute,
    activations.substitute,
)
# The folders, and the files in them, that decide about a graph.
_SOURCES: Final = {
    "lowering": (Path(__file__).parent, "**/*.py"),
    "meta": (Path(meta.__path__[0]), "*.py"),
    "ops": (Path(ops.__path__[0]), "*.py"),
    "tuning": (Path(tuning.__path__[0]), "tables/*.json"),
}
_LOG: Final = logging.getLogger("fp8fn")
_listeners: Final[list[list[Substitution]]] = []


def apply(graph: Graph, everything: bool = False, invariant: bool = False) -> list[Substitution]:
    """Substitutes in place, merges equal quantizers, and reports each product that a pattern knows.

    With `everything`, patterns also substitute products that no measurement shows to be faster. With `invariant`, each
    product is batch-invariant.
    """
    grouped: Callable[[Graph], Iterator[Substitution]] = partial(scaled_grouped_mm.substitute, everything=everything)

    def substitutions() -> Iterator[Substitution]:
        for pattern in (*PATTERNS, grouped):
            if invariant:
                batch_invariant.mark(graph)
            yield from pattern(graph)
        if invariant:
            batch_invariant.mark(graph)
        if (merged := merge_quantizers(graph)) > 0:
            _LOG.info("%d quantizers of tensors that another one quantizes so: left out", merged)

    return reported(graph, substitutions(), lambda found: "(M,N,K)=({},{},{})".format(*found.shape), _listeners)


def reported(
    graph: Graph,
    substitutions: Iterator[Substitution],
    sizes: Callable[[Substitution], str],
    listeners: list[list[Substitution]],
) -> list[Substitution]:
    """Substitutes, and tells the log and the listeners what was done, with each product's origin."""
    origins = {node.name: origin_of(node) for node in graph.nodes if node.op == "call_function"}
    found = []
    for substitution in substitutions:
        origin, backward = origins.get(substitution.node, ("", False))
        found.append(replace(substitution, origin=origin, backward=backward))
    if any(each.reason is None for each in found):
        graph.eliminate_dead_code()
        graph.lint()
    for each in found:
        _LOG.info("%s %s %s: %s", each.source, each.target, sizes(each), each.reason or each.made)
    for listener in listeners:
        listener += found
    return found


@contextmanager
def recorded(listeners: list[list[Substitution]] = _listeners) -> Iterator[list[Substitution]]:
    """Collects the substitutions of all compilations inside; another pass gives its own `listeners`."""
    found: list[Substitution] = []
    listeners.append(found)
    try:
        yield found
    finally:
        listeners.remove(found)


class SubstitutionPass(CustomGraphPass):
    """Inductor's hook; its uuid keeps graphs that were compiled with other patterns or fakes out of the caches."""

    def __init__(self, before: Any = None, everything: bool = False, invariant: bool = False) -> None:
        self.before, self.everything, self.invariant = before, everything, invariant

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        apply(graph, self.everything, self.invariant)
        extern_call.install()
        if autotune.wanted():
            autotune.install()

    def uuid(self) -> Any:
        before = self.before.uuid() if self.before is not None else None
        return ("fp8fn", __version__, _fingerprint(), self.everything, self.invariant, before)


@cache
def _fingerprint() -> str:
    """A hash of all sources that decide about a graph, including its sizes and strides, and of the tuning tables."""
    digest = hashlib.sha256()
    for file in sorted(file for folder, files in _SOURCES.values() for file in folder.glob(files)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def with_pass(patches: dict[str, Any], everything: bool = False, invariant: bool = False) -> dict[str, Any]:
    """Inductor's options with this pass after the user's own; `everything` and `invariant` as in `apply`."""
    import torch._inductor.config as config

    transformers_fp8.serve()
    before = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    if isinstance(before, SubstitutionPass):
        if (before.everything, before.invariant) == (everything, invariant):
            return patches
        before = before.before
    return {**patches, "joint_custom_pre_pass": SubstitutionPass(before, everything, invariant)}


@contextmanager
def substitution() -> Iterator[None]:
    """See `fp8fn.lowering.substitution`."""
    import torch._inductor.config as config

    with config.patch(with_pass({})):
        yield


def enable() -> None:
    """See `fp8fn.lowering.enable`."""
    import torch._inductor.config as config

    config.joint_custom_pre_pass = with_pass({}).get("joint_custom_pre_pass", config.joint_custom_pre_pass)


def disable() -> None:
    """See `fp8fn.lowering.disable`."""
    import torch._inductor.config as config

    if isinstance(config.joint_custom_pre_pass, SubstitutionPass):
        config.joint_custom_pre_pass = config.joint_custom_pre_pass.before
