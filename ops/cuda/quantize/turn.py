"""FP8 data in the other memory layout on Hopper: the launch of `turn.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import Tensor

from fp8fn.ops.cuda.limits import LARGEST
from fp8fn.ops.cuda.operands import is_aligned, rows_fault
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.targets import Target, hopper_fault

if TYPE_CHECKING:
    from fp8fn.ops.turn import Turn

_TILE: Final = (128, 256)
_THREADS: Final = 128


def accepts(given: Turn) -> str | None:
    """Why the kernel cannot copy data that is not empty, or None."""
    if (reason := hopper_fault(given.target) or rows_fault(given.x)) is not None:
        return reason
    if max(given.x.shape) > LARGEST:
        return f"x has shape {tuple(given.x.shape)}, past 32 bits"
    return None if is_aligned(given.x) else "rows of x begin at no multiples of 16 bytes"


def plan_turn(x: Tensor, out: Tensor, target: Target) -> tuple[CudaLaunch]:
    """The launch that copies `x (..., M, N)` to `out`, whose columns are contiguous and begin at multiples of 16."""
    (m, n), (rows, columns) = x.shape[-2:], _TILE
    macros = {"EVEN": int(m % rows == 0 and n % columns == 0)}
    launch = CudaLaunch(
        kernel=CudaKernel("turn.cu", "turn", tuple(macros.items())),
        grid=(-(-n // columns), -(-m // rows), x.shape[:-2].numel()),
        threads=_THREADS,
        shared=0,
        args={"x": x, "out": out, "M": m, "N": n, "x_m": x.stride(-2), "out_n": out.stride(-1)},
        options=macros,
        target=target,
    )
    return (launch,)
