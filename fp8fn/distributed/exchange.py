"""Two ways of rows to the ranks of their experts and back: by a collective, or out of the memory of other GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fp8fn.distributed.exponents import exponents_of, saturated, scale_of
from fp8fn.ops import reference
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.layout import Block
from fp8fn.ops.symmetric_memory import SharedBuffer
from fp8fn.ops.targets import target_of

_BLOCK: Final[Block] = (1, 128)


class Exchange(Protocol):
    """A way of rows."""

    @property
    def rows(self) -> int:
        """How many rows `to_experts` returns."""

    def to_experts(self, x: Tensor) -> Tensor:
        """Rows to their experts in FP8, sorted by expert, in the type of `x`."""

    def to_rows(self, y: Tensor) -> Tensor:
        """Rows of the experts back to the ranks that they came from, in their own type."""


@dataclass(frozen=True, eq=False)
class ByCollective:
    """One `all_to_all_single`, for which the host knows the number of rows.

    Args:
        sent: Rows that this rank sends to each rank.
        received: Rows that it receives from each rank.
        order: For each row, sorted by expert, its place among the received ones.
        rows: How many rows `to_experts` returns; zeros past the received ones.
        group: Process group of the ranks.
    """

    sent: Sequence[int]
    received: Sequence[int]
    order: Tensor
    rows: int
    group: Any

    def to_experts(self, x: Tensor) -> Tensor:
        k = x.shape[1]
        data, exponents = _in_fp8(x)
        packed = torch.cat([data.view(torch.uint8), exponents], 1)
        got = self._exchanged(packed, self.sent, self.received)[self.order]
        rows = _dequantized(got[:, :k].view(data.dtype), scale_of(got[:, k:]), x.dtype)
        missing = self.rows - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, k)]) if missing else rows

    def to_rows(self, y: Tensor) -> Tensor:
        received = torch.empty(len(self.order), y.shape[1], dtype=y.dtype, device=y.device)
        received[self.order] = y[: len(self.order)]
        return self._exchanged(received, self.received, self.sent)

    def _exchanged(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, list(received), list(sent), group=self.group)
        return out


def _in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 data, and of each scale its exponent."""
    data, scale = torch.ops.fp8fn.quantize(x, _BLOCK, None, "pow2")
    return data, exponents_of(scale)


