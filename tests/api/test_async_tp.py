"""Async tensor parallelism: a sequence is multiplied while it is gathered, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

import fp8fn  # noqa: F401  registers the backend
import fp8fn.distributed as fp8_styles
from fp8fn.bench import record
from fp8fn.lowering import backend, post_grad_pass
from fp8fn.lowering.patterns import gather_scaled_mm
from fp8fn.ops import symmetric_memory, torch_private
from fp8fn.ops.torch_private import symmetric_memory as private
from support.processes import run_processes

WIDTH = 512
OP = "fp8fn.gather_scaled_mm.default"
_STORE: list[str] = []  # of the process group that `_run` made
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    """The gather lies in the graph of a layer that is compiled with its feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.feed_forward(x)
        return out


def _trained(styles: Any, device: str, batch: int, tokens: int, async_tp: bool) -> tuple[list[Tensor], list[Any]]:
    """Output and gradients of one rank, and what the pass reports."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, mesh = Layer().bfloat16().to(device), init_device_mesh(device, (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "feed_forward": styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "feed_forward.w1": styles.ColwiseParallel(),
        "feed_forward.w3": styles.ColwiseParallel(),
        "feed_forward.w2": styles.RowwiseParallel(output_layouts=Shard(1)),
    }
    torch_styles.parallelize_module(layer, mesh, plan)
    options = {"where": "*", "recipe": "blockwise_pow2", "async_tp": async_tp}
    layer.compile(backend="fp8fn", options=options)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(batch, tokens, WIDTH, generator=generator).bfloat16().to(device).requires_grad_()
    with post_grad_pass.recorded() as reports:
        out = layer(x)
        out.float().square().sum().backward()
    parameters = [p.grad.to_local() for p in layer.parameters() if isinstance(p.grad, torch.distributed.tensor.DTensor)]
    assert len(parameters) == 4
    assert x.grad is not None
    return [out, x.grad, *parameters], [each for each in reports if each.pattern == "async_tp"]


def _same_bits(device: str, tokens: int) -> None:
    expected, off = _trained(fp8_styles, device, 1, tokens, False)
    found, on = _trained(fp8_styles, device, 1, tokens, True)
    assert not off
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one, two)
    assert OP in [each.made for each in on if each.reason is None]


def _left_alone(styles: Any, batch: int, reason: str) -> None:
    _, reports = _trained(styles, "cpu", batch, 64, True)
    assert OP not in [each.made for each in reports if each.reason is None]
    assert any(reason in str(each.reason) for each in reports)


def _on_cpu() -> None:
    _same_bits("cpu", 64)
    _left_alone(fp8_styles, 2, "a batch of several sequences")
    _left_alone(torch_styles, 1, "16 bits are gathered")


def _on_gpus() -> None:
    torch.cuda.set_device(dist.get_rank())
    _same_bits("cuda", 1024)


def _run(rank: int, store: str, cases: Callable[[], None], backend: str) -> None:
    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = False  # a graph that is found has no reports
    torch._functorch.config.enable_autograd_cache = False
    _STORE.append(store)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        cases()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@needs_gloo
def test_same_bits_on_two_processes(tmp_path: Path) -> None:
    run_processes(_run, (str(tmp_path / "store"), _on_cpu, "gloo"), 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_same_bits_on_two_gpus(tmp_path: Path) -> None:
    run_processes(_run, (str(tmp_path / "store"), _on_gpus, "nccl"), 2)


def _on_unequal_ranks() -> None:
    """The first group is one whose second rank sees a fault; both ranks of the second see none."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]) for _ in range(2)]
    reasons = []
    for group, faults in zip(groups, ((None, "a fault"), (None, None)), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symmetric_memory, "_local_fault", lambda *_, faults=faults: faults[rank])
            reasons.append(symmetric_memory.not_pipelined(group.group_name, 2))
            patch.setattr(symmetric_memory, "_local_fault", lambda *_: "asked again")
            assert symmetric_memory.not_pipelined(group.group_name, 2) == reasons[-1]
    assert reasons == [("another rank of the group cannot", "a fault")[rank], None]


def _on_a_name_that_is_used_again() -> None:
    """PyTorch gives a new world the name of the one that was destroyed."""
    names, reasons = [], []
    for fault in (None, "a fault"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symmetric_memory, "_local_fault", lambda *_, fault=fault: fault)
            names.append(dist.group.WORLD.group_name)  # type: ignore[union-attr]
            reasons.append(symmetric_memory.not_pipelined(names[-1], 2))
        if fault is None:
            rank = dist.get_rank()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.FileStore(_STORE[0] + "2", 2), rank=rank, world_size=2)
    assert names[0] == names[1]
    assert reasons == [None, "a fault"]


def _on_ranks_that_fail() -> None:
    """A rank that raises answers nevertheless: the other one waits for it."""

    def fail(*_: Any) -> None:
        if dist.get_rank() == 0:
            raise ValueError("LOCAL_WORLD_SIZE is no number")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_local_fault", fail)
        reason = symmetric_memory.not_pipelined(dist.group.WORLD.group_name, 2)  # type: ignore[union-attr]
    expected = ("ValueError: LOCAL_WORLD_SIZE is no number", "another rank of the group cannot")
    assert reason == expected[dist.get_rank()]


