"""Dequantize-then-multiply as checkpoints and libraries spell it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fp8fn

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

N, K = 256, 384

Dequantize = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def in_blocks(w: Tensor) -> Tensor:
    return w.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))


def by_repeat_interleave(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    return w.to(dtype) * s.repeat_interleave(128, 0).repeat_interleave(128, 1).to(dtype)


def by_view(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = w.shape
    return (w.float().view(n // 128, 128, k // 128, 128) * s[:, None, :, None]).view(n, k).to(dtype)


def by_expand(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = s.shape
    return (w.float() * s[:, None, :, None].expand(rows, 128, columns, 128).reshape(w.shape)).to(dtype)


def by_permuted_blocks(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = w.to(dtype).view(w.shape[0] // 128, 128, -1, 128).transpose(1, 2)
    return (blocks * s[..., None, None].to(dtype)).transpose(1, 2).reshape(w.shape)


def by_kron(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    return w.to(dtype) * torch.kron(s, torch.ones(128, 128)).to(dtype)


def by_division(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    return (w.float() / (1 / s).repeat_interleave(128, 0).repeat_interleave(128, 1)).to(dtype)


SPELLINGS: dict[str, Dequantize] = {
    "repeat_interleave": by_repeat_interleave, "view": by_view, "expand": by_expand, "blocks": by_permuted_blocks,
    "kron": by_kron, "division": by_division,
}  # fmt: skip

Product = Callable[[Tensor, Tensor], Tensor]

PRODUCTS: dict[str, Product] = {
    "linear": F.linear,
    "linear with bias": lambda x, w: F.linear(x, w, torch.linspace(-1, 1, w.shape[0], dtype=x.dtype)),
    "matmul": lambda x, w: x @ w.mT,
    "einsum": lambda x, w: torch.einsum("bmk,nk->bmn", x, w),
    "addmm": lambda x, w: torch.addmm(torch.ones(w.shape[0], dtype=x.dtype), x.flatten(0, 1), w.t()),
    "weight on the left": lambda x, w: w @ x.mT,
    "weight (K, N)": lambda x, w: x @ w.reshape(w.shape[1], w.shape[0]),
}


def weight(shape: tuple[int, ...] = (N, K)) -> tuple[Tensor, Tensor]:
    """Data and scales of 128x128 blocks."""
    torch.manual_seed(0)
    q = fp8fn.quantize(torch.randn(shape), (128, 128))
    return q.data.contiguous(), q.scale.contiguous()


def quantized_activation(x: Tensor) -> Tensor:
    """Fake quantization in (1, 128), with the straight-through estimator's gradient."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    q = (blocks / scale).clamp(-448, 448).to(E4M3)
    return x + ((q.float() * scale).flatten(-2).to(x.dtype) - x).detach()
