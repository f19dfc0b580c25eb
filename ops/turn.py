"""FP8 data in the other memory layout, for kernels that read an operand along one axis alone.

PyTorch copies bytes between layouts one by one: 25 weights of 8B's widths, 0.8 GB, took 4.9 ms on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.kernel import Dispatch, Kernel, deferred, no_config
from fp8fn.ops.layout import matrix_strides
from fp8fn.ops.targets import Target

if TYPE_CHECKING:
    from fp8fn.ops.cuda.quantize import turn as cuda
    from fp8fn.ops.triton import turn as triton
else:
    cuda, triton = deferred("fp8fn.ops.cuda.quantize.turn"), deferred("fp8fn.ops.triton.turn")


@dataclass(frozen=True, eq=False, kw_only=True)
class Turn:
    """FP8 data `x (B?, M, N)` with contiguous rows, and the copy `out` with contiguous columns."""

    x: Tensor
    out: Tensor
    target: Target

    @property
    def outputs(self) -> Outputs:
        return Outputs({"out": self.out}, 1)


def column_major(x: Tensor) -> Tensor:
    """A copy of FP8 data `x (B?, M, N)`, whose rows are contiguous, with contiguous columns."""
    copy: Tensor = TURN((x,), ())[0]
    return copy


def _operands(tensors: Sequence[Any], _: Sequence[Any]) -> Turn:
    (x,) = tensors
    out = torch.empty_strided(
        x.shape, matrix_strides(x.shape, column_major=True, align=16), dtype=x.dtype, device=x.device
    )
    return Turn(x=x, out=out, target=targets.target_of(x.device))


def _copied(turn: Turn) -> tuple[Tensor]:
    return (turn.out.copy_(turn.x),)


def _unserved(turn: Turn) -> str | None:
    if turn.x.device.type == "meta":
        return "x has no values"
    return "x is on the CPU" if turn.target.backend == "cpu" else None


def _no_triton(_: Turn) -> str | None:
    return None if find_spec("triton") else "triton is not installed"


TURN: Final = Dispatch(
    op="column_major",
    inputs=("x",),
    operands=_operands,
    kernels=(
        Kernel("cuda", cuda.accepts, no_config, lambda turn, _: cuda.plan_turn(turn.x, turn.out, turn.target)),
        Kernel("triton", _no_triton, no_config, lambda turn, _: triton.plan_turn(turn.x, turn.out, turn.target)),
    ),
    reference=_copied,
    unserved=_unserved,
)
