"""The float32 values that a fused quantization quantizes: the gated activation, and the normalisation of rows."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# Partial sums of a row's squares; a kernel's block of 256 threads has 8 columns each.
_PARTIAL_SUMS: Final = 2048


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` in float32, contiguous."""
    return (F.silu(gate.float()) * up.float()).contiguous()


def silu_mul_grad(grad: Tensor, hidden: Tensor) -> Tensor:
    """The gradient of `silu_mul(gate, up)` in `hidden (..., 2I)`, gate and up side by side, of `grad (..., I)`."""
    gate, up = hidden.float().chunk(2, -1)
    grad = grad.float()
    sigmoid = gate.sigmoid()
    of_gate = grad * (up * sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return torch.cat([of_gate, grad * F.silu(gate)], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rstd: Tensor | None = None) -> Tensor:
    """`x * (1 / sqrt(mean(x²) + eps)) * weight` in float32, contiguous, each step rounded to nearest.

    `rstd (..., M)` is the second factor, where it is known already.

    The sum has a fixed order, so that kernels give the same bits: 2048 partial sums, the i-th of the columns
    `i, i + 2048, …` one after the other; then neighbours are added, until one sum is left.
    """
    x = x.float()
    factor = _rstd(x, eps) if rstd is None else rstd[..., None]
    normalised: Tensor = x * factor * weight.float()
    return normalised.contiguous()


def _rstd(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x²) + eps)` of each row."""
    columns = x.shape[-1]
    passes = max(-(-columns // _PARTIAL_SUMS), 1)
    squares = F.pad(x * x, (0, passes * _PARTIAL_SUMS - columns)).unflatten(-1, (passes, _PARTIAL_SUMS))
    sums = squares[..., 0, :]
    for i in range(1, passes):
        sums = sums + squares[..., i, :]
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    # A tensor and not a number: CUDA multiplies by a number's reciprocal, which rounds twice.
    mean = sums / sums.new_full((), columns)
    # By way of float64, which makes the rounding exact: PyTorch's float32 root on the CPU is MKL's, which is not.
    root = (mean + eps).double().sqrt().float()
    rstd: Tensor = 1.0 / root
    return rstd
