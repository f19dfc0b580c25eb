"""The ops that compute an expert's gated activation, or its gradient, and quantize it by rows and by groups of tokens.

`quantize_silu_mul_grouped` quantizes by groups of tokens alone, for a backward that makes the activation again.

As in `fp8fn.ops.quantize_fused`, they compute in float32 and round once, to FP8. On a GPU, `silu` and its derivative
have an error under 1e-5 of their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.groups import check_ends, empty_grouped
from fp8fn.ops.kernel import Dispatch, Kernel, deferred
from fp8fn.ops.layout import Block
from fp8fn.ops.operands import SILU_MUL, SILU_MUL_GRAD, Quantization, empty_grouped_dual
from fp8fn.ops.quantize import checked_dual_block, unserved
from fp8fn.ops.quantize_fused import unserved_by_blocks
from fp8fn.ops.quantize_grouped import (
    DUAL_BLOCKS,
    GROUPED_BLOCKS,
    check_quantize_grouped,
    checked_block,
    quantize_grouped_dual_kernel,
    quantize_grouped_kernel,
)

if TYPE_CHECKING:
    from fp8fn.ops.cuda.quantize import quantize as cuda_blocks
else:
    cuda_blocks = deferred("fp8fn.ops.cuda.quantize.quantize")

_TYPES: Final = 'ScalarType? dtype=None, str scale="fp32"'
_FORMAT: Final = f"Tensor offsets, int[2] block=[1, 128], {_TYPES}"
_RESULTS: Final = "(Tensor, Tensor, Tensor, Tensor)"
SILU_MUL_COLUMNS_SCHEMA: Final = (
    "quantize_silu_mul_grouped(Tensor gate, Tensor up, Tensor offsets, int[2] block=[128, 1], "
    f"{_TYPES}) -> (Tensor, Tensor)"
)
SILU_MUL_SCHEMA: Final = (
    f"quantize_silu_mul_grouped_dual(Tensor gate, Tensor up, {_FORMAT}, int[2]? dual_block=None) -> {_RESULTS}"
)
SILU_MUL_GRAD_SCHEMA: Final = (
    f"quantize_silu_mul_grad_grouped_dual(Tensor grad, Tensor hidden, {_FORMAT}) -> {_RESULTS}"
)

_SILU_MUL_COLUMNS: Final = "quantize_silu_mul_grouped"
_SILU_MUL: Final = "quantize_silu_mul_grouped_dual"
_SILU_MUL_GRAD: Final = "quantize_silu_mul_grad_grouped_dual"

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def check_silu_mul_grouped(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str,
    op: str = _SILU_MUL,
) -> tuple[Block, torch.dtype]:  # fmt: skip
    """The block and the element type, or the error that says which argument is wrong and what would work."""
    blocks = GROUPED_BLOCKS if op == _SILU_MUL_COLUMNS else DUAL_BLOCKS
    found = check_quantize_grouped(gate, offsets, block, dtype, scale, op, blocks)
    _check_alike(op, ("gate", gate), ("up", up), gate.shape)
    return found


def check_silu_mul_grad_grouped(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str
) -> tuple[Block, torch.dtype]:
    """As `check_silu_mul_grouped`, for `grad (M, I)` and `hidden (M, 2I)`."""
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


def quantize_silu_mul_grouped_reference(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale, _SILU_MUL_COLUMNS)
    check_ends(_SILU_MUL_COLUMNS, offsets)
    return reference.quantize_grouped(reference.silu_mul(gate, up), offsets, pair, fp8, scale)


def quantize_silu_mul_grouped_fake(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale, _SILU_MUL_COLUMNS)
    return empty_grouped(gate, offsets.shape[0], pair, fp8, scale)


def quantize_silu_mul_grouped_dual_reference(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", dual_block: Sequence[int] | None = None,
) -> Results:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale)
    other = checked_dual_block(_SILU_MUL, pair, dual_block)
    check_ends(_SILU_MUL, offsets)
    return reference.quantize_grouped_dual(reference.silu_mul(gate, up), offsets, pair, fp8, scale, other)


def quantize_silu_mul_grouped_dual_fake(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale)
    other = checked_dual_block(_SILU_MUL, pair, dual_block)
    return empty_grouped_dual(gate, offsets.shape[0], pair, fp8, scale, other)


def quantize_silu_mul_grad_grouped_dual_reference(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> Results:  # fmt: skip
    pair, fp8 = check_silu_mul_grad_grouped(grad, hidden, offsets, block, dtype, scale)
    check_ends(_SILU_MUL_GRAD, offsets)
    return reference.quantize_grouped_dual(reference.silu_mul_grad(grad, hidden), offsets, pair, fp8, scale)


def quantize_silu_mul_grad_grouped_dual_fake(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_silu_mul_grad_grouped(grad, hidden, offsets, block, dtype, scale)
    return empty_grouped_dual(hidden, offsets.shape[0], pair, fp8, scale)


def quantize_silu_mul_grouped_kernel(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pair = checked_block(_SILU_MUL_COLUMNS, block, GROUPED_BLOCKS)
    data, scales = QUANTIZE_SILU_MUL_GROUPED((gate, up, offsets), (False, pair, dtype, scale, None))
    return data, scales


def quantize_silu_mul_grouped_dual_kernel(
    gate: Tensor, up: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32", dual_block: Sequence[int] | None = None,
) -> Results:  # fmt: skip
    pair = checked_block(_SILU_MUL, block, DUAL_BLOCKS)
    other = checked_dual_block(_SILU_MUL, pair, dual_block)
    row, row_scale, col, col_scale = QUANTIZE_SILU_MUL_GROUPED((gate, up, offsets), (True, pair, dtype, scale, other))
    return row, row_scale, col, col_scale


def quantize_silu_mul_grad_grouped_dual_kernel(
    grad: Tensor, hidden: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None,
    scale: str = "fp32",
) -> Results:  # fmt: skip
    pair = checked_block(_SILU_MUL_GRAD, block, DUAL_BLOCKS)
    row, row_scale, col, col_scale = QUANTIZE_SILU_MUL_GRAD_GROUPED((grad, hidden, offsets), (pair, dtype, scale))
    return row, row_scale, col, col_scale


def _silu_mul_operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (gate, up, offsets), (dual, block, dtype, scale, dual_block) = tensors, values
    op = _SILU_MUL if dual else _SILU_MUL_COLUMNS
    pair, fp8 = check_silu_mul_grouped(gate, up, offsets, block, dtype, scale, op)
    return Quantization(
        x=gate, other=up, source=SILU_MUL, offsets=offsets, block=pair, dtype=fp8, scale=scale, dual=dual,
        dual_block=dual_block, target=targets.target_of(gate.device),
    )  # fmt: skip


def _silu_mul_grad_operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (grad, hidden, offsets), (block, dtype, scale) = tensors, values
    pair, fp8 = check_silu_mul_grad_grouped(grad, hidden, offsets, block, dtype, scale)
    return Quantization(
        x=hidden, other=grad, source=SILU_MUL_GRAD, offsets=offsets, block=pair, dtype=fp8, scale=scale, dual=True,
        target=targets.target_of(grad.device),
    )  # fmt: skip


def _reference(q: Quantization) -> Sequence[Tensor]:
    """Computed by plain PyTorch in float32, then quantized: by the other op where the format has a kernel."""
    assert q.other is not None
    assert q.offsets is not None
    y = reference.silu_mul(q.x, q.other) if q.source is SILU_MUL else reference.silu_mul_grad(q.other, q.x)
    form = y, q.offsets, q.block, q.dtype, q.scale
    if unserved(q) is not None:
        return reference.quantize_grouped_dual(*form, q.dual_block) if q.dual else reference.quantize_grouped(*form)
    return quantize_grouped_dual_kernel(*form, q.dual_block) if q.dual else quantize_grouped_kernel(*form)


def _dispatch(op: str, inputs: tuple[str, str, str], operands: Callable[[Any, Any], Quantization]) -> Dispatch:
    return Dispatch(
        op=op,
        inputs=inputs,
        operands=operands,
        kernels=(Kernel("cuda_blocks", cuda_blocks.accepts, cuda_blocks.configure, cuda_blocks.plan),),
        reference=_reference,
        unserved=unserved_by_blocks,
    )


QUANTIZE_SILU_MUL_GROUPED: Final = _dispatch(_SILU_MUL, ("gate", "up", "offsets"), _silu_mul_operands)
QUANTIZE_SILU_MUL_GRAD_GROUPED: Final = _dispatch(
    _SILU_MUL_GRAD, ("grad", "hidden", "offsets"), _silu_mul_grad_operands
)
