"""Matrix products with an FP8 weight, by `fp8fn::mm_a16w8` and, of groups of rows, `fp8fn::grouped_mm_a16w8`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8fn.meta.bypass import shortest
from fp8fn.ops.formats import INPUT_DTYPES, SCALE_DTYPES
from fp8fn.ops.grouped_mm_a16w8 import grouped_mm_a16w8_kernel
from fp8fn.ops.layout import Block, is_column_major, is_square, known_block, moved, swap, turned
from fp8fn.ops.mm_a16w8 import mm_a16w8_kernel
from fp8fn.ops.operands import Quantized
from fp8fn.ops.quantize import check_layout
from fp8fn.weights.fp8_weight import FP8Weight, NoForm, implements
from fp8fn.weights.views import t, transpose

aten = torch.ops.aten


@implements(aten.mm.default, aten.bmm.default)
def mm(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`a @ b + bias` of a tensor and a weight, in either order; `bias` only where `b` is the weight."""
    if not isinstance(b, FP8Weight):
        if not isinstance(a, FP8Weight):
            raise NoForm
        out = product(b.transpose(-1, -2), transpose(a, -1, -2), None, out_dtype)
        return out.transpose(-1, -2).contiguous()  # as PyTorch's, of which a view may be taken
    data, scale, pair = _operand(a, b)
    op: Callable[..., Tensor] = torch.ops.fp8fn.mm_a16w8
    call = shortest(op, mm_a16w8_kernel, a, data, scale, bias, below_autograd=True)
    try:
        return call(a, data, scale, pair, bias, out_dtype, False, b._form.activations)
    except ValueError:
        if a.shape[-1] == b.shape[-2]:
            raise
        # The op's own message advises to transpose the weight, which a layer has done.
        raise ValueError(
            f"a product of activations {tuple(a.shape)} by an FP8Weight, {tuple(b.shape)} as (K, N): K={a.shape[-1]} "
            f"is not {b.shape[-2]}; pass activations whose contracted dimension is {b.shape[-2]}"
        ) from None


def _operand(x: Tensor, weight: FP8Weight) -> Quantized:
    """The weight as an operand of a product with activations `x`."""
    if isinstance(x, FP8Weight):
        raise NoForm
    block = weight._form.block
    dtype = weight._form.dtype
    if x.dtype != dtype:
        of_model = f"model.to({x.dtype}), which changes no data of the weight"
        remedy = of_model if x.dtype in INPUT_DTYPES else f"x.to({dtype})"
        raise RuntimeError(
            f"expected the activations and the weight to have the same dtype, but got {x.dtype} and an FP8Weight for "
            f"{dtype}; use {remedy}"
        )
    pair = known_block(block[-2:])
    if pair is None or (len(block) == 3 and block[0] != 1 and weight.shape[0] != 1):
        raise NoForm
    return Quantized(weight._data, weight._scale, pair)


@implements(aten.linear.default)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The whole layer, which arrives in inference mode only."""
    if not isinstance(weight, FP8Weight) or isinstance(bias, FP8Weight) or weight.ndim != 2 or weight._form.flat:
        raise NoForm
    if bias is not None and bias.shape != weight.shape[:1]:
        # PyTorch broadcasts other shapes by rules of its own, in `addmm` or after `matmul`.
        out: Tensor = aten.linear.default.decompose(x, weight, bias)
        return out
    if x.ndim == 2:
        return product(x, t(weight), bias)
    out = product(x.reshape(x.shape[:-1].numel(), x.shape[-1]), t(weight), bias)
    return out.reshape(*x.shape[:-1], out.shape[-1])


@implements(aten.mv.default)
def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return product(matrix, vector[:, None]).squeeze(-1)


@implements(aten.addmm.default, aten.baddbmm.default)
def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * bias + alpha * (a @ b)`, rounded once."""
    if isinstance(bias, FP8Weight):
        raise NoForm
    if alpha == beta == 1 and bias.ndim == 1 and isinstance(b, FP8Weight) and bias.shape[0] == b.shape[-1]:
        return product(a, b, bias)
    sums = product(a, b, None, torch.float32)
    sums = sums if alpha == 1 else sums * alpha
    # `beta=0` ignores what the bias holds, NaN included.
    bias = bias.expand(sums.shape)  # the sums must not broadcast to a bias of more elements
    return (sums if beta == 0 else sums + bias.float() * beta).to(bias.dtype)


