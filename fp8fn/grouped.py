"""`grouped_gemm` and `expert_mlp`: the products of a mixture of experts on groups of tokens, in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.meta.bypass import shortest
from fp8fn.ops.gemm import as_autocast
from fp8fn.ops.grouped_gemm import check_batch
from fp8fn.ops.grouped_mm_a16w8 import grouped_mm_a16w8_kernel
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.mm_a16w8 import mm_a16w8_kernel
from fp8fn.ops.recipe import BLOCKWISE, Recipe, check_grouped, recipe_key
from fp8fn.ops.scaled_grouped_mm import scaled_grouped_mm_kernel
from fp8fn.scaled_tensor import ScaledTensor

Operand: TypeAlias = "Tensor | ScaledTensor | GroupedScaledTensor"


@checked(
    a=arguments.grouped_operand,
    b=arguments.grouped_operand,
    offsets=arguments.optional(arguments.offsets),
    counts=arguments.optional(arguments.counts),
    bias=arguments.bias,
    out_dtype=arguments.out_dtype,
)
def grouped_gemm(
    a: Operand,
    b: Operand,
    offsets: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    recipe: Recipe | str = BLOCKWISE,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies each group of tokens by its matrix in FP8, by the conventions of `torch._grouped_mm`.

    Two tensors are quantized by `recipe`, within groups; their product is differentiable. Quantized operands have no
    derivative. A tensor beside a `ScaledTensor` stays as it is, and has one. Float32 sums are rounded once.

    Args:
        a: Tensor, `ScaledTensor` in blocks `(1, 128)`, `(1, -1)` or `(1, 32)`, or `GroupedScaledTensor` of axis 1.
        b: Tensor, `ScaledTensor`, or `GroupedScaledTensor` of axis 0.
        offsets: int32, ascending: the end of each group. A GPU does not check them, and leaves rows unwritten where
            they descend. None for batches and `GroupedScaledTensor`s.
        counts: int32, in place of `offsets`: how many first rows of each matrix of a batch are multiplied, clamped to
            0 and M.
        recipe: `Recipe` or name of a preset, with blocks `(1, 128)`, `(1, -1)` or `(1, 32)` of activations and
            gradients; for two tensors only.
        bias: One row a group.
        out_dtype: Type of the result; by default that of `a`, autocast's, or bfloat16.

    Shape:
        `a (M, K)`, `b (E, K, N)`, `offsets (E)`, `bias (E, N)` → `(M, N)`, zeros past the last offset. `a (M, K)`, `b
        (K, N)` → `(E, M, N)`: groups of K. `a (E, M, K)`, `b (E, K, N)` → `(E, M, N)`: a batch; zeros past each of
        `counts (E)`.

    Returns:
        The products.

    Raises:
        TypeError: An operand or a dtype does not fit.
        ValueError: A size, device, block or recipe does not fit.

    Example:
        >>> ends = torch.tensor([100, 256], dtype=torch.int32)
        >>> fp8fn.grouped_gemm(torch.randn(256, 128), torch.randn(2, 128, 192), ends).shape
        torch.Size([256, 192])
    """
    check_grouped("grouped_gemm", recipe)
    if counts is not None:
        return _counted_product(a, b, (offsets, counts), recipe, bias, out_dtype)
    if isinstance(a, GroupedScaledTensor) and isinstance(b, GroupedScaledTensor):
        return _summed_product(a, b, offsets, bias, out_dtype)
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        if offsets is None:
            raise ValueError("grouped_gemm: offsets is None; for a batch of two ScaledTensors use fp8fn.gemm(a, b)")
        return _scaled_product(a, b, offsets, bias, out_dtype)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        out: Tensor = torch.ops.fp8fn.grouped_gemm(a, b, offsets, bias, recipe_key(recipe), out_dtype)
        return out
    if isinstance(a, Tensor) and isinstance(b, ScaledTensor):
        return _weight_product(a, b, offsets, bias, out_dtype)
    raise TypeError(
        f"grouped_gemm: a is {kind_of(a)} and b {kind_of(b)}; use two tensors, two ScaledTensors, two "
        "GroupedScaledTensors, or a tensor a and a ScaledTensor b"
    )


