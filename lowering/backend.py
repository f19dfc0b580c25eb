"""The torch.compile backend `"fp8fn"`: computes eligible products in FP8 and gives the graph to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8fn.lowering.causal_masks import drop_causal_masks
from fp8fn.lowering.grouped_queries import group_queries
from fp8fn.lowering.joint_pass import SubstitutionPass, with_pass
from fp8fn.lowering.monitor_pass import training, with_monitor
from fp8fn.lowering.post_grad_pass import with_fusion, with_pipeline
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.lowering.separate_regions import separated
from fp8fn.lowering.unpadded import by_padding
from fp8fn.lowering.watched_graph import check_every, watched
from fp8fn.ops.layout import without_guards
from fp8fn.ops.recipe import BACKEND_DEFAULT, SAVES, Recipe, parse_recipe, recipe_key
from fp8fn.ops.torch_private.core import prims_common
from fp8fn.site import check_where, takes_everything

OPTIONS = ("recipe", "where", "fuse_quantize", "save", "monitor", "batch_invariant", "async_tp")


def fp8fn(
    gm: GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="fp8fn", options={"recipe": …, "where": …})`.

    Args:
        gm: Graph that Dynamo traced.
        example_inputs: Its inputs.
        mode: Inductor's mode.
        options: `recipe` is a `Recipe` or a preset's name (default `"blockwise_square"`). `where` selects products: a
            function of a `fp8fn.Site`, or glob patterns of the weights' names; `"*"` also takes
            `torch._scaled_grouped_mm`, and an empty list selects none. Layers behind a graph break share a graph, which
            the first layer's names decide about. All options but these and those below are Inductor's.
            With Inductor's `max_autotune` each product on a GPU is timed against cuBLASLt, and the faster one is used.

    The option `fuse_quantize` fuses quantization into the computation of an activation, which is then not rounded to 16
    bits first. By default one op computes and quantizes `silu(gate) * up` and `rms_norm(x) * weight`, on devices that
    have its kernel (Hopper), and Inductor's generated kernels quantize any other elementwise result in `(1, 128)`
    blocks. True lets Inductor quantize in `(1, 32)` and in whole rows as well. Inductor never quantizes columns, or
    both orientations at once, as training needs them. Likewise on Hopper, one launch computes the products of up to 16
    rows by two or three FP8 weights, a product by an FP8 weight computes the `silu(gate) * up` of up to 8 rows that it
    reads, and at inference one launch computes that of many rows with both products. False disables all of these.

    The option `save` overrides the recipe's `save`: what the forward keeps for the backward. `"exact"`, the default,
    keeps no FP8 form of a weight, keys and values of grouped-query attention before they are repeated, and no second
    FP8 form of an activation that the backward can quantize again. Gradients are those of `"all"`, which leaves
    PyTorch's partitioner alone, but for the rounding of sums that Inductor fuses. `"fp8"` also keeps the inputs of an
    MLP's activation function in FP8.

    The option `batch_invariant` is that of the recipe, and holds for FP8 weights too: each row of a product in FP8 has
    the same bits whatever the number of rows and its place among them are. It fixes how activations are read.

    Attention reads keys and values before the model repeats them for its query heads, whatever `where` selects, and a
    mask that is known to be causal is left out: a kernel without it computes half as much. Results differ by the order
    of sums alone. If the first batch has an `attention_mask` of ones, then each call on a GPU reads whether its own has
    ones alone, and a batch with padding compiles the graph again. Graphs for lengths that vary are both compiled at
    once.

    The option `async_tp` multiplies a sequence while it is gathered, where the styles of `fp8fn.distributed` gather it
    in FP8 within the graph. It is False by default.

    The option `monitor` is a number of steps: every so many, the graph measures its operands in FP8, for
    `fp8fn.read_monitor`. Results have the same bits with and without it. A region that several layers share is then
    compiled for each of them.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    given = dict(options or {})
    chosen = given.pop("recipe", None)
    recipe = parse_recipe(recipe_key(BACKEND_DEFAULT if chosen is None else chosen))
    invariant = given.pop("batch_invariant", None)
    if invariant not in (None, False, True):
        raise ValueError(f"options['batch_invariant'] is {invariant!r}; use True or False")
    if invariant:
        recipe = replace(recipe, batch_invariant=True)
    where = given.pop("where", None)
    check_where(where)
    every = check_every(given.pop("monitor", None))
    fuse = given.pop("fuse_quantize", None)
    save = given.pop("save", None)
    async_tp = given.pop("async_tp", None)
    patches = _inductor_options(mode, given)
    drop_causal_masks(gm)

    def compile_graph(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        group_queries(gm)
        decisions = rewrite(gm, recipe, where, numbered=every is not None, replayed=_replays(patches))
        graph = watched(every, gm, decisions if every is None else separated(gm, decisions))
        own = with_pass(patches, takes_everything(where), recipe.batch_invariant)
        own = with_fusion(with_pipeline(own, async_tp), fuse)
        own = _with_partitioner(own, recipe, save, fuse is not False)
        if graph is not None:
            own = with_monitor(own, graph.state.first, graph.names)

        def inner(*args: Any, **kwargs: Any) -> Any:
            with _unguarded_density(), training(graph is not None and not kwargs.get("is_inference", False)):
                return compile_fx_inner(*args, **kwargs)

        compiled = cast(Callable[..., Any], compile_fx(gm, list(inputs), inner_compile=inner, config_patches=own))
        return compiled if graph is None else graph.counting(compiled)

    # The monitor counts the steps of one graph.
    return by_padding(gm, example_inputs, compile_graph) if every is None else compile_graph(gm, example_inputs)


def _inductor_options(mode: str | None, given: dict[str, Any]) -> dict[str, Any]:
    patches = dict(torch._inductor.list_mode_options(mode)) if mode and mode != "default" else {}
    known = torch._inductor.list_options()
    for name, value in given.items():
        key = name.replace("-", "_")
        if key not in known:
            raise ValueError(f"options[{name!r}] is neither an option of fp8fn {OPTIONS} nor one of Inductor")
        patches[key] = value
    return patches


def _replays(patches: dict[str, Any]) -> bool:
    """Whether Inductor captures the launches into a CUDA graph."""
    return bool(patches.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def _with_partitioner(patches: dict[str, Any], recipe: Recipe, save: str | None, fuse: bool) -> dict[str, Any]:
    """Inductor's options with fp8fn's partitioner, unless the user has another one or wants PyTorch's."""
    if save is not None and save not in SAVES:
        raise ValueError(f"options['save'] is {save!r}; use one of {SAVES}")
    own = patches.get("custom_partitioner_fn", torch._inductor.config.custom_partitioner_fn)
    if own is not None and save not in (None, "all"):
        raise ValueError(
            f"options['save'] is {save!r}, and Inductor's custom_partitioner_fn is {own!r}; set one of them"
        )
    saves = save or recipe.save
    if own is not None or saves == "all":
        return patches
    from fp8fn.lowering.inductor.partitioner import Partitioner
    from fp8fn.lowering.saved import SavePlan

    plan = SavePlan(replace(recipe, save=saves).save, recipe.keep_weights, fuse)
    return {**patches, "custom_partitioner_fn": Partitioner(plan, SubstitutionPass().uuid())}


@contextmanager
def _unguarded_density() -> Iterator[None]:
    """Inductor asks without a guard whether a graph's results are dense; FP8 data for the backward is among them.

    Its lowerings have guards as ever: without any, PyTorch 2.11 can't slice along a size that is a variable.
    """
    ask = prims_common.is_non_overlapping_and_dense_or_false

    def is_dense(tensor: Tensor) -> bool:
        with without_guards():
            return ask(tensor)

    prims_common.is_non_overlapping_and_dense_or_false = is_dense  # type: ignore[assignment]
    try:
        yield
    finally:
        prims_common.is_non_overlapping_and_dense_or_false = ask
