"""The quantizers of grouped tokens on Hopper in CUDA C++: what they accept, and their calls (`quantize.cu`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.cuda.quantize.quantize import CHUNK, Quantized, accepts_rows, plan
from fp8fn.ops.cuda.runtime.call_cache import Call, Step, geometry
from fp8fn.ops.groups import ROWS, empty_grouped
from fp8fn.ops.layout import WHOLE, Block, empty_data, empty_scale
from fp8fn.ops.targets import OCP, Target


def accepts(x: Tensor, offsets: Tensor, dtype: torch.dtype, target: Target) -> str | None:
    """None where a call below takes a non-empty `x (M, N)`, else the reason why not."""
    if target.name != "sm90":
        return f"{target.name} is not sm90"
    if dtype not in OCP:
        return f"{dtype} is no type of the hardware"
    if not offsets.is_contiguous():
        return f"offsets has stride {offsets.stride(0)}, not 1"
    return accepts_rows(x, more_blocks=offsets.shape[0] + 1)


def call_quantize_grouped(x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize_grouped(x, offsets, (128, 1))` as a call on tensors of the kinds of these; see `accepts`."""
    col = Quantized(*empty_grouped(x, offsets.shape[0], (ROWS, 1), dtype, scale))
    launch = plan(x, None, col, False, scale, target, offsets=offsets)
    return Call((Step(launch.prepare(), (0, None, None, None, None, 2, 3, 1)),), tuple(map(geometry, col)), 2)


def call_quantize_grouped_dual(x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize_grouped_dual(x, offsets)`, like `call_quantize_grouped`."""
    row, col = _both(x, offsets, dtype, scale)
    launch = plan(x, row, col, False, scale, target, offsets=offsets)
    return Call((Step(launch.prepare(), (0, None, None, 2, 3, 4, 5, 1)),), tuple(map(geometry, (*row, *col))), 4)


def accepts_silu_mul(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, target: Target
) -> str | None:
    """Like `accepts`, for `call_silu_mul` in `block` and its transpose."""
    if WHOLE in block:
        return f"block {block} has one scale for the tokens of a group"
    for name, x in (("gate", gate), ("up", up)):
        if (reason := accepts(x, offsets, dtype, target)) is not None:
            return reason.replace("x has", f"{name} has")
    return None


def call_silu_mul(gate: Tensor, up: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, target: Target) -> Call:
    """`quantize_grouped_dual(silu(gate) * up, offsets)`, like `call_quantize_grouped`."""
    row, col = _both(gate, offsets, dtype, scale)
    launch = plan(gate, row, col, False, scale, target, source="SILU_MUL", other=up, offsets=offsets)
    return Call((Step(launch.prepare(), (0, 1, None, 3, 4, 5, 6, 2)),), tuple(map(geometry, (*row, *col))), 4)


def accepts_silu_mul_grad(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, target: Target
) -> str | None:
    """Like `accepts_silu_mul`, for `call_silu_mul_grad`."""
    if WHOLE in block:
        return f"block {block} has one scale for the tokens of a group"
    if grad.shape[-1] % CHUNK:
        return f"grad has {grad.shape[-1]} columns, no multiple of {CHUNK}"
    for name, x in (("grad", grad), ("hidden", hidden)):
        if (reason := accepts(x, offsets, dtype, target)) is not None:
            return reason.replace("x has", f"{name} has")
    return None


def call_silu_mul_grad(
    grad: Tensor, hidden: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, target: Target
) -> Call:
    """The gradient of `silu(gate) * up` in both, side by side as in `hidden`, like `call_silu_mul`."""
    row, col = _both(hidden, offsets, dtype, scale)
    launch = plan(hidden, row, col, False, scale, target, source="SILU_MUL_GRAD", other=grad, offsets=offsets)
    return Call((Step(launch.prepare(), (1, 0, None, 3, 4, 5, 6, 2)),), tuple(map(geometry, (*row, *col))), 4)


def _both(x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str) -> tuple[Quantized, Quantized]:
    """Where the rows go, and the spread columns."""
    row = Quantized(empty_data(x, (1, ROWS), dtype, False), empty_scale(x, (1, ROWS), scale, False))
    return row, Quantized(*empty_grouped(x, offsets.shape[0], (ROWS, 1), dtype, scale))
