"""`explain`: which matrix products of a model are computed in FP8, by which kernel, and why others are not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fp8fn import arguments
from fp8fn.lowering import find_grouped
from fp8fn.lowering.costs import check_measure, check_target, chip_for, measured, size_of, sized
from fp8fn.lowering.explanation import Explanation, Row
from fp8fn.lowering.find import Gemm, regions
from fp8fn.lowering.graph.nodes import origin_of, value
from fp8fn.lowering.graph.substitute import Substitution
from fp8fn.lowering.missed_weights import Seen
from fp8fn.lowering.names import watch_weights
from fp8fn.lowering.recipe_pass import Decision, decide, step_of
from fp8fn.lowering.whole_step import StepTimes
from fp8fn.ops import mx_mm, scaled_mm, targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.launch import described
from fp8fn.ops.layout import Block, is_mx, matrix_strides, scale_dtype, scale_is_column_major, scale_shape
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.recipe import BACKEND_DEFAULT, Recipe, parse_recipe, recipe_key
from fp8fn.ops.targets import Chip
from fp8fn.ops.torch_private.core import is_traceable_wrapper_subclass
from fp8fn.site import (
    Site,
    Where,
    check_where,
    takes_everything,
    takes_nothing,
    why_none_match,
    why_not,
    why_some_match_none,
)

_LOG = logging.getLogger("fp8fn")


def explain(
    model: Callable[..., Any],
    *args: Any,
    recipe: Recipe | str = BACKEND_DEFAULT,
    where: Where = None,
    target: str | None = None,
    measure: bool = False,
    show: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Runs a model once, uncompiled, and reports what `backend="fp8fn"` would do with each of its products.

    The model's buffers and the random state are restored afterwards. A model may be compiled already; the options that
    it was compiled with are not read.

    Args:
        model: Module or function.
        args: Positional arguments of the call.
        recipe: The backend's option `recipe`.
        where: The backend's option `where`.
        target: Architecture ("sm90") or product ("H100", "mi300x", "RTX 4090") whose decisions and kernels are shown on
            any machine; by default the device's. "sm90" stands for an H200. Times are estimated for Hopper only.
        measure: Times the products on a GPU, within about two seconds.
        show: Prints the table.
        kwargs: Keyword arguments of the call.

    Returns:
        An `Explanation`, with one `Row` for each product.

    Raises:
        TypeError: `model` is a class or not callable, or `where` is neither a function nor patterns.
        ValueError: The recipe or the target does not exist, or `measure=True` and there is no GPU.

    Example:
        >>> model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16, device="meta")
        >>> x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
        >>> fp8fn.explain(model, x, target="H100", show=False)
        Explanation(1 of 1 products in FP8, recipe blockwise_square, 1 graph(s))
    """
    arguments.compilable("explain", "model", model)
    check_where(where)
    target = check_target(target)
    check_measure(measure)
    key = recipe_key(recipe)
    rows: list[Row] = []
    sites: list[Site | None] = []
    chips: list[Chip | None] = []
    steps: list[StepTimes] = []
    graphs = 0
    seen = Seen()

    def record(gm: GraphModule, example_inputs: Sequence[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        decisions = decide(gm, where, parse_recipe(key), target)
        decided = [_row(decision, parse_recipe(key), target) for decision in decisions]
        forward: Callable[..., Any] = gm.forward
        substitutions: list[Substitution] = []
        if _holds_fp8(gm):
            forward = _traced(gm, example_inputs, substitutions, takes_everything(where))
        # A pattern reports a product by the first name that Dynamo gave it; the name in the graph may differ.
        origins = [
            origin_of(decision.gemm.node)[0] or row.node for decision, row in zip(decisions, decided, strict=True)
        ]
        merged = _with_substitutions(decided, origins, substitutions)
        # Estimates and measurements are for the recipe's products, not for those that a pattern made.
        ours = [row is before for row, before in zip(merged, decided, strict=False)]
        step = step_of([decision for decision, own in zip(decisions, ours, strict=True) if own])
        pairs = zip(decisions, ours, strict=True)
        measurable = [decision.gemm.site if decision.possible and own else None for decision, own in pairs]
        measurable = [None if site is None else sized(site) for site in measurable]
        measurable += [None] * (len(merged) - len(measurable))
        # A region's products are listed for each of its calls.
        calls = [(place, each) for place, found in enumerate(decisions) for each in found.gemm.in_each_call]
        listed = [replace(merged[place], weight=each.site.weight) for place, each in calls]
        listed += merged[len(decisions) :]
        measurable = [measurable[place] for place, _ in calls] + measurable[len(decisions) :]
        chips.extend(chip_for(decision.gemm.site.device, target) for decision in decisions if decision.times)

        def add(found: Sequence[Row]) -> None:
            rows.extend(found)
            sites.extend(measurable)
            steps.append(step)

        def again(names: Sequence[str]) -> None:
            own = zip(listed[: len(names)], calls, names, strict=True)
            others = (_again(row, decisions[place], name, where) for row, (place, _), name in own)
            add([*others, *listed[len(names) :]])

        add(listed)
        forward = watch_weights(gm, [each for _, each in calls], forward, again)
        return seen.watch(forward)

    with _unchanged(model), _uncompiled(model), _without_cache(model, kwargs) as keywords:
        torch._dynamo.reset()
        if "transformers.integrations.finegrained_fp8" in sys.modules:
            from fp8fn.lowering.patterns import transformers_fp8

            transformers_fp8.serve()
        torch.compile(model, backend=record)(*args, **keywords)
        outside = seen.outside(model)
        torch._dynamo.reset()
        if measure:
            rows = _timed(rows, sites, parse_recipe(key))
    names = [*(row.weight for row in rows), *(each.weight for each in outside)]
    unmatched = why_none_match(where, names) or why_some_match_none(where, names)
    if unmatched is not None and not takes_nothing(where):
        _LOG.warning("explain: %s", unmatched)
    chip = next((chip.name for chip in chips if chip), None)
    explanation = Explanation(tuple(rows), key, graphs, chip, outside, sum(steps, StepTimes()))
    if show:
        print(explanation)
    return explanation


def _again(row: Row, decision: Decision, name: str, where: Where) -> Row:
    """The row of a product whose graph another layer runs too: the decision is about the layer that came first."""
    site = decision.gemm.site
    reason = row.reason
    if decision.possible and why_not(site, where) and not why_not(replace(site, weight=name), where):
        reason = f"where said no to {site.weight}, whose graph it runs: give a pattern that has no number of a layer"
    return replace(row, weight=name, reason=reason)


def _timed(rows: Sequence[Row], sites: Sequence[Site | None], recipe: Recipe) -> list[Row]:
    """The rows with measured times of the products on a GPU; substituted products are measured first."""
    order = sorted(zip(rows, sites, strict=True), key=lambda pair: pair[0].reason is not None)
    times = measured((site for _, site in order if site is not None and _on_gpu(site)), recipe)
    pairs = zip(rows, sites, strict=True)
    return [row if site is None else replace(row, measured=times.get(site)) for row, site in pairs]


def _on_gpu(site: Site) -> bool:
    return site.device.type == "cuda"


def _row(decision: Decision, recipe: Recipe, target: str | None) -> Row:
    gemm, site = decision.gemm, decision.gemm.site
    return Row(
        node=gemm.node.name,
        source=gemm.source,
        op=site.op,
        weight=site.weight,
        shape=(site.m, site.n, site.k) if gemm.groups is None else (gemm.groups.count, site.m, site.n, site.k),
        batch=site.batch,
        kernel=_kernel_name(gemm, recipe, target) if decision.reason is None else None,
        reason=decision.reason,
        estimated=decision.times,
        dtype=_dtype_of(gemm),
    )


def _holds_fp8(gm: GraphModule) -> bool:
    """Whether a graph or a region has FP8 tensors, perhaps inside a subclass; an exact pattern needs one."""
    values = (node.meta.get("example_value") for graph, _ in regions(gm) for node in graph.graph.nodes)
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(value.dtype in FP8_DTYPES or is_traceable_wrapper_subclass(value) for value in tensors)


def _traced(
    gm: GraphModule, example_inputs: Sequence[Tensor], found: list[Substitution], everything: bool = False
) -> Callable[..., Any]:
    """Traces down to the joint graph, or to the inference graph, and applies the exact patterns there."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import default_partition
    from torch._inductor.decomposition import select_decomp_table

    from fp8fn.lowering import joint_pass

    def partition(joint_module: GraphModule, inputs: Any, **options: Any) -> Any:
        found.extend(joint_pass.apply(joint_module.graph, everything))
        joint_module.recompile()
        return default_partition(joint_module, inputs, **options)

    def unchanged(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    def inference(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        for graph in [each for each in module.modules() if isinstance(each, GraphModule)]:  # regions too
            found.extend(joint_pass.apply(graph.graph, everything))
            graph.recompile()
        return unchanged(module, inputs)

    compile_graph = aot_autograd(
        fw_compiler=unchanged,
        bw_compiler=unchanged,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    compiled: Callable[..., Any] = compile_graph(gm, example_inputs)
    return compiled


def _with_substitutions(
    rows: Sequence[Row], origins: Sequence[str], substitutions: Sequence[Substitution]
) -> list[Row]:
    """Merges both lists: a pattern's report replaces the row of its product; products of the backward come last."""
    by_origin = {found.origin: found for found in substitutions if not found.backward}
    merged = []
    for row, origin in zip(rows, origins, strict=True):
        found = by_origin.pop(origin, None)
        merged.append(row if found is None else replace(row, kernel=_made(found), reason=found.reason, estimated=None))
    backward = [found for found in substitutions if found.backward]
    for found in (*by_origin.values(), *backward):
        op = f"{found.target}, backward of {found.origin}" if found.backward else found.target
        merged.append(Row(node=found.node, source=found.source, op=op, weight="", shape=found.shape,
                          kernel=_made(found), reason=found.reason, backward=found.backward))  # fmt: skip
    return merged


def _made(found: Substitution) -> str | None:
    return None if found.reason else found.made.replace(".default", "").replace(".", "::")


def _kernel_name(gemm: Gemm, recipe: Recipe, target: str | None) -> str:
    """The name of the product's kernel, from the description of its launch; nothing is run.

    For a target, the compilers of that machine count and not those that are installed here.
    """
    if target is None:
        return _planned_name(gemm, recipe, None)
    with nvrtc.elsewhere():
        try:
            return _planned_name(gemm, recipe, target)
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise
            return "a kernel in Triton, which is not installed here: pip install triton names it"


def _planned_name(gemm: Gemm, recipe: Recipe, target: str | None) -> str:
    site = gemm.site
    chip = chip_for(site.device, target)
    on = targets.target_of(site.device)
    named = None if target is None else targets.named_target(target)
    if named is not None:
        on = named[1] if chip is None else replace(named[1], multiprocessors=chip.multiprocessors)
    if on.backend == "cpu":
        return "reference (plain PyTorch)"
    if gemm.groups is not None and site.groups:
        return find_grouped.kernel_name(site, gemm.groups.over, recipe, on, chip, _dtype_of(gemm))
    batch, m, n, k = (size_of(size) or 1 for size in (site.batch, site.m, site.n, site.k))
    lead = () if batch == 1 else (batch,)
    native = targets.native_e4m3(on)
    a = _operand((*lead, m, k), recipe.activation_block, recipe.activation_dtype or native, recipe, False)
    b = _operand((*lead, k, n), recipe.weight_block, recipe.weight_dtype or native, recipe, True)
    out = torch.empty(*lead, m, n, dtype=_dtype_of(gemm), device="meta")
    bias = None if gemm.bias is None else out.new_empty(n)
    fast = recipe.accumulate == "fast"
    op = scaled_mm.dispatch_of(recipe.batch_invariant, fast)
    if is_mx(a.scale, a.block, b.scale, b.block) and not recipe.batch_invariant:
        op = mx_mm.MX_MM
    product = ScaledProduct(a=a, b=b, bias=bias, out=out, target=on, fast=fast, chip=chip)
    if (reason := op.unserved(product)) is not None:
        return f"reference (plain PyTorch; {reason})"
    # Here a call leaves out kernels that this machine can't compile or load; of another machine that is not known.
    launches = op.loadable(product)[1] if target is None else op.plan(product)
    return described(launches) if launches else "reference (plain PyTorch)"


def _dtype_of(gemm: Gemm) -> torch.dtype:
    """The type of a product's output: under autocast not that of its operands."""
    out = value(gemm.node)
    return gemm.site.dtype if out is None else out.dtype


def _operand(shape: tuple[int, ...], block: Block, dtype: torch.dtype, recipe: Recipe, column_major: bool) -> Quantized:
    data = torch.empty_strided(shape, matrix_strides(shape, column_major, 16), dtype=dtype, device="meta")
    scales, kind = scale_shape(shape, block), scale_dtype(recipe.scale)
    strides = matrix_strides(scales, scale_is_column_major(column_major, block), 16 // kind.itemsize)
    return Quantized(data, torch.empty_strided(scales, strides, dtype=kind, device="meta"), block)


@contextmanager
def _without_cache(model: Callable[..., Any], keywords: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs a transformers model on meta without its cache of keys, whose first tensor Dynamo can't trace there.

    The keyword arguments of the call follow; a `use_cache=True` among them would win over the config.
    """
    configs: list[tuple[Any, Any]] = []
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        if keywords.get("use_cache") and any(hasattr(config, "use_cache") for config in found.values()):
            keywords = {**keywords, "use_cache": False}
        configs = [(config, config.use_cache) for config in found.values() if getattr(config, "use_cache", False)]
    try:
        for config, _ in configs:
            config.use_cache = False
        yield keywords
    finally:
        for config, before in configs:
            config.use_cache = before


@contextmanager
def _uncompiled(model: Callable[..., Any]) -> Iterator[None]:
    """Runs modules as they were before `Module.compile`, which would hand their graphs to the backend given there."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    compiled = [(module, call) for module in modules if (call := module._compiled_call_impl) is not None]
    _warn_of_no_effect([module for module, _ in compiled])
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def _warn_of_no_effect(compiled: Sequence[nn.Module]) -> None:
    """Warns where `Module.compile` was called, but for modules alone whose forward is PyTorch's own."""
    if torch.__version__ >= "2.14":  # Dynamo begins at the module's call
        return
    parts = (part for module in compiled for part in module.modules())
    if compiled and all(type(part).forward.__module__.startswith("torch.nn.") for part in parts):
        _LOG.warning(
            "explain: Module.compile compiles nothing of a %s, whose forward is PyTorch's own, which Dynamo skips;"
            ' torch.compile(model, backend="fp8fn") does what is shown',
            type(compiled[0]).__name__,
        )


@contextmanager
def _unchanged(model: Callable[..., Any]) -> Iterator[None]:
    """Restores the buffers of a module and the random state."""
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])
