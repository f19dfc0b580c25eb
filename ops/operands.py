"""Operands of ops as kernels get them: FP8 data with its scales, what a product reads, and what a quantizer reads.

An op checks its arguments once and passes the whole object to its kernels, with the outputs that a kernel fills and the
target that it is planned for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import Block, contracts_rows, empty_data, empty_scale, swap
from fp8fn.ops.targets import Chip, Target

# The rows that an expert has room for, by those that it is taken to have where only the device counts them: what a tile
# is chosen by, unless the caller says how many rows to expect. It was not measured: DeepGEMM's own shapes have 4 to 205
# times the room.
ROOM_FOR_A_ROW: Final = 16
# Names of the weights beside the first one of one `x`, and of all that belongs to them.
BESIDE: Final = ("second", "third")
# The names of a quantizer's outputs: in its block, and in the transposed one.
OUTPUTS: Final = (("data", "scale"), ("dual_data", "dual_scale"))


class Quantized(NamedTuple):
    """A quantized `(..., M, N)`: the numbers `data.float() * scale`, with `scale` repeated over `block`."""

    data: Tensor
    scale: Tensor
    block: Block

    @property
    def mT(self) -> Quantized:
        return Quantized(self.data.mT, self.scale.mT, swap(self.block))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Product:
    """The output `(B?, M, N)` of a product, the sizes that follow from its shape, and where its groups end, if any."""

    out: Tensor
    target: Target
    offsets: Tensor | None = None

    @property
    def m(self) -> int:
        return self.out.shape[-2]

    @property
    def n(self) -> int:
        return self.out.shape[-1]

    @property
    def batch(self) -> int:
        return self.out.shape[0] if self.out.ndim == 3 else 1

    @property
    def group_ends(self) -> Tensor:
        """The offsets of a product of groups."""
        assert self.offsets is not None
        return self.offsets

    @property
    def outputs(self) -> Outputs:
        return Outputs({"out": self.out}, 1)


class Beside(NamedTuple):
    """The weight, the bias and the output of a product beside another one of the same `x`."""

    w: Quantized
    bias: Tensor | None
    out: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledProduct(_Product):
    """`out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)` of quantized operands; a matrix serves a whole batch.

    With `offsets (E,)` the product is one of groups: of rows of `a` beside `b (E, K, N)`, or of parts of K. With
    `counts (E,)` only the first rows of each `a (E, M, K)` are multiplied. `constant`: nothing that may still run
    writes `b`.
    """

    a: Quantized
    b: Quantized
    bias: Tensor | None = None
    constant: bool = False
    counts: Tensor | None = None
    zeros: bool = True
    """With `counts`: whether the rows past an expert's count become zeros, or may stay unwritten."""
    expected_rows: int | None = None
    """With `counts`: the rows of an expert in the mean, as the caller expects them."""
    fast: bool = False
    """Whether sums over K may stay in the tensor core's accumulator, which keeps some 14 bits."""
    chip: Chip | None = None
    """The chip whose tables are read; by default that of the tensors' device."""
    parts: int = 1
    """The matrices in `a (parts, M, K)` whose sum is multiplied: 16-bit rows that the launch before has split.

    They and their scales may have more rows than M, which are not multiplied.
    """
    beside: tuple[Beside, ...] = ()
    """With `parts`: the products of `a` by further matrices, whose scales and biases lie as those of `b`."""

    @property
    def k(self) -> int:
        return self.a.data.shape[-1]

    @property
    def mean_rows(self) -> int:
        """The rows of a group of rows in the mean, as far as the host can tell: a tile is chosen by them."""
        if self.counts is None:
            return -(-self.m // self.group_ends.shape[0])
        return min(self.expected_rows or -(-self.m // ROOM_FOR_A_ROW), self.m)


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightProduct(_Product):
    """`out (B?, M, N) = x (B?, M, K) @ w (B?, K, N) + bias` of 16 or 32 bits by a quantized weight.

    `out` is contiguous. A 2-D operand serves a whole batch; `bias` is `(N)`, `(B, N)` or `(B, 1, N)`. `constant`:
    nothing that may still run writes `w`. With `offsets (E,)` the product is one of groups of rows of `x` beside `w (E,
    K, N)` and `bias (E, N)`. With `up (M, K)` the rows are `silu(x) * up`, rounded to the type of `x`. With `w_up`,
    whose scales lie as those of `w`, `out` is `silu(x @ w) * (x @ w_up)`, each product rounded to the type of `out`.
    `beside` holds the products of `x` by further weights, whose biases lie as `bias`.
    """

    x: Tensor
    w: Quantized
    bias: Tensor | None = None
    constant: bool = False
    up: Tensor | None = None
    w_up: Quantized | None = None
    beside: tuple[Beside, ...] = ()

    @property
    def k(self) -> int:
        return self.x.shape[-1]

    @property
    def outputs(self) -> Outputs:
        others = {f"out_{name}": each.out for name, each in zip(BESIDE, self.beside, strict=False)}
        return Outputs({"out": self.out, **others}, 1 + len(others))

    def as_matrix(self) -> WeightProduct:
        """The same product; a batch of `x` whose rows follow one another, by one weight, is one matrix."""
        x, bias = self.x, self.bias
        one_weight = x.ndim == 3 and self.w.data.ndim == 2 and (bias is None or bias.ndim == 1)
        if one_weight and (x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
            return replace(self, x=x.flatten(0, 1), out=self.out.flatten(0, 1))
        return self


class Routing(NamedTuple):
    """The rows that each expert multiplies, as `fp8fn.sort_tokens` makes it: tiles of ids, each of one expert."""

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor

    @property
    def tiles(self) -> int:
        return self.expert_ids.shape[0]

    @property
    def block_m(self) -> int:
        """The number of ids in a tile, of which there is one at least."""
        return self.sorted_token_ids.shape[0] // self.tiles


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutedProduct:
    """`out[id] (N) = token_weights[id] * (a[id // a_div] (K) @ w[expert] (K, N))` for each id of the routing.

    `a` is `(R, K)`, `w` `(E, K, N)` and `out` `(R * a_div, N)`. `out`, the routing's tensors and `token_weights` are
    contiguous. Rows of no id stay as they are.
    """

    a: Quantized
    w: Quantized
    routing: Routing
    a_div: int
    out: Tensor
    target: Target
    token_weights: Tensor | None = None

    @property
    def ids(self) -> int:
        return self.out.shape[0]

    @property
    def n(self) -> int:
        return self.out.shape[1]

    @property
    def k(self) -> int:
        return self.a.data.shape[1]

    @property
    def experts(self) -> int:
        return self.w.data.shape[0]

    @property
    def outputs(self) -> Outputs:
        return Outputs({"out": self.out}, 1, zeroed=True)


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
