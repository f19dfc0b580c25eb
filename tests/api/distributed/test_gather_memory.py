"""The memory that a step of FSDP2 with FP8 gathers takes and gives back: all of it, on a rank of a group of 8.

PyTorch's profiler counts the bytes. The other ranks send nothing: numbers are no results.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn.distributed import gather_fp8, update_scales
from support.ranks import a_rank_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

RANKS, TOKENS, WIDTH, ROWS = 8, 8, 256, 512
WEIGHT = WIDTH * ROWS  # bytes in FP8; two weights in each of two blocks
ACTIVATIONS = TOKENS * WIDTH * 4  # bytes of a block's input


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.checkpointed = nn.RMSNorm(WIDTH), checkpointed
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.mlp, x, use_reentrant=False, preserve_rng_state=False)
        return x + self.mlp(x)


class Held(NamedTuple):
    """Bytes that are allocated and not given back: between the forward and the backward, and after both."""

    between: int
    after: int


def _allocated(run: Callable[[], Any]) -> tuple[Any, int]:
    gc.collect()  # the tensors that other tests left in cycles would be given back within
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        out = run()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return out, sum(event.nbytes() for event in events if event.name() == "[memory]")


def _step(kind: str, *, checkpointed: bool, reshards: bool = True) -> Held:
    """The third step of a model, whose first ones make what later ones keep."""
    with a_rank_of(RANKS, 0):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(checkpointed=checkpointed) for _ in range(2)))
        if kind != "unquantized":
            assert len(gather_fp8(model).quantized) == 4
        for block in model:
            if kind == "compiled":
                block.compile(backend="fp8fn", options={"where": "*"})
            elif kind == "eager":
                block.mlp = fp8fn.fp8(block.mlp)
            fully_shard(block, reshard_after_forward=reshards)
        fully_shard(model)
        x = torch.randn(TOKENS, WIDTH)
        for _ in range(3):
            if kind != "unquantized":
                update_scales(model)
            loss, between = _allocated(lambda: model(x).square().mean())
            _, backward = _allocated(loss.backward)
            gradients = sum(p.grad.to_local().nbytes for p in model.parameters())  # type: ignore[union-attr]
            model.zero_grad()
        return Held(between, between + backward - gradients - loss.nbytes)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_activations_alone_are_held_for_the_backward(kind: str, checkpointed: bool) -> None:
    """No more than without FP8, which is less than one weight: none is held, nor its bytes in another order."""
    exact = _step("unquantized", checkpointed=checkpointed)
    held = _step(kind, checkpointed=checkpointed)
    assert 0 < held.between <= exact.between < WEIGHT
    assert held.after == exact.after == 0
    if checkpointed:
        assert held.between <= 2 * ACTIVATIONS + 1024  # the outputs of two blocks, the loss and small numbers


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_weights_that_stay_gathered_are_held_in_fp8(kind: str) -> None:
    resharded, kept = (_step(kind, checkpointed=False, reshards=reshards) for reshards in (True, False))
    others = 2 * 4 * (ROWS + WIDTH)  # biases and norms, which are gathered in float32
    assert 0 <= kept.between - resharded.between - 4 * WEIGHT <= others
    assert kept.after == resharded.after == 0
