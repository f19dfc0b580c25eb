"""`Statistics` of a quantized operand: the columns of a row, and what a row is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from fp8fn.ops.operands import Quantized

# The largest element of a block may exceed `fp8_max * scale` by the rounding of the scale.
TOLERANCE: Final = 1 + 2**-20


class Column(IntEnum):
    """The columns of a row of statistics, in float64.

    `SIGNAL` is `Σ x²` and `NOISE` is `Σ (x - q)²`. `EXACT` is 1 if `x` was read, and 0 if the FP8 data alone was.
    `STEP` is the step of the statistics. `BEGUN` is the step that is to be measured, and `DUE` is 1 until the row is
    written.
    """

    ELEMENTS = 0
    SATURATED = 1
    FLUSHED = 2
    AMAX = 3
    SIGNAL = 4
    NOISE = 5
    EXACT = 6
    STEP = 7
    BEGUN = 8
    DUE = 9


OPERANDS: Final = ("activation", "weight", "gradient")
# A row takes 128 bytes, so that each has the alignment of the first.
WIDTH: Final = 16
# The number of inputs of each source of `x`; "codes" has none, because `x` is not in memory.
SOURCES: Final = {"codes": 0, "x": 1, "silu_mul": 2, "rms_norm": 3}


@dataclass(frozen=True, eq=False)
class Watched:
    """A quantized operand `q (..., M, N)`, and the tensors that its exact values are computed from.

    Args:
        q: FP8 data and scales.
        source: "x" if `inputs` is the exact tensor, "silu_mul" for `(gate, up)`, "rms_norm" for `(x, weight, rstd)`,
            or "codes" without inputs: then the statistics are estimated from the FP8 data.
        inputs: Tensors of `source`.
    """

    q: Quantized
    source: str
    inputs: tuple[Tensor, ...] = ()

    @property
    def exact(self) -> bool:
        return self.source != "codes"

    @property
    def saturates(self) -> bool:
        """Whether the scale may be too small for the largest element: the format rounds scales down."""
        return self.q.scale.dtype == torch.float8_e8m0fnu


def mantissa_bits(dtype: torch.dtype) -> int:
    """The bits of an FP8 type's mantissa, without the leading one."""
    return 3 if dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) else 2


def least_exponent(dtype: torch.dtype) -> int:
    """The exponent of the least normal number of an FP8 type."""
    return int(torch.tensor(torch.finfo(dtype).smallest_normal).log2().item())
