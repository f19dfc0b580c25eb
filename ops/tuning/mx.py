"""MX products as their dispatch sees them: the problem, a kernel's configuration, and tables of what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fp8fn.ops.cuda.limits import ceil_power_of_two
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import Chip, Target

COLUMNS: Final = ("arch", "K", "N", "M", "kernel", "options", "source")
FORMAT: Final = 2
# From this number of rows on, a row of the table serves all M down to half of its own. Numbers below that the table
# lacks have the same kernel by default, `hip_gemv`, so that their rows keep its order of sums.
_ROUNDED_FROM: Final = 8
_FILE: Final = Path(__file__).parent / "tables" / "mx_mm.json"


@dataclass(frozen=True)
class Problem:
    """`out (batch, m, n) = a (batch, m, k) @ b (batch, k, n)`; `largest` is the most bytes that one tensor spans.

    The output counts as float32, in which parts of a sum are kept. `k_lines`: each row of a and each column of b
    has its K in consecutive bytes from a multiple of 16. `in_boxes`: bulk copies can take tiles of both.
    `words`: the scales of a line lie in words of four. `scales_in_boxes`: bulk copies can take the scales of tiles,
    contiguous along M and N.
    `constant`: as of `fp8fn.gemm`. `chip`: the GPU that the operands are on, if any.
    """

    m: int
    n: int
    k: int
    target: Target
    batch: int = 1
    a_dtype: torch.dtype = torch.float8_e4m3fn
    b_dtype: torch.dtype = torch.float8_e4m3fn
    largest: int = 0
    k_lines: bool = True
    in_boxes: bool = True
    words: bool = True
    scales_in_boxes: bool = True
    constant: bool = False
    chip: Chip | None = None


@dataclass(frozen=True)
class MoeProblem:
    """`ids` rows by `(E, K, N)` of `experts`, in `tiles` of `block_m` ids; `largest` and `k_lines` as of `Problem`.

    `longest_step` is the largest stride of an operand. `chip`: the GPU that the operands are on, if any.
    """

    ids: int
    n: int
    k: int
    experts: int
    tiles: int
    block_m: int
    target: Target
    a_block: Block = (1, 32)
    a_dtype: torch.dtype = torch.float8_e4m3fn
    w_dtype: torch.dtype = torch.float8_e4m3fn
    largest: int = 0
    k_lines: bool = True
    longest_step: int = 0
    chip: Chip | None = None


@dataclass(frozen=True)
class MxConfig:
    """Tile and compiler options of a kernel for MX products; `SPLITS` programs share the sum over K of one tile."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    SPLITS: int = 1
    GROUP: int = 8
    options: tuple[tuple[str, int], ...] = field(default=())


class Row(NamedTuple):
    """The fastest measured kernel, by name, and its changes to the kernel's default configuration.

    Without `use_hip` the kernel, in HIP, is the fastest of its kind, and one of Triton's is as fast or faster. `source`
    names the table that it is from, as `explain` and messages do.
    """

    kernel: str
    options: Mapping[str, int]
    use_hip: bool = True
    source: str = "the table"


Table = Mapping[tuple[str, int, int, int], Row]


@cache
def shipped() -> Table:
    """By architecture, a row for each problem that was measured.

    The rows of gfx950 are those that aiter publishes for its kernels, which divide a product as fp8fn's in HIP do. No
    product was measured with fp8fn's: `python -m fp8fn tune --op mx_mm` writes a table of the chip, which comes first.
    """
    return parse(json.loads(_FILE.read_text(encoding="utf-8")))


def parse(document: Any) -> Table:
    """The table of a file's contents; ValueError for other columns, or a row without a source.

    Options are as `{"BN": 64, "SPLITS": 4}`, or as `{"n_sub": 2, "k_splits": 4, "use_hip": 0}` for a kernel in HIP.
    """
    if document.get("format") != FORMAT or document.get("columns") != list(COLUMNS):
        columns = document.get("columns")
        raise ValueError(f"a table of MX products has the columns {','.join(COLUMNS)}, this one {columns}")
    table = {}
    names = {name: source["name"] for name, source in document["sources"].items()}
    for arch, k, n, m, kernel, given, source in document["rows"]:
        if source not in names:
            raise ValueError(f"a table of MX products names the source {source!r}; its sources are {', '.join(names)}")
        options = dict(given)
        use_hip = bool(options.pop("use_hip", 1))
        table[arch, k, n, m] = Row(kernel, options, use_hip, names[source])
    return table


def lookup(problem: Problem, table: Table) -> Row | None:
    """The row of a product of two matrices, with M up to the next power of two from 8 on; a batch is never measured."""
    rows = problem.m if problem.m < _ROUNDED_FROM else ceil_power_of_two(problem.m)
    return None if problem.batch > 1 else table.get((problem.target.name, problem.k, problem.n, rows))
