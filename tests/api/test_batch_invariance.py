"""`Recipe(batch_invariant=True)`: row i has the same bits whatever rows stand beside it, and how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight, Recipe
from fp8fn.ops.layout import Block
from support.accuracy import same_bits, snr
from support.fp8_weights import make, values

INVARIANT = Recipe(batch_invariant=True)
ROWS = (1, 2, 3, 8, 16, 17, 64, 127, 129, 200, 256)


def check(product: Callable[[Tensor], Tensor], x: Tensor, rows: Any = ROWS) -> None:
    """Each product of a part of the rows, at its start, in the middle and at the end, has the bits of the whole one."""
    whole = product(x)
    for m in rows:
        for start in {0, (len(x) - m) // 2, len(x) - m}:
            assert same_bits(product(x[start : start + m]), whole[start : start + m]), (m, start)


@pytest.mark.parametrize("block", [(128, 128), (1, -1), (1, 128)], ids=str)
@pytest.mark.parametrize("prequant", [False, True])
def test_rows_by_an_fp8_weight(block: Block, prequant: bool) -> None:
    w = fp8fn.quantize(torch.randn(96, 200), block)
    x = torch.randn(256, 200).bfloat16()
    product = lambda x: fp8fn.linear(x, w, recipe=INVARIANT, prequant=prequant)  # noqa: E731
    check(product, x)
    assert snr(product(x).float(), x.float() @ w.dequantize(torch.float32).mT) > (25 if prequant else 45)


@pytest.mark.parametrize("recipe", [INVARIANT, Recipe(batch_invariant=True, activation_block=(1, -1))], ids=str)
def test_two_tensors_and_their_gradient(recipe: Recipe) -> None:
    x, w = torch.randn(256, 200), torch.randn(96, 200)
    check(lambda x: fp8fn.linear(x, w, recipe=recipe), x)
    grad = torch.randn(256, 96)

    def dgrad(rows: Tensor) -> Tensor:
        given = torch.zeros(len(rows), 200, requires_grad=True)
        return torch.autograd.grad(fp8fn.linear(given, w, recipe=recipe), given, rows)[0]

    check(dgrad, grad, (1, 17, 129))


def test_mx_and_two_scaled_tensors() -> None:
    a, b = fp8fn.quantize(torch.randn(64, 96), (1, 32), scale="e8m0"), torch.randn(48, 96)
    w = fp8fn.quantize(b, (1, 32), scale="e8m0").mT
    whole = fp8fn.gemm(a, w, recipe=INVARIANT)
    for m in (1, 7, 33):
        assert same_bits(fp8fn.gemm(_rows(a, m), w, recipe=INVARIANT), whole[:m])


def _rows(a: fp8fn.ScaledTensor, m: int) -> fp8fn.ScaledTensor:
    return fp8fn.ScaledTensor(a.data[:m], a.scale[:m], a.block)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("activations", ["16bit", "fp8"])
def test_the_backends_option_holds_for_fp8_weights(activations: Any) -> None:
    """Few rows are quantized where the weight asks for FP8 activations: the number of rows must not decide."""
    layer = nn.Linear(200, 96, bias=False)
    layer.weight = nn.Parameter(FP8Weight(make(96, 200).scaled, torch.float32, activations), requires_grad=False)
    compiled = torch.compile(layer, backend="fp8fn", dynamic=True, options={"batch_invariant": True})
    x = torch.randn(256, 200)
    with torch.no_grad():
        check(compiled, x, (2, 3, 7, 9, 17, 64, 65, 100, 127, 128, 129, 200))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    read = x if activations == "16bit" else fp8fn.quantize(x, (1, 128)).dequantize(torch.float32)
    assert snr(compiled(x), read @ values(layer.weight).T) > 100


def test_rows_that_share_a_scale_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows share scales in activation_block=\(128, 128\); use \(1, 128\)"):
        Recipe(batch_invariant=True, activation_block=(128, 128))


ENDS = torch.tensor([3, 8], dtype=torch.int32)
EXPERTS = (2, 128, 128)


def test_groups_are_refused() -> None:
    x, w = torch.randn(8, 128), torch.randn(EXPERTS)
    rows, experts = fp8fn.quantize(x, (1, 128)), fp8fn.quantize(w, (128, 128))
    for a, b in ((x, w), (x, experts.mT), (rows, experts.mT)):
        with pytest.raises(NotImplementedError, match="grouped_gemm: recipe has batch_invariant=True"):
            fp8fn.grouped_gemm(a, b, ENDS, recipe=INVARIANT)
        assert torch.isfinite(fp8fn.grouped_gemm(a, b, ENDS)).all()
    batch = x.expand(2, 8, 128)
    for a, b in ((batch, w), (fp8fn.quantize(batch, (1, 128)), experts.mT)):
        with pytest.raises(NotImplementedError, match="grouped_gemm: recipe has batch_invariant=True"):
            fp8fn.grouped_gemm(a, b, counts=ENDS, recipe=INVARIANT)
    with pytest.raises(NotImplementedError, match="expert_mlp: recipe has batch_invariant=True"):
        fp8fn.expert_mlp(x, torch.randn(2, 128, 256), w, ENDS, recipe=INVARIANT)
    groups = [fp8fn.quantize_grouped(each, ENDS, axis=0) for each in (x, x)]
    with pytest.raises(NotImplementedError, match="grouped_gemm: recipe has batch_invariant=True"):
        fp8fn.grouped_gemm(groups[0].mT, groups[1], recipe=INVARIANT)


QUANTIZED = fp8fn.quantize(torch.ones(EXPERTS), (128, 128))
WEIGHT = FP8Weight(QUANTIZED, torch.float32)
ROUTES = fp8fn.sort_tokens(torch.zeros(8, 1, dtype=torch.int32), 2, 16)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("op", "product"),
    [
        ("grouped_mm_a16w8", lambda x: torch._grouped_mm(x, WEIGHT.mT, offs=ENDS)),
        ("grouped_mm_a16w8", lambda x: fp8fn.grouped_gemm(x, QUANTIZED.mT, ENDS)),
        ("scaled_grouped_mm", lambda x: fp8fn.grouped_gemm(x, torch.ones(EXPERTS), ENDS)),
        ("scaled_grouped_mm", lambda x: fp8fn.expert_mlp(x, torch.ones(2, 128, 256), torch.ones(EXPERTS), ENDS)),
        ("moe_gemm", lambda x: fp8fn.moe_gemm(fp8fn.quantize(x, (1, 128)), QUANTIZED, *ROUTES, top_k=1)),
    ],
    ids=["FP8Weight", "ScaledTensor", "tensors", "expert_mlp", "moe_gemm"],
)
def test_the_backends_option_refuses_groups(op: str, product: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(product, backend="fp8fn", options={"batch_invariant": True})
    with pytest.raises(Exception, match=rf"batch_invariant=True: fp8fn\.{op}\.default has no batch-invariant kernel"):
        compiled(torch.randn(8, 128))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("train", [False, True])
def test_the_backends_option_refuses_rows_that_share_a_scale(train: bool) -> None:
    """A call of `fp8fn.gemm` brings a recipe of its own, which the option cannot change."""
    w, x = torch.randn(128, 256, requires_grad=train), torch.randn(64, 128, requires_grad=train)
    for product in (
        lambda x: fp8fn.gemm(x, w, recipe="tensorwise"),
        lambda x: fp8fn.gemm(x, fp8fn.quantize(w.detach(), (-1, -1)), prequant=True),
    ):
        compiled = torch.compile(product, backend="fp8fn", options={"batch_invariant": True})
        with pytest.raises(Exception, match=r"activations in blocks of \(-1, -1\), whose rows share scales; use"):
            compiled(x)
    compiled = torch.compile(lambda x: fp8fn.gemm(x, w), backend="fp8fn", options={"batch_invariant": True})
    out = compiled(x)
    assert same_bits(out, fp8fn.gemm(x, w, recipe=INVARIANT))
    if train:
        out.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