@needs_gloo
@pytest.mark.parametrize("case", [_on_unequal_ranks, _on_a_name_that_is_used_again, _on_ranks_that_fail])
def test_ranks_agree_whether_a_gather_is_pipelined(case: Callable[[], None], tmp_path: Path) -> None:
    run_processes(_run, (str(tmp_path / "store"), case, "gloo"), 2)


def test_ranks_do_not_agree_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    group = type("Group", (), {})()
    monkeypatch.setattr(private, "group_of", lambda name: group)
    monkeypatch.setattr(symmetric_memory, "_fault", lambda *_: None)
    monkeypatch.setattr(symmetric_memory, "_agreed", lambda fault, _: fault)
    monkeypatch.setattr(symmetric_memory.graph_capture, "capturing", lambda: True)
    assert "while a CUDA graph is captured" in str(symmetric_memory.not_pipelined("any", 2))
    monkeypatch.setattr(symmetric_memory.graph_capture, "capturing", lambda: False)
    assert symmetric_memory.not_pipelined("any", 2) is None
    monkeypatch.setattr(symmetric_memory.graph_capture, "capturing", lambda: True)
    assert symmetric_memory.not_pipelined("any", 2) is None


def test_a_torch_without_the_pipeline_gathers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed._symmetric_memory, "_pipelined_multi_all_gather_and_consume")
    monkeypatch.delitem(sys.modules, private.__name__)
    monkeypatch.delattr(torch_private, "symmetric_memory")
    reason = symmetric_memory.not_pipelined("any", 2)
    assert f"needs what torch {torch.__version__} does not have: " in str(reason)
    assert "_pipelined_multi_all_gather_and_consume" in str(reason)


@needs_gloo
def test_op_of_one_rank(tmp_path: Path, fp8_opcheck: Callable[..., dict[str, str]]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        generator = torch.Generator().manual_seed(0)
        a, a_scale = torch.ops.fp8fn.quantize(torch.randn(48, 256, generator=generator), (1, 128), None, "pow2")
        sides = [
            torch.ops.fp8fn.quantize(torch.randn(256, n, generator=generator), (128, 128), None, "pow2")
            for n in (128, 64)
        ]
        bias = torch.randn(64, generator=generator)
        form = torch.bfloat16, 1, dist.group.WORLD.group_name  # type: ignore[union-attr]  # it is initialised
        b, b_scale = ([side[place] for side in sides] for place in (0, 1))
        arguments = (a, a_scale, b, b_scale, (128, 128), [None, bias], *form)
        data, scale, outs = torch.ops.fp8fn.gather_scaled_mm(*arguments)
        assert torch.equal(data.view(torch.uint8), a.view(torch.uint8))
        assert torch.equal(scale, a_scale)
        for out, side, row in zip(outs, sides, (None, bias), strict=True):
            product = torch.ops.fp8fn.scaled_mm(a, a_scale, (1, 128), *side, (128, 128), row, torch.bfloat16)
            assert torch.equal(out, product)
        results = fp8_opcheck(torch.ops.fp8fn.gather_scaled_mm.default, arguments, {})
        assert set(results.values()) == {"SUCCESS"}
        with pytest.raises(ValueError, match="2 b, 2 b_scale and 1 bias"):
            torch.ops.fp8fn.gather_scaled_mm(*arguments[:5], [None], *form)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@needs_gloo
def test_benchmark_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--tokens", "64", "--width", "256", "--repeats", "2", "--warmup", "1", "--json", tmp_path / "out.json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, "-m", "fp8fn.bench.async_tp", *options], check=True, env=environment)
    rows = record.read(tmp_path / "out.json")["results"]["rows"]
    assert [row["product"] for row in rows] == ["gate_up", "qkv"]
    assert all(row["same_bits"] for row in rows)


def test_only_bounds_of_a_type_keep_the_bits_that_were_gathered() -> None:
    """A model's own clamp does not, so that its product is left alone. Inductor clamps 16 bits in float32."""
    graph, largest = torch.fx.Graph(), torch.finfo(torch.bfloat16).max
    x = graph.placeholder("x")
    for bounds, kept in (
        ((-largest, largest), True), ((None, largest), True), ((-0.5, 0.5), False), ((0.0,), False),
        ((-largest, 6.0), False), ((-65504.0, 65504.0), False),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            node = graph.call_function(torch.ops.aten.clamp.default, (x, *bounds))
            node.meta["val"] = torch.empty(2, 128, dtype=dtype, device="meta")
            cast = graph.call_function(torch.ops.prims.convert_element_type.default, (node, torch.bfloat16))
            cast.meta["val"] = torch.empty(2, 128, dtype=torch.bfloat16, device="meta")
            assert gather_scaled_mm._keeps_bits(node, [cast]) == kept, (bounds, dtype)


def test_refused_value_of_the_option() -> None:
    with pytest.raises(ValueError, match=r"options\['async_tp'\] is 'yes'; use True or False"):
        post_grad_pass.with_pipeline({}, "yes")  # type: ignore[arg-type]
    assert post_grad_pass.with_pipeline({}, None) == {}
    assert "async_tp" in backend.OPTIONS
