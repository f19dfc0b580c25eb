"""The recipe pass: replaces products with a parameter in a Dynamo graph by `fp8fn::gemm`, which has a backward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fp8fn.lowering.attention import spell_attention
from fp8fn.lowering.costs import chip_for, estimated, parts_of_groups, why_slower
from fp8fn.lowering.find import Gemm, Sum, find_gemms, parameter_of, regions
from fp8fn.lowering.find_grouped import why_not_recipe
from fp8fn.lowering.graph.einsum import reduce_einsums
from fp8fn.lowering.graph.emit import mark
from fp8fn.lowering.graph.nodes import OF_PARAMETER, PRODUCT, tensor_of, value
from fp8fn.lowering.heads import Heads
from fp8fn.lowering.names import named_in_model
from fp8fn.lowering.quantized_weights import why_not_operands
from fp8fn.lowering.whole_step import StepTimes, Taken, step_times
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.recipe import BACKEND_DEFAULT, Recipe
from fp8fn.ops.sharded import plain_of
from fp8fn.ops.tuning.estimate import Parts, Times
from fp8fn.site import (
    Site,
    Where,
    matches,
    patterns_of,
    takes_nothing,
    unmatched,
    why_none_match,
    why_not,
    why_not_by_default,
)
from fp8fn.weights.fp8_weight import is_gathered

_log = logging.getLogger("fp8fn")
# The patterns of a `where` that a graph of this process had weights for, and those that a warning has named.
_MATCHED: Final = set[str]()
_REPORTED: Final = set[str]()
_MOST_REASONS: Final = 3


@dataclass(frozen=True)
class Decision:
    """The decision about one product: `reason` is None if it is substituted.

    `possible` says whether another `where` could substitute it; `times` are its estimated times, if known. `taken` are
    its times as part of the step, if they are known and it is substituted, or would be but for the whole step.
    `gathered`: FSDP has gathered the weight as the recipe has it, so that there is no product in bf16 to compare with.
    """

    gemm: Gemm
    reason: str | None
    possible: bool
    times: Times | None
    taken: Taken | None = None
    gathered: bool = False


def decide(
    gm: GraphModule, where: Where = None, recipe: Recipe = BACKEND_DEFAULT, target: str | None = None, *,
    replayed: bool = False,
) -> list[Decision]:  # fmt: skip
    """Decides about every product of the graph, after einsums and attention are replaced by their products.

    Times are estimated for the product's device, or for a `target` of `rates.NAMED`. `replayed`: a CUDA graph makes the
    launches. Without a `where`, all products whose times are known are left alone if their sum is slower in FP8.
    """
    spell_attention(gm)
    for graph, outer in regions(gm):
        reduce_einsums(graph, partial(_is_weight, outer))
    gemms = named_in_model(find_gemms(gm))
    heads = Heads(gm, gemms)
    decisions = [_decide(gemm, where, recipe, target, heads) for gemm in gemms]
    step = step_of((each for each in decisions if not each.gathered), replayed=replayed)
    if where is not None or not step.loses:
        return decisions
    left = (each.taken is not None and not each.gathered for each in decisions)
    return [replace(each, reason=step.reason) if out else each for each, out in zip(decisions, left, strict=True)]


def _is_weight(outer: Mapping[Node, Node], node: Node) -> bool:
    return parameter_of(node, outer) is not None


def step_of(decisions: Iterable[Decision], *, replayed: bool = False) -> StepTimes:
    """The estimated times of the graph's products in FP8, or of those that are left alone because of the sum."""
    known, unknown = [], 0
    for decision in decisions:
        for call in range(decision.gemm.calls):
            if (taken := decision.taken) is not None:
                known.append(replace(taken, x=(taken.x, call), weight=(taken.weight, call)))
            elif decision.reason is None:
                unknown += 1
    return step_times(known, unknown=unknown, replayed=replayed)


