"""The demo's text: the sources of Python's standard library as bytes, the same in every run."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

# Enough for half an epoch of the longest preset: most of the library without its tests (13 MB in Python 3.11).
SIZE_CAP: Final = 12 << 20
# One file of this many is held out whole, so that no context of a validation byte is in the training text.
HELD_OUT: Final = 10
# Installed packages differ between machines, and distributions often leave out the tests.
_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, each a 1-D `uint8` tensor on the CPU."""

    train: Tensor
    validation: Tensor

    def batches(self, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless `(inputs, targets)` of the training text, each `(batch, context)` int64. A seed fixes them."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
            yield _windows(self.train, starts, context)

    def validation_batches(self, count: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed batches whose windows are spread evenly over the validation text."""
        last = len(self.validation) - context - 1
        starts = torch.arange(count * batch) * last // max(count * batch - 1, 1)
        return [_windows(self.validation, part, context) for part in starts.view(count, batch)]


def standard_library(root: Path | None = None, cap: int = SIZE_CAP) -> Corpus:
    """The first `cap` bytes of the `.py` files under `root`, in sorted order. Every tenth file is for validation.

    `root` is the standard library unless given. Raises `FileNotFoundError` if it holds too few sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    sources = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = sorted(path.as_posix() for path in sources if _SKIPPED.isdisjoint(path.parts))
    train, validation, left = bytearray(), bytearray(), cap
    for index, name in enumerate(kept):
        text = (root / name).read_bytes()[:left]
        (validation if index % HELD_OUT == HELD_OUT - 1 else train).extend(text)
        left -= len(text)
    if not train or not validation:
        raise FileNotFoundError(f"{root} holds too few Python sources for a text: {len(kept)} files; {HELD_OUT} needed")
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8))


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The windows of `text` at `starts (B,)`, and the windows one byte later, each `(B, context)` int64."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
