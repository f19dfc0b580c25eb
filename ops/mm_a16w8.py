"""The op `fp8fn::mm_a16w8`, the product of a 16- or 32-bit matrix and an FP8 weight: schema, checks, and dispatch.

With `activations="fp8"` the op quantizes many rows and multiplies in FP8; `ops/activations.py` decides at each call.
With "fp8_fast" the sums of such products stay in the tensor core's accumulator.

`fp8fn::silu_mul_mm_a16w8` multiplies rows `silu(gate) * up`, which a launch of few rows computes by itself. Passes over
compiled graphs call it. The rows are computed in float32 and rounded to their type, as by Inductor's kernel.

`fp8fn::mm_a16w8_silu_mul` computes `silu(x @ w) * (x @ w_up)`, of many rows in one launch. Passes over compiled graphs
call this op too. Both products are rounded to the type of `x` before the SiLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.activations import (
    Activations,
    check_activations,
    is_fast,
    quantized_at_once,
    quantized_product,
    why_16_bits,
)
from fp8fn.ops.cuda.limits import MOST_BLOCKS, TMA_ALIGNMENT
from fp8fn.ops.cuda.operands import map_fault
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.kernel import Dispatch, Kernel, Named, deferred, no_config, takes_all
from fp8fn.ops.layout import Block, matrix_strides
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.quantize_fused import check_gate_and_up
from fp8fn.ops.scaled_mm import Parts, check_operand, empty_output
from fp8fn.ops.targets import Target

if TYPE_CHECKING:
    from fp8fn.ops import dequantize
    from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, mm_a16w8, parts_a16w8, splitk_a16w8
    from fp8fn.ops.triton import mm_a16w8 as triton
    from fp8fn.ops.tuning import weight
else:
    a16w8_tiles, gemv_a16w8 = deferred("fp8fn.ops.cuda.gemm.a16w8_tiles"), deferred("fp8fn.ops.cuda.gemm.gemv_a16w8")
    mm_a16w8, splitk_a16w8 = deferred("fp8fn.ops.cuda.gemm.mm_a16w8"), deferred("fp8fn.ops.cuda.gemm.splitk_a16w8")
    dequantize, parts_a16w8 = deferred("fp8fn.ops.dequantize"), deferred("fp8fn.ops.cuda.gemm.parts_a16w8")
    triton, weight = deferred("fp8fn.ops.triton.mm_a16w8"), deferred("fp8fn.ops.tuning.weight")

MM_A16W8_SCHEMA: Final = (
    "mm_a16w8(Tensor x, Tensor w, Tensor w_scale, int[2] w_block, Tensor? bias=None, ScalarType? out_dtype=None, "
    'bool constant=False, str activations="16bit", '
    "bool batch_invariant=False) -> Tensor"
)

SILU_MUL_MM_A16W8_SCHEMA: Final = (
    "silu_mul_mm_a16w8(Tensor gate, Tensor up, Tensor w, Tensor w_scale, int[2] w_block, bool constant=False) -> Tensor"
)
MM_A16W8_SILU_MUL_SCHEMA: Final = (
    "mm_a16w8_silu_mul(Tensor x, Tensor w, Tensor w_scale, Tensor w_up, Tensor w_up_scale, int[2] w_block) -> Tensor"
)
MM_A16W8_SIBLINGS_SCHEMA: Final = (
    "mm_a16w8_siblings(Tensor x, Tensor[] w, Tensor[] w_scale, Tensor?[] bias, int[2] w_block, bool constant=False) "
    "-> Tensor[]"
)
# Rows up to which computing them in each block was measured to take less than a launch; more were not tried.
MOST_GATED_ROWS: Final = 8
# Rows from which the products by two weights have large tiles, one launch of which computes silu(gate) * up.
FEWEST_GATED_ROWS: Final = 129


def check_mm_a16w8(
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype | None,
    activations: Activations = "16bit",
) -> Block:  # fmt: skip
    """The block as a tuple, or the error that says which argument is wrong and what would work."""
    for name, operand, matrix in (("x", x, "M, K"), ("w", w, "K, N")):
        if operand.ndim not in (2, 3):
            shape = tuple(operand.shape)
            raise ValueError(f"mm_a16w8: {name} has shape {shape}; it must be ({matrix}) or (B, {matrix})")
    block = check_weight_operands("mm_a16w8", x, (w, w_scale, w_block), bias, out_dtype)
    if x.ndim == 3 and w.ndim == 3 and x.shape[0] != w.shape[0]:
        raise ValueError(f"mm_a16w8: x has batch {x.shape[0]} and w {w.shape[0]}; they must be equal")
    if bias is not None:
        _check_bias(x, w, bias)
    check_activations("mm_a16w8", activations, block)
    return block


def check_weight_operands(
    op: str, x: Tensor, w_parts: Parts, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Block:
    """Checks types, K and devices of `x (..., M, K) @ w (..., K, N) + bias`, and returns the block of `w`."""
    w, w_scale, w_block = w_parts
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: x has dtype {x.dtype}; use bfloat16, float16 or float32")
    block = check_operand(f"{op}: w", w, w_scale, w_block)
    if x.shape[-1] != w.shape[-2]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} has K={x.shape[-1]} and w {tuple(w.shape)} has K={w.shape[-2]}; "
            "w must be (K, N), so pass weight.mT for a weight of shape (N, K)"
        )
    for name, tensor in (("w", w), ("w_scale", w_scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: x is on {x.device} and {name} on {tensor.device}; move them to one device")
    if bias is not None and bias.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: bias has dtype {bias.dtype}; use bfloat16, float16 or float32")
    if out_dtype is not None and out_dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: out_dtype={out_dtype} is not an output type; use bfloat16, float16 or float32")
    return block


def _check_bias(x: Tensor, w: Tensor, bias: Tensor) -> None:
    columns = w.shape[-1]
    allowed: list[tuple[int, ...]] = [(columns,)]
    if x.ndim == 3 or w.ndim == 3:
        size = x.shape[0] if x.ndim == 3 else w.shape[0]
        allowed += [(size, columns), (size, 1, columns)]
    if tuple(bias.shape) not in allowed:
        shapes = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"mm_a16w8: bias has shape {tuple(bias.shape)}; it must be {shapes}, N of w")


def mm_a16w8_reference(  # noqa: PLR0913  an op's signature
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    constant: bool = False, activations: Activations = "16bit", batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """`constant` has no effect here."""
    weight = Quantized(w, w_scale, check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype, activations))
    if activations != "16bit" and why_16_bits(x, weight, batch_invariant) is None:
        fast = is_fast(activations, batch_invariant)
        return quantized_product(x, weight, bias, out_dtype or x.dtype, batch_invariant, fast=fast)
    return reference.mm_a16w8(x, weight, bias, out_dtype or x.dtype, batch_invariant)


def mm_a16w8_fake(  # noqa: PLR0913  an op's signature
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    constant: bool = False, activations: Activations = "16bit", batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype, activations)
    return empty_output(x, w, out_dtype or x.dtype)


def mm_a16w8_kernel(  # noqa: PLR0913  an op's signature
    x: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    constant: bool = False, activations: Activations = "16bit", batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    if activations != "16bit":
        weight = Quantized(w, w_scale, check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype, activations))
        if why_16_bits(x, weight, batch_invariant) is None:
            fast = is_fast(activations, batch_invariant)
            return quantized_at_once(x, weight, bias, out_dtype or x.dtype, batch_invariant, fast=fast)
    constant = constant or graph_capture.readable(w, w_scale)
    dispatch = MM_A16W8_INVARIANT if batch_invariant else MM_A16W8
    return dispatch((x, w, w_scale, bias), (tuple(w_block), out_dtype, constant))[0]


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> WeightProduct:
    (x, w, w_scale, bias), (w_block, out_dtype, constant) = tensors, values
    block = check_mm_a16w8(x, w, w_scale, w_block, bias, out_dtype)
    return WeightProduct(
        x=x, w=Quantized(w, w_scale, block), bias=bias, out=empty_output(x, w, out_dtype or x.dtype),
        target=targets.target_of(x.device), constant=constant,
    )  # fmt: skip


def unserved(product: WeightProduct) -> str | None:
    if product.k == 0:
        return "an empty sum is zero, and a kernel would multiply it by the scale, which may be NaN"
    if product.w.data.dtype not in targets.fp8_dtypes(product.target):
        return f"{product.w.data.dtype} has no kernel on {product.target.name}"
    return None


def _reference(product: WeightProduct) -> tuple[Tensor]:
    return (reference.mm_a16w8(product.x, product.w, product.bias, product.out.dtype),)


def _reference_by_rows(product: WeightProduct) -> tuple[Tensor]:
    return (reference.mm_a16w8(product.x, product.w, product.bias, product.out.dtype, batch_invariant=True),)


def _untuned_dequantized(product: WeightProduct) -> str | None:
    """None for many rows where TMA can't read `x` or `w`; where it can, `cuda_many` or Triton's kernel is faster."""
    if (reason := dequantize.untuned(product)) is not None:
        return reason
    read = all(map_fault(operand) is None for operand in (product.x, product.w.data.mT))
    return "TMA reads x and the columns of w" if read else None


def _untuned_splitk(product: WeightProduct) -> str | None:
    """Beyond its own, it serves more than 16 rows that `cuda_many` can't take."""
    from fp8fn.ops.cuda.gemm.a16w8_tiles import MOST_ROWS

    reason = splitk_a16w8.untuned(product)
    return reason if product.m <= MOST_ROWS or mm_a16w8.accepts(product) is None else None


