"""Expert parallelism with FP8 on the wire: `dispatch` sends rows to their experts' ranks, `combine` sends results back.

A token travels as K bytes of FP8 and one byte, the exponent of a power of two, for each 128 of them: 1.008 K bytes,
where bfloat16 has 2 K. FP8 values times a power of two are exact in bfloat16, and quantizing them again by powers of
two rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.meta import levels
from fp8fn.ops import reference
from fp8fn.ops.layout import Block

_BLOCK: Final[Block] = (1, 128)


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the rows of a `dispatch` went.

    Args:
        offsets: Ends of the rows of each expert of this rank, int32, as `grouped_gemm` takes them.
        sent: Rows that this rank sent to each rank.
        received: Rows that it received from each rank.
        order: For each row, sorted by expert, its place among the received ones.
        group: Process group of the ranks.
    """

    offsets: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    group: Any


@checked(x=arguments.matrix, counts=arguments.tensor)
def dispatch(x: Tensor, counts: Tensor, group: Any = None) -> tuple[Tensor, Routing]:
    """Sends rows to the ranks of their experts as FP8 bytes and scales, in one `all_to_all_single`.

    Experts are divided evenly: rank `r` of `W` has experts `r E / W` to `(r + 1) E / W - 1`. Rows are rounded once, to
    FP8 with power-of-two scales of (1, 128) blocks; `BLOCKWISE_POW2` products take them without another rounding.
    The backward of `dispatch` returns gradients in the type of `x`. That of `combine` sends gradients in FP8, as here.
    The host waits once, for the counts.

    Args:
        x: Rows sorted by expert: bfloat16, float16 or float32.
        counts: Number of rows for each expert of all ranks, int32 or int64.
        group: Process group; by default the world.

    Shape:
        `x (T, K)`, `counts (E)` → `(R, K)`, with `R` the rows that all ranks have for this rank's experts.

    Returns:
        The received rows sorted by expert, in the type of `x`, and the `Routing` for `combine`.

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32, or `counts` is no tensor.
        ValueError: E is no multiple of the number of ranks, or on any rank `counts` do not sum to T; on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> rows, routing = fp8fn.distributed.dispatch(torch.randn(5, 256), torch.tensor([2, 3]))
        >>> fp8fn.distributed.combine(rows, routing).shape
        torch.Size([5, 256])
        >>> dist.destroy_process_group()
    """
    group = dist.group.WORLD if group is None else group
    routing = _routing(x, counts, group)
    rows: Tensor = levels.apply(_Dispatch, x, routing)
    return rows, routing


@checked(y=arguments.matrix)
def combine(y: Tensor, routing: Routing) -> Tensor:
    """Sends the experts' results back to the rows' ranks, in their own type; the backward sends gradients in FP8.

    Args:
        y: Results, a row for each row of `dispatch`.
        routing: The `Routing` that `dispatch` returned.

    Shape:
        `y (R, N)` → `(T, N)`, in the order of the rows that were dispatched.

    Returns:
        A tensor of the type of `y`.

    Raises:
        TypeError: `y` is not bfloat16, float16 or float32.
        ValueError: `y` has another number of rows.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, weights = torch.randn(5, 256), torch.randn(2, 256, 128)
        >>> rows, routing = fp8fn.distributed.dispatch(x, torch.tensor([2, 3]))
        >>> y = fp8fn.grouped_gemm(rows, weights, routing.offsets, recipe="blockwise_pow2")
        >>> fp8fn.distributed.combine(y, routing).shape
        torch.Size([5, 128])
        >>> dist.destroy_process_group()
    """
    if y.shape[0] != sum(routing.received):
        raise ValueError(f"combine: y has {y.shape[0]} rows, and dispatch received {sum(routing.received)}")
    out: Tensor = levels.apply(_Combine, y, routing)
    return out


def _routing(x: Tensor, counts: Tensor, group: Any) -> Routing:
    world = dist.get_world_size(group)
    if counts.ndim != 1 or counts.shape[0] % world:
        raise ValueError(
            f"dispatch: counts has shape {tuple(counts.shape)}; it needs one number for each expert, a multiple of the "
            f"{world} ranks"
        )
    local = counts.shape[0] // world
    # The number of rows without an expert goes to all ranks, so that all of them raise.
    missing = (x.shape[0] - counts.sum()).expand(world, 1)
    mine = torch.cat([counts.to(torch.int64).view(world, local), missing.to(torch.int64)], 1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    wrong, theirs = theirs[:, -1], theirs[:, :-1]
    faults, sent, received = torch.stack([wrong, mine[:, :-1].sum(1), theirs.sum(1)]).tolist()  # the host waits here
    if any(faults):
        rank = next(rank for rank, fault in enumerate(faults) if fault)
        raise ValueError(
            f"dispatch: counts of rank {rank} sum to {-faults[rank]:+} rows more than x has; count each row once"
        )
    expert = torch.arange(local, device=x.device).repeat(world)
    order = expert.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
    offsets = theirs.sum(0).cumsum(0).to(torch.int32)
    return Routing(offsets, tuple(sent), tuple(received), order, group)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return _to_experts(x, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_rows(grad, ctx.routing), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return _to_rows(y, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_experts(grad, ctx.routing), None


def _to_experts(x: Tensor, routing: Routing) -> Tensor:
    """Rows in FP8 to their experts, where bytes are sorted by expert and then read."""
    k = x.shape[1]
    data, scale = torch.ops.fp8fn.quantize(x, _BLOCK, None, "pow2")
    exponents = scale.to(torch.float8_e8m0fnu)  # one byte; Inf is NaN in it
    packed = torch.cat([data.view(torch.uint8), exponents.view(torch.uint8)], 1)
    got = _exchanged(packed, routing.sent, routing.received, routing.group)[routing.order]
    return _dequantized(got[:, :k].view(data.dtype), got[:, k:].view(torch.float8_e8m0fnu), x.dtype)


def _dequantized(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Products with powers of two, which are exact in any type that has float32's exponents."""
    if dtype == torch.float16 or data.shape[1] % _BLOCK[1]:
        return reference.dequantize(data.contiguous(), scale.to(torch.float32), _BLOCK).to(dtype)
    blocks: Tensor = data.to(dtype).unflatten(1, (-1, _BLOCK[1])) * scale.to(dtype)[..., None]
    return blocks.flatten(1)


def _to_rows(y: Tensor, routing: Routing) -> Tensor:
    """Rows of the experts back to the ranks that they came from."""
    received = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    received[routing.order] = y
    return _exchanged(received, routing.received, routing.sent, routing.group)


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows, list(received), list(sent), group=group)
    return out
