"""`gemm(x, w, prequant=True)`, activations quantized on the way to an FP8 weight: values, derivatives, accuracy."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.formats import ScaleFormat
from fp8fn.ops.layout import Block
from support.accuracy import snr
from support.called_ops import Names

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Function = Callable[..., Any]

# The block and scales of a weight (K, N), and the block of the activations.
WEIGHTS: Final[list[tuple[Block, ScaleFormat, Block]]] = [
    ((128, 128), "fp32", (1, 128)), ((128, 1), "fp32", (1, 128)), ((-1, 1), "fp32", (1, -1)),
    ((-1, -1), "fp32", (-1, -1)), ((32, 1), "e8m0", (1, 32)), ((32, 1), "fp32", (1, 32)),
    ((128, 128), "e8m0", (1, 128)), ((128, 128), "pow2", (1, 128)), ((32, 1), "rceil", (1, 32)),
]  # fmt: skip
EACH_WEIGHT = pytest.mark.parametrize(("block", "scale", "left"), WEIGHTS, ids=str)
# Weights whose transpose is quantized along its rows too, so that the gradient is a product in FP8.
SQUARE: Final = ((128, 128), (-1, -1))


def weight(
    k: int, n: int, block: Block = (128, 128), scale: ScaleFormat = "fp32", *, batch: tuple[int, ...] = (),
    device: Any = "cpu",
) -> ScaledTensor:  # fmt: skip
    return fp8fn.quantize(torch.randn(*batch, n, k, device=device).mT, block, scale=scale)


def quantized(x: Tensor, left: Block, w: ScaledTensor) -> ScaledTensor:
    return fp8fn.quantize(x, left, scale="fp32" if w.scale.dtype == FP32 else "e8m0")


@pytest.mark.parametrize("shape", [(16, 96, 256), (1, 1, 1), (5, 40, 190), (0, 40, 64), (5, 0, 64)], ids=str)
@EACH_WEIGHT
def test_is_the_product_of_both_quantized(
    block: Block, scale: ScaleFormat, left: Block, shape: tuple[int, int, int], device: torch.device
) -> None:
    m, n, k = shape
    w, bias = weight(k, n, block, scale, device=device), torch.randn(n, device=device)
    for dtype, out_dtype in ((BF16, None), (FP16, None), (FP32, BF16), (BF16, FP32)):
        x = torch.randn(m, k, device=device).to(dtype)
        expected = fp8fn.gemm(quantized(x, left, w), w, bias=bias, out_dtype=out_dtype or dtype)
        found = fp8fn.gemm(x, w, bias=bias, out_dtype=out_dtype, prequant=True)
        assert found.dtype == (out_dtype or dtype)
        assert torch.equal(found, expected)
        assert torch.equal(fp8fn.linear(x, w.mT, bias, out_dtype=out_dtype, prequant=True), expected)
        if m:
            assert torch.equal(
                fp8fn.gemm(x[0], w, bias=bias, prequant=True), fp8fn.gemm(x[:1], w, bias=bias, prequant=True)[0]
            )


@EACH_WEIGHT
def test_quantizes_once_and_multiplies_once(block: Block, scale: ScaleFormat, left: Block) -> None:
    x, w = torch.randn(5, 64, requires_grad=True), weight(64, 48, block, scale)
    op = "mx_mm" if block == (32, 1) and w.scale.dtype != FP32 else "scaled_mm"
    with Names() as names:
        out = fp8fn.gemm(x, w, prequant=True)
    assert names.called == ["quantize", op]
    with Names() as names:
        out.sum().backward()
    assert names.called == (["quantize", op] if block in SQUARE else ["mm_a16w8"])


# SNR in dB of the product of normal values against the exact one: without `prequant`, and with it.
COSTS: Final = {
    ((128, 128), "fp32"): (31.5, 28.6), ((128, 1), "fp32"): (31.8, 28.8), ((-1, 1), "fp32"): (31.5, 28.5),
    ((-1, -1), "fp32"): (31.5, 28.5), ((32, 1), "e8m0"): (30.7, 27.6), ((32, 1), "rceil"): (31.5, 28.1),
}  # fmt: skip


@pytest.mark.parametrize(("block", "scale"), COSTS, ids=str)
def test_what_it_costs(block: Block, scale: ScaleFormat, device: torch.device) -> None:
    """As the docstring of `gemm` has it."""
    x, exact_weight = torch.randn(256, 1024, device=device).bfloat16(), torch.randn(1024, 512, device=device)
    w, exact = fp8fn.quantize(exact_weight, block, scale=scale), x.double() @ exact_weight.double()
    for prequant, expected in zip((False, True), COSTS[block, scale], strict=True):
        assert abs(snr(fp8fn.gemm(x, w, out_dtype=FP32, prequant=prequant), exact) - expected) < 0.2
        assert abs(snr(fp8fn.gemm(x, w, prequant=prequant), exact) - expected) < 0.2


@pytest.mark.parametrize(("lead", "batch"), [
    ((3,), ()), ((2, 3), ()), ((2, 0, 3), ()), ((3,), (3,)), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2, 3)),
], ids=str)  # fmt: skip
@EACH_WEIGHT
def test_leading_dimensions(
    block: Block, scale: ScaleFormat, left: Block, lead: tuple[int, ...], batch: tuple[int, ...], device: torch.device
) -> None:
    """They are rows beside a matrix `w`; else each matrix of `x` has its own scales, which only `(-1, -1)` can tell."""
    x, w = torch.randn(*lead, 5, 64, device=device).bfloat16(), weight(64, 40, block, scale, batch=batch, device=device)
    found = fp8fn.gemm(x, w, prequant=True, out_dtype=FP32)
    if batch:
        expected = fp8fn.gemm(quantized(x, left, w), w, out_dtype=FP32)
    else:
        expected = fp8fn.gemm(quantized(x.flatten(0, -2), left, w), w, out_dtype=FP32).unflatten(0, (*lead, 5))
    assert found.shape == (*torch.broadcast_shapes(lead, batch), 5, 40)
    # Two kernels may serve on a GPU, and sums of FP8 products keep 14 bits in Hopper's matrix units.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2 if found.is_cuda else 1e-4)


@pytest.mark.parametrize(("lead", "batch"), [((3,), (3,)), ((3,), ()), ((), (3,))], ids=str)
def test_biases(lead: tuple[int, ...], batch: tuple[int, ...], device: torch.device) -> None:
    """The three of `mm_a16w8`, added to float32 sums."""
    x, w = torch.randn(*lead, 5, 64, device=device).bfloat16(), weight(64, 40, batch=batch, device=device)
    sums = fp8fn.gemm(x, w, prequant=True, out_dtype=FP32)
    for shape in ((40,), (3, 40), (3, 1, 40)):
        bias = torch.randn(shape, device=device).half().requires_grad_()
        found = fp8fn.gemm(x, w, bias=bias, prequant=True)
        rows = bias.unsqueeze(1) if bias.ndim == 2 else bias
        assert torch.equal(found, (sums + rows.float()).bfloat16())
        (of_bias,) = torch.autograd.grad(found.float().sum(), bias)
        assert of_bias.dtype == FP16
        assert torch.equal(of_bias, torch.full_like(bias, 15 if bias.ndim == 1 else 5))


@EACH_WEIGHT
def test_gradient_of_x(block: Block, scale: ScaleFormat, left: Block, device: torch.device) -> None:
    w, g = weight(190, 70, block, scale, device=device), torch.randn(2, 5, 70, device=device).bfloat16()
    x, bias = torch.randn(2, 5, 190, device=device).bfloat16(), torch.randn(70, device=device)
    leaves = [x.requires_grad_(), bias.requires_grad_()]
    of_x, of_bias = torch.autograd.grad(fp8fn.gemm(x, w, bias=bias, prequant=True), leaves, g)
    if block in SQUARE:
        expected = fp8fn.gemm(g, w.mT, prequant=True)
        assert torch.equal(expected, fp8fn.gemm(quantized(g.flatten(0, 1), left, w), w.mT).unflatten(0, (2, 5)))
    else:
        expected = fp8fn.gemm(g, w.mT)
    assert torch.equal(of_x, expected)
    assert snr(of_x, g.double() @ fp8fn.dequantize(w, FP32).double().mT) > (30 if block in SQUARE else 50)
    torch.testing.assert_close(of_bias, g.double().sum((0, 1)).float())


@EACH_WEIGHT
def test_strides(block: Block, scale: ScaleFormat, left: Block, device: torch.device) -> None:
    x, w = torch.randn(64, 10, device=device).bfloat16().mT, weight(64, 40, block, scale, device=device)
    turned = ScaledTensor(w.data.view(torch.uint8).contiguous().view(w.dtype), w.scale, block)
    expected = fp8fn.gemm(x.contiguous(), w, prequant=True)
    for found in (fp8fn.gemm(x, w, prequant=True), fp8fn.gemm(x, turned, prequant=True)):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fp8fn.gemm(x[::2], w, prequant=True), fp8fn.gemm(x[::2].clone(), w, prequant=True))


def test_keeps_nothing_of_x_for_the_backward(device: torch.device) -> None:
    x, w = torch.randn(5, 64, device=device, requires_grad=True), weight(64, 40, device=device)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8fn.gemm(x, w, prequant=True)
    assert kept == [w.data.data_ptr(), w.scale.data_ptr()]


def test_gradient_of_one_x_beside_a_batch_is_their_sum(device: torch.device) -> None:
    x, w = torch.randn(5, 64, device=device).bfloat16().requires_grad_(), weight(64, 40, batch=(3,), device=device)
    g = torch.randn(3, 5, 40, device=device).bfloat16()
    (found,) = torch.autograd.grad(fp8fn.gemm(x, w, prequant=True), x, g)
    assert torch.equal(found, fp8fn.gemm(g, w.mT, prequant=True, out_dtype=FP32).sum(0).bfloat16())


X, BIAS = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0)), torch.ones(48)
TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "vjp": lambda f: torch.func.vjp(lambda x: f(x, BIAS), X)[1](torch.ones(())),
    "jvp": lambda f: jvp(f, (X, BIAS), (X, BIAS)),
    "jvp of jvp": lambda f: jvp(lambda x: jvp(lambda y: f(y, BIAS), (x,), (X,))[1], (X,), (X,)),
    "jvp of bias": lambda f: jvp(lambda bias: f(X, bias), (BIAS,), (BIAS,)),
    "grad": lambda f: grad(f, (0, 1))(X[0], BIAS),
    "hessian": lambda f: hessian(lambda x: f(x, BIAS))(X[0, :2, :]),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x, BIAS).square().sum())(X[0]),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1)), (1, None))(X, BIAS),
    "vmap over biases": lambda f: vmap(f, (0, 0))(X, BIAS.expand(3, 48) * torch.arange(3)[:, None]),
    "grad of vmap": lambda f: grad(lambda x: vmap(f, (0, None))(x, BIAS).sum())(X),
    "vmap of vmap": lambda f: vmap(vmap(f, (0, None)), (0, None))(X, BIAS),
}


@pytest.mark.parametrize(("block", "scale"), [((128, 128), "fp32"), ((-1, 1), "fp32"), ((32, 1), "e8m0")], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, block: Block, scale: ScaleFormat, fresh_dynamo: None) -> None:
    """The same as of a product with the dequantized weight but for the activations' rounding, and compiled the same."""
    w = weight(256, 48, block, scale)

    def run(linear: Function) -> Any:
        return TRANSFORMS[name](lambda x, bias: linear(x, bias).square().sum())

    def prequantized() -> Any:
        return run(lambda x, bias: fp8fn.gemm(x, w, bias=bias, prequant=True))

    found = prequantized()
    expected = run(lambda x, bias: x @ fp8fn.dequantize(w, FP32) + bias)
    compiled = torch.compile(prequantized, fullgraph=True, backend="aot_eager")()
    for got, want, same in zip(*map(torch.utils._pytree.tree_leaves, (found, expected, compiled)), strict=True):
        assert got.shape == want.shape
        assert snr(got, want.double()) > 24
        torch.testing.assert_close(got, same, rtol=1e-5, atol=1e-5)


