"""Matrix products with an `FP8Weight`: values, gradients, and no dequantized copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn import FP8Weight
from fp8fn.ops import reference
from fp8fn.ops.layout import BLOCKS, Block
from support.accuracy import same_bits, snr
from support.fp8_weights import layer, make, values

Product = Callable[[Tensor, Tensor], Tensor]

_OFFSETS = torch.tensor([4, 4, 9, 16], dtype=torch.int32)


def _bias(x: Tensor, n: int = 320) -> Tensor:
    return torch.linspace(-1, 1, n).to(x)


# Each product: the shape of the weight, the shape of the activations, the function.
PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Product]] = {
    "linear": ((320, 384), (5, 384), lambda x, w: F.linear(x, w)),
    "linear with bias": ((320, 384), (5, 384), lambda x, w: F.linear(x, w, _bias(x))),
    "linear 3-D": ((320, 384), (2, 5, 384), lambda x, w: F.linear(x, w)),
    "linear 3-D with bias": ((320, 384), (2, 5, 384), lambda x, w: F.linear(x, w, _bias(x))),
    "linear 1-D": ((320, 384), (384,), lambda x, w: F.linear(x, w)),
    "linear 4-D": ((320, 384), (2, 3, 5, 384), lambda x, w: F.linear(x, w)),
    "linear of strided rows": ((320, 384), (5, 2, 384), lambda x, w: F.linear(x.transpose(0, 1), w)),
    "no rows": ((320, 384), (0, 384), lambda x, w: F.linear(x, w)),
    "x @ w.mT": ((320, 384), (5, 384), lambda x, w: x @ w.mT),
    "x @ w.T": ((320, 384), (5, 384), lambda x, w: x @ w.T),
    "w @ x.T": ((320, 384), (5, 384), lambda x, w: w @ x.T),
    "w @ vector": ((320, 384), (384,), lambda x, w: w @ x),
    "matmul 3-D by 2-D": ((384, 320), (2, 5, 384), lambda x, w: torch.matmul(x, w)),
    "matmul 2-D by 3-D": ((4, 384, 320), (5, 384), lambda x, w: torch.matmul(x, w)),
    "matmul 3-D by 3-D": ((4, 384, 320), (4, 5, 384), lambda x, w: torch.matmul(x, w)),
    "matmul 4-D by 3-D": ((4, 384, 320), (2, 4, 5, 384), lambda x, w: torch.matmul(x, w)),
    "matmul 1-D by 2-D": ((384, 320), (384,), lambda x, w: torch.matmul(x, w)),
    "einsum bk,nk": ((320, 384), (5, 384), lambda x, w: torch.einsum("bk,nk->bn", x, w)),
    "einsum bsk,nk": ((320, 384), (2, 5, 384), lambda x, w: torch.einsum("bsk,nk->bsn", x, w)),
    "einsum nk,bk": ((320, 384), (5, 384), lambda x, w: torch.einsum("nk,bk->nb", w, x)),
    "einsum ebk,ekn": ((4, 384, 320), (4, 5, 384), lambda x, w: torch.einsum("ebk,ekn->ebn", x, w)),
    "einsum bek,enk": ((4, 320, 384), (5, 4, 384), lambda x, w: torch.einsum("bek,enk->ben", x, w)),
    "einsum bk,ekn": ((4, 384, 256), (5, 384), lambda x, w: torch.einsum("bk,ekn->ebn", x, w)),
    "einsum bhk,hkn": ((4, 384, 320), (5, 4, 384), lambda x, w: torch.einsum("bhk,hkn->bn", x, w)),
    "addmm": ((384, 320), (5, 384), lambda x, w: torch.addmm(_bias(x).expand(5, 320), x, w, alpha=0.5, beta=2)),
    "addmm of a vector": ((384, 320), (5, 384), lambda x, w: torch.addmm(_bias(x), x, w)),
    "addmm w first": ((320, 384), (384, 5), lambda x, w: torch.addmm(_bias(x, 5), w, x)),
    "bmm": ((4, 384, 320), (4, 5, 384), lambda x, w: torch.bmm(x, w)),
    "baddbmm": ((4, 384, 320), (4, 5, 384), lambda x, w: torch.baddbmm(_bias(x).expand(4, 1, 320), x, w)),
    "one expert": ((4, 320, 384), (5, 384), lambda x, w: F.linear(x, w[2])),
    "the last expert": ((4, 320, 384), (5, 384), lambda x, w: F.linear(x, w[-1])),
    "experts by a tensor": (
        (4, 320, 384), (3, 5, 384), lambda x, w: torch.bmm(x, w[torch.tensor([2, -1, 2])].mT)
    ),
    "chunk": ((512, 384), (5, 384), lambda x, w: F.linear(x, w.chunk(2)[1])),
    "rows at the borders of blocks": ((512, 384), (5, 384), lambda x, w: F.linear(x, w[128:384])),
    "rows inside of blocks": ((512, 384), (5, 384), lambda x, w: F.linear(x, w[64:192])),
    "split inside of blocks": ((512, 384), (5, 384), lambda x, w: F.linear(x, w.split([96, 416])[1])),
    "columns at the borders of blocks": ((320, 512), (5, 256), lambda x, w: F.linear(x, w[:, 128:384])),
    "unbind": ((4, 320, 384), (5, 384), lambda x, w: F.linear(x, w.unbind(0)[1])),
    "experts as one matrix": ((4, 256, 384), (5, 384), lambda x, w: F.linear(x, w.flatten(0, 1))),
    "heads": ((512, 384), (5, 384), lambda x, w: torch.einsum("bk,hnk->bhn", x, w.view(4, 128, 384))),
    "heads inside of blocks": ((512, 384), (5, 384), lambda x, w: torch.einsum("bk,hnk->bhn", x, w.view(8, 64, 384))),
    "cat": ((256, 384), (5, 384), lambda x, w: F.linear(x, torch.cat([w, w]))),
    "stack": ((320, 384), (2, 5, 384), lambda x, w: torch.bmm(x, torch.stack([w, w]).mT)),
    "_grouped_mm": ((4, 384, 320), (19, 384), lambda x, w: torch._grouped_mm(x, w, _OFFSETS)),
    "_grouped_mm of w.mT": ((4, 320, 384), (19, 384), lambda x, w: torch._grouped_mm(x, w.mT, _OFFSETS)),
    "F.grouped_mm": ((4, 384, 320), (19, 384), lambda x, w: F.grouped_mm(x, w, offs=_OFFSETS)),
    "_grouped_mm of a batch": ((4, 384, 320), (4, 5, 384), lambda x, w: torch._grouped_mm(x, w)),
    "embedding": ((512, 384), (7, 384), lambda x, w: x + F.embedding(torch.tensor([3, 1, 500, 3, 9, 0, 511]), w)),
}  # fmt: skip
MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode
}  # fmt: skip


def _reference(name: str, function: Product, x: Tensor, w: Tensor) -> Tensor:
    """The float32 product of the dequantized weight."""
    if "grouped_mm" not in name:
        return function(x, w)
    w = w.mT if "w.mT" in name else w
    if x.ndim == 3:
        return x @ w
    ends = [0, *_OFFSETS.tolist()]
    out = torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(pairwise(ends))])
    return torch.cat([out, out.new_zeros(len(x) - len(out), out.shape[1])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    """By FP8 data alone: a warning that the weight is dequantized would be an error."""
    weight_shape, x_shape, function = PRODUCTS[name]
    w = nn.Parameter(make(*weight_shape, dtype=dtype), requires_grad=False)
    x, dense = torch.randn(x_shape).to(dtype), values(w)
    expected_x = x.float().requires_grad_()
    expected = _reference(name, function, expected_x, dense)
    bound = 100 if dtype == torch.float32 else 45
    for mode, context in MODES.items():
        with context():
            given = x.clone().requires_grad_(mode == "grad")
            out = function(given, w)
        assert out.dtype == dtype
        assert snr(out.float(), expected) > bound, mode
        if mode == "grad":
            grad = torch.randn_like(expected).to(dtype)
            (found,) = torch.autograd.grad(out, given, grad)
            (dx,) = torch.autograd.grad(expected, expected_x, grad.float(), retain_graph=True)
            assert snr(found.float(), dx) > bound


@pytest.mark.parametrize("name", [name for name in PRODUCTS if "grouped_mm" not in name and name != "no rows"])
def test_a_result_is_laid_out_as_that_of_a_plain_weight(name: str) -> None:
    """A view of it is possible where it is of PyTorch's."""
    weight_shape, x_shape, function = PRODUCTS[name]
    w, x = nn.Parameter(make(*weight_shape), requires_grad=False), torch.randn(x_shape)
    assert function(x, w).stride() == function(x, values(w)).stride()


