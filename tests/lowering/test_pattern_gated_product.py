"""`silu(gate) * up` of many rows' products by FP8 weights becomes one op in graphs that `backend="fp8fn"` compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn.lowering import post_grad_pass
from fp8fn.lowering.patterns import gated_product, gated_rows, sibling_products
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM90
from support.accuracy import snr
from support.post_grad import gradients, substituted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OP = "fp8fn.mm_a16w8_silu_mul.default"
READ = "another reads gate or up, or a step between them and their product"
OTHER = "a product has a bias, FP8 activations or another output type, or is batch-invariant"


class MLP(nn.Module):
    def __init__(
        self, width: int = 256, hidden: int = 384, *, bias: bool = False, dtype: torch.dtype = BF16, **options: Any
    ) -> None:
        super().__init__()
        self.width = width
        self.gate, self.up = (nn.Linear(width, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.to(dtype).requires_grad_(False)
        fp8fn.quantize_weights(self, where="*", **options)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Rows(MLP):
    """Returns the rows themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class InFloat32(MLP):
    """As some models write it."""

    def forward(self, x: Tensor) -> Any:
        return self.down((F.silu(self.gate(x).float()) * self.up(x).float()).to(x.dtype))


class Views(MLP):
    """Gate and up read views of their own."""

    def forward(self, x: Tensor) -> Any:
        gate = self.gate(x.view(-1, self.width)).view(2, -1, self.gate.out_features)
        return self.down(F.silu(gate) * self.up(x).view(2, -1, self.gate.out_features))


class ReadsGate(MLP):
    def forward(self, x: Tensor) -> Any:
        gate = self.gate(x)
        return self.down(F.silu(gate) * self.up(x)), gate


class ReadsSilu(MLP):
    def forward(self, x: Tensor) -> Any:
        silu = F.silu(self.gate(x))
        return self.down(silu * self.up(x)), silu


class ReadsSum(MLP):
    """Returns the rows in float32 as well."""

    def forward(self, x: Tensor) -> Any:
        rows = F.silu(self.gate(x).float()) * self.up(x).float()
        return self.down(rows.to(x.dtype)), rows


class Twice(MLP):
    """Up is the gate."""

    def forward(self, x: Tensor) -> Any:
        gate = self.gate(x)
        return self.down(F.silu(gate) * gate)


class TwoInputs(MLP):
    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x + 1))


