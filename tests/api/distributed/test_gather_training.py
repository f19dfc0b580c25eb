"""FSDP2 with FP8 gathers as training loops use it, on four processes of a CPU or four GPUs, against one process.

Embeddings that are tied to a head, gradients that are not reduced at each micro-batch, norms of gradients, parameters
that are frozen on the way, and replicas of shards: losses are those of one process, and bytes those of whole weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn.distributed import gather_fp8, update_scales
from fp8fn.ops import reference
from support.gathers import counted_gathers, has_whole_bits
from support.processes import DEVICES, drawn, mesh_of, only_pytorch_may_warn, process_group, run_processes, skip_without

RANKS, STEPS, WORDS, WIDTH, ROWS = 4, 3, 304, 256, 309
FROZEN = "blocks.0.up.weight", "blocks.1.up.bias", "embed.weight"  # in the second step


class Rounded(torch.autograd.Function):
    """The values that FP8 stands for; the gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        data, scale = reference.quantize(weight, (128, 128), torch.float8_e4m3fn, "fp32")
        return reference.dequantize(data, scale, (128, 128)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.checkpointed = nn.RMSNorm(WIDTH), checkpointed
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH, bias=False)
        self.mlp: Callable[[Tensor], Tensor] = fp8fn.fp8(lambda x: self.down(F.silu(self.up(self.norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.checkpointed else self.mlp(x))


class Words(nn.Module):
    """A model of words whose table is that of its head, in FP8 in both places."""

    def __init__(self, *, gathers: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.gathers = gathers
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(checkpointed=checkpointed) for _ in range(2)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=1 / 16)
        self.product: Callable[[Tensor], Tensor] = fp8fn.fp8(lambda x: self.head(x))

    def forward(self, words: Tensor) -> Tensor:
        table = self.embed.weight
        x = self.embed(words) if self.gathers else F.embedding(words, Rounded.apply(table))
        return self.product(self.blocks(x))


class Case(NamedTuple):
    options: Callable[[], dict[str, Any]] = dict
    micro_batches: int = 1
    sync: Callable[[Any, bool], None] = lambda model, last: None  # before a micro-batch, the last one or another
    clip: float | None = None
    freezes: bool = False
    checkpointed: bool = False


def _hybrid() -> dict[str, Any]:
    return {"mesh": mesh_of(2, RANKS // 2, names=("replicate", "shard"))}


def _reduced_at_the_end(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def _gathered_once(model: Any, last: bool) -> None:
    """Weights stay gathered from the first micro-batch to the last one."""
    _reduced_at_the_end(model, last)
    model.set_reshard_after_backward(last)


def _summed_over_replicas_at_the_end(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


CASES = {
    "tied": Case(),
    "checkpointed": Case(checkpointed=True),
    "reduced at the end": Case(micro_batches=2, sync=_reduced_at_the_end),
    "gathered once": Case(lambda: {"reshard_after_forward": False}, micro_batches=2, sync=_gathered_once),
    "clipped": Case(clip=0.1),
    "frozen": Case(freezes=True),
    "frozen, reduced at the end": Case(micro_batches=2, sync=_reduced_at_the_end, freezes=True),
    "hybrid": Case(_hybrid, clip=0.1),
    "hybrid, summed at the end": Case(_hybrid, micro_batches=2, sync=_summed_over_replicas_at_the_end, freezes=True),
}


def _loss(model: nn.Module, step: int, number: int) -> Tensor:
    words = (drawn(32, seed=100 * step + number) * 100).long() % WORDS
    return F.cross_entropy(model(words), words.roll(1))


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return whole.detach() + 0


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]


def _trained(model: Any, case: Case, *, sharded: bool) -> Trained:
    """The losses of all ranks' micro-batches, and the norms of gradients before they are clipped."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parameters = dict(model.named_parameters())
    per_rank = case.micro_batches
    first = dist.get_rank() * per_rank if sharded else 0
    count = per_rank if sharded else RANKS * per_rank
    found = Trained([], [])
    for step in range(STEPS):
        if case.freezes:
            for name in FROZEN:
                parameters[name].requires_grad_(step != 1)
        before = [_whole(parameters[name]) for name in FROZEN]
        total = torch.zeros(())
        for number in range(first, first + count):
            if sharded:
                case.sync(model, number == first + count - 1)
            loss = _loss(model, step, number) / count  # FSDP has the mean of the ranks' gradients
            loss.backward()
            total += loss.detach()
        if sharded:
            dist.all_reduce(total)
            total /= RANKS
        if case.clip is not None:
            norm: Any = clip_grad_norm_(model.parameters(), case.clip)
            found.norms.append((norm.full_tensor() if sharded else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if sharded:
            update_scales(model)
        found.losses.append(total.item())
        changed = [not torch.equal(_whole(parameters[name]), old) for name, old in zip(FROZEN, before, strict=True)]
        assert changed == [not case.freezes or step != 1] * len(FROZEN)
    return found


def _same_training(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    one = Words(gathers=False)
    model = Words(gathers=True, checkpointed=case.checkpointed)
    model.load_state_dict(one.state_dict())
    expected = _trained(one, case, sharded=False)
    assert gather_fp8(model, "*").quantized == (
        "embed.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight",
        "head.weight",
    )  # fmt: skip
    options = case.options()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    update_scales(model)
    with counted_gathers() as counts:
        found = _trained(model, case, sharded=True)
    assert counts["quantized"] == STEPS * 5  # whatever the number of micro-batches
    assert counts["dequantized"] == STEPS * case.micro_batches  # the rows that words take from the table
    assert counts["bytes"] == counts["gathered"] > 0
    # On a GPU other kernels, which sum in another order, take weights that lie otherwise, as gathered ones may.
    close = 1e-4 if one.head.weight.is_cuda else 1e-6
    assert found.losses == pytest.approx(expected.losses, rel=close), name
    assert found.norms == pytest.approx(expected.norms, rel=10 * close), name
    assert has_whole_bits(model) == 5
    assert model.head.weight is model.embed.weight
    for (kept, parameter), other in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(_whole(parameter), other.detach(), rtol=0, atol=100 * close, msg=f"{name}: {kept}")


def _run(rank: int, device: str, folder: str) -> None:
    only_pytorch_may_warn()
    with process_group(device, rank, RANKS, f"{folder}/store"):
        for name in CASES:
            _same_training(name)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@DEVICES
def test_four_processes(device: str, tmp_path: Path) -> None:
    """All cases in one group of processes: starting them takes longer than the cases."""
    skip_without(device, RANKS)
    run_processes(_run, (device, str(tmp_path)), RANKS)
