"""Expert parallelism with FP8 on the wire: `dispatch` sends rows to their experts' ranks, `combine` sends results back.

A token travels as K bytes of FP8 and one byte, the exponent of a power of two, for each 128 of them: 1.008 K bytes,
where bfloat16 has 2 K. FP8 values times a power of two are exact in bfloat16, and quantizing them again by powers of
two rounds nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
from fp8fn.ops.kinds import kind_of
from fp8fn.ops.sharded import is_sharded
from fp8fn.ops.symmetric_memory import has_agreed, not_shared
from fp8fn.ops.torch_private import collectives

_LOG: Final = logging.getLogger("fp8fn")
_NEGATIVE: Final = 2**62
_WIDTHS: Final = 2**32
_HEAD: Final = 3  # numbers of a rank before its counts: form, capacity, fault
_MOST: Final = 512  # numbers of a rank that are gathered: 4 KB
_ROOM: Final = 2**16  # numbers of all ranks


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the rows of a `dispatch` went.

    Args:
        offsets: Ends of the rows of each expert of this rank, int32, as `grouped_gemm` takes them.
        exchange: The way of the rows.
        width: K, the same on all ranks.
        dtype: The type of the rows, the same on all ranks.
    """

    offsets: Tensor
    exchange: Exchange
    width: int
    dtype: torch.dtype


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
        raise TypeError(f"{op}: {name} is {kind_of(value)}; pass the Routing that dispatch returned")


@checked(x=_check_rows, counts=_check_counts, group=_check_group)
def dispatch(x: Tensor, counts: Tensor, group: Any = None, *, capacity: int | None = None) -> tuple[Tensor, Routing]:
    """Sends rows to the ranks of their experts as FP8 bytes and scales.

    Rank `r` of `W` has experts `r E / W` to `(r + 1) E / W - 1`. Rows are rounded once, by powers of two for
    (1, 128) blocks; `BLOCKWISE_POW2` products take them as they are. Gradients have the type of `x`.

    The host waits once, for the counts. With a `capacity`, where all ranks are GPUs that read each other's memory, it
    does not: a CUDA graph may capture the step once it has run, and wrong numbers of rows make all results NaN.

    Args:
        x: Rows sorted by expert: bfloat16, float16 or float32.
        counts: Rows for each of all experts, int32 or int64.
        group: The world by default.
        capacity: Most rows that a rank receives or sends, one number for all; None for any.

    Shape:
        `x (T, K)`, `counts (E)` → `(R, K)`, `R` the rows of all ranks for this rank's experts, or `capacity`, with
        zeros past them.

    Returns:
        The received rows by expert, in the type of `x`, and a `Routing` for `combine`.

    Raises:
        TypeError: `x`, `counts` or `group` has a wrong type.
        ValueError: On all ranks: E is no multiple of them, `counts` of one do not sum to T, it would send or receive
            more than `capacity` rows, or E, K, types or `capacity` differ. Such GPUs raise alone if T is above.

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
    _check_counts_beside(x, counts, group)
    _check_capacity(capacity)
    routing = _routing(x, counts, group, capacity)
    rows: Tensor = levels.apply(_Dispatch, x, routing.exchange)
    return rows, routing


@checked(y=_check_rows, routing=_check_routing)
def combine(y: Tensor, routing: Routing, *, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Sends the experts' results back to the rows' ranks, in their own type; the backward sends gradients in FP8.

    No rank learns what the others give: each compares its `y` with what `dispatch` made sure of, or with what you say.

    Args:
        y: Results, a row for each row of `dispatch`.
        routing: The `Routing` that `dispatch` returned.
        width: N on all ranks; by default the K of `dispatch`.
        dtype: Type of `y` on all ranks; by default that of the rows of `dispatch`, or autocast's.

    Shape:
        `y (R, N)` → `(T, N)`, in the order of the rows that were dispatched.

    Returns:
        A tensor of the type of `y`.

    Raises:
        TypeError: `y` is not of the type that all ranks give, or `routing` is no `Routing`.
        ValueError: `y` has another number of rows, or another width.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, weights = torch.randn(5, 256), torch.randn(2, 256, 128)
        >>> rows, routing = fp8fn.distributed.dispatch(x, torch.tensor([2, 3]))
        >>> y = fp8fn.grouped_gemm(rows, weights, routing.offsets, recipe="blockwise_pow2")
        >>> fp8fn.distributed.combine(y, routing, width=128).shape
        torch.Size([5, 128])
        >>> dist.destroy_process_group()
    """
    _check_rows("combine", "y", y)  # an exchange of bytes would not notice
    if y.ndim != 2:
        raise ValueError(f"combine: y has shape {tuple(y.shape)}; it must be (R, N)")
    if y.shape[0] != routing.exchange.rows:
        raise ValueError(f"combine: y has {y.shape[0]} rows, and dispatch returned {routing.exchange.rows}")
    if y.shape[1] != (routing.width if width is None else width):
        of_all = f"width={width}" if width is not None else f"x of dispatch had {routing.width}"
        raise ValueError(
            f"combine: y has {y.shape[1]} columns, and {of_all}; make it as wide on a rank without rows too, or give "
            f"width={y.shape[1]} on all ranks"
        )
    wanted = routing.dtype if dtype is None else dtype
    if (
        dtype is None
        and torch.is_autocast_enabled(y.device.type)
        and y.dtype == torch.get_autocast_dtype(y.device.type)
    ):
        wanted = y.dtype  # ranks of one program are all under autocast
    if y.dtype != wanted:
        of_all = f"dtype={dtype}" if dtype is not None else f"x of dispatch had {wanted}"
        raise TypeError(
            f"combine: y has dtype {y.dtype}, and {of_all}; pass y.to({wanted}), or give dtype={y.dtype} on all ranks"
        )
    out: Tensor = levels.apply(_Combine, y, routing.exchange)
    return out


