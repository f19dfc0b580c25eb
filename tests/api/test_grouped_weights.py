"""`grouped_gemm` of unquantized tokens by FP8 experts: values, gradients and transforms against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jvp, vmap

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.layout import BLOCKS, Block
from support.accuracy import snr
from support.gradients import gradients, saved_by
from support.graphs import assert_one_compile_serves
from support.operands.groups import LEFT, SIZES, ends, spans
from support.operands.values import normal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
K, N = 150, 70


def experts(number: int, block: Block = (128, 128), k: int = K, n: int = N, device: Any = "cpu") -> ScaledTensor:
    """Weights `(E, K, N)` as a model stores them, `(E, N, K)`."""
    scale = "e8m0" if 32 in block else "fp32"
    return fp8fn.quantize(normal(number, n, k, device=device), block[::-1], scale=scale).mT


def loop(x: Tensor, w: ScaledTensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition in float64, differentiable."""
    wide = w.data.double() * spread(w).double()
    pieces = [x.double()[start:end] @ wide[group] for group, (start, end) in enumerate(spans(offsets))]
    if bias is not None:
        pieces = [piece + bias.double()[group] for group, piece in enumerate(pieces)]
    return torch.cat([*pieces, x.double()[offsets[-1] :] @ wide[0] * 0])


def spread(w: ScaledTensor) -> Tensor:
    """The scale of each element."""
    scale = w.scale.float()
    for axis, block in zip((-2, -1), w.block, strict=True):
        size = w.shape[axis]
        scale = scale.repeat_interleave(size if block == -1 else block, axis).narrow(axis, 0, size)
    return scale


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_of_groups(sizes: tuple[int, ...], device: torch.device) -> None:
    offsets, w = ends(sizes, device), experts(len(sizes), device=device)
    x, bias = normal(sum(sizes) + LEFT, K, device=device), torch.randn(len(sizes), N, device=device)
    out = fp8fn.grouped_gemm(x, w, offsets, bias=bias, out_dtype=FP32)
    assert snr(out, loop(x, w, offsets, bias)) > 45 or not any(sizes)
    assert not out[sum(sizes) :].any()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_and_gradients(block: Block, dtype: torch.dtype, device: torch.device) -> None:
    offsets, w = ends((0, 130, 7, 90), device), experts(4, block, device=device)
    x, bias = normal(227 + LEFT, K, dtype=dtype, device=device), torch.randn(4, N, device=device)
    out_grad = normal(227 + LEFT, N, device=device)
    out, (dx, dbias) = gradients(
        lambda x, bias: fp8fn.grouped_gemm(x, w, offsets, bias=bias, out_dtype=FP32), out_grad, x, bias
    )
    want, (want_dx, want_dbias) = gradients(lambda x, bias: loop(x, w, offsets, bias), out_grad, x, bias)
    assert (dx.dtype, dbias.dtype) == (dtype, FP32)
    assert snr(out, want) > 45
    assert snr(dx, want_dx) > 45
    assert snr(dbias, want_dbias) > 100
    assert not out[-LEFT:].any()
    assert not dx[-LEFT:].any()


def test_no_wide_form_of_a_weight_is_made_or_saved() -> None:
    x, w, offsets = normal(50, K).requires_grad_(), experts(3), ends((20, 0, 30))
    saved = saved_by(lambda: fp8fn.grouped_gemm(x, w, offsets))
    assert {part.data_ptr() for part in saved} == {part.data_ptr() for part in (w.data, w.scale, offsets)}


def test_nan_stays_in_its_group(device: torch.device) -> None:
    """NaN among one expert's rows, in another one's scales, and past the last offset."""
    offsets, w = ends((40, 30, 0, 130, 20), device), experts(5, device=device)
    x = normal(220 + LEFT, K, device=device)
    clean = fp8fn.grouped_gemm(x, w, offsets)
    bad, scale = x.clone(), w.scale.clone()
    bad[40:70] = bad[220:] = float("nan")
    scale[2:4] = float("nan")  # of an expert without rows, too
    out = fp8fn.grouped_gemm(bad, ScaledTensor(w.data, scale, w.block), offsets)
    assert out[40:70].isnan().all()
    assert out[70:200].isnan().all()
    assert torch.equal(out[:40], clean[:40])
    assert torch.equal(out[200:], clean[200:])


