"""Quantizations for tests of a kernel's own plan, past the op's checks, and Triton's launches on given outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.operands import RMS_NORM, SILU_MUL, SILU_MUL_GRAD, Quantization, Quantized
from fp8fn.ops.targets import SM90, Target
from fp8fn.ops.triton.launch import TritonLaunch

E4M3 = torch.float8_e4m3fn


def quantization(
    x: Tensor, block: Block, *, dtype: torch.dtype = E4M3, scale: str = "fp32", target: Target = SM90, **rest: Any
) -> Quantization:
    return Quantization(x=x, block=block, dtype=dtype, scale=scale, target=target, **rest)


def marked(q: Quantization) -> Quantization:
    """With outputs in which what is left out shows."""
    for out in q.outs:
        for part in out[:2]:
            part.view(torch.uint8).fill_(0x55)
    return q


def tensors(q: Quantization) -> list[Tensor]:
    """The outputs as an op returns them."""
    return list(q.outputs.results)


def accepts(x: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    return quantize.accepts(quantization(x, block, dtype=dtype, target=target))


def accepts_silu_mul(gate: Tensor, up: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    return quantize.accepts(quantization(gate, block, dtype=dtype, target=target, other=up, source=SILU_MUL))


def accepts_rms_norm(x: Tensor, weight: Tensor, block: Block, dtype: torch.dtype, target: Target) -> str | None:
    return quantize.accepts(quantization(x, block, dtype=dtype, target=target, other=weight, source=RMS_NORM))


def silu_mul_of_groups(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Block = (1, 128), dual_block: Block | None = None
) -> Quantization:
    given: dict[str, Any] = {"offsets": offsets, "dual": True, "dual_block": dual_block}
    return quantization(gate, block, other=up, source=SILU_MUL, **given)


def silu_mul_grad_of_groups(grad: Tensor, hidden: Tensor, offsets: Tensor, block: Block = (1, 128)) -> Quantization:
    return quantization(hidden, block, other=grad, source=SILU_MUL_GRAD, offsets=offsets, dual=True)


def plan_quantize(
    x: Tensor, data: Tensor, scales: Tensor, block: Block, scale: str, target: Target, tile: Any = None,
    in_parts: bool | None = None,
) -> tuple[TritonLaunch, ...]:  # fmt: skip
    """Triton's launches that fill `data` and `scales`."""
    from fp8fn.ops.triton.quantize import plan_quantize as plan

    into = (Quantized(data, scales, block),)
    q = quantization(x, block, dtype=data.dtype, scale=scale, target=target, into=into)
    return plan(q, tile, in_parts=in_parts)


def plan_quantize_dual(
    x: Tensor, outs: Sequence[Tensor], block: Block, scale: str, target: Target, tile: Any = None,
    dual_block: Block | None = None,
) -> TritonLaunch:  # fmt: skip
    """Triton's launch that fills data and scales in `block`, and then in `dual_block`, by default its transpose."""
    from fp8fn.ops.triton.quantize_dual import plan_quantize_dual as plan

    (launch,) = plan(_dual(x, outs, block, scale=scale, target=target, dual_block=dual_block), tile)
    return launch


def plan_quantize_grouped(
    x: Tensor, offsets: Tensor, out: Sequence[Tensor], block: Block, scale: str, target: Target, tile: Any = None
) -> tuple[TritonLaunch, ...]:
    """Triton's launches that fill the data and scales of `out`."""
    from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped as plan

    data, scales = out
    rest: dict[str, Any] = {"offsets": offsets, "into": (Quantized(data, scales, block),)}
    return plan(quantization(x, block, dtype=data.dtype, scale=scale, target=target, **rest), tile)


def plan_quantize_grouped_dual(
    x: Tensor, offsets: Tensor, outs: Sequence[Tensor], scale: str, target: Target, block: Block = (1, 128),
    dual_block: Block | None = None, tile: Any = None,
) -> TritonLaunch:  # fmt: skip
    """Triton's launch that fills rows in `block`, and then spread columns in `dual_block`, by default its transpose."""
    from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped_dual as plan

    (launch,) = plan(_dual(x, outs, block, scale=scale, target=target, offsets=offsets, dual_block=dual_block), tile)
    return launch


def _dual(
    x: Tensor, outs: Sequence[Tensor], block: Block, dual_block: Block | None = None, **rest: Any
) -> Quantization:
    data, scales, dual_data, dual_scales = outs
    into = Quantized(data, scales, block), Quantized(dual_data, dual_scales, dual_block or swap(block))
    return quantization(x, block, dtype=data.dtype, dual=True, dual_block=dual_block, into=into, **rest)
