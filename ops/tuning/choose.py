"""Which kernel multiplies: the Hopper kernel where it accepts the operands, else the portable one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from torch import Tensor

from fp8fn.ops.launch import Launch
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import Target

_LOG: Final = logging.getLogger("fp8fn")


def plan_scaled_mm(
    a: Tensor, a_scale: Tensor, a_block: Block,
    b: Tensor, b_scale: Tensor, b_block: Block,
    bias: Tensor | None, out: Tensor, target: Target,
) -> Launch:  # fmt: skip
    """The launch of `out (B?, M, N) = a (B?, M, K) @ b (B?, K, N) + bias (N)`."""
    from fp8fn.ops.triton import scaled_mm, scaled_mm_tma

    operands = (a, a_scale, a_block, b, b_scale, b_block, bias, out, target)
    reason = scaled_mm_tma.accepts(*operands)
    if reason is None:
        launch = scaled_mm_tma.plan_scaled_mm_tma(*operands)
    else:
        launch = replace(scaled_mm.plan_scaled_mm(*operands), reason=f"no TMA: {reason}")
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("scaled_mm %s x %s: %s", tuple(a.shape), tuple(b.shape), launch.describe())
    return launch
