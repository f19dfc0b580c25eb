"""Operands of MX products, their exact products and how near a kernel has to be."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import reference
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.targets import Target, native_e4m3
from fp8fn.ops.tuning.mx import Problem

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Batches = tuple[tuple[int, ...], tuple[int, ...]]

# (K, N) of the models that decode, whole and divided among processes.
DENSE: Final = [
    shape
    for k, n in ((6144, 2304), (2048, 6144), (6144, 1536), (1536, 6144))
    for parts in (1, 2, 4, 8)
    for shape in ((k // parts, n), (k, n // parts))
]


def operands(
    m: int, n: int, k: int, *, batch: Batches = ((), ()), scale: str = "e8m0",
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), device: Any = "cpu",
) -> tuple[ScaledTensor, ScaledTensor]:  # fmt: skip
    a = torch.randn(*batch[0], m, k) * torch.exp2(torch.randint(-8, 8, (m, 1)))
    b = torch.randn(*batch[1], k, n) * torch.exp2(torch.randint(-8, 8, (n,)))
    return (
        fp8fn.quantize(a.to(device), (1, 32), dtype=dtypes[0], scale=scale),  # type: ignore[arg-type]
        fp8fn.quantize(b.to(device), (32, 1), dtype=dtypes[1], scale=scale),  # type: ignore[arg-type]
    )


def dequantized(q: ScaledTensor) -> Tensor:
    return reference.dequantize(q.data, q.scale, q.block).double()


def exact(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None) -> Tensor:
    out = dequantized(a) @ dequantized(b)
    return out if bias is None else out + bias.double()


def assert_near(found: Tensor, a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None) -> None:
    """As near as float32 sums are, of which Hopper's FP8 products keep 14 bits; 50 dB is a relative error of 3e-3."""
    expected = exact(a, b, bias)
    magnitude = expected.abs() + dequantized(a).abs() @ dequantized(b).abs()
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= (2**-12 if found.is_cuda else 1e-6) * magnitude).all()


def on(target: Target, **sizes: int) -> Problem:
    dtype = native_e4m3(target)
    return Problem(**{"m": 1, "n": 2304, "k": 6144, **sizes}, target=target, a_dtype=dtype, b_dtype=dtype)  # type: ignore[arg-type]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

NAN_SCALE = 255


def unwritten(
    m: int, n: int = 2304, k: int = 6144, *, dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out: torch.dtype = BF16, bias: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Operands for `plan`, and the output."""
    a = torch.empty(m, k, dtype=dtypes[0], device="meta")
    b = torch.empty(n, k, dtype=dtypes[1], device="meta").mT
    added = None if bias is None else torch.empty(n, dtype=bias, device="meta")
    scales = empty_scale(a, (1, 32), "e8m0"), empty_scale(b, (32, 1), "e8m0")
    return a, scales[0], b, scales[1], added, torch.empty(m, n, dtype=out, device="meta")


def assert_near_on_a_gpu(found: Tensor, a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None) -> None:
    """As near as sums of FP8 products are on Hopper, which keeps 14 bits of them within one instruction."""
    magnitude = exact(a, b, bias).abs() + dequantized(a).abs() @ dequantized(b).abs()
    assert ((found.double() - exact(a, b, bias)).abs() <= 2**-12 * magnitude).all()