@EACH_WEIGHT
def test_vmap_is_the_loop(block: Block, scale: ScaleFormat, left: Block) -> None:
    """Each element of a batch has its own scale, tensorwise too."""
    x = torch.randn(5, 3, 64) * torch.tensor([1.0, 8.0, 64.0])[:, None]
    w, many = weight(64, 40, block, scale), weight(64, 40, block, scale, batch=(3,))
    found = vmap(lambda x: fp8fn.gemm(x, w, prequant=True), 1)(x)
    torch.testing.assert_close(found, torch.stack([fp8fn.gemm(x[:, i], w, prequant=True) for i in range(3)]))
    found = vmap(lambda x, w: fp8fn.gemm(x, w, prequant=True), (1, 0))(x, many)
    each = [ScaledTensor(many.data[i], many.scale[i], block) for i in range(3)]
    torch.testing.assert_close(found, torch.stack([fp8fn.gemm(x[:, i], w, prequant=True) for i, w in enumerate(each)]))


def test_a_derivative_of_the_derivative_by_autograd() -> None:
    x, g, w = torch.randn(5, 64, requires_grad=True), torch.randn(5, 48, requires_grad=True), weight(64, 48)
    (of_x,) = torch.autograd.grad(fp8fn.gemm(x, w, prequant=True), x, g, create_graph=True)
    v = torch.randn(5, 64)
    (of_g,) = torch.autograd.grad(of_x, g, v)
    assert torch.equal(of_g, fp8fn.gemm(v, w, prequant=True))


