"""Products of many rows by an FP8 weight that is dequantized for PyTorch's own product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops import dequantize, reference
from fp8fn.ops.dequantize import DEQUANTIZE, Dequantization, dequantized
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.mm_a16w8 import MM_A16W8
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import SM90
from fp8fn.ops.triton.dequantize import plan_dequantize
from support.accuracy import snr

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BLOCKS: tuple[Block, ...] = ((128, 128), (1, 128), (1, -1), (-1, -1))

each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


def weight(n: int, k: int, block: Block, device: str = "cpu") -> fp8fn.ScaledTensor:
    """Normal values of very different magnitudes in each row."""
    rows = torch.logspace(-20, 20, n, base=2, device=device)[:, None]
    return fp8fn.quantize(torch.randn(n, k, device=device) * rows, block, dtype=E4M3)


def product(m: int = 4096, n: int = 4096, k: int = 4096, block: Block = (128, 128), **other: Tensor) -> WeightProduct:
    """Operands of no values, of a gradient: the rows of the weight `(k, n)` are contiguous."""
    w = fp8fn.quantize(torch.empty(k, n, device="meta"), block, dtype=E4M3)
    x = other.get("x", torch.empty(m, k, dtype=BF16, device="meta"))
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device="meta")
    return WeightProduct(x=x, w=Quantized(w.data, w.scale, w.block), bias=other.get("bias"), out=out, target=SM90)


@each_block
@pytest.mark.parametrize("shape", [(1, 128), (17, 300), (130, 1100)], ids=str)
def test_the_kernel_rounds_once(shape: tuple[int, int], block: Block) -> None:
    q = weight(*shape, block)
    q.scale[-1, -1] = torch.nan
    out = torch.empty(shape, dtype=BF16)
    given = Quantized(q.data, q.scale, block)
    plan_dequantize(given, out, SM90).interpret()
    assert torch.equal(out.nan_to_num(7), reference.dequantize(*given).to(BF16).nan_to_num(7))
    assert torch.equal(dequantized(*given, BF16).nan_to_num(7), out.nan_to_num(7))


def test_other_blocks_have_no_kernel() -> None:
    q = weight(64, 256, (128, 1))
    with pytest.raises(ValueError, match=r"block is \(128, 1\); its scales hold for 128 columns or for whole rows"):
        plan_dequantize(Quantized(q.data, q.scale, q.block), torch.empty(64, 256, dtype=BF16), SM90)


def test_many_rows_go_to_pytorch() -> None:
    chosen = MM_A16W8.choose(product())
    assert chosen.describe() == "dequantized by default"
    (launch,) = chosen.plan(product())
    assert launch.describe() == ("torch.mm[(128, 128), dequantized] sm90 (dequantized by default)")
    assert MM_A16W8.choose(product(x=torch.empty(2, 256, 4096, dtype=BF16, device="meta"))).name == "dequantized"
    for block in BLOCKS:
        given = product(512, block=block)
        assert dequantize.accepts(given) is None
        assert MM_A16W8.choose(given).name == "dequantized"
        assert MM_A16W8.choose(product(511, block=block)).name == "triton_mm"
        for rows, name in ((512, "cuda_parts"), (1024, "cuda_many")):
            given = product(rows, block=block)
            turned = replace(given, w=Quantized(given.w.data.mT, given.w.scale.mT, swap(given.w.block)))
            assert MM_A16W8.choose(turned).name == name


def lines(n: int, k: int, block: Block = (128, 128)) -> Quantized:
    """A weight `(K, N)` of no values, of a forward: its columns are contiguous, with `block` in the other order."""
    w = fp8fn.quantize(torch.empty(n, k, device="meta"), block, dtype=E4M3).mT
    return Quantized(w.data, w.scale, w.block)


def test_many_rows_that_no_kernel_in_cuda_can_read_go_to_pytorch() -> None:
    """Triton's kernel would take them: of a layer's weight too, where TMA does not address the rows of x."""

    def chosen(x: Tensor, w: Quantized) -> str:
        out = torch.empty(*x.shape[:-1], w.data.shape[1], dtype=BF16, device="meta")
        return MM_A16W8.choose(WeightProduct(x=x, w=w, bias=None, out=out, target=SM90)).name

    def rows(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=BF16, device="meta")

    for block in BLOCKS:
        assert chosen(rows(256, 4096), lines(4096, 4096, block)) == "cuda_parts"
        assert chosen(rows(1024, 4096), lines(4096, 4096, block)) == "cuda_many"
        assert chosen(rows(4096, 4096), lines(4100, 4096, block)) == "triton_mm"
    assert chosen(rows(128, 4100), lines(4096, 4100)) == "dequantized"
    assert chosen(rows(127, 4100), lines(4096, 4100)) == "cuda_gemv"
    assert chosen(rows(4096, 512).mT, lines(4096, 4096)) == "dequantized"
    assert chosen(rows(512, 4100)[:, :4096], lines(4096, 4096)) == "dequantized"


@pytest.mark.parametrize("by", ["rows", "columns"])
@each_block
def test_the_product_rounds_the_weight_once(block: Block, by: str) -> None:
    """In both layouts of the weight, with rows and bias of their own."""
    q = weight(40, 300, block)
    w = q if by == "rows" else q.mT
    x = torch.randn(2, 7, w.shape[0]).to(BF16)
    for bias in (None, torch.randn(w.shape[1]).to(BF16)):
        out = torch.empty(2, 7, w.shape[1], dtype=BF16)
        given = WeightProduct(x=x, w=Quantized(w.data, w.scale, w.block), bias=bias, out=out, target=SM90)
        assert dequantize.accepts(given) is None
        dequantize.plan(given, None)[0].run()
        matrix = (q.data.float() * reference.dequantize(torch.ones_like(q.data), q.scale, q.block)).to(BF16)
        exact = x.double() @ (matrix if by == "rows" else matrix.mT).double()
        assert snr(out, exact if bias is None else exact + bias.double()) > 50


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (replace(product(), w=lines(4096, 4096)), "TMA reads x and the columns of w"),
        (product(511), "M=511 rows do not pay for a weight that is written in 16 bits"),
        (product(4096, 128256), "the weight would take 1002 MB in 16 bits"),
        (
            product(x=torch.empty(4096, 4096, dtype=FP16, device="meta")),
            "x has dtype torch.float16 and out torch.float16, not both bfloat16, which has the range of the scales",
        ),
        (
            product(bias=torch.empty(4096, dtype=FP32, device="meta")),
            "bias has shape (4096,) and dtype torch.float32, and is no row of torch.bfloat16",
        ),
    ],
)
def test_why_not(given: WeightProduct, reason: str) -> None:
    assert dict(MM_A16W8.choose(given).refused)["dequantized"] == reason


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "find_spec", lambda _: None)
    assert dequantize.accepts(product()) == "triton is not installed"
    q = weight(16, 128, (1, 128))
    given = Dequantization(q=Quantized(q.data, q.scale, q.block), out=torch.empty(16, 128, dtype=BF16), target=SM90)
    assert DEQUANTIZE.choose(given).refused == (("triton", "triton is not installed"),)


@pytest.mark.gpu
@each_block
def test_the_product_on_a_gpu(block: Block) -> None:
    w = weight(4224, 2304, block, "cuda")
    x = torch.randn(2, 256, 4224, device="cuda", dtype=BF16)
    x = x / w.dequantize(FP32).square().mean(-1).sqrt().clamp(min=1e-30).to(BF16)  # each row of the weight counts
    bias = torch.randn(2304, device="cuda", dtype=BF16)
    for given in (None, bias):
        for _ in range(2):  # planned, and kept
            found = fp8fn.gemm(x, w, bias=given)
            expected = (
                x @ w.dequantize(BF16) if given is None else torch.addmm(given, x.flatten(0, 1), w.dequantize(BF16))
            )
            assert snr(found.flatten(0, 1), expected.flatten(0, -2)) > 55
            with torch.autocast("cuda", FP16):
                assert torch.equal(torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block, given), found)


@pytest.mark.gpu
@each_block
def test_the_product_by_a_layers_weight_on_a_gpu(block: Block) -> None:
    """TMA does not address its activations: K is no multiple of 8."""
    w = weight(2304, 4228, block, "cuda")
    x = torch.randn(2, 256, 4228, device="cuda", dtype=BF16)
    sizes = w.dequantize(FP32).square().mean(-1).sqrt().clamp(min=1e-30)  # each column of the product counts
    for _ in range(2):  # planned, and kept
        found = fp8fn.gemm(x, w.mT)
        expected = x @ w.dequantize(BF16).mT
        assert snr((found.float() / sizes).flatten(0, 1), (expected.float() / sizes).flatten(0, 1)) > 50


@pytest.mark.gpu
def test_the_product_in_a_graph() -> None:
    w = weight(4096, 4096, (128, 128), "cuda")
    x = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    expected = fp8fn.gemm(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fp8fn.gemm(x, w)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