def _routing(x: Tensor, counts: Tensor, group: Any, capacity: int | None) -> Routing:
    """Who receives how many rows of whom, of which the host learns unless GPUs read each other's memory."""
    known = _exchanged(x, counts, group, capacity)
    if counts.shape[0] % dist.get_world_size(group):
        _check_heads(known.heads.T.tolist())  # another rank may have another number of experts
        raise _wrong_shape(counts, group)
    if capacity is not None:
        why_not = _not_pulled(x, known.heads, group)
        if why_not is None:
            return _by_pulls(x, known, capacity, group)
        if graph_capture.capturing():
            raise RuntimeError(f"dispatch: a CUDA graph cannot capture it, for the host has to wait: {why_not}")
        _LOG.debug("dispatch: the host waits for the counts: %s", why_not)
    mine, theirs, rank = known.sent, known.received, dist.get_rank(group)
    # With a capacity the rows of all ranks for all ranks; without one those that this rank sends and receives.
    rows = torch.stack([mine.sum(1), theirs.sum(1)]) if capacity is None else known.by_rank.sum(2)
    heads = torch.cat([known.heads.T, rows]).tolist()  # the host waits here
    _check_heads(heads[:3])
    if capacity is None:
        sent, received = heads[3:]
        return _by_collective(x, theirs, (sent, received), sum(received), group)
    from_to = heads[3:]
    totals = list(map(sum, from_to)), [sum(to) for to in zip(*from_to, strict=True)]
    for numbers, does in zip(totals, ("send", "receive"), strict=True):
        if max(numbers) > capacity:
            worst = numbers.index(max(numbers))
            raise ValueError(f"dispatch: rank {worst} would {does} {numbers[worst]} rows, and capacity is {capacity}")
    return _by_collective(x, theirs, (from_to[rank], [row[rank] for row in from_to]), capacity, group)


class _Known(NamedTuple):
    """What this rank has learned from the others, on its device.

    Args:
        heads: Form, capacity and fault of each rank, int64 `(W, 3)`.
        sent: Rows of this rank for each expert, `(W, E / W)`.
        received: Rows of each rank for this rank's experts, `(W, E / W)`.
        by_rank: Rows of each rank for each expert, `(W, W, E / W)`; without a capacity it may be that of this rank.
    """

    heads: Tensor
    sent: Tensor
    received: Tensor
    by_rank: Tensor