def test_the_weight_is_a_constant() -> None:
    x, w = torch.randn(5, 64), weight(64, 48, (-1, 1))
    tracked = ScaledTensor(w.data, w.scale.clone().requires_grad_(), w.block)
    with pytest.raises(NotImplementedError, match="no derivative in the weight's data and scale: detach them"):
        fp8fn.gemm(x, tracked, prequant=True).sum().backward()
    with pytest.raises(NotImplementedError, match="no derivative in the weight's data and scale"):
        jvp(lambda s: fp8fn.gemm(x, ScaledTensor(w.data, s, w.block), prequant=True), (w.scale,), (w.scale,))


@EACH_WEIGHT
def test_compiled_with_symbolic_sizes_and_gradients(
    block: Block, scale: ScaleFormat, left: Block, fresh_dynamo: None
) -> None:
    def step(x: Tensor, bias: Tensor, w: ScaledTensor) -> Tensor:
        return fp8fn.gemm(2 * x, w, bias=bias, prequant=True).cos()

    w, compiled = weight(160, 48, block, scale), torch.compile(step, fullgraph=True, dynamic=True)
    for m in (5, 9, 33):
        leaves = torch.randn(m, 160, requires_grad=True), torch.randn(48, requires_grad=True)
        found, expected = (f(*leaves, w) for f in (compiled, step))
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.sum(), leaves) for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


