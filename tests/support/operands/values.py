"""Random values, and values that are hard to quantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fp8fn


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values with magnitudes over ten binades, so that subnormals and saturation occur."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(10 * torch.rand(shape, generator=generator) - 5)
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def zeros_but_one_block() -> Tensor:
    x = torch.zeros(130, 260)
    x[:, :128] = random(130, 128, dtype=torch.float32)
    return x


def one_value(value: float) -> Callable[[], Tensor]:
    def values() -> Tensor:
        x = random(70, 200, dtype=torch.float32)
        x[3, 150] = value
        return x

    return values


HARD: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(130, 130),
    "negative zeros": lambda: -torch.zeros(40, 130),
    "zeros but one block": zeros_but_one_block,
    "subnormal": lambda: random(40, 200, dtype=torch.float32) * 2.0**-140,
    "tiny": lambda: random(40, 200, dtype=torch.float32) * 1e-13,
    "outlier": one_value(1e4),
    "NaN": one_value(float("nan")),
    "Inf": one_value(float("inf")),
    "negative Inf": one_value(-float("inf")),
    "3e38": one_value(3e38),
    "all 3e38": lambda: random(40, 200, dtype=torch.float32).sign() * 3e38,
    "powers of two": lambda: torch.exp2(torch.arange(-149, 128, dtype=torch.float32)).repeat(9, 1),
}

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16, transposed: bool = False, device: Any = "cpu") -> Tensor:
    """Normal values; `transposed` stores the matrix column-major."""
    x = torch.randn(*shape[:-2], *((shape[-1], shape[-2]) if transposed else shape[-2:]))
    x = x.to(device, dtype)
    return x.mT if transposed else x


def dequantized(x: Tensor, block: tuple[int, int], dtype: torch.dtype | None, scale: str) -> Tensor:
    q = fp8fn.quantize(x, block, dtype=dtype, scale=scale)  # type: ignore[arg-type]
    return fp8fn.dequantize(q, FP32).double()
