"""What every pattern reports: a `Substitution` for each product that it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `explain` imports this file with fp8fn, and views bring SymPy: half a second
    from fp8fn.lowering.graph.views import Size


@dataclass(frozen=True)
class Substitution:
    """What became of one product: the op `made` in its place, or the `reason` why it was left alone.

    `origin` is the node of Dynamo's graph that the product comes of, `backward` whether by differentiation.
    """

    pattern: str
    node: str
    source: str
    target: str
    shape: tuple[Size, Size, Size]
    made: str
    reason: str | None
    origin: str = ""
    backward: bool = False
