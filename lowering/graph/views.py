"""Which element of a tensor stands where after a chain of views, without running it: also for symbolic sizes.

A dimension of a view is a product of runs. `w (N, K)` seen as `(N/128, 128, K/128, 128)` has in its first dimension
the run of `N/128` rows that are 128 apart, and in its second the run of 128 rows that are neighbours; a scale
`(N/128, K/128)` repeated to `(N, K)` has in its first dimension the run of its `N/128` rows, and in each of them a run
of 128 copies. Two such views say together which scale multiplies which element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

Size: TypeAlias = int  # or a SymInt, which computes as one
aten = torch.ops.aten


@dataclass(frozen=True)
class Run:
    """`size` elements, `step` apart along `axis` of the tensor; copies of one where `axis` is None."""

    size: Size
    axis: int | None
    step: Size = 1


@dataclass(frozen=True)
class Dim:
    """`size` positions, the product of the runs', the outermost first; `cut` where later ones were sliced away."""

    size: Size
    runs: tuple[Run, ...]
    cut: bool = False


View: TypeAlias = tuple[Dim, ...]


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal, with no guard on either."""
    return bool(statically_known_true(sym_eq(a, b)))


def as_matrix(shape: Sequence[Size]) -> list[Size]:
    """The shape of the matrix with all leading axes as one.

    That one is -1, since graphs hold no symbolic numbers, unless the last axis is empty and -1 could be any number.
    """
    return [prod(shape[:-1]) if equal(shape[-1], 0) else -1, shape[-1]]


def divides(divisor: Size, size: Size) -> bool:
    """Whether a size is known to be a multiple of another; zero divides nothing, for no axis can be dealt out by it."""
    if equal(divisor, 0):
        return False
    return bool(statically_known_true(sym_eq(size % divisor, 0)))


def identity(shape: Sequence[Size]) -> View:
    """The tensor itself."""
    return tuple(Dim(size, () if equal(size, 1) else (Run(size, axis),)) for axis, size in enumerate(shape))


def through(view: View, node: Node) -> View | None:
    """The view after `node`, or None where it is no view or nothing is known of it."""
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
    """Row-major positions dealt out again; what was cut keeps together."""
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
    """The outermost `size` positions of some runs, splitting one where needed, and what is left; None if unknown."""
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
    """As `Tensor.expand` and broadcasting do."""
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
    """Runs that continue each other as one."""
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
