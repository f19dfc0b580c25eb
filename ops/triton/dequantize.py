"""FP8 data times its scales, in 16 bits, in one read."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fp8fn.ops.layout import WHOLE
from fp8fn.ops.operands import Quantized
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.views import ceil_div, is_wide

# The elements of a row that share a scale, or a part of a whole row.
COLUMNS = 128


@dataclass(frozen=True)
class DequantizeTile:
    """The part of a matrix that one program takes; `columns` is a multiple of `COLUMNS`."""

    rows: int = 16
    columns: int = 512
    num_warps: int = 4


@triton.jit
def dequantize(
    data, scale, out, M, N, data_m, scale_m, scale_n, out_m, tiles_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One `BM x BN` tile; `ROWS` rows share their scales."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    rows = (pid // tiles_n * BM + tl.arange(0, BM))[:, None]
    columns = (pid % tiles_n * BN + tl.arange(0, BN))[None, :]
    blocks = (pid % tiles_n * (BN // COLUMNS) + tl.arange(0, BN // COLUMNS))[None, :]
    inside = (rows < M) & (columns < N)
    values = tl.load(data + rows * data_m + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(
        scale + rows // ROWS * scale_m + blocks * scale_n, mask=(rows < M) & (blocks * COLUMNS < N), other=0.0
    )
    values = tl.reshape(tl.reshape(values, (BM, BN // COLUMNS, COLUMNS)) * scales[:, :, None], (BM, BN))
    tl.store(out + rows * out_m + columns, values.to(out.dtype.element_ty), mask=inside)


def plan_dequantize(q: Quantized, out: Tensor, target: Target, tile: DequantizeTile | None = None) -> TritonLaunch:
    """The launch that fills `out (M, N)`; rows of `q` are contiguous, in blocks of `COLUMNS` columns or of whole rows.

    Scales are float32.
    """
    (data, scale, (rows, columns)), tile = q, tile or DequantizeTile()
    if columns not in (COLUMNS, WHOLE):
        raise ValueError(f"block is {q.block}; its scales hold for {COLUMNS} columns or for whole rows")
    m, n = data.shape
    tiles_m, tiles_n = ceil_div(m, tile.rows), ceil_div(n, tile.columns)
    return TritonLaunch(
        kernel=dequantize,
        grid=(tiles_m * tiles_n, 1, 1),
        args={
            "data": data, "scale": scale, "out": out, "M": m, "N": n, "data_m": data.stride(0),
            "scale_m": 0 if rows == WHOLE else scale.stride(0), "scale_n": 0 if columns == WHOLE else scale.stride(1),
            "out_m": out.stride(0), "tiles_n": tiles_n,
        },
        constexprs={
            "ROWS": 1 if rows == WHOLE else rows, "COLUMNS": COLUMNS, "BM": tile.rows, "BN": tile.columns,
            "WIDE": is_wide(data, scale, out),
        },
        options={"num_warps": tile.num_warps},
        target=target,
    )  # fmt: skip
