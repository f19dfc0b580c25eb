"""The metadata of a kernel in an AMD code object: its parameters, registers and memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_PT_NOTE: Final = 4
_AMDGPU_METADATA: Final = 32  # NT_AMDGPU_METADATA, of the owner "AMDGPU": a map in MessagePack


@dataclass(frozen=True)
class Parameter:
    """One parameter in the kernel's argument segment, in bytes."""

    offset: int
    size: int
    pointer: bool


@dataclass(frozen=True)
class Metadata:
    """A kernel: its own parameters in order, and what it takes of a compute unit, in registers a lane and bytes."""

    parameters: tuple[Parameter, ...]
    vgprs: int
    spills: int
    scratch: int
    lds: int


def metadata(code: bytes, entry: str) -> Metadata:
    """The metadata of the kernel `entry`; ValueError where the code object has no kernel of that name."""
    kernels = {kernel[".name"]: kernel for note in _notes(code) for kernel in note["amdhsa.kernels"]}
    if entry not in kernels:
        raise ValueError(f"the code object has no kernel {entry!r}, only {', '.join(kernels) or 'none'}")
    kernel = kernels[entry]
    parameters = tuple(
        Parameter(arg[".offset"], arg[".size"], arg[".value_kind"] == "global_buffer")
        for arg in kernel.get(".args", ())
        if not arg[".value_kind"].startswith("hidden_")  # the runtime's own
    )
    return Metadata(
        parameters,
        kernel[".vgpr_count"],
        kernel[".vgpr_spill_count"],
        kernel[".private_segment_fixed_size"],
        kernel[".group_segment_fixed_size"],
    )


def _notes(code: bytes) -> Iterator[Any]:
    """The metadata notes of a 64-bit little-endian ELF file."""
    if code[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"a code object is a 64-bit ELF file; this begins with {code[:6]!r}")
    (headers,) = struct.unpack_from("<Q", code, 32)
    size, count = struct.unpack_from("<HH", code, 54)
    for header in range(headers, headers + size * count, size):
        kind, at, length = struct.unpack_from("<I4xQ16xQ", code, header)
        end = at + length
        while kind == _PT_NOTE and at < end:
            owner_size, content_size, note = struct.unpack_from("<III", code, at)
            owner = at + 12
            content = owner + _padded(owner_size)
            if note == _AMDGPU_METADATA and code[owner : owner + owner_size] == b"AMDGPU\0":
                yield _Reader(code, content).value()
            at = content + _padded(content_size)


def _padded(size: int) -> int:
    return -(-size // 4) * 4


class _Reader:
    """MessagePack, as far as LLVM writes it: maps, arrays, strings, booleans and integers."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at

    def value(self) -> Any:
        tag = self._number("B")
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self._map(tag & 0xF)
        if tag < 0xA0:
            return self._array(tag & 0xF)
        if tag < 0xC0:
            return self._text(tag & 0x1F)
        if tag >= 0xE0:
            return tag - 256
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if 0xCC <= tag <= 0xD3:
            return self._number("BHIQbhiq"[tag - 0xCC])
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._number("BHI"[tag - 0xD9]))
        if 0xDC <= tag <= 0xDD:
            return self._array(self._number("HI"[tag - 0xDC]))
        if 0xDE <= tag <= 0xDF:
            return self._map(self._number("HI"[tag - 0xDE]))
        raise ValueError(f"the metadata of a code object has the unknown tag {tag:#x}")

    def _number(self, format_: str) -> int:
        (found,) = struct.unpack_from(f">{format_}", self._content, self._at)
        self._at += struct.calcsize(format_)
        return int(found)

    def _text(self, length: int) -> str:
        self._at += length
        return self._content[self._at - length : self._at].decode()

    def _array(self, length: int) -> list[Any]:
        return [self.value() for _ in range(length)]

    def _map(self, length: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(length)}
