"""Which chip's measurements serve another chip, by what the devices say of themselves.

The number of multiprocessors decides how tiles fill the chip, so a table serves no chip with another number. Of chips
with the same number, that with the nearest memory bandwidth serves. A chip whose bandwidth is not known is served by
its own table alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fp8fn.ops.targets import Chip, facts_of

# Bandwidths by data sheet, and by clock and width, differ by less.
SAME: Final = 0.1


def nearest(chip: Chip, measured: Iterable[Chip]) -> tuple[Chip, str] | None:
    """The chip of `measured` that serves `chip`, and what to add to the table's name, "" for its own facts."""
    known = list(measured)
    if chip in known:
        return chip, ""
    facts = facts_of(chip)
    alike = [
        (abs(facts_of(other).bandwidth / facts.bandwidth - 1), other)
        for other in known
        if facts.bandwidth and facts_of(other).bandwidth and other.multiprocessors == facts.multiprocessors
    ]
    if not alike:
        return None
    off, other = min(alike)
    if off <= SAME:
        return other, ""
    return other, f" (nearest: {facts_of(other).bandwidth:.3g} TB/s for {facts.bandwidth:.3g})"
