"""Tensor and sequence parallelism on processes of a CPU or on GPUs: unmodified models, PyTorch's styles and fp8fn's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.utils._python_dispatch import TorchDispatchMode

import fp8fn
import fp8fn.distributed as fp8_styles
from fp8fn.distributed import gather_fp8, update_scales
from support.accuracy import snr
from support.processes import DEVICES, drawn, mesh_of, process_group, run_processes, skip_without
from support.ranks import ranks_in_one_process, sharded

VOCABULARY, WIDTH, HEADS = 256, 512, 4
PLANS = {"torch": torch_styles, "fp8fn": fp8_styles}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(self.block(self.embed(tokens))))
        return out


def _plain() -> Llama:
    torch.manual_seed(0)
    return Llama()


def _model() -> Llama:
    model = _plain()
    model.block.forward = fp8fn.fp8(model.block.forward, recipe="blockwise_pow2")  # type: ignore[method-assign]
    return model


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, 4, 64), generator=generator, device="cpu")
    one, two = tokens.to(torch.get_default_device())
    return one, two


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _parallel(model: Llama, mesh: Any, styles: Any, *, local_loss: bool) -> Llama:
    sequence = torch_styles.SequenceParallel()

    def whole() -> Any:
        return styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())

    embed = torch_styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    placed = {"output_layouts": Shard(-1), "use_local_output": False} if local_loss else {"output_layouts": Replicate()}
    output = torch_styles.ColwiseParallel(input_layouts=Shard(1), **placed)
    torch_styles.parallelize_module(model, mesh, {"embed": embed, "norm": sequence, "output": output})
    plan: dict[str, Any] = {"attention_norm": sequence, "ffn_norm": sequence}
    plan.update({name: whole() for name in ("attention", "feed_forward")})
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        plan[name] = styles.ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        plan[name] = styles.RowwiseParallel(output_layouts=Shard(1))
    torch_styles.parallelize_module(model.block, mesh, plan)
    return model


class Wire(TorchDispatchMode):
    """Bytes that all-gathers give each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.gathered += out.numel() * out.element_size()
        return out


