"""The ops that quantize `silu(gate) * up` and its gradients in a training step.

The forward of a step that keeps `gate` and `up` in FP8, `quantize_silu_mul_saved(gate, up)`, is
`quantize_silu_mul(gate, up)` and also quantizes `gate` and `up` in blocks of (1, 128) with float32 scales.

The backward, `quantize_silu_mul_backward`, computes the gradients of `gate` and `up` in float32, rounds them to the
type of `grad` as autograd does, and quantizes each in `block` and in its transpose. It computes `silu(gate) * up`
again and quantizes it in `product_block` for the weight's gradient of the layer behind. `gate` and `up` are FP8 data
with scales, as the forward keeps them, or the values themselves without scales. In FP8 the product is rounded as the
gradients are. Without scales its results have the bits of `quantize_silu_mul`, so that it does not matter whether the
forward or the backward quantizes it.

On a GPU each op is one launch, in which the terms of a value have relative errors under 1e-5 before it is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES
from fp8fn.ops.kernel import Dispatch, Kernel, deferred
from fp8fn.ops.layout import Block, contracts_rows, is_square, scale_shape, turned
from fp8fn.ops.operands import SILU_MUL, Quantization, Quantized, empty_dual
from fp8fn.ops.quantize import (
    SQUARE,
    check_quantize,
    checked_block,
    quantize_dual_kernel,
    quantize_kernel,
    unserved,
)
from fp8fn.ops.quantize_fused import check_silu_mul, quantize_silu_mul_kernel
from fp8fn.ops.silu_mul import SAVED_BLOCK, SavedSiluMul, SiluMulBackward, empty_backward

if TYPE_CHECKING:
    from fp8fn.ops.cuda.quantize import silu_mul as cuda_silu_mul
else:
    cuda_silu_mul = deferred("fp8fn.ops.cuda.quantize.silu_mul")

_FORMAT: Final = 'int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32"'
_SAVED: Final = "quantize_silu_mul_saved"
_BACKWARD: Final = "quantize_silu_mul_backward"
SAVED_SCHEMA: Final = f"{_SAVED}(Tensor gate, Tensor up, {_FORMAT}) -> ({', '.join(['Tensor'] * 6)})"
BACKWARD_SCHEMA: Final = (
    f"{_BACKWARD}(Tensor grad, Tensor gate, Tensor? gate_scale, Tensor up, Tensor? up_scale, {_FORMAT}, "
    f"int[2] product_block=[128, 1], ScalarType? product_dtype=None) -> ({', '.join(['Tensor'] * 10)})"
)

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Format = tuple[Block, torch.dtype, str, Block, torch.dtype]


def check_backward(tensors: Sequence[Any], form: Sequence[Any]) -> Format:
    """The format with its defaults, or the error that says which argument is wrong and what would work."""
    (grad, *kept), (block, dtype, scale, product_block, product_dtype) = tensors, form
    pair, fp8 = check_quantize(grad, block, dtype, scale, _BACKWARD, "grad")
    if is_square(pair) or contracts_rows(pair):
        raise ValueError(f"{_BACKWARD}: block={pair} does not lie along the columns; use (1, 128), (1, 32) or (1, -1)")
    product = checked_block(f"{_BACKWARD}: product_block", product_block)
    if product != SQUARE and not contracts_rows(product):
        remedy = f"use (128, 1), (32, 1), (-1, 1) or {SQUARE}"
        raise ValueError(f"{_BACKWARD}: product_block={product} does not lie along the rows; {remedy}")
    if product_dtype is not None and product_dtype not in FP8_DTYPES:
        raise TypeError(f"{_BACKWARD}: product_dtype={product_dtype} is not an FP8 type; use one of {FP8_DTYPES}")
    gate, gate_scale, up, up_scale = kept
    if (gate_scale is None) != (up_scale is None):
        missing, other = ("gate", "up") if gate_scale is None else ("up", "gate")
        raise ValueError(f"{_BACKWARD}: {other}_scale is given and {missing}_scale is None; give both or neither")
    _check_kept(grad, "gate", gate, gate_scale)
    _check_kept(grad, "up", up, up_scale)
    return pair, fp8, scale, product, product_dtype or targets.native_e4m3(targets.target_of(grad.device))


def _check_kept(grad: Tensor, name: str, data: Tensor, scales: Tensor | None) -> None:
    if data.shape != grad.shape:
        shapes = f"grad has shape {tuple(grad.shape)} and {name} {tuple(data.shape)}"
        raise ValueError(f"{_BACKWARD}: {shapes}; they must be equal")
    if scales is None:
        if data.dtype not in INPUT_DTYPES:
            remedy = f"give {name}_scale, or use one of {INPUT_DTYPES}"
            raise TypeError(f"{_BACKWARD}: {name} has dtype {data.dtype} and {name}_scale is None; {remedy}")
    else:
        _check_scales(grad, name, data, scales)
    for label, x in ((name, data), (f"{name}_scale", scales)):
        if x is not None and x.device != grad.device:
            raise ValueError(
                f"{_BACKWARD}: grad is on {grad.device} and {label} on {x.device}; move them to one device"
            )


def _check_scales(grad: Tensor, name: str, data: Tensor, scales: Tensor) -> None:
    if data.dtype not in FP8_DTYPES:
        remedy = f"use the results of torch.ops.fp8fn.{_SAVED}, or None for both scales"
        raise TypeError(f"{_BACKWARD}: {name} has dtype {data.dtype}, which is not an FP8 type; {remedy}")
    needed = scale_shape(grad.shape, SAVED_BLOCK)
    if tuple(scales.shape) != needed or scales.dtype != torch.float32:
        given = f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise ValueError(f"{_BACKWARD}: {name}_scale is {given}; it must be torch.float32 of shape {needed}")


def quantize_silu_mul_saved_reference(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> Saved:
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, _SAVED)
    kept = targets.native_e4m3(targets.target_of(gate.device))
    return (
        *reference.quantize(reference.silu_mul(gate, up), pair, fp8, scale),
        *reference.quantize(gate, SAVED_BLOCK, kept, "fp32"),
        *reference.quantize(up, SAVED_BLOCK, kept, "fp32"),
    )


def quantize_silu_mul_saved_fake(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> Saved:
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, _SAVED)
    kept = targets.native_e4m3(targets.target_of(gate.device))
    return (
        *empty_dual(gate, pair, fp8, scale)[:2],
        *empty_dual(gate, SAVED_BLOCK, kept, "fp32")[:2],
        *empty_dual(up, SAVED_BLOCK, kept, "fp32")[:2],
    )


def quantize_silu_mul_saved_kernel(
    gate: Tensor, up: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> Saved:
    pair = checked_block(_SAVED, block)
    return cast(Saved, tuple(QUANTIZE_SILU_MUL_SAVED((gate, up), (pair, dtype, scale))))


def quantize_silu_mul_backward_reference(  # noqa: PLR0913 - an op's signature
    grad: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None,
    block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    product_block: Sequence[int] = (128, 1), product_dtype: torch.dtype | None = None,
) -> Backward:  # fmt: skip
    form = check_backward((grad, gate, gate_scale, up, up_scale), (block, dtype, scale, product_block, product_dtype))
    pair, fp8, scale, square, product_type = form
    *gradients, product = _values(grad, kept_operand(gate, gate_scale), kept_operand(up, up_scale))
    of_gate, of_up = (reference.quantize_dual(x, pair, fp8, scale) for x in gradients)
    data, scales = reference.quantize(product, square, product_type, scale)
    return (*of_gate, *of_up, *_column_major(data, scales, square))


def quantize_silu_mul_backward_fake(  # noqa: PLR0913 - an op's signature
    grad: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None,
    block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    product_block: Sequence[int] = (128, 1), product_dtype: torch.dtype | None = None,
) -> Backward:  # fmt: skip
    form = check_backward((grad, gate, gate_scale, up, up_scale), (block, dtype, scale, product_block, product_dtype))
    return empty_backward(grad, *form)


def quantize_silu_mul_backward_kernel(  # noqa: PLR0913 - an op's signature
    grad: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None,
    block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    product_block: Sequence[int] = (128, 1), product_dtype: torch.dtype | None = None,
) -> Backward:  # fmt: skip
    pair, product = checked_block(_BACKWARD, block), checked_block(f"{_BACKWARD}: product_block", product_block)
    tensors, form = (grad, gate, gate_scale, up, up_scale), (pair, dtype, scale, product, product_dtype)
    return cast(Backward, tuple(QUANTIZE_SILU_MUL_BACKWARD(tensors, form)))


def kept_operand(data: Tensor, scales: Tensor | None) -> Quantized | Tensor:
    """`gate` or `up` of `SiluMulBackward`."""
    return data if scales is None else Quantized(data, scales, SAVED_BLOCK)


def _values(grad: Tensor, gate: Quantized | Tensor, up: Quantized | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and of up in the type of `grad`, and the product to quantize, by plain PyTorch."""
    wide_gate, wide_up = (x.float() if isinstance(x, Tensor) else reference.dequantize(*x) for x in (gate, up))
    gradients = reference.silu_mul_grad(grad, torch.cat([wide_gate, wide_up], -1)).to(grad.dtype)
    of_gate, of_up = gradients.chunk(2, -1)
    product = reference.silu_mul(wide_gate, wide_up)
    return of_gate.contiguous(), of_up.contiguous(), product if isinstance(gate, Tensor) else product.to(grad.dtype)


