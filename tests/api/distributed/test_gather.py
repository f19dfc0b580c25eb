"""FSDP2 with FP8 on the wire, on two processes of a CPU or two GPUs, against one process on the same micro-batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fp8fn
from fp8fn import FP8Weight
from fp8fn.distributed import gather_fp8, update_scales
from fp8fn.ops import reference
from support.gathers import counted_gathers
from support.processes import DEVICES, drawn, mesh_of, only_pytorch_may_warn, process_group, run_processes, skip_without

RANKS, STEPS = 2, 2


class Block(nn.Module):
    def __init__(self, rows: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.checkpointed = nn.RMSNorm(256), checkpointed
        self.up, self.down = nn.Linear(256, rows), nn.Linear(rows, 256, bias=False)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._mlp, x, use_reentrant=False) if self.checkpointed else self._mlp(x))


def _model(rows: int, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(rows, checkpointed) for _ in range(2)))


def _in_fp8(model: nn.Module, recipe: str, backend: str | None = None) -> None:
    for block in model.children():
        if backend is None:
            block._mlp = fp8fn.fp8(block._mlp, recipe=recipe)  # which checkpointing runs again
        else:
            block.compile(backend=backend, options={"where": "*", "recipe": recipe})


def _sharded(model: nn.Module, options: dict[str, Any]) -> None:
    for block in model.children():
        fully_shard(block, **options)
    fully_shard(model, **options)


class Case(NamedTuple):
    rows: int = 512
    recipe: str = "blockwise"
    options: Callable[[], dict[str, Any]] = dict
    checkpointed: bool = False
    micro_batches: int = 1
    tolerance: float = 1e-6
    backend: str | None = None


def _hybrid() -> dict[str, Any]:
    return {"mesh": mesh_of(1, RANKS, names=("replicate", "shard"))}


def _replicas() -> dict[str, Any]:
    return {"mesh": mesh_of(RANKS, 1, names=("replicate", "shard"))}


def _columns() -> dict[str, Any]:
    return {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}


def _offloaded() -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def _mixed() -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


CASES = {
    "whole blocks": Case(),
    "torn blocks": Case(304),
    "ragged shards": Case(309),
    "one scale": Case(309, recipe="tensorwise"),
    "powers of two": Case(304, recipe="blockwise_pow2"),
    "no reshard": Case(304, options=lambda: {"reshard_after_forward": False}),
    "columns": Case(304, options=_columns),
    "hybrid": Case(304, options=_hybrid),
    "replicas": Case(304, options=_replicas),
    "accumulation": Case(304, micro_batches=2),
    "checkpointed": Case(304, checkpointed=True),
    "offloaded": Case(309, options=_offloaded),
    "mixed": Case(304, options=_mixed, tolerance=1e-3),
    "compiled": Case(304, backend="fp8fn"),
}


def _tokens(step: int, number: int) -> Tensor:
    return drawn(32, 256, seed=100 * step + number)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.roll(1, 1)).square().mean()


def _one_process(case: Case) -> tuple[list[float], nn.Module]:
    """The losses of the same micro-batches, which are quantized apart, as each rank quantizes its own."""
    model = _model(case.rows)
    _in_fp8(model, case.recipe)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        count = RANKS * case.micro_batches
        parts = [_loss(model, _tokens(step, number)) / count for number in range(count)]
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses, model


def _held(saved: list[Tensor]) -> int:
    """Bytes of FP8 that are kept for the backward, each storage once; FSDP has freed those that it gathered."""
    parts = [part for x in saved for part in ((x._data,) if isinstance(x, FP8Weight) else (x,))]
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in parts if x.element_size() == 1}
    return sum(storage.nbytes() for storage in storages.values())


def _same_training(name: str) -> None:
    case = CASES[name]
    expected, reference_model = _one_process(case)
    model = _model(case.rows, case.checkpointed)
    assert len(gather_fp8(model, recipe=case.recipe).quantized) == 4
    _in_fp8(model, case.recipe, case.backend)
    options = case.options()
    _sharded(model, options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update_scales(model)
    optimizer.register_step_post_hook(lambda *_: update_scales(model))
    for step in range(STEPS):
        total = torch.zeros(())
        with counted_gathers() as counts:
            for number in range(case.micro_batches):
                saved: list[Tensor] = []

                def keep(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
                    saved.append(x)
                    return x

                x = _tokens(step, dist.get_rank() * case.micro_batches + number)
                # Dynamo passes by a frame that runs under these hooks.
                watch = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
                with nullcontext() if case.backend else watch:
                    loss = _loss(model, x) / case.micro_batches
                if name not in ("no reshard", "checkpointed", "compiled"):
                    # The columns of both products' activations, in rows of 16 bytes, and no weight.
                    assert 0 < _held(saved) <= 2 * 32 * (256 + -(-case.rows // 16) * 16)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        assert counts["quantized"] == 4
        assert counts["dequantized"] == 0
        assert counts["bytes"] == counts["gathered"] > 0
        dist.all_reduce(total)
        # On a GPU other kernels, which sum in another order, take weights that lie otherwise, as gathered ones may.
        tolerance = max(case.tolerance, 1e-4 if total.is_cuda else 0.0)
        assert total.item() / RANKS == pytest.approx(expected[step], rel=tolerance), name
    assert case.backend is None or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    _same_bits(model, case)
    if case.tolerance == 1e-6:
        for one, other in zip(model.parameters(), reference_model.parameters(), strict=True):
            whole, close = one.full_tensor() + 0, 1e-3 if other.is_cuda else 1e-5  # type: ignore[attr-defined]
            torch.testing.assert_close(whole.to(other.device), other.detach(), rtol=0, atol=close)


def _same_bits(model: nn.Module, case: Case) -> None:
    recipe = fp8fn.Recipe(weight_block=(-1, -1)) if case.recipe == "tensorwise" else fp8fn.BLOCKWISE
    scale = "pow2" if case.recipe == "blockwise_pow2" else "fp32"
    model.reshard()  # type: ignore[operator]
    for block in model.children():
        block.reshard()  # type: ignore[operator]
        whole = [layer.weight.full_tensor() + 0 for layer in (block.up, block.down)]
        assert all(type(each) is Tensor for each in whole)
        block.unshard()  # type: ignore[operator]
        for layer, master in zip((block.up, block.down), whole, strict=True):
            assert isinstance(layer.weight, FP8Weight)
            scaled = layer.weight.scaled
            master = master.to(scaled.data.device)  # from the host, where they are offloaded
            data, scales = reference.quantize(master, recipe.weight_block, torch.float8_e4m3fn, scale)
            assert torch.equal(scaled.data.view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(scaled.scale, scales)
        block.reshard()  # type: ignore[operator]


def _stale() -> None:
    """Every rank raises, before anything is sent."""
    model = _model(304)
    gather_fp8(model)
    _sharded(model, {})
    x = _tokens(0, 0)
    with pytest.raises(RuntimeError, match=r"0\.up\.weight has no scales yet; call .*update_scales\(model\)"):
        model(x)
    update_scales(model)
    model(x)
    model.reshard()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, x).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed since the last update_scales"):
        model(x)
    update_scales(model)
    model(x)


def _written() -> None:
    """Writes by views, by collectives and into what `state_dict` shows are seen."""
    writes: list[Callable[[nn.Module, Any], object]] = [
        lambda model, weight: weight.t().mul_(0),
        lambda model, weight: weight.unsqueeze(0).zero_(),
        lambda model, weight: weight.to_local()[0].fill_(1),
        lambda model, weight: weight.to_local().unbind()[0].fill_(1),
        lambda model, weight: dist.broadcast(weight.to_local(), 0),
        lambda model, weight: dist.all_reduce(weight.to_local()),
        lambda model, weight: model.state_dict()["0.up.weight"].to_local().zero_(),
        lambda model, weight: model.state_dict()["0.up.weight"].mul_(1.3),
        lambda model, weight: model.state_dict()["0.up.weight"].t().copy_(weight.detach().t() + 1),
        lambda model, weight: torch.add(weight, 1, out=model.state_dict()["0.up.weight"]),
    ]
    for write in writes:
        model, x = _model(512), _tokens(0, 0)
        gather_fp8(model)
        _sharded(model, {})
        update_scales(model)
        model(x)
        model.reshard()  # type: ignore[operator]
        assert type(model.state_dict()["0.up.weight"].to_local()) is Tensor
        before = model[0].up.weight.full_tensor() + 0
        with torch.no_grad():
            write(model, model[0].up.weight)
        assert not torch.equal(model[0].up.weight.full_tensor() + 0, before)
        with pytest.raises(RuntimeError, match=r"0\.up\.weight changed since the last update_scales"):
            model(x)


def _rounded() -> None:
    """A conversion that rounds the values asks for new bytes; one that widens them keeps the old ones."""
    for first, second, rounds in ((torch.float32, torch.bfloat16, True), (torch.bfloat16, torch.float32, False)):
        model, x = _model(304).to(first), _tokens(0, 0)
        gather_fp8(model)
        _in_fp8(model, "blockwise")
        _sharded(model, {})
        update_scales(model)
        model.to(second)  # before a forward: FSDP2 keeps the type of what it has gathered once, in bf16 too
        if rounds:
            with pytest.raises(RuntimeError, match=r"0\.up\.weight has no scales yet"):
                model(x.to(second))
            update_scales(model)
        assert model(x.to(second)).dtype == second
        _same_bits(model, Case(304))


def _written_by_inductor() -> None:
    """A compiled step of an optimizer writes below all wrappers."""
    model, x = _model(512), _tokens(0, 0)
    gather_fp8(model)
    _sharded(model, {})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torch.compile(optimizer.step)
    update_scales(model)
    for _ in range(2):
        _loss(model, x).backward()
        before = model[0].up.weight.full_tensor() + 0
        step()
        assert not torch.equal(model[0].up.weight.full_tensor() + 0, before)
        with pytest.raises(RuntimeError, match=r"0\.up\.weight changed since the last update_scales"):
            model(x)
        model.reshard()  # type: ignore[operator]
        optimizer.zero_grad()
        update_scales(model)
        model(x)
        model.reshard()  # type: ignore[operator]


def _written_in_place() -> None:
    """A CUDA graph gathers the bytes where they were: new ones come there, and a copy's bytes are not overwritten."""
    x, outputs = _tokens(0, 0), []
    for captured in (False, True):
        model = _model(304)
        gather_fp8(model)
        _sharded(model, {})
        update_scales(model)
        with mock.patch.object(fp8fn.distributed.master, "capturing", return_value=captured):
            model(x)
        model.reshard()  # type: ignore[operator]
        masters = [block.up.weight.to_local() for block in model.children()]  # type: ignore[attr-defined]
        copies = [master.clone() for master in masters]
        places = [_places(master) for master in masters]
        with torch.no_grad():
            for master in masters:
                master.mul_(3)
        update_scales(model)
        assert ([_places(master) for master in masters] == places) == captured
        assert all(copy.is_current != captured for copy in copies)
        outputs.append(model(x))
    assert torch.equal(*outputs)


