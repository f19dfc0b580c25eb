"""The ops that quantize tensors beside each other, as if these were one, without writing that one.

`quantize_joined(a, b, c, block)` is `quantize(torch.cat([a, b, c], -1), block)`, and `quantize_joined_dual` likewise.
The weights of products of one activation are parameters of their own; quantized into one buffer they are one operand.
On Hopper each tensor has a launch, which writes its part of the results. No block may hold elements of two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize as cuda_blocks
from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.kernel import Dispatch, Kernel
from fp8fn.ops.layout import Block, empty_data, empty_scale, swap
from fp8fn.ops.operand import Quantized
from fp8fn.ops.quantization import Quantization, empty_dual
from fp8fn.ops.quantize import check_layout, check_quantize, quantize_dual_kernel, quantize_kernel, unserved

_NAMES: Final = ("first", "second", "third")
_TENSORS: Final = "Tensor first, Tensor second, Tensor? third=None"
_TYPES: Final = 'ScalarType? dtype=None, str scale="fp32"'
QUANTIZE_JOINED_SCHEMA: Final = (
    f"quantize_joined({_TENSORS}, int[2] block=[128, 128], {_TYPES}, bool column_major=False) -> (Tensor, Tensor)"
)
QUANTIZE_JOINED_DUAL_SCHEMA: Final = (
    f"quantize_joined_dual({_TENSORS}, int[2] block=[1, 128], {_TYPES}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_ONE: Final = "quantize_joined"
_BOTH: Final = "quantize_joined_dual"
# The blocks of each op: those of Hopper's kernel whose results may be parts of a wider matrix.
BLOCKS: Final[dict[str, tuple[Block, ...]]] = {_ONE: ((1, 128), (128, 1), (128, 128)), _BOTH: ((1, 128),)}


def check_joined(
    name: str, given: Sequence[Tensor | None], block: Sequence[int], dtype: torch.dtype | None, scale: str
) -> tuple[list[Tensor], Block, torch.dtype]:
    """The tensors, the block and the element type, or the error that says what is wrong and what would work."""
    first, *rest = tensors = [x for x in given if x is not None]
    pair, fp8 = check_quantize(first, block, dtype, scale, name, "first")
    if pair not in BLOCKS[name]:
        raise ValueError(f"{name}: block={pair} is not supported; use one of {BLOCKS[name]}")
    if first.ndim != 2:
        raise ValueError(f"{name}: first has shape {tuple(first.shape)}; it must be a matrix (M, N)")
    for label, x in zip(_NAMES[1:], rest, strict=False):
        if x.ndim != 2 or x.shape[0] != first.shape[0]:
            shapes = f"first has shape {tuple(first.shape)} and {label} {tuple(x.shape)}"
            raise ValueError(f"{name}: {shapes}; they must be matrices with equal numbers of rows")
        if x.dtype != first.dtype:
            remedy = f"{label}.to({first.dtype}) for one"
            raise TypeError(f"{name}: first has dtype {first.dtype} and {label} {x.dtype}; {remedy}")
        if x.device != first.device:
            raise ValueError(f"{name}: first is on {first.device} and {label} on {x.device}; move them to one device")
    for label, x in zip(_NAMES, tensors, strict=False):
        if pair[1] > 1 and x.shape[1] % pair[1]:
            raise ValueError(
                f"{name}: {label} has {x.shape[1]} columns, no multiple of {pair[1]}; quantize torch.cat of them"
            )
    return tensors, pair, fp8


def quantize_joined_reference(
    first: Tensor, second: Tensor, third: Tensor | None = None, block: Sequence[int] = (128, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32", column_major: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors, pair, fp8 = check_joined(_ONE, (first, second, third), block, dtype, scale)
    layout = _layout(pair, column_major)
    return reference.quantize(torch.cat(tensors, -1), pair, fp8, scale, None, layout)


def quantize_joined_fake(
    first: Tensor, second: Tensor, third: Tensor | None = None, block: Sequence[int] = (128, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32", column_major: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors, pair, fp8 = check_joined(_ONE, (first, second, third), block, dtype, scale)
    return _empty(tensors, pair, fp8, scale, _layout(pair, column_major))


def quantize_joined_dual_reference(
    first: Tensor, second: Tensor, third: Tensor | None = None, block: Sequence[int] = (1, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors, pair, fp8 = check_joined(_BOTH, (first, second, third), block, dtype, scale)
    return reference.quantize_dual(torch.cat(tensors, -1), pair, fp8, scale)


def quantize_joined_dual_fake(
    first: Tensor, second: Tensor, third: Tensor | None = None, block: Sequence[int] = (1, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors, pair, fp8 = check_joined(_BOTH, (first, second, third), block, dtype, scale)
    return empty_dual(_like(tensors), pair, fp8, scale)


def quantize_joined_kernel(
    first: Tensor, second: Tensor, third: Tensor | None = None, block: Sequence[int] = (128, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32", column_major: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors, pair, fp8 = check_joined(_ONE, (first, second, third), block, dtype, scale)
    layout = _layout(pair, column_major)
    data, scales = _empty(tensors, pair, fp8, scale, layout)
    _fill(tensors, [Quantized(data, scales, pair)], (pair, fp8, scale, layout))
    return data, scales


def quantize_joined_dual_kernel(
    first: Tensor, second: Tensor, third: Tensor | None = None, block: Sequence[int] = (1, 128),
    dtype: torch.dtype | None = None, scale: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors, pair, fp8 = check_joined(_BOTH, (first, second, third), block, dtype, scale)
    row, row_scale, col, col_scale = results = empty_dual(_like(tensors), pair, fp8, scale)
    outs = [Quantized(row, row_scale, pair), Quantized(col, col_scale, swap(pair))]
    _fill(tensors, outs, (pair, fp8, scale, None))
    return results


def _layout(block: Block, column_major: bool) -> bool | None:
    """The layout that a quantizer is given: only data in square blocks may lie either way."""
    if block == (128, 128):
        return column_major
    check_layout(_ONE, block, column_major or None)
    return None


def _like(tensors: Sequence[Tensor]) -> Tensor:
    """A stand-in for the wide matrix, which has no memory."""
    width = sum(x.shape[1] for x in tensors)
    return tensors[0].new_empty(1).expand(tensors[0].shape[0], width)


def _empty(
    tensors: Sequence[Tensor], block: Block, dtype: torch.dtype, scale: str, layout: bool | None
) -> tuple[Tensor, Tensor]:
    x = _like(tensors)
    return empty_data(x, block, dtype, layout), empty_scale(x, block, scale, layout)


def _fill(
    tensors: Sequence[Tensor], outs: Sequence[Quantized], form: tuple[Block, torch.dtype, str, bool | None]
) -> None:
    """Quantizes each tensor into its columns of the results."""
    start = 0
    for x in tensors:
        stop = start + x.shape[1]
        parts: list[Tensor | None] = []
        for out in outs:
            width = out.block[1]
            parts += [out.data[:, start:stop], out.scale[:, start // width : stop // width]]
        QUANTIZE_INTO((x, *parts, *[None] * (len(_FILLED) - len(parts))), form)
        start = stop


@dataclass(frozen=True, eq=False, kw_only=True)
class _QuantizationInto(Quantization):
    """A quantization that fills tensors that it is given; none is a result."""

    @property
    def outputs(self) -> Outputs:
        return Outputs({}, 0, filled=_FILLED[: 2 * len(self.into)])


def _operands(tensors: Sequence[Any], values: Sequence[Any]) -> _QuantizationInto:
    (x, data, scales, dual_data, dual_scales), (block, dtype, scale, layout) = tensors, values
    into = [Quantized(data, scales, block)]
    if dual_data is not None:
        into.append(Quantized(dual_data, dual_scales, swap(block)))
    return _QuantizationInto(
        x=x, block=block, dtype=dtype, scale=scale, target=targets.target_of(x.device), dual=len(into) == 2,
        column_major=layout, into=tuple(into),
    )  # fmt: skip


def _reference(q: Quantization) -> Sequence[Tensor]:
    """By the op for one tensor, and copies of its results."""
    form = q.x, q.block, q.dtype, q.scale
    made = quantize_dual_kernel(*form) if q.dual else quantize_kernel(*form, None, q.column_major)
    for part, into in zip(made, (each for out in q.into for each in out[:2]), strict=True):
        copied, wide = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (part, into))
        wide.copy_(copied)
    return ()


def _unserved(q: Quantization) -> str | None:
    return unserved(q) or cuda_blocks.accepts(q)


_FILLED: Final = ("data", "scale", "dual_data", "dual_scale")
QUANTIZE_INTO: Final = Dispatch(
    op="quantize_into",
    inputs=("x", *_FILLED),
    operands=_operands,
    problem=lambda q: q,
    kernels=(Kernel("cuda_blocks", cuda_blocks.accepts, cuda_blocks.configure, cuda_blocks.plan),),
    reference=_reference,
    unserved=_unserved,
)