def test_without_offsets_it_is_a_batch() -> None:
    x, w, bias = normal(3, 20, K), experts(3), torch.randn(3, N)
    want = x.double() @ (w.data.double() * spread(w).double()) + bias[:, None].double()
    assert snr(fp8fn.grouped_gemm(x, w, bias=bias, out_dtype=FP32), want) > 45
    with torch.autocast("cpu", dtype=FP16):
        assert fp8fn.grouped_gemm(x, w).dtype == FP16
        assert fp8fn.grouped_gemm(x[0], w, ends((5, 5, 10))).dtype == FP16


def test_transforms() -> None:
    offsets, w = ends((3, 0, 6)), experts(3, k=40, n=30)
    x, tangent, bias = (torch.randn(size) for size in ((11, 40), (11, 40), (3, 30)))

    def out(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8fn.grouped_gemm(x, w, offsets, bias=bias)

    def wide(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return loop(x, w, offsets, bias)

    for got, want in (
        (jvp(out, (x,), (tangent,))[1], wide(tangent)),
        (jvp(lambda b: out(x, b), (bias,), (bias,))[1], wide(x * 0, bias)),
        (grad(lambda x: out(x).square().sum())(x), grad(lambda x: wide(x).square().sum())(x)),
        (
            grad(lambda x: grad(lambda x: out(x).pow(3).sum())(x).square().sum())(x),
            grad(lambda x: grad(lambda x: wide(x).pow(3).sum())(x).square().sum())(x),
        ),
        (jacfwd(lambda x: out(x).sum(0))(x), jacfwd(lambda x: wide(x).sum(0))(x)),
        (vmap(out)(torch.stack([x, tangent])), torch.stack([wide(x), wide(tangent)])),
    ):
        assert snr(got, want) > 80


@pytest.mark.usefixtures("fresh_caches")
def test_one_compile_serves_any_number_of_tokens() -> None:
    w = experts(3)

    def problems() -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        for sizes in ((20, 0, 30), (0, 0, 7), (64, 64, 1)):
            tokens = sum(sizes) + LEFT
            yield (normal(tokens, K),), normal(tokens, N), ends(sizes)

    assert_one_compile_serves(lambda x, offsets: fp8fn.grouped_gemm(x, w, offsets), problems, 1e-3)


X, W, ENDS = normal(20, K), experts(2), ends((5, 20))

ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "order": (lambda: fp8fn.grouped_gemm(W, X, ENDS), TypeError, ("a is a ScaledTensor", "b a Tensor")),
    "integers": (lambda: fp8fn.grouped_gemm(X.int(), W, ENDS), TypeError, ("torch.int32", "use bfloat16")),
    "one end": (lambda: fp8fn.grouped_gemm(X, W, ENDS[:1]), ValueError, ("1 ends", "2 experts")),
    "descending": (lambda: fp8fn.grouped_gemm(X, W, ENDS.flip(0)), ValueError, ("descends",)),
    "K": (lambda: fp8fn.grouped_gemm(X[:, 1:], W, ENDS), ValueError, ("K=149", "K=150", "weight.mT")),
    "one weight": (lambda: fp8fn.grouped_gemm(X, W[0], ENDS), ValueError, ("(150, 70)", "(E, K, N)")),
    "bias": (lambda: fp8fn.grouped_gemm(X, W, ENDS, bias=torch.ones(N)), ValueError, ("(70,)", "(2, 70)")),
    "device": (lambda: fp8fn.grouped_gemm(X.to("meta"), W, ENDS), ValueError, ("meta", "move them to one device")),
    "no offsets": (lambda: fp8fn.grouped_gemm(X, W), ValueError, ("offsets is None", "(E, M, K)")),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors(case: tuple[Callable[[], Any], type[Exception], tuple[str, ...]]) -> None:
    call, kind, words = case
    with pytest.raises(kind) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def test_a_derivative_in_the_weight_is_an_error() -> None:
    x, scale = X.clone().requires_grad_(), W.scale.clone().requires_grad_()
    out = fp8fn.grouped_gemm(x, ScaledTensor(W.data, scale, W.block), ENDS)
    with pytest.raises(NotImplementedError, match="grouped_mm_a16w8 has no derivative in w and w_scale"):
        out.sum().backward()
