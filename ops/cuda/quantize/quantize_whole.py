"""Whole matrices quantized on Hopper by one scale: the launches of `amax.cu`, and of `quantize.cu` after them.

`amax.cu` reads `x` once and leaves a maximum for each of its blocks of threads. `quantize.cu` reads these maxima and
`x` again, and writes one orientation or both. Where the maximum is given, `quantize.cu` alone is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.operands import ELEMENT, OCTET, hardware_fault, is_aligned, rows_fault
from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.cuda.quantize.quantize import QuantizeConfig
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import WHOLE, Block, is_column_major
from fp8fn.ops.operands import PLAIN, Quantization
from fp8fn.ops.targets import Target, hopper_fault

_TILE_COLUMNS: Final = 128


@dataclass(frozen=True)
class AmaxConfig:
    """The macros of `amax.cu`."""

    WARPS: int = 8
    ROWS: int = 8
    BLOCKS: int = 4
    LOAD: str = "CACHED"

    @property
    def tile_rows(self) -> int:
        return 2 * self.WARPS * self.ROWS


@dataclass(frozen=True)
class WholeConfig:
    """The configurations of both kernels."""

    amax: AmaxConfig
    quantize: QuantizeConfig


def accepts(q: Quantization) -> str | None:
    """Why the kernels cannot quantize a non-empty `x`, or None."""
    if q.source is not PLAIN or q.offsets is not None:
        return f"{'groups of rows have' if q.groups else q.source.macro + ' has'} no kernel for whole matrices"
    return amax_fault(q.x, q.block, q.target) or hardware_fault(q)


def amax_fault(x: Tensor, block: Block, target: Target) -> str | None:
    """Why `amax.cu` cannot find the largest magnitudes of a non-empty `x` in blocks, or None."""
    if block != (WHOLE, WHOLE):
        return f"block {block} is no whole matrix"
    return hopper_fault(target) or rows_fault(_rows_of(x))


def configure(q: Quantization) -> WholeConfig:
    return WholeConfig(configure_amax(q.x), quantize.configure(q))


def configure_amax(x: Tensor) -> AmaxConfig:
    """Half the rows for a thread whose elements have 32 bits, which take twice the registers."""
    return AmaxConfig(ROWS=8 if x.element_size() == 2 else 4)


def plan(q: Quantization, config: WholeConfig) -> tuple[CudaLaunch, ...]:
    """The launches on a quantization that the kernels accept."""
    if q.amax is not None:
        return quantize.plan(q, config.quantize)
    maxima = plan_maxima(q.x, q.target, config.amax)
    return maxima, *quantize.plan(q, config.quantize, maxima.args["amax"])  # type: ignore[arg-type]


def plan_amax(x: Tensor, amax: Tensor, target: Target, config: AmaxConfig) -> tuple[CudaLaunch, ...]:
    """The launches that fill `amax (..., 1, 1)`: the second one reduces the maxima of the first one's blocks."""
    if _blocks(x, target, config) == 1:
        return (plan_maxima(x, target, config, amax),)
    maxima = plan_maxima(x, target, config)
    of_blocks = maxima.args["amax"]
    assert isinstance(of_blocks, Tensor)
    rows = of_blocks.unsqueeze(-2)
    last = plan_maxima(rows, target, configure_amax(rows), amax)
    return maxima, replace(last, binds={"x": "maxima"}, scratch=("x",))


def plan_maxima(x: Tensor, target: Target, config: AmaxConfig, amax: Tensor | None = None) -> CudaLaunch:
    """The launch that fills `amax`, one maximum for each matrix, or as many maxima as keep the GPU busy."""
    matrices = x.shape[:-2].numel()
    scratch = amax is None
    if amax is None:
        amax = torch.empty((matrices, _blocks(x, target, config)), dtype=torch.float32, device=x.device)
    x = _rows_of(x)
    (m, n), rows = x.shape[-2:], config.tile_rows
    macros: dict[str, int | str] = {
        "INPUT": ELEMENT[x.dtype], "EVEN": int(m % rows == 0 and n % _TILE_COLUMNS == 0),
        "PARTIAL": int(n % OCTET != 0), "ALIGNED": int(is_aligned(x)), "WARPS": config.WARPS, "ROWS": config.ROWS,
        "BLOCKS": config.BLOCKS, "LOAD": f"Load::{config.LOAD}",
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("amax.cu", "amax", tuple(macros.items())),
        grid=(amax.numel() // matrices, 1, matrices),
        threads=32 * config.WARPS,
        shared=0,
        args={"x": x, "amax": amax, "M": m, "N": n, "x_m": x.stride(-2)},
        target=target,
        options=macros,
        binds={"amax": "maxima"} if scratch else {},
        scratch=("amax",) if scratch else (),
    )


def _blocks(x: Tensor, target: Target, config: AmaxConfig) -> int:
    """Blocks of threads for each matrix, each of which leaves a maximum: as many as keep the GPU busy."""
    m, n = _rows_of(x).shape[-2:]
    tiles = -(-m // config.tile_rows) * -(-n // _TILE_COLUMNS)
    return min(tiles, max(1, target.cores * config.BLOCKS // x.shape[:-2].numel()))


def _rows_of(x: Tensor) -> Tensor:
    """`x`, or its transpose where that has the contiguous rows."""
    return x.mT if is_column_major(x) else x