def _dequantized(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Products with powers of two: exact in any type that has float32's exponents, up to its largest number."""
    if dtype == torch.float16 or data.shape[1] % _BLOCK[1]:
        return saturated(reference.dequantize(data.contiguous(), scale, _BLOCK).to(dtype))
    blocks: Tensor = data.to(dtype).unflatten(1, (-1, _BLOCK[1])) * scale.to(dtype)[..., None]
    return saturated(blocks).flatten(1)


class ByPulls:
    """Each rank reads its rows out of the others' memory, at places that its GPU computes: the host knows no number.

    The result is NaN on all ranks if `faults` of some rank are not 0, or a rank receives more than `capacity`.

    Args:
        counts: Rows of each rank for each expert, int64 `(W, E)`.
        faults: What is wrong on each rank, int64; 0 for nothing.
        tokens: How many rows this rank sends.
        capacity: How many rows `to_experts` returns; zeros past the received ones.
        group: Process group of the ranks.
    """

    def __init__(self, counts: Tensor, faults: Tensor, tokens: int, capacity: int, group: Any) -> None:
        self.rows, self._tokens, self._group = capacity, tokens, group
        self._rank = dist.get_rank(group)
        self._counts = counts
        world, experts = counts.shape
        self._local = experts // world
        too_many = counts.sum(0).view(world, -1).sum(1) > capacity
        wrong = (faults != 0).any() | too_many.any() | ((counts < 0) | (counts > capacity)).any()
        self._absent = torch.where(wrong, torch.nan, 0.0)
        self._ends = self._of_experts(self._counts).cumsum(0)

    @property
    def offsets(self) -> Tensor:
        """Ends of the rows of each expert; zeros where the result is NaN, so that products read none of it."""
        ends = self._ends[self._counts.shape[0] - 1 :: self._counts.shape[0]]
        return torch.where(self._absent == 0, ends, 0).to(torch.int32)

    def _of_experts(self, by_rank: Tensor) -> Tensor:
        """Numbers `(W, E)` of this rank's experts, by expert and then by rank."""
        return by_rank[:, self._rank * self._local : (self._rank + 1) * self._local].T.flatten()

    @cached_property
    def _at_senders(self) -> Any:
        """The places of the rows of this rank's experts."""
        sent = self._counts.cumsum(1) - self._counts
        place = torch.arange(self.rows, device=self._ends.device)
        part = torch.searchsorted(self._ends, place, right=True)
        inside = part < self._ends.numel()
        part = part.clamp_max(self._ends.numel() - 1)
        starts = self._ends - self._of_experts(self._counts)
        return self._places(part % self._counts.shape[0], place + (self._of_experts(sent) - starts)[part], inside)

    @cached_property
    def _at_experts(self) -> Any:
        """The places of what experts make of this rank's rows."""
        place = torch.arange(self._tokens, device=self._ends.device)
        ends = self._counts[self._rank].cumsum(0)
        expert = torch.searchsorted(ends, place, right=True).clamp_max(ends.numel() - 1)
        of_experts = self._counts.sum(0).view(self._counts.shape[0], -1)
        before = (of_experts.cumsum(1) - of_experts).flatten() + self._counts[: self._rank].sum(0)
        starts = ends - self._counts[self._rank]
        return self._places(expert // self._local, place + (before - starts)[expert], place < self._tokens)

    def _places(self, rank: Tensor, row: Tensor, inside: Tensor) -> Any:
        from fp8fn.ops.triton.pull_rows import Places

        inside = inside & (self._absent == 0)
        return Places(rank=torch.where(inside, rank, -1).to(torch.int32), row=row, absent=self._absent)

    def to_experts(self, x: Tensor) -> Tensor:
        k = x.shape[1]
        data, exponents = _in_fp8(x)
        blocks = exponents.shape[1]
        after = math.ceil(self.rows * k / 16) * 16
        # Large enough for rows of the experts, which may come only when a graph is captured.
        buffer = _buffer(max(after + self.rows * blocks, self.rows * k * x.itemsize), self._group, x.device)
        buffer.claim()
        tokens = self._tokens
        buffer.bytes[: tokens * k].view(tokens, k).copy_(data.view(torch.uint8))
        buffer.bytes[after : after + tokens * blocks].view(tokens, blocks).copy_(exponents)
        return self._pulled(buffer, data.dtype, after, self._at_senders, x.new_empty(self.rows, k))

    def to_rows(self, y: Tensor) -> Tensor:
        buffer = _buffer(y.numel() * y.itemsize, self._group, y.device)
        buffer.claim()
        buffer.bytes[: y.numel() * y.itemsize].view(y.dtype).view(y.shape).copy_(y)
        return self._pulled(buffer, y.dtype, 0, self._at_experts, y.new_empty(self._tokens, y.shape[1]))

    def _pulled(self, buffer: SharedBuffer, dtype: torch.dtype, scales_at: int, places: Any, out: Tensor) -> Tensor:
        from fp8fn.ops.triton.pull_rows import Source, plan_pull_rows

        buffer.wait()
        if out.numel():
            source = Source(addresses=buffer.addresses, dtype=dtype, scales_at=scales_at)
            plan_pull_rows(source=source, places=places, out=out, target=target_of(out.device)).run()
        buffer.wait()  # nobody writes again before all have read
        return out


_buffers: Final[WeakKeyDictionary[Any, SharedBuffer]] = WeakKeyDictionary()
# A graph goes on reading and writing the bytes that it was captured with.
_in_graphs: Final[list[SharedBuffer]] = []


def _buffer(nbytes: int, group: Any, device: torch.device) -> SharedBuffer:
    """The buffer of a group, made anew where it is too small: on all ranks, for their sizes are equal."""
    found, captured = _buffers.get(group), graph_capture.capturing()
    if found is None or found.bytes.numel() < nbytes:
        if captured:
            raise RuntimeError(
                "dispatch: a CUDA graph cannot make memory that other ranks read; run the step once before its capture"
            )
        _buffers[group] = found = SharedBuffer(nbytes, group, device)
    if captured and found not in _in_graphs:
        _in_graphs.append(found)
    return found
