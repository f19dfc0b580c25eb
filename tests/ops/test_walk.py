"""The files and functions that a call of a product passes through, from the op's kernel to its launch on a GPU.

A reader of a product has to open these files, and the host runs these functions. Compiling, loading and starting are
left out.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn.meta import bypass
from fp8fn.ops import kernel, quantize, scaled_mm
from fp8fn.ops.cuda.gemm import scaled_mm as cuda

BF16 = torch.bfloat16
ROOT = f"{Path(fp8fn.__file__).parent}{os.sep}"


@pytest.fixture
def hopper(hopper_starts_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops on tensors of the CPU plan and keep what they would on a Hopper GPU of which no table is known."""
    monkeypatch.setattr(scaled_mm, "by_cuda", cuda.accepts)
    kernels = (replace(k, accepts=cuda.accepts) if k.name == "cuda" else k for k in scaled_mm.SCALED_MM.kernels)
    monkeypatch.setattr(scaled_mm, "SCALED_MM", replace(scaled_mm.SCALED_MM, kernels=tuple(kernels)))
    for name, op in (("quantize", quantize.quantize_kernel), ("scaled_mm", scaled_mm.scaled_mm_kernel)):
        monkeypatch.setattr(torch.ops.fp8fn, name, op)
    monkeypatch.setattr(bypass, "shortest", lambda dispatched, direct, *_, **__: direct)
    kernel._choice_by_value.cache_clear()  # of another test's product of the same shape
    # A process loads the tables and computes the model's tiles once: here.
    fp8fn.gemm(torch.empty(512, 512, dtype=BF16), torch.empty(512, 512, dtype=BF16).mT)


def walk(call: Callable[[], object]) -> Counter[str]:
    """The number of calls into each file of the library that a call makes."""
    found: Counter[str] = Counter()

    def entered(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            found[file.removeprefix(ROOT)] += 1

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_a_product_of_quantized_operands_passes_through_twelve_files(hopper: None) -> None:
    a = fp8fn.quantize(torch.empty(4096, 4096, dtype=BF16), (1, 128))
    b = fp8fn.quantize(torch.empty(4096, 4096, dtype=BF16).mT, (128, 128))

    def product() -> Tensor:
        return scaled_mm.scaled_mm_kernel(a.data, a.scale, a.block, b.data, b.scale, b.block)

    cold, warm = walk(product), walk(product)
    assert len(cold) <= 12, cold
    assert cold.total() <= 265, cold
    assert len(warm) <= 4, warm
    assert warm.total() <= 13, warm


def test_a_product_of_bf16_passes_through_the_quantizer_and_the_product(hopper: None) -> None:
    x, w = torch.empty(4096, 4096, dtype=BF16), torch.empty(4096, 4096, dtype=BF16)
    cold, warm = (walk(lambda: fp8fn.gemm(x, w.mT)) for _ in range(2))
    assert "ops/cuda/quantize/quantize.py" in cold
    assert "ops/cuda/gemm/scaled_mm.py" in cold
    assert len(cold) <= 21, cold
    assert cold.total() <= 691, cold  # 137 of them choose the product's configuration, once a process
    assert len(warm) <= 11, warm
    assert warm.total() <= 36, warm
