"""Rows that GPUs read out of each other's memory: threads of a CPU as ranks, and the kernel in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.distributed import exchange
from fp8fn.distributed.exchange import ByPulls
from fp8fn.ops import reference, symmetric_memory, targets
from fp8fn.ops.targets import SM90
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.pull_rows import Places, Source, plan_pull_rows
from support.processes import drawn

CAPACITY = 24
# Rows of each rank for six experts: two on each of three ranks.
COUNTS = torch.tensor([[3, 0, 4, 1, 0, 2], [0, 0, 5, 0, 1, 1], [2, 6, 0, 0, 0, 0]])


class _Bytes:
    """A rank's part of a buffer that all threads read."""

    def __init__(self, parts: list[Tensor], rank: int, all_here: threading.Barrier) -> None:
        self.bytes, self.waits = parts[rank], 0
        self.addresses = torch.tensor([part.data_ptr() for part in parts])
        self._all_here = all_here

    def claim(self) -> None:
        """There are no streams."""

    def wait(self) -> None:
        self.waits += 1
        self._all_here.wait(60)


def _on_ranks(counts: Tensor, run: Callable[[int, ByPulls], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `run` gives on each rank, with the rank's number and its exchange."""
    world, here, all_here = len(counts), threading.local(), threading.Barrier(len(counts))
    parts = [torch.full((1 << 20,), 0x7F, dtype=torch.uint8) for _ in range(world)]
    buffers = [_Bytes(parts, rank, all_here) for rank in range(world)]
    monkeypatch.setattr(exchange.dist, "get_rank", lambda _: here.rank)
    monkeypatch.setattr(exchange, "_buffer", lambda *_: buffers[here.rank])
    monkeypatch.setattr(exchange, "target_of", lambda _: SM90)
    monkeypatch.setattr(TritonLaunch, "run", TritonLaunch.interpret)

    def of_rank(rank: int) -> Any:
        here.rank = rank
        missing = (COUNTS - counts).sum(1)
        return run(rank, ByPulls(counts, missing, int(COUNTS[rank].sum()), CAPACITY, "group"))

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(of_rank, range(world)))
    assert len({buffer.waits for buffer in buffers}) == 1
    return found


class _Stream:
    def __init__(self, *, captured: bool = False) -> None:
        self.waits: list[_Stream] = []
        self.captured = captured

    def wait_stream(self, other: _Stream) -> None:
        self.waits.append(other)


def test_streams_that_share_a_buffer_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager ones, and those of one capture, but none across the begin of a capture or its end."""
    buffer = symmetric_memory.SharedBuffer(16, SimpleNamespace(size=lambda: 1), torch.device("cpu"))
    buffer.bytes = SimpleNamespace(is_cuda=True, device="cuda")  # type: ignore[assignment]
    monkeypatch.setattr(symmetric_memory, "_captures", lambda stream: stream.captured)
    eager, other = _Stream(), _Stream()
    first, second = _Stream(captured=True), _Stream(captured=True)

    def claimed(stream: _Stream) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        monkeypatch.setattr(symmetric_memory.graph_capture, "capturing", lambda: stream.captured)
        buffer.claim()

    for stream in (eager, first, second, other):
        claimed(stream)
    assert (eager.waits, first.waits, second.waits, other.waits) == ([], [], [first], [eager])
    second.captured = False  # its capture has ended
    later = _Stream(captured=True)
    claimed(later)
    assert later.waits == []


def _rows(rank: int, k: int, dtype: torch.dtype) -> Tensor:
    x = drawn(int(COUNTS[rank].sum()), k, seed=rank)
    return (x * torch.logspace(-3, 3, x.shape[0])[:, None]).to(dtype)


def _rounded(x: Tensor) -> Tensor:
    data, scale = reference.quantize(x, (1, 128), torch.float8_e4m3fn, "pow2")
    return reference.dequantize(data, scale, (1, 128)).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "k"),
    [(torch.bfloat16, 1), (torch.bfloat16, 256), (torch.bfloat16, 4224), (torch.float16, 300), (torch.float32, 100)],
    ids=lambda value: str(value),
)
def test_rows_come_by_expert_and_go_back(dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, pulls: ByPulls) -> tuple[Tensor, Tensor, Tensor]:
        rows = pulls.to_experts(_rows(rank, k, dtype))
        return pulls.offsets, rows, pulls.to_rows(rows.mT.contiguous().mT)

    sent = [_rounded(_rows(rank, k, dtype)) for rank in range(3)]
    parts = [list(rows.split(of_rank)) for rows, of_rank in zip(sent, COUNTS.tolist(), strict=True)]
    for rank, (offsets, rows, back) in enumerate(_on_ranks(COUNTS, run, monkeypatch)):
        experts = [torch.cat([part[expert] for part in parts]) for expert in (2 * rank, 2 * rank + 1)]
        assert offsets.dtype == torch.int32
        assert offsets.tolist() == [len(experts[0]), len(experts[0]) + len(experts[1])]
        assert torch.equal(rows, torch.cat([*experts, rows.new_zeros(CAPACITY - offsets[-1], k)]))
        assert torch.equal(back, sent[rank])


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm89", "sm100", "sm120"])
def test_the_kernel_compiles_for_other_targets(name: str) -> None:
    named = targets.named_target(name)
    assert named is not None
    _, target = named
    places = Places(torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int64), torch.zeros(()))
    for dtype in (targets.native_e4m3(target), torch.float16):
        source = Source(torch.zeros(2, dtype=torch.int64), dtype, 4800 if dtype.itemsize == 1 else 0)
        compiled = plan_pull_rows(source, places, torch.empty(9, 300, dtype=torch.float16), target).compile()
        assert compiled.asm


@pytest.mark.parametrize(
    "counts",
    [COUNTS + torch.tensor([[0] * 6, [0] * 6, [0, 0, 0, 0, 0, 1]]), COUNTS - torch.tensor([[4, -4, 0, 0, 0, 0]])],
    ids=["too many", "negative"],
)
def test_wrong_counts_give_nan_on_all_ranks(counts: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, pulls: ByPulls) -> tuple[Tensor, Tensor]:
        assert pulls.offsets.tolist() == [0, 0]
        return pulls.to_experts(_rows(rank, 256, torch.bfloat16)), pulls.to_rows(torch.zeros(CAPACITY, 8))

    for rows, back in _on_ranks(counts, run, monkeypatch):
        assert rows.isnan().all()
        assert back.isnan().all()


def test_more_rows_than_a_rank_may_receive_give_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.zeros_like(COUNTS)
    counts[:, 0] = COUNTS.sum(1)  # 25 rows for one expert
    assert counts.sum() > CAPACITY
    for rows in _on_ranks(counts, lambda rank, pulls: pulls.to_experts(_rows(rank, 8, torch.float32)), monkeypatch):
        assert rows.isnan().all()


def test_nan_and_inf_stay_in_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, pulls: ByPulls) -> Tensor:
        x = _rows(rank, 384, torch.bfloat16)
        x[:, 3], x[:, 200] = torch.nan, torch.inf
        return pulls.to_experts(x)[: pulls.offsets[-1]]

    for rows in _on_ranks(COUNTS, run, monkeypatch):
        assert rows[:, :128].isnan().any(1).all()
        assert not rows[:, 128:256].isfinite().all(1).any()
        assert rows[:, 256:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_largest_numbers_stay_finite(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = torch.finfo(dtype).max

    def run(rank: int, pulls: ByPulls) -> Tensor:
        x = torch.full((int(COUNTS[rank].sum()), 384), largest, dtype=dtype)
        x[:, 0], x[:, 128] = -largest, torch.nan
        return pulls.to_experts(x)[: pulls.offsets[-1]]

    for rows in _on_ranks(COUNTS, run, monkeypatch):
        assert len(rows)
        assert (rows[:, 0] == -largest).all()
        assert (rows[:, 1:128] == largest).all()
        assert rows[:, 128:256].isnan().all()
        assert (rows[:, 256:] == largest).all()