def _places(master: Any) -> tuple[int, int]:
    return master._shard.fp8.data.data_ptr(), master._shard.fp8.scale.data_ptr()


def _captured_update() -> None:
    """A graph that has `update_scales` without a gather writes what is gathered outside."""
    model = _model(304)
    gather_fp8(model)
    _sharded(model, {})
    update_scales(model)
    master = model[0].up.weight.to_local()  # type: ignore[union-attr, operator]
    place = _places(master)
    for captured in (True, False):
        with mock.patch.object(fp8fn.distributed.master, "capturing", return_value=captured):
            update_scales(model)
        assert _places(master) == place


def _evaluated() -> None:
    """After a forward without a backward FSDP holds the root's own weights: they are quantized anew all the same."""
    prepared = nn.Sequential(*_model(304), nn.Linear(256, 256, bias=False))
    gather_fp8(prepared)
    for model in (prepared, copy.deepcopy(prepared)):
        for block in model[:2]:
            fully_shard(block)
        fully_shard(model)
        parameters = list(model.parameters())
        update_scales(model)
        with torch.no_grad():
            model(_tokens(0, 0))
            assert isinstance(model[2].weight, FP8Weight)
            for parameter in parameters:
                parameter.mul_(2)
        update_scales(model)
        masters = [each.to_local() for each in parameters if each.ndim == 2]  # type: ignore[attr-defined]
        assert len(masters) == 5
        assert all(master.is_current for master in masters)