def _decide(gemm: Gemm, where: Where, recipe: Recipe, target: str | None, heads: Heads) -> Decision:
    site = gemm.site
    impossible = gemm.reason or why_not(site) or why_not_recipe(gemm.groups, recipe)
    if impossible is not None:
        return Decision(gemm, impossible, False, None)
    chip = chip_for(site.device, target)
    times = estimated(site, recipe, chip)
    reason, gathered = _of_calls(gemm, partial(why_not, where=where)), _is_gathered_for(recipe, gemm.b)
    if where is None:
        compared = _is_16_bit(gemm.node) and not gathered
        slower = why_slower(times, backward=torch.is_grad_enabled()) if compared else None
        reason = _of_calls(gemm, why_not_by_default) or heads.why(gemm) or slower
    if reason is not None or not _is_16_bit(gemm.node):
        return Decision(gemm, reason, True, times)
    parts = None if times is None else times.parts
    if gemm.groups is not None and gemm.groups.over == "M":
        parts = parts_of_groups(site, recipe, chip)
    return Decision(gemm, reason, True, times, None if parts is None else _taken(gemm, parts), gathered)


def _of_calls(gemm: Gemm, why: Callable[[Site], str | None]) -> str | None:
    """The reason why a product stays; one in a region that is called several times stays in all calls, or in none."""
    for name in gemm.weights or [gemm.site.weight]:
        reason = why(replace(gemm.site, weight=name))
        if reason is not None:
            return reason if gemm.calls == 1 else f"{reason} ({name}; a region is decided once for all of its calls)"
    return None


def _is_gathered_for(recipe: Recipe, weight: Node) -> bool:
    """Whether FSDP has gathered the weight in FP8, in the recipe's blocks and type."""
    found = plain_of(value(weight))
    if not is_gathered(found):
        return False
    return found._form.block[-2:] == recipe.weight_block and recipe.weight_dtype in (None, found._data.dtype)


def _taken(gemm: Gemm, parts: Parts) -> Taken:
    """A product as part of its step."""

    def differentiated(operand: Node) -> bool:
        found = value(operand)
        return torch.is_grad_enabled() and found is not None and found.requires_grad

    return Taken(
        parts, gemm.a, gemm.b, dgrad=differentiated(gemm.a), wgrad=differentiated(gemm.b), groups=gemm.site.groups > 0
    )


def _is_16_bit(node: Node) -> bool:
    """Whether the product to replace is computed in 16 bits, also by autocast; in float32 it takes much longer."""
    out = node.meta.get("example_value")
    return isinstance(out, Tensor) and out.dtype in INPUT_DTYPES and out.dtype.itemsize == 2


def rewrite(
    gm: GraphModule, recipe: Recipe, where: Where = None, *, numbered: bool = False, replayed: bool = False
) -> list[Decision]:
    """Substitutes the eligible products of the graph in place, and returns the decision about each.

    With `numbered`, the substitutes are numbered in the order of the decisions.
    """
    decisions = decide(gm, where, recipe, replayed=replayed)
    substitutes: dict[Node, Node] = {}
    for decision in decisions:
        gemm = decision.gemm
        if decision.reason is None:
            marks = {PRODUCT: len(substitutes)} if numbered else {}
            if gemm.node.graph is not gm.graph and _of_parameters(gemm):
                marks[OF_PARAMETER] = 1
            substitutes[gemm.node] = _substitute(gemm.node.graph, gemm, recipe, substitutes, marks)
        _log.info(
            "%s %s %s (M,N,K)=(%s,%s,%s): %s",
            gemm.source, gemm.site.op, gemm.site.weight, gemm.site.m, gemm.site.n, gemm.site.k,
            decision.reason or f"fp8fn.{'gemm' if gemm.groups is None else 'grouped_gemm'}, {recipe.key}",
        )  # fmt: skip
    _summarize(decisions, recipe, where, whole=not _is_broken(gm))
    for graph in {decision.gemm.node.graph for decision in decisions if decision.reason is not None} | {gm.graph}:
        graph.lint()
    for module in gm.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    return decisions


