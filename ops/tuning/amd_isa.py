"""The instructions of a kernel's AMDGPU assembly, by kind and width, in its loop over K and outside of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

_INSTRUCTION: Final = re.compile(r"^\s+([a-z]\w+)(?:\s+(\.L\w+))?")
_LABEL: Final = re.compile(r"^(\.L\w+):")
_MATRIX: Final = re.compile(r"v_s?mfma\w*?_f32_(\d+)x(\d+)x(\d+)_?(\w+)")
_GLOBAL: Final = re.compile(r"(?:buffer|global|flat)_(load|store)_(?:lds_)?([us]?(?:byte|short)|dword(?:x\d)?)")
_LDS: Final = re.compile(r"ds_(read|write)(2?)\w*?_[bui](\d+)(?:_tr_\w+)?$")
# Results for a quarter of a wave's lanes in the time that others take for a wave.
_QUARTER_RATE: Final = re.compile(r"v_(?:mul_lo_u32|mul_hi_[ui]32|mad_u64|mad_i64|rcp|rsq|sqrt|exp|log|div_scale_f64)")


@dataclass(frozen=True)
class Matrix:
    """A matrix instruction: `2 m n k` operations of one wave, on elements of `type`."""

    name: str
    m: int
    n: int
    k: int
    type: str

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k


def matrix_of(name: str) -> Matrix | None:
    """Parses a name such as `v_mfma_f32_16x16x128_f8f6f4`, or one with scales; None for another instruction."""
    found = _MATRIX.match(name)
    if found is None:
        return None
    m, n, k = (int(size) for size in found.groups()[:3])
    return Matrix(name, m, n, k, found.group(4).removesuffix("_1k").split("_")[0])


@dataclass(frozen=True)
class Mix:
    """The instructions of a stretch of code by name, as one wave passes through it once."""

    names: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def matrix(self) -> dict[Matrix, int]:
        found = ((matrix_of(name), count) for name, count in self.names.items())
        return {matrix: count for matrix, count in found if matrix is not None}

    @property
    def operations(self) -> int:
        return sum(matrix.operations * count for matrix, count in self.matrix.items())

    @property
    def vector(self) -> int:
        """Instructions of the vector unit."""
        return self.count("v_") - sum(self.matrix.values())

    @property
    def vector_issues(self) -> int:
        """The same, those at a quarter of the rate four times."""
        slow = sum(count for name, count in self.names.items() if _QUARTER_RATE.match(name))
        return self.vector + 3 * slow

    def count(self, prefix: str) -> int:
        return sum(count for name, count in self.names.items() if name.startswith(prefix))

    def widths(self, direction: str) -> dict[int, int]:
        """Counts global `"load"`s or `"store"`s by their bytes a lane."""
        found: Counter[int] = Counter()
        for name, count in self.names.items():
            match = _GLOBAL.match(name)
            if match is not None and match.group(1) == direction:
                found[_bytes(match.group(2))] += count
        return dict(sorted(found.items(), reverse=True))

    @property
    def memory_bytes(self) -> int:
        """Bytes a lane of global loads and stores."""
        return sum(width * count for way in ("load", "store") for width, count in self.widths(way).items())

    @property
    def lds_bytes(self) -> int:
        """Bytes a lane of LDS reads and writes."""
        total = 0
        for name, count in self.names.items():
            match = _LDS.match(name)
            if match is not None:
                total += int(match.group(3)) // 8 * (2 if match.group(2) else 1) * count
        return total


@dataclass(frozen=True)
class Assembly:
    """A kernel: the innermost loop that multiplies, empty where there is none, and all else.

    `vgprs` counts both kinds of vector registers a lane, `agprs` the accumulators among them. `lds` is of a workgroup.
    """

    loop: Mix
    rest: Mix
    vgprs: int
    agprs: int
    sgprs: int
    spills: int
    scratch: int
    lds: int

    @property
    def whole(self) -> Mix:
        return Mix(Counter(self.loop.names) + Counter(self.rest.names))


def parse(text: str, lds: int) -> Assembly:
    """Parses `compiled.asm["amdgcn"]`; `lds` is `compiled.metadata.shared`, since the assembly names no dynamic LDS."""
    names, labels, jumps = _read(text.splitlines())
    loops = [(labels[label], at + 1) for at, label in jumps if labels.get(label, at) < at]
    multiplies = [span for span in loops if any("mfma" in name for name in names[slice(*span)])]
    start, end = min(multiplies, key=_length, default=(0, 0))

    def note(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    return Assembly(
        loop=Mix(Counter(names[start:end])),
        rest=Mix(Counter(names[:start] + names[end:])),
        vgprs=note("vgpr_count"),
        agprs=note("agpr_count"),
        sgprs=note("sgpr_count"),
        spills=note("vgpr_spill_count"),
        scratch=note("private_segment_fixed_size"),
        lds=lds,
    )


def _read(lines: Iterable[str]) -> tuple[list[str], dict[str, int], list[tuple[int, str]]]:
    """Instructions in order, where labels stand among them, and the branches with their targets."""
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in lines:
        if (label := _LABEL.match(line)) is not None:
            labels[label.group(1)] = len(names)
        elif (found := _INSTRUCTION.match(line)) is not None:
            name = re.sub(r"_e(?:32|64)$|_sdwa$|_dpp$", "", found.group(1))
            if found.group(2) is not None and name.startswith(("s_cbranch", "s_branch")):
                jumps.append((len(names), found.group(2)))
            names.append(name)
    return names, labels, jumps


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _bytes(name: str) -> int:
    if name.startswith("dword"):
        return 4 * int(name[6:] or 1)
    return 1 if name.endswith("byte") else 2
