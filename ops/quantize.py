"""The ops `fp8fn::quantize` and `fp8fn::quantize_dual`: schema, checks, and dispatch to the reference or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize as cuda_blocks
from fp8fn.ops.cuda.quantize import quantize_columns as cuda_columns
from fp8fn.ops.cuda.quantize import quantize_rows as cuda_rows
from fp8fn.ops.cuda.quantize import stream_columns as cuda_stream
from fp8fn.ops.formats import FP8_DTYPES, INPUT_DTYPES, SCALE_FORMATS
from fp8fn.ops.kernel import Dispatch, Kernel
from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import WHOLE, Block, is_column_major, is_square, known_block, swap, turned, unknown_block
from fp8fn.ops.quantization import Quantization

QUANTIZE_SCHEMA: Final = (
    'quantize(Tensor x, int[2] block, ScalarType? dtype=None, str scale="fp32") -> (Tensor, Tensor)'
)
QUANTIZE_DUAL_SCHEMA: Final = (
    'quantize_dual(Tensor x, int[2] block=[1, 128], ScalarType? dtype=None, str scale="fp32", int[2]? dual_block=None)'
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
SQUARE: Final[Block] = (128, 128)
# Blocks beside which a second result may have square blocks.
BESIDE_SQUARE: Final[tuple[Block, ...]] = ((1, 128), (128, 1))


def check_quantize(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str, name: str = "quantize", arg: str = "x"
) -> tuple[Block, torch.dtype]:
    """The block as a tuple and the element type, or the error that says which argument is wrong and what would work."""
    pair = checked_block(name, block)
    if x.dtype not in INPUT_DTYPES:
        remedy = "use bfloat16, float16 or float32, x.to(torch.float32) for one"
        raise TypeError(f"{name}: {arg} has dtype {x.dtype}; {remedy}")
    if x.ndim < 2:
        raise ValueError(f"{name}: {arg} has shape {tuple(x.shape)}; it needs at least two dimensions, x[None] for one")
    if scale not in SCALE_FORMATS:
        raise ValueError(f"{name}: scale={scale!r} is not a scale format; use one of {SCALE_FORMATS}")
    if dtype is None:
        dtype = targets.native_e4m3(targets.target_of(x.device))
    elif dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: dtype={dtype} is not an FP8 type; use one of {FP8_DTYPES}")
    return pair, dtype


def quantize_reference(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize(x, block, dtype, scale)
    return reference.quantize(x, pair, fp8, scale)


def quantize_kernel(
    x: Tensor, block: Sequence[int], dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    data, scales = QUANTIZE((x,), (False, checked_block("quantize", block), dtype, scale, None))
    return data, scales


def quantize_dual_reference(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual")
    return reference.quantize_dual(x, pair, fp8, scale, checked_dual_block("quantize_dual", pair, dual_block))


def quantize_dual_kernel(
    x: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair = checked_block("quantize_dual", block)
    other = checked_dual_block("quantize_dual", pair, dual_block)
    if WHOLE in pair and not is_square(pair):  # a whole row or column does not fit on chip: two launches, two reads
        check_quantize(x, pair, dtype, scale, "quantize_dual")
        return *quantize_kernel(x, pair, dtype, scale), *quantize_kernel(x, swap(pair), dtype, scale)
    data, scales, dual_data, dual_scales = QUANTIZE((x,), (True, pair, dtype, scale, other))
    return data, scales, dual_data, dual_scales


def checked_block(name: str, block: Sequence[int]) -> Block:
    """The block as a tuple of constants, as the key of a kept call has it."""
    pair = known_block(block)
    if pair is None:
        raise unknown_block(f"{name}: block", block)
    return pair


def checked_dual_block(name: str, block: Block, dual_block: Sequence[int] | None) -> Block | None:
    """The second block of two, None for the transpose of the first, or the error that says what would work."""
    if dual_block is None:
        return None
    pair = known_block(dual_block)
    if pair is None:
        raise unknown_block(f"{name}: dual_block", dual_block)
    if pair == swap(block):
        return None
    if pair != SQUARE or block not in BESIDE_SQUARE:
        beside = f", or {SQUARE}" if block in BESIDE_SQUARE else f"; {SQUARE} goes with {BESIDE_SQUARE}"
        raise ValueError(f"{name}: dual_block={pair} does not go with block={block}; use {swap(block)}{beside}")
    return pair


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (x,), (dual, block, dtype, scale, dual_block) = tensors, values
    pair, fp8 = check_quantize(x, block, dtype, scale, "quantize_dual" if dual else "quantize")
    return Quantization(
        x=x, block=pair, dtype=fp8, scale=scale, target=targets.target_of(x.device), dual=dual, dual_block=dual_block,
    )  # fmt: skip


def unserved(q: Quantization) -> str | None:
    """Why no kernel quantizes to a format on a device, or None."""
    if any(x.numel() == 0 for x in q.operands.values()):
        return "x is empty"
    if q.dtype not in targets.fp8_dtypes(q.target):
        return f"{q.dtype} has no kernel on {q.target.name}"
    return None


def _unserved(q: Quantization) -> str | None:
    if q.dual and is_square(q.block) and (reason := cuda_blocks.accepts(q)) is not None:
        return unserved(q) or f"the second output is a copy of the first: {reason}"
    return unserved(q)


def _reference(q: Quantization) -> Sequence[Tensor]:
    """By plain PyTorch; the second output in square blocks is a copy of the first."""
    form = q.x, q.block, q.dtype, q.scale
    if not q.dual:
        return reference.quantize(*form)
    if unserved(q) is not None:
        return reference.quantize_dual(*form, q.dual_block)
    return _both_sides(q.x, *quantize_kernel(*form))


def _both_sides(x: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The one result of a square block, which lies as `x` does, and a copy that lies the other way."""
    if is_column_major(x):
        return turned(data, False), turned(scales, False), data, scales
    return data, scales, turned(data, True), turned(scales, True)


