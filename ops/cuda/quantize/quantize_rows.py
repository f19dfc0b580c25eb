"""Whole rows quantized on Hopper: what is accepted, and the launch of `quantize_rows.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.quantize.quantize import CHUNK, Quantized, accepts_rows, is_aligned, outgrows_l2, types
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.targets import OCP, Target

_CHUNKS: Final = 8  # of a thread at most, so that four blocks or more share the registers of a multiprocessor
_LONGEST: Final = {2: 32768, 4: 16384}  # columns, by the bytes of an element: 16 warps


@dataclass(frozen=True)
class Tile:
    """`quantize_rows.cu` says what each is."""

    WARPS: int = 4
    ROW_WARPS: int = 4
    LOAD: str = "PAST_L1"


def default_tile(columns: int, element_bytes: int) -> Tile:
    """The fewest warps that hold a row."""
    most = _CHUNKS * 2 // element_bytes
    warps = next(warps for warps in (1, 2, 4, 8, 16) if columns <= 32 * warps * CHUNK * most)
    return Tile(max(warps, 4), warps)


def accepts(x: Tensor, dtype: torch.dtype, target: Target) -> str | None:
    """None where `plan` takes a row-major `x (..., M, N)`, else the reason why not."""
    if target.name != "sm90":
        return f"{target.name} is not sm90"
    if dtype not in OCP:
        return f"{dtype} is no type of the hardware"
    if x.shape[-1] > (longest := _LONGEST[x.element_size()]):
        return f"x has rows of {x.shape[-1]}, more than {longest}"
    return accepts_rows(x)


def plan(x: Tensor, out: Quantized, scale: str, target: Target, tile: Tile | None = None) -> CudaLaunch:
    """The launch on a row-major `x (B?, M, N)`."""
    *batch, m, n = x.shape
    if tile is None:
        tile = default_tile(n, x.element_size())
        if x.element_size() == 2 and outgrows_l2(x, 3):  # loads of float32 take no hint
            tile = replace(tile, LOAD="LAST_OUT")
    chunks, rows = -(-n // (32 * tile.ROW_WARPS * CHUNK)), tile.WARPS // tile.ROW_WARPS
    macros: dict[str, int | str] = {
        **types(x, out, scale),
        "WARPS": tile.WARPS, "ROW_WARPS": tile.ROW_WARPS, "OCTETS": chunks, "LOAD": f"Load::{tile.LOAD}",
        "EVEN": int(m % rows == 0 and n == 32 * tile.ROW_WARPS * CHUNK * chunks), "PARTIAL": int(n % CHUNK != 0),
        "ALIGNED": int(is_aligned(x)),
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("quantize_rows.cu", "quantize_rows", tuple(macros.items())),
        grid=(-(-m // rows), 1, batch[0] if batch else 1),
        threads=32 * tile.WARPS,
        shared=0,
        args={
            "x": x, "data": out.data, "scale": out.scale, "M": m, "N": n, "x_m": x.stride(-2),
            "data_m": out.data.stride(-2), "scale_lead": out.scale.stride(0) if out.scale.dim() == 3 else 0,
        },
        target=target,
        options=macros,
    )  # fmt: skip
