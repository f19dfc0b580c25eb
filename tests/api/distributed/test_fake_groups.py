"""A step's collectives on groups of up to 10,000 ranks, which send nothing, by the formulas of docs/distributed.md."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fp8fn
from fp8fn.distributed import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    combine,
    dispatch,
    gather_fp8,
    update_scales,
)
from support.ranks import a_rank_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

WORLDS = (8, 1000, 1024, 10_000)
FIRST_AND_LAST = [(world, rank) for world in WORLDS for rank in (0, world - 1)]


class Collectives(TorchDispatchMode):
    """The name of each collective and the bytes of its larger side. All ranks send what this one does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in func.name()
            and "barrier" not in func.name()
        ):
            given = (args, out)
            sizes = [
                x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(given) if isinstance(x, Tensor)
            ]
            self.found.append((func.name().partition("::")[2], max(sizes)))
            if func is torch.ops.c10d.alltoall_base_.default and args[0].shape == args[1].shape:
                args[0].copy_(args[1])
        return out

    def of(self, name: str) -> list[int]:
        return [size for kind, size in self.found if name in kind]


@pytest.mark.parametrize(("world", "rank"), [*FIRST_AND_LAST, (1000, 299)])
def test_a_step_of_fsdp2(world: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fp8fn.FP8Weight, "dequantize")  # no weight is
    n, k = 1002, 256
    with a_rank_of(world, rank):
        model: Any = nn.Sequential(nn.Linear(k, n, bias=False))
        gather_fp8(model)
        fully_shard(model[0])
        fully_shard(model)
        rows = -(-n // world)
        mine = max(0, min(rows, n - rank * rows))
        assert model[0].weight.to_local().shape == (mine, k)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        update_scales(model)
        with Collectives() as step:
            model(torch.zeros(2, k)).sum().backward()
            optimizer.step()
            update_scales(model)
        assert step.of("allgather") == [world * rows * k] * 2  # in the forward, and in the backward
        assert step.of("reduce_scatter") == [4 * world * rows * k]  # of float32 gradients, as without fp8fn
        assert step.of("allreduce") == [4 * -(-n // 128) * -(-k // 128) + 4]
        assert len(step.found) == 4
        optimizer.step()
        with pytest.raises(RuntimeError, match="changed since"):
            model(torch.zeros(2, k))


@pytest.mark.parametrize(("n", "world"), [(1024, 8), (1002, 8), (1024, 1)])
def test_later_gathers_fill_the_memory_of_the_first(n: int, world: int) -> None:
    """The host makes no tensor for them, and `update_scales` keeps no older bytes, which would double its peak."""
    with a_rank_of(world, 0):
        model: Any = nn.Sequential(nn.Linear(256, n, bias=False))
        gather_fp8(model)
        fully_shard(model[0])
        fully_shard(model)
        master = model[0].weight.to_local()
        scales = []
        for _ in range(2):
            update_scales(model)
            for _ in range(2):
                model[0].unshard()
                weight = model[0].weight
                if not scales:
                    data = weight._data
                assert weight._data is data
                assert weight._data.untyped_storage().nbytes() >= n * 256
                scales.append(weight._scale)
                model[0].reshard()
                assert weight._data.untyped_storage().nbytes() == 0
            bytes_of_before = ref(master._shard.fp8.data)
            with torch.no_grad():
                model[0].weight.mul_(2)
        assert torch.equal(scales[1], scales[0])
        assert torch.equal(scales[2][0], 2 * scales[0][0])  # other blocks are those of ranks that send nothing
        assert scales[2] is scales[3]
        update_scales(model)
        assert bytes_of_before() is None


@pytest.mark.parametrize(("world", "rank"), [(8, 0), (1000, 999)])
def test_a_step_of_fsdp2_in_bf16_gathers_two_bytes_an_element(world: int, rank: int) -> None:
    n, k = 1002, 256
    with a_rank_of(world, rank):
        model = nn.Sequential(nn.Linear(k, n, bias=False)).bfloat16()
        fully_shard(model[0])
        fully_shard(model)
        with Collectives() as step:
            model(torch.zeros(2, k, dtype=torch.bfloat16)).sum().backward()
        assert step.of("allgather") == [2 * world * -(-n // world) * k] * 2


@pytest.mark.parametrize(("world", "rank"), FIRST_AND_LAST)
def test_a_step_of_sequence_parallelism(world: int, rank: int) -> None:
    """Two gathers of a sequence of one token a rank, of the input and of the output's gradient, a byte an element."""
    with a_rank_of(world, rank), torch.device("cpu"):
        mesh, k = init_device_mesh("cpu", (world,)), 128
        with torch.device("meta"):
            layers = nn.Linear(k, 128 * world, bias=False), nn.Linear(128 * world, k, bias=False)
        model = nn.Sequential(*layers).bfloat16()
        plan = {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "0": ColwiseParallel(),
            "1": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(model, mesh, plan)
        model.to_empty(device="cpu")
        assert model[0].weight.to_local().shape == (128, k)  # type: ignore[operator]
        x = torch.zeros(1, k, dtype=torch.bfloat16, requires_grad=True)
        with Collectives() as step:
            out = fp8fn.fp8(model, recipe="blockwise_pow2")(x)
            assert out.shape == (1, k)
            out.sum().backward()
        scales = 16  # one exponent, and bytes that make the row a multiple of 16
        assert step.of("all_gather") == [world * (k + scales)] * 2
        assert step.of("reduce_scatter") == [2 * world * k] * 2


@pytest.mark.parametrize(("world", "rank"), FIRST_AND_LAST)
def test_a_step_of_expert_parallelism(world: int, rank: int) -> None:
    """One row for each rank, whose expert's rows are as many as the ranks."""
    k = 256
    with a_rank_of(world, rank), Collectives() as step:
        x = torch.randn(world, k, dtype=torch.bfloat16, requires_grad=True)
        rows, routing = dispatch(x, torch.ones(world, dtype=torch.int64))
        assert rows.shape == (world, k)
        assert routing.offsets.tolist() == [world]
        out = combine(rows, routing)
        assert torch.equal(out, fp8fn.quantize(x.detach(), (1, 128), scale="pow2").dequantize(torch.bfloat16))
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
    # Rows and the backward of combine in FP8, and results and the backward of dispatch in bfloat16.
    fp8, wide = world * (k + k // 128), 2 * world * k
    exchanged = [fp8, wide, fp8, wide]
    if world == 8:  # 4 KB of each rank: all ranks see where their numbers of experts or their capacities differ
        assert step.of("all_gather") == [4096 * world]
    else:
        exchanged.insert(0, 32 * world)
    assert step.of("alltoall") == exchanged
    assert len(step.found) == 5