@pytest.mark.parametrize("mode", MODES)
def test_a_bias_broadcasts_as_in_pytorch(mode: str) -> None:
    """In inference mode `F.linear` arrives as one op; otherwise PyTorch has decomposed it."""
    w = make(256, 384)
    for x_shape in ((384,), (3, 384), (2, 3, 384), (2, 2, 3, 384), (0, 384)):
        for bias_shape in ((256,), (1,), (), (3, 256), (3, 1), (1, 256), (2, 3, 256), (5, 256), (2, 3, 3, 256), (255,)):
            x, bias = torch.randn(x_shape), torch.randn(bias_shape)
            try:
                F.linear(x, torch.zeros(256, 384), bias)
            except RuntimeError:
                with MODES[mode](), pytest.raises((RuntimeError, ValueError)):
                    F.linear(x, w, bias)
                continue
            with MODES[mode]():
                out = F.linear(x, w, bias)
            expected = x @ values(w).T + bias
            assert out.shape == (*x_shape[:-1], 256)
            torch.testing.assert_close(out, expected.reshape(out.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0), (0, 0), (2, 0, 0), (2, 0, 3, 0)], ids=str)
def test_a_product_without_k_is_the_bias(shape: tuple[int, ...], mode: str) -> None:
    w, bias = make(256, 0), torch.randn(256)
    with MODES[mode]():
        out, without = F.linear(torch.randn(shape), w, bias), F.linear(torch.randn(shape), w)
    assert torch.equal(out, bias.expand(*shape[:-1], 256))
    assert torch.equal(without, torch.zeros(*shape[:-1], 256))


