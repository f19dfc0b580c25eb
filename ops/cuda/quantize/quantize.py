"""The quantizers in blocks of 128 on Hopper: what they accept, their configurations, and the launch of `quantize.cu`.

One kernel serves matrices and groups of rows, one orientation and both, and what a `Source` computes before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from torch import Tensor

from fp8fn.ops.cuda.operands import (
    ELEMENT,
    OCTET,
    hardware_fault,
    is_aligned,
    offsets_fault,
    outgrows_l2,
    quantization_types,
    rows_fault,
)
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.groups import spread_blocks, spread_unit
from fp8fn.ops.layout import WHOLE, Block, contracts_rows, is_column_major, is_square
from fp8fn.ops.operands import OUTPUTS, PLAIN, RMS_NORM, SILU_MUL_GRAD, Quantization, Quantized

BLOCK_SHAPES: Final[tuple[Block, ...]] = ((1, 128), (128, 1), (128, 128))
_TILE_COLUMNS: Final = 128
_MOST_NORM_ROWS: Final = 2**30
_LOG: Final = logging.getLogger("fp8fn")


@dataclass(frozen=True)
class QuantizeConfig:
    """Threads of a block and their accesses; `quantize.cu` says what each macro does.

    A tile has `2 * WARPS * ROWS` rows. It must have 128, but any number will do for row blocks alone.
    """

    WARPS: int = 8
    ROWS: int = 8
    BLOCKS: int = 4
    GROUP: int = 1
    LOAD: str = "CACHED"
    STORE: str = "NORMAL"
    ROW_BYTES: int = 16

    @property
    def rows(self) -> int:
        return 2 * self.WARPS * self.ROWS

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "default"


class Side(NamedTuple):
    """One orientation of the output, and the op's names of its data and its scales."""

    out: Quantized
    names: tuple[str, str]

    @property
    def mT(self) -> Side:
        return Side(self.out.mT, self.names)


def accepts(q: Quantization) -> str | None:
    """Why the kernel cannot compute a quantization of a non-empty `x`, or None."""
    if (reason := hardware_fault(q) or offsets_fault(q)) is not None:
        return reason
    if q.residual is not None:
        return "the sum of x and residual is an output of the kernel of whole rows alone"
    if q.offsets is not None and WHOLE in q.block:
        return f"block {q.block} has one scale for the tokens of a group"
    if q.block not in BLOCK_SHAPES:
        return f"block {q.block} is none of {BLOCK_SHAPES}"
    return norm_fault(q) if q.source is RMS_NORM else _matrices_fault(q)


def _matrices_fault(q: Quantization) -> str | None:
    if q.source is SILU_MUL_GRAD and q.other is not None and q.other.shape[-1] % OCTET:
        return f"grad has {q.other.shape[-1]} columns, no multiple of {OCTET}"
    for name, x in q.operands.items():
        if q.source is not PLAIN and q.offsets is None and is_column_major(x):
            return f"{name} has strides {x.stride()}, not contiguous rows"
        rows = x.mT if _is_turned(q) else x
        if (reason := rows_fault(rows, name, q.groups + 1 if q.groups else 0)) is not None:
            return reason
    return None


def norm_fault(q: Quantization) -> str | None:
    """Why no kernel can read the rows and the weight of a norm, or None."""
    x, weight = q.x, q.other
    assert weight is not None
    if weight.dtype != x.dtype:
        return f"weight has dtype {weight.dtype} and x {x.dtype}"
    if weight.stride(0) != 1 and weight.numel() > 1:
        return f"weight has stride {weight.stride(0)}"
    if q.m * q.matrices > _MOST_NORM_ROWS:
        return f"x has shape {tuple(x.shape)}, more than {_MOST_NORM_ROWS} rows"
    if is_column_major(x):
        return f"x has strides {x.stride()}, not contiguous rows"
    return rows_fault(x)


def configure(q: Quantization) -> QuantizeConfig:
    """The fastest of the configurations that were timed, with fewer blocks where a thread needs more registers.

    From five times the size of the L2 on, `x` stays there. For groups, for which an `x` that was just written was not
    timed, that is from once on, or from three times on where both orientations are written.
    """
    narrow = q.x.element_size() == 2 and _is_aligned(q)
    if q.source is not PLAIN:
        return QuantizeConfig(BLOCKS=2 if narrow else 1)
    if narrow:
        times = 5 if q.offsets is None else 3 if q.dual else 1
        return QuantizeConfig(BLOCKS=4, LOAD="LAST_OUT" if outgrows_l2(q.x, times) else "CACHED")
    return QuantizeConfig(BLOCKS=2)


