"""Tables of divisions: how blocks divide a product, by how many blocks there would be; JSON, the first that fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

FORMAT: Final = 1
# The multiprocessors of the card that was measured, on which `fewest` and `most` are counted.
CORES: Final = 132
COLUMNS: Final = ("constant", "rows", "fewest", "most", "along", "stages", "config")
_FOLDER: Final = Path(__file__).parent / "tables"
C = TypeVar("C")


@dataclass(frozen=True)
class Division(Generic[C]):
    """A configuration for products that it divides into `fewest` to `most` blocks on `CORES` multiprocessors.

    `along` are the numbers of blocks along K, in order of preference, and `stages` how many a block may have.
    """

    fewest: int
    most: int
    along: range
    stages: range
    config: C

    def parts(self, steps: int) -> Iterator[tuple[int, int]]:
        """Blocks along K of `steps` stages, and the stages that each of the blocks has: equally many."""
        for cluster in self.along:
            stages, rest = divmod(steps, cluster)
            if not rest and stages in self.stages:
                yield cluster, stages

    def has(self, blocks: int, cores: int) -> bool:
        """Whether so many blocks on `cores` multiprocessors are neither too few nor too many."""
        return self.fewest * cores <= blocks * CORES <= self.most * cores


Divisions = Mapping[tuple[bool, int], tuple[Division[C], ...]]


def read(name: str, config: Callable[..., C]) -> Divisions[C]:
    """The divisions of a shipped table, by whether the weight is constant and by rows; ValueError where it is none."""
    return parse(json.loads((_FOLDER / name).read_text(encoding="utf-8")), config)


def parse(document: Any, config: Callable[..., C]) -> Divisions[C]:
    """The divisions of a file's contents, whose ranges are `[first, last]`, downwards too."""
    if document.get("format") != FORMAT or document.get("columns") != list(COLUMNS):
        raise ValueError(f"it is no table of divisions of format {FORMAT}")
    found: dict[tuple[bool, int], tuple[Division[C], ...]] = {}
    for constant, rows, fewest, most, along, stages, options in document["rows"]:
        division = Division(fewest, most, _range(*along), _range(*stages), config(**options))
        found[constant, rows] = (*found.get((constant, rows), ()), division)
    return found


def _range(first: int, last: int) -> range:
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)
