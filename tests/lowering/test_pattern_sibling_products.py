"""Products of the same few rows by FP8 weights become one op in the graphs that `backend="fp8fn"` compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn.lowering.patterns import gated_rows, sibling_products
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM90
from support.accuracy import snr
from support.post_grad import gradients, substituted

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 256
OP = "fp8fn.mm_a16w8_siblings.default"
run = partial(substituted, pattern=sibling_products.NAME)


class Projections(nn.Module):
    """Products by weights of some widths, each of which an elementwise kernel reads."""

    def __init__(
        self, *widths: int, bias: bool = False, dtype: torch.dtype = BF16, blocks: tuple[Any, ...] = ()
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.ModuleList(nn.Linear(WIDTH, width, bias=bias) for width in widths)
        self.to(dtype).requires_grad_(False)
        for linear, block in zip(self.each, blocks or [(128, 128)] * len(widths), strict=True):
            fp8fn.quantize_weights(linear, where="*", block=block)

    def rows(self, x: Tensor) -> list[Tensor]:
        return [x] * len(self.each)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [linear(rows).relu() for linear, rows in zip(self.each, self.rows(x), strict=True)]


class OneBias(Projections):
    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.each[0].bias = nn.Parameter(torch.randn(widths[0]).to(BF16), requires_grad=False)


class OfTwo(Projections):
    """The second product is of other rows."""

    def rows(self, x: Tensor) -> list[Tensor]:
        return [x, x + 1]


class Chained(Projections):
    """Each product reads the one before."""

    def forward(self, x: Tensor) -> list[Tensor]:
        for linear in self.each:
            x = linear(x)
        return [x]


class MLP(Projections):
    def forward(self, x: Tensor) -> list[Tensor]:
        gate, up, down = self.each
        return [down(F.silu(gate(x)) * up(x))]


def assert_right(found: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = model(x)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape", [(1, WIDTH), (16, WIDTH), (2, 3, WIDTH), (1, 1, WIDTH)], ids=str)
@pytest.mark.parametrize("widths", [(384, 256, 256), (384, 384)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_by_two_or_three_weights(bias: bool, widths: tuple[int, ...], shape: tuple[int, ...]) -> None:
    model, x = Projections(*widths, bias=bias), torch.randn(*shape).to(BF16)
    found, reports = run(model, x)
    rows = x.shape[:-1].numel()
    assert [(each.made, each.reason, each.shape) for each in reports] == [
        (OP, None, (rows, width, WIDTH)) for width in widths
    ]
    assert_right(found, model, x)


def test_more_than_three_are_taken_by_threes() -> None:
    for count, made in ((4, 3), (5, 5), (7, 6)):
        model, x = Projections(*[256] * count), torch.randn(2, WIDTH).to(BF16)
        found, reports = run(model, x)
        assert [each.made for each in reports] == [OP] * made
        assert_right(found, model, x)


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        (Projections, {}, 769),
        (OneBias, {}, 4),
        (OfTwo, {}, 4),
        (Chained, {}, 4),
        (Projections, {"blocks": ((128, 128), (1, 128))}, 4),
    ],
)
def test_others_are_no_siblings(kind: Callable[..., nn.Module], options: dict[str, Any], rows: int) -> None:
    model, x = kind(256, 256, **options), torch.randn(rows, WIDTH).to(BF16)
    found, reports = run(model, x)
    assert reports == []
    assert_right(found, model, x)


def test_a_batch_invariant_product_and_a_length_that_is_known_at_run_time_stay() -> None:
    x = torch.randn(4, WIDTH).to(BF16)
    assert run(Projections(256, 256), x, options={"batch_invariant": True})[1] == []
    assert run(Projections(256, 256), x, dynamic=True)[1] == []


def test_a_weight_that_is_computed_stays() -> None:
    first, second = (fp8fn.quantize(torch.randn(256, WIDTH), (128, 128)) for _ in range(2))

    def products(x: Tensor) -> list[Tensor]:
        y = fp8fn.gemm(x, first.mT)
        other = fp8fn.ScaledTensor(second.data, second.scale * y.float().abs().mean(), second.block)
        return [y.relu(), fp8fn.gemm(x, other.mT).relu()]

    _, reports = run(products, torch.randn(4, WIDTH).to(BF16))
    assert [each.reason for each in reports] == ["a weight or a bias is computed in the graph"] * 2


def test_a_part_of_weights_at_a_place_that_the_graph_computes() -> None:
    """A number that changes between calls is symbolic, and is computed after the first product."""
    weights = fp8fn.quantize(torch.randn(8 * 128, WIDTH), (128, 128))

    def products(x: Tensor, i: int) -> list[Tensor]:
        first = fp8fn.ScaledTensor(weights.data[:128], weights.scale[:1], weights.block)
        y, i = fp8fn.gemm(x, first.mT).relu(), 2 * i + 1
        parts = weights.data.view(8, 128, WIDTH)[i], weights.scale.view(8, 1, -1)[i]
        return [y, fp8fn.gemm(x, fp8fn.ScaledTensor(*parts, weights.block).mT).relu()]

    torch._dynamo.reset()
    x, compiled = torch.randn(4, WIDTH).to(BF16), torch.compile(products, backend="fp8fn", fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        for i in (1, 2, 3):
            assert all(map(torch.equal, compiled(x, i), products(x, i)))


def test_gate_and_up_beside_the_product_that_reads_them() -> None:
    model, x = MLP(384, 384, WIDTH), torch.randn(1, WIDTH).to(BF16)
    model.each[2] = nn.Linear(384, WIDTH, bias=False, dtype=BF16).requires_grad_(False)
    fp8fn.quantize_weights(model.each[2], where="*")
    found, reports = run(model, x)
    assert [each.made for each in reports] == [OP, OP]
    found, (report,) = substituted(model, x, pattern=gated_rows.NAME)
    assert report.made == "fp8fn.silu_mul_mm_a16w8.default"
    with torch.no_grad():
        gate, up = (linear(x) for linear in model.each[:2])
        exact = (F.silu(gate.float()) * up.float()).to(BF16).double() @ model.each[2].weight.dequantize(
            FP32
        ).double().mT
    assert snr(found[0], exact) > 45


def test_a_backward_has_the_same_gradients() -> None:
    grads, said = gradients(Projections(384, 256), torch.randn(4, WIDTH).to(BF16), sibling_products.NAME)
    assert said == [[(OP, None)] * 2, []]
    assert torch.equal(*grads)


def test_a_graph_on_hopper_is_planned_as_the_kernel_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sibling_products.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    x = torch.randn(1, WIDTH).to(BF16)
    for bias in (False, True):
        _, reports = run(Projections(384, 256, bias=bias), x)
        assert [(each.made, each.reason) for each in reports] == [(OP, None)] * 2
    _, reports = run(Projections(384, 256, dtype=FP32), x.float())
    reason = "no kernel for it: w_second: x has dtype torch.float32, not 16 bits"
    assert [(each.made, each.reason) for each in reports] == [("", reason)] * 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_values_on_a_gpu(rows: int) -> None:
    """Also in a CUDA graph, where the weights are read before the launch ahead has ended."""
    model = Projections(4096, 1024, 1024, bias=True).cuda()
    x = torch.randn(rows, WIDTH, device="cuda", dtype=BF16)
    with torch.no_grad():
        exact = [
            (x.double() @ each.weight.dequantize(FP32).double().mT + each.bias.double()).relu() for each in model.each
        ]
        for options in ({}, {"triton.cudagraphs": True}):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="fp8fn", fullgraph=True, options=options)
            for _ in range(3):
                assert all(map(lambda a, b: snr(a, b) > 45, compiled(x), exact))