def _accepts_triton(q: Quantization) -> str | None:
    return "one launch writes one orientation" if q.dual else None


def _accepts_triton_dual(q: Quantization) -> str | None:
    if not q.dual or is_square(q.block) or WHOLE in q.block:
        return f"block {q.block}{' and its transpose' * q.dual} is not two orientations of one read"
    return None


def _plan_triton(q: Quantization, _: None) -> tuple[Launch, ...]:
    from fp8fn.ops.triton.quantize import plan_quantize

    return plan_quantize(q)


def _plan_triton_dual(q: Quantization, _: None) -> tuple[Launch, ...]:
    from fp8fn.ops.triton.quantize_dual import plan_quantize_dual

    return plan_quantize_dual(q)


def no_config(_: Quantization) -> None:
    """For kernels in Triton, whose plans choose the tile."""


KERNELS: Final = (
    Kernel("cuda_blocks", cuda_blocks.accepts, cuda_blocks.configure, cuda_blocks.plan),
    Kernel("cuda_rows", cuda_rows.accepts, cuda_rows.configure, cuda_rows.plan),
    Kernel("cuda_stream", cuda_stream.accepts, cuda_stream.configure, cuda_stream.plan, cuda_stream.untuned),
    Kernel("cuda_columns", cuda_columns.accepts, cuda_columns.configure, cuda_columns.plan),
    Kernel("triton_dual", _accepts_triton_dual, no_config, _plan_triton_dual),
    Kernel("triton_blocks", _accepts_triton, no_config, _plan_triton),
)

QUANTIZE: Final = Dispatch(
    op="quantize",
    inputs=("x",),
    operands=_operands,
    problem=lambda q: q,
    kernels=KERNELS,
    reference=_reference,
    unserved=_unserved,
)