def _evaluated_first_in_inference_mode() -> None:
    """As FSDP2 does in 16 bits: what is made there serves no training."""
    model = _model(304)
    gather_fp8(model)
    _sharded(model, {})
    update_scales(model)
    with torch.inference_mode():
        first = model(_tokens(0, 0))
        assert torch.equal(model(_tokens(0, 0)), first)
    with torch.no_grad():
        assert torch.equal(model(_tokens(0, 0)), first)


def _loaded_after_a_capture() -> None:
    """FSDP pads a ragged shard into new memory, which no graph knows."""
    for rows in (304, 309):
        model = _model(rows)
        gather_fp8(model)
        _sharded(model, {})
        update_scales(model)
        with mock.patch.object(fp8fn.distributed.master, "capturing", return_value=True):
            model(_tokens(0, 0))
        model.reshard()  # type: ignore[operator]
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            model.load_state_dict(model.state_dict())
        moved = any("capture the step again" in str(each.message) for each in shown)
        assert moved == (rows == 309 and dist.get_rank() == 1)
        update_scales(model)
        model(_tokens(0, 0))


def _captured_steps() -> None:
    """A whole step as a CUDA graph has the losses of eager steps, with new scales in the graph or after it."""
    losses: list[list[float]] = []
    for inside in (None, True, False):
        model = _model(512)
        gather_fp8(model)
        _in_fp8(model, "blockwise")
        _sharded(model, {})
        update_scales(model)
        optimizer, x = torch.optim.SGD(model.parameters(), 0.1), _tokens(0, dist.get_rank())
        begun = [parameter.to_local() + 0 for parameter in model.parameters()]  # type: ignore[attr-defined]

        def step(
            model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x, scaled: bool = inside is not False
        ) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, x)
            loss.backward()
            optimizer.step()
            if scaled:
                update_scales(model)
            return loss.detach()

        if inside is None:
            losses.append([step().item() for _ in range(4)])
            continue
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
            update_scales(model)
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), begun, strict=True):
                parameter.to_local().copy_(value)  # type: ignore[attr-defined]
        update_scales(model)
        losses.append([])
        for _ in range(4):
            graph.replay()
            if not inside:
                update_scales(model)
            losses[-1].append(loss.item())
    assert len(set(losses[0])) == 4
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def _replaced(ranks: tuple[int, ...]) -> None:
    """A weight that some ranks have lost: all raise, before a gather or after one."""
    for gathered in (False, True):
        model = _model(304)
        gather_fp8(model)
        _sharded(model, {})
        if gathered:
            update_scales(model)
        if dist.get_rank() in ranks:
            parameter = model[1].up.weight
            plain = DTensor.from_local(parameter.to_local() + 0, parameter.device_mesh, parameter.placements)
            model[1].up.weight = nn.Parameter(plain)
        if gathered and len(ranks) < RANKS:
            continue  # the other ranks' weights have their scales: FSDP's gather is what fails
        with pytest.raises(RuntimeError, match=r"1\.up\.weight was replaced since gather_fp8 on this rank or another"):
            update_scales(model)


