"""An FP8 weight that is constant: how a product is told, and that it reads nothing else before the launch waits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.targets import Target
from support.operands.weights import on_gpu, weight


def test_gemm_and_linear_pass_it_on() -> None:
    w, bias, x = weight(64, 48, (128, 128)), torch.randn(48), torch.randn(2, 3, 5, 64)
    for given in (x, x[0], x[0, 0], x[0, 0, 0]):
        assert torch.equal(fp8fn.gemm(given, w, bias=bias, constant=True), fp8fn.gemm(given, w, bias=bias))
        assert torch.equal(fp8fn.linear(given, w.mT, bias, constant=True), fp8fn.linear(given, w.mT, bias))
    assert torch.equal(fp8fn.gemm(w.mT, x.mT, constant=True), fp8fn.gemm(w.mT, x.mT))
    assert torch.equal(fp8fn.gemm(x, w, prequant=True, constant=True), fp8fn.gemm(x, w, prequant=True))
    for block, scale in (((128, 128), "fp32"), ((32, 1), "e8m0")):
        a = fp8fn.quantize(x, (1, block[0]), scale=scale)  # type: ignore[arg-type]
        b = fp8fn.quantize(torch.randn(64, 48), block, scale=scale)  # type: ignore[arg-type]
        assert torch.equal(fp8fn.gemm(a, b, constant=True), fp8fn.gemm(a, b))
    with pytest.raises(ValueError, match=r"constant=True is for a weight in FP8, and a and b are tensors"):
        fp8fn.gemm(x, torch.randn(64, 48), constant=True)


def test_it_reaches_the_op_and_the_gradient(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    w, told = weight(64, 48, (128, 128)), []

    class Told(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.fp8fn.mm_a16w8.default:
                told.append(dict(zip(range(7), args, strict=False)).get(6, (kwargs or {}).get("constant", False)))
            return func(*args, **(kwargs or {}))

    for constant in (True, False):
        told.clear()
        x = torch.randn(5, 64, requires_grad=True)
        with Told():
            fp8fn.gemm(x, w, constant=constant).sum().backward()
        assert told == [constant, constant]
    xs = torch.randn(3, 5, 64)
    found = torch.vmap(lambda x: fp8fn.gemm(x, w, constant=True))(xs)
    torch.testing.assert_close(found, fp8fn.gemm(xs, w))
    step = partial(fp8fn.gemm, b=w, constant=True)
    leaf = torch.randn(5, 64, requires_grad=True)
    out, expected = torch.compile(lambda x: step(x.sin()).cos(), fullgraph=True)(leaf), step(leaf.sin()).cos()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf), torch.autograd.grad(expected.sum(), leaf))


def product(x: Tensor, w: ScaledTensor) -> Tensor:
    found: Tensor = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block, None, None, True)
    return found


# Rows, N and K, and batches: of up to 16 rows by one kernel, of more and of batches by another.
CHAINS = [
    *((m, size, ()) for m in (1, 2, 8, 16) for size in (1024, 2048, 3072)),
    *((m, size, ()) for m in (24, 64, 100) for size in (128, 512, 1024)),
    *((m, size, (48,)) for m in (1, 16, 32, 128) for size in (128, 256, 512)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "size", "batch"), CHAINS)
def test_a_chain_takes_each_product_as_the_next_one_s_x(
    m: int, size: int, batch: tuple[int, ...], hopper: Target
) -> None:
    """A graph of 24 products, replayed a hundred times with another x, has the results of a wait before each launch."""
    weights = [on_gpu(m, size, size, (128, 128), batch=batch)[1] for _ in range(24)]
    x = torch.randn(*batch, m, size, device="cuda").bfloat16()
    torch.cuda.synchronize()

    def chain(wait: bool) -> Tensor:
        y = x
        for i, w in enumerate(weights):
            if wait:
                torch.cuda.synchronize()
            y = product(y, w)
            y = y / 32 if i % 4 == 3 else y * 2**-5
        return y

    graph = torch.cuda.CUDAGraph()
    chain(wait=True)
    with torch.cuda.graph(graph):
        found = chain(wait=False)
    for _ in range(100):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, chain(wait=True))
        assert bool((found != 0).any())


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "size", "batch"), CHAINS)
def test_launches_without_anything_between_them(m: int, size: int, batch: tuple[int, ...], hopper: Target) -> None:
    """The next launch begins while this one runs: each x was written by the launch right before."""
    weights = [on_gpu(m, size, size, (128, 128), batch=batch)[1] for _ in range(24)]
    weights = [ScaledTensor(w.data, w.scale * size**-0.5, w.block) for w in weights]
    x = torch.randn(*batch, m, size, device="cuda").bfloat16()
    torch.cuda.synchronize()
    expected = x
    for w in weights:
        expected = product(expected, w)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = x
        for w in weights:
            found = product(found, w)
    for _ in range(100):
        found.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
    assert bool((expected != 0).any() and expected.isfinite().all())
