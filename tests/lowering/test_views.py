"""Views worked out from a graph against the views themselves, over random chains of them."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node

from fp8fn.lowering.graph.views import Dim, Run, View, aten, identity, merged, reshaped, through


def positions(view: View, shape: tuple[int, ...]) -> Tensor:
    """The flat index into a tensor of `shape` of each element of its view."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    dims = []
    for dim in view:
        offsets = torch.zeros(1, dtype=torch.int64)
        for run in dim.runs:
            step = 0 if run.axis is None else run.step * strides[run.axis]
            offsets = (offsets[:, None] + torch.arange(run.size) * step).flatten()
        dims.append(offsets[: dim.size])
    found = torch.zeros((), dtype=torch.int64)
    for offsets in dims:
        found = found[..., None] + offsets
    return found


def node_of(target: Any, x: Tensor, *args: Any) -> tuple[Node, Tensor]:
    """A call in a graph, and what it gives."""
    graph = Graph()
    placeholder = graph.placeholder("x")
    placeholder.meta["val"] = x
    node = graph.call_function(target, (placeholder, *args))
    node.meta["val"] = target(x, *args)
    return node, node.meta["val"]


def factorings(size: int) -> list[tuple[int, ...]]:
    return [(i, size // i) for i in range(1, size + 1) if size % i == 0]


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    """An op on a tensor of `shape`, and its other arguments."""
    count = len(shape)
    kind = draw(
        st.sampled_from(["view", "split", "merge", "permute", "unsqueeze", "squeeze", "expand", "slice", "clone"])
    )
    if kind == "split" and count:
        dim = draw(st.integers(0, count - 1))
        return aten.view.default, ([*shape[:dim], *draw(st.sampled_from(factorings(shape[dim]))), *shape[dim + 1 :]],)
    if kind == "merge" and count > 1:
        dim = draw(st.integers(0, count - 2))
        return aten.reshape.default, ([*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]],)
    if kind == "permute" and count:
        return aten.permute.default, (list(draw(st.permutations(range(count)))),)
    if kind == "unsqueeze":
        return aten.unsqueeze.default, (draw(st.integers(-1, count)),)
    if kind == "squeeze" and count:
        return aten.squeeze.dim, (draw(st.integers(-count, count - 1)),)
    if kind == "expand":
        sizes = [draw(st.sampled_from([2, 3])) if size == 1 else size for size in shape]
        return aten.expand.default, ([*([2] if draw(st.booleans()) else []), *sizes],)
    if kind == "slice" and count:
        dim = draw(st.integers(0, count - 1))
        return aten.slice.Tensor, (dim, 0, draw(st.integers(1, shape[dim])))
    return aten.clone.default, ()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_chain_of_views_is_worked_out_or_left_alone(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    x = torch.arange(prod(shape)).view(shape)
    view: View | None = identity(shape)
    for _ in range(data.draw(st.integers(1, 6))):
        target, args = data.draw(steps(tuple(x.shape)))
        if target is aten.view.default:
            target = aten.reshape.default  # of what a permutation left without strides
        if x.numel() > 4000:
            break
        node, x = node_of(target, x, *args)
        view = through(view, node)
        if view is None:
            return
    assert view is not None
    assert tuple(dim.size for dim in view) == tuple(x.shape)
    assert torch.equal(positions(view, shape).expand(x.shape), x)


def test_a_split_and_a_merge_are_the_identity() -> None:
    split = reshaped(identity((256, 384)), (2, 128, 3, 128))
    assert split == (
        Dim(2, (Run(2, 0, 128),)), Dim(128, (Run(128, 0, 1),)), Dim(3, (Run(3, 1, 128),)), Dim(128, (Run(128, 1, 1),)),
    )  # fmt: skip
    whole = reshaped(split, (256, 384))
    assert whole is not None
    assert [merged(dim.runs) for dim in whole] == [(Run(256, 0),), (Run(384, 1),)]


def test_what_has_no_size_in_common_is_unknown() -> None:
    assert reshaped(identity((6, 4)), (8, 3)) is None


def test_a_slice_is_unknown_from_the_middle() -> None:
    for args in ((0, 1, 4), (0, 0, 4, 2)):
        node, _ = node_of(aten.slice.Tensor, torch.arange(12).view(6, 2), *args)
        assert through(identity((6, 2)), node) is None


def test_all_positions_of_a_repeated_scale() -> None:
    scale = torch.arange(6).view(2, 3)
    node, repeated = node_of(aten.expand.default, scale[:, None], [2, 4, 3])
    view = through(identity((2, 1, 3)), node)
    assert view is not None
    flat = reshaped(view, (8, 3))
    assert flat is not None
    for i, j in product(range(8), range(3)):
        assert positions(flat, (2, 1, 3))[i, j] == repeated.reshape(8, 3)[i, j]