def _scales_of(whole: Tensor) -> Tensor:
    _, scales = reference.quantize(whole, block=(128, 128), dtype=torch.float8_e4m3fn, scale="fp32")
    return scales


def _nan(rows: int) -> None:
    """A NaN, whatever its sign, in a block of one rank: all ranks have NaN for its scale, and the other blocks' own."""
    model = _model(rows)
    gather_fp8(model)
    _sharded(model, {})
    weight = model[0].up.weight
    clean = _scales_of(weight.full_tensor() + 0)
    if dist.get_rank() == RANKS - 1:
        with torch.no_grad():
            weight.to_local()[-1, -1] = -torch.tensor(torch.nan)
    update_scales(model)
    model[0].unshard()  # type: ignore[operator]
    scales = model[0].up.weight.scaled.scale
    assert scales[-1, -1].isnan()
    clean[-1, -1] = scales[-1, -1] = 0
    assert torch.equal(scales, clean)


def _converted() -> None:
    """Masters of another type, which PyTorch puts in the place of the parameters' own."""
    model = _model(512)
    gather_fp8(model)
    _sharded(model, {})
    update_scales(model)
    model.bfloat16()
    for _ in range(2):
        update_scales(model)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                whole = parameter.full_tensor() + 0  # type: ignore[attr-defined]
                assert whole.dtype == torch.bfloat16
                expected = _scales_of(whole)
                assert torch.equal(parameter.to_local()._shard.fp8.scale, expected)  # type: ignore[attr-defined]


