"""Whole columns of few rows, or of rows that TMA does not take: configurations and the launch of `quantize_columns.cu`.

The kernel quantizes matrices and groups of rows. Columns whose elements are contiguous are rows of the transpose, which
`quantize_rows.cu` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp8fn.ops.cuda.limits import SHARED_LIMIT
from fp8fn.ops.cuda.operands import OCTET, is_aligned, quantization_types
from fp8fn.ops.cuda.quantize.column_panels import (
    SECTOR_ROWS,
    columns_fault,
    columns_of,
    output_of,
    scale_lead,
    typical_rows,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.operands import Quantization


@dataclass(frozen=True)
class ColumnsConfig:
    """The macros of `quantize_columns.cu`, which says what each is; PANEL in bytes of a row."""

    PANEL: int = 128
    CLUSTER: int = 1
    WARPS: int = 8
    RESIDENT: int = 4
    LOAD: str = "PAST_L1"

    @property
    def overhead(self) -> int:
        """Bytes of shared memory beside the rows: maxima of a panel for each warp and for the block, and scales."""
        return self.PANEL * (self.WARPS + 2) + 2 * self.PANEL

    @property
    def most_rows(self) -> int:
        """The most rows that a cluster can keep in shared memory."""
        return self.CLUSTER * ((SHARED_LIMIT - self.overhead) // self.PANEL // SECTOR_ROWS * SECTOR_ROWS)

    def rows(self, rows: int) -> int:
        """The rows that a block keeps of a matrix or group of so many."""
        share = -(-rows // (self.CLUSTER * SECTOR_ROWS)) * SECTOR_ROWS
        return min(share, self.most_rows // self.CLUSTER)


# By rows: the first configuration that keeps them with three blocks or more on a multiprocessor, which hide each
# other's latency.
_CONFIGS: Final = (
    (384, ColumnsConfig(128)),
    (768, ColumnsConfig(128, 2)),
    (1536, ColumnsConfig(128, 4)),
    (3072, ColumnsConfig(128, 8)),
    (8192, ColumnsConfig(64, 8, 8, 3)),
)
_TALL: Final = ColumnsConfig(64, 8, 16, 1)
# On chips whose GPCs all have 16 multiprocessors these replace the last entry above: faster on an H200.
_LARGE_GPCS: Final = ((6144, ColumnsConfig(128, 16)), (13312, ColumnsConfig(64, 16)))
_CORES_OF_LARGE_GPCS: Final = 132


def default_config(rows: int, cores: int) -> ColumnsConfig:
    """The configuration for a matrix or a group of so many rows, on a chip of so many multiprocessors."""
    configs = (*_CONFIGS[:-1], *_LARGE_GPCS) if cores >= _CORES_OF_LARGE_GPCS else _CONFIGS
    return next((config for most, config in configs if rows <= most), _TALL)


def accepts(q: Quantization) -> str | None:
    """Why the kernel cannot quantize a non-empty `x`, or None."""
    return columns_fault(q)


def configure(q: Quantization) -> ColumnsConfig:
    return default_config(typical_rows(q), q.target.cores)


def plan(q: Quantization, config: ColumnsConfig, kept: int | None = None) -> tuple[CudaLaunch]:
    """The launch on a quantization that the kernel accepts.

    A block keeps `kept` rows in shared memory, by default its share of a matrix, or of a group an eighth larger than
    the mean.
    """
    x, out, offsets, groups = columns_of(q), output_of(q), q.offsets, q.groups
    m, n = x.shape[-2:]
    kept = kept or config.rows(typical_rows(q))
    columns = config.PANEL // x.element_size()
    macros: dict[str, int | str] = {
        **quantization_types(q),
        "PANEL": columns, "CLUSTER": config.CLUSTER, "WARPS": config.WARPS, "RESIDENT": config.RESIDENT,
        "LOAD": f"Load::{config.LOAD}", "GROUPED": int(offsets is not None), "ALIGNED": int(is_aligned(x)),
        "PARTIAL": int(n % OCTET != 0),
    }  # fmt: skip
    launch = CudaLaunch(
        kernel=CudaKernel("quantize_columns.cu", "quantize_columns", tuple(macros.items())),
        grid=(-(-n // columns) * config.CLUSTER, groups + 1 if groups else 1, q.matrices),
        threads=32 * config.WARPS,
        shared=config.overhead + kept * config.PANEL,
        args={
            "x": x, "data": out.data, "scale": out.scale, "offsets": offsets, "M": m, "N": n, "x_m": x.stride(-2),
            "data_n": out.data.stride(-1), "scale_lead": scale_lead(q), "groups": groups, "kept": kept,
        },
        target=q.target,
        options={**macros, "KEPT": kept},
    )  # fmt: skip
    return (launch,)
