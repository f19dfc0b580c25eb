"""AMD's configurations of the scaled product: the candidates, what their machine code is made of, and the choice.

`amd_gfx942.json` and `amd_gfx950.json` are made by `python -m fp8fn isa --write-tables`: the figures of each candidate,
compiled once, and the configuration of each product of the 84 layers of `fp8fn.bench.shapes`. Another product gets what
the model makes of the same figures, so nothing is compiled or timed for a choice, and it is the same on every day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.tuning.amd_model import PROCESSORS, Cost, Kernel, Time, cycles, groups_per_cu, product_time

FORMAT: Final = 1
LINE: Final = 16  # elements that an aligned operand has a multiple of, in each line and between lines
KERNEL_COLUMNS: Final = (
    "product", "config", "BK", "step_matrix", "step_vector", "step_lds", "step_memory",
    "rest_matrix", "rest_vector", "rest_lds", "rest_memory", "peeled", "vgprs", "agprs", "sgprs", "lds",
)  # fmt: skip
ROW_COLUMNS: Final = ("product", "M", "N", "K", "config", "modelled_us", "bound")
_FOLDER: Final = Path(__file__).parent / "tables"
_NAME: Final = re.compile(
    r"(?P<BM>\d+)x(?P<BN>\d+)w(?P<w>\d+)s(?P<s>\d+)(?:n(?P<n>\d+))?(?:k(?P<k>\d+))?(?:e(?P<e>\d+))?"
    r"(?:r(?P<r>\d+))?(?P<h>h?)(?P<t>t?)(?:g(?P<g>\d+))?(?:x(?P<x>\d+))?"
)
# What Triton compiles of the numbers in a name.
_PARTS: Final[Mapping[str, tuple[int, ...]]] = {
    "BM": (16, 32, 64, 128, 256, 512), "BN": (16, 32, 64, 128, 256, 512), "w": (1, 2, 4, 8, 16),
    "n": (16, 32), "k": (1, 2),
}  # fmt: skip

# How a linear layer's products lie: forward NT, dgrad NN, wgrad on what `quantize_dual` stores; TN is wgrad on operands
# that are row-major, as others store them.
_WIDE_TILES: Final = ("64x128", "128x64", "64x64")
_FEW_ROWS: Final = ("32x64w4s2n16", "16x64w4s2n16h")
# On gfx950 32x32 products leave in 16-byte stores by v_permlane32_swap; 16x16 need `h` or `t`. Scales that change along
# both axes are loaded again for each row of 32: 14 loads of 16 bytes a step for 10 from 16x16. NN from 256 rows takes
# 16x16 too, with 4 accumulators a product for 16. 256x256 spills 107 to 496 registers where products are scaled.
_GFX950: Final[dict[str, tuple[str, ...]]] = {
    "forward": (
        "256x128w8s2n32", "128x256w8s2n32", "128x128w4s2n32", *(f"{tile}w4s2n32" for tile in _WIDE_TILES), *_FEW_ROWS,
    ),
    "dgrad": (
        "256x128w8s2n16h", "128x256w8s2n32", "128x128w4s2n32", *(f"{tile}w4s2n32" for tile in _WIDE_TILES), *_FEW_ROWS,
    ),
    "wgrad": (
        "256x128w8s2n16h", "256x128w8s2n16t", "128x256w8s2n16h", "128x256w8s2n16t", "128x128w4s2n16h",
        "128x128w4s2n16t", *(f"{tile}w4s2n16h" for tile in _WIDE_TILES),
    ),
    "rowwise": (
        "256x128w8s2n32", "128x256w8s2n32", "128x128w4s2n32",
        *(f"{tile}w4s2n32" for tile in _WIDE_TILES), *_FEW_ROWS,
    ),
}  # fmt: skip
# On gfx942 a lane holds 4 neighbours of either product, so all need `h` or `t`; `k2` reads LDS by 16 bytes.
_GFX942: Final[dict[str, tuple[str, ...]]] = {
    "forward": (
        "256x128w8s2n16k2h", "256x128w8s2n32k2h", "128x256w8s2n16k2h", "128x128w4s2n16k2h",
        *(f"{tile}w4s2n16k2h" for tile in _WIDE_TILES), "32x64w4s2n16k2h", "16x64w4s2n16k2h",
    ),
    "dgrad": (
        "256x128w8s2n16k2h", "128x256w8s2n16k2h", "128x128w4s2n16k2h", "128x128w4s2n32k2h",
        *(f"{tile}w4s2n16k2h" for tile in _WIDE_TILES), "32x64w4s2n16k2h", "16x64w4s2n16k2h",
    ),
    "wgrad": (
        "256x128w8s2n16k2h", "256x128w8s2n16k2t", "128x256w8s2n16k2h", "128x128w4s2n16k2h", "128x128w4s2n16k2t",
        "128x128w4s2n32k2h", *(f"{tile}w4s2n16k2h" for tile in _WIDE_TILES),
    ),
    "rowwise": (
        "256x128w8s2n16k2h", "128x256w8s2n16k2h", "128x128w4s2n16k2h",
        *(f"{tile}w4s2n16k2h" for tile in _WIDE_TILES), "32x64w4s2n16k2h", "16x64w4s2n16k2h",
    ),
}  # fmt: skip
CANDIDATES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "gfx942": {**_GFX942, "TN": _GFX942["wgrad"]},
    "gfx950": {**_GFX950, "TN": _GFX950["wgrad"]},
}
# The order of tiles costs no code: rows of tiles in a column, and whether each chiplet has a run of its own.
_GROUPS: Final = (4, 8, 16)
_XCDS: Final = (1, 8)
_TIED: Final = 1.01
_SPILLS_WIDE: Final = frozenset({("gfx942", "dgrad", "256x128w8s2n16k2h")})  # 2 registers, with 64-bit offsets


@cache
def config_of(name: str) -> GemmConfig:
    """`"256x128w8s2n16k2hg8x8"`: tile, warps, stages, `n` the side of the matrix instruction, `k` kpack, `e` waves of a
    SIMD, `r` registers of a thread at most (NVIDIA), `h` stores of halves or `t` of the turned tile, `g` rows of tiles
    in a column, `x` chiplets.

    ValueError for another name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} names no configuration; 256x128w8s2n16h is one")
    part = match.groupdict()
    for what, known in _PARTS.items():
        if part[what] is not None and int(part[what]) not in known:
            raise ValueError(
                f"{name!r} has {part[what]} as {what}, which has to be one of {', '.join(map(str, known))}"
            )
    options = {"matrix_instr_nonkdim": part["n"], "kpack": part["k"], "waves_per_eu": part["e"], "maxnreg": part["r"]}
    return GemmConfig(
        int(part["BM"]), int(part["BN"]), int(part["w"]), int(part["s"]),
        GROUP=int(part["g"] or GemmConfig.GROUP), HALVES=bool(part["h"]), XCDS=int(part["x"] or GemmConfig.XCDS),
        WGRAD_TRANS_STORE=bool(part["t"]),
        options=tuple((option, int(value)) for option, value in options.items() if value is not None),
    )  # fmt: skip


