"""`gemm` and `linear`: matrix products in FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8fn.meta.single_level import goes_unseen
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.gemm import default_out_dtype
from fp8fn.ops.mx_mm import is_mx, mx_mm_kernel
from fp8fn.ops.recipe import BLOCKWISE, Recipe, recipe_key
from fp8fn.ops.scaled_mm import broadcast_batch, check_product, scaled_mm_kernel
from fp8fn.scaled_tensor import ScaledTensor


def gemm(
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    *,
    recipe: Recipe | str = BLOCKWISE,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`a (..., M, K) @ b (K, N) + bias (N)` → `(..., M, N)` in FP8, summed in float32 and rounded once.

    Two tensors (bfloat16, float16 or float32, any strides) are quantized by `recipe`. The product is differentiable in
    `a`, `b` and `bias`; the backward is two FP8 products by the same recipe, and between the two only FP8 forms of the
    operands are kept. `b` of three and more dimensions makes a batched product, leading dimensions broadcast.
    `out_dtype` is by default that of `a`, or autocast's.

    Two `ScaledTensor`s give the scaled product of what they hold, whatever `recipe`; `out_dtype` is then bfloat16 by
    default. It has no derivative. Of blocks `(1, 32)` and `(32, 1)` with e8m0 scales, MX-FP8, it is `fp8fn::mx_mm`.

    A tensor and a `ScaledTensor` give `a.float() @ (b.data.float() * b.scale) + bias`, products and sums in float32,
    whatever `recipe`: activations of 16 or 32 bits by an FP8 weight, which a GPU converts on its way to the matrix
    unit. `a (..., M, K)` with `b (K, N)` or leading dimensions that broadcast, any block; `out_dtype` as for two
    tensors. On a GPU the scales multiply the sums of `a * b.data`, which have to fit float32. Where they change with
    every element along K (a block of 1 there), they multiply the weight, rounded to the type of `a`. Differentiable in
    the tensor and in `bias`, to any order in reverse mode; the `ScaledTensor` is a constant. The other way around,
    `a` quantized, is the transposed product, and column-major.

    Raises `ValueError` for sizes, devices, blocks or a recipe's name that do not fit, `TypeError` for a dtype.
    """
    if isinstance(b, ScaledTensor):
        if isinstance(a, ScaledTensor):
            return _scaled_product(a, b, bias, out_dtype)
        return _weight_only_product(a, b, bias, out_dtype)
    if isinstance(a, ScaledTensor):
        return _weight_first_product(a, b, bias, out_dtype)
    key = recipe_key(recipe)
    if a.ndim == 1:
        return torch.ops.fp8fn.gemm(a[None], b, bias, key, out_dtype).squeeze(-2)  # type: ignore[no-any-return]
    return torch.ops.fp8fn.gemm(a, b, bias, key, out_dtype)  # type: ignore[no-any-return]


def linear(
    x: Tensor | ScaledTensor,
    weight: Tensor | ScaledTensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str = BLOCKWISE,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` in FP8: `x (..., K) @ weight (N, K)ᵀ + bias (N)` → `(..., N)`; see `gemm`."""
    return gemm(x, weight.mT, recipe=recipe, bias=bias, out_dtype=out_dtype)


def _scaled_product(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    mx = is_mx(a.scale, a.block, b.scale, b.block)
    op = torch.ops.fp8fn.mx_mm if mx else torch.ops.fp8fn.scaled_mm
    kernel: Callable[..., Tensor] = mx_mm_kernel if mx else scaled_mm_kernel
    args = (a.data, a.scale, b.data, b.scale) if mx else (*_parts(a), *_parts(b))
    if a.ndim <= 3 and b.ndim <= 3:
        # The dispatcher takes 6 µs of the host, a third of the call.
        if not torch.compiler.is_compiling() and a.data.is_cuda and goes_unseen(a.data, a.scale, b.data, b.scale, bias):
            return kernel(*args, bias, out_dtype)
        return op(*args, bias, out_dtype)  # type: ignore[no-any-return]
    lead = broadcast_batch("gemm", a.data, b.data)
    flat = [part.expand(*lead, *part.shape[-2:]).flatten(0, -3) if isinstance(part, Tensor) else part for part in args]
    return op(*flat, bias, out_dtype).unflatten(0, lead)  # type: ignore[no-any-return]


def _weight_only_product(x: Tensor, w: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """`x (..., K) @ w (..., K, N) + bias (N)`."""
    if x.ndim == 0:
        raise ValueError("gemm: a has shape (); it needs at least one dimension")
    x = _autocast(x)
    if x.ndim == 1:
        return _weight_only_product(x[None], w, bias, out_dtype).squeeze(-2)
    data, scale, block = _parts(w)
    if w.ndim == 2 and x.ndim > 3:
        flat = torch.ops.fp8fn.mm_a16w8(x.flatten(0, -3), data, scale, block, bias, out_dtype)
        return flat.unflatten(0, x.shape[:-2])  # type: ignore[no-any-return]
    if x.ndim <= 3 and w.ndim <= 3:
        return torch.ops.fp8fn.mm_a16w8(x, data, scale, block, bias, out_dtype)  # type: ignore[no-any-return]
    lead = broadcast_batch("gemm", x, data)
    x, data, scale = (t.expand(*lead, *t.shape[-2:]).flatten(0, -3) for t in (x, data, scale))
    return torch.ops.fp8fn.mm_a16w8(x, data, scale, block, bias, out_dtype).unflatten(0, lead)  # type: ignore[no-any-return]


def _weight_first_product(w: ScaledTensor, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """`w (..., M, K) @ x (..., K, N) + bias (N)`, which is `(xᵀ wᵀ)ᵀ`; the bias is added to float32 sums."""
    if x.ndim < 2:
        raise ValueError(f"gemm: b has shape {tuple(x.shape)}; it needs at least two dimensions")
    x = _autocast(x)
    if bias is None:
        return _weight_only_product(x.mT, w.mT, None, out_dtype).mT
    check_product("gemm", w.data, x, bias, out_dtype)
    sums = _weight_only_product(x.mT, w.mT, None, torch.float32).mT
    return (sums + bias.float()).to(out_dtype or x.dtype)


def _autocast(x: Tensor) -> Tensor:
    """`x` as `torch.matmul` takes it: under autocast in its type."""
    return x.to(default_out_dtype(x)) if x.dtype in INPUT_DTYPES else x


def _parts(q: ScaledTensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    return q.data, q.scale, q.block
