"""`rms_norm(x, weight)` quantized on Hopper: by whole rows in one launch, or by blocks after the rows' statistics.

`rms_norm.cu` holds whole rows. It quantizes in blocks `(1, 128)` or with one scale for a row, and adds a residual
before. Blocks of more rows, both orientations at once, and rows of more than 16384 columns take a small launch of
`row_rstd.cu` for the rows' statistics, and a second read of `x` by `quantize.cu`. Given statistics save the first of
these launches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.operands import (
    ELEMENT,
    OCTET,
    hardware_fault,
    is_aligned,
    quantization_types,
    rows_fault,
)
from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.cuda.quantize.quantize import QuantizeConfig
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.layout import WHOLE, Block, is_column_major
from fp8fn.ops.operands import Quantization

# A block of `rms_norm.cu` has 256 threads. A pass is one octet of 8 columns for each; a thread holds 8 octets.
_PASS: Final = 2048
_OCTETS: Final = 8
_BLOCKS: Final[tuple[Block, ...]] = ((1, 128), (1, WHOLE))
_CHUNKWISE: Final[dict[str, int | str]] = {
    "SOURCE": "Source::PLAIN", "PARTIAL": 0, "ALIGNED": 1, "LOAD": "Load::PAST_L1", "STORE": "Store::NORMAL",
}  # fmt: skip


@dataclass(frozen=True)
class NormConfig:
    """The blocks of `rms_norm.cu` on a multiprocessor."""

    BLOCKS: int = 1


def accepts(q: Quantization) -> str | None:
    """Why `rms_norm.cu` cannot quantize in one launch, or None: whole rows fit, in octets of 8 aligned columns."""
    if q.block not in _BLOCKS or q.dual:
        return f"block {q.block}{' and its transpose' * q.dual} is none of {_BLOCKS} alone"
    if q.rstd is not None:
        return "the statistics are given"
    if (reason := hardware_fault(q) or quantize.norm_fault(q) or _residual_fault(q)) is not None:
        return reason
    if q.n > _PASS * _OCTETS or q.n % OCTET:
        return f"x has {q.n} columns, more than {_PASS * _OCTETS} or no multiple of {OCTET}"
    if not all(is_aligned(x) for x in (q.x, q.other, q.residual) if x is not None):
        return "rows of x or of residual, or weight, do not begin at multiples of 16 bytes"
    return None


def _residual_fault(q: Quantization) -> str | None:
    if q.residual is None:
        return None
    if is_column_major(q.residual):
        return f"residual has strides {q.residual.stride()}, not contiguous rows"
    return rows_fault(q.residual, "residual")


def configure(q: Quantization) -> NormConfig:
    """As many blocks as the registers of a multiprocessor allow."""
    even, passes = _is_even(q), _passes(q)
    if q.x.element_size() == 2:
        if not even:
            return NormConfig(3 if passes * _rows(q) < _OCTETS else 2)
        spills = q.residual is not None and (q.x.dtype == torch.float16 or (passes == 1 and q.block == (1, WHOLE)))
        return NormConfig(2 if spills else 3)
    return NormConfig(2 if even else 1)


def plan(q: Quantization, config: NormConfig) -> tuple[CudaLaunch]:
    """The launch of `quantize(rms_norm(x, weight), block)`, or of the rows `x + residual`."""
    macros: dict[str, int | str] = {
        **quantization_types(q), **_CHUNKWISE, "EVEN": int(_is_even(q)), "ROWS": _rows(q), "PASSES": _passes(q),
        "BLOCKS": config.BLOCKS, "WHOLE": int(q.block == (1, WHOLE)), "ADD": int(q.residual is not None),
    }  # fmt: skip
    rows, out, residual, total = q.m * q.matrices, q.out, q.residual, q.sum
    lead = out.scale.stride(-1)
    if q.block == (1, WHOLE):  # from a matrix to the next
        lead = out.scale.stride(-3) if out.scale.dim() > 2 else 0
    launch = CudaLaunch(
        kernel=CudaKernel("rms_norm.cu", "quantize_rms_norm", tuple(macros.items())),
        grid=(-(-rows // _rows(q)), 1, 1),
        threads=256,
        shared=0,
        args={
            "x": q.x, "residual": residual, "weight": q.other, "sum": total, "row_data": out.data,
            "row_scale": out.scale, "M": rows, "N": q.n, "matrix_m": q.m, "x_m": q.x.stride(-2),
            "residual_m": 0 if residual is None else residual.stride(-2),
            "sum_m": 0 if total is None else total.stride(-2), "row_m": out.data.stride(-2), "row_scale_lead": lead,
            "eps": q.eps,
        },
        target=q.target,
        options=macros,
        binds={"row_data": "data", "row_scale": "scale"},
    )  # fmt: skip
    return (launch,)


def plan_blocks(q: Quantization, config: QuantizeConfig) -> tuple[CudaLaunch, ...]:
    """The launches of `row_rstd.cu`, where the statistics are not given, and of `quantize.cu`."""
    if q.rstd is not None:
        return quantize.plan(q, config)
    rstd = torch.empty(q.x.shape[:-1], dtype=torch.float32, device=q.x.device)
    statistics, binds = plan_row_rstd(q, rstd), {"rstd": "statistics"}
    (launch,) = quantize.plan(replace(q, rstd=rstd, into=q.outs), config)
    return replace(statistics, binds=binds), replace(launch, binds={**launch.binds, **binds})


def plan_row_rstd(q: Quantization, rstd: Tensor) -> CudaLaunch:
    """The launch of `rstd (..., M) = 1 / sqrt(mean(x²) + eps)`."""
    macros: dict[str, int | str] = {
        **_CHUNKWISE, "INPUT": ELEMENT[q.x.dtype], "EVEN": 0, "ROWS": 1, "PARTIAL": int(q.n % OCTET != 0),
        "ALIGNED": int(is_aligned(q.x)),
    }  # fmt: skip
    return CudaLaunch(
        kernel=CudaKernel("row_rstd.cu", "row_rstd", tuple(macros.items())),
        grid=(rstd.numel(), 1, 1),
        threads=256,
        shared=0,
        args={"x": q.x, "rstd": rstd, "M": rstd.numel(), "N": q.n, "x_m": q.x.stride(-2), "eps": q.eps},
        target=q.target,
        options=macros,
        scratch=("rstd",),
    )


def _passes(q: Quantization) -> int:
    return -(-q.n // _PASS)


def _rows(q: Quantization) -> int:
    """The rows of a block: as many as its octets hold."""
    return 1 << (_OCTETS // _passes(q)).bit_length() - 1


def _is_even(q: Quantization) -> bool:
    return q.n == _passes(q) * _PASS and q.m * q.matrices % _rows(q) == 0
