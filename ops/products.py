"""The operands of products, checked, with the output that a kernel fills and the target that it is planned for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import Tensor

from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.operand import Quantized
from fp8fn.ops.targets import Chip, Target

# The rows that an expert has room for, by those that it is taken to have where only the device counts them: what a tile
# is chosen by, unless the caller says how many rows to expect. It was not measured: DeepGEMM's own shapes have 4 to 205
# times the room.
ROOM_FOR_A_ROW: Final = 16
# Names of the weights beside the first one of one `x`, and of all that belongs to them.
BESIDE: Final = ("second", "third")


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
