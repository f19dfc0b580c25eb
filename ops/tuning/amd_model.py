"""How long an AMD processor takes for a product, from its kernel's machine code: modelled, nothing of it was measured.

A step is one tile of K. What a step asks of a compute unit (CU) is counted in the loop of the machine code, in cycles:

    matrix = operations of a wave's matrix instructions / rate of a SIMD * waves on the SIMD
    vector = 4 * vector instructions of a wave * waves on the SIMD    (64 lanes on 16)
    lds    = bytes read and written / 128,    l1 = bytes loaded and stored / 64

With two waves or more on a SIMD these run beside each other, so that a step takes the largest; one wave alone waits for
its own products, and its matrix and vector cycles add up. A tile takes its steps, and the code outside of the loop
counted in the same way. Tiles come in rounds, as many at a time as the CUs hold. A round reads from the memory-side
cache what the tiles of each chiplet (XCD) have in common once, and all rounds read from HBM what those of a round have
in common once. The product takes the longest of the three: CUs, cache, HBM.

Peak rates are the data sheets': 2615 TFLOP/s of FP8 are 4096 operations a cycle and CU for the MI300X, 5033 are 8192
for the MI355X. So a figure is a bound with the clock at its highest, no latency and no bank conflicts; its job is the
ranking of configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd
from typing import Final, NamedTuple

from fp8fn.ops.tuning.amd_isa import Assembly, Matrix, Mix

_LANES: Final = 64
_SIMDS: Final = 4
_VGPRS: Final = 512  # registers of a lane and SIMD, given out by 8
_MOST_WAVES: Final = 8  # on a SIMD
_LDS_RATE: Final = 128
_L1_RATE: Final = 64


@dataclass(frozen=True)
class Processor:
    """`rates` are operations a cycle and SIMD by element type, `older` those of instructions kept from before.

    Bandwidths are bytes a second: of HBM, and of the memory-side cache that the chiplets share.
    """

    name: str
    cus: int
    xcds: int
    hertz: float
    hbm: float
    cache: float
    lds: int
    rates: Mapping[str, int]
    older: Mapping[str, int]

    def peak(self, type: str) -> float:
        """Operations a second."""
        return float(self.rates[type]) * _SIMDS * self.cus * self.hertz


PROCESSORS: Final[Mapping[str, Processor]] = {
    "gfx942": Processor(
        "MI300X", 304, 8, 2.1e9, 5.3e12, 17.2e12, 64 << 10,
        {"fp8": 1024, "bf8": 1024, "f16": 512, "bf16": 512, "xf32": 256, "f32": 64}, {},
    ),
    "gfx950": Processor(
        "MI355X", 256, 8, 2.4e9, 8.0e12, 17.2e12, 160 << 10,
        {"f8f6f4": 2048, "fp8": 1024, "bf8": 1024, "f16": 1024, "bf16": 1024, "f32": 64}, {"f16": 512, "bf16": 512},
    ),
}  # fmt: skip


def matrix_cycles(matrix: Matrix, processor: Processor) -> int:
    """Cycles that an instruction takes of its SIMD; of f8f6f4 with FP8 operands, for with FP4 it takes half."""
    older = matrix.operations <= 16384 and (matrix.m, matrix.k) in ((16, 16), (32, 8))
    rate = processor.older.get(matrix.type, 0) if older else 0
    return matrix.operations // (rate or processor.rates[matrix.type])


class Cost(NamedTuple):
    """The cost of one wave: cycles of matrix and vector units, bytes of LDS and global memory."""

    matrix: float
    vector: float
    lds: float
    memory: float


def cost_of(mix: Mix, processor: Processor, steps: float = 1.0) -> Cost:
    """The cost of a stretch of code, divided by the `steps` that it makes."""
    return Cost(
        sum(matrix_cycles(matrix, processor) * count for matrix, count in mix.matrix.items()) / steps,
        4 * mix.vector_issues / steps,
        _LANES * mix.lds_bytes / steps,
        _LANES * mix.memory_bytes / steps,
    )


class Kernel(NamedTuple):
    """A compiled product of tiles `bm x bn x bk` by `warps` waves: its costs a step and outside of the loop.

    `peeled` steps are outside of the loop, whose costs have them.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    step: Cost
    rest: Cost
    peeled: float
    vgprs: int
    lds: int

    @property
    def operations(self) -> int:
        """Floating-point operations of a step."""
        return 2 * self.bm * self.bn * self.bk


def kernel_of(found: Assembly, bm: int, bn: int, bk: int, warps: int, processor: Processor) -> Kernel:
    """ValueError where the loop multiplies nothing."""
    operations = 2 * bm * bn * bk
    steps = found.loop.operations * warps / operations
    if not steps:
        raise ValueError("the kernel has no loop that multiplies: give it two tiles of K at least")
    return Kernel(
        bm, bn, bk, warps, cost_of(found.loop, processor, steps), cost_of(found.rest, processor),
        found.rest.operations * warps / operations, found.vgprs, found.lds,
    )  # fmt: skip


