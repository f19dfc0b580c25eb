"""FP8 weights whose products quantize the activations of many rows: the choice, its values, compiled and explained."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.lowering.graph.nodes import arguments_of
from fp8fn.ops import activations, gemm
from fp8fn.ops.activations import why_16_bits
from fp8fn.ops.cuda.runtime import call_cache
from fp8fn.ops.cuda.runtime.call_cache import Program
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block
from fp8fn.ops.mm_a16w8 import mm_a16w8_kernel
from fp8fn.ops.operands import Quantized
from fp8fn.ops.targets import SM90
from fp8fn.ops.tuning.rates import NAMED
from support.accuracy import same_bits, snr
from support.fp8_weights import values
from support.graphs import graphs
from support.products import quantized

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def weight(n: int = 320, k: int = 384, block: Block = (128, 128), dtype: torch.dtype = torch.float32) -> nn.Parameter:
    q = fp8fn.quantize(torch.randn(n, k), block)
    return nn.Parameter(FP8Weight(q, dtype, "fp8"), requires_grad=False)


def rounded(x: Tensor, block: Block = (1, 128)) -> Tensor:
    """What FP8 leaves of activations."""
    return fp8fn.quantize(x, block).dequantize(torch.float32)


@pytest.mark.parametrize(("block", "rows"), [((128, 128), (1, 128)), ((1, -1), (1, -1)), ((-1, -1), (1, -1))], ids=str)
def test_many_rows_are_quantized_and_few_are_not(block: Block, rows: Block) -> None:
    w = weight(block=block)
    for m, few in ((128, True), (129, False)):
        x = torch.randn(m, 384)
        expected = (x if few else rounded(x, rows)) @ values(w).T
        assert snr(F.linear(x, w), expected) > 100
    x = torch.randn(2, 100, 384)
    with torch.inference_mode():
        assert snr(F.linear(x, w, torch.ones(320)), rounded(x, rows) @ values(w).T + 1) > 100


def test_the_gradient_is_quantized_as_well() -> None:
    w, x, grad = weight(), torch.randn(200, 384, requires_grad=True), torch.randn(200, 320)
    (dx,) = torch.autograd.grad(F.linear(x, w), x, grad)
    assert snr(dx, rounded(grad) @ values(w)) > 100
    (dx,) = torch.autograd.grad(F.linear(x[:60], w), x, grad[:60])
    assert snr(dx[:60], grad[:60] @ values(w)) > 100


@pytest.mark.parametrize("block", [(1, -1), (-1, -1)], ids=str)
def test_fast_products_say_so(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients too, not where one order of sums is asked for; compiled with the same bits, and pickled."""
    asked: list[bool] = []
    multiply = gemm.product

    def watched(*args: Any, fast: bool = False) -> Tensor:
        asked.append(fast)
        return multiply(*args, fast=fast)

    monkeypatch.setattr(gemm, "product", watched)
    w = weight(block=block)
    fast = nn.Parameter(FP8Weight(cast(FP8Weight, w.data).scaled, torch.float32, "fp8_fast"), requires_grad=False)
    x = torch.randn(200, 384, requires_grad=True)
    out = F.linear(x, fast)
    assert asked == [True]
    assert snr(out, rounded(x.detach(), (1, -1)) @ values(w).T) > 100
    torch.autograd.grad(out, x, torch.randn(200, 320))
    products = 1 + (block == (-1, -1))  # a scale for each output stays with the gradient's sums, in 16 bits
    assert asked == [True] * products
    F.linear(x[:60], fast)  # few rows stay in 16 bits
    assert len(asked) == products
    operands = x.detach(), *quantized(cast(FP8Weight, w.data).scaled.mT)
    torch.ops.fp8fn.mm_a16w8(*operands, activations="fp8_fast", batch_invariant=True)
    assert asked[products:] == [False]
    assert pickle.loads(pickle.dumps(fast.data)).activations == "fp8_fast"
    layer = nn.Linear(384, 320, bias=False)
    layer.weight = fast
    compiled = torch.compile(layer, backend="fp8fn", fullgraph=True)
    with torch.no_grad():
        assert same_bits(compiled(x), out)


def test_fast_products_in_a_graph() -> None:
    layer = nn.Linear(384, 320)
    layer.weight = nn.Parameter(
        FP8Weight(fp8fn.quantize(torch.randn(320, 384), (1, -1)), torch.float32, "fp8_fast"), requires_grad=False
    )
    for invariant in (False, True):
        torch._dynamo.reset()
        options = {"batch_invariant": True} if invariant else {}
        with torch.no_grad(), graphs() as found:
            torch.compile(layer, backend="fp8fn", options=options)(torch.randn(200, 384))
        (node,) = (node for graph in found for node in graph.nodes if node.target is torch.ops.fp8fn.scaled_mm.default)
        given = arguments_of(node)
        assert (given["batch_invariant"], given["fast_accumulation"]) == (invariant, not invariant)