def _exchanged(x: Tensor, counts: Tensor, group: Any, capacity: int | None) -> _Known:
    """The counts of all ranks, in one collective.

    All ranks gather one number of bytes, whatever their experts and their capacity are, so that a rank which differs is
    an error on all of them. That is so up to `_ROOM / W` numbers of each rank: 509 experts on up to 128 ranks. Beyond
    it ranks without a capacity send to each rank what it needs.
    """
    world, rank, experts = dist.get_world_size(group), dist.get_rank(group), counts.shape[0]
    room = min(_MOST, _ROOM // world)
    fits = experts + _HEAD <= room
    if not fits and experts % world:
        raise _wrong_shape(counts, group)
    own = _own(x, counts, capacity, room if fits else 0)
    if not fits and capacity is None:
        sent = own[_HEAD:].view(world, -1)
        mine = torch.cat([own[:_HEAD].expand(world, _HEAD), sent], 1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        return _Known(theirs[:, :_HEAD], sent, theirs[:, _HEAD:], sent[None])
    gathered = collectives.wait(collectives.all_gather(own, world, group.group_name)).view(world, -1)
    at = own.shape[0] - experts
    # The form is the first number too, where it is found if a rank has more or fewer experts.
    heads = torch.cat([gathered[:, :1], gathered[:, at - _HEAD + 1 : at]], 1)
    if experts % world:
        return _Known(heads, counts, counts, counts)
    by_rank = gathered[:, at:].view(world, world, -1)
    return _Known(heads, by_rank[rank], by_rank[:, rank], by_rank)


def _own(x: Tensor, counts: Tensor, capacity: int | None, room: int) -> Tensor:
    """This rank's form, capacity, fault and counts, with its form in front of them up to `room` numbers in all.

    The form is a number for E and for the width and type of `x`. The fault is 0, or how many rows have no expert.
    """
    counts = counts.to(torch.int64)
    form = (counts.shape[0] * _WIDTHS + x.shape[1]) * len(INPUT_DTYPES) + INPUT_DTYPES.index(x.dtype)
    fault = torch.where((counts < 0).any(), _NEGATIVE, x.shape[0] - counts.sum())
    forms = counts.new_full((max(1, room - counts.shape[0] - _HEAD + 1),), form)
    return torch.cat([forms, counts.new_full((1,), capacity or 0), fault.view(1), counts])


def _check_counts_beside(x: Tensor, counts: Tensor, group: Any) -> None:
    if counts.ndim != 1:
        raise _wrong_shape(counts, group)
    if counts.dtype not in (torch.int32, torch.int64):  # a narrower type wraps at counts that are too large for it
        raise TypeError(f"dispatch: counts has dtype {counts.dtype}; use int32 or int64, as counts.int() is")
    if counts.device != x.device:
        raise ValueError(f"dispatch: x is on {x.device} and counts on {counts.device}; move them to one device")


def _wrong_shape(counts: Tensor, group: Any) -> ValueError:
    return ValueError(
        f"dispatch: counts has shape {tuple(counts.shape)}; it needs one number for each expert, a multiple of the "
        f"{dist.get_world_size(group)} ranks"
    )


def _check_capacity(capacity: Any) -> None:
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
        raise ValueError(f"dispatch: capacity is {capacity!r}; give a number of rows, or None for any number")


def _check_heads(heads: list[list[int]]) -> None:
    """Raises an error, the same on all ranks, by the forms, capacities and faults of all of them."""
    forms, capacities, faults = heads
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                f"dispatch: rank {rank} has {_described(form)}, and rank 0 {_described(forms[0])}; all ranks need the "
                "same experts, width and dtype"
            )
    if len(set(capacities)) > 1:
        shown = [capacity or None for capacity in capacities]
        raise ValueError(f"dispatch: ranks have capacity {shown}; give one number to all of them, or None to all")
    for rank, fault in enumerate(faults):
        if fault == _NEGATIVE:
            raise ValueError(f"dispatch: counts of rank {rank} have a negative number; count each row once")
        if fault:
            more = "fewer" if fault > 0 else "more"
            raise ValueError(
                f"dispatch: counts of rank {rank} sum to {abs(fault)} rows {more} than x has; count each row once"
            )


def _described(form: int) -> str:
    rest, dtype = divmod(form, len(INPUT_DTYPES))
    experts, width = divmod(rest, _WIDTHS)
    return f"counts of {experts} experts and x of width {width} in {INPUT_DTYPES[dtype]}"


def _not_pulled(x: Tensor, heads: Tensor, group: Any) -> str | None:
    """Why GPUs do not read their rows out of each other's memory, or None."""
    if not x.is_cuda:
        return f"x is on {x.device}"
    if not has_agreed(group) and not graph_capture.capturing():
        # A rank without a capacity would not answer. The host waits here once for each group.
        _check_heads(heads.T.tolist())
    return not_shared(group)


def _by_pulls(x: Tensor, known: _Known, capacity: int, group: Any) -> Routing:
    tokens = x.shape[0]
    if tokens > capacity:  # the buffer has no place for them, and no host would say so later
        raise ValueError(f"dispatch: x has {tokens} rows, and capacity is {capacity}; a rank sends no more than that")
    heads = known.heads
    wrong = heads[:, 2].abs() + (heads[:, :2] != heads[0, :2]).sum(1)
    counts = known.by_rank.flatten(1)
    pulls = ByPulls(counts=counts, faults=wrong, tokens=tokens, capacity=capacity, group=group)
    return Routing(offsets=pulls.offsets, exchange=pulls, width=x.shape[1], dtype=x.dtype)


def _by_collective(x: Tensor, theirs: Tensor, sizes: tuple[list[int], list[int]], rows: int, group: Any) -> Routing:
    """`sizes`: rows that this rank sends to each rank, and receives from each."""
    world, local = theirs.shape
    sent, received = map(tuple, sizes)
    expert = torch.arange(local, device=theirs.device).repeat(world)
    order = expert.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
    offsets = theirs.sum(0).cumsum(0).to(torch.int32)
    exchange = ByCollective(sent=sent, received=received, order=order, rows=rows, group=group)
    return Routing(offsets=offsets, exchange=exchange, width=x.shape[1], dtype=x.dtype)


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
