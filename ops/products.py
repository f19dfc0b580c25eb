"""The operands of a product, checked, with the output that a kernel fills and the target that it is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.operand import Quantized
from fp8fn.ops.targets import Chip, Target


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledProduct:
    """`out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)` of quantized operands; a matrix serves a whole batch.

    With `offsets (E,)` the product is one of groups: of rows of `a` beside `b (E, K, N)`, or of parts of K. `constant`:
    nothing that may still run writes `b`.
    """

    a: Quantized
    b: Quantized
    out: Tensor
    target: Target
    bias: Tensor | None = None
    offsets: Tensor | None = None
    constant: bool = False
    chip: Chip | None = None
    """Whose tables are read; by default the chip of the tensors' device."""

    def __str__(self) -> str:
        return f"{tuple(self.a.data.shape)} x {tuple(self.b.data.shape)}"

    @property
    def m(self) -> int:
        return self.out.shape[-2]

    @property
    def n(self) -> int:
        return self.out.shape[-1]

    @property
    def k(self) -> int:
        return self.a.data.shape[-1]

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
