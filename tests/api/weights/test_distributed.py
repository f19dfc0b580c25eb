"""FSDP2, DDP and collectives of `FP8Weight`s on two processes of a CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops.layout import Block
from fp8fn.weights import collectives
from support.accuracy import snr
from support.fp8_weights import make, parts, same, values
from support.processes import run_processes

RANKS = 2


def _model(rows: int, block: Block = (128, 128), seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(256, rows), nn.SiLU(), nn.Linear(rows, 256, bias=False), nn.Linear(256, 8))
    for layer in (made[0], made[2]):
        q = fp8fn.quantize(3 * layer.weight.detach(), block)
        layer.weight = nn.Parameter(FP8Weight(q, torch.float32), requires_grad=False)
    return made


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("rows", "block"), [(256, (128, 128)), (304, (128, 128)), (300, (1, 128)), (300, (1, -1)), (300, (-1, -1))], ids=str
)
def test_fsdp_of_one_rank(rows: int, block: Block, tmp_path: Path) -> None:
    """FSDP copies one tensor of each weight there."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        layer, x = nn.Linear(256, rows, bias=False), torch.randn(3, 256)
        layer.weight = nn.Parameter(make(rows, 256, block=block), requires_grad=False)
        dense = values(layer.weight)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        assert snr(layer(x), x @ dense.T) > 100
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (128, 1), (1, -1), (-1, 1), (-1, -1)], ids=str)
@pytest.mark.parametrize("pads", [(0, 0, 0, 1), (0, 3), (0, 0, 0, 130), (0, 0, 0, 0)], ids=str)
def test_zeros_behind_an_end_keep_fp8(block: Block, pads: tuple[int, ...]) -> None:
    weight = make(127, 256, block=block)
    padded = torch.nn.functional.pad(weight, pads)
    assert isinstance(padded, FP8Weight)
    assert torch.equal(values(padded), torch.nn.functional.pad(values(weight), pads))


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (0, 0, 1, 0), (0, 0, 0, -1)], ids=str)
def test_other_pads_dequantize(pads: tuple[int, ...]) -> None:
    weight = make(127, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        padded = torch.nn.functional.pad(weight, pads)
    assert torch.equal(padded.clone(), torch.nn.functional.pad(values(weight), pads))


def _dense(model: nn.Sequential) -> nn.Sequential:
    made = copy.deepcopy(model)
    for layer in (made[0], made[2]):
        layer.weight = nn.Parameter(values(layer.weight), requires_grad=False)
    return made


def _shards(rows: int, block: Block, mixed: bool = False) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    sent: list[tuple[torch.dtype, int]] = []
    inputs = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]

    def watched(self: FSDPParam) -> list[Tensor]:
        out: list[Tensor] = inputs(self)
        sent.extend((t.dtype, t.numel()) for t in out)
        return out

    FSDPParam.all_gather_inputs = property(watched)  # type: ignore[assignment, method-assign]
    try:
        model, reference = _model(rows, block), _dense(_model(rows, block))
        mesh = init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        kinds = {type(p._local_tensor) for p in (model[0].weight, model[2].weight)}
        assert kinds == {FP8Weight}
        for _ in range(2):
            sent.clear()
            x = torch.randn(4, 256)
            given, expected = (x.clone().requires_grad_() for _ in range(2))
            out, dense = model(given), reference(expected)
            out.sin().sum().backward()
            dense.sin().sum().backward()
            assert given.grad is not None
            assert expected.grad is not None
            assert snr(out.float(), dense) > (35 if mixed else 100)
            assert snr(given.grad, expected.grad) > (25 if mixed else 90)
            weights = sum(count for dtype, count in sent if dtype == torch.uint8)
            # Forward and backward gather the bytes of this rank's rows, and 4 bytes for each scale.
            shards = [model[layer].weight._local_tensor for layer in (0, 2)]
            least = 2 * sum(shard.numel() for shard in shards)
            assert least <= weights <= least + 8 * sum(shard._scale.numel() for shard in shards)
        full = model[0].weight.full_tensor()
        assert isinstance(full, FP8Weight)
        assert torch.equal(full.dequantize(), reference[0].weight)
    finally:
        FSDPParam.all_gather_inputs = property(inputs)  # type: ignore[assignment, method-assign]


def _whole_blocks() -> None:
    _shards(512, (128, 128))


def _torn_blocks() -> None:
    _shards(320, (128, 128))


def _other_blocks() -> None:
    _shards(304, (1, 128))
    _shards(304, (1, -1))
    _shards(304, (-1, -1))
    layer = nn.Linear(256, 305, bias=False)
    layer.weight = nn.Parameter(make(305, 256, block=(-1, -1)), requires_grad=False)
    dense = values(layer.weight)
    fully_shard(layer)
    x = torch.randn(3, 256)
    assert snr(layer(x), x @ dense.T) > 100


def _mixed_precision() -> None:
    _shards(512, (128, 128), mixed=True)