def test_the_kernel_asks_for_fast_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that are kept for one way of summing don't serve the other."""
    keys: list[Hashable] = []
    chained = call_cache.chained
    monkeypatch.setattr(activations, "chained", lambda key, *rest: keys.append(key) or chained(key, *rest))
    asked: list[bool] = []
    multiply = gemm.product
    monkeypatch.setattr(gemm, "product", lambda *args, fast=False: asked.append(fast) or multiply(*args, fast=fast))
    operands = torch.randn(200, 384), *quantized(fp8fn.quantize(torch.randn(320, 384), (1, -1)).mT)
    for way in ("fp8", "fp8_fast"):
        mm_a16w8_kernel(*operands, activations=way)  # type: ignore[arg-type]
        mm_a16w8_kernel(*operands, activations=way, batch_invariant=True)  # type: ignore[arg-type]
    assert asked == [False, False, True, False]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (128, 1), (32, 1)], ids=str)
def test_fast_products_and_gradients_need_scales_that_hold_for_whole_sums(block: Block) -> None:
    q = fp8fn.quantize(torch.randn(320, 384), block, scale="e8m0" if 32 in block else "fp32")
    reason = rf"activations='fp8_fast', and the weight has a scale for each {max(block)}"
    with pytest.raises(ValueError, match=f"FP8Weight: {reason}"):
        FP8Weight(q, torch.float32, "fp8_fast")
    with pytest.raises(ValueError, match=f"mm_a16w8: {reason}"):
        torch.ops.fp8fn.mm_a16w8(torch.randn(200, 384), q.mT.data, q.mT.scale, q.mT.block, activations="fp8_fast")
    data, scale, block = q.mT.data[None], q.mT.scale[None], q.mT.block
    ends = torch.tensor([200], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"grouped_mm_a16w8: {reason}"):
        torch.ops.fp8fn.grouped_mm_a16w8(torch.randn(200, 384), data, scale, block, ends, activations="fp8_fast")


def test_models_of_other_scales_are_not_fast(tmp_path: object) -> None:
    """Nothing of the model has changed when that is found."""
    model = nn.Sequential(nn.Linear(384, 320))
    before = model[0].weight
    with pytest.raises(ValueError, match=r"quantize_weights: activations='fp8_fast'"):
        fp8fn.quantize_weights(model, activations="fp8_fast")
    assert model[0].weight is before
    saved = nn.Sequential(nn.Linear(384, 320))
    fp8fn.quantize_weights(saved)
    fp8fn.save_weights(saved, str(tmp_path))
    with pytest.raises(ValueError, match=r"load_weights: 0\.weight: activations='fp8_fast'"):
        fp8fn.load_weights(model, str(tmp_path), activations="fp8_fast")
    assert model[0].weight is before


@pytest.mark.parametrize("block", [(1, -1), (-1, -1)], ids=str)
def test_models_are_loaded_fast(block: Block, tmp_path: object) -> None:
    saved, model = nn.Sequential(nn.Linear(384, 320)), nn.Sequential(nn.Linear(384, 320))
    fp8fn.quantize_weights(saved, block=block)
    fp8fn.save_weights(saved, str(tmp_path), format="compressed-tensors")
    fp8fn.load_weights(model, str(tmp_path), activations="fp8_fast")
    assert model[0].weight.activations == "fp8_fast"


def test_a_channel_scale_leaves_the_gradient_in_16_bits() -> None:
    w, x, grad = weight(block=(1, -1)), torch.randn(200, 384, requires_grad=True), torch.randn(200, 320)
    (dx,) = torch.autograd.grad(F.linear(x, w), x, grad)
    assert snr(dx, grad @ values(w)) > 100


GROUPED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "_grouped_mm": lambda x, w, ends: torch._grouped_mm(x, w.mT, ends),
    "F.grouped_mm": lambda x, w, ends: F.grouped_mm(x, w.mT, offs=ends),
}


def experts(block: Block = (128, 128), dtype: torch.dtype = torch.float32, scale: ScaleFormat = "fp32") -> FP8Weight:
    return FP8Weight(fp8fn.quantize(torch.randn(3, 320, 384), block, scale=scale), dtype, "fp8")