def product_of(a: Tensor, a_block: Block, b: Tensor, b_block: Block) -> str | None:
    """The product of `CANDIDATES` that these operands make, or None."""
    a_along_k, b_along_k = a.stride(-1) == 1, b.stride(-2) == 1
    if (a_block, b_block) == ((1, 128), (128, 128)) and a_along_k:
        return "forward" if b_along_k else "dgrad"
    if (a_block, b_block) == ((1, 128), (128, 1)):
        if a_along_k and b_along_k:
            return "wgrad"
        return None if a_along_k or b_along_k else "TN"
    if (a_block[1], b_block[0]) == (WHOLE, WHOLE) and a_along_k and b_along_k:
        return "rowwise"
    return None


def is_aligned(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether all that a product loads and stores lies in whole lines of `LINE` elements."""
    return all(_has_lines(x) for x in (a, b, out))


def _has_lines(x: Tensor) -> bool:
    rows, columns = x.shape[-2:]
    if x.stride(-1) == 1:
        return columns % LINE == 0 and x.stride(-2) % LINE == 0
    return x.stride(-2) == 1 and rows % LINE == 0 and x.stride(-1) % LINE == 0


class ModelledConfig(NamedTuple):
    """A configuration by name, what the model has of it, and where it is from, as `Launch.reason` says it."""

    name: str
    time: Time | None
    reason: str

    @property
    def config(self) -> GemmConfig:
        return config_of(self.name)


def choose(
    product: str, m: int, n: int, k: int, arch: str, *, bias: bool = False, aligned: bool = True
) -> ModelledConfig:
    """The table's configuration for a product of the 84 layers, the model's for another.

    `m` counts the rows of a batch together. With a `bias` no turned store, which has none. Operands that are not
    `aligned` are loaded by bytes: 8 warps, with half of the registers each, spill 34 to 85 of them.
    """
    found = table(arch).rows.get((product, m, n, k))
    if found is not None and aligned and not (bias and config_of(found).WGRAD_TRANS_STORE):
        return ModelledConfig(found, None, f"{found} modelled, by {_file(arch).name}")
    return modelled(product, m, n, k, arch, bias=bias, aligned=aligned)


@lru_cache(maxsize=4096)
def modelled(
    product: str, m: int, n: int, k: int, arch: str, *, bias: bool = False, aligned: bool = True
) -> ModelledConfig:
    """The candidate of the least modelled time; of those within 1 % the one whose units work least, then by name."""
    times = candidate_times(product, m, n, k, arch, bias=bias, aligned=aligned)
    kernels = table(arch).kernels
    least = min(time.us for time in times.values())

    def work(name: str) -> tuple[float, float, str]:
        kernel = kernels[product, _base(name)]
        units = cycles(kernel.step, kernel.warps, groups_per_cu(kernel, PROCESSORS[arch]))
        return round(sum(units.values()) / kernel.operations, 12), times[name].cache, name

    best = min((name for name, time in times.items() if time.us <= _TIED * least), key=work)
    return ModelledConfig(best, times[best], f"{best} modelled")


def candidate_times(
    product: str, m: int, n: int, k: int, arch: str, *, bias: bool = False, aligned: bool = True
) -> dict[str, Time]:
    """The modelled time of every candidate in every order of tiles, by the configuration's full name."""
    found: dict[str, Time] = {}
    for name in candidate_names(product, m, n, k, arch, bias=bias, aligned=aligned):
        config, kernel = config_of(name), table(arch).kernels[product, _base(name)]
        rows, columns = (n, m) if config.WGRAD_TRANS_STORE else (m, n)
        found[name] = product_time((rows, columns, k), kernel, config.GROUP, config.XCDS, PROCESSORS[arch])
    return found


def candidate_names(
    product: str, m: int, n: int, k: int, arch: str, *, bias: bool = False, aligned: bool = True
) -> list[str]:
    """Every candidate in every order of tiles, by the configuration's full name; those that spill are left out."""
    found = []
    wide = max(m * k, n * k, m * n) > 2**31
    for name in CANDIDATES[arch][product]:
        warps = table(arch).kernels[product, name].warps
        spills = (warps > 4 and not aligned) or (wide and (arch, product, name) in _SPILLS_WIDE)
        if not spills and not (bias and config_of(name).WGRAD_TRANS_STORE):
            found += [f"{name}g{group}x{xcds}" for group in _GROUPS for xcds in _XCDS]
    return found


@dataclass(frozen=True)
class Table:
    """One architecture's table: counts read off each candidate's code, and the choices for the 84 layers' products."""

    arch: str
    kernels: Mapping[tuple[str, str], Kernel]
    rows: Mapping[tuple[str, int, int, int], str]
    origin: Mapping[str, str]


@cache
def table(arch: str) -> Table:
    """The shipped table of `"gfx942"` or `"gfx950"`."""
    return parse(json.loads(_file(arch).read_text(encoding="utf-8")))


def forget() -> None:
    """Reads the files again when they are next asked for."""
    table.cache_clear()
    modelled.cache_clear()


def parse(document: Mapping[str, Any]) -> Table:
    """The table of a file's contents; ValueError for those of another format."""
    if document.get("format") != FORMAT or document.get("kernel_columns") != list(KERNEL_COLUMNS):
        raise ValueError(f"it is no AMD table of format {FORMAT}: run `python -m fp8fn isa --write-tables`")
    kernels = {}
    for row in document["kernels"]:
        product, name, bk, *rest = row
        config = config_of(name)
        step, outside = Cost(*rest[:4]), Cost(*rest[4:8])
        peeled, vgprs, _, _, lds = rest[8:]
        kernels[product, name] = Kernel(config.BM, config.BN, bk, config.num_warps, step, outside, peeled, vgprs, lds)
    rows = {(product, m, n, k): name for product, m, n, k, name, *_ in document["rows"]}
    return Table(document["arch"], kernels, rows, document["origin"])


def _file(arch: str) -> Path:
    return _FOLDER / f"amd_{arch}.json"


def _base(name: str) -> str:
    """A name without the order of tiles."""
    return re.sub(r"g\d+x\d+$", "", name)
