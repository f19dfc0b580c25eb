"""Expert parallelism with FP8 on the wire, on two processes of a CPU or two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import fp8fn
from fp8fn.distributed import combine, dispatch
from fp8fn.distributed.exchange import ByCollective, ByPulls
from fp8fn.distributed.experts import Routing
from fp8fn.ops import reference
from support.accuracy import snr
from support.processes import DEVICES, drawn, mesh_of, process_group, run_processes, skip_without

RANKS, EXPERTS, K, N = 2, 4, 300, 128
COUNTS = torch.tensor([[3, 0, 40, 7], [1, 0, 0, 25]])  # of each rank; nobody has rows for expert 1
EMPTY = {
    "rank 0 sends nothing": torch.tensor([[0, 0, 0, 0], [9, 0, 17, 0]]),
    "rank 1 receives nothing": torch.tensor([[3, 8, 0, 0], [0, 20, 0, 0]]),
    "rank 1 sends and receives nothing": torch.tensor([[3, 8, 0, 0], [0, 0, 0, 0]]),
    "no rows": torch.zeros(2, 4, dtype=torch.int64),
}


def _rounded(x: Tensor) -> Tensor:
    data, scale = reference.quantize(x, (1, 128), torch.float8_e4m3fn, "pow2")
    return reference.dequantize(data, scale, (1, 128)).to(x.dtype)


def _rows(rank: int, counts: Tensor = COUNTS) -> Tensor:
    x = drawn(int(counts[rank].sum()), K, seed=rank)
    return (x * torch.logspace(-3, 3, x.shape[0])[:, None]).bfloat16()


def _by_expert(of_ranks: list[Tensor], counts: Tensor, experts: range) -> list[Tensor]:
    parts = [list(x.split(of_rank.tolist())) for x, of_rank in zip(of_ranks, counts, strict=True)]
    return [torch.cat([of_rank[expert] for of_rank in parts]) for expert in experts]


def _case(rank: int, capacity: int | None = None, counts: Tensor = COUNTS) -> None:
    """Rows, results and gradients are those of one process that has all experts."""
    sent, pulled = 0, capacity is not None and torch.get_default_device().type == "cuda"
    plain = dist.all_to_all_single

    def counted(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += rows.numel() * rows.element_size() if rows.dtype == torch.uint8 else 0
        return plain(out, rows, *args, **kwargs)

    x, mine = _rows(rank, counts).requires_grad_(), range(rank * 2, rank * 2 + 2)
    dist.all_to_all_single = counted
    try:
        rows, routing = dispatch(x, counts[rank].to(x.device), capacity=capacity)
        assert sent <= 0.55 * x.numel() * 2
        expected = _by_expert([_rounded(_rows(each, counts)) for each in range(RANKS)], counts, mine)
        received = len(torch.cat(expected))
        assert torch.equal(rows[:received], torch.cat(expected))
        assert rows.shape[0] == (received if capacity is None else capacity)
        assert not rows[received:].count_nonzero()
        assert isinstance(routing.exchange, ByPulls if pulled else ByCollective)
        assert routing.offsets.tolist() == torch.tensor([len(each) for each in expected]).cumsum(0).tolist()

        torch.manual_seed(9)
        weights = torch.randn(EXPERTS, K, N).bfloat16()
        own = weights[mine.start : mine.stop].requires_grad_()
        y = fp8fn.grouped_gemm(rows, own, routing.offsets, recipe="blockwise_pow2")
        out = combine(y, routing, width=N)
        whole = _rows(rank, counts).requires_grad_()
        ends = counts[rank].cumsum(0).to(x.device, torch.int32)
        one = fp8fn.grouped_gemm(whole, weights, ends, recipe="blockwise_pow2")
        assert torch.equal(out, one)  # dispatched rows are not rounded again

        sent = 0
        grad = drawn(*out.shape, seed=5 + rank).bfloat16()
        out.backward(grad)
        one.backward(grad)
        assert (sent == 0) if pulled else (sent <= 0.55 * grad.numel() * 2)
        assert (sent > 0) == (not pulled and grad.numel() > 0)
        assert x.grad is not None
        assert whole.grad is not None
        assert x.grad.shape == whole.grad.shape
        assert not x.grad.numel() or snr(x.grad, whole.grad) > 60
        assert own.grad is not None
        assert own.grad.count_nonzero((1, 2)).bool().tolist() == [len(each) > 0 for each in expected]
    finally:
        dist.all_to_all_single = plain


def _errors(rank: int) -> None:
    same = torch.randn(4, K)
    _, routing = dispatch(same, torch.tensor([4, 0, 0, 0]))
    with pytest.raises(ValueError, match="combine: y has 1 rows, and dispatch returned"):
        combine(torch.zeros(1, N), routing)
    with pytest.raises(TypeError, match="combine: routing is a tuple; pass the Routing that dispatch returned"):
        combine(same, (same, routing))  # type: ignore[arg-type]
    for group in ("world", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match=r"dispatch: group is .*; pass a ProcessGroup that has this rank"):
            dispatch(same, torch.tensor([4, 0, 0, 0]), group)
    with pytest.raises(TypeError, match="combine: y has dtype"):
        combine(torch.zeros(routing.exchange.rows, N).to(torch.float8_e4m3fn), routing)
    with pytest.raises(ValueError, match=r"combine: y has shape \(\d+, 2, 128\)"):
        combine(torch.zeros(routing.exchange.rows, 2, N), routing)
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int8, torch.int16):
        for capacity in (None, 4):
            with pytest.raises(TypeError, match=rf"dispatch: counts has dtype {dtype}; use int32 or int64"):
                dispatch(same, torch.tensor([1, 1, 1, 1], dtype=dtype), capacity=capacity)
    with pytest.raises(TypeError, match=r"dispatch: x has dtype torch\.float64"):
        dispatch(same.double(), torch.tensor([4, 0, 0, 0]))
    with pytest.raises(ValueError, match="counts of rank 1 sum to 1 rows more than x has"):  # on all ranks
        dispatch(same, torch.tensor([4, 0, 0, rank]))
    with pytest.raises(ValueError, match="counts of rank 1 sum to 2 rows fewer than x has"):
        dispatch(same, torch.tensor([4 - 2 * rank, 0, 0, 0]))
    placed: Any = DTensor.from_local(same, mesh_of(), [Shard(0)])
    with pytest.raises(TypeError, match=r"dispatch: x is a DTensor; pass what this rank has of it, x\.to_local\(\)"):
        dispatch(placed, torch.tensor([4, 0, 0, 0]))
    with pytest.raises(TypeError, match="dispatch: counts is a DTensor"):
        dispatch(same, DTensor.from_local(torch.tensor([4, 0, 0, 0]), mesh_of(), [Replicate()]))
    with pytest.raises(TypeError, match="combine: y is a DTensor"):
        combine(placed, routing)
    _other_results(same.bfloat16())
    _other_experts(rank, same)
    _other_capacities(rank, same)
    for different, named in ((torch.randn(4, K + rank), 301), (same.to((torch.bfloat16, torch.float16)[rank]), 300)):
        message = rf"dispatch: rank 1 has counts of 4 experts and x of width {named} in torch\.float\d\d, and rank 0 "
        with pytest.raises(ValueError, match=message):  # on all ranks
            dispatch(different, torch.tensor([0, 1, 3, 0]))
    with pytest.raises(ValueError, match="a multiple of the 2 ranks"):
        dispatch(same, torch.tensor([4, 0, 0]))
    for capacity in (None, 4):
        with pytest.raises(ValueError, match=r"dispatch: x has shape \(1, 4, 300\); it must be \(T, K\)"):
            dispatch(same[None], torch.tensor([1, 0, 0, 0]), capacity=capacity)
    if same.is_cuda:
        with pytest.raises(ValueError, match="x has 4 rows, and capacity is 3"):
            dispatch(same, torch.tensor([4, 0, 0, 0]), capacity=3)
    else:
        with pytest.raises(ValueError, match="rank 1 would send 4 rows, and capacity is 3"):  # on all ranks
            dispatch(same[: 2 + 2 * rank], torch.tensor([1, 0, 1, 2 * rank]), capacity=3)


def _other_results(x: Tensor) -> None:
    """Each rank knows by its own routing, and by what it is told, whether the others would wait for other bytes."""
    for capacity in (None, 8):
        rows, routing = dispatch(x, torch.tensor([1, 0, 3, 0]), capacity=capacity)
        narrow = rows[:, :N].contiguous()
        with pytest.raises(ValueError, match=r"y has 128 columns, and x of dispatch had 300; .* give width=128 on all"):
            combine(narrow, routing)
        with pytest.raises(ValueError, match="y has 300 columns, and width=128; make it as wide"):
            combine(rows, routing, width=N)
        message = r"y has dtype torch\.float32, and x of dispatch had torch\.bfloat16; pass y\.to\(torch\.bfloat16\)"
        with pytest.raises(TypeError, match=message):
            combine(rows.float(), routing)
        with pytest.raises(
            TypeError, match=r"dtype=torch\.float32; pass y\.to\(torch\.float32\), or give dtype=torch\.bf"
        ):
            combine(rows, routing, dtype=torch.float32)
        out = combine(narrow.float(), routing, width=N, dtype=torch.float32)
        assert out.dtype == torch.float32
        assert torch.equal(out, _rounded(x)[:, :N].float())


def _other_experts(rank: int, x: Tensor) -> None:
    """Numbers of experts that differ raise an error on all ranks, also those that are no multiple of the ranks."""
    for own, other in ((4, 8), (8, 4), (4, 5), (5, 4), (2, 500)):
        counts = torch.zeros(other if rank else own, dtype=torch.int64)
        counts[0] = 4
        for capacity in (None, 8):
            message = f"dispatch: rank 1 has counts of {other} experts and x of .* and rank 0 counts of {own} experts"
            with pytest.raises(ValueError, match=message):
                _dispatched_by_host(x, counts, capacity)


def _other_capacities(rank: int, x: Tensor) -> None:
    """One rank alone has a capacity, or another one."""
    for capacities in ((None, 8), (8, None), (8, 9)):
        shown = str(list(capacities)).replace("[", r"\[")
        with pytest.raises(ValueError, match=rf"dispatch: ranks have capacity {shown}; give one number to all of them"):
            _dispatched_by_host(x, torch.tensor([1, 0, 3, 0]), capacities[rank])


def _dispatched_by_host(x: Tensor, counts: Tensor, capacity: int | None) -> None:
    """On GPUs too all ranks raise at the first call of a group, before they agree whether they read each other."""
    group = dist.new_group() if x.is_cuda else None
    dispatch(x, counts, group, capacity=capacity)


def _wrong_counts(rank: int, pulled: bool) -> None:
    """Known to the host, or to be seen in the results of all ranks."""
    same = torch.randn(4, K)
    typed = same.to((torch.bfloat16, torch.float16)[rank])
    for x, counts, message in (
        (same, [4, 0, 0, rank], "counts of rank 1 sum to"),
        (same, [5, 0, 0, -1], "counts of rank 0 have a negative number"),
        (same, [0, 4, 0, 0], "rank 0 would receive 8 rows, and capacity is 6"),
        (same, [0, 2, 2, 0], r"ranks have capacity \[6, 7\]"),
        (typed, [0, 2, 2, 0], r"x of width 300 in torch\.float16, and rank 0 .* in torch\.bfloat16"),
        (torch.randn(4, K + rank), [0, 2, 2, 0], "x of width 301 in .*, and rank 0 .* 300"),
    ):
        capacity = 6 + rank * ("capacity \\[" in message)
        if not pulled:
            with pytest.raises(ValueError, match=message):
                dispatch(x, torch.tensor(counts), capacity=capacity)
            continue
        rows, routing = dispatch(x, torch.tensor(counts), capacity=capacity)
        rows = rows[:6]
        assert rows.shape == (6, x.shape[1])
        assert rows.isnan().all()
        assert combine(torch.zeros(capacity, x.shape[1], dtype=x.dtype), routing).isnan().all()
    rows, routing = dispatch(same, torch.tensor([0, 3, 0, 1]), capacity=6)
    assert rows[:6].isfinite().all()  # and later calls are right


def _bits_beyond_numbers(rank: int) -> None:
    x = torch.randn(2, K)
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    rows, _ = dispatch(x, torch.tensor([1, 0, 1, 0]))
    assert rows[:, :128].isnan().all() if rank == 0 else rows[:, 128:256].isnan().any()
    assert rows[:, 256:].isfinite().all()


def _largest(dtype: torch.dtype) -> None:
    """FP8 rounds the largest numbers of a type beyond it; rows and gradients stay finite and keep their FP8 bits."""
    largest = torch.finfo(dtype).max
    for k in (K, 256):
        x = (torch.linspace(-1, 1, 4 * k).view(4, k) * largest).to(dtype)
        x[1, 0], x[2, 0] = torch.inf, torch.nan
        rows, routing = dispatch(x, torch.tensor([2, 0, 2, 0]))
        out = combine(rows, routing)
        for found in (out, _gradient_of_combine(x, routing)):
            assert found.dtype == dtype
            assert found[[0, 3]].isfinite().all()
            assert found[1:3, :128].isnan().all()
            assert found[1:3, 128:].isfinite().all()
            assert (found[0, 0], found[3, -1]) == (-largest, largest)
            for one, other in zip(*(_quantized(y) for y in (found[[0, 3]], x[[0, 3]])), strict=True):
                assert torch.equal(one.float(), other.float())


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.quantize(x, (1, 128), torch.float8_e4m3fn, "pow2")


def _gradient_of_combine(grad: Tensor, routing: Routing) -> Tensor:
    """The rows that the backward sends to the experts, sent back."""
    y = torch.zeros(routing.exchange.rows, grad.shape[1], dtype=grad.dtype).requires_grad_()
    combine(y, routing).backward(grad)
    assert y.grad is not None
    return combine(y.grad, routing)


def _whole_blocks(dtype: torch.dtype) -> None:
    """The bits of float32's products, of values that become subnormal too."""
    x = (drawn(64, 256, seed=3) * torch.logspace(-38, 3 if dtype == torch.float16 else 38, 64)[:, None]).to(dtype)
    rows, _ = dispatch(x, torch.tensor([32, 0, 32, 0]))
    half = _rounded(x)[:32] if dist.get_rank() == 0 else _rounded(x)[32:]
    assert torch.equal(rows, half.repeat(2, 1))