def test_addmm_does_not_broadcast_its_sums() -> None:
    w, x = make(160, 96), torch.randn(5, 160)
    for bias in (torch.ones(2, 5, 96), torch.ones(4, 96)):
        for beta in (0, 1):
            with pytest.raises(RuntimeError, match="expand"):
                torch.addmm(bias, x, w, beta=beta)
    with pytest.raises(RuntimeError, match="expand"):
        torch.addmm(torch.ones(5, 2), x, make(160, 1))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block(block: Block) -> None:
    w = make(96, 160, block=block)
    x = torch.randn(7, 160, requires_grad=True)
    out = F.linear(x, w)
    assert snr(out, x @ values(w).T) > 100
    grad = torch.randn_like(out)
    assert snr(torch.autograd.grad(out, x, grad)[0], grad @ values(w)) > 100
    # A scale for each element is no block of a kernel.
    torn = (
        pytest.warns(UserWarning, match="mm.default has no FP8 form") if block in ((128, 1), (32, 1)) else nullcontext()
    )
    with torn:
        assert snr(w[3:5] @ x.T, values(w)[3:5] @ x.T) > 100


def test_e8m0_scales() -> None:
    w = make(96, 160, block=(1, 32), scale="e8m0")
    x = torch.randn(7, 160)
    assert snr(F.linear(x, w), x @ values(w).T) > 100
    assert snr(F.linear(x, w[10:20]), x @ values(w)[10:20].T) > 100


def test_the_gradient_reads_the_same_bytes() -> None:
    """A frozen layer keeps a view of the weight's data for the gradient of its input."""
    m = layer()
    y = m(torch.randn(3, 384, requires_grad=True))
    assert y.grad_fn is not None
    saved = y.grad_fn._saved_mat2  # type: ignore[attr-defined]
    assert isinstance(saved, FP8Weight)
    assert isinstance(m.weight, FP8Weight)
    assert saved.scaled.data.data_ptr() == m.weight.scaled.data.data_ptr()
    assert m.weight.grad is None