def plan(q: Quantization, config: QuantizeConfig, maxima: Tensor | None = None) -> tuple[CudaLaunch]:
    """The launch on a quantization that the kernel accepts; a column-major `x` is planned as its transpose.

    `maxima (B, P)` are magnitudes, for each matrix several of which the largest is that of the matrix. The launch
    before leaves them where `x` comes without its own `amax`.
    """
    x = q.x.mT if _is_turned(q) else q.x
    amax = q.amax if maxima is None else maxima
    other, rstd, offsets = q.other, q.rstd, q.offsets
    row, column = _sides(q)
    row_square, column_square = (side is not None and is_square(side.out.block) for side in (row, column))
    m, n = x.shape[-2:]
    macros: dict[str, int | str] = {
        **quantization_types(q),
        "SOURCE": f"Source::{q.source.macro}",
        "BY_ROW": int(row is not None),
        "BY_COLUMN": int(column is not None),
        "ROW_SQUARE": int(row_square),
        "COLUMN_SQUARE": int(column_square),
        "GIVEN": "Element::NONE" if amax is None else ELEMENT[amax.dtype],
        "EVEN": int(offsets is None and m % config.rows == 0 and n % _TILE_COLUMNS == 0),
        "PARTIAL": int(n % OCTET != 0),
        "ALIGNED": int(_is_aligned(q)),
        "GROUPED": int(offsets is not None),
    }
    tiles_m = -(-m // config.rows)
    if offsets is not None:  # one more than there are blocks of columns, for the rows of no group
        tiles_m = spread_blocks(m, q.groups) + (row is not None)
        macros["SPREAD_UNIT"] = spread_unit(m, q.groups)
    options: dict[str, int | str] = {
        "WARPS": config.WARPS, "ROWS": config.ROWS, "BLOCKS": config.BLOCKS, "GROUP": config.GROUP,
        "LOAD": f"Load::{config.LOAD}", "STORE": f"Store::{config.STORE}", "ROW_BYTES": config.ROW_BYTES,
    }  # fmt: skip
    binds = {"x": q.source.x, "other": q.source.other}
    if maxima is not None:
        binds["amax"] = "maxima"
    for kernel_names, side in ((("row_data", "row_scale"), row), (("col_data", "col_scale"), column)):
        if side is not None:
            binds |= zip(kernel_names, side.names, strict=True)
    launch = CudaLaunch(
        kernel=CudaKernel("quantize.cu", "quantize", (*macros.items(), *options.items())),
        grid=(-(-n // _TILE_COLUMNS), tiles_m, q.matrices),
        threads=32 * config.WARPS,
        shared=0,
        args={
            "x": x, "other": other, "rstd": rstd,
            "row_data": row and row.out.data, "row_scale": row and row.out.scale,
            "col_data": column and column.out.data, "col_scale": column and column.out.scale, "offsets": offsets,
            "M": m, "N": n, "x_m": x.stride(-2),
            "other_m": 0 if other is None or other.dim() == 1 else other.stride(-2),
            "row_m": row.out.data.stride(-2) if row else 0,
            "row_scale_lead": row.out.scale.stride(-2 if row_square else -1) if row else 0,
            "col_n": column.out.data.stride(-1) if column else 0,
            "col_scale_lead": column.out.scale.stride(-1 if column_square else -2) if column else 0,
            "groups": q.groups, "amax": amax, "amax_count": 0 if amax is None else amax.numel() // q.matrices,
        },
        target=q.target,
        options={**macros, **options},
        binds=binds,
        scratch=() if maxima is None else ("amax",),
    )  # fmt: skip
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("quantize %s %s: %s", tuple(x.shape), x.dtype, launch.describe())
    return (launch,)


def _is_turned(q: Quantization) -> bool:
    """Whether the kernel quantizes the transpose, whose rows are contiguous."""
    return q.source is PLAIN and q.offsets is None and is_column_major(q.x)


def _is_aligned(q: Quantization) -> bool:
    x: Tensor = q.x.mT if _is_turned(q) else q.x
    return is_aligned(x) and (q.other is None or is_aligned(q.other))


def _sides(q: Quantization) -> tuple[Side | None, Side | None]:
    """The output in blocks along the rows that the kernel reads, or in square ones, and the output along its columns.

    The first has row-major data, the second column-major data. One output in square blocks lies as `x` does, unless
    `column_major` is the other layout; that of groups is column-major.
    """
    if q.column_major not in (None, is_column_major(q.x)):
        out = Side(q.out, OUTPUTS[0])
        return None, out.mT if _is_turned(q) else out
    if q.offsets is not None and not q.dual:  # tokens are summed over
        return None, Side(q.out, OUTPUTS[0])
    first, second = (*map(Side, q.outs, OUTPUTS), None)[:2]
    row, column = (second, first) if contracts_rows(q.block) else (first, second)
    if not _is_turned(q):
        return row, column
    row, column = row and row.mT, column and column.mT
    return (column, row) if q.dual or not is_square(q.block) else (row, column)
