"""The block of `docs/distributed.md` for transformers' `Trainer` under FSDP2, on two processes, against one process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8fn.distributed import gather_fp8, update_scales
from support.gathers import counted_gathers
from support.processes import run_processes

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

RANKS, STEPS, LAYERS = 2, 4, 2
WEIGHTS = 7 * LAYERS
PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"


def _block() -> str:
    """The code that the guide shows."""
    _, rest = PAGE.read_text(encoding="utf-8").split("<!-- not run: tests/api/distributed/test_trainer.py runs it -->")
    return rest.split("```python\n", 1)[1].split("```", 1)[0]


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=512, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=4,
        )
    )  # fmt: skip


def _dataset() -> list[dict[str, torch.Tensor]]:
    rows = [(step * torch.arange(16)) % 128 for step in range(1, 33)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _arguments(folder: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder, "max_steps": STEPS, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "no", **more,
    }  # fmt: skip


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _one_process(folder: str) -> list[float]:
    """The losses of a process that takes the batches of all ranks in each step."""
    from transformers import Trainer, TrainingArguments

    model = _model()
    for layer in model.model.layers:
        layer.compile(backend="fp8fn")
    args = TrainingArguments(gradient_accumulation_steps=RANKS, **_arguments(folder))
    trainer = Trainer(model=model, args=args, train_dataset=_dataset())
    trainer.train()
    return _losses(trainer)


def _sharding_trainer() -> Any:
    """`Trainer` with FSDP2 on a CPU, where accelerate leaves it out without a word."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import Trainer

    class ShardingTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if self.args.mixed_precision != "no":
                plugin.set_mixed_precision(self.args.mixed_precision)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
            self.is_fsdp_enabled = True

    return ShardingTrainer


def _trained(folder: str, resume: str | None = None, **more: Any) -> Any:
    """The guide's block, as it stands."""
    from transformers import TrainerCallback, TrainingArguments

    trainer_class, trainers = _sharding_trainer(), []

    def made(**given: Any) -> Any:
        trainers.append(trainer_class(**given))
        trainers[0].train = partial(trainers[0].train, resume_from_checkpoint=resume)
        return trainers[0]

    names = {
        "model": _model(), "dataset": _dataset(), "arguments": _arguments(folder, **more), "gather_fp8": gather_fp8,
        "update_scales": update_scales, "Trainer": made, "TrainerCallback": TrainerCallback,
        "TrainingArguments": TrainingArguments,
    }  # fmt: skip
    with counted_gathers() as counts:
        exec(compile(_block(), PAGE.name, "exec"), names)
    steps = STEPS if resume is None else STEPS // 2
    assert counts["quantized"] == WEIGHTS * (steps + 2)  # after each step, at the beginning and at the end
    assert counts["dequantized"] == 0
    return trainers[0]


def _run(rank: int, folder: str, expected: list[float]) -> None:
    torch.set_num_threads(1)
    # As torchrun and `accelerate launch` set them; the address is not used, for the group exists.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        trainer = _trained(folder, save_strategy="steps", save_steps=STEPS // 2)
        losses = _losses(trainer)
        assert losses == pytest.approx(expected, rel=1e-3)
        assert losses[-1] < losses[0]
        evaluated = trainer.evaluate(_dataset()[:8])["eval_loss"]
        resumed = _trained(folder, resume=f"{folder}/checkpoint-{STEPS // 2}")
        assert _losses(resumed) == losses
        assert resumed.evaluate(_dataset()[:8])["eval_loss"] == evaluated
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(600)  # three processes compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads a layer's input
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path, fresh_dynamo: None) -> None:
    """All cases in one pair of processes: starting them takes longer than the cases."""
    run_processes(_run, (str(tmp_path), _one_process(str(tmp_path))), RANKS)