def test_a_low_rank_adapter_trains_beside_a_frozen_weight() -> None:
    """`F.linear(x, W) + B A x`: gradients of x, A and B against the dequantized weight in float32."""
    m = layer(256, 384)
    x, a, b = torch.randn(6, 384), torch.randn(8, 384) / 20, torch.randn(256, 8) / 3
    grads = []
    for weight in (m.weight, values(m.weight)):
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        out = F.linear(leaves[0], weight) + leaves[0] @ leaves[1].T @ leaves[2].T
        grads.append(torch.autograd.grad(out.sin().sum(), leaves))
    for found, expected in zip(*grads, strict=True):
        assert snr(found, expected) > 90


def test_second_derivatives() -> None:
    w = make(96, 160)
    found = []
    for weight in (w, values(w)):
        x = torch.full((3, 160), 0.1).cumsum(1).sin().requires_grad_()
        (g,) = torch.autograd.grad((F.linear(x, weight) / 10).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.pow(2).sum(), x)[0])
    assert snr(*found) > 90


@pytest.mark.parametrize("name", ["vmap", "grad", "vmap grad", "jacrev", "jvp", "jacfwd", "hessian", "vmap of weights"])
def test_transforms(name: str) -> None:
    tf = torch.func
    w = make(4, 64, 160) if name == "vmap of weights" else make(64, 160)
    x = torch.randn(3, 160)

    def run(weight: Tensor) -> Any:
        def f(x: Tensor) -> Tensor:
            return F.linear(x, weight, torch.ones(64)).pow(2).sum(-1)

        return {
            "vmap": lambda: tf.vmap(f)(x),
            "grad": lambda: tf.grad(f)(x[0]),
            "vmap grad": lambda: tf.vmap(tf.grad(f))(x),
            "jacrev": lambda: tf.jacrev(f)(x),
            "jvp": lambda: tf.jvp(f, (x,), (x * 2,))[1],
            "jacfwd": lambda: tf.jacfwd(f)(x[:1]),
            "hessian": lambda: tf.hessian(f)(x[0]),
            "vmap of weights": lambda: tf.vmap(lambda each: F.linear(x, each))(weight),
        }[name]()

    assert snr(run(w), run(values(w))) > 90


def test_autocast_computes_in_its_type() -> None:
    w, x = make(96, 160), torch.randn(5, 160)
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, w)
    assert out.dtype == torch.bfloat16
    assert snr(out.float(), x.bfloat16().float() @ values(w).T) > 45


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_activations_of_another_size_are_refused(mode: Callable[[], Any]) -> None:
    """A layer's weight is transposed already: advice to pass `weight.mT` would mislead."""
    fc = layer()
    k, n = fc.in_features, fc.out_features
    expected = f"activations (3, 100) by an FP8Weight, ({k}, {n}) as (K, N): K=100 is not {k}; pass activations whose"
    with mode(), pytest.raises(ValueError, match=re.escape(expected)):
        fc(torch.randn(3, 100))
    with mode(), pytest.raises(ValueError, match="K=100 is not"):
        fc.weight.mT @ torch.randn(100, 3)


def test_activations_of_another_dtype_are_refused() -> None:
    w = make(96, 160, dtype=torch.bfloat16)
    expected = "same dtype, but got torch.float32 and an FP8Weight for torch.bfloat16; use model.to(torch.float32)"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        F.linear(torch.randn(5, 160), w)
    experts, offsets = make(4, 160, 96, dtype=torch.bfloat16), torch.tensor([1, 2, 2, 5], dtype=torch.int32)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.linear(x, w),
        lambda x: torch.addmm(torch.ones(96), x, w.T),
        lambda x: torch._grouped_mm(x, experts, offsets),
    ]
    for call in calls:
        for dtype in (torch.float64, torch.int32):
            with pytest.raises(RuntimeError, match=r"FP8Weight for torch.bfloat16; use x.to\(torch.bfloat16\)$"):
                call(torch.ones(5, 160, dtype=dtype))


def test_beta_of_zero_ignores_the_bias() -> None:
    w, x = make(160, 96), torch.randn(5, 160)
    out = torch.addmm(torch.full((96,), torch.nan), x, w, beta=0)
    assert snr(out, x @ values(w)) > 100


