"""Published figures: cells of `published.json`, each with its source.

A source has the GPU of its figures and the place where they are published. A cell says what it is a figure of: a
layer's id, a model, or the sizes of a shape as the source orders them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

FORMAT: Final = 1
COLUMNS: Final = ("source", "of", "figure", "value")
_FILE: Final = Path(__file__).with_name("published.json")


class Source(NamedTuple):
    gpu: str
    where: str


class Published:
    """Cells by source, by what they are figures of, and by the figure's name."""

    def __init__(self, document: Any) -> None:
        if document.get("format") != FORMAT or document.get("columns") != list(COLUMNS):
            raise ValueError(f"published figures have the columns {', '.join(COLUMNS)}; got {document.get('columns')}")
        self.sources = {name: Source(**found) for name, found in document["sources"].items()}
        self._cells: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for source, of, figure, value in document["cells"]:
            if source not in self.sources:
                raise ValueError(f"published figures name the source {source!r}, which the file does not have")
            self._cells[source][of][figure] = value

    def of(self, source: str) -> Mapping[str, Mapping[str, float]]:
        """The figures of a source, by what they are figures of."""
        return self._cells[source]

    def figure(self, source: str, of: str, name: str) -> float | None:
        return self._cells[source].get(of, {}).get(name)

    def sources_of(self, seed: str) -> Iterator[tuple[str, Source]]:
        return ((name, source) for name, source in self.sources.items() if name.startswith(f"{seed}-"))


@cache
def published() -> Published:
    """The figures of all seeds."""
    return Published(json.loads(_FILE.read_text(encoding="utf-8")))
