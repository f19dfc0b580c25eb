"""The pass over the forward and backward graphs that Inductor compiles: fuses producers into quantizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp8fn.lowering import joint_pass
from fp8fn.lowering.graph.nodes import origin_of
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.patterns import (
    gather_scaled_mm,
    given_amax,
    grouped_silu_mul_backward,
    inlined,
    producers,
    saved_silu_mul,
    silu_mul_backward,
)
from fp8fn.ops.layout import Block

# Blocks that are inlined by default, to save memory traffic: 3 bytes an element instead of 7. Inductor's kernel keeps
# 128 elements in registers; it reads the producer's inputs twice for a row of more than 1024. Not timed on a GPU.
INLINED: Final[tuple[Block, ...]] = ((1, 128),)
_LOG: Final = logging.getLogger("fp8fn")
_listeners: Final[list[list[Substitution]]] = []


def fuse(graph: Graph, blocks: Collection[Block] = INLINED) -> list[Substitution]:
    """Fuses in place, and reports each quantizer whose producer a pattern knows."""
    return _reported(graph, "quantized", lambda: (
        *producers.substitute(graph), *saved_silu_mul.substitute(graph), *silu_mul_backward.substitute(graph),
        *grouped_silu_mul_backward.substitute(graph), *inlined.substitute(graph, blocks),
        *given_amax.substitute(graph),
    ))  # fmt: skip


def pipeline(graph: Graph) -> list[Substitution]:
    """Gathers sequences while they are multiplied, in place, and reports each quantizer that reads a gathered one."""
    return _reported(graph, "gathered", lambda: tuple(gather_scaled_mm.substitute(graph)))


def _reported(graph: Graph, what: str, patterns: Callable[[], Sequence[Substitution]]) -> list[Substitution]:
    """Runs patterns, and tells the log and the listeners what each did, with the product's origin."""
    origins = {node.name: origin_of(node) for node in graph.nodes if node.op == "call_function"}
    found = []
    for substitution in patterns():
        origin, backward = origins.get(substitution.node, ("", False))
        found.append(replace(substitution, origin=origin, backward=backward))
    if any(substitution.reason is None for substitution in found):
        graph.eliminate_dead_code()
        graph.lint()
    for substitution in found:
        m, _, k = substitution.shape
        _LOG.info(
            "%s %s (M,K)=(%s,%s) %s: %s",
            substitution.source, substitution.target, m, k, what, substitution.reason or substitution.made,
        )  # fmt: skip
    for listener in _listeners:
        listener += found
    return found


def recorded() -> AbstractContextManager[list[Substitution]]:
    """Collects the reports of all compilations inside; `shape` is `(M, 0, K)`, since a quantizer has no N."""
    return joint_pass.recorded(_listeners)


class FusionPass(CustomGraphPass):
    """Inductor's hook; its uuid is part of the caches' keys, as that of `joint_pass.SubstitutionPass` is."""

    def __init__(self, blocks: tuple[Block, ...] = INLINED, before: Any = None) -> None:
        self.blocks, self.before = blocks, before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        fuse(graph, self.blocks)

    def uuid(self) -> Any:
        before = self.before.uuid() if self.before is not None else None
        return ("fusion", joint_pass.SubstitutionPass().uuid(), self.blocks, before)


def with_fusion(patches: dict[str, Any], wanted: bool | None) -> dict[str, Any]:
    """Inductor's options with this pass after the user's own; `wanted` is the option `fuse_quantize`."""
    import torch._inductor.config as config

    if wanted not in (None, False, True):
        raise ValueError(f"options['fuse_quantize'] is {wanted!r}; use True, False, or None for the default")
    if wanted is False:
        return patches
    before = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    blocks = inlined.BLOCKS if wanted else INLINED
    return {**patches, "post_grad_custom_pre_pass": FusionPass(blocks, before)}


class PipelinePass(CustomGraphPass):
    """Inductor's hook, with the user's own before it."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        pipeline(graph)

    def uuid(self) -> Any:
        before = self.before.uuid() if self.before is not None else None
        return ("pipeline", joint_pass.SubstitutionPass().uuid(), before)


def with_pipeline(patches: dict[str, Any], wanted: bool | None) -> dict[str, Any]:
    """Inductor's options with `PipelinePass` after the user's own pass; `wanted` is the option `async_tp`."""
    import torch._inductor.config as config

    if wanted not in (None, False, True):
        raise ValueError(f"options['async_tp'] is {wanted!r}; use True or False")
    if not wanted:
        return patches
    before = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    return {**patches, "post_grad_custom_pre_pass": PipelinePass(before)}