def _compiled() -> None:
    """Dynamo leaves the graph where the host waits for the counts; Inductor compiles what is before and behind."""
    x, counts = drawn(6, 256, seed=4), torch.tensor([2, 2, 1, 1])

    def sent(x: Tensor) -> Tensor:
        rows, routing = dispatch(x, counts)
        return combine(rows * 2, routing)

    assert torch.equal(torch.compile(sent)(x), sent(x))


def _captured(rank: int) -> None:
    """A graph sends other rows to other experts than the ones that it was captured with; nothing waits on the host."""
    counts, x = COUNTS[rank].cuda(), torch.zeros(60, K).bfloat16()
    x[: counts.sum()] = _rows(rank)
    counts[-1] += 60 - counts.sum()

    def step() -> tuple[Tensor, Tensor]:
        rows, routing = dispatch(x, counts, capacity=120)
        return rows, combine(rows * 2, routing)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            rows, out = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for shift in (0, 1, 2):
        counts.copy_(counts.roll(shift))
        x.copy_(x.roll(shift, 0))
        graph.replay()
        assert torch.equal(out, _rounded(x) * 2)
        assert torch.equal(rows, step()[0])


def _run(rank: int, device: str, folder: str) -> None:
    with process_group(device, rank, RANKS, f"{folder}/store"):
        pulled = device == "cuda"
        _case(rank)
        _case(rank, capacity=80)
        for counts in EMPTY.values():
            _case(rank, counts=counts)
            _case(rank, capacity=40, counts=counts)
        _errors(rank)
        _wrong_counts(rank, pulled)
        if pulled:
            _captured(rank)
        _bits_beyond_numbers(rank)
        _compiled()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            _whole_blocks(dtype)
            _largest(dtype)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@DEVICES
def test_two_processes(device: str, tmp_path: Path) -> None:
    skip_without(device, RANKS)
    run_processes(_run, (device, str(tmp_path)), RANKS)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_results_of_autocast_are_combined(tmp_path: Path) -> None:
    """Products make them of its type on all ranks, of rows in float32."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        x, w = torch.randn(5, 256), torch.randn(2, 256, 256)
        rows, routing = dispatch(x, torch.tensor([2, 3]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fp8fn.grouped_gemm(rows, w, routing.offsets, recipe="blockwise_pow2")
            assert y.dtype == torch.bfloat16
            assert torch.equal(combine(y, routing), y)
            assert torch.equal(combine(rows, routing), rows)
        with pytest.raises(TypeError, match=r"y has dtype torch\.bfloat16, and x of dispatch had torch\.float32"):
            combine(y, routing)
    finally:
        dist.destroy_process_group()
