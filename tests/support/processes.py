"""Processes of a test, joined by gloo on a CPU or by NCCL on a GPU each."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

DEVICES: Final = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def skip_without(device: str, ranks: int) -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, and there are {torch.cuda.device_count()}")


def run_processes(run: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Calls `run(rank, *args)` in a process for each rank."""
    mp.spawn(_run, (run, args), nprocs=ranks)


def _run(rank: int, run: Callable[..., None], args: tuple[Any, ...]) -> None:
    run(rank, *args)
    # gloo's threads end with the last reference to their group. If Python itself ends before, the process aborts.
    gc.collect()


@contextmanager
def process_group(device: str, rank: int, ranks: int, store: str) -> Iterator[None]:
    """One of several processes, with its device as the default."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def only_pytorch_may_warn() -> None:
    """Warnings are errors in this process, but for those of PyTorch's own modules."""
    warnings.simplefilter("error")
    for kind in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=kind, module="torch")


def drawn(*sizes: int, seed: int) -> Tensor:
    """Normal numbers on the default device, the same ones on each."""
    numbers = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    """All processes on a mesh of their devices, or a line of them."""
    return init_device_mesh(torch.get_default_device().type, sizes or (dist.get_world_size(),), mesh_dim_names=names)
