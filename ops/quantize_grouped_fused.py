"""The ops that quantize, by rows and by groups of tokens, an expert's gated activation and the gradient of it.

As in `fp8fn.ops.quantize_fused` the arithmetic before is float32, and nothing is rounded in between; on a GPU `silu`
and its derivative have an error under 1e-5 of their terms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize_grouped as cuda
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.call_cache import keep, kind, recall
from fp8fn.ops.groups import check_ends
from fp8fn.ops.layout import Block
from fp8fn.ops.quantize import kernel_takes
from fp8fn.ops.quantize_grouped import DUAL_BLOCKS, check_quantize_grouped, quantize_grouped_dual_kernel

_FORMAT: Final = 'Tensor offsets, int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32"'
_RESULTS: Final = "(Tensor, Tensor, Tensor, Tensor)"
SILU_MUL_SCHEMA: Final = f"quantize_silu_mul_grouped_dual(Tensor gate, Tensor up, {_FORMAT}) -> {_RESULTS}"
SILU_MUL_GRAD_SCHEMA: Final = (
    f"quantize_silu_mul_grad_grouped_dual(Tensor grad, Tensor hidden, {_FORMAT}) -> {_RESULTS}"
)

_SILU_MUL: Final = "quantize_silu_mul_grouped_dual"
_SILU_MUL_GRAD: Final = "quantize_silu_mul_grad_grouped_dual"
_log = logging.getLogger("fp8fn")

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def check_silu_mul_grouped(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str
) -> tuple[Block, torch.dtype]:
    """The block and the element type, or the error that says which argument is wrong and what would work."""
    found = check_quantize_grouped(gate, offsets, block, dtype, scale, _SILU_MUL, DUAL_BLOCKS)
    _check_alike(_SILU_MUL, ("gate", gate), ("up", up), gate.shape)
    return found


def check_silu_mul_grad_grouped(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str
) -> tuple[Block, torch.dtype]:
    """Like `check_silu_mul_grouped`, of `grad (M, I)` and `hidden (M, 2I)`."""
    found = check_quantize_grouped(grad, offsets, block, dtype, scale, _SILU_MUL_GRAD, DUAL_BLOCKS)
    _check_alike(_SILU_MUL_GRAD, ("grad", grad), ("hidden", hidden), (grad.shape[0], 2 * grad.shape[1]))
    return found


def _check_alike(op: str, one: tuple[str, Tensor], two: tuple[str, Tensor], shape: Sequence[int]) -> None:
    (first, x), (second, y) = one, two
    if y.shape != torch.Size(shape):
        given, needed = tuple(y.shape), tuple(shape)
        raise ValueError(f"{op}: {first} has shape {tuple(x.shape)} and {second} {given}; it must be {needed}")
    if y.dtype != x.dtype:
        raise TypeError(f"{op}: {first} has dtype {x.dtype} and {second} {y.dtype}; {second}.to({x.dtype}) for one")
    if y.device != x.device:
        raise ValueError(f"{op}: {first} is on {x.device} and {second} on {y.device}; move them to one device")


def quantize_silu_mul_grouped_dual_reference(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> Results:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale)
    check_ends(_SILU_MUL, offsets)
    return reference.quantize_grouped_dual(reference.silu_mul(gate, up), offsets, pair, fp8, scale)


def quantize_silu_mul_grad_grouped_dual_reference(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> Results:  # fmt: skip
    pair, fp8 = check_silu_mul_grad_grouped(grad, hidden, offsets, block, dtype, scale)
    check_ends(_SILU_MUL_GRAD, offsets)
    return reference.quantize_grouped_dual(reference.silu_mul_grad(grad, hidden), offsets, pair, fp8, scale)


def quantize_silu_mul_grouped_dual_kernel(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> Results:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale)
    inputs, target = (gate, up, offsets), targets.target_of(gate.device)
    return _quantized(
        _SILU_MUL, inputs, pair, fp8, scale, reference.silu_mul,
        lambda: cuda.accepts_silu_mul(*inputs, pair, fp8, target),
        lambda: cuda.call_silu_mul(*inputs, fp8, scale, target),
    )  # fmt: skip


def quantize_silu_mul_grad_grouped_dual_kernel(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> Results:  # fmt: skip
    pair, fp8 = check_silu_mul_grad_grouped(grad, hidden, offsets, block, dtype, scale)
    inputs, target = (grad, hidden, offsets), targets.target_of(grad.device)
    return _quantized(
        _SILU_MUL_GRAD, inputs, pair, fp8, scale, reference.silu_mul_grad,
        lambda: cuda.accepts_silu_mul_grad(*inputs, pair, fp8, target),
        lambda: cuda.call_silu_mul_grad(*inputs, fp8, scale, target),
    )  # fmt: skip


def _quantized(
    name: str, inputs: tuple[Tensor, Tensor, Tensor], block: Block, dtype: torch.dtype, scale: str,
    produce: Callable[[Tensor, Tensor], Tensor], refusal: Callable[[], str | None], plan: Callable[[], Any],
) -> Results:  # fmt: skip
    """By one launch where the kernel takes it, else `produce` first, in float32."""
    key = (name, block, dtype, scale, *map(kind, inputs))
    call = recall(key)
    if call is None:
        first, second, offsets = inputs
        if not kernel_takes(first, dtype):
            return reference.quantize_grouped_dual(produce(first, second), offsets, block, dtype, scale)
        reason = refusal() or nvrtc.unavailable()
        if reason is not None:
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s %s in two steps: %s", name, tuple(first.shape), reason)
            return quantize_grouped_dual_kernel(produce(first, second), offsets, block, dtype, scale)
        call = keep(key, plan())
    row, row_scale, col, col_scale = call(*inputs)
    return row, row_scale, col, col_scale
