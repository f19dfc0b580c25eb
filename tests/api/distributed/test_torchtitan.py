"""torchtitan's models and its own parallelize functions, on two processes, against one process.

torchtitan 0.3.0 imports with `pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import fp8fn
from support.accuracy import snr
from support.gathers import counted_gathers
from support.processes import run_processes

pytest.importorskip("torchtitan")
pytest.importorskip("spmd_types")

RANKS, STEPS, LAYERS, WIDTH, VOCABULARY, LENGTH = 2, 2, 2, 256, 512, 32
RECIPE = fp8fn.BLOCKWISE_POW2


class Case(NamedTuple):
    tensor_parallel: int = 1
    compiled: bool = False
    experts: bool = False  # a mixture of experts, divided over the ranks


CASES = (Case(), Case(2), Case(2, compiled=True), Case(experts=True))


def _config(case: Case) -> Any:
    """A small Llama 3, or a Qwen 3 with experts, and where torchtitan cuts it."""
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    from fp8fn.examples.torchtitan_moe import dispatcher, experts

    if case.experts:
        layers = qwen3._build_qwen3_moe_layers(
            n_layers=1, dim=WIDTH, n_heads=2, n_kv_heads=1, head_dim=128, moe_hidden_dim=256, num_experts=4, top_k=2,
            attn_backend="flex", moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=128, max_seq_len=LENGTH),
        )  # fmt: skip
        for layer in layers:  # as torchtitan applies overrides
            routed = layer.moe.routed_experts
            routed.token_dispatcher, routed.inner_experts = (
                dispatcher(routed.token_dispatcher), experts(routed.inner_experts),
            )  # fmt: skip
    else:
        layers = llama3._build_llama3_layers(
            n_layers=LAYERS, dim=WIDTH, n_heads=2, hidden_dim=512, attn_backend="flex",
            rope=ComplexRoPE.Config(dim=128, max_seq_len=LENGTH, scaling="llama"),
        )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on a CPU
    ones, normal = {"weight": nn.init.ones_}, {"weight": partial(nn.init.normal_, std=0.1)}
    config = (qwen3.Qwen3Model if case.experts else llama3.Llama3Model).Config(
        dim=WIDTH, vocab_size=VOCABULARY, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=ones),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=normal),
    )  # fmt: skip
    if case.experts:
        set_qwen3_sharding_config(config, enable_sp=True, enable_ep=True)
    else:
        set_llama3_sharding_config(config, enable_sp=True)
    return config


def _loss(model: nn.Module, number: int, batches: int) -> Tensor:
    """A batch's part of the mean over all batches' tokens, which torchtitan sums over ranks."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    logits = model(tokens[:, :-1])
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / batches


def _one_process(case: Case, whole: list[Tensor], batches: int) -> tuple[list[float], list[Tensor]]:
    """The losses of all steps, and the gradients of the first one."""
    model = _config(case).build()
    model.init_states()
    for parameter, value in zip(model.parameters(), whole, strict=True):
        parameter.data.copy_(value)
    for layer in model.layers.values():
        layer.forward = fp8fn.fp8(layer.forward, recipe=RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, grads = [], []
    for _ in range(STEPS):
        parts = [_loss(model, number, batches) for number in range(batches)]
        torch.autograd.backward(parts)
        grads = grads or [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses, grads


def _options(case: Case, folder: str) -> dict[str, Any]:
    """What torchtitan's trainer gives the function that parallelizes a model."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils

    parallelism = ParallelismConfig(
        tensor_parallel_degree=case.tensor_parallel, data_parallel_shard_degree=RANKS // case.tensor_parallel,
        expert_parallel_degree=RANKS if case.experts else 1,
        spmd_backend="partial_dtensor",
    )  # fmt: skip
    utils.set_spmd_backend(parallelism.spmd_backend)
    return {
        "parallel_dims": ParallelDims.from_config(parallelism, RANKS),
        "training": TrainingConfig(mixed_precision_param="float32"),
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable=case.compiled),
        "ac_config": None,
        "dump_folder": folder,
    }


def _parallel(case: Case, folder: str) -> tuple[Any, Any]:
    """The model and its optimizer, in the order of torchtitan's trainer."""
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.protocols.model_spec import ModelSpec

    from fp8fn.examples.torchtitan import in_fp8

    config, cut = _config(case), parallelize_qwen3 if case.experts else parallelize_llama
    spec = in_fp8(ModelSpec("model", "test", config, cut, None, None, None))
    with torch.device("meta"):
        model = config.build()
    options = _options(case, folder)
    spec.parallelize_fn(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sums with a factor
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
        for parameter in model.parameters():  # torchtitan rounds experts' weights to bfloat16 where FSDP gathers no FP8
            parameter.copy_(parameter.bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert spec.post_optimizer_build_fn is not None
    spec.post_optimizer_build_fn(optimizer, [model], options["parallel_dims"])
    return model, optimizer


def _same_training(case: Case, folder: str) -> None:
    torch.manual_seed(0)
    model, optimizer = _parallel(case, folder)
    batches = RANKS // case.tensor_parallel
    # Gradients of experts' results are rounded on their way: one step later, losses differ.
    weights, tolerance, bound = (5, 1e-3, 35) if case.experts else (5 * LAYERS, 1e-6, 120)
    whole = [parameter.full_tensor() + 0 for parameter in model.parameters()]
    expected, grads = _one_process(case, whole, batches)
    for step in range(STEPS):
        with counted_gathers() as counts:
            loss = _loss(model, dist.get_rank() // case.tensor_parallel, batches)
            loss.backward()
            if step == 0:
                pairs = zip(grads, model.parameters(), strict=True)
                assert min(snr(parameter.grad.full_tensor(), grad) for grad, parameter in pairs) > bound, case
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        assert total.item() / case.tensor_parallel == pytest.approx(expected[step], rel=tolerance if step else 1e-6), (
            case,
            step,
        )
        assert counts["quantized"] == weights, case
        assert counts["dequantized"] == 0, case
    model.load_state_dict(model.state_dict())  # a checkpoint's weights have new scales
    model(torch.zeros(1, LENGTH, dtype=torch.int64))


def _run(rank: int, folder: str) -> None:
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"  # torchtitan takes CUDA where there is no accelerator
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        for case in CASES:
            _same_training(case, folder)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path) -> None:
    run_processes(_run, (str(tmp_path),), RANKS)
