"""A linear layer's tensors and their quantized forms, each made at its first use."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.bench.accuracy import SampledProduct


def normal(rows: int, columns: int, device: torch.device, seed: int) -> Tensor:
    """`(rows, columns)` normal numbers in bfloat16, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=generator)


class Layer:
    """`out (M, N) = x (M, K) @ w (N, K)ᵀ`, and with the gradient `g (M, N)`: `dA = g @ w`, `dB = gᵀ @ x`.

    Tensors whose name ends in `_t` are quantized from a transposed copy, so that they are contiguous along the other
    axis.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.M, self.N, self.K = shape
        self.device = device

    @property
    def operations(self) -> float:
        """Operations of one product."""
        return 2.0 * self.M * self.N * self.K

    def bytes_moved(self, element: int) -> float:
        """Bytes of one product: operands of `element` bytes read once, a bf16 output written once, no scales."""
        return float(element * (self.M * self.K + self.N * self.K) + 2 * self.M * self.N)

    def wgrad_bytes_moved(self, element: int) -> float:
        """Bytes of the product for `dB`, counted as in `bytes_moved`."""
        return float(element * (self.M * self.N + self.M * self.K) + 2 * self.N * self.K)

    def step_bytes_moved(self) -> float:
        """Bytes of forward and backward: x, w and g read, out, dA and dB written, all in bf16."""
        return 4.0 * (self.M * self.K + self.N * self.K + self.M * self.N)

    @cached_property
    def x(self) -> Tensor:
        return normal(self.M, self.K, self.device, 0)

    @cached_property
    def w(self) -> Tensor:
        return normal(self.N, self.K, self.device, 1)

    @cached_property
    def g(self) -> Tensor:
        return normal(self.M, self.N, self.device, 2)

    @cached_property
    def leaves(self) -> tuple[Tensor, Tensor]:
        """x and w as leaves for autograd, sharing memory with `x` and `w`."""
        return self.x.detach().requires_grad_(), self.w.detach().requires_grad_()

    @cached_property
    def x_row(self) -> ScaledTensor:
        return fp8fn.quantize(self.x, (1, 128))

    @cached_property
    def x_col(self) -> ScaledTensor:
        return fp8fn.quantize(self.x, (128, 1))

    @cached_property
    def x_square(self) -> ScaledTensor:
        """Beside the rows of a forward, as the recipe `BLOCKWISE_SQUARE` has x for a wgrad; stored column-major."""
        return fp8fn.quantize_dual(self.x, dual_block=(128, 128))[1]

    @cached_property
    def g_col(self) -> ScaledTensor:
        return fp8fn.quantize(self.g, (128, 1))

    @cached_property
    def w_square(self) -> ScaledTensor:
        return fp8fn.quantize(self.w, (128, 128))

    @cached_property
    def x_line(self) -> ScaledTensor:
        return fp8fn.quantize(self.x, (1, -1))

    @cached_property
    def w_line(self) -> ScaledTensor:
        return fp8fn.quantize(self.w, (1, -1))

    @cached_property
    def x_whole(self) -> ScaledTensor:
        return fp8fn.quantize(self.x, (-1, -1))

    @cached_property
    def w_whole(self) -> ScaledTensor:
        return fp8fn.quantize(self.w, (-1, -1))

    @cached_property
    def x_whole_t(self) -> ScaledTensor:
        return fp8fn.quantize(self.x.mT.contiguous(), (-1, -1))

    @cached_property
    def g_whole_t(self) -> ScaledTensor:
        return fp8fn.quantize(self.g.mT.contiguous(), (-1, -1))

    @cached_property
    def out(self) -> SampledProduct:
        return SampledProduct(self.x, self.w.mT)

    @cached_property
    def dA(self) -> SampledProduct:
        return SampledProduct(self.g, self.w)

    @cached_property
    def dB(self) -> SampledProduct:
        return SampledProduct(self.g.mT, self.x)
