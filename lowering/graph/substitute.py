"""`Substitution`: the report of a pattern about one product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `import fp8fn` imports this file, and views import SymPy, which takes half a second
    from fp8fn.lowering.graph.views import Size


@dataclass(frozen=True)
class Substitution:
    """One product: the op `made` that replaced it, or the `reason` why it was left alone.

    `origin` is the node of Dynamo's graph that the product comes from; `backward` if by differentiation.
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
