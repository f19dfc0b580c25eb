"""Hugging Face's accelerate shards by FSDP2 what `gather_fp8` prepared, on two processes, against one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fp8fn
from fp8fn.distributed import gather_fp8, update_scales
from support.gathers import counted_gathers
from support.processes import run_processes

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

RANKS, STEPS, LAYERS = 2, 2, 2
WEIGHTS = 7 * LAYERS


class Case(NamedTuple):
    mixed_precision: str = "no"
    backend: str | None = None
    tolerance: float = 1e-6
    rank_0_loads: bool = False


CASES = (Case(), Case("bf16", tolerance=1e-3), Case(backend="fp8fn", tolerance=1e-3), Case(rank_0_loads=True))


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=1,
        )
    )  # fmt: skip


def _in_fp8(model: Any, backend: str | None) -> None:
    for layer in model.model.layers:
        if backend is None:
            layer.forward = fp8fn.fp8(layer.forward)
        else:
            layer.compile(backend=backend, options={"where": "*"})


def _tokens(rank: int) -> Tensor:
    return torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(rank))


def _one_process() -> list[float]:
    """The mean losses over the ranks' tokens, which FSDP2 gives the mean gradients of."""
    model, losses = _model(), []
    _in_fp8(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        parts = [model(input_ids=_tokens(rank), labels=_tokens(rank)).loss / RANKS for rank in range(RANKS)]
        torch.autograd.backward(parts)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


def _prepared(case: Case) -> tuple[Any, Any, Any]:
    """accelerate's own object, the sharded model and its optimizer."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    model = _model()
    if case.rank_0_loads and dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=case.rank_0_loads,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, mixed_precision=case.mixed_precision)
    # accelerate shards on accelerators only, and says nothing on a CPU.
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    if case.mixed_precision != "no":
        plugin.set_mixed_precision(case.mixed_precision)
    assert len(gather_fp8(model, where="model.layers.*").quantized) == WEIGHTS
    _in_fp8(model, case.backend)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _same_training(case: Case, expected: list[float]) -> None:
    accelerator, model, optimizer = _prepared(case)
    optimizer.optimizer.register_step_post_hook(lambda *_: update_scales(model))
    update_scales(model)
    tokens = _tokens(dist.get_rank())
    for step in range(STEPS):
        with counted_gathers() as counts:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().float()
        dist.all_reduce(total)
        assert total.item() / RANKS == pytest.approx(expected[step], rel=case.tolerance), (case, step)
        assert counts["quantized"] == WEIGHTS, case
        assert counts["dequantized"] == 0, case


def _run(rank: int, folder: str) -> None:
    from accelerate.state import AcceleratorState

    # As torchrun and `accelerate launch` set them; the address is not used, for the group exists.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        expected = _one_process()
        for case in CASES:
            _same_training(case, expected)
            AcceleratorState._reset_state(reset_partial_state=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path) -> None:
    """All cases in one pair of processes: starting them takes longer than the cases."""
    run_processes(_run, (str(tmp_path),), RANKS)
