"""`Quantization`: what a quantizer reads, in which format it stores, where; an op passes it whole to its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import Block, contracts_rows, empty_data, empty_scale, swap
from fp8fn.ops.operand import Quantized
from fp8fn.ops.targets import Target


@dataclass(frozen=True)
class Source:
    """A quantizer's input: `x`, or a function of `x` and `other`, under the names that the op has for them.

    `macro` is the name in `values.cuh`.
    """

    macro: str
    x: str = "x"
    other: str = ""


PLAIN: Final = Source("PLAIN")
SILU_MUL: Final = Source("SILU_MUL", "gate", "up")
RMS_NORM: Final = Source("RMS_NORM", "x", "weight")
SILU_MUL_GRAD: Final = Source("SILU_MUL_GRAD", "hidden", "grad")

# The names of an op's outputs: in its block, and in the transposed one.
OUTPUTS: Final = (("data", "scale"), ("dual_data", "dual_scale"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantization:
    """A matrix or a batch `(..., M, N)` to be quantized in `block`, and if `dual` in a second block too.

    Args:
        x: the matrix, or the first operand of `source`.
        dual_block: the second block; None is the transpose of `block`.
        other: the second operand of `source`.
        rstd: of each row, the factor `1 / sqrt(mean(x²) + eps)` of `RMS_NORM`; None to compute it.
        eps: of `RMS_NORM` without `rstd`.
        residual: rows that are added to `x`, in its type, before `RMS_NORM`; their sum is an output too.
        offsets: the ends (E,) of groups of rows. No column block holds rows of two groups.
        amax: the largest magnitude of each block, contiguous; None to compute it.
        column_major: the layout of one output in square blocks; None is the layout of `x`.
        into: the outputs to fill; by default new ones, in the op's layout.
        into_sum: likewise, for the sum of `x` and `residual`.
    """

    x: Tensor
    block: Block
    dtype: torch.dtype
    scale: str
    target: Target
    dual: bool = False
    dual_block: Block | None = None
    source: Source = PLAIN
    other: Tensor | None = None
    rstd: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    offsets: Tensor | None = None
    amax: Tensor | None = None
    column_major: bool | None = None
    into: tuple[Quantized, ...] = ()
    into_sum: Tensor | None = None

    @property
    def m(self) -> int:
        return self.x.shape[-2]

    @property
    def n(self) -> int:
        return self.x.shape[-1]

    @property
    def matrices(self) -> int:
        return math.prod(self.x.shape[:-2])

    @property
    def groups(self) -> int:
        """The number of groups; 0 where the rows are not grouped."""
        return 0 if self.offsets is None else self.offsets.shape[0]

    @property
    def operands(self) -> dict[str, Tensor]:
        """The matrices that the source reads, by the op's names; not the residual."""
        named = {self.source.x: self.x}
        if self.other is not None:
            named[self.source.other] = self.other
        return named

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.block, self.dual_block or swap(self.block)) if self.dual else (self.block,)

    @cached_property
    def outs(self) -> tuple[Quantized, ...]:
        """The output in each of `blocks`; uninitialised unless given as `into`."""
        return self.into or self._empty()

    @property
    def out(self) -> Quantized:
        """The output in `block`."""
        return self.outs[0]

    @cached_property
    def sum(self) -> Tensor | None:
        """Where the sum of `x` and `residual` goes; None without a residual."""
        if self.residual is None or self.into_sum is not None:
            return self.into_sum
        return torch.empty_like(self.x, memory_format=torch.contiguous_format)

    @property
    def outputs(self) -> Outputs:
        named: dict[str, Tensor] = {}
        for (data, scale), out in zip(OUTPUTS, self.outs, strict=False):
            named[data], named[scale] = out.data, out.scale
        if self.sum is not None:
            named["sum"] = self.sum
        return Outputs(named, len(named))

    def _empty(self) -> tuple[Quantized, ...]:
        x, block, dtype, scale = self.x, self.block, self.dtype, self.scale
        if self.dual:
            if self.offsets is None:
                tensors = empty_dual(x, block, dtype, scale, self.dual_block)
            else:
                tensors = empty_grouped_dual(x, self.groups, block, dtype, scale, self.dual_block)
            return Quantized(*tensors[:2], block), Quantized(*tensors[2:], self.blocks[1])
        if self.offsets is not None:
            return (Quantized(*empty_grouped(x, self.groups, block, dtype, scale), block),)
        layout = self.column_major
        return (Quantized(empty_data(x, block, dtype, layout), empty_scale(x, block, scale, layout), block),)


def empty_dual(
    x: Tensor, block: Block, dtype: torch.dtype, scale: str, dual_block: Block | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `quantize_dual(x, block, dual_block=dual_block)`."""
    column_major, other = contracts_rows(block), dual_block or swap(block)
    return (
        empty_data(x, block, dtype, column_major),
        empty_scale(x, block, scale, column_major),
        empty_data(x, other, dtype, not column_major),
        empty_scale(x, other, scale, not column_major),
    )


def empty_grouped_dual(
    x: Tensor, groups: int, block: Block, dtype: torch.dtype, scale: str, dual_block: Block | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `quantize_grouped_dual(x, offsets, block, dual_block=dual_block)`."""
    row = empty_data(x, block, dtype), empty_scale(x, block, scale)
    return *row, *empty_grouped(x, groups, dual_block or swap(block), dtype, scale)
