"""Weights that are quantized or sharded before the recipe sees them: left alone, with a reason, and the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from support.accuracy import snr
from support.traced import both_passes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
N, K, EXPERTS = 384, 256, 3
ALREADY = "the weight is {} data with scales already, which the recipe never quantizes again"


class Scaled(Tensor):
    """Quantized data with a scale for each row, as torchao's tensors: a product dequantizes, other ops do not exist."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)  # type: ignore

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.parts, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["parts", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["parts"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.t.default, aten.detach.default, aten.alias.default):
            return Scaled(func(args[0].parts), func(args[0].scale))
        if func in (aten.mm.default, aten.addmm.default):
            return func(*(arg.dense() if isinstance(arg, Scaled) else arg for arg in args))
        raise NotImplementedError(f"Scaled dispatch: attempting to run unimplemented operator/function: {func}")

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"Scaled({tuple(self.shape)})"

    def dense(self) -> Tensor:
        return (self.parts.to(torch.float32) * self.scale.float()).to(self.scale.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl


def scaled(w: Tensor, dtype: torch.dtype) -> Scaled:
    most = 448.0 if dtype.is_floating_point else 127.0
    scale = w.abs().amax(1, keepdim=True) / most
    data = w / scale
    return Scaled(data.to(dtype) if dtype.is_floating_point else data.round().to(dtype), scale.bfloat16())


def wrapped(dtype: torch.dtype) -> nn.Module:
    """As torchao's `quantize_` leaves a model, of which one layer has a 16-bit weight."""
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K), nn.ReLU(), nn.Linear(K, K)).bfloat16()
    for place in (0, 2):
        layer: Any = model[place]
        layer.weight = nn.Parameter(scaled(layer.weight.detach().float(), dtype), requires_grad=False)
    return model


@pytest.mark.parametrize(("dtype", "made"), [(E4M3, ["fp8fn.mm_a16w8.default"] * 2), (torch.int8, [])], ids=str)
def test_tensor_subclasses(dtype: torch.dtype, made: list[str]) -> None:
    """The recipe leaves them; the exact pass serves those of FP8, as without the recipe; `explain` says the same."""
    model, x = wrapped(dtype), torch.randn(32, K).bfloat16()
    backend = both_passes(lambda site: site.weight != "4.weight")
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
        explanation = fp8fn.explain(model, x, where="*", show=False)
        assert snr(found, model(x)) > 45
    left = "the weight is of the tensor subclass Scaled; the recipe takes plain tensors and DTensors"
    assert [decision.reason for decision in backend.decided] == [left, left, "where said no"]
    assert [found.made for found in backend.found] == made
    rows = [(row.weight, row.kernel, row.reason) for row in explanation.rows]
    served = [("fp8fn::mm_a16w8", None) if made else (None, left)] * 2
    assert rows == [
        ("0.weight", *served[0]), ("2.weight", *served[1]), ("4.weight", "reference (plain PyTorch)", None),
    ]  # fmt: skip


@pytest.mark.parametrize("config", ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig"])
def test_torchaos_models(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, x = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)).bfloat16(), torch.randn(32, K).bfloat16()
    quantization.quantize_(model, getattr(quantization, config)())
    backend = both_passes()
    with torch.no_grad():
        assert snr(torch.compile(model, backend=backend, fullgraph=True)(x), model(x)) > 45
    assert all("the tensor subclass" in str(decision.reason) for decision in backend.decided)
    assert [found.made for found in backend.found] == ["fp8fn.mm_a16w8.default"] * (2 * config.startswith("Float8"))


