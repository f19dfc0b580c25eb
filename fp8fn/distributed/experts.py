"""Expert parallelism with FP8 on the wire: `dispatch` sends rows to their experts' ranks, `combine` sends results back.

A token travels as K bytes of FP8 and one byte, the exponent of a power of two, for each 128 of them: 1.008 K bytes,
where bfloat16 has 2 K. FP8 values times a power of two are exact in bfloat16, and quantizing them again by powers of
two rounds nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8fn import arguments
from fp8fn.arguments import checked
from fp8fn.distributed.exchange import ByCollective, ByPulls, Exchange
from fp8fn.meta import levels
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.formats import INPUT_DTYPES
from fp8fn.ops.sharded import is_sharded
from fp8fn.ops.symmetric_memory import not_shared
from fp8fn.ops.torch_private import collectives

_LOG: Final = logging.getLogger("fp8fn")
_NEGATIVE: Final = 2**62
_WIDTHS: Final = 2**32


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the rows of a `dispatch` went.

    Args:
        offsets: Ends of the rows of each expert of this rank, int32, as `grouped_gemm` takes them.
        exchange: The way of the rows.
    """

    offsets: Tensor
    exchange: Exchange


def _check_group(op: str, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError(
            f"{op}: {name} is {value!r:.40}; pass a ProcessGroup that has this rank, as mesh.get_group() gives it, or "
            "None for all ranks"
        )


def _check_rows(op: str, name: str, value: Any) -> None:
    arguments.matrix(op, name, value)
    _check_local(op, name, value)


def _check_counts(op: str, name: str, value: Any) -> None:
    arguments.tensor(op, name, value)
    _check_local(op, name, value)


def _check_local(op: str, name: str, value: Any) -> None:
    if is_sharded(value):
        raise TypeError(f"{op}: {name} is a DTensor; pass what this rank has of it, {name}.to_local()")


def _check_routing(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Routing):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; pass the Routing that dispatch returned")


@checked(x=_check_rows, counts=_check_counts, group=_check_group)
def dispatch(x: Tensor, counts: Tensor, group: Any = None, *, capacity: int | None = None) -> tuple[Tensor, Routing]:
    """Sends rows to the ranks of their experts as FP8 bytes and scales.

    Rank `r` of `W` has experts `r E / W` to `(r + 1) E / W - 1`. Rows are rounded once, by powers of two for
    (1, 128) blocks; `BLOCKWISE_POW2` products take them as they are. Gradients have the type of `x`.

    The host waits once, for the counts. With a `capacity`, where all ranks are GPUs that read each other's memory, it
    does not: a CUDA graph may capture the step once it has run, and wrong numbers of rows make all results NaN.

    Args:
        x: Rows sorted by expert: bfloat16, float16 or float32.
        counts: Rows for each expert of all ranks, int32 or int64.
        group: The world by default.
        capacity: Most rows that a rank receives or sends, one number for all; None for any.

    Shape:
        `x (T, K)`, `counts (E)` → `(R, K)`, `R` the rows of all ranks for this rank's experts, or `capacity`, with
        zeros past them.

    Returns:
        The received rows by expert, in the type of `x`, and a `Routing` for `combine`.

    Raises:
        TypeError: `x`, `counts` or `group` has a wrong type.
        ValueError: E is no multiple of the ranks; on all ranks, `counts` of one do not sum to T, it would send or
            receive more than `capacity` rows, or types or K differ. Such GPUs raise alone for T above `capacity`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> rows, routing = fp8fn.distributed.dispatch(torch.randn(5, 256), torch.tensor([2, 3]))
        >>> fp8fn.distributed.combine(rows, routing).shape
        torch.Size([5, 256])
        >>> dist.destroy_process_group()
    """
    group = dist.group.WORLD if group is None else group
    _check_rows("dispatch", "x", x)  # here, before other ranks wait for this one's counts
    if x.ndim != 2:  # which `arguments.matrix` allows
        raise ValueError(f"dispatch: x has shape {tuple(x.shape)}; it must be (T, K)")
    routing = _routing(x, counts, group) if capacity is None else _within(x, counts, group, capacity)
    rows: Tensor = levels.apply(_Dispatch, x, routing.exchange)
    return rows, routing


@checked(y=_check_rows, routing=_check_routing)
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
        TypeError: `y` is not bfloat16, float16 or float32, or `routing` is no `Routing`.
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
    _check_rows("combine", "y", y)  # an exchange of bytes would not notice
    if y.ndim != 2:
        raise ValueError(f"combine: y has shape {tuple(y.shape)}; it must be (R, N)")
    if y.shape[0] != routing.exchange.rows:
        raise ValueError(f"combine: y has {y.shape[0]} rows, and dispatch returned {routing.exchange.rows}")
    out: Tensor = levels.apply(_Combine, y, routing.exchange)
    return out


def _routing(x: Tensor, counts: Tensor, group: Any) -> Routing:
    """The host knows how many rows each rank has for this rank."""
    mine = _counted(x, counts, group)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    sums = (part[:, 2:].sum(1) for part in (mine, theirs))
    forms, faults, sent, received = torch.stack([*theirs[:, :2].T, *sums]).tolist()  # the host waits here
    _check_forms(forms)
    _check_faults(faults)
    return _by_collective(theirs[:, 2:], sent, received, sum(received), group)


def _counted(x: Tensor, counts: Tensor, group: Any, *sizes: int) -> Tensor:
    """This rank's `counts (W, E / W)` for each rank, behind its form, its fault and `sizes`.

    The form is a number for E and for the width and type of `x`. The fault is 0, or how many rows have no expert. They
    go to all ranks, so that all of them raise. They come first, where gloo puts them also if the ranks differ in E.
    """
    world = dist.get_world_size(group)
    if counts.ndim != 1 or counts.shape[0] % world:
        raise ValueError(
            f"dispatch: counts has shape {tuple(counts.shape)}; it needs one number for each expert, a multiple of the "
            f"{world} ranks"
        )
    if counts.dtype not in (torch.int32, torch.int64):  # a narrower type wraps at counts that are too large for it
        raise TypeError(f"dispatch: counts has dtype {counts.dtype}; use int32 or int64, as counts.int() is")
    if counts.device != x.device:
        raise ValueError(f"dispatch: x is on {x.device} and counts on {counts.device}; move them to one device")
    counts = counts.to(torch.int64)
    form = (counts.shape[0] * _WIDTHS + x.shape[1]) * len(INPUT_DTYPES) + INPUT_DTYPES.index(x.dtype)
    fault = torch.where((counts < 0).any(), _NEGATIVE, x.shape[0] - counts.sum())
    first, *more = (counts.new_full((world, 1), size) for size in (form, *sizes))
    return torch.cat([first, fault.expand(world, 1), *more, counts.view(world, -1)], 1)


def _check_forms(forms: list[int]) -> None:
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                f"dispatch: rank {rank} has {_described(form)}, and rank 0 {_described(forms[0])}; all ranks need the "
                "same experts, width and dtype"
            )


