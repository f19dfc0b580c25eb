"""The ops that compute `silu(gate) * up` or `rms_norm(x, weight)` and quantize it, in one orientation or in both.

`quantize_add_rms_norm` normalises `x + residual`, rounded to the type of both, which is a result too.

They compute in float32 and round once, to FP8: `quantize_silu_mul(gate, up)` is
`quantize(silu(gate.float()) * up.float())`. On every device `silu` has a relative error under 1e-5, and `rms_norm` has
the reference's bits. Given `rstd (..., M)` in float32, `quantize_rms_norm` quantizes `x * rstd * weight`, and neither
sums nor reads `eps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.kernel import Dispatch, Kernel, deferred
from fp8fn.ops.layout import WHOLE, Block, contracts_rows, empty_data, empty_scale
from fp8fn.ops.operands import RMS_NORM, SILU_MUL, Quantization, empty_dual
from fp8fn.ops.quantize import (
    check_layout,
    check_quantize,
    checked_block,
    checked_dual_block,
    quantize_dual_kernel,
    quantize_kernel,
    unserved,
)

if TYPE_CHECKING:
    from fp8fn.ops.cuda.quantize import quantize as cuda_blocks
    from fp8fn.ops.cuda.quantize import quantize_rows, rms_norm
else:
    cuda_blocks, rms_norm = deferred("fp8fn.ops.cuda.quantize.quantize"), deferred("fp8fn.ops.cuda.quantize.rms_norm")
    quantize_rows = deferred("fp8fn.ops.cuda.quantize.quantize_rows")

_FORMAT: Final = 'int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32"'
_DUAL_BLOCK: Final = "int[2]? dual_block=None"
_LAYOUT: Final = "bool? column_major=None"
_NORM: Final = f"Tensor x, Tensor weight, float eps=1e-06, {_FORMAT}, Tensor? rstd=None"
_ADD_NORM: Final = f"Tensor x, Tensor residual, Tensor weight, float eps=1e-06, {_FORMAT}"
_ONE: Final = "(Tensor, Tensor)"
_TWO: Final = "(Tensor, Tensor, Tensor, Tensor)"
SILU_MUL_SCHEMA: Final = f"quantize_silu_mul(Tensor gate, Tensor up, {_FORMAT}, {_LAYOUT}) -> {_ONE}"
SILU_MUL_DUAL_SCHEMA: Final = f"quantize_silu_mul_dual(Tensor gate, Tensor up, {_FORMAT}, {_DUAL_BLOCK}) -> {_TWO}"
RMS_NORM_SCHEMA: Final = f"quantize_rms_norm({_NORM}, {_LAYOUT}) -> {_ONE}"
ADD_RMS_NORM_SCHEMA: Final = f"quantize_add_rms_norm({_ADD_NORM}) -> (Tensor, Tensor, Tensor)"
RMS_NORM_DUAL_SCHEMA: Final = f"quantize_rms_norm_dual({_NORM}, {_DUAL_BLOCK}) -> {_TWO}"


def check_silu_mul(
    gate: Tensor, up: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str
) -> tuple[Block, torch.dtype]:
    """The block and the element type, or the error that says which argument is wrong and what would work."""
    pair = check_quantize(gate, block, dtype, scale, name, "gate")
    check_gate_and_up(name, gate, up)
    return pair


def check_gate_and_up(name: str, gate: Tensor, up: Tensor) -> None:
    """Raises the error of the op `name` where `up` is unlike `gate`."""
    if up.shape != gate.shape:
        raise ValueError(f"{name}: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; they must be equal")
    if up.dtype != gate.dtype:
        raise TypeError(f"{name}: gate has dtype {gate.dtype} and up {up.dtype}; up.to({gate.dtype}) for one")
    if up.device != gate.device:
        raise ValueError(f"{name}: gate is on {gate.device} and up on {up.device}; move them to one device")


def check_rms_norm(
    x: Tensor, weight: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str,
    rstd: Tensor | None = None,
) -> tuple[Block, torch.dtype]:  # fmt: skip
    """Like `check_silu_mul`."""
    pair = check_quantize(x, block, dtype, scale, name)
    if tuple(weight.shape) != (x.shape[-1],):
        given, needed = tuple(weight.shape), x.shape[-1]
        raise ValueError(f"{name}: weight has shape {given}; it must be ({needed},), the last axis of x")
    if not weight.dtype.is_floating_point or weight.element_size() not in (2, 4):
        raise TypeError(f"{name}: weight has dtype {weight.dtype}; use bfloat16, float16 or float32")
    if weight.device != x.device:
        raise ValueError(f"{name}: x is on {x.device} and weight on {weight.device}; move them to one device")
    if rstd is not None:
        if rstd.shape != x.shape[:-1] or rstd.dtype != torch.float32:
            remedy = f"it must be torch.float32 of shape {tuple(x.shape[:-1])}, one for each row of x"
            raise ValueError(f"{name}: rstd is {rstd.dtype} of shape {tuple(rstd.shape)}; {remedy}")
        if rstd.device != x.device:
            raise ValueError(f"{name}: x is on {x.device} and rstd on {rstd.device}; move them to one device")
    return pair


def check_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str
) -> tuple[Block, torch.dtype]:
    """Like `check_silu_mul`."""
    pair = check_rms_norm(x, weight, block, dtype, scale, name)
    if residual.shape != x.shape:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}; they must be equal"
        )
    if residual.dtype != x.dtype:
        raise TypeError(f"{name}: x has dtype {x.dtype} and residual {residual.dtype}; residual.to({x.dtype}) for one")
    if residual.device != x.device:
        raise ValueError(f"{name}: x is on {x.device} and residual on {residual.device}; move them to one device")
    return pair


def check_eps(name: str, eps: float, rstd: Tensor | None) -> None:
    """ValueError for an `eps` that makes every row NaN, or zeros; given `rstd`, no kernel reads `eps`."""
    if rstd is None and not 0 <= eps < math.inf:
        raise ValueError(f"{name}: eps={eps} is not finite and at least 0; use a small float, 1e-6 for one")


def quantize_silu_mul_reference(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul")
    check_layout("quantize_silu_mul", pair, column_major)
    return reference.quantize(reference.silu_mul(gate, up), pair, fp8, scale, None, column_major)


def quantize_silu_mul_fake(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul")
    check_layout("quantize_silu_mul", pair, column_major)
    return _empty(gate, pair, fp8, scale, column_major)


def quantize_silu_mul_dual_reference(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul_dual")
    other = checked_dual_block("quantize_silu_mul_dual", pair, dual_block)
    return reference.quantize_dual(reference.silu_mul(gate, up), pair, fp8, scale, None, other)


def quantize_silu_mul_dual_fake(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul_dual")
    return empty_dual(gate, pair, fp8, scale, checked_dual_block("quantize_silu_mul_dual", pair, dual_block))


def quantize_rms_norm_reference(  # noqa: PLR0913 - an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm", rstd)
    check_eps("quantize_rms_norm", eps, rstd)
    check_layout("quantize_rms_norm", pair, column_major)
    return reference.quantize(reference.rms_norm(x, weight, eps, rstd), pair, fp8, scale, None, column_major)


def quantize_rms_norm_fake(  # noqa: PLR0913 - an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm", rstd)
    check_layout("quantize_rms_norm", pair, column_major)
    return _empty(x, pair, fp8, scale, column_major)


def quantize_rms_norm_dual_reference(  # noqa: PLR0913 - an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm_dual", rstd)
    check_eps("quantize_rms_norm_dual", eps, rstd)
    other = checked_dual_block("quantize_rms_norm_dual", pair, dual_block)
    return reference.quantize_dual(reference.rms_norm(x, weight, eps, rstd), pair, fp8, scale, None, other)


def quantize_rms_norm_dual_fake(  # noqa: PLR0913 - an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm_dual", rstd)
    return empty_dual(x, pair, fp8, scale, checked_dual_block("quantize_rms_norm_dual", pair, dual_block))


def quantize_add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_add_rms_norm(x, residual, weight, block, dtype, scale, "quantize_add_rms_norm")
    check_eps("quantize_add_rms_norm", eps, None)
    total = _sum(x, residual)
    return *reference.quantize(reference.rms_norm(total, weight, eps), pair, fp8, scale), total


def quantize_add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_add_rms_norm(x, residual, weight, block, dtype, scale, "quantize_add_rms_norm")
    return *_empty(x, pair, fp8, scale, None), torch.empty_like(x, memory_format=torch.contiguous_format)


def quantize_silu_mul_kernel(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize_silu_mul", block)
    data, scales = QUANTIZE_SILU_MUL((gate, up), (False, pair, dtype, scale, None, column_major))
    return data, scales


def quantize_silu_mul_dual_kernel(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize_silu_mul_dual", block)
    other = checked_dual_block("quantize_silu_mul_dual", pair, dual_block)
    row, row_scale, col, col_scale = QUANTIZE_SILU_MUL((gate, up), (True, pair, dtype, scale, other, None))
    return row, row_scale, col, col_scale


def quantize_rms_norm_kernel(  # noqa: PLR0913 - an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize_rms_norm", block)
    rstd, eps = _statistics(rstd, eps)
    form = (pair, dtype, scale)
    data, scales = QUANTIZE_RMS_NORM((x, weight, rstd, None), (False, form, eps, None, column_major))
    return data, scales


def quantize_add_rms_norm_kernel(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    form = (checked_block("quantize_add_rms_norm", block), dtype, scale)
    data, scales, total = QUANTIZE_RMS_NORM((x, weight, None, residual), (False, form, eps, None, None))
    return data, scales, total


def quantize_rms_norm_dual_kernel(  # noqa: PLR0913 - an op's signature
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None, dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize_rms_norm_dual", block)
    other = checked_dual_block("quantize_rms_norm_dual", pair, dual_block)
    rstd, eps = _statistics(rstd, eps)
    values = (True, (pair, dtype, scale), eps, other, None)
    row, row_scale, col, col_scale = QUANTIZE_RMS_NORM((x, weight, rstd, None), values)
    return row, row_scale, col, col_scale


def _empty(x: Tensor, block: Block, dtype: torch.dtype, scale: str, column_major: bool | None) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs in `block`; a square block's data is row-major by default, whatever the layout of `x`."""
    layout = contracts_rows(block) if column_major is None else column_major
    return empty_data(x, block, dtype, layout), empty_scale(x, block, scale, layout)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    return (x + residual).contiguous()


