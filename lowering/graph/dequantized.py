"""Finds tensors of an ATen graph that are FP8 data times scales, in any spelling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from fp8fn.lowering.graph.emit import arranged, call
from fp8fn.lowering.graph.nodes import tensor_of, value
from fp8fn.lowering.graph.views import (
    Dim,
    Run,
    Size,
    View,
    aten,
    divides,
    equal,
    expanded,
    identity,
    merged,
    same_sizes,
    take,
    through,
)
from fp8fn.ops.formats import FP8_DTYPES, SCALE_DTYPES
from fp8fn.ops.layout import BLOCKS, WHOLE, Block, scale_shape

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CASTS: Final = (torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype)
_MUL, _DIV = aten.mul.Tensor, aten.div.Tensor


@dataclass(frozen=True)
class Dequantized:
    """`data * scale` as `view` of the data, or `data / scale` if `inverse`.

    `steps` maps an axis of the data to the axis of the scale and to the number of elements that share a scale.
    """

    data: Node
    scale: Node
    inverse: bool
    view: View
    steps: dict[int, tuple[int, Size]]


@dataclass(frozen=True)
class Operand:
    """A dequantized matrix `(R, C)` or batch: the axes of the data in each of its dimensions, and the block."""

    found: Dequantized
    axes: tuple[tuple[int, ...], ...]
    shape: tuple[Size, ...]
    block: Block

    @property
    def dtype(self) -> torch.dtype:
        return tensor_of(self.found.data).dtype

    @property
    def device(self) -> torch.device:
        return tensor_of(self.found.data).device

    def emit(self, graph: Graph) -> tuple[Node, Node]:
        """Adds nodes of the data `(B?, R, C)` and of its float32 or e8m0 scales at the graph's insertion point."""
        found = self.found
        lead = tuple(zip(self.axes[:-2], self.shape[:-2], strict=True))
        batch = [size if group else 1 for group, size in lead]
        data = arranged(graph, found.data, [axis for group in self.axes for axis in group], (*batch, *self.shape[-2:]))
        order = [found.steps[axis][0] for group in self.axes for axis in group if axis in found.steps]
        batch = [size if found.steps.keys() & set(group) else 1 for group, size in lead]
        scale = arranged(graph, found.scale, order, (*batch, *scale_shape(self.shape[-2:], self.block)))
        if scale.meta["val"].dtype not in SCALE_DTYPES or found.inverse:
            scale = call(graph, torch.ops.prims.convert_element_type.default, scale, torch.float32)
        if found.inverse:
            scale = call(graph, aten.reciprocal.default, scale)
        return self._expanded(graph, data), self._expanded(graph, scale)

    def _expanded(self, graph: Graph, node: Node) -> Node:
        """The node, expanded to the batch of the operand."""
        shape = node.meta["val"].shape
        if same_sizes(shape[:-2], self.shape[:-2]):
            return node
        return call(graph, aten.expand.default, node, [*self.shape[:-2], *shape[-2:]])


def find_dequantized(node: Node) -> Dequantized | None:
    """The FP8 data times block scales that `node` is a view and a cast of, or None."""
    product, path = _behind(node, (_MUL, _DIV))
    if product is None or len(product.args) != 2 or not all(isinstance(arg, Node) for arg in product.args):
        return None
    shape = product.meta["val"].shape
    orders = [(0, 1)] if product.target is _DIV else [(0, 1), (1, 0)]
    for i, j in orders:
        data, data_view = _leaf(product.args[i], shape)
        if data is None or data.meta["val"].dtype not in FP8_DTYPES:
            continue
        scale, scale_view = _leaf(product.args[j], shape)
        if scale is None or scale.meta["val"].dtype not in (*SCALE_DTYPES, *FLOATS):
            return None
        steps = _steps(data_view, scale_view, data.meta["val"].shape)
        view = _along(data_view, path)
        if steps is None or view is None:
            return None
        return Dequantized(data, scale, product.target is _DIV, view, steps)
    return None


def _behind(node: Node, targets: Sequence[Any]) -> tuple[Node | None, list[Node]]:
    """The call of one of `targets` behind the views and casts of `node`, and the nodes between."""
    path: list[Node] = []
    current: Any = node
    while isinstance(current, Node) and current.op == "call_function" and value(current) is not None:
        if current.target in targets:
            return current, path[::-1]
        estimated = _straight_through(current)
        if estimated is None:
            path.append(current)
        current = estimated or (current.args[0] if current.args else None)
    return None, path


def _leaf(node: Any, shape: Sequence[Size]) -> tuple[Node | None, View]:
    """The tensor behind the views, casts and copies of `node`, and its view broadcast to `shape`."""
    path: list[Node] = []
    while isinstance(node, Node) and node.op == "call_function" and value(node) is not None and node.args:
        before = _uncopied(node)
        if before is None and not _is_view_or_cast(node):
            break
        path.append(node)
        node = node.args[0] if before is None else before
    if value(node) is None:
        return None, ()
    view = _along(identity(node.meta["val"].shape), path[::-1])
    view = None if view is None else expanded(view, shape)
    return (None, ()) if view is None else (node, view)


def _along(view: View, path: Sequence[Node]) -> View | None:
    """The view after all nodes of a path, or None if one is unknown."""
    current: View | None = view
    for node in path:
        if current is None:
            return None
        if _uncopied(node) is not None:
            current = expanded(current, node.meta["val"].shape)
        elif not _is_cast(node):
            current = through(current, node)
    return current


def _is_cast(node: Node) -> bool:
    return node.target in _CASTS and node.meta["val"].dtype in FLOATS