def _is_broken(gm: GraphModule) -> bool:
    """Whether Dynamo broke the model after this graph, so that others follow with more weights."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def _summarize(decisions: Sequence[Decision], recipe: Recipe, where: Where, *, whole: bool) -> None:
    """Logs one line for each compilation: a warning if no product is in FP8, unless FP8 is estimated to be slower.

    The line is also a warning if it is the first one to name a pattern that matches no weight beside others that do;
    not so if the graph is not the `whole` of a model, or its last part.
    """
    taken = sum(decision.reason is None for decision in decisions)
    reasons = Counter(decision.reason for decision in decisions if decision.reason is not None)
    left = "; ".join(f"{count}x {reason}" for reason, count in reasons.most_common(_MOST_REASONS))
    slower = any(decision.reason and decision.reason.startswith("slower") for decision in decisions)
    # The exact pass reports products on FP8 data itself; the recipe takes no product of two activations.
    gemms = [decision.gemm for decision in decisions if decision.gemm.parameter is not None]
    weights = [gemm for gemm in gemms if why_not_operands(gemm.a, gemm.b, {}) is None]
    names, patterns = [name for gemm in weights for name in (gemm.weights or [gemm.site.weight])], patterns_of(where)
    elsewhere = not _MATCHED.isdisjoint(patterns)  # in another graph of a model that Dynamo broke into several
    _MATCHED.update(pattern for pattern in patterns if any(matches(name, [pattern]) for name in names))
    missed = None if taken or takes_nothing(where) else why_none_match(where, names)
    serves = len(weights) < len(gemms) and missed is None  # such as a model with FP8 weights, but for its head
    silent = taken or slower or elsewhere or serves or not weights or takes_nothing(where)
    idle = [pattern for pattern in patterns if pattern not in _MATCHED]
    others = len(idle) < len(patterns) and not missed
    texts = [f"; {text}" for text in (unmatched("where", idle, names, "weight") if others else ())]
    new = whole and bool(texts) and not _REPORTED.issuperset(idle)
    if new:
        _REPORTED.update(idle)
    _log.log(
        logging.INFO if silent and not new else logging.WARNING,
        "%d of %d products in FP8, recipe %s%s%s", taken, len(decisions), recipe.key,
        f": {missed}" if missed else f"; left: {left}" if left else "", "".join(texts),
    )  # fmt: skip


def _of_parameters(gemm: Gemm) -> bool:
    """Whether the weight is a parameter in each call of the region."""
    return all(isinstance(value(weight), torch.nn.Parameter) for weight in gemm.parameters or (gemm.parameter,))


def _substitute(
    graph: Graph, gemm: Gemm, recipe: Recipe, substitutes: dict[Node, Node], marks: Mapping[str, int]
) -> Node:
    """Replaces a product, whose operands may themselves be replaced, by `fp8fn::gemm` or `fp8fn::grouped_gemm`."""
    node = gemm.node
    a, b = (substitutes.get(operand, operand) for operand in (gemm.a, gemm.b))
    bias = gemm.bias if gemm.bias is None else substitutes.get(gemm.bias, gemm.bias)

    def transpose(operand: Node) -> Node:
        # Use a function: a call_method node would bypass AOTAutograd's cache.
        return graph.call_function(torch.transpose, (operand, -2, -1))

    with graph.inserting_before(node):
        if gemm.flipped:
            a = transpose(a)
        if gemm.transposed or gemm.flipped:
            b = transpose(b)
        if gemm.groups is None:
            out = graph.call_function(torch.ops.fp8fn.gemm.default, (a, b, bias, recipe.key, None))
        else:
            # PyTorch's product of groups ignores autocast, and so does its substitute.
            args = (a, b, gemm.groups.offsets, None, recipe.key, node.meta["example_value"].dtype)
            out = graph.call_function(torch.ops.fp8fn.grouped_gemm.default, args)
        product = out
        if gemm.flipped:  # PyTorch's result is contiguous, and a view may rely on it
            out = graph.call_function(torch.ops.aten.contiguous.default, (transpose(out),))
        if gemm.total is not None:
            out = _added(graph, out, gemm.total, node, substitutes)
    out.meta.update(node.meta)
    for key, found in marks.items():
        mark(product, key, found)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return out


def _added(graph: Graph, product: Node, total: Sum, node: Node, substitutes: Mapping[Node, Node]) -> Node:
    """`alpha * product + beta * term`, in the type of the sum `node`: autocast casts the term, `torch.add` does not."""
    if total.alpha != 1:
        product = graph.call_function(torch.mul, (product, total.alpha))
    term, dtype = substitutes.get(total.term, total.term), tensor_of(node).dtype
    if total.beta == 0:  # ignores the term's NaN and Inf, but gives it a gradient of zeros
        if not tensor_of(total.term).requires_grad:
            return product
        term = graph.call_function(torch.nan_to_num, (term, 0.0, 0.0, 0.0))
    if tensor_of(total.term).dtype != dtype:
        term = graph.call_function(torch.ops.aten.to.dtype, (term, dtype))
    return graph.call_function(torch.add, (product, term), {} if total.beta == 1 else {"alpha": total.beta})
