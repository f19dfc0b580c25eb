"""vmap rules: the mapped dimension becomes a leading dimension, which every op treats as a batch of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops import reference
from fp8fn.ops.gemm import default_out_dtype
from fp8fn.ops.recipe import parse_recipe
from fp8fn.ops.torch_private.core import is_batchedtensor


def amax(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
    return torch.ops.fp8fn.amax(x.movedim(in_dims[0], 0), *args), 0


def quantize(info: Any, in_dims: Any, *args: Any) -> Any:
    return torch.ops.fp8fn.quantize(*_with_amax(info, in_dims, args)), (0, 0)


def quantize_dual(info: Any, in_dims: Any, *args: Any) -> Any:
    return torch.ops.fp8fn.quantize_dual(*_with_amax(info, in_dims, args)), (0, 0, 0, 0)


def quantize_silu_mul(info: Any, in_dims: Any, gate: Tensor, up: Tensor, *args: Any) -> Any:
    return torch.ops.fp8fn.quantize_silu_mul(*_gated(info, in_dims, gate, up), *args), (0, 0)


def quantize_silu_mul_dual(info: Any, in_dims: Any, gate: Tensor, up: Tensor, *args: Any) -> Any:
    return torch.ops.fp8fn.quantize_silu_mul_dual(*_gated(info, in_dims, gate, up), *args), (0, 0, 0, 0)


def quantize_rms_norm(info: Any, in_dims: Any, *args: Any) -> Any:
    return _normalised(torch.ops.fp8fn.quantize_rms_norm, torch.ops.fp8fn.quantize, info, in_dims, args), (0, 0)


def quantize_rms_norm_dual(info: Any, in_dims: Any, *args: Any) -> Any:
    ops = torch.ops.fp8fn.quantize_rms_norm_dual, torch.ops.fp8fn.quantize_dual
    return _normalised(*ops, info, in_dims, args), (0, 0, 0, 0)


def scaled_mm(info: Any, in_dims: Any, *args: Any) -> Any:
    a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype, *rest = args if len(args) > 8 else _padded(args, 8)
    a_dim, a_scale_dim, _, b_dim, b_scale_dim, _, bias_dim, *_ = _padded(in_dims, 8)

    def product(bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        dims = (a_dim, a_scale_dim, b_dim, b_scale_dim)
        parts, lead = _matrices((a, a_scale, b, b_scale), dims, info.batch_size)
        out = torch.ops.fp8fn.scaled_mm(*parts[:2], a_block, *parts[2:], b_block, bias, out_dtype, *rest)
        result: Tensor = out.unflatten(0, lead)
        return result

    return _with_bias(product, bias, bias_dim, out_dtype or torch.bfloat16), 0


def mx_mm(info: Any, in_dims: Any, *args: Any) -> Any:
    *operands, bias, out_dtype, constant = _padded(args, 7)
    *dims, bias_dim, _, _ = _padded(in_dims, 7)

    def product(bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        parts, lead = _matrices(operands, dims, info.batch_size)
        out = torch.ops.fp8fn.mx_mm(*parts, bias, out_dtype, bool(constant))
        result: Tensor = out.unflatten(0, lead)
        return result

    return _with_bias(product, bias, bias_dim, out_dtype or torch.bfloat16), 0


def mm_a16w8(info: Any, in_dims: Any, *args: Any) -> Any:
    x, w, w_scale, block, bias, out_dtype, constant, activations, invariant = _padded(args, 9)
    x_dim, w_dim, scale_dim, _, bias_dim, *_ = _padded(in_dims, 9)
    size = info.batch_size
    rank = 1 + max(x.ndim - (x_dim is not None), w.ndim - (w_dim is not None))
    x = _lift(x, x_dim, size, rank)
    lead = x.shape[:-2]
    if w.ndim > 2 or scale_dim is not None:  # otherwise all elements share one weight
        w, w_scale = _lift(w, w_dim, size, rank), _lift(w_scale, scale_dim, size, rank)
        lead = torch.broadcast_shapes(lead, w.shape[:-2])
        w, w_scale = (t.expand(*lead, *t.shape[-2:]).flatten(0, -3) for t in (w, w_scale))
    x = x.expand(*lead, *x.shape[-2:]).flatten(0, -3)
    if bias is not None and (bias.ndim > 1 or bias_dim is not None):
        bias = bias.movedim(bias_dim, 0) if bias_dim is not None else bias.expand(size, *bias.shape)
        bias = bias.flatten(1, -2) if bias.ndim > 2 else bias.unsqueeze(1)
        bias = bias.expand(size, lead[1:].numel(), bias.shape[-1]).flatten(0, 1)
    options = (bool(constant), activations or "16bit", bool(invariant))
    out = torch.ops.fp8fn.mm_a16w8(x, w, w_scale, block, bias, out_dtype, *options)
    return out.unflatten(0, lead), 0


def gemm(info: Any, in_dims: Any, *args: Any) -> Any:
    a, b, bias, recipe, out_dtype = _padded(args, 5)
    a_dim, b_dim, bias_dim, *_ = _padded(in_dims, 5)
    recipe = recipe or "blockwise"
    if b_dim is None and b.ndim == 2 and parse_recipe(recipe).activation_block[0] == 1:
        a = a.movedim(a_dim, 0) if a_dim is not None else a.expand(info.batch_size, *a.shape)
    else:  # each element keeps its own scales, as without vmap
        rank = max(a.ndim + (a_dim is None), b.ndim + (b_dim is None))
        a, b = _lift(a, a_dim, info.batch_size, rank), _lift(b, b_dim, info.batch_size, rank)

    def product(bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        result: Tensor = torch.ops.fp8fn.gemm(a, b, bias, recipe, out_dtype)
        return result

    return _with_bias(product, bias, bias_dim, out_dtype or default_out_dtype(args[0])), 0


def _matrices(operands: Any, dims: Any, size: int) -> tuple[list[Tensor], torch.Size]:
    """`(a, a_scale, b, b_scale)`, each flattened to one batch, and the leading dimensions of the batch."""
    (a, _, b, _), (a_dim, _, b_dim, _) = operands, dims
    rank = max(a.ndim + (a_dim is None), b.ndim + (b_dim is None))
    parts = [_lift(part, dim, size, rank) for part, dim in zip(operands, dims, strict=True)]
    lead = torch.broadcast_shapes(parts[0].shape[:-2], parts[2].shape[:-2])
    return [part.expand(*lead, *part.shape[-2:]).flatten(0, -3) for part in parts], lead


def each(name: str) -> Callable[..., Any]:
    """The rule that calls the op once for each element of the batch: groups of tokens end elsewhere in each."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        op, size = getattr(torch.ops.fp8fn, name), info.batch_size

        def element(arg: Any, dim: Any, i: int) -> Any:
            if not isinstance(arg, Tensor) or dim is None:
                return arg
            return arg.select(dim, i) if size else arg.new_zeros(arg.movedim(dim, 0).shape[1:])

        calls = range(max(size, 1))  # an empty batch needs one call for the shapes of its results
        results = [op(*(element(*pair, i) for pair in zip(args, in_dims, strict=True))) for i in calls]
        if isinstance(results[0], Tensor):
            return _stacked(results)[:size], 0
        return tuple(_stacked(list(parts))[:size] for parts in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


def _stacked(parts: list[Tensor]) -> Tensor:
    """`torch.stack` along a new first dimension, through bytes: not every device can stack FP8."""
    if parts[0].element_size() > 1:
        return torch.stack(parts)
    if is_batchedtensor(parts[0]):  # PyTorch 2.11 cannot view it as another type inside a vmap
        out = parts[0].new_empty((len(parts), *parts[0].shape))
        for i, part in enumerate(parts):
            out[i].copy_(part)
        return out
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _with_amax(info: Any, in_dims: Any, args: Any) -> tuple[Any, ...]:
    """The arguments of a quantizer, `(x, block, dtype, scale, amax, …)` without trailing ones, as those of a batch."""
    x, *form = args
    x = _lift(x, in_dims[0], info.batch_size, 0)
    if len(args) > 4 and args[4] is not None:
        form[3] = _lift(args[4], in_dims[4], info.batch_size, 0)
    return x, *form


def _gated(info: Any, in_dims: Any, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    gate_dim, up_dim, *_ = in_dims
    rank = max(gate.ndim + (gate_dim is None), up.ndim + (up_dim is None))
    return _lift(gate, gate_dim, info.batch_size, rank), _lift(up, up_dim, info.batch_size, rank)


def _normalised(op: Any, quantizer: Any, info: Any, in_dims: Any, args: Any) -> Any:
    """A norm and a quantizer. The op takes one weight; for a weight of each element the norm is computed before."""
    x, weight, eps, block, dtype, scale, rstd, *last = _padded(args, 7)  # `column_major`, or `dual_block`
    x_dim, weight_dim, *_, rstd_dim = _padded(in_dims, 7)[:7]
    x = _lift(x, x_dim, info.batch_size, 0)
    rstd = None if rstd is None else _lift(rstd, rstd_dim, info.batch_size, 0)
    eps, form = 1e-6 if eps is None else eps, (block or (1, 128), dtype, scale or "fp32")
    if weight_dim is None:
        return op(x, weight, eps, *form, rstd, *last)
    weight = weight.movedim(weight_dim, 0)
    weight = weight.reshape(weight.shape[0], *(1,) * (x.ndim - 2), weight.shape[-1])
    return quantizer(reference.rms_norm(x, weight, eps, rstd), *form, *((None, *last) if last else ()))


def _with_bias(
    product: Callable[..., Tensor], bias: Tensor | None, bias_dim: int | None, out_dtype: torch.dtype
) -> Tensor:
    """Adds a mapped bias in float32, before the only rounding; a bias that all elements share goes into the op."""
    if bias is None or bias_dim is None:
        return product(bias, out_dtype)
    out = product(None, torch.float32)
    bias = bias.movedim(bias_dim, 0).float()
    bias = bias.reshape(bias.shape[0], *(1,) * (out.ndim - 2), bias.shape[-1])
    return (out + bias).to(out_dtype)


def _padded(values: Any, size: int) -> list[Any]:
    """Fills in the trailing arguments, which PyTorch omits where they have their defaults."""
    return [*values, *[None] * (size - len(values))]


def _lift(x: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """`x` with the mapped dimension first (expanded if `x` is not mapped) and padded to `rank` dimensions after it."""
    x = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
    return x.reshape(x.shape[0], *(1,) * (rank - x.ndim), *x.shape[1:])