def _statistics(rstd: Tensor | None, eps: float) -> tuple[Tensor | None, float]:
    """As kernels read them: contiguous. Beside `rstd`, no kernel reads `eps`, so all values of it share kept calls."""
    return (None, eps) if rstd is None else (rstd.contiguous(), 0.0)


def _silu_mul_operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (gate, up), (dual, block, dtype, scale, dual_block, column_major) = tensors, values
    op = f"quantize_silu_mul{'_dual' * dual}"
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, op)
    check_layout(op, pair, column_major)
    return Quantization(
        x=gate, other=up, source=SILU_MUL, block=pair, dtype=fp8, scale=scale, dual=dual,
        dual_block=dual_block, column_major=column_major, target=targets.target_of(gate.device),
    )  # fmt: skip


def _rms_norm_operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (x, weight, rstd, residual), (dual, form, eps, dual_block, column_major) = tensors, values
    block, dtype, scale = form
    if residual is None:
        op = f"quantize_rms_norm{'_dual' * dual}"
        pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, op, rstd)
    else:
        op = "quantize_add_rms_norm"
        pair, fp8 = check_add_rms_norm(x, residual, weight, block, dtype, scale, op)
    check_eps(op, eps, rstd)
    check_layout(op, pair, column_major)
    return Quantization(
        x=x, other=weight, rstd=rstd, eps=eps, residual=residual, source=RMS_NORM, block=pair, dtype=fp8,
        scale=scale, dual=dual, dual_block=dual_block, column_major=column_major,
        target=targets.target_of(x.device),
    )  # fmt: skip