FIRST_USE: Final = """
import sys, torch, fp8fn
assert "torch._dynamo" not in sys.modules
x, w = torch.randn(5, 64), fp8fn.quantize(torch.randn(64, 48), (128, 128))
call = lambda x: torch.func.grad(lambda x: fp8fn.gemm(x, w, prequant=True).sum())(x)
assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))
"""


def test_the_first_use_may_be_compiled_and_an_import_takes_no_dynamo() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*is deprecated:FutureWarning")  # torch.export's own
def test_exported() -> None:
    w = weight(64, 48)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fp8fn.gemm(x, w, prequant=True)

    program = torch.export.export(Layer(), (torch.randn(5, 64),), dynamic_shapes=({0: torch.export.Dim("m")},))
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {torch.ops.fp8fn.quantize.default, torch.ops.fp8fn.scaled_mm.default} <= set(ops)
    x = torch.randn(9, 64)
    assert torch.equal(program.module()(x), fp8fn.gemm(x, w, prequant=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_reaches_its_own_row_alone(bad: float, device: torch.device) -> None:
    x = torch.randn(8, 256, device=device).bfloat16()
    for block, scale, left in WEIGHTS:
        if left != (-1, -1):
            w = weight(256, 16, block, scale, device=device)
            clean, dirty = x.clone(), x.clone()
            dirty[3, 7] = bad
            found, expected = (fp8fn.gemm(rows, w, prequant=True) for rows in (dirty, clean))
            assert not found[3].isfinite().any()
            others = [row for row in range(8) if row != 3]
            assert torch.equal(found[others], expected[others])


def test_nothing_contracted_autocast_and_meta(device: torch.device) -> None:
    x, bias = torch.randn(5, 0, device=device), torch.randn(48, device=device)
    assert torch.equal(fp8fn.gemm(x, weight(0, 48, device=device), bias=bias, prequant=True), bias.expand(5, 48))
    x, w = torch.randn(5, 64, device=device), weight(64, 48, device=device)
    with torch.autocast(device.type, BF16):
        found = fp8fn.gemm(x, w, prequant=True)
    assert torch.equal(found, fp8fn.gemm(x.bfloat16(), w, prequant=True))
    assert fp8fn.gemm(x.to("meta"), w.to("meta"), prequant=True).shape == (5, 48)


W: Final = weight(64, 48)
ERRORS: list[tuple[str, Function, type[Exception], str]] = [
    ("a in FP8", lambda x: fp8fn.gemm(W.mT, W, prequant=True), ValueError, "a is a ScaledTensor, in FP8 already; pass"),
    ("weight first", lambda x: fp8fn.gemm(W.mT, x.mT, prequant=True), ValueError, "a is a ScaledTensor, in FP8"),
    ("plain weight", lambda x: fp8fn.gemm(x, x.mT, prequant=True), ValueError, r"b is a tensor; pass fp8fn\.quantize"),
    ("block", lambda x: fp8fn.gemm(x, weight(64, 48, (1, 128)), prequant=True), ValueError,
     r"b has block=\(1, 128\), a scale for each element of K, .* quantize it in one of \(\(128, 1\), \(128, 128\)"),
    ("K", lambda x: fp8fn.gemm(x, W.mT, prequant=True), ValueError, r"K=64 .* K=48; .* pass weight\.mT"),
    ("integers", lambda x: fp8fn.gemm(x.int(), W, prequant=True), TypeError, "a has dtype torch.int32; use bfloat16"),
    ("number", lambda x: fp8fn.gemm(x[0, 0], W, prequant=True), ValueError, r"a has shape \(\)"),
    ("device", lambda x: fp8fn.gemm(x.to("meta"), W, prequant=True), ValueError, "a is on meta and b on cpu; move"),
    ("bias", lambda x: fp8fn.gemm(x, W, bias=x[0], prequant=True), ValueError, r"bias has shape \(64,\); it must be"),
    ("out_dtype", lambda x: fp8fn.gemm(x, W, out_dtype=torch.int8, prequant=True), TypeError, "out_dtype=torch.int8"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors(call: Function, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(torch.randn(5, 64))
