"""Symbolic views: which element of a tensor is where after a chain of views, also for symbolic sizes.

A dimension of a view is a product of runs. In `w (N, K)` viewed as `(N/128, 128, K/128, 128)`, the first dimension is
the run of `N/128` rows with step 128, and the second is the run of 128 rows with step 1. In a scale `(N/128, K/128)`
repeated to `(N, K)`, the first dimension is the run of its `N/128` rows, and inside it a run of 128 copies. Two such
views together tell which scale multiplies which element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

Size: TypeAlias = int  # or a SymInt, which computes as one
aten = torch.ops.aten


@dataclass(frozen=True)
class Run:
    """`size` elements along `axis` of the tensor with a step of `step`; copies of one element if `axis` is None."""

    size: Size
    axis: int | None
    step: Size = 1


@dataclass(frozen=True)
class Dim:
    """`size` positions, the product of the runs, outermost first; `cut` if a slice removed the last positions."""

    size: Size
    runs: tuple[Run, ...]
    cut: bool = False


View: TypeAlias = tuple[Dim, ...]


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal; adds no guard."""
    return _known(a, b)


def _known(a: Size, b: Size) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq  # imports SymPy

    return bool(statically_known_true(sym_eq(a, b)))


def is_less(a: Size, b: Size) -> bool:
    """Whether a size is known to be less than another; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports SymPy

    return bool(statically_known_true(a < b))


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are known to be equal; adds no guard."""
    return len(a) == len(b) and all(map(equal, a, b))


def as_matrix(shape: Sequence[Size]) -> list[Size]:
    """The shape of the matrix that merges all leading axes.

    The merged axis is -1, since graphs hold no symbolic numbers, except where an empty last axis makes -1 ambiguous.
    """
    return [prod(shape[:-1]) if equal(shape[-1], 0) else -1, shape[-1]]


def as_shape(shape: Sequence[Size]) -> list[Size] | None:
    """The shape with -1 for a size that is not known, or None where that is ambiguous."""
    unknown = sum(not isinstance(size, int) for size in shape)
    if unknown > 1 or (unknown and 0 in [size for size in shape if isinstance(size, int)]):
        return None
    return [size if isinstance(size, int) else -1 for size in shape]


def divides(divisor: Size, size: Size) -> bool:
    """Whether `size` is known to be a multiple of `divisor`; zero divides nothing, since no axis can be split by it."""
    if equal(divisor, 0):
        return False
    return _known(size % divisor, 0)


def identity(shape: Sequence[Size]) -> View:
    """The view of the whole tensor."""
    return tuple(Dim(size, () if equal(size, 1) else (Run(size, axis),)) for axis, size in enumerate(shape))


def through(view: View, node: Node) -> View | None:
    """The view after `node`, or None if `node` is not a known view."""
    target, args = node.target, node.args
    if target in (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default):
        return view
    if target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return reshaped(view, node.meta["val"].shape)
    if target is aten.expand.default:
        return expanded(view, node.meta["val"].shape)
    if target is aten.unsqueeze.default:
        dim = _dim(args[1], len(view) + 1)
        return (*view[:dim], Dim(1, ()), *view[dim:])
    if target in (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
        given = args[1] if len(args) > 1 else range(len(view))
        dims = {_dim(dim, len(view)) for dim in (given if isinstance(given, Sequence | range) else (given,))}
        return tuple(dim for i, dim in enumerate(view) if i not in dims or not equal(dim.size, 1))
    if target is aten.permute.default:
        return tuple(view[_dim(dim, len(view))] for dim in args[1])  # type: ignore[union-attr]
    if target is aten.t.default:
        return view[::-1]
    if target is aten.transpose.int:
        order = list(range(len(view)))
        first, second = (_dim(dim, len(view)) for dim in args[1:3])
        order[first], order[second] = second, first
        return tuple(view[dim] for dim in order)
    if target is aten.slice.Tensor:
        return _sliced(view, node)
    return None


def reshaped(view: View, shape: Sequence[Size]) -> View | None:
    """The view with its row-major positions split into `shape`; a cut dimension must stay whole."""
    items: list[Run | Dim] = []
    for dim in view:
        items += [dim] if dim.cut else dim.runs
    dims = []
    for size in shape:
        if items and isinstance(items[0], Dim) and equal(items[0].size, size):
            dims.append(items[0])
            items = items[1:]
            continue
        taken, items = take(items, size)
        if taken is None:
            return None
        dims.append(Dim(size, taken))
    return None if items else tuple(dims)


def take(items: Sequence[Run | Dim], size: Size) -> tuple[tuple[Run, ...] | None, list[Run | Dim]]:
    """The outermost `size` positions of the runs, splitting one if needed (None if unknown), and the rest."""
    left, taken, needed = list(items), [], size
    while not equal(needed, 1):
        run = left.pop(0) if left else None
        if not isinstance(run, Run):
            return None, left
        if divides(run.size, needed):
            taken.append(run)
            needed = needed // run.size
        elif divides(needed, run.size):
            inner = run.size // needed
            taken.append(replace(run, size=needed, step=run.step * inner))
            left.insert(0, replace(run, size=inner))
            needed = 1
        else:
            return None, left
    return tuple(taken), left


def expanded(view: View, shape: Sequence[Size]) -> View | None:
    """The view expanded to `shape`, as by `Tensor.expand` and broadcasting."""
    missing = len(shape) - len(view)
    dims = [Dim(1, ()) for _ in range(missing)] + list(view)
    found = []
    for dim, size in zip(dims, shape, strict=True):
        if equal(dim.size, size):
            found.append(dim)
        elif equal(dim.size, 1):
            found.append(Dim(size, (Run(size, None),)))
        else:
            return None
    return tuple(found)


def merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs, with each that continues the previous one merged into it."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and last.axis == run.axis and (run.axis is None or equal(last.step, run.step * run.size)):
            found[-1] = replace(run, size=last.size * run.size)
        else:
            found.append(run)
    return tuple(found)


def _sliced(view: View, node: Node) -> View | None:
    args = (*node.args, *(None,) * (5 - len(node.args)))
    dim, start, step = _dim(args[1] or 0, len(view)), args[2] or 0, 1 if args[4] is None else args[4]
    size = node.meta["val"].shape[dim]
    if equal(size, view[dim].size):
        return view
    if start != 0 or step != 1:
        return None
    return (*view[:dim], Dim(size, view[dim].runs, cut=True), *view[dim + 1 :])


def _dim(dim: object, count: int) -> int:
    assert isinstance(dim, int)
    return dim % count if count else 0


def sized(x: Tensor, shape: Sequence[Size] | None = None) -> Tensor | None:
    """An empty meta tensor with the sizes that a dynamic graph was traced with; reading them adds no guard."""
    sizes, strides = list(x.shape), list(x.stride())
    if shape is not None:
        sizes, strides = list(shape), [x.stride(-2) if x.dim() > 1 else shape[-1], x.stride(-1)]
    known: list[Any] = [size if isinstance(size, int) else size.node.hint for size in (*sizes, *strides)]
    if None in known:
        return None
    return torch.empty_strided(known[: len(sizes)], known[len(sizes) :], dtype=x.dtype, device="meta")