def _untuned_gemv(product: WeightProduct) -> str | None:
    """None where it was the faster one on an H200, or where `cuda_many` can't take the product."""
    if mm_a16w8.accepts(product) is None and not mm_a16w8.is_slow(weight.weight_problem(product)):
        return f"M={product.m} is enough for larger tiles"
    return None


def _named(product: WeightProduct) -> Named | None:
    """The verdict of the tables of the operands' GPU; other devices have no tables."""
    if product.x.device.type != "cuda":
        return None
    from fp8fn.ops.tuning.weight_table import named

    return named(product)


def _configure_triton_once(product: WeightProduct) -> Any:
    """The default tile of 64 rows, for any number of rows."""
    product = product.as_matrix()
    aligned = triton.is_aligned(product)
    return triton.choose_config(64, product.n, product.w.block, product.x.dtype, product.target, aligned=aligned)


def _in_lines(product: WeightProduct) -> tuple[Tensor | None, ...] | None:
    """A copy of `x` where a kernel reads a copy, but not `x` as it lies: the place of rows must not matter."""
    x, (w, w_scale, _), matrix = product.x, product.w, product.as_matrix()
    strides = matrix_strides(x.shape, column_major=False, align=TMA_ALIGNMENT // x.element_size())
    laid = replace(product, x=torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta"))
    if parts_a16w8.accepts_invariant(laid) is None:
        readable = parts_a16w8.accepts_invariant(matrix) is None
    else:
        readable = map_fault(matrix.x) is None and matrix.batch <= MOST_BLOCKS
        readable = readable or splitk_a16w8.accepts_invariant(laid) is not None
    if readable:
        return None
    copy = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return copy, w, w_scale, product.bias


KERNELS: Final = (
    Kernel("dequantized", dequantize.accepts, no_config, dequantize.plan, _untuned_dequantized),
    Kernel("cuda_parts", parts_a16w8.accepts, parts_a16w8.configure, parts_a16w8.plan, parts_a16w8.untuned),
    Kernel("cuda_splitk", splitk_a16w8.accepts, splitk_a16w8.configure, splitk_a16w8.plan, _untuned_splitk),
    Kernel("cuda_tiles", a16w8_tiles.accepts, a16w8_tiles.configure, a16w8_tiles.plan, a16w8_tiles.untuned),
    Kernel("cuda_gemv", gemv_a16w8.accepts, gemv_a16w8.configure, gemv_a16w8.plan, _untuned_gemv),
    Kernel("cuda_many", mm_a16w8.accepts, mm_a16w8.configure, mm_a16w8.plan),
    Kernel("triton_mm", takes_all, triton.configure, triton.plan_mm_a16w8),
)

MM_A16W8: Final = Dispatch(
    op="mm_a16w8",
    inputs=("x", "w", "w_scale", "bias"),
    operands=_operands,
    problem=WeightProduct.as_matrix,
    kernels=KERNELS,
    reference=_reference,
    unserved=unserved,
    named=_named,
)

# One order of each row's sum for every number of rows. `cuda_parts` takes all rows by a weight or none; `cuda_many` and
# `cuda_splitk` divide K alike; Triton's kernel has one tile.
MM_A16W8_INVARIANT: Final = Dispatch(
    op="mm_a16w8, batch-invariant",
    inputs=("x", "w", "w_scale", "bias"),
    operands=_operands,
    problem=WeightProduct.as_matrix,
    kernels=(
        Kernel("cuda_parts", parts_a16w8.accepts_invariant, parts_a16w8.configure_invariant, parts_a16w8.plan),
        Kernel("cuda_many", mm_a16w8.why_not_invariant, mm_a16w8.configure_invariant, mm_a16w8.plan),
        Kernel("cuda_splitk", splitk_a16w8.accepts_invariant, splitk_a16w8.configure_invariant, splitk_a16w8.plan),
        Kernel("triton_mm", takes_all, _configure_triton_once, triton.plan_mm_a16w8),
    ),
    reference=_reference_by_rows,
    unserved=unserved,
    settled=_in_lines,
)  # fmt: skip


def check_silu_mul_mm_a16w8(gate: Tensor, up: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int]) -> Block:
    """The block as a tuple, or the error that says which argument is wrong and what would work."""
    name = "silu_mul_mm_a16w8"
    check_matrices(name, gate=gate, w=w)
    check_gate_and_up(name, gate, up)
    return check_weight_operands(name, gate, (w, w_scale, w_block), None, None)


def check_matrices(name: str, **operands: Tensor) -> None:
    """Raises an error where one of two operands, rows and a weight, is no matrix."""
    for (operand, tensor), sizes in zip(operands.items(), ("M, K", "K, N"), strict=True):
        if tensor.ndim != 2:
            raise ValueError(f"{name}: {operand} has shape {tuple(tensor.shape)}; it must be ({sizes})")


def silu_mul_mm_a16w8_reference(
    gate: Tensor, up: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], constant: bool = False
) -> Tensor:
    """`constant` has no effect here."""
    block = check_silu_mul_mm_a16w8(gate, up, w, w_scale, w_block)
    rows = reference.silu_mul(gate, up).to(gate.dtype)
    return reference.mm_a16w8(rows, Quantized(w, w_scale, block), None, gate.dtype)


