"""The ops `fp8fn::quantize_grouped` and `fp8fn::quantize_grouped_dual`: tokens of two groups share no scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.groups import ROWS, STEP, check_ends, check_offsets, empty_grouped
from fp8fn.ops.kernel import Dispatch, Kernel, Named, deferred, no_config
from fp8fn.ops.layout import WHOLE, Block, known_block, swap
from fp8fn.ops.operands import Quantization, empty_grouped_dual
from fp8fn.ops.quantize import SQUARE, check_quantize, checked_dual_block, quantize_kernel, unserved

if TYPE_CHECKING:
    from fp8fn.ops.cuda.quantize import quantize as cuda_blocks
    from fp8fn.ops.cuda.quantize import quantize_columns as cuda_columns
    from fp8fn.ops.cuda.quantize import stream_columns as cuda_stream
    from fp8fn.ops.cuda.quantize import walk_columns as cuda_walk
    from fp8fn.ops.triton import quantize_grouped as triton
else:
    cuda_blocks = deferred("fp8fn.ops.cuda.quantize.quantize")
    cuda_columns = deferred("fp8fn.ops.cuda.quantize.quantize_columns")
    cuda_stream = deferred("fp8fn.ops.cuda.quantize.stream_columns")
    cuda_walk = deferred("fp8fn.ops.cuda.quantize.walk_columns")
    triton = deferred("fp8fn.ops.triton.quantize_grouped")

QUANTIZE_GROUPED_SCHEMA: Final = (
    "quantize_grouped(Tensor x, Tensor offsets, int[2] block=[128, 1], ScalarType? dtype=None,"
    ' str scale="fp32") -> (Tensor, Tensor)'
)
QUANTIZE_GROUPED_DUAL_SCHEMA: Final = (
    "quantize_grouped_dual(Tensor x, Tensor offsets, int[2] block=[1, 128], ScalarType? dtype=None,"
    ' str scale="fp32", int[2]? dual_block=None) -> (Tensor, Tensor, Tensor, Tensor)'
)
GROUPED_BLOCKS: Final[tuple[Block, ...]] = ((ROWS, 1), (WHOLE, 1), (STEP, 1), SQUARE)
DUAL_BLOCKS: Final[tuple[Block, ...]] = ((1, ROWS), (1, WHOLE), (1, STEP))
_DUAL: Final = "quantize_grouped_dual"


def checked_block(name: str, block: Sequence[int], blocks: tuple[Block, ...]) -> Block:
    """The block as a tuple of constants, or the error that says what would work."""
    pair = known_block(block)
    if pair is None or pair not in blocks:
        raise ValueError(f"{name}: block={tuple(block)} is not a block of grouped tokens; use one of {blocks}")
    return pair


def check_quantize_grouped(
    x: Tensor, offsets: Tensor, block: Sequence[int], dtype: torch.dtype | None, scale: str,
    name: str = "quantize_grouped", blocks: tuple[Block, ...] = GROUPED_BLOCKS,
) -> tuple[Block, torch.dtype]:  # fmt: skip
    """The block as a tuple and the element type, or the error that says which argument is wrong and what would work."""
    pair = checked_block(name, block, blocks)
    checked = check_quantize(x, pair, dtype, scale, name)
    if x.ndim != 2:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it must be (M, N), the tokens of all groups")
    check_offsets(name, offsets, "x", x)
    return checked


def quantize_grouped_reference(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale)
    check_ends("quantize_grouped", offsets)
    return reference.quantize_grouped(x, offsets, pair, fp8, scale)


def quantize_grouped_fake(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale)
    return empty_grouped(x, offsets.shape[0], pair, fp8, scale)


def quantize_grouped_dual_reference(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale, _DUAL, DUAL_BLOCKS)
    other = checked_dual_block(_DUAL, pair, dual_block)
    check_ends(_DUAL, offsets)
    return reference.quantize_grouped_dual(x, offsets, pair, fp8, scale, other)


def quantize_grouped_dual_fake(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale, _DUAL, DUAL_BLOCKS)
    other = checked_dual_block(_DUAL, pair, dual_block)
    return empty_grouped_dual(x, offsets.shape[0], pair, fp8, scale, other)


def quantize_grouped_kernel(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (128, 1), dtype: torch.dtype | None = None, scale: str = "fp32"
) -> tuple[Tensor, Tensor]:
    pair = checked_block("quantize_grouped", block, GROUPED_BLOCKS)
    data, scales = QUANTIZE_GROUPED((x, offsets), (False, pair, dtype, scale, None))
    return data, scales


def quantize_grouped_dual_kernel(
    x: Tensor, offsets: Tensor, block: Sequence[int] = (1, 128), dtype: torch.dtype | None = None, scale: str = "fp32",
    dual_block: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pair = checked_block(_DUAL, block, DUAL_BLOCKS)
    other = checked_dual_block(_DUAL, pair, dual_block)
    if pair[1] == WHOLE:  # a whole row and a whole group do not fit on chip together
        check_quantize_grouped(x, offsets, pair, dtype, scale, _DUAL, DUAL_BLOCKS)
        return *quantize_kernel(x, pair, dtype, scale), *quantize_grouped_kernel(x, offsets, swap(pair), dtype, scale)
    row, row_scale, col, col_scale = QUANTIZE_GROUPED((x, offsets), (True, pair, dtype, scale, other))
    return row, row_scale, col, col_scale


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> Quantization:
    (x, offsets), (dual, block, dtype, scale, dual_block) = tensors, values
    op, blocks = (_DUAL, DUAL_BLOCKS) if dual else ("quantize_grouped", GROUPED_BLOCKS)
    pair, fp8 = check_quantize_grouped(x, offsets, block, dtype, scale, op, blocks)
    return Quantization(
        x=x, offsets=offsets, block=pair, dtype=fp8, scale=scale, target=targets.target_of(x.device), dual=dual,
        dual_block=dual_block,
    )  # fmt: skip


def _reference(q: Quantization) -> Sequence[Tensor]:
    assert q.offsets is not None
    form = q.x, q.offsets, q.block, q.dtype, q.scale
    return reference.quantize_grouped_dual(*form, q.dual_block) if q.dual else reference.quantize_grouped(*form)


def _accepts_triton(q: Quantization) -> str | None:
    return "one launch writes one orientation" if q.dual else None


def _accepts_triton_dual(q: Quantization) -> str | None:
    return None if q.dual else "two orientations are written"


def _named(q: Quantization) -> Named | None:
    """The verdict of the tables of the operands' GPU; other devices have no tables."""
    if q.x.device.type != "cuda":
        return None
    from fp8fn.ops.tuning.grouped_table import named

    return named(q)


KERNELS: Final = (
    Kernel("cuda_blocks", cuda_blocks.accepts, cuda_blocks.configure, cuda_blocks.plan),
    Kernel("cuda_walk", cuda_walk.accepts, cuda_walk.configure, cuda_walk.plan, cuda_walk.untuned),
    Kernel("cuda_stream", cuda_stream.accepts, cuda_stream.configure, cuda_stream.plan, cuda_stream.untuned),
    Kernel("cuda_columns", cuda_columns.accepts, cuda_columns.configure, cuda_columns.plan),
    Kernel("triton_dual", _accepts_triton_dual, no_config, triton.plan_quantize_grouped_dual),
    Kernel("triton_blocks", _accepts_triton, no_config, triton.plan_quantize_grouped),
)

QUANTIZE_GROUPED: Final = Dispatch(
    op="quantize_grouped",
    inputs=("x", "offsets"),
    operands=_operands,
    kernels=KERNELS,
    reference=_reference,
    unserved=unserved,
    named=_named,
)
