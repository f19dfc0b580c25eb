"""Files that are there before a conversion writes: which are its own, and how others differ."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from fp8fn.checkpoint.conversion.output import UNFINISHED
from fp8fn.checkpoint.conversion.plan import ORIGIN, SUMS, Plan
from fp8fn.checkpoint.files import read_json

_LONGEST_HEADER: Final = 100_000_000  # bytes, as in safetensors


@dataclass(frozen=True)
class Difference:
    """Why a file is not the one that a plan writes. `damaged`: its header names the plan's origin, its bytes differ."""

    reason: str
    damaged: bool = False


def _difference(plan: Plan, path: Path, progress: Callable[[int], object]) -> Difference | None:
    """How a file differs from the one that the plan writes, or None if all bytes agree."""
    try:
        with path.open("rb") as file:
            return _difference_of(plan, file, progress)
    except OSError as error:
        return Difference(f"it cannot be read: {error.strerror}")


def _difference_of(plan: Plan, file: BufferedReader, progress: Callable[[int], object]) -> Difference | None:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    begin = 8 + int.from_bytes(prefix, "little")
    text = file.read(begin - 8) if begin <= size else b""
    try:
        metadata = json.loads(text).get("__metadata__", {})
        origin, sums = metadata.get(ORIGIN), metadata.get(SUMS)
    except (ValueError, AttributeError, RecursionError):
        return Difference("its header cannot be read")
    if origin is None:
        return Difference("another program wrote it")
    if origin != json.dumps(plan.origin):
        return Difference(_changed_origin(origin, plan.origin))
    if not isinstance(sums, str) or prefix + text != plan.header(sums):
        return Difference("its header is damaged", damaged=True)
    if size != begin + plan.nbytes:
        return Difference(f"it is damaged: it has {size} bytes of {begin + plan.nbytes}", damaged=True)
    for position, entry in enumerate(plan.entries):
        if f"{_read_crc(file, entry.nbytes, progress):08x}" != sums[8 * position : 8 * position + 8]:
            return Difference(f"it is damaged: tensor {entry.name!r} is not as it was written", damaged=True)
    return None


def _changed_origin(text: object, origin: Mapping[str, Any]) -> str:
    """The difference between the origin in a file and the expected one, in words."""
    try:
        stored = json.loads(str(text))
        if stored["version"] != origin["version"]:
            return "another version of fp8fn wrote it"
        options, source = dict(stored["options"]), dict(stored["source"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another version of fp8fn wrote it"
    for name, value in origin["options"].items():
        if options.get(name) != value:
            return f"it was made with other options: {name} was {json.dumps(options.get(name))}, is {json.dumps(value)}"
    for name, reason in (
        ("header", "its source has other tensors, types, shapes or metadata"),
        ("data", "its source has other values"),
        ("mtime", "its source was modified since"),
    ):
        if source.get(name) != origin["source"][name]:
            return reason
    return "its source is another file"


def _read_crc(file: BufferedReader, size: int, progress: Callable[[int], object]) -> int:
    """The CRC-32 of the next `size` bytes of a file."""
    buffer = memoryview(bytearray(min(size, 2**20)))
    crc = 0
    while size and (count := file.readinto(buffer[: min(size, len(buffer))])):
        crc = zlib.crc32(buffer[:count], crc)
        size -= count
        progress(count)
    return crc


def differences(plans: Sequence[Plan], folders: Sequence[Path]) -> dict[Path, Difference | None]:
    """The existing files with the plans' names, and how each differs from what its plan writes."""
    from tqdm import tqdm

    there = {folder / plan.name: plan for folder in folders for plan in plans if os.path.lexists(folder / plan.name)}
    size = sum(path.stat().st_size for path in there if path.is_file())
    with tqdm(total=size, desc="checking", unit="B", unit_scale=True, unit_divisor=1024, disable=not there) as bar:
        return {path: _difference(plan, path, bar.update) for path, plan in there.items()}


def left_over(output: Path, names: Collection[str], texts: Mapping[str, bytes]) -> list[Path]:
    """The files of another conversion that this one of files `names` does not replace, and readers would find first.

    These are its shards, and an index that names no other files.
    """
    shards = [path for path in output.glob("*.safetensors") if path.name not in names and _is_converted(path)]
    known = {*names, *(path.name for path in shards)}
    indexes = [path for path in output.glob("*.safetensors.index.json") if path.name not in texts]
    return [*shards, *(path for path in indexes if _named_by(path) <= known)]


def _is_converted(path: Path) -> bool:
    """Whether a conversion wrote a file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _LONGEST_HEADER else b""
        return ORIGIN in json.loads(text).get("__metadata__", {})
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False  # damaged, or no safetensors file


def _named_by(index: Path) -> set[str]:
    try:
        return set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {""}  # of no conversion


def check_room(output: Path, found: Mapping[Path, Difference | None], texts: Mapping[str, bytes]) -> None:
    """Raise ValueError if the output holds a file that is not this conversion's: it would be replaced or mixed in."""
    for folder in (output, output / UNFINISHED):
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            if path.suffix == ".safetensors":
                difference = found[path] if path in found else Difference("the input has no file of that name")
                # Only convert writes to the folder of unfinished files, so that a damaged file there is written again.
                if difference is not None and difference.damaged and folder != output:
                    difference = None
            elif path.name not in texts or (path.is_file() and path.read_bytes() == texts[path.name]):
                difference = None
            else:
                difference = Difference("its content is another")
            if difference is not None:
                raise ValueError(
                    f"{path} is there and not of this conversion: {difference.reason}; name another folder, or give "
                    "--overwrite"
                )