class TwoBlocks(MLP):
    """Up has a scale for each column and 128 of K."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up = nn.Linear(self.width, self.gate.out_features, bias=False, dtype=BF16).requires_grad_(False)
        fp8fn.quantize_weights(self, "up.*", (1, 128))


class OfOne(MLP):
    """Up is no product."""

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * x.repeat(1, 2)[:, : self.gate.out_features])


class GELU(MLP):
    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.gate(x)) * self.up(x))


def model(kind: Callable[..., MLP] = MLP, **options: Any) -> MLP:
    torch.manual_seed(0)
    return kind(**options)


run = partial(substituted, pattern=gated_product.NAME)


def rounded(mlp: MLP, x: Tensor) -> Tensor:
    """`silu(gate) * up` in float64, of products that are rounded to the type of x."""
    gate, up = ((x.double() @ part.weight.dequantize(FP32).double().mT).to(x.dtype) for part in (mlp.gate, mlp.up))
    return F.silu(gate.double()) * up.double()


@pytest.mark.parametrize("kind", [MLP, Rows, InFloat32])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(129, 256), (2, 100, 256)], ids=str)
def test_many_rows_become_one_op(shape: tuple[int, ...], dtype: torch.dtype, kind: Callable[..., MLP]) -> None:
    mlp, x = model(kind, dtype=dtype), torch.randn(*shape).to(dtype)
    found, (report,) = run(mlp, x)
    rows = x.shape[:-1].numel()
    assert (report.made, report.reason, report.shape) == (OP, None, (rows, 384, 256))
    expected = rounded(mlp, x)
    if kind is not Rows:
        expected = expected.to(dtype).double() @ mlp.down.weight.dequantize(FP32).double().mT
    assert found.shape == expected.shape
    assert snr(found, expected) > {BF16: 45, FP16: 65, FP32: 110}[dtype]


def test_equal_views_are_one_input() -> None:
    mlp, x = model(Views), torch.randn(2, 80, 256).to(BF16)
    found, (report,) = run(mlp, x)
    assert (report.made, report.reason, report.shape) == (OP, None, (160, 384, 256))
    assert found.shape == (2, 80, 256)


def test_the_option_leaves_the_products_alone() -> None:
    x = torch.randn(160, 256).to(BF16)
    fused, (report,) = run(model(), x)
    plain, reports = run(model(), x, options={"fuse_quantize": False})
    assert (report.made, reports) == (OP, [])
    assert snr(fused, plain) > 45


@pytest.mark.parametrize(
    ("kind", "options", "rows", "reason"),
    [
        (MLP, {}, 128, "M=128 rows, fewer than 129"),
        (MLP, {"bias": True}, 130, OTHER),
        (ReadsGate, {}, 130, READ),
        (ReadsSilu, {}, 130, READ),
        (ReadsSum, {}, 130, "silu(gate) * up is torch.float32 and x torch.bfloat16"),
        (Twice, {}, 130, "gate and up are one product"),
        (TwoInputs, {}, 130, "gate and up are products of two tensors"),
        (TwoBlocks, {}, 130, "the weights differ in type or block"),
    ],
)
def test_others_stay(kind: Callable[..., MLP], options: dict[str, Any], rows: int, reason: str) -> None:
    found, (report,) = run(model(kind, **options), torch.randn(rows, 256).to(BF16))
    assert (report.made, report.reason) == ("", reason)
    assert found is not None


@pytest.mark.parametrize("kind", [GELU, OfOne])
def test_others_are_none_of_its_rows(kind: Callable[..., MLP]) -> None:
    assert run(model(kind), torch.randn(130, 256).to(BF16))[1] == []


def test_a_batch_invariant_product_stays() -> None:
    _, (report,) = run(model(), torch.randn(130, 256).to(BF16), options={"batch_invariant": True})
    assert report.reason == OTHER


def test_fp8_activations_stay() -> None:
    _, reports = run(model(activations="fp8"), torch.randn(130, 256).to(BF16))
    assert [report.made for report in reports if report.made] == []


def test_a_length_that_is_known_at_run_time_stays() -> None:
    _, (report,) = run(model(), torch.randn(130, 256).to(BF16), dynamic=True)
    assert report.reason == "they are no products of matrices of known sizes"


def test_a_backward_needs_gate_and_up() -> None:
    grads, said = gradients(model(), torch.randn(130, 256).to(BF16), gated_product.NAME)
    assert said == [[("", READ)], []]
    assert torch.equal(*grads)


def test_a_graph_on_hopper_is_planned_as_the_kernel_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each product alone has large tiles, and not where it has few of them."""
    monkeypatch.setattr(gated_product.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    few = "no kernel for it: each product is one of small tiles, 64x64/1 stages4 resident1 group8 parts2"
    for hidden, rows, dtype, made, reason in (
        (1536, 1024, BF16, OP, None),
        (384, 256, BF16, "", few),
        (1536, 1024, FP32, "", "no kernel for it: x has dtype torch.float32 and out torch.float32, not both 16 bits"),
    ):
        _, (report,) = run(model(width=128, hidden=hidden, dtype=dtype), torch.randn(rows, 128).to(dtype))
        assert (report.made, report.reason) == (made, reason)


def test_rows_that_are_split_have_both_products_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_product.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    split = "M=384 rows are split into FP8 parts for both products"
    for rows, dtype, made, reason in ((384, BF16, "", split), (385, BF16, OP, None), (384, FP16, OP, None)):
        torch._dynamo.reset()
        mlp = model(width=1024, hidden=8192, dtype=dtype)
        with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False), post_grad_pass.recorded() as reports:
            torch.compile(mlp, backend="fp8fn", fullgraph=True)(torch.randn(rows, 1024).to(dtype))
        (report,) = (report for report in reports if report.pattern == gated_product.NAME)
        assert (report.made, report.reason) == (made, reason)
        siblings = [report.made for report in reports if report.pattern == sibling_products.NAME]
        assert siblings == ([] if made else ["fp8fn.mm_a16w8_siblings.default"] * 2)


def test_no_kernel_splits_rows_where_none_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_product.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "NVRTC is not there")
    _, (report,) = run(model(width=1024, hidden=8192), torch.randn(384, 1024).to(BF16))
    assert (report.made, report.reason) == ("", "no kernel for it: NVRTC is not there")


def test_what_begins_between_16_bytes_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_product.targets, "target_of", lambda device: SM90)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    mlp = model(width=128, hidden=1536)
    wide = torch.randn(1024, 144).to(BF16)
    for first, made, reason in ((8, OP, None), (4, "", "x or a weight does not begin at a multiple of 16 bytes")):

        def part(x: Tensor, first: int = first) -> Any:
            return mlp(x[:, first : first + 128])

        _, (report,) = run(part, wide)
        assert (report.made, report.reason) == (made, reason)


def test_few_rows_are_computed_in_the_product_that_reads_them() -> None:
    torch._dynamo.reset()
    patch = torch._inductor.config.patch(fx_graph_cache=False)
    with torch.no_grad(), patch, post_grad_pass.recorded() as reports:
        torch.compile(model(), backend="fp8fn", fullgraph=True)(torch.randn(8, 256).to(BF16))
    assert {report.pattern: bool(report.made) for report in reports if "gated" in report.pattern} == {
        gated_product.NAME: False, gated_rows.NAME: True,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor's own, which keeps a pool of memory alive
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_on_a_gpu(dtype: torch.dtype) -> None:
    """Also in a CUDA graph."""
    mlp = model(width=512, hidden=4096, dtype=dtype).cuda()
    x = torch.randn(1000, 512, device="cuda", dtype=dtype)
    expected = rounded(mlp, x).to(dtype).double() @ mlp.down.weight.dequantize(FP32).double().mT
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(mlp, backend="fp8fn", fullgraph=True, mode=mode)
        with torch.no_grad(), post_grad_pass.recorded() as reports:
            for _ in range(3):
                assert snr(compiled(x).clone(), expected) > (42 if dtype == BF16 else 60)
        assert [report.made for report in reports if report.pattern == gated_product.NAME] == [OP]