def _plain_products() -> None:
    """PyTorch's own products take unquantized activations, and their gradients reach the masters."""
    model, whole = _model(304), _model(304)
    for block in whole:
        for layer in (block.up, block.down):
            layer.weight.data = fp8fn.quantize(layer.weight.detach(), (128, 128)).dequantize(torch.float32)
    gather_fp8(model)
    _sharded(model, {})
    update_scales(model)
    x = _tokens(0, 0)
    _loss(model, x).backward()
    _loss(whole, x).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)  # type: ignore[attr-defined]


def _meta_and_checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    with torch.device("meta"):
        model = nn.Sequential(*(Block(309, False) for _ in range(2)))
    gather_fp8(model)
    _sharded(model, {})
    model.to_empty(device=torch.get_default_device())
    torch.manual_seed(3 + dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_()  # type: ignore[attr-defined]
    update_scales(model)
    x = _tokens(0, 0)
    expected = model(x)
    model.reshard()  # type: ignore[operator]
    masters = [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = _model(309)
    gather_fp8(other)
    _sharded(other, {})
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    for parameter, master in zip(other.parameters(), masters, strict=True):
        assert torch.equal(parameter.full_tensor(), master)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="has no scales yet"):
        other(x)
    update_scales(other)
    assert torch.equal(other(x), expected)
    other.reshard()  # type: ignore[operator]
    dcp.async_save(
        {"model": other.state_dict()}, checkpoint_id=f"{folder}-later", process_group=dist.new_group(backend="gloo")
    ).result()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=f"{folder}-later")
    other.load_state_dict(state["model"])
    for parameter, master in zip(other.parameters(), masters, strict=True):
        assert torch.equal(parameter.full_tensor(), master)  # type: ignore[attr-defined]


def _assigned() -> None:
    """Weights that come by assignment, sharded or from rank 0 alone, are gathered in FP8 as those before."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    x, whole = _tokens(0, 0), _model(309)
    state = {name: value.detach() + 1 for name, value in whole.state_dict().items()}
    expected = _model(309)
    expected.load_state_dict(state)
    _in_fp8(expected, "blockwise")
    with torch.device("meta"):
        model = nn.Sequential(*(Block(309, False) for _ in range(2)))
    gather_fp8(model)
    _in_fp8(model, "blockwise")
    _sharded(model, {})
    for loaded in (state, whole.state_dict()):  # the second one after a forward
        set_model_state_dict(model, dict(loaded) if dist.get_rank() == 0 else {}, options=options)
        with pytest.raises(RuntimeError, match=r"has no scales yet|changed since"):
            model(x)
        update_scales(model)
        expected.load_state_dict(loaded)
        out, wanted = model(x), expected(x)
        if out.is_cuda:  # products sum in another order, and an activation may be rounded to the FP8 number beside
            assert (out - wanted).norm() <= 5e-3 * wanted.norm(), "found up to 9.1e-4; bytes of the load before: 0.23"
        else:
            torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
        _same_bits(model, Case(309))
    sharded = {name: value.detach() * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(sharded, assign=True)
    with pytest.raises(RuntimeError, match="has no scales yet"):
        model(x)
    update_scales(model)
    model(x)
    _same_bits(model, Case(309))
    torch.testing.assert_close(model[0].up.weight.full_tensor() + 0, whole[0].up.weight.detach() * 2)


class Experts(nn.Module):
    """Two products of groups, whose weights lie as transformers' experts have them: one matrix after the other."""

    def __init__(self, experts: int, rows: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, rows, 256) / 16)
        self.down = nn.Parameter(torch.randn(experts, 256, rows) / rows**0.5)
        self.recipe: str | None = "blockwise"

    def _product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if self.recipe is None:
            return F.grouped_mm(x, weight.mT, offs=ends)
        return fp8fn.grouped_gemm(x, weight.mT, ends, recipe=self.recipe)

    def forward(self, x: Tensor) -> Tensor:
        experts = self.up.shape[0]
        ends = [len(x) * (i + 1) // (experts + 1) for i in range(experts)]
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        return x + self._product(F.silu(self._product(x, self.up, offsets)), self.down, offsets)


class ExpertCase(NamedTuple):
    experts: int
    rows: int = 304
    options: Callable[[], dict[str, Any]] = dict
    recipe: str = "blockwise"
    backend: str | None = None


EXPERT_CASES = {
    "whole": ExpertCase(4),
    "one more on a rank": ExpertCase(3),
    "a rank without experts": ExpertCase(1, recipe="blockwise_pow2"),
    "cut within experts": ExpertCase(2, options=lambda: {"shard_placement_fn": lambda p: Shard(1)}),
    "cut along K": ExpertCase(2, options=lambda: {"shard_placement_fn": lambda p: Shard(2)}),
    "compiled": ExpertCase(3, backend="fp8fn"),
}


def _expert_model(case: ExpertCase) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(case.experts, case.rows), Experts(case.experts, case.rows))
    for layer in model:
        layer.recipe = None if case.backend else case.recipe
        if case.backend is not None:
            layer.bfloat16().compile(backend=case.backend, options={"where": "*", "recipe": case.recipe})
    return model


