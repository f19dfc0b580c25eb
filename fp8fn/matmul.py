"""`gemm` and `linear`: matrix products in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.recipe import BLOCKWISE, Recipe, recipe_key
from fp8fn.ops.scaled_mm import broadcast_batch
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
    default. It has no derivative.

    Raises `ValueError` for sizes, devices, blocks or a recipe's name that do not fit, `TypeError` for a dtype.
    """
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        return _scaled_product(a, b, bias, out_dtype)
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        raise TypeError(
            f"gemm: a is a {type(a).__name__} and b a {type(b).__name__}; quantize both, or dequantize one "
            "(fp8fn.dequantize)"
        )
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
    args = (*_parts(a), *_parts(b))
    if a.ndim <= 3 and b.ndim <= 3:
        return torch.ops.fp8fn.scaled_mm(*args, bias, out_dtype)  # type: ignore[no-any-return]
    lead = broadcast_batch("gemm", a.data, b.data)
    flat = [part.expand(*lead, *part.shape[-2:]).flatten(0, -3) if isinstance(part, Tensor) else part for part in args]
    return torch.ops.fp8fn.scaled_mm(*flat, bias, out_dtype).unflatten(0, lead)  # type: ignore[no-any-return]


def _parts(q: ScaledTensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    return q.data, q.scale, q.block
