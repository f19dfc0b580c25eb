"""The values that a compiled graph keeps for its backward: fewer bytes than PyTorch's partitioner saves."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Final

from torch._ops import OpOverload
from torch.fx import Node

from fp8fn.lowering.graph.nodes import input_of, place_of, source_of, tensor_of, value
from fp8fn.lowering.saved.cut import Cut, nbytes
from fp8fn.lowering.saved.exact import drop_columns, drop_weights, save_roots, unexpand
from fp8fn.lowering.saved.fp8 import keep_in_fp8
from fp8fn.ops.layout import without_guards
from fp8fn.ops.recipe import Save

_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class SavePlan:
    """The values to keep.

    Args:
        save: "exact" or "fp8", as `fp8fn.Recipe` describes them.
        keep_weights: Keeps the FP8 forms of weights.
        fuse: Whether later passes fuse quantizers with the computation of what they quantize.
    """

    save: Save = "exact"
    keep_weights: bool = False
    fuse: bool = True


def shrink(cut: Cut, plan: SavePlan, budget: float = 1.0) -> list[Node]:
    """The values to save, after changes of the joint graph that let the backward make the others.

    A `budget` under 1 is PyTorch's `activation_memory_budget`, which has made the backward compute most values again.
    Then activations are not kept in FP8.
    """
    before = cut.made_again()
    dropped = {}
    with without_guards():
        save_roots(cut)
        if not plan.keep_weights:
            dropped["weights quantized again"] = drop_weights(cut)
        dropped["before expand"] = unexpand(cut)
        dropped["columns quantized again"] = drop_columns(cut, plan.fuse)
        if plan.save == "fp8" and _multiplies_in_fp8(cut):
            if budget < 1:
                _LOG.warning(
                    "save='fp8' is ignored: activation_memory_budget=%s decides what is kept; set one of the two",
                    budget,
                )
            else:
                dropped["kept in FP8"] = keep_in_fp8(cut)
    cut.complete(before)
    cut.graph.lint()
    parts = [f"{name} {count / 2**20:.1f} MiB" for name, count in dropped.items() if count]
    _LOG.info("kept less between forward and backward: %s", ", ".join(parts) or "nothing to drop")
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("kept between forward and backward:\n%s", "\n".join(listing(cut)))
    return list(cut.saved)


def _multiplies_in_fp8(cut: Cut) -> bool:
    """Whether the graph has an op of fp8fn; without one nothing is gained, and gradients should be plain PyTorch's."""
    return any(isinstance(node.target, OpOverload) and node.target.namespace == "fp8fn" for node in cut.graph.nodes)


def listing(cut: Cut) -> list[str]:
    """A line for each value that the forward saves, the largest first: its bytes, type, shape, op and line of code."""
    sizes = {node: nbytes(node) for node in cut.saved if value(node) is not None and node not in cut.parameters}
    lines = [f"{sum(sizes.values()):14,} bytes, without parameters"]
    for node, size in sorted(sizes.items(), key=lambda item: -item[1]):
        x = tensor_of(node)
        op = f"{input_of(node).target}[{place_of(node)}]" if node.target is operator.getitem else str(node.target)
        shape = "x".join(map(str, x.shape)) or "scalar"
        lines.append(f"{size:14,} {str(x.dtype).removeprefix('torch.')} {shape} {op} {source_of(node)}".rstrip())
    return lines
