"""Models wrapped as training code wraps them, compiled by the backend: checkpointing, autocast, DDP, FSDP2."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8fn
from support.accuracy import relative_error
from support.processes import run_processes

K = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, 2 * K, bias=False), nn.Linear(2 * K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """Two blocks; `checkpointed` ones are computed again in the backward."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(64, K, generator=torch.Generator().manual_seed(seed))


def loss(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return module(x).float().square().mean()


def gradients(module: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    module.zero_grad()
    loss(compiled, x).backward()
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.clone())
    return found


def test_checkpointing_gives_the_same_gradients(fresh_dynamo: None) -> None:
    """But for the rounding of activations, which Inductor computes in another order: a byte of FP8 here and there."""
    plain, checkpointed = model(), model(checkpointed=True)
    expected = gradients(plain, torch.compile(plain, backend="fp8fn", options={"where": "*"}), tokens())
    actual = gradients(checkpointed, torch.compile(checkpointed, backend="fp8fn", options={"where": "*"}), tokens())
    for got, want in zip(actual, expected, strict=True):
        assert relative_error(got, want) < 1e-2


def test_autocast_decides_the_result_type(fresh_dynamo: None) -> None:
    module = model()
    compiled = torch.compile(module.blocks[0].up, backend="fp8fn", options={"where": "*"})
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(tokens())
    assert out.dtype == torch.bfloat16
    assert 1e-3 < relative_error(out, module.blocks[0].up(tokens())) < 5e-2


@pytest.mark.parametrize(("keep_weights", "quantized"), [(True, 1), (False, 2)])
def test_tied_weights_are_quantized_once(keep_weights: bool, quantized: int, fresh_dynamo: None) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    counts: dict[str, int] = {}

    class Counting(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                if "fp8fn" in str(node.target):
                    counts[str(node.target)] = counts.get(str(node.target), 0) + 1

        def uuid(self) -> None:
            return None

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(K, K) / K**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(x, self.weight)), self.weight)

    with torch._inductor.config.patch(post_grad_custom_post_pass=Counting(), fx_graph_cache=False):
        module = Tied()
        options = {"where": "*", "recipe": fp8fn.Recipe(keep_weights=keep_weights)}
        gradients(module, torch.compile(module, backend="fp8fn", options=options), tokens().requires_grad_())
    # Twice x and g in both orientations. The weight, whose square blocks serve both orientations, is quantized once for
    # its two products of the forward, and if it is not kept, once for those of the backward.
    assert counts == {
        "fp8fn.quantize_dual.default": 4, "fp8fn.quantize.default": quantized, "fp8fn.scaled_mm.default": 6,
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process_group(rank: int, size: int, port: int) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def expected_gradients() -> list[Tensor]:
    """Gradients of the mean over both ranks' tokens; each rank quantizes its own alone."""
    module = model()
    compiled = torch.compile(module, backend="fp8fn", options={"where": "*"})
    each = [gradients(module, compiled, tokens(seed)) for seed in (1, 2)]
    return [(a + b) / 2 for a, b in zip(*each, strict=True)]


def _ddp(rank: int, size: int, port: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    with process_group(rank, size, port):
        module = DistributedDataParallel(model())
        actual = gradients(module, torch.compile(module, backend="fp8fn", options={"where": "*"}), tokens(rank + 1))
        for got, want in zip(actual, expected_gradients(), strict=True):
            assert relative_error(got, want) < 1e-6


def _fsdp(rank: int, size: int, port: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(rank, size, port):
        module = model()
        before = copy.deepcopy(module)
        mesh = init_device_mesh("cpu", (size,))
        for block in module.blocks:
            block.compile(backend="fp8fn", options={"where": "*"})
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        actual = gradients(module, module, tokens(rank + 1))
        for got, want in zip(actual, expected_gradients(), strict=True):
            assert relative_error(got.full_tensor(), want) < 1e-6  # type: ignore[attr-defined]
        assert len(list(before.parameters())) == len(actual)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [_ddp, _fsdp], ids=["ddp", "fsdp2"])
def test_two_processes(wrap: Callable[[int, int, int], None]) -> None:
    run_processes(wrap, (2, _free_port()), 2)


def test_explain_looks_into_checkpointed_regions(fresh_dynamo: None) -> None:
    import fp8fn

    rows = fp8fn.explain(model(checkpointed=True), tokens(), where="*", show=False).rows
    assert [row.weight for row in rows] == [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]
    assert all(row.reason is None for row in rows)
