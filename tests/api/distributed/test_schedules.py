"""Pipelines and DDP on two processes of a CPU, against one process on the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from support.processes import run_processes

RANKS, MICRO_BATCHES = 2, 4
OPTIONS = {"where": "*"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(256), nn.Linear(256, 512), nn.Linear(512, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return out


def _blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def _in_fp8(block: nn.Module, compiled: bool) -> None:
    if compiled:
        block.compile(backend="fp8fn", options=OPTIONS)
    else:
        block.forward = fp8fn.fp8(block.forward)  # type: ignore[method-assign]


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _pipeline(schedule: str, places: Callable[[int, int], list[int]], *, compiled: bool) -> None:
    """The losses and the gradients of each stage have the bits of one process."""
    from torch.distributed import pipelining

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, target = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1))
    mine = places(dist.get_rank(), RANKS)
    count = RANKS * len(mine)
    whole, expected = _blocks(count), []
    for block in whole:
        _in_fp8(block, compiled)
    for part, wanted in zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
        y = part
        for block in whole:
            y = block(y)
        loss = _loss(y, wanted)
        (loss / MICRO_BATCHES).backward()
        expected.append(loss.detach())

    blocks, stages = _blocks(count), []
    for place in mine:
        _in_fp8(blocks[place], compiled)
        stages.append(pipelining.PipelineStage(blocks[place], place, count, torch.device("cpu")))
    made: Any = getattr(pipelining, f"Schedule{schedule}")
    losses: list[Tensor] = []
    given: dict[str, Any] = {"target": target, "losses": losses} if count - 1 in mine else {}
    runs = made(stages[0] if len(mine) == 1 else stages, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    runs.step(*((x,) if 0 in mine else ()), **given)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == compiled
    if given:
        assert torch.equal(torch.stack(losses), torch.stack(expected))
    for place in mine:
        for found, wanted in zip(blocks[place].parameters(), whole[place].parameters(), strict=True):
            assert found.grad is not None
            assert wanted.grad is not None
            assert torch.equal(found.grad, wanted.grad)


def _ddp(*, static_graph: bool = False, compiled_autograd: bool = False) -> None:
    """Three steps, of which DDP rebuilds its buckets in the first; each rank quantizes its own tokens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parts = torch.randn(RANKS, 64, 256, generator=torch.Generator().manual_seed(1))
    whole, model = nn.Sequential(*_blocks(2)), nn.Sequential(*_blocks(2))
    alone = torch.compile(whole, backend="fp8fn", options=OPTIONS)
    reducer = "python_reducer" if compiled_autograd else "ddp_optimizer"
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd, optimize_ddp=reducer):
        replica = nn.parallel.DistributedDataParallel(model, static_graph=static_graph)
        forward = replica if compiled_autograd else torch.compile(replica, backend="fp8fn", options=OPTIONS)

        def step(x: Tensor) -> None:
            forward(x).square().mean().backward()

        train = torch.compile(step, backend="fp8fn", options=OPTIONS) if compiled_autograd else step
        for _ in range(3):
            for parameter in (*whole.parameters(), *model.parameters()):
                parameter.grad = None
            train(parts[dist.get_rank()])
            with torch._dynamo.config.patch(compiled_autograd=False):
                for part in parts:
                    (alone(part).square().mean() / RANKS).backward()
            for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert bool(torch._dynamo.utils.counters["compiled_autograd"]["captures"]) == compiled_autograd


def _in_turn(rank: int, ranks: int) -> list[int]:
    return [rank, rank + ranks]


def _as_a_v(rank: int, ranks: int) -> list[int]:
    return [rank, 2 * ranks - 1 - rank]


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    try:
        _pipeline("GPipe", lambda rank, _: [rank], compiled=True)
        _pipeline("1F1B", lambda rank, _: [rank], compiled=True)
        _pipeline("Interleaved1F1B", _in_turn, compiled=True)
        # These run the halves of a backward apart. No backend of PyTorch compiles that, and PyTorch 2.11 cannot for any
        # derivative that torch.library registers.
        if torch.__version__ >= "2.13":
            _pipeline("InterleavedZeroBubble", _in_turn, compiled=False)
            _pipeline("ZBVZeroBubble", _as_a_v, compiled=False)
        _ddp()
        _ddp(static_graph=True)
        _ddp(compiled_autograd=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path) -> None:
    run_processes(_run, (str(tmp_path / "store"),), RANKS)
