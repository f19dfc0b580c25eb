"""`gemm` and `linear`: matrix products in FP8."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.meta.autograd_prequant import ACTIVATION_BLOCKS, leave_to_aotautograd, quantized_by_weight
from fp8fn.meta.bypass import shortest
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.gemm import default_out_dtype
from fp8fn.ops.layout import Block, known_block
from fp8fn.ops.mm_a16w8 import check_mm_a16w8
from fp8fn.ops.mx_mm import is_mx, mx_mm_kernel
from fp8fn.ops.recipe import BLOCKWISE, Recipe, recipe_key
from fp8fn.ops.scaled_mm import broadcast_batch, check_product, scaled_mm_kernel
from fp8fn.scaled_tensor import ScaledTensor


@checked(
    arguments.product_of("a", "b", transposed=False),
    a=arguments.activation,
    b=arguments.weight,
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
    """`a (..., M, K) @ b (K, N) + bias (N)` → `(..., M, N)` in FP8, summed in float32 and rounded once.

    Two tensors (bfloat16, float16 or float32, any strides) are quantized by `recipe`. The product is differentiable in
    `a`, `b` and `bias`; the backward is two FP8 products by the same recipe, and between the two only FP8 forms of the
    operands are kept. `b` of three and more dimensions makes a batched product, leading dimensions broadcast.
    `out_dtype` is by default that of `a`, or autocast's.

    Two `ScaledTensor`s give the scaled product of what they hold, whatever `recipe`; `out_dtype` is then bfloat16 by
    default. It has no derivative. Of blocks `(1, 32)` and `(32, 1)` with e8m0 scales, MX-FP8, it is `fp8fn::mx_mm`, as
    are the products of `recipe="mxfp8"`.

    A tensor and a `ScaledTensor` give `a.float() @ (b.data.float() * b.scale) + bias`, products and sums in float32,
    whatever `recipe`: activations of 16 or 32 bits by an FP8 weight, which a GPU converts on its way to the matrix
    unit. `a (..., M, K)` with `b (K, N)` or leading dimensions that broadcast, any block; `out_dtype` as for two
    tensors. On a GPU the scales multiply the sums of `a * b.data`, which have to fit float32. Where they change with
    every element along K (a block of 1 there), they multiply the weight, rounded to the type of `a`. Differentiable in
    the tensor and in `bias`, to any order in reverse mode; the `ScaledTensor` is a constant. The other way around,
    `a` quantized, is the transposed product, and column-major.

    On Hopper up to 8 rows of 16 bits, and 9 to 16 by weights of some megabytes, where K is a multiple of 8, mostly go
    to the FP8 matrix unit as sums of two e4m3 values, or of three, with a power of two for each row and 128 of K:
    exactly, but for elements 2**14 times smaller than the largest of their 128. 128 products are summed in 14 bits, so
    that the result is off by about 1e-4 of the terms' size before it is rounded; `out_dtype=torch.float32` takes
    another kernel. Inf makes its row Inf, with the sign of the sum of its products where there are several in 128 of K.

    Row `i` of a product with a `ScaledTensor` has the same bits whatever the other rows hold, and whatever `M` is as
    long as one kernel and one configuration of it serve. Of MX-FP8 that is up to 16 rows (on gfx950 up to 7, and from 8
    to 16), of a tensor by a `ScaledTensor`, and on Hopper of MX-FP8 too, 1, 2 to 8, 9 to 16, 17 to 32 and 33 to 64 (on
    Hopper with K up to 3072). Elsewhere a sum over K may have another order.

    `prequant=True`, for a tensor `a` and a `ScaledTensor` `b`, quantizes `a` too, to the device's own e4m3, and
    multiplies two FP8 operands: for many rows, where products and not the weight's bytes decide. `a` takes the format
    of the scales of `b`, and blocks that fit: `(1, 128)` for `(128, 128)` and `(128, 1)`, `(1, 32)` for `(32, 1)`, rows
    for `(-1, 1)`, and for `(-1, -1)` one scale for all rows, which are those of all leading dimensions if `b` is a
    matrix. Derivatives are as without it. That of `a` is such a product as well where the transpose of `b` has one of
    these blocks, `(128, 128)` or `(-1, -1)`; of other blocks `a`'s gradient is the one without `prequant`. Of normal
    values the result has 28.5 dB of signal to noise, where it has 31.5 without `prequant`; of blocks of 32 with e8m0
    scales 27.6, where it has 30.7.

    `constant=True`, where `b` is a `ScaledTensor` (or `a`, beside a tensor `b`), promises that nothing writes its bytes
    or its scales while this product and the work enqueued just before it run: it was loaded and the device synchronized
    since, or it was written before the CUDA graph began whose part this product is, as weights of inference are. A
    kernel may then read it before earlier launches of the stream have ended, and with a weight that one of them still
    writes the result would be wrong. Of few rows on Hopper, up to 64 in MX-FP8's product and up to 128 of 16 bits by
    another FP8 weight, it mostly takes less time, and sums over K may have another order than without it; elsewhere,
    and with `prequant`, it has no effect. While a CUDA graph is captured no promise is needed for its first launch,
    nor behind launches of fp8fn: what those write is known, and a weight that they do not is read as early.

    Raises `ValueError` for sizes, devices, blocks or a recipe's name that do not fit, `TypeError` for a dtype.
    """
    if constant is not False or prequant is not False:
        arguments.flag("gemm", "constant", constant)
        arguments.flag("gemm", "prequant", prequant)
    if constant and not (isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor)):
        raise ValueError(
            "gemm: constant=True is for a weight in FP8, and a and b are tensors, quantized at each call; pass "
            "fp8fn.quantize(b, (128, 128)) as b, or leave constant out"
        )
    if prequant:
        return _weight_only_product(*_prequantized_operands(a, b), bias, out_dtype, prequant=True)
    if isinstance(b, ScaledTensor):
        if isinstance(a, ScaledTensor):
            return _scaled_product(a, b, bias, out_dtype, constant)
        return _weight_only_product(a, b, bias, out_dtype, constant=constant)
    if isinstance(a, ScaledTensor):
        return _weight_first_product(a, b, bias, out_dtype, constant)
    key = recipe_key(recipe)
    if a.ndim == 1:
        return torch.ops.fp8fn.gemm(a[None], b, bias, key, out_dtype).squeeze(-2)  # type: ignore[no-any-return]
    return torch.ops.fp8fn.gemm(a, b, bias, key, out_dtype)  # type: ignore[no-any-return]


_gemm: Callable[..., Tensor] = inspect.unwrap(gemm)  # whose names of the arguments `linear` has not


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
    """`torch.nn.functional.linear` in FP8: `x (..., K) @ weight (N, K)ᵀ + bias (N)` → `(..., N)`; see `gemm`."""
    return _gemm(x, weight.mT, recipe=recipe, bias=bias, out_dtype=out_dtype, prequant=prequant, constant=constant)


def _scaled_product(
    a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype | None, constant: bool
) -> Tensor:
    mx = is_mx(a.scale, a.block, b.scale, b.block)
    op = torch.ops.fp8fn.mx_mm if mx else torch.ops.fp8fn.scaled_mm
    kernel: Callable[..., Tensor] = mx_mm_kernel if mx else scaled_mm_kernel
    args = (a.data, a.scale, b.data, b.scale) if mx else (*_parts(a), *_parts(b))
    rest = (bias, out_dtype, True) if mx and constant else (bias, out_dtype)
    if a.ndim <= 3 and b.ndim <= 3:
        return shortest(op, kernel, a.data, a.scale, b.data, b.scale, bias)(*args, *rest)
    lead = broadcast_batch("gemm", a.data, b.data)
    flat = [part.expand(*lead, *part.shape[-2:]).flatten(0, -3) if isinstance(part, Tensor) else part for part in args]
    return op(*flat, *rest).unflatten(0, lead)  # type: ignore[no-any-return]


def _weight_only_product(
    x: Tensor, w: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype | None, *, prequant: bool = False,
    constant: bool = False,
) -> Tensor:  # fmt: skip
    """`x (..., K) @ w (..., K, N) + bias (N)`."""
    if x.ndim == 0:
        raise ValueError("gemm: a has shape (); it needs at least one dimension")
    x = _autocast(x)
    if x.ndim == 1:
        return _weight_only_product(x[None], w, bias, out_dtype, prequant=prequant, constant=constant).squeeze(-2)
    op: Callable[..., Tensor] = _prequantized_product if prequant else torch.ops.fp8fn.mm_a16w8
    data, scale, block = _parts(w)
    rest = (bias, out_dtype) if prequant else (bias, out_dtype, constant)
    if w.ndim == 2 and x.ndim > 3:
        flat = op(x.flatten(0, -3), data, scale, block, *rest)
        return flat.unflatten(0, x.shape[:-2])  # type: ignore[no-any-return]
    if x.ndim <= 3 and w.ndim <= 3:
        return op(x, data, scale, block, *rest)
    lead = broadcast_batch("gemm", x, data)
    x, data, scale = (t.expand(*lead, *t.shape[-2:]).flatten(0, -3) for t in (x, data, scale))
    return op(x, data, scale, block, *rest).unflatten(0, lead)  # type: ignore[no-any-return]


def _weight_first_product(
    w: ScaledTensor, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, constant: bool
) -> Tensor:
    """`w (..., M, K) @ x (..., K, N) + bias (N)`, which is `(xᵀ wᵀ)ᵀ`; the bias is added to float32 sums."""
    if x.ndim < 2:
        raise ValueError(f"gemm: b has shape {tuple(x.shape)}; it needs at least two dimensions")
    x = _autocast(x)
    if bias is None:
        return _weight_only_product(x.mT, w.mT, None, out_dtype, constant=constant).mT
    check_product("gemm", w.data, x, bias, out_dtype)
    sums = _weight_only_product(x.mT, w.mT, None, torch.float32, constant=constant).mT
    return (sums + bias.float()).to(out_dtype or x.dtype)


def _prequantized_operands(a: Tensor | ScaledTensor, b: Tensor | ScaledTensor) -> tuple[Tensor, ScaledTensor]:
    """`a` and `b` where `prequant=True` fits them, else the error that says which does not and what would work."""
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
    """What `mm_a16w8` of these arguments is, with `x` quantized."""
    if torch.compiler.is_compiling():
        leave_to_aotautograd()
    block = check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype)
    dtype = out_dtype or x.dtype
    shape = (*x.shape[:-1], w.shape[-1])
    if w.ndim == 2:  # then leading dimensions are rows
        x = x.flatten(0, -2)
    if bias is None or bias.ndim == 1:
        out = quantized_by_weight(x, w, w_scale, *block, bias, dtype)
        return out if w.ndim == 3 else out.reshape(shape)
    sums = quantized_by_weight(x, w, w_scale, *block, None, torch.float32)
    sums = sums if w.ndim == 3 else sums.reshape(shape)
    return (sums + (bias.unsqueeze(1) if bias.ndim == 2 else bias).float()).to(dtype)


def _autocast(x: Tensor) -> Tensor:
    """`x` as `torch.matmul` takes it: under autocast in its type."""
    return x.to(default_out_dtype(x)) if x.dtype in INPUT_DTYPES else x


def _parts(q: ScaledTensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    return q.data, q.scale, q.block
