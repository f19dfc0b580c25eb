"""Under Inductor's `max_autotune`: fp8fn's product or cuBLASLt's, whichever Inductor times as faster.

If cuBLASLt accepts the operands and all sizes are known, a lowering of `fp8fn::scaled_mm` gives Inductor's selection
two choices: the op itself, and PyTorch's op that `cublaslt.plan` would call. Both become the call of an op in the
generated code, so that Inductor's cached code needs only the registered ops. In all other cases, and without
`max_autotune`, the op has Inductor's default lowering for unknown ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fp8fn.lowering.graph.nodes import arguments_of, tensor_of, value
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.torch_private.core import pytree
from fp8fn.version import __version__

# The name in the log and in Inductor's cache of times. It has the version, since another version has other kernels.
NAME: Final = f"fp8fn_{__version__}_scaled_mm"
OURS: Final = "fp8fn_scaled_mm"
THEIRS: Final = "fp8fn_cublaslt"


class Choices(NamedTuple):
    """Inductor's `ExternKernelChoice` of each kernel; a process may have only one of each name."""

    ours: Any
    theirs: Any


def wanted() -> bool:
    """Whether the current compilation times kernels."""
    import torch._inductor.config as config

    # Inductor's subprocesses for timing do not know these choices.
    other_processes = config.pipeline_max_autotune_gemm or config.autotune_in_subproc
    return bool((config.max_autotune or config.max_autotune_gemm) and not other_processes)


@cache
def install() -> None:
    """Registers the lowering, which still calls Inductor's default lowering for unknown ops."""
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    op = torch.ops.fp8fn.scaled_mm.default
    if op not in lowerings:  # as GraphLowering.call_function does for an op that is new to it
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
        return _select(node, recipe, args, kwargs)

    return scaled_mm


def peer(node: Node) -> str | None:
    """The recipe of `cublaslt.RECIPES` that computes a node of `fp8fn::scaled_mm`, or None."""
    given: dict[str, Any] = {
        name: value(each) if isinstance(each, Node) else each for name, each in arguments_of(node).items()
    }
    if given["batch_invariant"] or given["fast_accumulation"]:
        return None
    out: Tensor = node.meta["val"]
    tensors = [each for each in (*given.values(), out) if isinstance(each, Tensor)]
    if not all(isinstance(size, int) for tensor in tensors for size in (*tensor.shape, *tensor.stride())):
        return None  # the layout of its scales depends on the exact number of rows
    product = ScaledProduct(
        a=Quantized(given["a"], given["a_scale"], tuple(given["a_block"])),
        b=Quantized(given["b"], given["b_scale"], tuple(given["b_block"])),
        bias=given["bias"],
        out=out,
        target=targets.target_of(out.device),
    )
    if out.numel() == 0 or cublaslt.accepts(product) is not None:
        return None
    return cublaslt.recipe_of(product)


def _select(node: Node, recipe: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The faster choice, as Inductor times them on random operands or has timed them before."""
    from torch._inductor import ir
    from torch._inductor.select_algorithm import autotune_select_algorithm

    out: Tensor = node.meta["val"]
    traced = arguments_of(node)
    given = {**dict.fromkeys(traced), **dict(zip(traced, args, strict=False)), **kwargs}
    names = ("a", "a_scale", "b", "b_scale", *(() if given["bias"] is None else ("bias",)))
    inputs = [
        # Require the strides that `peer` saw: Inductor may have chosen others for tensors that it computes.
        ir.ExternKernel.realize_input(
            ir.ExternKernel.require_exact_strides(given[name], tensor_of(traced[name]).stride())
        )
        for name in names
    ]
    layout = ir.FixedLayout(out.device, out.dtype, list(out.shape), list(out.stride()))
    ours, theirs = _choices()
    blocks = (*given["a_block"], *given["b_block"])
    bound = [
        ours.bind(inputs, layout, blocks=blocks, dtype=out.dtype),
        theirs.bind(inputs, layout, recipe=recipe, dtype=out.dtype),
    ]
    found = autotune_select_algorithm(NAME, bound, inputs, layout, return_multi_template=False)
    return found[0] if isinstance(found, tuple) else found  # PyTorch 2.12 and newer also return the choice


@cache
def _choices() -> Choices:
    from torch._inductor.select_algorithm import ExternKernelChoice

    return Choices(
        ExternKernelChoice(_ours, name=OURS, has_out_variant=False, kernel_creator=_our_node),
        ExternKernelChoice(_theirs, name=THEIRS, has_out_variant=False, kernel_creator=_their_node),
    )


def _ours(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, blocks: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The call that is timed for fp8fn's kernel."""
    out: Tensor = torch.ops.fp8fn.scaled_mm(a, a_scale, blocks[:2], b, b_scale, blocks[2:], bias, dtype)
    return out


def _our_node(
    a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any = None, *, blocks: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """The node of fp8fn's product in Inductor's graph."""
    from torch._inductor import ir

    op = torch.ops.fp8fn.scaled_mm.default
    return ir.FallbackKernel.create(op, a, a_scale, [*blocks[:2]], b, b_scale, [*blocks[2:]], bias, dtype)


def _theirs(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None, *, recipe: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The call that is timed for PyTorch's kernel; Inductor drops the choice after a RuntimeError."""
    name, given = cublaslt.arguments(recipe, a, a_scale, b, b_scale, bias, dtype)
    try:
        out: Tensor = getattr(torch.ops.aten, name)(*given)
    except ValueError as error:
        raise RuntimeError(f"{name}: {error}") from error
    return out


def _their_node(
    a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any = None, *, recipe: str, dtype: torch.dtype
) -> Any:
    """The node of PyTorch's product in Inductor's graph."""
    from torch._inductor import ir

    inputs = [x for x in (a, a_scale, b, b_scale, bias) if x is not None]
    # The arguments are views of the operands. Meta tensors show of which operand, and with which strides.
    likes = [_like(x) for x in inputs]
    left, left_scale, right, right_scale, *rest = likes
    name, given = cublaslt.arguments(recipe, left, left_scale, right, right_scale, rest[0] if rest else None, dtype)
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
