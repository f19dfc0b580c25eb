"""`gemm` and `linear`: matrix products in FP8, dispatched by the types of their operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.meta.autograd_prequant import leave_to_aotautograd, quantized_by_weight
from fp8fn.meta.bypass import shortest
from fp8fn.meta.direct import product
from fp8fn.ops.activations import ACTIVATION_BLOCKS
from fp8fn.ops.gemm import as_autocast
from fp8fn.ops.layout import Block, is_mx, known_block
from fp8fn.ops.mm_a16w8 import check_mm_a16w8, mm_a16w8_kernel
from fp8fn.ops.mx_mm import mx_mm_kernel
from fp8fn.ops.recipe import BLOCKWISE, Recipe, is_batch_invariant, recipe_key
from fp8fn.ops.scaled_mm import broadcast_batch, check_product, scaled_mm_kernel
from fp8fn.scaled_tensor import ScaledTensor


@checked(
    arguments.product_of("a", "b", transposed=False),
    a=arguments.activation,
    b=arguments.right,
    bias=arguments.bias,
    out_dtype=arguments.out_dtype,
    prequant=arguments.flag,
    constant=arguments.flag,
)
def gemm(
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    *,
    recipe: Recipe | str = BLOCKWISE,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    prequant: bool = False,
    constant: bool = False,
) -> Tensor:
    """Multiplies matrices in FP8: `a @ b + bias`, with float32 sums that are rounded once.

    Two tensors are quantized by `recipe`; their product is differentiable, and the backward keeps only FP8 forms of the
    operands. Two `ScaledTensor`s give the scaled product of what they hold, without a derivative. A tensor and a
    `ScaledTensor` give the product of unquantized activations and an FP8 weight, differentiable in the tensor and in
    `bias`. See `docs/numerics.md` for accuracy and the order of sums.

    Args:
        a: Tensor (bfloat16, float16 or float32, any strides) or `ScaledTensor`.
        b: Tensor or `ScaledTensor`.
        recipe: `Recipe` or name of a preset; of a `ScaledTensor` only `batch_invariant` is read.
        bias: Tensor that is added to the float32 sums.
        out_dtype: Type of the result; by default the type of the tensor `a` (or `b`), autocast's, or bfloat16 for two
            `ScaledTensor`s.
        prequant: Quantizes the tensor `a` to fit the `ScaledTensor` `b` and multiplies in FP8: faster for many rows.
        constant: Promises that nothing writes the `ScaledTensor` while this product and earlier launches run, as in
            inference; a kernel may then read it early.

    Shape:
        `a (..., M, K)`, `b (..., K, N)`, `bias (N)` → `(..., M, N)`; leading dimensions broadcast. `a` may be `(K)`.

    Returns:
        The product, a tensor of `out_dtype`.

    Raises:
        TypeError: An operand, its dtype or `out_dtype` does not fit.
        ValueError: A size, a device, a block or a recipe's name does not fit.

    Example:
        >>> w = fp8fn.quantize(torch.randn(512, 256), (128, 128))
        >>> fp8fn.gemm(torch.randn(4, 512), w).shape
        torch.Size([4, 256])
    """
    if constant is not False or prequant is not False:
        arguments.flag("gemm", "constant", constant)
        arguments.flag("gemm", "prequant", prequant)
    if constant and not (isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor)):
        raise ValueError(
            "gemm: constant=True is for a weight in FP8, and a and b are tensors, quantized at each call; pass "
            "fp8fn.quantize(b, (128, 128)) as b, or leave constant out"
        )
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor) or prequant:
        invariant = is_batch_invariant(recipe)
        options = (constant, "fp8" if prequant and invariant else "16bit", invariant)
        if prequant:
            operands = _prequantized_operands(a, b)
            return _weight_only_product(*operands, bias, out_dtype, options, prequant=not invariant)
        if isinstance(b, ScaledTensor):
            if isinstance(a, ScaledTensor):
                return _scaled_product(a, b, bias, out_dtype, options)
            return _weight_only_product(a, b, bias, out_dtype, options)
        assert isinstance(a, ScaledTensor)
        return _weight_first_product(a, b, bias, out_dtype, options)
    key = recipe_key(recipe)
    direct = product(a, b, bias, key, out_dtype, transposed=False)
    if direct is not None:
        return direct
    out: Tensor = torch.ops.fp8fn.gemm(a[None] if a.ndim == 1 else a, b, bias, key, out_dtype)
    return out.squeeze(-2) if a.ndim == 1 else out


# `constant`, `activations` and `batch_invariant` of `fp8fn::mm_a16w8`.
_Options: TypeAlias = tuple[bool, str, bool]

_gemm: Callable[..., Tensor] = inspect.unwrap(gemm)  # without checks, whose errors name the arguments of `gemm`


@checked(
    arguments.product_of("x", "weight", transposed=True),
    x=arguments.activation,
    weight=arguments.weight,
    bias=arguments.bias,
    out_dtype=arguments.out_dtype,
    prequant=arguments.flag,
    constant=arguments.flag,
)
def linear(
    x: Tensor | ScaledTensor,
    weight: Tensor | ScaledTensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str = BLOCKWISE,
    out_dtype: torch.dtype | None = None,
    prequant: bool = False,
    constant: bool = False,
) -> Tensor:
    """Computes `torch.nn.functional.linear` in FP8: `x @ weight.mT + bias`.

    The arguments mean what they mean to `gemm`.

    Args:
        x: Tensor (bfloat16, float16 or float32, any strides) or `ScaledTensor`.
        weight: Tensor or `ScaledTensor`.
        bias: Tensor that is added to the float32 sums.
        recipe: `Recipe` or name of a preset; of a `ScaledTensor` only `batch_invariant` is read.
        out_dtype: Type of the result; by default the type of the tensor `x`, autocast's, or bfloat16.
        prequant: Quantizes the tensor `x` to fit the `ScaledTensor` `weight` and multiplies in FP8.
        constant: Promises that nothing writes the `ScaledTensor` while this product and earlier launches run.

    Shape:
        `x (..., K)`, `weight (N, K)`, `bias (N)` → `(..., N)`.

    Returns:
        The product, a tensor of `out_dtype`.

    Raises:
        TypeError: An operand, its dtype or `out_dtype` does not fit.
        ValueError: A size, a device, a block or a recipe's name does not fit.

    Example:
        >>> x, weight = torch.randn(8, 512), torch.randn(256, 512, requires_grad=True)
        >>> fp8fn.linear(x, weight).sum().backward()
        >>> weight.grad.shape
        torch.Size([256, 512])
    """
    if type(weight) is not ScaledTensor and constant is False and prequant is False:
        direct = product(x, weight, bias, recipe_key(recipe), out_dtype, transposed=True)
        if direct is not None:
            return direct
    return _gemm(x, weight.mT, recipe=recipe, bias=bias, out_dtype=out_dtype, prequant=prequant, constant=constant)


def _scaled_product(
    a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype | None, options: _Options
) -> Tensor:
    constant, _, invariant = options
    mx = not invariant and is_mx(a.scale, a.block, b.scale, b.block)
    op: Callable[..., Tensor] = torch.ops.fp8fn.mx_mm if mx else torch.ops.fp8fn.scaled_mm
    kernel: Callable[..., Tensor] = mx_mm_kernel if mx else scaled_mm_kernel
    args = (a.data, a.scale, b.data, b.scale) if mx else (a.data, a.scale, a.block, b.data, b.scale, b.block)
    rest = (bias, out_dtype, True) if invariant or (mx and constant) else (bias, out_dtype)
    if a.data.ndim <= 3 and b.data.ndim <= 3:
        return shortest(op, kernel, a.data, a.scale, b.data, b.scale, bias)(*args, *rest)
    lead = broadcast_batch("gemm", a.data, b.data)
    flat = [part.expand(*lead, *part.shape[-2:]).flatten(0, -3) if isinstance(part, Tensor) else part for part in args]
    out: Tensor = op(*flat, *rest).unflatten(0, lead)
    return out


def _weight_only_product(
    x: Tensor, w: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype | None, options: _Options, *,
    prequant: bool = False,
) -> Tensor:  # fmt: skip
    """`x (..., K) @ w (..., K, N) + bias (N)`."""
    if x.ndim == 0:
        raise ValueError("gemm: a has shape (); it needs at least one dimension")
    x = as_autocast(x)
    if x.ndim == 1:
        return _weight_only_product(x[None], w, bias, out_dtype, options, prequant=prequant).squeeze(-2)
    data, scale, block = w.data, w.scale, w.block
    op: Callable[..., Tensor] = torch.ops.fp8fn.mm_a16w8
    op = _prequantized_product if prequant else shortest(op, mm_a16w8_kernel, x, data, scale, bias)
    rest = (bias, out_dtype) if prequant else (bias, out_dtype, *options)
    if w.ndim == 2 and x.ndim > 3:
        return torch.unflatten(op(x.flatten(0, -3), data, scale, block, *rest), 0, x.shape[:-2])
    if x.ndim <= 3 and w.ndim <= 3:
        return op(x, data, scale, block, *rest)
    lead = broadcast_batch("gemm", x, data)
    x, data, scale = (t.expand(*lead, *t.shape[-2:]).flatten(0, -3) for t in (x, data, scale))
    out: Tensor = op(x, data, scale, block, *rest).unflatten(0, lead)
    return out


def _weight_first_product(
    w: ScaledTensor, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, options: _Options
) -> Tensor:
    """`w (..., M, K) @ x (..., K, N) + bias (N)`, computed as `(xᵀ wᵀ)ᵀ`; the bias is added to float32 sums."""
    if x.ndim < 2:
        raise ValueError(f"gemm: b has shape {tuple(x.shape)}; it needs at least two dimensions, b[:, None] for one")
    x = as_autocast(x)
    if bias is None:
        return _weight_only_product(x.mT, w.mT, None, out_dtype, options).mT
    check_product("gemm", w.data, x, bias, out_dtype)
    sums = _weight_only_product(x.mT, w.mT, None, torch.float32, options).mT
    return (sums + bias.float()).to(out_dtype or x.dtype)


def _prequantized_operands(a: Tensor | ScaledTensor, b: Tensor | ScaledTensor) -> tuple[Tensor, ScaledTensor]:
    """`a` and `b` if `prequant=True` fits them; otherwise raises an error with a remedy."""
    if isinstance(a, ScaledTensor):
        raise ValueError(
            "gemm: prequant=True quantizes a, and a is a ScaledTensor, in FP8 already; pass it as bfloat16, float16 or "
            "float32, or leave prequant out"
        )
    if not isinstance(b, ScaledTensor):
        raise ValueError(
            "gemm: prequant=True is for a weight in FP8, and b is a tensor; pass fp8fn.quantize(b, (128, 128)), or "
            "leave prequant out: two tensors are both quantized, by recipe"
        )
    if known_block(b.block) not in ACTIVATION_BLOCKS:
        raise ValueError(
            f"gemm: prequant=True and b has block={tuple(b.block)}, a scale for each element of K, which no product in "
            f"FP8 takes; quantize it in one of {tuple(ACTIVATION_BLOCKS)}, or leave prequant out"
        )
    return a, b


def _prequantized_product(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Block, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """`mm_a16w8` of these arguments, but with `x` quantized."""
    if torch.compiler.is_compiling():
        leave_to_aotautograd()
    block = check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype)
    dtype = out_dtype or x.dtype
    shape = (*x.shape[:-1], w.shape[-1])
    if w.ndim == 2:  # leading dimensions are rows
        x = x.flatten(0, -2)
    if bias is None or bias.ndim == 1:
        out = quantized_by_weight(x, w, w_scale, *block, bias, dtype)
        return out if w.ndim == 3 else out.reshape(shape)
    sums = quantized_by_weight(x, w, w_scale, *block, None, torch.float32)
    sums = sums if w.ndim == 3 else sums.reshape(shape)
    return (sums + (bias.unsqueeze(1) if bias.ndim == 2 else bias).float()).to(dtype)
