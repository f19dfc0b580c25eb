"""Whole rows, and those of `silu(gate) * up`, quantized on Hopper: what is accepted, and `quantize_rows.cu`'s launch.

Whole columns whose elements are contiguous are whole rows of the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from fp8fn.ops.cuda.operands import (
    OCTET,
    hardware_fault,
    is_aligned,
    outgrows_l2,
    quantization_types,
    rows_fault,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import WHOLE, is_column_major
from fp8fn.ops.operands import PLAIN, SILU_MUL, Quantization, Quantized, Source

# The most octets of 16-bit columns that a thread holds: four blocks or more then fit a multiprocessor's registers. Of
# products in float32 two do.
_OCTETS: Final = 8
_PRODUCTS: Final = 4
_MOST_WARPS: Final = 16


@dataclass(frozen=True)
class RowsConfig:
    """The macros of `quantize_rows.cu`, which says what each is."""

    WARPS: int = 4
    ROW_WARPS: int = 4
    LOAD: str = "PAST_L1"


def default_config(columns: int, element_bytes: int, source: Source = PLAIN) -> RowsConfig:
    """The fewest warps that hold a row."""
    of_warp = _longest(element_bytes, source) // _MOST_WARPS
    warps = next(warps for warps in (1, 2, 4, 8, _MOST_WARPS) if columns <= warps * of_warp)
    return RowsConfig(max(warps, 4), warps)


def _longest(element_bytes: int, source: Source) -> int:
    """The most columns of a row."""
    octets = (_OCTETS if source is PLAIN else _PRODUCTS) * 2 // element_bytes
    return 32 * _MOST_WARPS * OCTET * octets


def accepts(q: Quantization) -> str | None:
    """Why the kernel cannot quantize a non-empty `x`, or None."""
    if q.block not in ((1, WHOLE), (WHOLE, 1)) or q.dual or q.offsets is not None:
        return f"block {q.block}{' and its transpose' * q.dual}{' of groups' * bool(q.groups)} is no whole row"
    if q.source is not PLAIN and (q.source is not SILU_MUL or q.block[0] == WHOLE):
        return f"{q.source.macro} has no kernel for whole {'rows' if q.block[0] == 1 else 'columns'}"
    if (reason := hardware_fault(q)) is not None:
        return reason
    x = _rows_of(q)
    for name, rows in {q.source.x: x, q.source.other: q.other}.items():
        if rows is None:
            continue
        if not is_column_major(rows.mT):
            given = q.x if rows is x else rows
            return f"{name} has strides {given.stride()}: elements with one scale are not contiguous"
        if (reason := rows_fault(rows, name)) is not None:
            return reason
    if x.shape[-1] > (longest := _longest(x.element_size(), q.source)):
        return f"{q.source.x} has rows of {x.shape[-1]}, more than {longest}"
    return None


def configure(q: Quantization) -> RowsConfig:
    x = _rows_of(q)
    config = default_config(x.shape[-1], x.element_size(), q.source)
    if q.source is PLAIN and x.element_size() == 2 and outgrows_l2(x, 3):  # loads of float32 take no hint
        return replace(config, LOAD="LAST_OUT")
    return config


def plan(q: Quantization, config: RowsConfig) -> tuple[CudaLaunch]:
    """The launch on a quantization that the kernel accepts."""
    x, other, out = _rows_of(q), q.other, _output_of(q)
    m, n = x.shape[-2:]
    octets = -(-n // (32 * config.ROW_WARPS * OCTET))
    rows = config.WARPS // config.ROW_WARPS
    macros: dict[str, int | str] = {
        **quantization_types(q),
        "SOURCE": f"Source::{q.source.macro}",
        "WARPS": config.WARPS, "ROW_WARPS": config.ROW_WARPS, "OCTETS": octets, "LOAD": f"Load::{config.LOAD}",
        "EVEN": int(m % rows == 0 and n == 32 * config.ROW_WARPS * OCTET * octets),
        "PARTIAL": int(n % OCTET != 0), "ALIGNED": int(is_aligned(x) and (other is None or is_aligned(other))),
    }  # fmt: skip
    launch = CudaLaunch(
        kernel=CudaKernel("quantize_rows.cu", "quantize_rows", tuple(macros.items())),
        grid=(-(-m // rows), 1, q.matrices),
        threads=32 * config.WARPS,
        shared=0,
        args={
            "x": x, "other": other, "data": out.data, "scale": out.scale, "M": m, "N": n, "x_m": x.stride(-2),
            "other_m": 0 if other is None else other.stride(-2),
            "data_m": out.data.stride(-2), "scale_lead": out.scale.stride(-3) if out.scale.dim() > 2 else 0,
        },
        target=q.target,
        options=macros,
        binds={"x": q.source.x, "other": q.source.other},
    )  # fmt: skip
    return (launch,)


def _rows_of(q: Quantization) -> Tensor:
    """`x`, or its transpose for whole columns: one row has one scale."""
    return q.x.mT if q.block == (WHOLE, 1) else q.x


def _output_of(q: Quantization) -> Quantized:
    return q.out.mT if q.block == (WHOLE, 1) else q.out
