"""The ops that quantize what they compute: `silu(gate) * up` and `rms_norm(x, weight)`, in one format or in both.

The arithmetic before the quantization is float32, and nothing is rounded in between: `quantize_silu_mul(gate, up)` is
`quantize(silu(gate.float()) * up.float())`. On every device `silu` has a relative error under 1e-5, and `rms_norm` the
same bits. A caller that has `rstd (..., M)`, float32, of `x * rstd * weight` gives it to `rms_norm`, which then leaves
out the sums and `eps`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import rms_norm
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.call_cache import keep, kind, recall
from fp8fn.ops.layout import Block
from fp8fn.ops.quantize import (
    check_quantize,
    kernel_takes,
    quantize_dual_kernel,
    quantize_kernel,
)

_FORMAT: Final = 'int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32"'
_NORM: Final = f"Tensor x, Tensor weight, float eps=1e-06, {_FORMAT}, Tensor? rstd=None"
_ONE: Final = "(Tensor, Tensor)"
_TWO: Final = "(Tensor, Tensor, Tensor, Tensor)"
SILU_MUL_SCHEMA: Final = f"quantize_silu_mul(Tensor gate, Tensor up, {_FORMAT}) -> {_ONE}"
SILU_MUL_DUAL_SCHEMA: Final = f"quantize_silu_mul_dual(Tensor gate, Tensor up, {_FORMAT}) -> {_TWO}"
RMS_NORM_SCHEMA: Final = f"quantize_rms_norm({_NORM}) -> {_ONE}"
RMS_NORM_DUAL_SCHEMA: Final = f"quantize_rms_norm_dual({_NORM}) -> {_TWO}"

_log = logging.getLogger("fp8fn")


def check_silu_mul(
    gate: Tensor, up: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str
) -> tuple[Block, torch.dtype]:
    """The block and the element type, or the error that says which argument is wrong and what would work."""
    pair = check_quantize(gate, block, dtype, scale, name, "gate")
    if up.shape != gate.shape:
        raise ValueError(f"{name}: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; they must be equal")
    if up.dtype != gate.dtype:
        raise TypeError(f"{name}: gate has dtype {gate.dtype} and up {up.dtype}; up.to({gate.dtype}) for one")
    if up.device != gate.device:
        raise ValueError(f"{name}: gate is on {gate.device} and up on {up.device}; move them to one device")
    return pair


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


def check_eps(name: str, eps: float, rstd: Tensor | None) -> None:
    """ValueError for an `eps` that makes every row NaN, or zeros; beside `rstd` it is not read."""
    if rstd is None and not 0 <= eps < math.inf:
        raise ValueError(f"{name}: eps={eps} is not finite and at least 0; use a small float, 1e-6 for one")


def quantize_silu_mul_reference(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul")
    return reference.quantize(reference.silu_mul(gate, up), pair, fp8, scale)


def quantize_silu_mul_dual_reference(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, "quantize_silu_mul_dual")
    return reference.quantize_dual(reference.silu_mul(gate, up), pair, fp8, scale)


def quantize_rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm", rstd)
    check_eps("quantize_rms_norm", eps, rstd)
    return reference.quantize(reference.rms_norm(x, weight, eps, rstd), pair, fp8, scale)


def quantize_rms_norm_dual_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, "quantize_rms_norm_dual", rstd)
    check_eps("quantize_rms_norm_dual", eps, rstd)
    return reference.quantize_dual(reference.rms_norm(x, weight, eps, rstd), pair, fp8, scale)


def quantize_silu_mul_kernel(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    data, scales = _silu_mul("quantize_silu_mul", gate, up, block, dtype, scale, dual=False)
    return data, scales


def quantize_silu_mul_dual_kernel(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row, row_scale, col, col_scale = _silu_mul("quantize_silu_mul_dual", gate, up, block, dtype, scale, dual=True)
    return row, row_scale, col, col_scale


def quantize_rms_norm_kernel(
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    data, scales = _rms_norm("quantize_rms_norm", x, weight, eps, block, dtype, scale, rstd, dual=False)
    return data, scales


def quantize_rms_norm_dual_kernel(
    x: Tensor, weight: Tensor, eps: float = 1e-6, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    row, row_scale, col, col_scale = _rms_norm(
        "quantize_rms_norm_dual", x, weight, eps, block, dtype, scale, rstd, dual=True
    )  # fmt: skip
    return row, row_scale, col, col_scale


def _silu_mul(
    name: str, gate: Tensor, up: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, *, dual: bool
) -> Sequence[Tensor]:
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, name)
    key = (name, pair, fp8, scale, kind(gate), kind(up))
    call = recall(key)
    if call is None:
        target = targets.target_of(gate.device)
        if not _cuda_takes(name, gate, fp8, lambda: rms_norm.accepts_silu_mul(gate, up, pair, fp8, target)):
            return _quantized(reference.silu_mul(gate, up), pair, fp8, scale, dual)
        call = keep(key, rms_norm.call_silu_mul(gate, up, pair, fp8, scale, target, dual=dual))
    return call(gate, up)  # type: ignore[no-any-return]


def _rms_norm(
    name: str, x: Tensor, weight: Tensor, eps: float, block: Sequence[int], dtype: torch.dtype | None, scale: str,
    rstd: Tensor | None, *, dual: bool,
) -> Sequence[Tensor]:  # fmt: skip
    pair, fp8 = check_rms_norm(x, weight, block, dtype, scale, name, rstd)
    check_eps(name, eps, rstd)
    if rstd is not None:
        rstd, eps = rstd.contiguous(), 0.0
    key = (name, eps, pair, fp8, scale, kind(x), kind(weight), rstd is not None)
    call = recall(key)
    if call is None:
        target = targets.target_of(x.device)
        if not _cuda_takes(name, x, fp8, lambda: rms_norm.accepts_rms_norm(x, weight, pair, fp8, target)):
            return _quantized(reference.rms_norm(x, weight, eps, rstd), pair, fp8, scale, dual)
        call = keep(key, rms_norm.call_rms_norm(x, weight, eps, pair, fp8, scale, target, rstd, dual=dual))
    return call(x, weight) if rstd is None else call(x, weight, rstd)  # type: ignore[no-any-return]


def _cuda_takes(name: str, x: Tensor, dtype: torch.dtype, accepts: Callable[[], str | None]) -> bool:
    """Whether one kernel computes and quantizes; else PyTorch's do the one and `quantize` the other."""
    if not kernel_takes(x, dtype):
        return False
    reason = accepts() or nvrtc.unavailable()
    if reason is not None and _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s %s unfused: %s", name, tuple(x.shape), reason)
    return reason is None


def _quantized(y: Tensor, block: Block, dtype: torch.dtype, scale: str, dual: bool) -> Sequence[Tensor]:
    return quantize_dual_kernel(y, block, dtype, scale) if dual else quantize_kernel(y, block, dtype, scale)
