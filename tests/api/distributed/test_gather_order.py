"""`gather_fp8` and `update_scales` in other orders and on other modules than the documentation's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8fn
from fp8fn.distributed import gather_fp8, update_scales
from support.gathers import has_whole_bits
from support.processes import drawn, mesh_of

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)),
        nn.Sequential(nn.Linear(256, 304), nn.ReLU(), nn.Linear(304, 256)),
        nn.Linear(256, 256),
    )


def _sharded(model: nn.Module, *parts: nn.Module) -> None:
    for part in (*parts, model):
        fully_shard(part, mesh=mesh_of(1))


def _doubled(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2)


def test_parts_one_after_the_other() -> None:
    """A part has its own weights quantized, and the next gather names the first weight of another part."""
    model, x = _model(), drawn(32, 256, seed=1)
    gather_fp8(model)
    _sharded(model, *model[:2])
    parameters = list(model.parameters())
    for _ in range(2):
        update_scales(model[0])
        update_scales(model[1])
        with pytest.raises(RuntimeError, match=r"^2\.weight (has no scales yet|changed since)"):
            model(x)
        update_scales(model[2])
        assert has_whole_bits(model) == 5
        model(x).sum().backward()
        _doubled(parameters)


def test_a_part_that_fsdp_has_sharded_with_the_whole() -> None:
    """After a forward without a backward FSDP holds its weights gathered, and the part does not say by which module."""
    model, x = _model(), drawn(32, 256, seed=1)
    gather_fp8(model)
    _sharded(model)
    parameters = list(model.parameters())
    for part in model:
        update_scales(part)  # of shards
    assert has_whole_bits(model) == 5
    with torch.no_grad():
        before = model(x)
    _doubled(parameters)
    for part in model:
        with pytest.raises(RuntimeError, match=r"update_scales: FSDP holds .*weight gathered, by a module"):
            update_scales(part)
    with torch.no_grad():
        update_scales(model)
        assert not torch.equal(model(x), before)
    assert has_whole_bits(model) == 5


def test_a_model_without_gathered_weights() -> None:
    unprepared, small, prepared = _model(), nn.Linear(10, 10), _model()
    _sharded(unprepared)
    gather_fp8(small)
    for model in (unprepared, small):
        with pytest.warns(UserWarning, match="update_scales: gather_fp8 has chosen no weight of this ") as shown:
            update_scales(model)
        assert shown[0].filename == __file__
    gather_fp8(prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_scales(DistributedDataParallel(prepared))


def test_a_prepared_model_that_fsdp_has_not_sharded() -> None:
    """With a mesh of tensor parallelism too, whose DTensors are quantized, and gathered by nobody."""
    model, split, part = _model(), _model(), _model()
    parallelize_module(split, mesh_of(1), {"2": ColwiseParallel()})
    for each in (model, split, part):
        gather_fp8(each)
    for each in (model, copy.deepcopy(model), split):
        message = "update_scales: FSDP has sharded no weight of this Sequential that gather_fp8 has chosen, .* call "
        with pytest.warns(UserWarning, match=message) as shown:
            update_scales(each)
        assert len(shown) == 1
        assert shown[0].filename == __file__
    _sharded(model)
    with pytest.raises(RuntimeError, match=r"weight has no scales yet; call fp8fn\.distributed\.update_scales"):
        model(drawn(32, 256, seed=1))
    fully_shard(part[1], mesh=mesh_of(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_scales(model)
        update_scales(part)  # of which FSDP has one part
        model(drawn(32, 256, seed=1))
        update_scales(model)  # while FSDP holds the root's weights gathered


def test_gather_fp8_after_fully_shard() -> None:
    """FSDP keeps the parameters that it has sharded, and would never gather new ones."""
    model, x = _model(), drawn(32, 256, seed=1)
    expected = model(x)
    fully_shard(model[0], mesh=mesh_of(1))
    for where in (None, "0.2.weight"):
        with pytest.raises(ValueError, match=r"gather_fp8: FSDP has sharded 0\.[02]\.weight already; call gather"):
            gather_fp8(model, where)
    with pytest.raises(ValueError, match=r"gather_fp8: FSDP has sharded 0\.weight already"):
        gather_fp8(model[0])

    def others(site: fp8fn.Site) -> bool:
        return site.weight is not None and not site.weight.startswith("0.")

    assert gather_fp8(model, others).quantized == ("1.0.weight", "1.2.weight", "2.weight")
    fully_shard(model, mesh=mesh_of(1))
    update_scales(model)
    assert has_whole_bits(model) == 3
    assert 0 < (model(x) - expected).norm() < 0.05 * expected.norm()
    assert gather_fp8(model, others).quantized == ()  # FSDP holds the gathered weights


@pytest.mark.parametrize("prepared", [True, False])
def test_copies_before_fully_shard(prepared: bool) -> None:
    """A copy has masters of its own, whether it was copied before `gather_fp8` or after it."""
    model, x = _model(), drawn(32, 256, seed=1)
    if prepared:
        gather_fp8(model)
    other = copy.deepcopy(model)
    for each in (model, other):
        if not prepared:
            gather_fp8(each)
        _sharded(each, *each[:2])
        update_scales(each)
        assert has_whole_bits(each) == 5
    parameters = list(model.parameters())
    before = model(x)
    _doubled(parameters)
    update_scales(model)
    assert torch.equal(other(x), before)
    assert not torch.equal(model(x), before)
    assert has_whole_bits(model) == has_whole_bits(other) == 5
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):  # PyTorch's own, without fp8fn too
        copy.deepcopy(model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # a style's output is a view
@pytest.mark.parametrize("order", ["gather, parallelize", "parallelize, gather", "parallelize, copy, gather"])
def test_copies_under_tensor_parallelism(order: str) -> None:
    """`gather_fp8` and `parallelize_module` in either order, and a copy, before `fully_shard`: one result."""
    mesh, x = mesh_of(1, 1, names=("dp", "tp")), drawn(32, 256, seed=1)
    models = [_model()[0]]
    expected = fp8fn.fp8(_model()[0])(x)
    for step in order.split(", "):
        if step == "copy":
            models.append(copy.deepcopy(models[0]))
            continue
        for model in models:
            if step == "gather":
                assert gather_fp8(model).quantized == ("0.weight", "2.weight")
            else:
                parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    models.append(copy.deepcopy(models[0]))
    for model in models:
        fully_shard(model, mesh=mesh["dp"])
        update_scales(model)
        assert torch.equal(fp8fn.fp8(model)(x), expected)


def test_a_part_that_runs_alone() -> None:
    """It needs no other `update_scales` than its own."""
    model, x = _model(), drawn(32, 256, seed=1)
    whole = copy.deepcopy(model[0])
    gather_fp8(model)
    _sharded(model, *model[:2])
    update_scales(model[0])
    assert torch.equal(fp8fn.fp8(model[0])(x), fp8fn.fp8(whole)(x))