def _expert_losses(model: nn.Module, dtype: torch.dtype, *, sharded: bool) -> tuple[list[float], list[Tensor]]:
    """The losses of two steps, and the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in [dist.get_rank()] if sharded else range(RANKS):
            loss = _loss(model, _tokens(step, number).to(dtype)) / (1 if sharded else RANKS)
            loss.backward()
            total += loss.detach()
        if sharded:
            dist.all_reduce(total)
            total /= RANKS
        losses.append(total.item())
        optimizer.step()
        if sharded:
            update_scales(model)
    return losses, [p.grad.full_tensor() if sharded else p.grad for p in model.parameters()]  # type: ignore[union-attr, misc]


def _same_experts(name: str) -> None:
    case = EXPERT_CASES[name]
    model = _expert_model(case)
    x = _tokens(0, 0).to(model[0].up.dtype)
    with torch.no_grad():
        by_one = model(x)
    expected, gradients = _expert_losses(model, x.dtype, sharded=False)
    model = _expert_model(case)
    assert len(gather_fp8(model, recipe=case.recipe).quantized) == 4
    _sharded(model, case.options())
    update_scales(model)
    with torch.no_grad():
        assert torch.equal(model(x), by_one)
    with counted_gathers() as counts:
        found, sharded_gradients = _expert_losses(model, x.dtype, sharded=True)
    assert counts["quantized"] == 4 * STEPS
    assert counts["dequantized"] == 0
    assert counts["bytes"] == counts["gathered"] > 0
    exact = case.backend is None and not x.is_cuda
    torch.testing.assert_close(found, expected, rtol=1e-6 if exact else 1e-3, atol=0)
    for one, other in zip(sharded_gradients, gradients, strict=True):
        close = (1e-5, 1e-7) if exact else (3e-2, 1e-3)
        torch.testing.assert_close(one, other, rtol=close[0], atol=close[1])
    for layer in model.children():
        layer.reshard()  # type: ignore[operator]
        masters = [weight.full_tensor() + 0 for weight in layer.parameters()]  # type: ignore[attr-defined]
        layer.unshard()  # type: ignore[operator]
        for weight, master in zip((layer.up, layer.down), masters, strict=True):
            assert isinstance(weight, FP8Weight)
            scale = "pow2" if case.recipe == "blockwise_pow2" else "fp32"
            data, scales = reference.quantize(master, (128, 128), torch.float8_e4m3fn, scale)
            assert torch.equal(weight.scaled.data.view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(weight.scaled.scale, scales)
        layer.reshard()  # type: ignore[operator]


def _run(rank: int, device: str, folder: str) -> None:
    only_pytorch_may_warn()
    with process_group(device, rank, RANKS, f"{folder}/store"):
        for name in CASES:
            _same_training(name)
        for name in EXPERT_CASES:
            _same_experts(name)
        _stale()
        _written()
        _rounded()
        _written_by_inductor()
        _written_in_place()
        _captured_update()
        _evaluated()
        _evaluated_first_in_inference_mode()
        _loaded_after_a_capture()
        if device == "cuda":
            _captured_steps()
        _replaced((0, 1))
        _replaced((1,))
        for rows in (512, 304):
            _nan(rows)
        _converted()
        _plain_products()
        _meta_and_checkpoints(f"{folder}/checkpoint")
        _assigned()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@DEVICES
def test_two_processes(device: str, tmp_path: Path) -> None:
    """All cases in one pair of processes: starting them takes longer than the cases."""
    skip_without(device, RANKS)
    run_processes(_run, (device, str(tmp_path)), RANKS)


def test_what_stays() -> None:
    model = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 512), nn.Linear(512, 10))
    report = gather_fp8(model)
    assert report.quantized == ("1.weight",)
    assert set(report.kept) == {"0.weight", "2.weight"}
    assert gather_fp8(model, "1.weight").kept["1.weight"] == "it is gathered in FP8 already"
    assert torch.equal(model[1](torch.eye(256)), torch.eye(256) @ model[1].weight.T + model[1].bias)
    copied = copy.deepcopy(model)
    assert type(copied[1].weight.detach()) is type(model[1].weight.detach())
    assert isinstance(copied[1].weight, nn.Parameter)
    assert copied[1].weight.data_ptr() != model[1].weight.data_ptr()
    assert torch.equal(copied[1].weight, model[1].weight)


@pytest.mark.parametrize("backend", [None, "fp8fn"])
def test_without_fsdp_it_is_a_plain_weight(backend: str | None) -> None:
    """As under DDP, or where `fully_shard` was forgotten."""
    results = []
    for gathers in (False, True):
        model = _model(304)[:1]
        if gathers:
            assert len(gather_fp8(model).quantized) == 2
        _in_fp8(model, "blockwise", backend)
        loss = _loss(model, _tokens(0, 0))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    exact = _loss(_model(304)[:1], _tokens(0, 0))
    assert not torch.equal(results[0][0], exact)
    for plain, master in zip(*results, strict=True):
        assert plain is not None
        assert master is not None
        assert torch.equal(plain, master)


def test_masters_lie_at_addresses_of_their_own() -> None:
    model = _model(304)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    gather_fp8(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert len(set(before)) == len(before)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_that_torch_compile_breaks_at_hooks(tmp_path: Path) -> None:
    """Outside graphs torch.compile leaves the ops of gathered weights and of masters alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 256))
        gather_fp8(model)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh_of(1))
        fully_shard(model, mesh=mesh_of(1))
        update_scales(model)
        x = torch.randn(8, 256)
        out = torch.compile(model, backend="aot_eager")(x)
        out.sum().backward()
        assert torch.equal(out, model(x))
    finally:
        dist.destroy_process_group()


def test_a_master_in_shared_memory() -> None:
    model = _model(304)
    gather_fp8(model)
    before = model[0].up.weight + 0
    model.share_memory()
    assert model[0].up.weight._tensor.is_shared()
    assert torch.equal(model[0].up.weight + 0, before)


def test_a_recipe_whose_weights_have_two_forms() -> None:
    with pytest.raises(ValueError, match=r"gather_fp8: recipe has weight_block=\(-1, 1\), whose data for the forward"):
        gather_fp8(nn.Linear(256, 256), recipe="rowwise")


def test_the_values_of_a_master_are_replaced() -> None:
    """As accelerate does, which widens a model's masters under mixed precision."""
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).bfloat16()
    gather_fp8(model)
    weight = model[0].weight
    weight.data = weight.data.float() * 3
    assert {weight.dtype, weight.detach().dtype, (weight.detach() + 0).dtype} == {torch.float32}
    weight.data.fill_(2)
    assert torch.equal(model(torch.ones(256)), torch.full((512,), 512.0))
    assert weight.is_leaf
    assert weight.requires_grad
