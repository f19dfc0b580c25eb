"""The identity of a source file, by which a resumed conversion knows it again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

# A source tensor of at most _WHOLE bytes is hashed whole, a larger one in pieces from its first byte to its last.
_WHOLE: Final = 2**16
_PIECE: Final = 2**12
_PIECES: Final = 8


def identity(path: Path) -> dict[str, object]:
    """The identity of a source file: its name, its time, and hashes of its header and of pieces of every tensor.

    Two files of equal header and time whose tensors agree in these pieces are taken for the same.
    """
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        begin = file.tell()
        data = hashlib.sha256()
        tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        for first, last in sorted(tuple(entry["data_offsets"]) for entry in tensors.values()):
            for start, stop in _pieces(last - first):
                file.seek(begin + first + start)
                data.update(file.read(stop - start))
        stat = os.fstat(file.fileno())
    header = hashlib.sha256(text).hexdigest()
    return {"name": path.name, "mtime": stat.st_mtime_ns, "header": header, "data": data.hexdigest()}


def _pieces(size: int) -> list[tuple[int, int]]:
    """The parts of `size` bytes that are hashed: both ends, and pieces at equal distances between them."""
    if size <= _WHOLE:
        return [(0, size)]
    starts = [index * (size - _PIECE) // (_PIECES - 1) for index in range(_PIECES)]
    return [(start, start + _PIECE) for start in starts]
