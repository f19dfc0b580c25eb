"""Operands of `moe_gemm`, and its products computed an id after the other."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import reference

FORMATS: Final[dict[str, tuple[Any, ...]]] = {
    "mx": ((1, 32), (32, 1), "e8m0"), "rceil": ((1, 32), (32, 1), "rceil"),
    "blockwise": ((1, 128), (128, 128), "fp32"), "blockwise e8m0": ((1, 128), (128, 128), "e8m0"),
}  # fmt: skip

Layout = tuple[Tensor, Tensor, Tensor]


def operands(
    rows: int, n: int, k: int, experts: int, kind: str = "mx", device: Any = "cpu"
) -> tuple[ScaledTensor, ScaledTensor]:
    a_block, w_block, scale = FORMATS[kind]
    a, w = torch.randn(rows, k, device=device), torch.randn(experts, n, k, device=device).mT
    return fp8fn.quantize(a, a_block, scale=scale), fp8fn.quantize(w, w_block, scale=scale)


def by_hand(
    a: ScaledTensor, w: ScaledTensor, layout: Layout, a_div: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of `moe_gemm`, one id after the other in float64; and the sums of magnitudes."""
    left, right = (reference.dequantize(q.data, q.scale, q.block).double() for q in (a, w))
    ids, owners, number = (part.tolist() for part in layout)
    total, block_m = a.shape[0] * a_div, len(ids) // max(len(owners), 1)
    out = torch.zeros(total, w.shape[-1], dtype=torch.float64, device=a.device)
    magnitude = out.clone()
    for tile, expert in enumerate(owners):
        if tile * block_m >= number[0] or not 0 <= expert < w.shape[0]:
            continue
        for id in ids[tile * block_m : (tile + 1) * block_m]:
            if 0 <= id < total:
                factor = 1.0 if weights is None else weights[id].double()
                out[id] = factor * (left[id // a_div] @ right[expert])
                magnitude[id] = abs(factor) * (left[id // a_div].abs() @ right[expert].abs())
    return out, magnitude


def assert_near(found: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """As near as float32 sums are, of which Hopper's FP8 products keep 14 bits; rows of no id are zeros."""
    out, magnitude = expected
    assert found.shape == out.shape
    assert ((found.double() - out).abs() <= (2**-12 if found.is_cuda else 1e-6) * magnitude).all()
    error = (found.double() - out).norm().item()
    assert error == 0 or 20 * math.log10(out.norm().item() / error) > 50
