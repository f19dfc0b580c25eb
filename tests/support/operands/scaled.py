"""Operands of `scaled_mm` for its Triton kernels, interpreted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.cuda.operands import map_fault
from fp8fn.ops.layout import Block
from fp8fn.ops.reference.quantize import dequantize, quantize
from fp8fn.ops.targets import SM90, Target
from fp8fn.ops.triton import scaled_mm, scaled_mm_tma
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.scaled_mm_tma import TmaConfig
from support.products import Parts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Small tiles, so that few elements make several tiles along every axis.
SMALL = GemmConfig(32, 64, 4, 2, GROUP=2)

SMALL_TMA = TmaConfig(BM=64, BN=64, GROUP=2)


class Operands:
    """Quantized random operands, and the product they stand for."""

    def __init__(
        self, m: int, n: int, k: int, a_block: Block, b_block: Block, *, scale: str = "fp32",
        dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), batch: tuple[int | None, int | None] = (None, None),
        a_contiguous: str = "K", b_contiguous: str = "K", bias: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(m + n + k)
        a = torch.randn(*_leading(batch[0]), m, k, generator=generator)
        b = torch.randn(*_leading(batch[1]), k, n, generator=generator)
        self.a_block, self.b_block = a_block, b_block
        self.a, self.a_scale = quantize(a, a_block, dtypes[0], scale)
        self.b, self.b_scale = quantize(b, b_block, dtypes[1], scale)
        self.a = padded(self.a, rows=a_contiguous == "K")
        self.b = padded(self.b, rows=b_contiguous != "K")
        self.bias = None if bias is None else torch.randn(n, generator=generator).to(bias)

    def expected(self) -> Tensor:
        a = dequantize(self.a, self.a_scale, self.a_block).double()
        b = dequantize(self.b, self.b_scale, self.b_block).double()
        out = a @ b
        return out if self.bias is None else out + self.bias.double()

    def product(
        self, kernel: str = "pointer", out_dtype: torch.dtype = torch.float32, target: Target = SM90,
        config: Any = None, wide: bool = False,
    ) -> Tensor:  # fmt: skip
        out = torch.full(self.expected().shape, 7.0, dtype=out_dtype)
        operands = Parts(self.a, self.a_scale, self.a_block, self.b, self.b_scale, self.b_block, self.bias, out)
        product = operands.product(target)
        if kernel == "tma":
            for operand in (self.a, self.b):
                faults = [map_fault(x) for x in (operand, operand.mT)]
                assert None in faults
            (launch,) = scaled_mm_tma.plan_scaled_mm_tma(product, config or SMALL_TMA)
        else:
            (launch,) = scaled_mm.plan_scaled_mm(product, config or SMALL)
        if wide:
            launch.constexprs["WIDE"] = True  # type: ignore[index]
        launch.interpret()
        return out


def _leading(batch: int | None) -> tuple[int, ...]:
    return () if batch is None else (batch,)


def padded(x: Tensor, rows: bool) -> Tensor:
    """The same values, row-major or column-major, with a leading dimension of a multiple of 16."""
    view = x if rows else x.mT
    lead = -(-view.shape[-1] // 16) * 16
    storage = torch.zeros(*view.shape[:-1], lead, dtype=torch.uint8).view(x.dtype)
    copy = storage[..., : view.shape[-1]].copy_(view)
    return copy if rows else copy.mT