def waves_per_simd(vgprs: int, lds: int, warps: int, processor: Processor) -> int:
    """The number of waves that a SIMD holds, by registers, LDS and whole workgroups."""
    by_registers = min(_VGPRS // (-(-max(vgprs, 1) // 8) * 8), _MOST_WAVES)
    groups = by_registers * _SIMDS // warps
    if lds:
        groups = min(groups, processor.lds // lds)
    return groups * warps // _SIMDS


def groups_per_cu(kernel: Kernel, processor: Processor) -> int:
    """Workgroups on a CU at a time."""
    return max(waves_per_simd(kernel.vgprs, kernel.lds, kernel.warps, processor) * _SIMDS // kernel.warps, 1)


def cycles(cost: Cost, warps: int, groups: int) -> dict[str, float]:
    """Cycles of each unit of a CU for one of the `groups` workgroups on the CU; the largest is the workgroup's time."""
    waves = warps / _SIMDS
    found = {"matrix": cost.matrix * waves, "vector": cost.vector * waves}
    if waves * groups < 2:  # nothing runs beside a wave
        found = {"matrix + vector": cost.matrix * waves + cost.vector * waves}
    return {**found, "LDS": cost.lds * warps / _LDS_RATE, "L1": cost.memory * warps / _L1_RATE}


@dataclass(frozen=True)
class Time:
    """Microseconds by what would decide alone; the product takes the largest of them."""

    cu: float
    cache: float
    hbm: float
    unit: str
    """The unit of a CU that its step waits for."""

    @property
    def us(self) -> float:
        return max(self.cu, self.cache, self.hbm)

    @property
    def bound(self) -> str:
        """The bottleneck: a unit of the CUs, the cache between chiplets, or HBM."""
        return self.unit if self.us == self.cu else "cache" if self.us == self.cache else "HBM"


def product_time(shape: tuple[int, int, int], kernel: Kernel, group: int, xcds: int, processor: Processor) -> Time:
    """The time of `out (m, n) = a (m, k) @ b (k, n)` in FP8 with an output of 16 bits.

    Tiles are in columns of `group` rows, spread over `xcds`.
    """
    m, n, k = shape
    tiles_m, tiles_n = ceil(m / kernel.bm), ceil(n / kernel.bn)
    tiles, at_once = tiles_m * tiles_n, groups_per_cu(kernel, processor)
    rounds, rest = divmod(tiles, processor.cus * at_once)
    cu = rounds * at_once * _tile_cycles(kernel, k, at_once)
    if rest:
        last = ceil(rest / processor.cus)
        cu += last * _tile_cycles(kernel, k, last)
    shared, reused = _edges(tiles_m, tiles_n, group, xcds, min(processor.cus * at_once, tiles), processor.xcds)
    passes = tiles / min(processor.cus * at_once, tiles)
    written = 2 * m * n
    by_cache = passes * k * (shared[0] * kernel.bm + shared[1] * kernel.bn) + written
    by_hbm = max(passes * k * (reused[0] * kernel.bm + reused[1] * kernel.bn), (m + n) * k) + written
    units = cycles(kernel.step, kernel.warps, at_once)
    return Time(
        1e6 * cu / processor.hertz,
        1e6 * by_cache / processor.cache,
        1e6 * by_hbm / processor.hbm,
        max(units, key=lambda unit: units[unit]),
    )


def _tile_cycles(kernel: Kernel, k: int, groups: int) -> float:
    steps = max(ceil(k / kernel.bk) - kernel.peeled, 0.0)
    step = max(cycles(kernel.step, kernel.warps, groups).values())
    return steps * step + max(cycles(kernel.rest, kernel.warps, groups).values())


def _edges(
    tiles_m: int, tiles_n: int, group: int, xcds: int, count: int, chiplets: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of tiles that `count` programs read at a time: summed over the chiplets, and by all of them.

    In columns of `group` rows. Dealt out in turn, a chiplet's programs are `chiplets` apart; in runs, neighbours.
    """
    height = min(group, tiles_m)
    rows = height // gcd(height, chiplets) if xcds == 1 else height
    each = _extent(ceil(count / chiplets), rows, tiles_m, tiles_n)
    summed = each[0] * chiplets, each[1] * chiplets
    if xcds == 1:
        return summed, _extent(count, height, tiles_m, tiles_n)
    return summed, (min(summed[0], tiles_m), min(summed[1], tiles_n))


def _extent(count: int, height: int, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """Rows and columns of `count` tiles that follow each other in columns of `height`."""
    return min(height * ceil(count / (height * tiles_n)), tiles_m), min(ceil(count / height), tiles_n)
