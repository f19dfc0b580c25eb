"""The bytes of a safetensors file: its header, and tensors written without a copy."""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from fp8fn.checkpoint.files import DTYPES

_TYPES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """A tensor of an output file, as the file's header describes it."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    itemsize: int


def written(name: str, tensor: Tensor) -> Written:
    """A tensor as a file holds it."""
    return Written(name, _TYPES[tensor.dtype], list(tensor.shape), tensor.nbytes, tensor.element_size())


def in_order(tensors: Sequence[Written]) -> list[Written]:
    """The order of the tensors' bytes.

    Wide types first, as in safetensors' own writer, so that each tensor begins at a multiple of its element size. Then
    by name, because safetensors lists tensors without elements in another order in each process.
    """
    return sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.name))


def offsets(tensors: Sequence[Written]) -> dict[str, int]:
    """The offset of each tensor behind the header."""
    found, end = {}, 0
    for tensor in tensors:
        found[tensor.name] = end
        end += tensor.nbytes
    return found


def header(tensors: Sequence[Written], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes before its tensors."""
    starts = offsets(tensors)
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    for tensor in tensors:
        start = starts[tensor.name]
        span = [start, start + tensor.nbytes]
        described[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_bytes(file: BinaryIO, tensor: Tensor, crc: int = 0) -> int:
    """Write a tensor's bytes without copying them, and return `crc` continued over them.

    NumPy could do the same, but is not a dependency.
    """
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    data = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    file.write(data)
    return zlib.crc32(data, crc)


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor at a time. The same tensors and metadata give the same bytes."""
    entries = in_order([written(name, tensor) for name, tensor in tensors.items()])
    with path.open("wb") as file:
        file.write(header(entries, metadata))
        for entry in entries:
            if entry.nbytes:
                write_bytes(file, tensors[entry.name])
