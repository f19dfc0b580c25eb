"""Every kernel in HIP in its main forms, at small shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from fp8fn.ops.hip.config import HipConfig
from fp8fn.ops.hip.moe_gemm import plan_moe
from fp8fn.ops.hip.mx_mm import plan_gemv, plan_mfma
from fp8fn.ops.operands import RoutedProduct, Routing, ScaledProduct
from fp8fn.ops.sort_tokens import sort_tokens
from fp8fn.ops.targets import Target
from support import kernel_info
from support.kernel_info import Form, Forms, KernelInfo, Operands, Place, dequantized

BF16, FP32 = torch.bfloat16, torch.float32


def _mx(
    plan: Callable[..., Any], cases: tuple[tuple[int, int, int, HipConfig], ...], place: Place, target: Target
) -> Forms:
    for m, n, k, config in cases:
        operands = Operands(place)
        a = operands.quantized("a", (m, k), (1, 32), column_major=False, scale="e8m0")
        b = operands.quantized("b", (k, n), (32, 1), column_major=True, scale="e8m0")
        bias, out = operands.input("bias", (n,), BF16), operands.output("out", (m, n), FP32)
        given = ScaledProduct(a=a, b=b, bias=bias, out=out, target=target)
        operands.expected = partial(_product, given)
        yield Form(f"M{m} {config}", plan(given, config), operands)


def _product(given: ScaledProduct) -> dict[str, kernel_info.Expected]:
    return {"out": kernel_info.product(dequantized(given.a), dequantized(given.b), given.bias)}


def _moe(place: Place, target: Target) -> Forms:
    tokens, choices, experts, block_m, n, k = 9, 2, 3, 16, 21, 160
    chosen = torch.arange(tokens * choices).view(tokens, choices) * 7 % 5 - 1  # also experts that there are not
    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    for block_n in (8, 16):
        operands = Operands(place)
        layout = [
            operands.input(name, part.shape, part.dtype, values=part)
            for name, part in zip(names, sort_tokens(chosen, experts, block_m), strict=True)
        ]
        a = operands.quantized("a", (tokens, k), (1, 32), column_major=False, scale="e8m0")
        w = operands.quantized("w", (experts, k, n), (32, 1), column_major=True, scale="e8m0")
        weights = operands.input("token_weights", (tokens * choices,), FP32)
        out = operands.output("out", (tokens * choices, n), FP32)
        routed = RoutedProduct(
            a=a, w=w, routing=Routing(*layout), a_div=choices, token_weights=weights, out=out, target=target
        )
        operands.expected = partial(kernel_info.routed_product, routed)
        yield Form(f"columns {block_n}", plan_moe(routed, HipConfig(block_n=block_n)), operands)


GEMV: Final = ((1, 9, 5152, HipConfig(rows=1)), (7, 11, 1056, HipConfig(rows=8)), (13, 18, 1056, HipConfig(rows=16)))
MFMA: Final = ((5, 19, 640, HipConfig()), (33, 70, 2080, HipConfig(n_sub=4)))
PARTS: Final = ((17, 33, 640, HipConfig(n_sub=2, k_splits=4)),)
_NAN: Final = ("a", "a_scale", "b", "b_scale", "bias")

HIP: Final = (
    KernelInfo(
        "mxfp8_gemv.hip", partial(_mx, plan_gemv, GEMV), 1e-6, emulated=("M1 ", "M7", "M13"), nan=_NAN,
        targets=("gfx950",),
    ),
    KernelInfo(
        "mxfp8_mfma.hip", partial(_mx, plan_mfma, MFMA), 1e-6, emulated=("M5", "M33"), nan=_NAN, targets=("gfx950",)
    ),
    KernelInfo("mxfp8_sum_parts.hip", partial(_mx, plan_mfma, PARTS), 1e-6, nan=_NAN, targets=("gfx950",)),
    KernelInfo(
        "mxfp8_moe.hip", _moe, 1e-6, emulated=("columns 8", "columns 16"),
        nan=("a", "a_scale", "w", "w_scale", "token_weights"), targets=("gfx950",),
    ),
)  # fmt: skip
