"""The torch.compile backend `"fp8fn"`: eligible products go to FP8, the rest to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8fn.lowering.joint_pass import with_pass
from fp8fn.lowering.post_grad_pass import with_fusion
from fp8fn.lowering.recipe_pass import rewrite
from fp8fn.ops.layout import without_guards
from fp8fn.ops.recipe import parse_recipe, recipe_key
from fp8fn.site import check_where, takes_everything

OPTIONS = ("recipe", "where", "fuse_quantize")


def fp8fn(
    gm: GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="fp8fn", options={"recipe": …, "where": …})`.

    `recipe` is a `Recipe` or a preset's name (default `"blockwise"`). `where` selects products: a function of a
    `fp8fn.Site`, or glob patterns of the weights' names; `"*"` also takes `torch._scaled_grouped_mm`.
    `mode` and all other options are Inductor's; with its `max_autotune` each product on a GPU is timed against
    cuBLASLt's, and the faster one kept.

    `fuse_quantize` is about activations that are computed where they are quantized, also those of FP8 checkpoints: they
    are then not rounded to 16 bits first. By default `silu(gate) * up` and `rms_norm(x) * weight` are quantized by the
    op that computes them, on a device that has its kernel (Hopper), and any other elementwise result in `(1, 128)`
    blocks by Inductor's own kernel for it. With True Inductor quantizes in `(1, 32)` and in whole rows as well; with
    False neither is done. Columns, and both orientations at once, as training needs them, are never Inductor's.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    given = dict(options or {})
    recipe = parse_recipe(recipe_key(given.pop("recipe", None) or "blockwise"))
    where = given.pop("where", None)
    check_where(where)
    rewrite(gm, recipe, where)
    fuse = given.pop("fuse_quantize", None)
    patches = with_fusion(with_pass(_inductor_options(mode, given), takes_everything(where)), fuse)

    def inner(*args: Any, **kwargs: Any) -> Any:
        # Inductor asks whether a graph's results are dense, and FP8 data for the backward is among them.
        with without_guards():
            return compile_fx_inner(*args, **kwargs)

    compiled = compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches)
    return cast(Callable[..., Any], compiled)


def _inductor_options(mode: str | None, given: dict[str, Any]) -> dict[str, Any]:
    patches = dict(torch._inductor.list_mode_options(mode)) if mode and mode != "default" else {}
    known = torch._inductor.list_options()
    for name, value in given.items():
        key = name.replace("-", "_")
        if key not in known:
            raise ValueError(f"options[{name!r}] is neither an option of fp8fn {OPTIONS} nor one of Inductor")
        patches[key] = value
    return patches
