"""Ops whose implementation is Hopper's kernel, in the emulator, on tensors that PyTorch has to change first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn.ops import reference
from fp8fn.ops.mm_a16w8 import mm_a16w8_kernel
from fp8fn.ops.operands import Quantized
from fp8fn.ops.quantize import quantize_kernel
from support.cuda_emulator import hopper_on_cpu, needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's implementations of two ops are those of a GPU."""

    def mm_a16w8(x: Tensor, w: Quantized, *rest: Any) -> Tensor:
        return mm_a16w8_kernel(x, w.data, w.scale, w.block, *rest)

    monkeypatch.setattr(reference, "quantize", quantize_kernel)
    monkeypatch.setattr(reference, "mm_a16w8", mm_a16w8)


def negated(x: Tensor) -> Tensor:
    """`x` as a view of memory that holds its negative, like the imaginary part of a conjugated tensor."""
    view = torch._neg_view(-x)
    assert view.is_neg()
    return view


def test_quantize_of_a_negative_view(on_kernels: None) -> None:
    x = torch.randn(16, 128).bfloat16()
    with hopper_on_cpu() as launches:
        plain = fp8fn.dequantize(fp8fn.quantize(x, (1, 128)))  # kept, for tensors of the same shape
        q = fp8fn.quantize(negated(x), (1, 128))
    assert launches
    assert (plain - x).abs().max() < 0.2
    assert torch.equal(fp8fn.dequantize(q), plain)


@pytest.mark.parametrize("place", ["x", "w_scale", "bias"])
def test_mm_a16w8_of_a_negative_view(place: str, on_kernels: None) -> None:
    x, w, bias = torch.randn(3, 256).bfloat16(), torch.randn(64, 256), torch.randn(64)
    data, scale = reference.quantize_dual(w, (128, 128), torch.float8_e4m3fn, "fp32")[:2]
    exact = x.double() @ reference.dequantize(data, scale, (128, 128)).double().mT + bias.double()
    parts = {"x": x, "w_scale": scale.mT, "bias": bias}
    parts[place] = negated(parts[place])
    with hopper_on_cpu() as launches:
        out = torch.ops.fp8fn.mm_a16w8(parts["x"], data.mT, parts["w_scale"], (128, 128), parts["bias"])
    assert launches
    assert (out - exact).norm() <= 1e-2 * exact.norm()