def test_a_jagged_input() -> None:
    """A nested tensor has its own products too."""
    w = nn.Parameter(torch.randn(N, K))
    x = torch.nested.nested_tensor([torch.randn(32, K), torch.randn(48, K)], layout=torch.jagged)
    backend = both_passes()
    found = torch.compile(lambda x: F.linear(x, w), backend=backend, fullgraph=True)(x)
    assert [decision.reason for decision in backend.decided] == [
        "the input is of the tensor subclass NestedTensor; the recipe takes plain tensors and DTensors"
    ]
    torch.testing.assert_close(found.values(), x.values() @ w.mT)


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.filterwarnings("ignore")
def test_tensor_parallel(group: None) -> None:
    """Forward and backward, with DTensor parameters: what `fp8` computes of the unsharded model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)), torch.randn(32, K)
    expected = fp8fn.fp8(model)(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), [model[0].weight])
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    backend = both_passes()
    found = torch.compile(model, backend=backend, fullgraph=True)(x)
    found.square().sum().backward()
    assert [decision.reason for decision in backend.decided] == [None] * 2
    sharded: Any = model[0].weight.grad
    assert snr(found, expected) > 100
    assert snr(sharded.full_tensor(), grad) > 100


class Layer(nn.Module):
    """A product with data that is quantized in the checkpoint, or in the graph, in a spelling that no pattern has."""

    def __init__(self, call: Callable[..., Tensor], data: Tensor, *rest: Tensor) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(data, requires_grad=data.dtype.itemsize > 1)
        self.rest = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in rest)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight, *[self.rest[i] for i in range(len(self.rest))])  # Dynamo 2.11 unpacks no more


def offsets(x: Tensor) -> Tensor:
    return torch.tensor([16, 40, 64], dtype=torch.int32)


def scaled_after(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * scale.to(x.dtype)


def flipped(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return (w.to(x.dtype) @ x.mT).mT * scale.to(x.dtype)


def grouped(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """A power in the place of a product with the scales."""
    return torch._grouped_mm(x, (w.float() * scale.log().exp()).to(x.dtype).mT, offs=offsets(x))


def stacked(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    experts = [(w[i].float() * scale[i]).to(x.dtype) for i in range(EXPERTS)]
    return torch._grouped_mm(x, torch.stack(experts).mT, offs=offsets(x))


def stacked_casts(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return torch._grouped_mm(x, torch.stack([w[i].to(x.dtype) for i in range(EXPERTS)]).mT, offs=offsets(x))


def checkpointed(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    weight = (w.float() * scale).to(x.dtype)
    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
        lambda x, weight: torch._grouped_mm(x, weight.mT, offs=offsets(x)), x, weight, use_reentrant=False
    )


def made_in_the_graph(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    q = (w.float() / scale).to(E4M3).float() * scale
    return torch._grouped_mm(x, (w + (q.to(w.dtype) - w).detach()).mT, offs=offsets(x))


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (scaled_after, E4M3), (scaled_after, torch.float8_e5m2), (scaled_after, torch.int8), (flipped, E4M3),
        (grouped, E4M3), (grouped, torch.int8), (stacked, E4M3), (stacked_casts, E4M3), (checkpointed, E4M3),
        (made_in_the_graph, torch.bfloat16),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)  # fmt: skip
def test_what_was_dequantized_is_never_quantized_again(call: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Whatever the spelling: the same values as without the recipe, and a reason."""
    in_groups = call not in (scaled_after, flipped)
    w = torch.randn(EXPERTS, N, K) if in_groups else torch.randn(N, K)
    most = {E4M3: 448.0, torch.float8_e5m2: 57344.0}.get(dtype, 127.0)
    scale = (w.abs().amax((-2, -1), keepdim=True) if in_groups else w.abs().amax()) / most
    data = w.bfloat16() if dtype is torch.bfloat16 else (w / scale).round().to(dtype) if dtype is torch.int8 else None
    data = (w / scale).to(dtype) if data is None else data
    model, x = Layer(call, data, scale), torch.randn(64, K).bfloat16()
    backend = both_passes()
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert snr(found, model(x)) > 45
    short = {E4M3: "e4m3fn", torch.float8_e5m2: "e5m2", torch.int8: "int8"}.get(dtype, "e4m3fn")
    assert [decision.reason for decision in backend.decided] == [ALREADY.format(short)]
    name = "" if call is made_in_the_graph else "weight"
    assert [decision.gemm.site.weight for decision in backend.decided] == [name]


def test_what_is_computed_from_16_bits_is_the_recipes() -> None:
    """A stack of 16-bit experts, an index that chooses one, and a mask of bool are no quantized data."""
    experts = [nn.Parameter(torch.randn(N, K).bfloat16()) for _ in range(EXPERTS)]
    mask, order, x = torch.rand(N, K) > 0.5, torch.tensor([2, 0, 1]), torch.randn(64, K).bfloat16()

    def function(x: Tensor) -> Tensor:
        out = torch._grouped_mm(x, torch.stack(experts).mT, offs=offsets(x))
        return out + torch._grouped_mm(x, (torch.stack(experts)[order] * mask).mT, offs=offsets(x))

    backend = both_passes()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(x)
    assert [decision.reason for decision in backend.decided] == [None, None]