@pytest.mark.parametrize("rows", [20, 300])
def test_groups_are_one_product_and_no_expert_is_dequantized(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    multiply = reference.grouped_mm_a16w8
    counted = lambda x, w, *rest: (calls.append(tuple(w.data.shape)), multiply(x, w, *rest))[1]  # noqa: E731
    monkeypatch.setattr(reference, "grouped_mm_a16w8", counted)
    monkeypatch.delattr(FP8Weight, "dequantize")
    w, x = make(3, 256, 64, dtype=torch.bfloat16), torch.randn(rows, 256, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([rows // 4, rows // 4, rows], dtype=torch.int32)
    out = torch._grouped_mm(x, w, ends)
    out.backward(torch.ones_like(out))
    assert calls == [(3, 256, 64), (3, 64, 256)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", [-1, -512, 512])
def test_a_row_that_a_table_does_not_have(row: int, mode: str) -> None:
    """`F.embedding` and `index_select` count no rows from the end, as indexing does."""
    w, rows = make(512, 384), torch.tensor([3, row])
    for take in (lambda: F.embedding(rows, w), lambda: w.index_select(0, rows)):
        with MODES[mode](), pytest.raises(IndexError, match="index out of range"):
            take()
    if row < 0:
        found = w[rows]
        assert isinstance(found, FP8Weight)
        assert torch.equal(found.dequantize(), values(w)[rows])


def test_two_weights_are_dequantized() -> None:
    a, b = make(64, 128), make(128, 32)
    with pytest.warns(UserWarning, match=re.escape("aten.mm.default has no FP8 form: the weight (64, 128)")):
        out = a @ b
    assert snr(out, values(a) @ values(b)) > 100


def test_the_functions_of_fp8fn_use_the_weights_bytes() -> None:
    """`fp8fn.linear` of two tensors quantizes the activations, and asks the weight for its own data."""
    w = make(256, 384)
    x = torch.randn(130, 384, requires_grad=True)
    q = fp8fn.quantize(x.detach(), (1, 128))
    out = fp8fn.linear(x, w)
    assert torch.equal(out, fp8fn.gemm(q, w.scaled.mT, out_dtype=torch.float32))
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(dx, fp8fn.gemm(fp8fn.quantize(grad, (1, 128)), w.scaled, out_dtype=torch.float32))


@pytest.mark.parametrize("square", [True, False])
def test_a_quantizer_answers_with_the_weights_own_data(square: bool) -> None:
    block: Block = (128, 128) if square else (1, 128)
    w = make(200, 300, block=block)
    found = fp8fn.quantize(w, block)
    assert torch.equal(found.data.view(torch.uint8), w.scaled.data.view(torch.uint8))
    assert torch.equal(found.scale, w.scaled.scale)
    if square:
        pair = torch.ops.fp8fn.quantize_dual(w, block)
        for column_major in (False, True):  # as Hopper's products read it
            one = torch.ops.fp8fn.quantize(w, block, column_major=column_major)
            expected = pair[2 * column_major : 2 * column_major + 2]
            assert [x.stride() for x in one] == [x.stride() for x in expected]
            assert same_bits(one, expected)
        for each in fp8fn.quantize_dual(w, block):
            assert torch.equal(each.data.view(torch.uint8), w.scaled.data.view(torch.uint8))
            assert torch.equal(each.scale, w.scaled.scale)


def test_a_quantizer_that_asks_for_something_else_is_refused() -> None:
    w = make(200, 300)
    for call, message in (
        (lambda: fp8fn.quantize(w, (1, 128)), "block=(1, 128), and x is an FP8Weight in blocks of (128, 128)"),
        (lambda: fp8fn.quantize(w, (128, 128), dtype=torch.float8_e5m2), "x is an FP8Weight of torch.float8_e4m3fn"),
        (lambda: fp8fn.quantize(w, (128, 128), scale="e8m0"), "scale='e8m0', and x is an FP8Weight with scales of"),
        (lambda: fp8fn.quantize_dual(w, (1, 128)), "block=(1, 128), and x is an FP8Weight in blocks of (128, 128)"),
        (lambda: fp8fn.linear(torch.randn(2, 300), w, recipe="rowwise"), "is an FP8Weight in blocks of"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match=r"takes no FP8Weight; pass weight.scaled"):
        torch.ops.fp8fn.amax(w, (128, 128))


def test_inference_tensors_too() -> None:
    with torch.inference_mode():
        w = make(3, 96, 160)
        out = F.linear(torch.ones(2, 160), w[1])
    assert snr(out, torch.ones(2, 160) @ values(w)[1].T) > 100
    assert w.is_inference()