def silu_mul_mm_a16w8_fake(
    gate: Tensor, up: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], constant: bool = False
) -> Tensor:
    check_silu_mul_mm_a16w8(gate, up, w, w_scale, w_block)
    return empty_output(gate, w, gate.dtype)


def silu_mul_mm_a16w8_kernel(
    gate: Tensor, up: Tensor, w: Tensor, w_scale: Tensor, w_block: Sequence[int], constant: bool = False
) -> Tensor:
    constant = constant or graph_capture.readable(w, w_scale)
    return SILU_MUL_MM_A16W8((gate, up, w, w_scale), (tuple(w_block), constant))[0]


def serves_gated(gate: Tensor, up: Tensor, w: Quantized, target: Target, *, constant: bool = False) -> str | None:
    """None where one launch computes the product on a GPU, else why not."""
    out = empty_output(gate, w.data, gate.dtype)
    product = WeightProduct(x=gate, up=up, w=w, out=out, target=target, constant=constant)
    return unserved(product) or _accepts_gated(product)


def _gated_operands(tensors: Sequence[Any], values: Sequence[Any]) -> WeightProduct:
    (gate, up, w, w_scale), (w_block, constant) = tensors, values
    block = check_silu_mul_mm_a16w8(gate, up, w, w_scale, w_block)
    return WeightProduct(
        x=gate, up=up, w=Quantized(w, w_scale, block), out=empty_output(gate, w, gate.dtype),
        target=targets.target_of(gate.device), constant=constant,
    )  # fmt: skip


