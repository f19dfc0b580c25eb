"""Small products for the HIP kernels of decoding: operands, launches, and what must come out of them.

A launch writes within one bound of the exact sum, 1e-6 of the sum of magnitudes, before it is rounded to its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.hip.moe_gemm import plan_moe
from fp8fn.ops.hip.mx_mm import plan_gemv, plan_mfma
from fp8fn.ops.targets import GFX950
from support.emulated import Output, untouched
from support.products import routed_product, scaled_product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
PLANS: Final = {"gemv": plan_gemv, "mfma": plan_mfma}


@dataclass(frozen=True)
class Product:
    """Launches that fill `out`, the exact values of its rows `written`, and the bound of each."""

    launches: tuple[HipLaunch, ...]
    inputs: tuple[Tensor, ...]
    out: Tensor
    exact: Tensor
    bound: Tensor
    written: Tensor | None = None

    def run(self, start: Callable[[Sequence[HipLaunch]], object]) -> None:
        """On poisoned outputs and scratch; AssertionError where something else is written, or something wrong."""
        read = {x.untyped_storage().data_ptr() for x in self.inputs}
        outputs: dict[int, Output] = {}
        for launch in self.launches:
            for x in launch.args.values():
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in read:
                    outputs.setdefault(x.untyped_storage().data_ptr(), Output(x)).add(x)
        start(self.launches)
        assert all(output.kept() for output in outputs.values())
        self.check()

    def check(self) -> None:
        out = self.out
        if self.written is not None:
            assert untouched(out[~self.written])
            out = out[self.written]
        low, high = (self.exact - self.bound).to(out.dtype), (self.exact + self.bound).to(out.dtype)
        assert bool(((low <= out) & (out <= high) | (out.isnan() & self.exact.isnan())).all())


class Dense(NamedTuple):
    """`out (B?, m, n)`; `batches` are the batches of both operands."""

    kernel: str
    m: int
    n: int
    k: int
    config: HipConfig
    out: torch.dtype = FP32
    bias: torch.dtype | None = None
    batches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


class Routed(NamedTuple):
    """Tokens that each chose `top_k` of `experts`, one too many on either side."""

    tokens: int
    top_k: int
    experts: int
    block_m: int
    n: int
    k: int
    a_div: int
    block_n: int
    weighted: bool = True
    out: torch.dtype = FP32


def values(x: Tensor) -> Tensor:
    """In float64; of e8m0 by the definition."""
    if x.dtype != E8M0:
        return x.double()
    bits = x.view(torch.uint8).double()
    return torch.where(bits == 255, torch.nan, torch.exp2(bits - 127))


def dequantized(q: ScaledTensor) -> Tensor:
    spread = values(q.scale).repeat_interleave(32, dim=-2 if q.block[0] == 32 else -1)
    return values(q.data) * spread


def operands(case: Dense) -> tuple[ScaledTensor, ScaledTensor]:
    """Rows and columns of differing magnitude, blocks too; K is contiguous in both."""
    a, b = (
        torch.randn(*batch, lines, case.k) * torch.exp2(torch.randint(-3, 4, (lines, 1)))
        * torch.exp2(torch.randint(-3, 4, (case.k // 32,))).repeat_interleave(32)
        for batch, lines in zip(case.batches, (case.m, case.n), strict=True)
    )  # fmt: skip
    return fp8fn.quantize(a, (1, 32), scale="e8m0"), fp8fn.quantize(b.mT, (32, 1), scale="e8m0")


def dense(case: Dense, given: tuple[ScaledTensor, ScaledTensor] | None = None) -> Product:
    a, b = operands(case) if given is None else given
    bias = None if case.bias is None else torch.randn(case.n).to(case.bias)
    # Something else lies before and after.
    shape = (*(a.shape[:-2] or b.shape[:-2]), case.m, case.n)
    out = torch.empty(math.prod(shape) + 64, dtype=case.out)[32:-32].view(shape)
    left, right = dequantized(a), dequantized(b)
    exact, magnitude = left @ right, left.abs() @ right.abs()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    launches = PLANS[case.kernel](scaled_product(a, b, out, GFX950, bias=bias), case.config)
    inputs = [x for x in launches[0].args.values() if isinstance(x, Tensor) and x is not launches[0].args["out"]]
    return Product(launches, (*inputs, *(() if bias is None else (bias,))), out, exact, 1e-6 * magnitude)


def routed(case: Routed, layout: tuple[Tensor, Tensor, Tensor] | None = None) -> Product:
    """By the layout of tokens that chose at random, or a given one."""
    rows = case.tokens * case.top_k // case.a_div
    a = fp8fn.quantize(torch.randn(rows, case.k), (1, 32), scale="e8m0")
    w = fp8fn.quantize(torch.randn(case.experts, case.n, case.k).mT, (32, 1), scale="e8m0")
    chosen = torch.randint(-1, case.experts + 1, (case.tokens, case.top_k))
    ids, owners, number = layout or fp8fn.sort_tokens(chosen, case.experts, case.block_m)
    weights = torch.randn(rows * case.a_div) if case.weighted else None
    out = torch.empty(rows * case.a_div * case.n + 64, dtype=case.out)[32:-32].view(rows * case.a_div, case.n)

    left, right = dequantized(a), dequantized(w)
    exact = torch.zeros(out.shape, dtype=torch.float64)
    bound, written = exact.clone(), torch.zeros(out.shape[0], dtype=torch.bool)
    for tile, expert in enumerate(owners.tolist()):
        if tile * case.block_m >= number.item() or not 0 <= expert < case.experts:
            continue
        for id in ids[tile * case.block_m : (tile + 1) * case.block_m].tolist():
            if 0 <= id < len(written):
                by = 1.0 if weights is None else weights[id].item()
                row = left[id // case.a_div]
                exact[id], written[id] = by * (row @ right[expert]), True
                bound[id] = 1e-6 * abs(by) * (row.abs() @ right[expert].abs())
    given = routed_product(a, w, (ids, owners, number), case.a_div, out, GFX950, weights)
    (launch,) = plan_moe(given, HipConfig(block_n=case.block_n))
    inputs = tuple(x for x in launch.args.values() if isinstance(x, Tensor) and x is not out)
    return Product((launch,), inputs, out, exact[written], bound[written], written)