def _whole(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return whole


def _same(reference: nn.Module, model: nn.Module, bound: float) -> None:
    for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        # The bias of a row-parallel product sums the gathered gradient.
        assert snr(_whole(found.grad), expected.grad) > (29 if name.endswith("bias") else bound), name


def _compile(model: Llama, parts: str) -> Llama:
    """A model that the backend compiles as a whole, by its block, or its attention and its feed-forward network apart.

    Blocks need constant sizes and plain tensors, in PyTorch's own backends too: the embedding's output is still on its
    way otherwise, a subclass whose gradient PyTorch loses.
    """
    options = {"where": "block.*" if parts == "whole" else "*", "recipe": "blockwise_pow2"}
    if parts == "blocks":
        model.embed.register_forward_hook(lambda module, args, out: out.clone())
        model.block.compile(backend="fp8fn", options=options, fullgraph=True, dynamic=False)
        return model
    for module in (model,) if parts == "whole" else (model.block.attention, model.block.feed_forward):
        module.compile(backend="fp8fn", options=options)
    return model


def _forget_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _was_compiled() -> bool:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def _trained() -> tuple[Llama, float]:
    model, (tokens, targets) = _model(), _batch()
    loss = _loss(model(tokens), targets)
    loss.backward()
    return model, loss.item()


def _styles(kind: str, *, local_loss: bool, compiled: str = "") -> None:
    """Loss and gradients of one process. Rounding a sum of parts otherwise flips few values of FP8."""
    reference, expected = _trained()
    tokens, targets = _batch()
    _forget_graphs()
    model, mesh = (
        _plain() if compiled else _model(),
        mesh_of(),
    )
    model = _parallel(model, mesh, PLANS[kind], local_loss=local_loss)
    if compiled:
        model = _compile(model, compiled)
    with torch_styles.loss_parallel() if local_loss else nullcontext():
        loss = _loss(model(tokens), targets)
        loss.backward()
    assert _was_compiled() == bool(compiled)
    assert abs(_whole(loss).item() - expected) < 1e-5
    _same(reference, model, 35)


def _placed(x: Tensor, mesh: Any) -> DTensor:
    part = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(part, mesh, [Shard(1)], shape=x.shape, stride=x.stride())


def _wire() -> None:
    """A feed-forward network in bf16, of even and of ragged sequences."""
    for length in (64, 33):
        x, grad = drawn(2, 4, length, WIDTH, seed=2).bfloat16()
        torch.manual_seed(0)
        reference = FeedForward().bfloat16()
        y = fp8fn.fp8(reference, recipe="blockwise_pow2")(x)
        y.backward(grad)
        gathered = {}
        for kind, styles in PLANS.items():
            if kind == "torch" and length % dist.get_world_size() != 0:
                continue  # PyTorch 2.11's own products fail there: they view what is not contiguous
            torch.manual_seed(0)
            model, mesh = FeedForward().bfloat16(), mesh_of()
            plan: dict[str, Any] = {
                "": styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "w1": styles.ColwiseParallel(),
                "w3": styles.ColwiseParallel(),
                "w2": styles.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            torch_styles.parallelize_module(model, mesh, plan)
            with Wire() as wire:
                out = fp8fn.fp8(model, recipe="blockwise_pow2")(_placed(x, mesh))
                out.backward(_placed(grad, mesh))
            gathered[kind] = wire.gathered
            assert snr(out.full_tensor(), y) > 45
            _same(reference, model, 60)
        world = dist.get_world_size()
        in_16_bits = 2 * 2 * (x.numel() // length) * -(-length // world) * world  # of the input and of the gradient
        assert gathered.get("torch", in_16_bits) == in_16_bits
        assert 0 < gathered["fp8fn"] < 0.55 * in_16_bits


def _two_dimensions(replicas: int, *, kind: str = "torch", fp8_wire: str = "", compiled: str = "") -> None:
    """FSDP2 beside tensor parallelism, before or after which weights are prepared for a gather in FP8.

    All ranks of FSDP2 have one batch, whose gradients their mean is.
    """
    reference, expected = _trained()
    tokens, targets = _batch()
    _forget_graphs()
    mesh = init_device_mesh(
        torch.get_default_device().type, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("dp", "tp")
    )
    model: Any = _plain() if compiled else _model()
    if fp8_wire == "before":
        assert len(gather_fp8(model.block, recipe="blockwise_pow2").quantized) == 7
    _parallel(model, mesh["tp"], PLANS[kind], local_loss=False)
    if compiled:
        _compile(model, compiled)
    if fp8_wire == "after":
        assert len(gather_fp8(model.block, recipe="blockwise_pow2").quantized) == 7
    fully_shard(model.block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if fp8_wire:
        update_scales(model)
    loss = _loss(model(tokens), targets)
    loss.backward()
    assert _was_compiled() == bool(compiled)
    assert abs(loss.item() - expected) < 1e-5
    _same(reference, model, 35)
    if fp8_wire:  # a step: no scale stays as it was at the first gather
        with torch.no_grad():
            for parameter in (*model.block.parameters(), *reference.block.parameters()):
                parameter.mul_(2)
        update_scales(model)
        assert abs(_loss(model(tokens), targets) - _loss(reference(tokens), targets)) < 1e-5


def _gathered_within_a_block() -> None:
    """Scales of a part of a block are no scales of the weight."""
    for recipe, rows in (("blockwise_pow2", 304), ("tensorwise", 512)):
        layer = nn.Linear(256, rows, bias=False)
        mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
        torch_styles.parallelize_module(layer, mesh["tp"], torch_styles.ColwiseParallel())
        gather_fp8(layer, "*", recipe=recipe)
        fully_shard(layer, mesh=mesh["dp"])
        with pytest.raises(ValueError, match=r"weight \(\d+, 256\) is cut by tensor parallelism along dim"):
            update_scales(layer)


def _evaluated() -> None:
    """After a forward without a backward FSDP holds the root's weights, as DTensors here: they are quantized anew."""
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
    mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": torch_styles.ColwiseParallel(), "1": torch_styles.RowwiseParallel()}
    torch_styles.parallelize_module(model, mesh["tp"], plan)
    assert len(gather_fp8(model).quantized) == 2
    fully_shard(model, mesh=mesh["dp"])
    parameters, x = list(model.parameters()), drawn(8, 256, seed=1)
    update_scales(model)
    with torch.no_grad():
        before = model(x)
        for parameter in parameters:
            parameter.mul_(2)
    update_scales(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), 4 * before)


def _of_two() -> None:
    _styles("torch", local_loss=False)
    _styles("torch", local_loss=True)
    _styles("fp8fn", local_loss=True)
    _styles("fp8fn", local_loss=True, compiled="apart")
    _styles("torch", local_loss=True, compiled="blocks")
    _styles("fp8fn", local_loss=True, compiled="blocks")
    _styles("fp8fn", local_loss=True, compiled="whole")
    _wire()
    _two_dimensions(1)
    _gathered_within_a_block()
    _evaluated()


def _of_four() -> None:
    _styles("torch", local_loss=True)
    _styles("fp8fn", local_loss=True)
    _styles("torch", local_loss=True, compiled="apart")
    _styles("torch", local_loss=True, compiled="whole")
    _wire()
    _two_dimensions(2)
    _two_dimensions(2, fp8_wire="before")
    _two_dimensions(2, fp8_wire="after", compiled="apart")
    _two_dimensions(2, fp8_wire="after", compiled="blocks")


def _own_styles_of_four() -> None:
    _styles("fp8fn", local_loss=True, compiled="apart")
    _styles("fp8fn", local_loss=True, compiled="whole")
    _two_dimensions(2, kind="fp8fn", fp8_wire="before")
    _two_dimensions(2, kind="fp8fn", fp8_wire="after", compiled="apart")


def _run(rank: int, device: str, store: str, cases: Callable[[], None], ranks: int) -> None:
    with process_group(device, rank, ranks, store):
        cases()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(
    ("cases", "ranks"), [(_of_two, 2), (_of_four, 4), (_own_styles_of_four, 4)], ids=["two", "four", "four by fp8fn's"]
)
@DEVICES
def test_processes(device: str, cases: Callable[[], None], ranks: int, tmp_path: Path) -> None:
    skip_without(device, ranks)
    run_processes(_run, (device, str(tmp_path / "store"), cases, ranks), ranks)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_gathered_weights_of_tensor_parallelism(tmp_path: Path) -> None:
    """A gathered weight within a DTensor is multiplied by the recipe, not beside activations of 32 bits."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        x = torch.randn(40, 256)
        plain, model = (nn.Linear(256, 384) for _ in range(2))
        model.load_state_dict(plain.state_dict())
        expected = fp8fn.fp8(plain)(x)
        expected.square().sum().backward()
        mesh = mesh_of(1, 1, names=("dp", "tp"))
        torch_styles.parallelize_module(model, mesh["tp"], torch_styles.ColwiseParallel())
        gather_fp8(model, "*")
        fully_shard(model, mesh=mesh["dp"])
        update_scales(model)
        out = fp8fn.fp8(model)(x)
        out.square().sum().backward()
        assert torch.equal(out, expected)
        _same(plain, model, 130)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_sequence_of_a_type_that_fp8_does_not_stand_for_is_gathered_as_it_is(dtype: torch.dtype) -> None:
    """Such as a mask, which `PrepareModuleInput` gathers beside the activations."""
    x = drawn(2, 8, 16, seed=1).sign().clamp_min(0).to(dtype)
    with ranks_in_one_process(2) as ranks, ranks.mode:
        style = fp8_styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        module = torch_styles.parallelize_module(nn.Identity(), ranks.mesh, style)
        out = module(sharded(x, ranks.mesh, Shard(1)).to_local()).full_tensor().reconcile()
    assert torch.equal(out, x)


class Masked(nn.Module):
    """Attention's inputs, which it gives back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq = nn.Linear(width, 64)

    def forward(self, x: Tensor, mask: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
        return x, mask, turns


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("tokens", [8, 256], ids=["fewer tokens than columns", "as many"])
@pytest.mark.parametrize("quantized", [None, 2, 0], ids=str)
def test_a_mask_beside_activations_is_gathered_as_it_is(quantized: int | None, tokens: int, by_name: bool) -> None:
    """In 16 bits, with its -Inf; so are rotary embeddings, unless the style is told otherwise."""
    names = ("x", "mask", "turns")
    inputs = (
        drawn(2, tokens, 256, seed=1),
        torch.full((2, tokens, tokens), -torch.inf).triu(1),
        drawn(2, tokens, 64, seed=2),
    )
    cut = {name: Shard(1) for name in names} if by_name else (Shard(1),) * 3
    whole = {name: Replicate() for name in names} if by_name else (Replicate(),) * 3
    of_names = {"input_kwarg_layouts": cut, "desired_input_kwarg_layouts": whole}
    layouts = of_names if by_name else {"input_layouts": cut, "desired_input_layouts": whole}
    with ranks_in_one_process(2) as ranks, ranks.mode:
        chosen = None if quantized is None else (names[quantized] if by_name else quantized,)
        style = fp8_styles.PrepareModuleInput(quantized_inputs=chosen, use_local_output=True, **layouts)
        module = torch_styles.parallelize_module(Masked(256), ranks.mesh, style)
        parts = [sharded(x, ranks.mesh, Shard(1)).to_local() for x in inputs]
        out = module(**dict(zip(names, parts, strict=True))) if by_name else module(*parts)
        found = [y.reconcile() for y in out]
    for place, (x, y) in enumerate(zip(inputs, found, strict=True)):
        as_fp8 = fp8fn.quantize(x, (1, 128), scale="pow2").dequantize(x.dtype)
        assert torch.equal(y, as_fp8 if place == (quantized or 0) else x), names[place]


def test_a_mask_is_gathered_as_it_is_whatever_comes_before_it() -> None:
    """As wide as a layer, before activations that a caller names later, or beside some that are whole already."""
    x, mask = drawn(2, 256, 256, seed=1), torch.full((2, 256, 256), -torch.inf).triu(1)
    names = ("x", "mask", "turns")
    with ranks_in_one_process(2) as ranks, ranks.mode:
        part = sharded(mask, ranks.mesh, Shard(1)).to_local()
        for cut in (names, names[1:]):
            style = fp8_styles.PrepareModuleInput(
                input_kwarg_layouts={name: Shard(1) for name in cut},
                desired_input_kwarg_layouts={name: Replicate() for name in cut}, use_local_output=True,
            )  # fmt: skip
            module = torch_styles.parallelize_module(Masked(256), ranks.mesh, style)
            given = sharded(x, ranks.mesh, Shard(1)).to_local() if "x" in cut else x
            out = module(mask=part, turns=part, x=given)
            found = [y.reconcile() if hasattr(y, "reconcile") else y for y in out]
            as_fp8 = fp8fn.quantize(x, (1, 128), scale="pow2").dequantize(x.dtype)
            assert torch.equal(found[0], as_fp8 if "x" in cut else x)
            assert torch.equal(found[1], mask)
            assert torch.equal(found[2], mask)


def test_only_inputs_with_a_layout_are_quantized() -> None:
    for wrong in ((1,), ("mask",)):
        with pytest.raises(ValueError, match=r"quantized_inputs=\(.*\) has an input without a layout; .* \[0, 'x'\]"):
            fp8_styles.PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), input_kwarg_layouts={"x": Shard(1)},
                desired_input_kwarg_layouts={"x": Replicate()}, quantized_inputs=wrong,
            )  # fmt: skip


def test_activations_of_a_module_with_bare_matrices_are_gathered_in_fp8() -> None:
    """Experts, for example, which lie either way."""
    for shape in ((4, 256, 64), (4, 64, 256), (256, 64)):
        x = drawn(2, 8, 256, seed=1)
        with ranks_in_one_process(2) as ranks, ranks.mode:
            style = fp8_styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            module = nn.Identity()
            module.w = nn.Parameter(torch.randn(*shape))
            module = torch_styles.parallelize_module(module, ranks.mesh, style)
            out = module(sharded(x, ranks.mesh, Shard(1)).to_local()).full_tensor().reconcile()
        assert torch.equal(out, fp8fn.quantize(x, (1, 128), scale="pow2").dequantize(x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_largest_numbers_of_a_sequence_stay_finite(dtype: torch.dtype) -> None:
    """FP8 rounds them beyond their type."""
    largest = torch.finfo(dtype).max
    x = (torch.linspace(-1, 1, 2 * 8 * 256).view(2, 8, 256) * largest).to(dtype)
    with ranks_in_one_process(2) as ranks, ranks.mode:
        style = fp8_styles.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        module = torch_styles.parallelize_module(nn.Linear(256, 4, bias=False, dtype=dtype), ranks.mesh, style)
        gathered: list[Any] = []
        module.register_forward_pre_hook(lambda module, inputs: gathered.extend(inputs))
        module(sharded(x, ranks.mesh, Shard(1)))
        out = gathered[0].to_local().reconcile()
    assert out.isfinite().all()
    assert (out[0, 0, 0], out[-1, -1, -1]) == (-largest, largest)


@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel", "PrepareModuleInput"])
def test_styles_need_scales_that_are_powers_of_two(style: str) -> None:
    with pytest.raises(ValueError, match=r"recipe='blockwise' .* use BLOCKWISE_POW2"):
        getattr(fp8_styles, style)(recipe="blockwise")