def _accepts_gated(product: WeightProduct) -> str | None:
    if product.m > MOST_GATED_ROWS:
        return f"M={product.m} rows, which each block of columns would compute anew, are more than {MOST_GATED_ROWS}"
    return a16w8_tiles.accepts(product) or a16w8_tiles.untuned(product)


def _in_two(product: WeightProduct) -> tuple[Tensor]:
    gate, up, (w, w_scale, block) = product.x, product.up, product.w
    assert up is not None
    rows = reference.silu_mul(gate, up).to(gate.dtype)
    return (torch.ops.fp8fn.mm_a16w8(rows, w, w_scale, block, constant=product.constant),)


SILU_MUL_MM_A16W8: Final = Dispatch(
    op="silu_mul_mm_a16w8",
    inputs=("gate", "up", "w", "w_scale"),
    operands=_gated_operands,
    kernels=(Kernel("cuda_tiles", _accepts_gated, a16w8_tiles.configure, a16w8_tiles.plan),),
    reference=_in_two,
    unserved=unserved,
)


def check_mm_a16w8_silu_mul(
    x: Tensor, w: Tensor, w_scale: Tensor, w_up: Tensor, w_up_scale: Tensor, w_block: Sequence[int]
) -> Block:
    """The block as a tuple, or the error that says which argument is wrong and what would work."""
    name = "mm_a16w8_silu_mul"
    check_matrices(name, x=x, w=w)
    block = check_weight_operands(name, x, (w, w_scale, w_block), None, None)
    if w_up.shape != w.shape:
        raise ValueError(f"{name}: w has shape {tuple(w.shape)} and w_up {tuple(w_up.shape)}; they must be equal")
    if w_up.dtype != w.dtype:
        raise TypeError(f"{name}: w has dtype {w.dtype} and w_up {w_up.dtype}; they must be equal")
    check_operand(f"{name}: w_up", w_up, w_up_scale, w_block)
    for operand, tensor in (("w_up", w_up), ("w_up_scale", w_up_scale)):
        if tensor.device != x.device:
            raise ValueError(f"{name}: x is on {x.device} and {operand} on {tensor.device}; move them to one device")
    return block


