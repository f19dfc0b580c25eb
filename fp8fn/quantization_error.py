"""`error`: the error of FP8 data, or of any approximation, in total and for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.ops.formats import fp8_max
from fp8fn.ops.layout import Block, scale_shape
from fp8fn.ops.reference.quantize import split, spread
from fp8fn.quantization import dequantize
from fp8fn.scaled_tensor import ScaledTensor
from fp8fn.weights import FP8Weight


@dataclass(frozen=True)
class Error:
    """The result of `error`.

    Attributes:
        snr_db: `10 log10(Σ x² / Σ (x - q)²)`; inf if `x` and `q` are equal, NaN if either has a NaN.
        max_abs: The largest `|x - q|`.
        max_rel: The largest `|x - q| / |x|` where `x` is not 0.
        saturated: Share of elements with `|x| > fp8_max * scale`, which saturate; 0 for a tensor without scales.
        flushed: Share of elements that are 0 in `q` and not in `x`.
        by_block: SNR in dB of each block, float64, of the shape of the scales.
    """

    snr_db: float
    max_abs: float
    max_rel: float
    saturated: float
    flushed: float
    by_block: Tensor

    def __repr__(self) -> str:
        finite = self.by_block[self.by_block.isfinite()]
        blocks = f"{tuple(self.by_block.shape)} blocks"
        if finite.numel():
            blocks += f" of {finite.min().item():.1f} to {finite.max().item():.1f} dB"
        return (
            f"Error(SNR {self.snr_db:.1f} dB, max {self.max_abs:.3g}, relative {self.max_rel:.3g}, "
            f"saturated {self.saturated:.2%}, flushed {self.flushed:.2%}, {blocks})"
        )


def error(x: Tensor, q: ScaledTensor | Tensor, block: Block = (-1, -1)) -> Error:
    """Compares a tensor with its approximation in float64.

    Args:
        x: The exact values, a floating-point tensor.
        q: Result of `quantize(x, …)`, an `FP8Weight`, or a tensor that approximates `x`, such as a product.
        block: Blocks of `Error.by_block` for a tensor `q`; data in FP8 has its own.

    Shape:
        `x (..., M, N)`, `q (..., M, N)` → `by_block (..., ceil(M / r), ceil(N / c))`.

    Returns:
        An `Error` with the signal-to-noise ratio, the largest differences and the shares of saturated and flushed
        values.

    Raises:
        TypeError: `x` or `q` is not a tensor.
        ValueError: The shapes differ or have fewer than two dimensions.

    Example:
        >>> x = torch.ones(128, 128)
        >>> fp8fn.error(x, fp8fn.quantize(x, (1, 128))).snr_db
        inf
    """
    arguments.tensor("error", "x", x)
    if isinstance(q, FP8Weight):
        q = q.scaled
    if not isinstance(q, ScaledTensor):
        arguments.tensor("error", "q", q)
    if x.shape != q.shape or x.ndim < 2:
        raise ValueError(
            f"error: x has shape {tuple(x.shape)} and q {tuple(q.shape)}; pass two equal ones, of matrices"
        )
    exact = x.detach().double()
    saturated = 0.0
    if isinstance(q, ScaledTensor):
        block = q.block
        found = dequantize(q, torch.float32).double()
        limit = spread(q.scale.double(), x.shape, block) * fp8_max(q.dtype)
        # The largest element of a block equals the limit; the tolerance covers the rounding of the scale.
        saturated = _share(exact.abs() > limit * (1 + 2**-20))
    else:
        found = q.detach().double()
    if not x.numel():
        return Error(torch.inf, 0.0, 0.0, 0.0, 0.0, exact.new_full(scale_shape(x.shape, block), torch.inf))
    difference = (exact - found).abs()
    signal, noise = (split(values.square(), block).sum((-3, -1)) for values in (exact, difference))
    nonzero = exact != 0
    return Error(
        snr_db=_decibel(signal.sum(), noise.sum()).item(),
        max_abs=_largest(difference),
        max_rel=_largest(difference[nonzero] / exact[nonzero].abs()),
        saturated=saturated,
        flushed=_share(nonzero & (found == 0)),
        by_block=_decibel(signal, noise),
    )


def _decibel(signal: Tensor, noise: Tensor) -> Tensor:
    """The ratio in dB; inf without noise, also for a block of zeros."""
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise))


def _share(mask: Tensor) -> float:
    return mask.double().mean().item()


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0