def _is_view_or_cast(node: Node) -> bool:
    given = value(node.args[0])
    return _is_cast(node) or (given is not None and through(identity(given.shape), node) is not None)


def _straight_through(node: Node) -> Node | None:
    """The `q` in `x + (q - x).detach()`, the straight-through estimator, or None."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for x, rest in (node.args, node.args[::-1]):
        while isinstance(rest, Node) and rest.target in (aten.detach.default, aten.alias.default):
            rest = rest.args[0]
        if isinstance(rest, Node) and rest.target is aten.sub.Tensor and not rest.kwargs and rest.args[1] is x:
            return rest.args[0] if isinstance(rest.args[0], Node) else None
    return None


def _uncopied(node: Node) -> Node | None:
    """The other operand of a product with ones, which `torch.kron` contains, or None."""
    if node.target is _MUL and len(node.args) == 2:
        for i, arg in enumerate(node.args):
            full, _ = _behind(arg, (aten.full.default,)) if isinstance(arg, Node) else (None, [])
            other = node.args[1 - i]
            if full is not None and full.args[1] == 1 and isinstance(other, Node):
                return other
    return None


def _steps(data: View, scale: View, sizes: Sequence[Size]) -> dict[int, tuple[int, Size]] | None:
    """For each axis of the data along which the scale varies: the scale's axis, and the elements that share a scale."""
    found: dict[int, tuple[int, Size]] = {}
    for along, dim in zip(data, scale, strict=True):
        runs: Sequence[Run | Dim] = along.runs
        if along.cut:
            return None
        if all(run.axis is None for run in dim.runs):  # one scale serves the whole dimension
            continue
        if dim.cut:
            if not _cut_steps(along.runs, dim, found):
                return None
            continue
        for run in dim.runs:
            taken, runs = take(runs, run.size)
            if taken is None:
                return None
            if run.axis is None:
                continue
            if len(taken) != 1 or taken[0].axis is None or not equal(run.step, 1) or taken[0].axis in found:
                return None
            if not equal(taken[0].size * taken[0].step, sizes[taken[0].axis]):  # repeated as a whole
                return None
            found[taken[0].axis] = (run.axis, taken[0].step)
        if runs and dim.runs:
            return None
    return found


def _cut_steps(runs: tuple[Run, ...], dim: Dim, found: dict[int, tuple[int, Size]]) -> bool:
    """Adds the step of a scale that was repeated for whole blocks and then sliced to the data's size."""
    if len(runs) != 1 or runs[0].axis is None or not equal(runs[0].step, 1) or not 1 <= len(dim.runs) <= 2:
        return False
    outer, step = dim.runs[0], prod(run.size for run in dim.runs[1:])
    if outer.axis is None or not equal(outer.step, 1) or any(run.axis is not None for run in dim.runs[1:]):
        return False
    if equal(step, 0) or not equal((dim.size + step - 1) // step, outer.size):
        return False
    found[runs[0].axis] = (outer.axis, step)
    return True


def find_operand(node: Any) -> Operand | None:
    """`node`, a matrix or a batch, as FP8 data with scales; None if it is something else or in an unknown block."""
    found = find_dequantized(node) if isinstance(node, Node) else None
    if found is None:
        return None
    shape, sizes = tuple(node.meta["val"].shape), found.data.meta["val"].shape
    axes = _axes_of_dims(found.view, sizes)
    if axes is None or len(axes) not in (2, 3):
        return None
    steps: list[Size | None] = []
    for group in axes:
        known = [axis for axis in group if axis in found.steps]
        rest = group[len(known) :]
        if known != [*group[: len(known)]] or not all(equal(found.steps[axis][1], 1) for axis in known[:-1]):
            return None
        if rest and known and not divides(found.steps[known[-1]][1], sizes[known[-1]]):
            return None
        steps.append(found.steps[known[-1]][1] * prod(sizes[axis] for axis in rest) if known else None)
    if len(axes) == 3 and steps[0] is not None and not equal(steps[0], 1):
        return None
    block = _block(shape[-2:], steps[-2:])
    return None if block is None else Operand(found, axes, shape, block)


def _axes_of_dims(view: View, sizes: Sequence[Size]) -> tuple[tuple[int, ...], ...] | None:
    """The axes of the data in each dimension; None unless each axis occurs once and whole."""
    groups: list[tuple[int, ...]] = []
    for place, dim in enumerate(view):
        runs = merged(dim.runs)
        if place < len(view) - 2 and all(run.axis is None for run in runs):
            groups.append(())  # all elements of the batch share one matrix
            continue
        if dim.cut or any(run.axis is None or not equal(run.step, 1) for run in runs):
            return None
        if any(not equal(run.size, sizes[run.axis]) for run in runs):  # type: ignore[index]
            return None
        groups.append(tuple(run.axis for run in runs if run.axis is not None))
    seen = sorted(axis for group in groups for axis in group)
    wanted = [axis for axis, size in enumerate(sizes) if not equal(size, 1)]
    return tuple(groups) if seen == wanted else None


def _block(sizes: Sequence[Size], steps: Sequence[Size | None]) -> Block | None:
    """The block in which `steps` elements of each axis share a scale; a step of None is the whole axis."""

    def fits(side: int, size: Size, step: Size | None) -> bool:
        if step is None:
            return side == WHOLE or (isinstance(size, int) and size <= side)
        return side != WHOLE and equal(side, step)

    for block in BLOCKS:
        if all(map(fits, block, sizes, steps)):
            return block
    return None