def mm_a16w8_silu_mul_reference(
    x: Tensor, w: Tensor, w_scale: Tensor, w_up: Tensor, w_up_scale: Tensor, w_block: Sequence[int]
) -> Tensor:
    block = check_mm_a16w8_silu_mul(x, w, w_scale, w_up, w_up_scale, w_block)
    weights = Quantized(w, w_scale, block), Quantized(w_up, w_up_scale, block)
    gate, up = (reference.mm_a16w8(x, each, None, x.dtype) for each in weights)
    return reference.silu_mul(gate, up).to(x.dtype)


def mm_a16w8_silu_mul_fake(
    x: Tensor, w: Tensor, w_scale: Tensor, w_up: Tensor, w_up_scale: Tensor, w_block: Sequence[int]
) -> Tensor:
    check_mm_a16w8_silu_mul(x, w, w_scale, w_up, w_up_scale, w_block)
    return empty_output(x, w, x.dtype)


def mm_a16w8_silu_mul_kernel(
    x: Tensor, w: Tensor, w_scale: Tensor, w_up: Tensor, w_up_scale: Tensor, w_block: Sequence[int]
) -> Tensor:
    return MM_A16W8_SILU_MUL((x, w, w_scale, w_up, w_up_scale), (tuple(w_block),))[0]


def serves_gated_product(x: Tensor, gate: Quantized, up: Quantized, target: Target) -> str | None:
    """None where one launch computes `silu(x @ gate) * (x @ up)` on a GPU, else why not."""
    out = empty_output(x, gate.data, x.dtype)
    product = WeightProduct(x=x, w=gate, w_up=up, out=out, target=target)
    return unserved(product) or mm_a16w8.accepts_gated(product)


def _gated_product(tensors: Sequence[Any], values: Sequence[Any]) -> WeightProduct:
    (x, w, w_scale, w_up, w_up_scale), (w_block,) = tensors, values
    block = check_mm_a16w8_silu_mul(x, w, w_scale, w_up, w_up_scale, w_block)
    return WeightProduct(
        x=x, w=Quantized(w, w_scale, block), w_up=Quantized(w_up, w_up_scale, block),
        out=empty_output(x, w, x.dtype), target=targets.target_of(x.device),
    )  # fmt: skip


def _in_three(product: WeightProduct) -> tuple[Tensor]:
    assert product.w_up is not None
    gate, up = (torch.ops.fp8fn.mm_a16w8(product.x, *each) for each in (product.w, product.w_up))
    return (reference.silu_mul(gate, up).to(gate.dtype),)


MM_A16W8_SILU_MUL: Final = Dispatch(
    op="mm_a16w8_silu_mul",
    inputs=("x", "w", "w_scale", "w_up", "w_up_scale"),
    operands=_gated_product,
    kernels=(Kernel("cuda_many", mm_a16w8.accepts_gated, mm_a16w8.configure_gated, mm_a16w8.plan),),
    reference=_in_three,
    unserved=unserved,
)
