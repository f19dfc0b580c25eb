"""Operands of products for tests of a kernel's own plan, which the op's checks have not made."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import ScaledProduct
from fp8fn.ops.targets import Target
from fp8fn.scaled_tensor import ScaledTensor


def quantized(q: ScaledTensor) -> Quantized:
    return Quantized(q.data, q.scale, q.block)


def scaled_product(a: ScaledTensor, b: ScaledTensor, out: Tensor, target: Target, **rest: Any) -> ScaledProduct:
    return ScaledProduct(a=quantized(a), b=quantized(b), out=out, target=target, **rest)


def mx_product(
    data: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], out: Tensor, target: Target, **rest: Any
) -> ScaledProduct:
    """In blocks of 32 along K."""
    a, b = Quantized(data[0], scales[0], (1, 32)), Quantized(data[1], scales[1], (32, 1))
    return ScaledProduct(a=a, b=b, out=out, target=target, **rest)
