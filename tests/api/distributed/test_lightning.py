"""The blocks of `docs/guides/training.md` for Lightning: one process, and FSDP2 on two against one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from fp8fn.distributed import gather_fp8, update_scales
from support.gathers import counted_gathers
from support.processes import run_processes

lightning = pytest.importorskip("lightning")

RANKS, STEPS, ROWS = 2, 4, 32  # of 4 tokens each: no block of a gradient's columns is cut between ranks
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guides" / "training.md"


def _block(number: int) -> str:
    """The code that the guide shows, for one process or for several."""
    parts = PAGE.read_text(encoding="utf-8").split("<!-- not run: tests/api/distributed/test_lightning.py runs it -->")
    assert len(parts) == 3
    return parts[1 + number].split("```python\n", 1)[1].split("```", 1)[0]


class _Out:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> _Out:
        for layer in self.layers:
            x = layer(x)
        return _Out(x.square().mean())


def _task(number: int) -> Any:
    """The guide's module around a model, whose losses it keeps."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    names: dict[str, Any] = {
        "lightning": lightning, "torch": torch, "gather_fp8": gather_fp8, "update_scales": update_scales,
        "fully_shard": fully_shard, "FSDPModule": FSDPModule,
    }  # fmt: skip
    for block in range(number + 1):
        exec(compile(_block(block), PAGE.name, "exec"), names)
    shown = names["ShardedTask" if number else "Task"]

    class Trained(shown):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = Model(), []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = super().training_step(batch, index)
            self.losses.append(loss.detach())
            return loss

        if not number:

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

    return Trained()


def _batches(rows: int, rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    """An epoch: half of the steps."""
    rows_of_all = torch.randn(STEPS // 2 * RANKS * ROWS, 4, 512, generator=torch.Generator().manual_seed(1))
    mine = [{"x": row} for row in rows_of_all.view(-1, ranks, rows, 4, 512)[:, rank].flatten(0, 1)]
    return DataLoader(mine, batch_size=rows, sampler=SequentialSampler(mine))  # type: ignore[arg-type]


def _trainer(folder: str, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"max_steps": STEPS, **options},
    )  # fmt: skip


def _mean(losses: list[Tensor]) -> list[float]:
    """The losses over the batches of all ranks."""
    whole = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(whole)
    return [float(loss) for loss in whole / RANKS]


def _sharded(folder: str, rank: int, resume: str | None = None) -> list[float]:
    """The losses of all steps, or of those after a checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    task = _task(1)
    trainer = _trainer(
        folder, strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1), devices=RANKS,
        use_distributed_sampler=False, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(
            folder, "{step}", every_n_train_steps=STEPS // 2, save_top_k=-1, auto_insert_metric_name=False
        )],
    )  # fmt: skip
    with counted_gathers() as counts:
        trainer.fit(task, _batches(ROWS, rank, RANKS), ckpt_path=resume)
    assert trainer.global_step == STEPS
    # At the beginning, after the checkpoint, after each step; PyTorch makes an optimizer's state by a step of its own.
    updates = 2 + (STEPS if resume is None else 1 + STEPS // 2)
    assert counts["quantized"] == 2 * updates
    assert counts["dequantized"] == 0
    return _mean(task.losses)


def _run(rank: int, folder: str, expected: list[float]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        losses = _sharded(folder, rank)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert losses[-1] < losses[0]
        resumed = _sharded(folder, rank, resume=f"{folder}/{STEPS // 2}.ckpt")
        assert resumed == losses[STEPS // 2 :]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning warns of loggers, workers and sizes
def test_one_process(fresh_dynamo: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = _task(0)
    before = task.model.layers[0].weight.weight.detach().clone()
    trainer = _trainer(str(tmp_path), precision="bf16-mixed")
    with caplog.at_level(logging.INFO, logger="fp8fn"):
        trainer.fit(task, _batches(RANKS * ROWS))
    assert trainer.global_step == STEPS
    assert "2 of 2 products in FP8" in caplog.text
    assert not task.model.layers[0].weight.weight.equal(before)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert list(saved) == ["model.layers.0.weight.weight", "model.layers.1.weight.weight"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # three processes compile
@pytest.mark.filterwarnings("ignore")  # Lightning warns of loggers, workers and sizes
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path, fresh_dynamo: None) -> None:
    task = _task(0)
    _trainer(str(tmp_path), enable_checkpointing=False).fit(task, _batches(RANKS * ROWS))
    run_processes(_run, (str(tmp_path), [float(loss) for loss in task.losses]), RANKS)