def by_groups(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`x @ matrices (E, K, N)` of each group of rows, and zeros for the rows past the last."""
    out = torch.zeros(len(x), matrices.shape[-1])
    for matrix, (start, end) in zip(matrices, pairwise([0, *ends.tolist()]), strict=True):
        out[start:end] = x[start:end] @ matrix
    return out


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    ("block", "rows", "scale"),
    [
        ((128, 128), (1, 128), "fp32"),
        ((1, -1), (1, -1), "fp32"),
        ((-1, -1), (1, -1), "fp32"),
        ((1, 32), (1, 32), "e8m0"),
    ],
    ids=str,
)
def test_many_rows_of_groups_are_quantized_and_few_are_not(
    block: Block, rows: Block, scale: ScaleFormat, name: str
) -> None:
    """The mean group decides, as of a batch: where groups end is on the device."""
    w = experts(block, scale=scale)
    for m, few in ((3 * 128 + 2, True), (3 * 129, False)):
        x, ends = torch.randn(m, 384), torch.tensor([250, 250, m - 5], dtype=torch.int32)
        seen = x if few else fp8fn.quantize(x, rows, scale=scale).dequantize(torch.float32)
        assert snr(GROUPED[name](x, w, ends), by_groups(seen, values(w).mT, ends)) > 100


@pytest.mark.parametrize("block", [(1, -1), (-1, -1)], ids=str)
def test_many_rows_of_groups_are_quantized_for_fast_weights_too(block: Block) -> None:
    w = experts(block)
    fast, x, ends = FP8Weight(w.scaled, torch.float32, "fp8_fast"), torch.randn(600, 384), torch.tensor([250, 250, 595])
    found = torch._grouped_mm(x, fast.mT, ends.int())
    assert snr(found, by_groups(rounded(x, (1, -1)), values(w).mT, ends)) > 100


def test_the_gradient_of_groups_is_quantized_as_well() -> None:
    w, x, grad = experts(), torch.randn(600, 384, requires_grad=True), torch.randn(600, 320)
    ends = torch.tensor([100, 100, 590], dtype=torch.int32)
    (dx,) = torch.autograd.grad(torch._grouped_mm(x, w.mT, ends), x, grad)
    assert snr(dx, by_groups(rounded(grad), values(w), ends)) > 100
    few = torch.tensor([20, 20, 60], dtype=torch.int32)
    (dx,) = torch.autograd.grad(torch._grouped_mm(x[:60], w.mT, few), x, grad[:60])
    assert snr(dx[:60], by_groups(grad[:60], values(w), few)) > 100


def test_a_batch_without_offsets_is_quantized() -> None:
    w, x = experts(), torch.randn(3, 130, 384)
    assert snr(torch._grouped_mm(x, w.mT), rounded(x) @ values(w).mT) > 100


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(experts(), requires_grad=False)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, ends)


@pytest.mark.parametrize("backend", ["aot_eager", "fp8fn"])
def test_one_dynamic_graph_of_groups_decides_at_each_call(backend: str) -> None:
    model = Experts()
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for m in (90, 600, 64, 900):
            x, ends = torch.randn(m, 384), torch.tensor([m // 5, m // 5, m], dtype=torch.int32)
            assert same_bits(compiled(x, ends), model(x, ends)), m


def test_explain_says_how_groups_are_read() -> None:
    for m, kernel in (
        (300, "fp8fn::grouped_mm_a16w8, activations in 16 bits: 100 rows, of which 128 are few"),
        (600, "fp8fn::grouped_mm_a16w8, activations in FP8"),
    ):
        ends = torch.tensor([m // 5, m // 5, m], dtype=torch.int32)
        (row,) = fp8fn.explain(Experts(), torch.randn(m, 384), ends, show=False).rows
        assert (row.kernel, row.reason) == (kernel, None)


def test_every_copy_keeps_the_choice() -> None:
    w = weight()
    for other in (
        w.detach().clone(),
        w.t(),
        w.bfloat16(),
        w[:128],
        w[torch.tensor([1, 2])],
        pickle.loads(pickle.dumps(w)),
    ):
        assert isinstance(other, FP8Weight)
        assert other.activations == "fp8"


def test_models_ask_for_it(tmp_path: object) -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    fp8fn.quantize_weights(model, activations="fp8")
    assert model[0].weight.activations == "fp8"
    fp8fn.save_weights(model, str(tmp_path))
    fp8fn.load_weights(model, str(tmp_path), activations="16bit")
    assert model[0].weight.activations == "16bit"
    fp8fn.load_weights(model, str(tmp_path), activations="fp8")
    assert model[0].weight.activations == "fp8"


def test_a_wrong_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"quantize_weights: activations='fp4' is no way .*'16bit', 'fp8'"):
        fp8fn.quantize_weights(nn.Linear(256, 256), activations="fp4")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["aot_eager", "fp8fn"])
@pytest.mark.parametrize("shape", [(320, 384), (3, 320, 384)], ids=["matrix", "batch"])
@pytest.mark.parametrize("train", [False, True])
def test_one_dynamic_graph_decides_at_each_call(backend: str, shape: tuple[int, ...], train: bool) -> None:
    """A graph that was traced with few rows must quantize many, and the other way round."""
    w = nn.Parameter(FP8Weight(fp8fn.quantize(torch.randn(shape), (128, 128)), torch.float32, "fp8"), False)

    def product(x: Tensor) -> Tensor:
        return x @ w.mT

    compiled = torch.compile(product, backend=backend, dynamic=True, fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for m in (40, 200, 64, 300, 2, 17, 129, 3):
        x = torch.randn(*shape[:-2], m, 384, requires_grad=train)
        out, expected = compiled(x), product(x)
        assert same_bits(out, expected), m
        if train:
            grads = [torch.autograd.grad(each, x, torch.ones_like(each))[0] for each in (out, expected)]
            assert same_bits(*grads), m
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def test_rows_may_be_marked_dynamic() -> None:
    layer, x = nn.Linear(384, 320), torch.randn(4, 17, 384)
    layer.weight = weight()
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    with torch.no_grad():
        assert same_bits(torch.compile(layer, backend="fp8fn", fullgraph=True)(x), layer(x))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256, dtype=torch.bfloat16)
        self.gate, self.up, self.down = (nn.Linear(256, 256, bias=False) for _ in range(3))
        for layer in (self.gate, self.up, self.down):
            layer.weight = weight(256, 256, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def test_a_static_graph_has_the_quantizers_of_the_producers() -> None:
    """gate and up share one quantizer, and both activations are computed by the op that quantizes them."""
    model, x = MLP(), torch.randn(2, 80, 256).bfloat16()
    _, codes = torch._inductor.utils.run_and_get_code(torch.compile(model, backend="fp8fn", dynamic=False), x)
    code = "\n".join(codes)
    assert code.count("fp8fn.scaled_mm.default(") == 3
    assert "mm_a16w8" not in code
    assert [code.count(f"fp8fn.quantize_{name}.default(") for name in ("rms_norm", "silu_mul")] == [1, 1]
    assert snr(torch.compile(model, backend="fp8fn")(x).float(), model(x).float()) > 25


def test_explain_says_how_activations_are_read() -> None:
    model = nn.Sequential(nn.Linear(384, 320, bias=False))
    model[0].weight = weight()
    for m, kernel in (
        (64, "fp8fn::mm_a16w8, activations in 16 bits: 64 rows, of which 128 are few"),
        (200, "fp8fn::scaled_mm, activations in FP8"),
    ):
        (row,) = fp8fn.explain(model, torch.randn(m, 384), show=False).rows
        assert (row.kernel, row.reason) == (kernel, None)


def test_the_tables_decide_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 8B's widths gains from FP8; a small one loses the launch of a quantizer."""
    monkeypatch.setattr("fp8fn.ops.targets.target_of", lambda _: SM90)
    monkeypatch.setattr("fp8fn.ops.targets.chip_of", lambda *_: NAMED["h200"])

    def why(m: int, n: int, k: int) -> str | None:
        w = fp8fn.quantize(torch.empty(n, k, device="meta"), (128, 128), dtype=torch.float8_e4m3fn).mT
        x = torch.empty(m, k, device="meta", dtype=torch.bfloat16)
        return why_16_bits(x, Quantized(w.data, w.scale, w.block))

    assert why(4096, 14336, 4096) is None
    assert why(4096, 4096, 14336) is None
    reason = why(256, 256, 256)
    assert reason is not None
    assert reason.startswith("quantizing takes longer: ")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (1, -1), (-1, -1)], ids=str)
def test_a_second_call_on_a_gpu_starts_all_launches_together(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the bits of the first one; a bias and another layout have launches of their own."""
    monkeypatch.setattr(call_cache, "_kept", OrderedDict())
    w = weight(4096, 2048, block, torch.bfloat16).cuda()
    x, bias = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 1024, 2048), (4096,)))
    assert why_16_bits(x.flatten(0, 1), Quantized(w.scaled.mT.data, w.scaled.mT.scale, w.scaled.mT.block)) is None
    with torch.no_grad():
        for given in ({}, {"bias": bias}):
            first, second = F.linear(x, w, **given), F.linear(x, w, **given)
            assert torch.equal(first, second)
            rounded_x = fp8fn.quantize(x.flatten(0, 1), (1, -1) if -1 in block else (1, 128)).dequantize(torch.float32)
            expected = rounded_x @ values(w).T + (bias.float() if given else 0)
            assert snr(first.flatten(0, 1), expected) > 45
        strided = x.mT.contiguous().mT  # which PyTorch multiplies as a batch
        assert snr(F.linear(strided, w).flatten(0, 1), first.flatten(0, 1) - bias) > 45
    assert any(isinstance(kept, Program) for kept in call_cache._kept.values())
