"""Checkpoints into modules that are sharded on the meta device: each rank reads its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8fn
from fp8fn import FP8Weight
from fp8fn.distributed import gather_fp8
from fp8fn.ops.layout import Block
from support.accuracy import snr
from support.fp8_weights import values
from support.processes import run_processes
from support.ranks import a_rank_of

BLOCKS: tuple[tuple[int, Block, str], ...] = (
    (512, (128, 128), "deepseek"),
    (320, (128, 128), "deepseek"),  # parts begin within blocks
    (304, (1, -1), "compressed-tensors"),
    (304, (-1, -1), "compressed-tensors"),
)


class Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, rows), nn.Linear(rows, 256, bias=False)
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def _saved(rows: int, block: Block, format: str, folder: Path | None) -> Model:
    torch.manual_seed(0)
    model = Model(rows)
    fp8fn.quantize_weights(model, "*", block=block)
    if folder is not None:
        fp8fn.save_weights(model, folder, format=format)
    return model


def _on_meta(rows: int) -> Any:
    with torch.device("meta"):
        return Model(rows)


def _fsdp(model: Any, mesh: Any = None) -> None:
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)


def _tensor_parallel(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _check(model: Any, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """The parts of both weights and of the bias, and the buffer."""
    for parameter, wanted in zip((model.up.weight, model.down.weight, model.up.bias), expected, strict=True):
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        if wanted.ndim == 2:
            assert isinstance(local, FP8Weight)
            assert not parameter.requires_grad
            local = local.dequantize(torch.float32)
        assert torch.equal(local, wanted)
    assert torch.equal(model.kept, torch.ones(3))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("rows", "block", "format"), BLOCKS, ids=str)
@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_the_values_of_a_part(how: str, rows: int, block: Block, format: str, rank: int, tmp_path: Path) -> None:
    whole = _saved(rows, block, format, tmp_path)
    with a_rank_of(4, rank):
        model = _on_meta(rows)
        if how == "tensor":
            _tensor_parallel(model, init_device_mesh("cpu", (4,)))
        else:
            _fsdp(model)
        fp8fn.load_weights(model, tmp_path)
        axis = 1 if how == "tensor" else 0
        up, down, bias = values(whole.up.weight), values(whole.down.weight), whole.up.bias
        _check(model, (up.chunk(4)[rank], down.chunk(4, axis)[rank], bias.chunk(4)[rank]))


def _both(rank: int, folder: str) -> None:
    """Tensor parallelism cuts first, then FSDP cuts its parts by rows."""
    with a_rank_of(4, rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data, tensor = divmod(rank, 2)
        for number, (rows, block, format) in enumerate(BLOCKS):
            place = Path(folder) / f"{number} {rank}"
            whole, model = _saved(rows, block, format, place), _on_meta(rows)
            _tensor_parallel(model, mesh["tensor"])
            _fsdp(model, mesh["data"])
            fp8fn.load_weights(model, place)
            parts = values(whole.up.weight).chunk(2), values(whole.down.weight).chunk(2, 1), whole.up.bias.chunk(2)
            up, down, bias = (part[tensor].chunk(2)[data] for part in parts)
            _check(model, (up, down, bias))


@pytest.mark.slow
def test_fsdp_beside_tensor_parallelism(tmp_path: Path) -> None:
    run_processes(_both, (str(tmp_path),), 4)


def test_what_is_refused(tmp_path: Path) -> None:
    _saved(305, (128, 128), "deepseek", tmp_path)
    with a_rank_of(2, 0):
        uneven = _on_meta(305)
        _fsdp(uneven)
        with pytest.raises(NotImplementedError, match=r"up\.weight is sharded, and its shape \(305, 256\) has uneven"):
            fp8fn.load_weights(uneven, tmp_path)
        real: Any = Model(305)
        _fsdp(real)
        with pytest.raises(NotImplementedError, match=r"up\.weight is sharded, and has values; build and shard"):
            fp8fn.load_weights(real, tmp_path)
        master = _on_meta(305)
        gather_fp8(master, "*")
        _fsdp(master)
        with pytest.raises(NotImplementedError, match=r"up\.weight is sharded, and has parts of MasterWeight"):
            fp8fn.load_weights(master, tmp_path)
        for model in (uneven, master):
            assert all(p.to_local().is_meta for p in model.parameters())


def _compare(model: nn.Module, whole: nn.Module) -> None:
    given, expected = (torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    out, wanted = model(given.requires_grad_()), whole(expected.requires_grad_())
    out.sin().sum().backward()
    wanted.sin().sum().backward()
    assert given.grad is not None
    assert expected.grad is not None
    assert snr(out, wanted) > 90
    assert snr(given.grad, expected.grad) > 90


def _run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        for number, (rows, block, format) in enumerate(BLOCKS):
            place = Path(folder) / str(number)
            whole = _saved(rows, block, format, place if rank == 0 else None)
            dist.barrier()
            model = _on_meta(rows)
            _fsdp(model)
            fp8fn.load_weights(model, place)
            _compare(model, whole)
            model = _on_meta(rows)
            _tensor_parallel(model, init_device_mesh("cpu", (2,)))
            fp8fn.load_weights(model, place)
            _compare(model, whole)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes(tmp_path: Path) -> None:
    """Products with the loaded parts, forward and backward, and FSDP's gathers of them."""
    run_processes(_run, (str(tmp_path),), 2)
