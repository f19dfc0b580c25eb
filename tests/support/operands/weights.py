"""Operands of the products of 16-bit rows by an FP8 weight, and their exact products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import reference
from fp8fn.ops.cuda.operands import SCALES
from fp8fn.ops.layout import Block, empty_scale
from fp8fn.ops.operands import WeightProduct
from support.accuracy import snr
from support.products import weight_product

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = list(SCALES)
BATCHES = [((3,), (3,)), ((3,), ()), ((), (3,)), ((1,), (1,)), ((1,), ())]
# Numbers of rows, each with one configuration.
CLASSES = [range(1, 2), range(2, 9), range(9, 17), range(17, 33), range(33, 65)]
POISON = {E4M3: 0x7F, E5M2: 0x7C}  # NaN, and Inf where there is one

by_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


def weight(
    k: int, n: int, block: Block, *, dtype: torch.dtype = E4M3, scale: str = "fp32", contiguous: str = "K",
    batch: tuple[int, ...] = (), device: Any = "cpu", size: float = 1.0,
) -> ScaledTensor:  # fmt: skip
    q = fp8fn.quantize((size * torch.randn(*batch, k, n)).to(device), block, dtype=dtype, scale=scale)  # type: ignore[arg-type]
    data = q.data.view(torch.uint8)
    data = data.contiguous() if contiguous == "N" else data.mT.contiguous().mT
    return ScaledTensor(data.view(dtype), q.scale, block)


def exact(x: Tensor, w: ScaledTensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ reference.dequantize(w.data, w.scale, w.block).double()
    return out if bias is None else out + (bias.unsqueeze(1) if bias.ndim == 2 else bias).double()


def framed(x: Tensor, poison: int) -> Tensor:
    """The same bytes with lines at a multiple of 16 bytes, and `poison` between and around them."""
    lead = -(-x.shape[-1] // 16) * 16 + 16
    memory = torch.full((x[..., 0].numel() * lead + 32,), poison, dtype=torch.uint8)
    return memory[16:].as_strided(x.shape, (*(x.shape[-2] * lead,) * (x.dim() - 2), lead, 1)).copy_(x)


def operand(
    k: int, n: int, block: Block, *, contiguous: str = "K", dtype: torch.dtype = E4M3, batch: tuple[int, ...] = ()
) -> ScaledTensor:
    """A weight as `weight` makes it, among bytes that are not finite."""
    w = weight(k, n, block, dtype=dtype, batch=batch)
    data = w.data.view(torch.uint8)
    lines = framed(data.mT, POISON[dtype]).mT if contiguous == "K" else framed(data, POISON[dtype])
    return ScaledTensor(lines.view(dtype), w.scale, block)


def assert_right(found: Tensor, x: Tensor, w: ScaledTensor, bias: Tensor | None = None) -> None:
    assert snr(found, exact(x, w, bias)) > 100


def operands(
    m: int = 1, n: int = 2304, k: int = 6144, block: Block = (128, 128), *, contiguous: str = "K",
    x: torch.dtype = BF16, fp8: torch.dtype = E4M3, batch: tuple[int, ...] = (), bias: torch.dtype | None = None,
    constant: bool = False,
) -> WeightProduct:  # fmt: skip
    """Unwritten ones for `accepts` and `plan`."""
    of_x, out = (torch.empty(*batch, m, size, dtype=x, device="meta") for size in (k, n))
    w = torch.empty(*batch, n, k, dtype=fp8, device="meta").mT
    w = w if contiguous == "K" else torch.empty(*batch, k, n, dtype=fp8, device="meta")
    added = None if bias is None else torch.empty(n, dtype=bias, device="meta")
    scaled = ScaledTensor(w, empty_scale(w, block, "fp32"), block)
    return weight_product(of_x, scaled, out, bias=added, constant=constant)


def on_gpu(
    m: int, n: int, k: int, block: Block, *, contiguous: str = "K", x: torch.dtype = BF16, fp8: torch.dtype = E4M3,
    batch: tuple[int, ...] = (),
) -> tuple[Tensor, ScaledTensor]:  # fmt: skip
    w = fp8fn.quantize(torch.randn(*batch, k, n, device="cuda"), block, dtype=fp8)
    data = w.data.view(torch.uint8)
    data = data.mT.contiguous().mT if contiguous == "K" else data.contiguous()
    return torch.randn(*batch, m, k, device="cuda").to(x), ScaledTensor(data.view(fp8), w.scale, block)
