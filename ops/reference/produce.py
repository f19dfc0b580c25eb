"""What is computed in float32 before a fused quantization: the gated activation, and the normalisation of rows."""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor

# Partial sums of a row's squares; a kernel's block of 256 threads has 8 columns each.
_PARTIAL_SUMS: Final = 2048


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` in float32, contiguous."""
    return (F.silu(gate.float()) * up.float()).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * (1 / sqrt(mean(x²) + eps)) * weight` in float32, contiguous, each step rounded to nearest.

    The sum has a fixed order, so that kernels give the same bits: 2048 partial sums, the i-th of the columns
    `i, i + 2048, …` one after the other; then neighbours are added, until one sum is left.
    """
    x = x.float()
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
    normalised: Tensor = x * (1.0 / root) * weight.float()
    return normalised.contiguous()