def _column_major(data: Tensor, scales: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    return (turned(data, True), turned(scales, True)) if is_square(block) else (data, scales)


def _saved_operands(tensors: Sequence[Any], values: Sequence[Any]) -> SavedSiluMul:
    (gate, up), (block, dtype, scale) = tensors, values
    pair, fp8 = check_silu_mul(gate, up, block, dtype, scale, _SAVED)
    target = targets.target_of(gate.device)
    of_gate, of_up = (
        Quantization(x=x, block=SAVED_BLOCK, dtype=targets.native_e4m3(target), scale="fp32", target=target)
        for x in (gate, up)
    )
    product = Quantization(x=gate, other=up, source=SILU_MUL, block=pair, dtype=fp8, scale=scale, target=target)
    return SavedSiluMul(product=product, gate=of_gate, up=of_up)


def _backward_operands(tensors: Sequence[Any], values: Sequence[Any]) -> SiluMulBackward:
    grad, gate, gate_scale, up, up_scale = tensors
    block, dtype, scale, product_block, product_dtype = check_backward(tensors, values)
    return SiluMulBackward(
        grad=grad, gate=kept_operand(gate, gate_scale), up=kept_operand(up, up_scale), block=block, dtype=dtype,
        scale=scale, product_block=product_block, product_dtype=product_dtype,
        target=targets.target_of(grad.device),
    )  # fmt: skip


def _saved_reference(saved: SavedSiluMul) -> Sequence[Tensor]:
    """By the ops that quantize one tensor each."""
    product = saved.product
    assert product.other is not None
    return (
        *quantize_silu_mul_kernel(product.x, product.other, product.block, product.dtype, product.scale),
        *(part for q in (saved.gate, saved.up) for part in quantize_kernel(q.x, q.block, q.dtype, q.scale)),
    )


def _backward_reference(given: SiluMulBackward) -> Sequence[Tensor]:
    """Computed by plain PyTorch, then quantized by the ops for one tensor each."""
    *gradients, product = _values(given.grad, given.gate, given.up)
    form = given.block, given.dtype, given.scale
    data, scales = quantize_kernel(product, given.product_block, given.product_dtype, given.scale)
    return (
        *(part for x in gradients for part in quantize_dual_kernel(x, *form)),
        *_column_major(data, scales, given.product_block),
    )


def _saved_unserved(saved: SavedSiluMul) -> str | None:
    return unserved(saved.product) or cuda_silu_mul.accepts_saved(saved)


def _backward_unserved(given: SiluMulBackward) -> str | None:
    return "grad is empty" if given.grad.numel() == 0 else cuda_silu_mul.accepts_backward(given)


QUANTIZE_SILU_MUL_SAVED: Final = Dispatch(
    op=_SAVED,
    inputs=("gate", "up"),
    operands=_saved_operands,
    kernels=(
        Kernel("cuda_blocks", cuda_silu_mul.accepts_saved, cuda_silu_mul.configure_saved, cuda_silu_mul.plan_saved),
    ),
    reference=_saved_reference,
    unserved=_saved_unserved,
)

QUANTIZE_SILU_MUL_BACKWARD: Final = Dispatch(
    op=_BACKWARD,
    inputs=("grad", "gate", "gate_scale", "up", "up_scale"),
    operands=_backward_operands,
    kernels=(
        Kernel(
            "cuda_blocks", cuda_silu_mul.accepts_backward, cuda_silu_mul.configure_backward,
            cuda_silu_mul.plan_backward,
        ),
    ),
    reference=_backward_reference,
    unserved=_backward_unserved,
)  # fmt: skip