def _described(form: int) -> str:
    rest, dtype = divmod(form, len(INPUT_DTYPES))
    experts, width = divmod(rest, _WIDTHS)
    return f"counts of {experts} experts and x of width {width} in {INPUT_DTYPES[dtype]}"


def _check_faults(faults: list[int]) -> None:
    for rank, fault in enumerate(faults):
        if fault == _NEGATIVE:
            raise ValueError(f"dispatch: counts of rank {rank} have a negative number; count each row once")
        if fault:
            more = "fewer" if fault > 0 else "more"
            raise ValueError(
                f"dispatch: counts of rank {rank} sum to {abs(fault)} rows {more} than x has; count each row once"
            )


def _by_collective(theirs: Tensor, sent: list[int], received: list[int], rows: int, group: Any) -> Routing:
    world, local = theirs.shape
    expert = torch.arange(local, device=theirs.device).repeat(world)
    order = expert.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
    offsets = theirs.sum(0).cumsum(0).to(torch.int32)
    exchange = ByCollective(sent=tuple(sent), received=tuple(received), order=order, rows=rows, group=group)
    return Routing(offsets=offsets, exchange=exchange)


def _within(x: Tensor, counts: Tensor, group: Any, capacity: int) -> Routing:
    """All ranks know all counts, on their devices."""
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"dispatch: capacity is {capacity!r}; give a number of rows, or None for any number")
    tokens = x.shape[0]
    why_not = not_shared(group) if x.is_cuda else f"x is on {x.device}"
    if why_not is None and tokens > capacity:  # the buffer has no place for them, and no host would say so later
        raise ValueError(f"dispatch: x has {tokens} rows, and capacity is {capacity}; a rank sends no more than that")
    mine = _counted(x, counts, group, capacity)
    world = mine.shape[0]
    gathered = collectives.wait(collectives.all_gather(mine, world, group.group_name))
    gathered = gathered.view(world, *mine.shape)
    heads, by_rank = gathered[:, 0, :3], gathered[..., 3:]  # a head has the form, the fault and the capacity of a rank
    if why_not is None:
        wrong = heads[:, 1].abs() + (heads != heads[0]).sum(1)
        pulls = ByPulls(counts=by_rank.flatten(1), faults=wrong, tokens=tokens, capacity=capacity, group=group)
        return Routing(offsets=pulls.offsets, exchange=pulls)
    if graph_capture.capturing():
        raise RuntimeError(f"dispatch: a CUDA graph cannot capture it, for the host has to wait: {why_not}")
    _LOG.debug("dispatch: the host waits for the counts: %s", why_not)
    # The host waits here, for the heads of all ranks and their rows for each rank.
    forms, faults, capacities, *rows = torch.cat([heads.T, by_rank.sum(2)]).tolist()
    _check_forms(forms)
    if len(set(capacities)) > 1:
        raise ValueError(f"dispatch: ranks have capacity {capacities}; give one number to all of them")
    _check_faults(faults)
    sent, received = list(map(sum, rows)), [sum(to) for to in zip(*rows, strict=True)]
    for numbers, does in ((sent, "send"), (received, "receive")):
        if max(numbers) > capacity:
            rank = numbers.index(max(numbers))
            raise ValueError(f"dispatch: rank {rank} would {does} {numbers[rank]} rows, and capacity is {capacity}")
    rank = dist.get_rank(group)
    return _by_collective(by_rank[:, rank], rows[rank], [row[rank] for row in rows], capacity, group)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_experts(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.to_rows(grad), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_rows(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.to_experts(grad), None