def unserved_by_blocks(q: Quantization) -> str | None:
    return unserved(q) or cuda_blocks.accepts(q)


def why_not_silu_mul(q: Quantization) -> str | None:
    """None where a kernel on a GPU quantizes `silu(gate) * up`, else why none does."""
    by_rows = q.block == (1, WHOLE) and q.offsets is None
    return quantize_rows.accepts(q) if by_rows else cuda_blocks.accepts(q)


def why_not_rms_norm(q: Quantization) -> str | None:
    """None where a kernel on a GPU quantizes `rms_norm(x, weight)`, else why none does."""
    by_rows = q.block == (1, WHOLE) or q.residual is not None
    return rms_norm.accepts(q) if by_rows else cuda_blocks.accepts(q)


def _reference(q: Quantization) -> Sequence[Tensor]:
    """Computed by plain PyTorch in float32, then quantized by the other op."""
    assert q.other is not None
    if q.residual is not None:
        total = _sum(q.x, q.residual)
        return *quantize_kernel(reference.rms_norm(total, q.other, q.eps), q.block, q.dtype, q.scale), total
    y = reference.silu_mul(q.x, q.other) if q.source is SILU_MUL else reference.rms_norm(q.x, q.other, q.eps, q.rstd)
    if q.dual:
        return quantize_dual_kernel(y, q.block, q.dtype, q.scale, dual_block=q.dual_block)
    return quantize_kernel(y, q.block, q.dtype, q.scale, None, q.column_major)


QUANTIZE_SILU_MUL: Final = Dispatch(
    op="quantize_silu_mul",
    inputs=("gate", "up"),
    operands=_silu_mul_operands,
    kernels=(
        Kernel("cuda_whole_rows", quantize_rows.accepts, quantize_rows.configure, quantize_rows.plan),
        Kernel("cuda_blocks", cuda_blocks.accepts, cuda_blocks.configure, cuda_blocks.plan),
    ),
    reference=_reference,
    unserved=lambda q: unserved(q) or why_not_silu_mul(q),
)

QUANTIZE_RMS_NORM: Final = Dispatch(
    op="quantize_rms_norm",
    inputs=("x", "weight", "rstd", "residual"),
    operands=_rms_norm_operands,
    kernels=(
        Kernel("cuda_rows", rms_norm.accepts, rms_norm.configure, rms_norm.plan),
        Kernel("cuda_blocks", cuda_blocks.accepts, cuda_blocks.configure, rms_norm.plan_blocks),
    ),
    reference=_reference,
    unserved=lambda q: unserved(q) or why_not_rms_norm(q),
)
