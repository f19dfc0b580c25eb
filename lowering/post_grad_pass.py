"""The pass over the forward and backward graphs that Inductor compiles: fuses producers into their readers.

It also gathers the additions to counters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Final

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp8fn.lowering import counters, joint_pass
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.patterns import (
    gated_product,
    gated_rows,
    gather_scaled_mm,
    given_amax,
    grouped_silu_mul_backward,
    inlined,
    producers,
    saved_silu_mul,
    sibling_products,
    silu_mul_backward,
)
from fp8fn.ops.layout import Block

# Blocks that are inlined by default, to save memory traffic: 3 bytes an element instead of 7. Inductor's kernel keeps
# 128 elements in registers; it reads the producer's inputs twice for a row of more than 1024. Not timed on a GPU.
INLINED: Final[tuple[Block, ...]] = ((1, 128),)
_listeners: Final[list[list[Substitution]]] = []


def fuse(graph: Graph, blocks: Collection[Block] = INLINED) -> list[Substitution]:
    """Fuses in place; reports each quantizer whose producer a pattern knows, and products with what is beside them."""
    substitutions = chain(
        producers.substitute(graph), saved_silu_mul.substitute(graph), silu_mul_backward.substitute(graph),
        grouped_silu_mul_backward.substitute(graph), inlined.substitute(graph, blocks), given_amax.substitute(graph),
    )  # fmt: skip
    found = [*_reported(graph, "quantized", substitutions), *_products(graph)]
    counters.advance_together(graph)
    return found


def _products(graph: Graph) -> list[Substitution]:
    def sizes(found: Substitution) -> str:
        return "(M,N,K)=({},{},{})".format(*found.shape)

    substitutions = chain(
        gated_product.substitute(graph), gated_rows.substitute(graph), sibling_products.substitute(graph)
    )
    return joint_pass.reported(graph, substitutions, sizes, _listeners)


def pipeline(graph: Graph) -> list[Substitution]:
    """Gathers sequences while they are multiplied, in place, and reports each quantizer that reads a gathered one."""
    return _reported(graph, "gathered", gather_scaled_mm.substitute(graph))


def _reported(graph: Graph, what: str, substitutions: Iterator[Substitution]) -> list[Substitution]:
    """`joint_pass.reported`; a quantizer has no N."""

    def sizes(found: Substitution) -> str:
        return f"(M,K)=({found.shape[0]},{found.shape[2]}) {what}"

    return joint_pass.reported(graph, substitutions, sizes, _listeners)


def recorded() -> AbstractContextManager[list[Substitution]]:
    """Collects the reports of all compilations inside; `shape` is `(M, 0, K)` of a quantizer, which has no N."""
    return joint_pass.recorded(_listeners)


class FusionPass(CustomGraphPass):
    """Inductor's hook, after the user's own; its uuid is part of the caches' keys, as `SubstitutionPass`'s is."""

    def __init__(self, blocks: tuple[Block, ...] = INLINED, before: Any = None) -> None:
        self.blocks, self.before = blocks, before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        self.run(graph)

    def run(self, graph: Graph) -> None:
        fuse(graph, self.blocks)

    def uuid(self) -> Any:
        before = self.before.uuid() if self.before is not None else None
        return (type(self).__name__, joint_pass.SubstitutionPass().uuid(), self.blocks, before)


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


class PipelinePass(FusionPass):
    def run(self, graph: Graph) -> None:
        pipeline(graph)


def with_pipeline(patches: dict[str, Any], wanted: bool | None) -> dict[str, Any]:
    """Inductor's options with `PipelinePass` after the user's own pass; `wanted` is the option `async_tp`."""
    import torch._inductor.config as config

    if wanted not in (None, False, True):
        raise ValueError(f"options['async_tp'] is {wanted!r}; use True or False")
    if not wanted:
        return patches
    before = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    return {**patches, "post_grad_custom_pre_pass": PipelinePass(before=before)}