def _loading_a_sharded_model() -> None:
    """Also after a forward, whose gathered scales are those of the old weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model, other = _model(512), _model(512, seed=1)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(3, 256)
    assert snr(model(x), _dense(_model(512))(x)) > 100
    model.reshard()  # the root stays gathered after a forward
    set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert snr(model(x), _dense(other)(x)) > 100


def _loading_ragged_shards() -> None:
    """PyTorch pads them to one size before it scatters them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    for rows, block in ((305, (1, 128)), (305, (128, 128))):
        model, weights = nn.Linear(256, rows, bias=False), [make(rows, 256, block=block) for _ in range(2)]
        model.weight = nn.Parameter(weights[0], requires_grad=False)
        fully_shard(model)
        x = torch.randn(3, 256)
        assert snr(model(x), x @ values(weights[0]).T) > 100
        model.reshard()
        set_model_state_dict(model, {"weight": weights[1]}, options=StateDictOptions(full_state_dict=True))
        assert snr(model(x), x @ values(weights[1]).T) > 100


def _one_row() -> None:
    """As a reward's head has: the other rank's shard is empty, and keeps no block."""
    layer = nn.Linear(256, 1, bias=False)
    layer.weight = nn.Parameter(make(1, 256), requires_grad=False)
    dense, x = values(layer.weight), torch.randn(3, 256)
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    for _ in range(2):
        assert snr(layer(x), x @ dense.T) > 100
        layer.reshard()


def _columns() -> None:
    """FSDP lays the gathered bytes of other dimensions out by rank, which this weight does not undo."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    model[0].weight = nn.Parameter(make(256, 256), requires_grad=False)
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(NotImplementedError, match="divide another dimension than the first"):
        model(torch.randn(3, 256))


def _ddp() -> None:
    """Rank 0's bytes and scales reach every rank as they are; quantizing dequantized values again would differ."""
    model, first = _model(320, seed=dist.get_rank()), _model(320)
    if dist.get_rank():
        assert not same(model[0].weight, first[0].weight)
    wrapped = DistributedDataParallel(model)
    for layer in (0, 2):
        assert same(model[layer].weight, first[layer].weight)
    assert torch.equal(model[3].weight, first[3].weight)
    x = torch.randn(3, 256)
    out = wrapped(x)
    out.sum().backward()
    assert snr(out, _dense(first)(x)) > 100
    assert model[3].weight.grad is not None


def _collectives() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    own = make(256, 128, block=(1, 128))
    torch.manual_seed(0)
    first = make(256, 128, block=(1, 128))
    assert same(own, first) == (rank == 0)
    received = own.clone()
    dist.broadcast(received, src=0)
    assert same(received, first)
    everyone = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(everyone, own)
    assert same(everyone[0], first)
    assert same(everyone[rank], own)
    before = parts(own)[0].clone()
    with pytest.raises(NotImplementedError, match=r"c10d.allreduce_.default has no form for an FP8Weight"):
        dist.all_reduce(own)
    assert torch.equal(parts(own)[0], before)


CASES: tuple[Callable[[], None], ...] = (
    _whole_blocks,
    _torn_blocks,
    _other_blocks,
    _mixed_precision,
    _loading_a_sharded_model,
    _loading_ragged_shards,
    _one_row,
    _columns,
    _ddp,
    _collectives,
)


def _run(rank: int, store: str) -> None:
    warnings.simplefilter("error")
    # PyTorch's own
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        for case in CASES:
            torch.manual_seed(7)
            case()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Path) -> None:
    """All cases in one pair of processes: starting them takes longer than the cases."""
    run_processes(_run, (str(tmp_path / "store"),), RANKS)


def _loaded_from_rank_0(rank: int, store: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model, loaded = _model(512), _model(512, seed=1).state_dict()
    fully_shard(model)
    shard = parts(model[0].weight.full_tensor())[0].chunk(RANKS)[rank]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if rank == 0:
        with pytest.raises(
            NotImplementedError, match=r"from_rank0=True\) of an FP8Weight: .* dict on each rank, by set_"
        ):
            set_model_state_dict(model, loaded, options=options)
        dist.destroy_process_group()
    else:
        with pytest.raises(RuntimeError, match="onnection"):
            set_model_state_dict(model, {}, options=options)
    assert torch.equal(model[0].weight._local_tensor._data.view(torch.uint8), shard)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_loading_from_rank_0_alone(tmp_path: Path) -> None:
    """Rank 0 says what works. The other ranks wait for a tensor of 32 bits, and end when rank 0 does."""
    run_processes(_loaded_from_rank_0, (str(tmp_path / "store"),), RANKS)


@pytest.mark.parametrize("sender", ["torch.distributed._state_dict_utils", "accelerate.utils.fsdp_utils"])
def test_rank_0_tells_its_sender(sender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module of a caller; a group of one rank sends nothing."""
    pytest.importorskip(sender)
    send = eval("lambda: check()", {"__name__": sender, "check": collectives._check_receivers})
    for world in (1, 2):
        monkeypatch.setattr(dist, "get_world_size", lambda world=world: world)
        collectives._check_receivers()
        with pytest.raises(NotImplementedError, match="of an FP8Weight") if world > 1 else nullcontext():
            send()
