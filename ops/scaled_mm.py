"""The op `fp8fn::scaled_mm`, the product of two quantized matrices: schema, checks, and dispatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.gemm import scaled_mm as cuda
from fp8fn.ops.cuda.operands import map_fault
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_DTYPES
from fp8fn.ops.kernel import Dispatch, Kernel, Named, Tensors, deferred, no_compiler, no_config, takes_all
from fp8fn.ops.layout import WHOLE, Block, known_block, scale_shape, turned, unknown_block
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.recipe import check_fast
from fp8fn.ops.turn import column_major

if TYPE_CHECKING:
    from fp8fn.ops.triton import scaled_mm as triton
    from fp8fn.ops.triton import scaled_mm_tma as tma
else:
    triton, tma = deferred("fp8fn.ops.triton.scaled_mm"), deferred("fp8fn.ops.triton.scaled_mm_tma")

SCALED_MM_SCHEMA: Final = (
    "scaled_mm(Tensor a, Tensor a_scale, int[2] a_block, Tensor b, Tensor b_scale, int[2] b_block,"
    " Tensor? bias=None, ScalarType? out_dtype=None, bool batch_invariant=False, bool fast_accumulation=False)"
    " -> Tensor"
)
_FAST: Final = "scaled_mm: fast_accumulation=True"
_FAST_TILES: Final = 1024
# Up to so many rows the kernel that promotes takes 0.87 to 0.89 of its time (`bench dense --suite small`, H200).
_FEW_ROWS: Final = 128


Parts: TypeAlias = tuple[Tensor, Tensor, Sequence[int]]
"""Data, scales and block, as an op is given them."""


def check_scaled_mm(
    a_parts: Parts, b_parts: Parts, bias: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Quantized, Quantized]:
    """The operands with known blocks, or the error that says which argument is wrong and what would work."""
    (a, a_scale, a_block), (b, b_scale, b_block) = a_parts, b_parts
    left = check_operand("scaled_mm: a", a, a_scale, a_block)
    right = check_operand("scaled_mm: b", b, b_scale, b_block)
    check_product("scaled_mm", a, b, bias, out_dtype)
    if a.ndim > 3 or b.ndim > 3:
        raise ValueError(f"scaled_mm: a has {a.ndim} dimensions and b {b.ndim}; flatten the leading ones into one")
    if a.ndim == 3 and b.ndim == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"scaled_mm: a has batch {a.shape[0]} and b {b.shape[0]}; they must be equal")
    for name, block, along in (("a", left, left[1]), ("b", right, right[0])):
        if along == 1:
            remedy = (1, 128) if name == "a" else (128, 1)
            raise ValueError(f"scaled_mm: {name}_block={block} has a scale for each element of K; use {remedy}")
    if a_scale.dtype != b_scale.dtype:
        late, block = ("a", left) if a_scale.dtype == torch.float32 else ("b", right)
        raise ValueError(
            f"scaled_mm: a_scale has dtype {a_scale.dtype} and b_scale {b_scale.dtype}; both must have one format: "
            f"fp8fn.quantize(x, {block}, scale='e8m0') for {late}, or float32 for both"
        )
    for name, scale in (("a_scale", a_scale), ("b", b), ("b_scale", b_scale)):
        if scale.device != a.device:
            raise ValueError(f"scaled_mm: a is on {a.device} and {name} on {scale.device}; move them to one device")
    return Quantized(a, a_scale, left), Quantized(b, b_scale, right)


def broadcast_batch(name: str, a: Tensor, b: Tensor) -> torch.Size:
    """The leading dimensions of a product."""
    try:
        shape: torch.Size = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return shape
    except RuntimeError:
        left, right = tuple(a.shape[:-2]), tuple(b.shape[:-2])
        raise ValueError(
            f"{name}: a has leading dimensions {left} and b {right}, which do not broadcast; make them equal, or 1"
        ) from None


def check_operand(name: str, data: Tensor, scale: Tensor, block: Sequence[int]) -> Block:
    """Checks the invariants of scaled data (`ScaledTensor`) and returns its block as a tuple."""
    pair = known_block(block)
    if pair is None:
        raise unknown_block(f"{name}: block", block)
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: data has dtype {data.dtype}; it must be an FP8 type, as fp8fn.quantize makes it")
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name}: scale has dtype {scale.dtype}; it must be float32 or float8_e8m0fnu")
    if data.ndim < 2:
        raise ValueError(f"{name}: data has shape {tuple(data.shape)}; it needs at least two dimensions")
    expected = scale_shape(data.shape, pair)
    if scale.shape != expected:
        found = tuple(scale.shape)
        raise ValueError(
            f"{name}: scale has shape {found}; data {tuple(data.shape)} in blocks of {pair} needs {expected}"
        )
    return pair


def check_product(name: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Checks `a (..., M, K) @ b (..., K, N) + bias (N)`."""
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{name}: a {tuple(a.shape)} has K={a.shape[-1]} and b {tuple(b.shape)} has K={b.shape[-2]}; "
            "b must be (K, N), so pass weight.mT for a weight of shape (N, K)"
        )
    if a.device != b.device:
        raise ValueError(f"{name}: a is on {a.device} and b on {b.device}; move them to one device")
    if bias is not None:
        if bias.device != a.device:
            raise ValueError(f"{name}: a is on {a.device} and bias on {bias.device}; move them to one device")
        if tuple(bias.shape) != (b.shape[-1],):
            raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}; it must be ({b.shape[-1]},), N of b")
        if bias.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name}: bias has dtype {bias.dtype}; use bfloat16, float16 or float32")
    if out_dtype is not None and out_dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: out_dtype={out_dtype} is not an output type; use bfloat16, float16 or float32")