@checked(x=arguments.floats, w_gate_up=arguments.floats, w_down=arguments.floats, offsets=arguments.offsets)
def expert_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: Recipe | str = BLOCKWISE
) -> Tensor:
    """Computes each expert's gated MLP on its own tokens: `(silu(gate) * up) @ w_down` with `gate, up = x @ w_gate_up`.

    The result is that of two `grouped_gemm`s, but `silu(gate) * up` is quantized without a rounding to 16 bits before,
    and the backward keeps only `gate` and `up` between the two products. The function is differentiable in `x` and in
    both weights, to a second order where `grouped_gemm` is.

    Args:
        x: Tokens of all experts, one expert after the other: bfloat16, float16 or float32.
        w_gate_up: Weights of the first product; the gate is in the first half of the columns.
        w_down: Weights of the second product.
        offsets: int32, ascending: the row where each expert's tokens end.
        recipe: `Recipe` or name of a preset, as `grouped_gemm` takes it.

    Shape:
        `x (T, H)`, `w_gate_up (E, H, 2I)`, `w_down (E, I, H)`, `offsets (E)` → `(T, H)`; rows past the last offset are
        zeros, and so are their gradients.

    Returns:
        A tensor of the type of `x`, or of autocast's.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A size, a device or a recipe does not fit.

    Example:
        >>> x, ends = torch.randn(64, 128), torch.tensor([24, 64], dtype=torch.int32)
        >>> fp8fn.expert_mlp(x, torch.randn(2, 128, 512), torch.randn(2, 256, 128), ends).shape
        torch.Size([64, 128])
    """
    out: Tensor = torch.ops.fp8fn.expert_mlp(x, w_gate_up, w_down, offsets, recipe_key(recipe))
    return out


def _counted_product(
    a: Operand,
    b: Operand,
    groups: tuple[Tensor | None, Tensor],
    recipe: Recipe | str,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """`a (E, M, K) @ b (E, K, N)` of each expert's first rows; `groups` are offsets, which must be None, and counts."""
    offsets, counts = groups
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        return _scaled_product(a, b, offsets, bias, out_dtype, counts)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        out: Tensor = torch.ops.fp8fn.grouped_gemm(a, b, offsets, bias, recipe_key(recipe), out_dtype, counts)
        return out
    raise TypeError(
        f"grouped_gemm: a is {kind_of(a)} and b {kind_of(b)}; with counts use two tensors or two "
        "ScaledTensors, such as fp8fn.quantize(a, (1, 128)) beside fp8fn.quantize(b, (128, 128))"
    )


def _scaled_product(
    a: ScaledTensor, b: ScaledTensor, offsets: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype | None,
    counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`a (M, K) @ b (E, K, N)` of each group, or with `counts` `a (E, M, K)`."""
    tensors = a.data, a.scale, b.data, b.scale, offsets, bias, counts
    op: Callable[..., Tensor] = torch.ops.fp8fn.scaled_grouped_mm
    multiply = shortest(op, scaled_grouped_mm_kernel, *tensors)
    return multiply(a.data, a.scale, a.block, b.data, b.scale, b.block, offsets, bias, out_dtype, counts)


def _weight_product(
    x: Tensor, w: ScaledTensor, offsets: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """`x (M, K) @ w (E, K, N)` of each group, or of a batch `x (E, M, K)`."""
    x = as_autocast(x)
    data, scale, block = w.data, w.scale, w.block
    multiply: Callable[..., Tensor]
    if offsets is not None:
        multiply = torch.ops.fp8fn.grouped_mm_a16w8
        multiply = shortest(multiply, grouped_mm_a16w8_kernel, x, data, scale, offsets, bias)
        return multiply(x, data, scale, block, offsets, bias, out_dtype)
    check_batch("grouped_gemm", x, data, bias)
    multiply = torch.ops.fp8fn.mm_a16w8
    multiply = shortest(multiply, mm_a16w8_kernel, x, data, scale, bias)
    return multiply(x, data, scale, block, bias, out_dtype)


def _summed_product(
    a: GroupedScaledTensor,
    b: GroupedScaledTensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """`a (M, K) @ b (K, N)` → `(E, M, N)` for operands that are quantized by groups of K."""
    if offsets is not None:
        raise ValueError("grouped_gemm: offsets is given, and a and b bring their own; leave it out")
    if (a.axis, b.axis) != (1, 0):
        raise ValueError(
            f"grouped_gemm: a has groups along axis {a.axis} and b along axis {b.axis}; K is axis 1 of a and axis 0 of "
            "b, and .mT of either has the other"
        )
    if (a.block, a.size, a.groups) != (b.block, b.size, b.groups):
        kinds = [f"{q.size} tokens in {q.groups} groups and blocks of {q.block}" for q in (a, b)]
        raise ValueError(f"grouped_gemm: a has {kinds[0]}, b has {kinds[1]}; they must be equal")
    left, right = (a.data, a.scale, (1, a.block)), (b.data, b.scale, (b.block, 1))
    out: Tensor = torch.ops.fp8fn.scaled_grouped_mm(*left, *right, a.offsets, bias, out_dtype)
    return out
