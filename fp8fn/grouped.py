"""`grouped_gemm` and `expert_mlp`: what a mixture of experts computes on its groups of tokens, in FP8."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.grouped_scaled_tensor import GroupedScaledTensor
from fp8fn.ops.recipe import BLOCKWISE, Recipe, recipe_key
from fp8fn.scaled_tensor import ScaledTensor

Operand: TypeAlias = "Tensor | ScaledTensor | GroupedScaledTensor"


@checked(
    a=arguments.grouped_operand,
    b=arguments.grouped_operand,
    offsets=arguments.optional_offsets,
    bias=arguments.bias,
    out_dtype=arguments.out_dtype,
)
def grouped_gemm(
    a: Operand,
    b: Operand,
    offsets: Tensor | None = None,
    *,
    recipe: Recipe | str = BLOCKWISE,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The products of groups in FP8, by the conventions of `torch._grouped_mm`, summed in float32 and rounded once.

    `offsets` is int32 `(E,)` and holds where each group ends; the first begins at 0, and a group may be empty. The
    ends must not decrease. On the CPU that is checked; on a GPU it would have to be waited for, and where they do
    decrease, rows may be left unwritten, but nothing outside of a tensor is read or written. No token is padded or
    moved for it.

    - `a (M, K) @ b (E, K, N)` → `(M, N)`: group `g` of rows by `b[g]`. Rows past the last offset are zeros.
    - `a (M, K) @ b (K, N)` → `(E, M, N)`: of each group of K its own product, zeros for an empty one.
    - `a (E, M, K) @ b (E, K, N)` → `(E, M, N)`, without `offsets`: batched, as `gemm`.

    `bias (E, N)` has a row for each group. Two tensors (bfloat16, float16 or float32, any strides) are quantized by
    `recipe`: `BLOCKWISE` or one like it with blocks `(1, 128)` of activations and gradients, whose scales along the
    tokens do not cross a group's border, or `ROWWISE`. The product is differentiable in `a`, `b` and `bias`, by FP8
    products of the same recipe, and between forward and backward only FP8 forms of the operands are kept. The gradient
    of `b` is stored as `b` is, and zero for a group without tokens; that of `a` is zero past the last offset.
    `out_dtype` is by default that of `a`, or autocast's.

    Quantized operands give the product of what they hold, whatever `recipe`, without a derivative and in bfloat16 by
    default: two `ScaledTensor`s for groups of rows, `a` in blocks `(1, 128)`, `(1, -1)` or `(1, 32)`; two
    `GroupedScaledTensor`s for groups of K, `a` with axis 1 and `b` with axis 0, which bring their offsets.

    Raises `ValueError` for sizes, devices, blocks or recipes that do not fit, `TypeError` for a dtype.
    """
    if isinstance(a, GroupedScaledTensor) and isinstance(b, GroupedScaledTensor):
        return _summed_product(a, b, offsets, bias, out_dtype)
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        if offsets is None:
            raise ValueError("grouped_gemm: offsets is None; for a batch of two ScaledTensors use fp8fn.gemm(a, b)")
        args = (a.data, a.scale, a.block, b.data, b.scale, b.block, offsets, bias, out_dtype)
        return torch.ops.fp8fn.scaled_grouped_mm(*args)  # type: ignore[no-any-return]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.ops.fp8fn.grouped_gemm(a, b, offsets, bias, recipe_key(recipe), out_dtype)  # type: ignore[no-any-return]
    raise TypeError(
        f"grouped_gemm: a is a {type(a).__name__} and b a {type(b).__name__}; use two tensors, two ScaledTensors, or "
        "two GroupedScaledTensors"
    )


@checked(x=arguments.floats, w_gate_up=arguments.floats, w_down=arguments.floats, offsets=arguments.offsets)
def expert_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, offsets: Tensor, recipe: Recipe | str = BLOCKWISE
) -> Tensor:
    """The gated MLP of each expert on its own tokens, `(silu(gate) * up) @ w_down` with `gate, up = x @ w_gate_up`.

    `x (T, H)` holds the tokens of all experts one after the other, `offsets`, int32 `(E,)`, where each one's end;
    `w_gate_up (E, H, 2I)` has the gate in its first half, `w_down` is `(E, I, H)`. Returns `(T, H)` in the type of `x`,
    or autocast's; rows past the last offset are zeros, and so are their gradients.

    The same as two `grouped_gemm`s, but `silu(gate) * up` enters the second product in FP8 without having been rounded
    to 16 bits, and for the backward only `gate` and `up` are kept between the two. Differentiable in `x` and both
    weights; to a second order where `grouped_gemm` is. Errors are those of `grouped_gemm`.
    """
    return torch.ops.fp8fn.expert_mlp(x, w_gate_up, w_down, offsets, recipe_key(recipe))  # type: ignore[no-any-return]


def _summed_product(
    a: GroupedScaledTensor, b: GroupedScaledTensor, offsets: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """`a (M, K) @ b (K, N)` → `(E, M, N)`, of operands that were quantized by groups of K."""
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
    return torch.ops.fp8fn.scaled_grouped_mm(*left, *right, a.offsets, bias, out_dtype)  # type: ignore[no-any-return]