def empty_output(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Uninitialised `(..., M, N)`, row-major; a matrix beside a batch is shared by all of it."""
    batch = a.shape[:-2] if a.ndim >= b.ndim else b.shape[:-2]
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype or torch.bfloat16)


def contiguous_along_k(b: Tensor) -> Tensor:
    """`b (..., K, N)` with K contiguous, as Hopper's FP8 wgmma reads both operands; a row-major one is copied.

    The quantizers of a training step write what each product reads, so this is for operands that a caller made. A
    kernel would turn a row-major tile around byte by byte for every tile of the output: the copy does it once.
    """
    if b.stride(-2) == 1 or b.stride(-1) != 1:
        return b
    return column_major(b)


def scaled_mm_reference(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
    fast_accumulation: bool = False,
) -> Tensor:  # fmt: skip
    left, right = check_scaled_mm((a, a_scale, a_block), (b, b_scale, b_block), bias, out_dtype)
    if fast_accumulation:
        check_fast(_FAST, a_block, b_block, batch_invariant)
    return reference.scaled_mm(left, right, bias, out_dtype or torch.bfloat16, batch_invariant)


def scaled_mm_fake(  # noqa: PLR0913  an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
    fast_accumulation: bool = False,
) -> Tensor:  # fmt: skip
    check_scaled_mm((a, a_scale, a_block), (b, b_scale, b_block), bias, out_dtype)
    if fast_accumulation:
        check_fast(_FAST, a_block, b_block, batch_invariant)
    return empty_output(a, b, out_dtype)


def scaled_mm_kernel(  # noqa: PLR0913 - an op's signature
    a: Tensor, a_scale: Tensor, a_block: Sequence[int],
    b: Tensor, b_scale: Tensor, b_block: Sequence[int],
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
    fast_accumulation: bool = False,
) -> Tensor:  # fmt: skip
    if fast_accumulation and batch_invariant:  # `_fast_operands` checks the blocks, once for operands of a kind
        check_fast(_FAST, a_block, b_block, batch_invariant)
    # As `dispatch_of`: a call more on the way of each product.
    dispatch = SCALED_MM_INVARIANT if batch_invariant else SCALED_MM_FAST if fast_accumulation else SCALED_MM
    return dispatch((a, a_scale, b, b_scale, bias), (tuple(a_block), tuple(b_block), out_dtype))[0]


def dispatch_of(batch_invariant: bool, fast_accumulation: bool) -> Dispatch:
    """What serves a product with these flags of the op."""
    return SCALED_MM_INVARIANT if batch_invariant else SCALED_MM_FAST if fast_accumulation else SCALED_MM


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> ScaledProduct:
    (a, a_scale, b, b_scale, bias), (a_block, b_block, out_dtype) = tensors, values
    left, right = check_scaled_mm((a, a_scale, a_block), (b, b_scale, b_block), bias, out_dtype)
    out, target = empty_output(a, b, out_dtype), targets.target_of(a.device)
    return ScaledProduct(a=left, b=right, bias=bias, out=out, target=target)


def _fast_operands(tensors: Sequence[Any], values: Sequence[Any]) -> ScaledProduct:
    product = _operands(tensors, values)
    check_fast(_FAST, product.a.block, product.b.block, batch_invariant=False)
    return dataclasses.replace(product, fast=True)


def foreign_types(product: ScaledProduct) -> str | None:
    """Why no kernel of the target takes the element types, or None."""
    a, b, target = product.a.data.dtype, product.b.data.dtype, product.target
    if {a, b} <= set(targets.fp8_dtypes(target)):
        return None
    return f"{a} @ {b} has no kernel on {target.name}"


def along_k(product: ScaledProduct) -> tuple[Tensor, Tensor] | None:
    """The data of both operands as Hopper's kernels read them, where one has to be copied; see `contiguous_along_k`."""
    if targets.hopper_fault(product.target):
        return None
    a, b = product.a.data, product.b.data
    left, right = contiguous_along_k(a.mT).mT, contiguous_along_k(b)
    return None if left.stride() == a.stride() and right.stride() == b.stride() else (left, right)


def _settled(product: ScaledProduct) -> Tensors | None:
    """Operands with K contiguous on Hopper, and a bias whose elements are neighbours, as every kernel takes them."""
    (a, a_scale, _), (b, b_scale, _), bias = product.a, product.b, product.bias
    copies = along_k(product)
    if copies is None and (bias is None or bias.is_contiguous()):
        return None
    a, b = copies or (a, b)
    return a, a_scale, b, b_scale, None if bias is None else bias.contiguous()


def _settled_in_lines(product: ScaledProduct) -> Tensors | None:
    """As `_settled`; and `a` as `quantize` lays it where the kernel in CUDA C++ reads it so, but not as it lies.

    Neither the place of rows nor their number may choose the kernel.
    """
    if (settled := _settled(product)) is not None:
        return settled
    a, a_scale, block = product.a
    if block[1] == WHOLE:
        scales_lie_well = a_scale.shape[-2] == 1 or a_scale.stride(-2) == 1
    else:
        scales_lie_well = map_fault(a_scale.mT) is None
    if map_fault(a) is None and scales_lie_well:
        return None
    copies = turned(a, column_major=False), turned(a_scale, column_major=True)
    if by_cuda(dataclasses.replace(product, a=Quantized(*copies, block))) is not None:
        return None
    return *copies, *product.b[:2], product.bias


def _reference(product: ScaledProduct) -> tuple[Tensor]:
    return (reference.scaled_mm(product.a, product.b, product.bias, product.out.dtype),)


def _reference_by_rows(product: ScaledProduct) -> tuple[Tensor]:
    return (reference.scaled_mm(product.a, product.b, product.bias, product.out.dtype, batch_invariant=True),)


def by_cuda(product: ScaledProduct) -> str | None:
    """Why the kernel in CUDA C++ does not multiply these operands, or None. The CPU's are for Triton's interpreter."""
    return "a is on the CPU" if product.a.data.device.type == "cpu" else cuda.accepts(product)


def configure_cuda(product: ScaledProduct) -> cuda.ScaledMmConfig:
    from fp8fn.ops.tuning.model import modelled

    return modelled(product)


def _by_cublaslt(product: ScaledProduct) -> str | None:
    return by_cuda(product) or cublaslt.accepts(product)


def _rows_by_cublaslt(product: ScaledProduct) -> str | None:
    """Why cuBLASLt's fast accumulation is not known to be faster than the promoting kernel, or None."""
    tiles = -(-product.m // 128) * -(-product.n // 128)
    if product.a.block == (WHOLE, WHOLE) or tiles < _FAST_TILES:
        return f"it was measured to be faster by rows, with {_FAST_TILES} tiles of 128x128 or more"
    if product.m <= _FEW_ROWS:
        return f"with {_FEW_ROWS} rows or fewer it was measured to be slower"
    return _by_cublaslt(product) if cublaslt.allowed() else "it is left out here"


def _configure_cuda_in_one_order(product: ScaledProduct) -> cuda.ScaledMmConfig:
    from fp8fn.ops.tuning.model import in_one_order

    return in_one_order(product)


def _named(product: ScaledProduct) -> Named | None:
    """The verdict of the table of the kernel in CUDA C++, or where that can't run, of the table of Triton's kernels."""
    from fp8fn.ops.tuning import table

    found = None
    if by_cuda(product) is None:
        found = table.named(product)
        if no_compiler() is None or (found is not None and found.kernel != "cuda"):
            return found
    from fp8fn.ops.tuning import triton_table

    return triton_table.named(product) or found


SCALED_MM: Final = Dispatch(
    op="scaled_mm",
    inputs=("a", "a_scale", "b", "b_scale", "bias"),
    operands=_operands,
    kernels=(
        Kernel("cublaslt", _by_cublaslt, no_config, lambda product, _: cublaslt.plan(product), named_only=True),
        Kernel("cuda", by_cuda, configure_cuda, cuda.plan, source="the model"),
        Kernel("triton_tma", tma.accepts, no_config, tma.plan_scaled_mm_tma),
        Kernel("triton", takes_all, no_config, triton.plan_scaled_mm),
    ),
    reference=_reference,
    unserved=foreign_types,
    settled=_settled,
    named=_named,
)

# By rows cuBLASLt's fast accumulation has 1360 TFLOP/s on an H200 in the geometric mean of five shapes, of which the
# smallest is 4096,4096,4096, and the kernel that promotes 1219 (`bench dense`, docs/benchmarks.md). Smaller
# products, and those by tensors, take the kernel without temporaries in the tile that the model ranks first: no table
# has them.
SCALED_MM_FAST: Final = dataclasses.replace(
    SCALED_MM,
    op="scaled_mm, fast accumulation",
    operands=_fast_operands,
    kernels=(
        Kernel("cublaslt_fast", _rows_by_cublaslt, no_config, lambda product, _: cublaslt.plan(product)),
        *SCALED_MM.kernels,
    ),
    named=lambda product: None if _rows_by_cublaslt(product) is None else _named(product),
    faults={},
)

# One order of each row's sum for every number of rows: tiles of the kernel in CUDA C++ that divide K alike have it.
SCALED_MM_INVARIANT: Final = Dispatch(
    op="scaled_mm, batch-invariant",
    inputs=SCALED_MM.inputs,
    operands=_operands,
    kernels=(
        Kernel("cuda", by_cuda, _configure_cuda_in_one_order, cuda.plan),
        Kernel("triton", takes_all, lambda p: triton.choose_config(64, p.n, p.k, p.target), triton.plan_scaled_mm),
    ),
    reference=_reference_by_rows,
    unserved=foreign_types,
    settled=_settled_in_lines,
)