@implements(aten._grouped_mm.default)
def grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Each group's rows by its own expert; rows past the last group are zeros. Without offsets, a batch."""
    if not isinstance(weight, FP8Weight) or weight.ndim != 3 or bias is not None:
        raise NoForm
    if offs is None:
        return product(x, weight, None, out_dtype)
    if x.ndim != 2:
        raise NoForm
    operand, activations = _operand(x, weight), weight._form.activations
    op: Callable[..., Tensor] = torch.ops.fp8fn.grouped_mm_a16w8
    multiply = shortest(op, grouped_mm_a16w8_kernel, x, *operand[:2], offs, below_autograd=True)
    return multiply(x, *operand, offs, None, out_dtype, activations)


@implements("transformers::grouped_mm_fallback")
def grouped_mm_fallback(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """transformers' product of groups, for types that `torch.compile` has no `_grouped_mm` for."""
    return grouped_mm(x, weight, offs.to(torch.int32))


@implements("transformers::grouped_mm_fallback_backward")
def grouped_mm_fallback_backward(x: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `x`, and nothing in the place of the weight's, which autograd drops."""
    if not isinstance(weight, FP8Weight):
        raise NoForm
    return grouped_mm(grad, transpose(weight, -1, -2), offs.to(torch.int32)), grad.new_empty(0)


@implements(torch.ops.fp8fn.quantize.default)
def quantize(
    x: FP8Weight, block: Block, dtype: torch.dtype | None = None, scale: str = "fp32", amax: Tensor | None = None,
    column_major: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weight's own data and scales, in square blocks turned where `column_major` is not the weight's layout.

    They are copies, unless FSDP has gathered the weight for the products of one layer; of turned ones these copy the
    data alone, for kernels read such scales with any strides.
    """
    _check_request("quantize", x, (block[0], block[1]), dtype, scale, amax)
    check_layout("quantize", (block[0], block[1]), column_major)
    if column_major is not None and column_major != is_column_major(x._data):
        scales = aten.alias.default(x._scale) if x._form.gathered else turned(x._scale, column_major)
        return turned(x._data, column_major), scales
    if x._form.gathered:
        return aten.alias.default(x._data), aten.alias.default(x._scale)
    return moved(x._data, x.device), moved(x._scale, x.device)


@implements(torch.ops.fp8fn.quantize_dual.default)
def quantize_dual(
    x: FP8Weight, block: Block = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    amax: Tensor | None = None, dual_block: Block | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The weight's own data and scales by rows and by columns, of a square block; another has one form only."""
    _check_request("quantize_dual", x, (block[0], block[1]), dtype, scale, amax)
    other = swap(block) if dual_block is None else tuple(dual_block)
    if not is_square(block) or other != tuple(block):
        raise ValueError(
            f"quantize_dual: x is an FP8Weight in blocks of {tuple(block)} and has no data in blocks of {other}; "
            "pass x.dequantize(), or use a recipe whose weight block is square"
        )
    sides = [quantize(x, block, dtype, scale, amax, column_major) for column_major in (False, True)]
    (rows, row_scale), (columns, column_scale) = sides
    return rows, row_scale, columns, column_scale


def _check_request(
    name: str, weight: FP8Weight, block: Block, dtype: torch.dtype | None, scale: str, amax: Tensor | None
) -> None:
    """Raises ValueError unless a quantizer asks for what the weight holds."""
    form = weight._form
    own = form.block[-2:]
    if form.flat or own != block or any(b != 1 for b in form.block[:-2]):
        raise ValueError(
            f"{name}: block={block}, and x is an FP8Weight in blocks of {own}, which another rounding would change; "
            "use its own block, or pass x.dequantize()"
        )
    if dtype not in (None, weight._data.dtype):
        raise ValueError(f"{name}: dtype={dtype}, and x is an FP8Weight of {weight._data.dtype}; pass x.dequantize()")
    if (scale in ("e8m0", "rceil")) != (weight._scale.dtype == SCALE_DTYPES[1]):
        raise ValueError(f"{name}: scale={scale!r}, and x is an FP8Weight with scales of {weight._scale.dtype}")
    if amax is not None:
        raise ValueError(f"{name}: amax is given, and x is an FP8Weight, which has its scales; leave amax out")
