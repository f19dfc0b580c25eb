"""A rank's part of a tensor that every rank can read, cut as DTensor cuts it: nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def part_of(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of `whole`, a view, by the mesh and the placements of the DTensor `like`."""
    for axis, ranks, rank in _cuts(like):
        size = whole.shape[axis]
        rows = -(-size // ranks)
        # All parts at once: those of an FP8Weight have blocks of one kind.
        sizes = [max(0, min(rows, size - each * rows)) for each in range(ranks)]
        whole = torch.split(whole, sizes, axis)[rank]
    return whole


def is_even(like: Any) -> bool:
    """Whether all ranks have parts of one size."""
    shape = list(like.shape)
    for axis, ranks, _ in _cuts(like):
        if shape[axis] % ranks:
            return False
        shape[axis] //= ranks
    return True


def placed_as(like: Any, part: Tensor) -> Tensor:
    """A DTensor of this rank's part, with the mesh, placements and shape of `like`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _cuts(like: Any) -> Iterator[tuple[int, int, int]]:
    """The axes along which a DTensor is cut, in turn, with the number of parts and this rank's.

    FSDP beside tensor parallelism on one axis cuts what tensor parallelism has cut, though its dimension of the mesh is
    the first.
    """
    mesh, placements = like.device_mesh, like.placements
    for dimension in sorted(range(mesh.ndim), key=lambda each: hasattr(placements[each], "split_factor")):
        axis = getattr(placements[dimension], "dim", None)
        if axis is not None:
            yield axis, mesh.size(dimension), mesh.get_local_rank(dimension)
