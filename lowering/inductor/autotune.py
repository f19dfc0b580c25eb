"""Under Inductor's `max_autotune`: our product or cuBLASLt's, whichever Inductor times as the faster one.

A lowering of `fp8fn::scaled_mm` hands Inductor's own selection two choices, where cuBLASLt takes the operands and all
sizes are known: the op, which our tables decide about, and the op of PyTorch that `library.plan` would call. Either
becomes the call of an op in the generated code, so that what Inductor caches needs no Python of ours but the ops. In
all other cases, and without `max_autotune`, the lowering is the one that Inductor gives to every op that it knows not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Node

from fp8fn.lowering.graph.substitute import arguments_of
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import ScaledProduct
from fp8fn.version import __version__

# In the log, and in the key under which Inductor keeps times: those of another version are not these kernels'.
NAME: Final = f"fp8fn_{__version__}_scaled_mm"
OURS: Final = "fp8fn_scaled_mm"
THEIRS: Final = "fp8fn_cublaslt"


class Choices(NamedTuple):
    """Inductor's `ExternKernelChoice` of either kernel, of which there may be one of a name in a process."""

    ours: Any
    theirs: Any


def wanted() -> bool:
    """Whether the compilation that runs is to time kernels."""
    import torch._inductor.config as config

    # Where products are timed by other processes, they would have to know these choices.
    other_processes = config.pipeline_max_autotune_gemm or config.autotune_in_subproc
    return bool((config.max_autotune or config.max_autotune_gemm) and not other_processes)


@cache
def install() -> None:
    """Puts the lowering in the place of Inductor's own for unknown ops, which it still calls."""
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    op = torch.ops.fp8fn.scaled_mm.default
    if op not in lowerings:  # as GraphLowering.call_function does when it first meets an op
        constraint = tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
        make_fallback(op, layout_constraint=constraint)
    lowerings[op] = _lowering(lowerings[op])


def _lowering(fallback: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_mm(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        recipe = peer(node) if wanted() and node.target is torch.ops.fp8fn.scaled_mm.default else None
        if recipe is None or V.graph.cpp_wrapper:
            return fallback(*args, **kwargs)
        return _select(node, recipe, *args, **kwargs)

    return scaled_mm


def peer(node: Node) -> str | None:
    """The recipe of `library.RECIPES` by which cuBLASLt multiplies what an `fp8fn::scaled_mm` is given, or None."""
    given = {name: _value(argument) for name, argument in arguments_of(node).items()}
    out: Tensor = node.meta["val"]
    tensors = [value for value in (*given.values(), out) if isinstance(value, Tensor)]
    if not all(isinstance(size, int) for tensor in tensors for size in (*tensor.shape, *tensor.stride())):
        return None  # its scales have to lie by the very number of rows
    product = ScaledProduct(
        a=Quantized(given["a"], given["a_scale"], tuple(given["a_block"])),
        b=Quantized(given["b"], given["b_scale"], tuple(given["b_block"])),
        bias=given["bias"], out=out, target=targets.target_of(out.device),
    )  # fmt: skip
    if out.numel() == 0 or cublaslt.accepts(product) is not None:
        return None
    return cublaslt.recipe_of(product)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _select(
    node: Node, recipe: str, a: Any, a_scale: Any, a_block: Sequence[int], b: Any, b_scale: Any, b_block: Sequence[int],
    bias: Any = None, out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """The faster of both choices, as Inductor times them on random operands, or has timed them before."""
    from torch._inductor import ir
    from torch._inductor.select_algorithm import autotune_select_algorithm

    out: Tensor = node.meta["val"]
    given = arguments_of(node)
    names = ("a", "a_scale", "b", "b_scale", *(() if bias is None else ("bias",)))
    inputs = [
        # With the strides that `peer` saw: Inductor may have chosen others for what it computes itself.
        ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, given[name].meta["val"].stride()))
        for name, x in zip(names, (a, a_scale, b, b_scale, bias), strict=False)
    ]
    layout = ir.FixedLayout(out.device, out.dtype, list(out.shape), list(out.stride()))
    ours, theirs = _choices()
    blocks = {"a_block": tuple(a_block), "b_block": tuple(b_block)}
    bound = [
        ours.bind(inputs, layout, **blocks, dtype=out.dtype),
        theirs.bind(inputs, layout, recipe=recipe, dtype=out.dtype),
    ]
    found = autotune_select_algorithm(NAME, bound, inputs, layout, return_multi_template=False)
    return found[0] if isinstance(found, tuple) else found  # since 2.12 with the choice


@cache
def _choices() -> Choices:
    from torch._inductor.select_algorithm import ExternKernelChoice

    return Choices(
        ExternKernelChoice(_ours, name=OURS, has_out_variant=False, kernel_creator=_our_node),
        ExternKernelChoice(_theirs, name=THEIRS, has_out_variant=False, kernel_creator=_their_node),
    )


def _ours(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, a_block: Any, b_block: Any,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """What is timed of ours."""
    out: Tensor = torch.ops.fp8fn.scaled_mm(a, a_scale, a_block, b, b_scale, b_block, bias, dtype)
    return out


def _our_node(
    a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any = None, *, a_block: Any, b_block: Any, dtype: torch.dtype
) -> Any:
    """What stands in the graph where ours is the faster one."""
    from torch._inductor import ir

    op = torch.ops.fp8fn.scaled_mm.default
    return ir.FallbackKernel.create(op, a, a_scale, list(a_block), b, b_scale, list(b_block), bias, dtype)


def _theirs(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, recipe: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """What is timed of PyTorch's; where it refuses the operands, Inductor leaves a choice out for a RuntimeError."""
    name, given = cublaslt.arguments(recipe, a, a_scale, b, b_scale, bias, dtype)
    try:
        out: Tensor = getattr(torch.ops.aten, name)(*given)
    except ValueError as error:
        raise RuntimeError(f"{name}: {error}") from error
    return out


def _their_node(
    a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any = None, *, recipe: str, dtype: torch.dtype
) -> Any:
    """What stands in the graph where PyTorch's is the faster one."""
    from torch._inductor import ir

    inputs = [x for x in (a, a_scale, b, b_scale, bias) if x is not None]
    # The arguments are views of the operands: of which, and with which strides, is seen on tensors without memory.
    likes = [_like(x) for x in inputs]
    left, left_scale, right, right_scale, *rest = likes
    name, given = cublaslt.arguments(
        recipe, left, left_scale, right, right_scale, rest[0] if rest else None, dtype
    )  # fmt: skip
    owners = {like.untyped_storage()._cdata: x for like, x in zip(likes, inputs, strict=True)}

    def view(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        storage, before = ir.as_storage_and_layout(owners[argument.untyped_storage()._cdata])
        layout = ir.FixedLayout(
            before.device, before.dtype, list(argument.shape), list(argument.stride()), before.offset
        )
        return ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))

    op = getattr(torch.ops.aten, name).default
    return ir.FallbackKernel.create(op, *pytree.tree_map(view, given))


def _like(x: Any) -> Tensor:
    sizes, strides = ([int(size) for size in sizes] for sizes in (x.get_size(), x.get_stride()))
    return torch.empty_strided(sizes, strides, dtype=x.get_dtype(), device="meta")
