"""`mm_a16w8`, activations by an FP8 weight: reference, interpreted kernel, machine code, derivatives and `gemm`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from support.samples import SAMPLES

pytest.importorskip("triton")

from triton.runtime import interpreter

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import reference
from fp8fn.ops.cuda.gemm import gemv_a16w8
from fp8fn.ops.cuda.operands import SCALES
from fp8fn.ops.formats import FP8_DTYPES
from fp8fn.ops.layout import BLOCKS, Block, empty_scale
from fp8fn.ops.mm_a16w8 import MM_A16W8_INVARIANT
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, SM120, Target, native_e4m3
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mm_a16w8 import A16W8Config, choose_config, configure, plan_mm_a16w8
from fp8fn.ops.tuning import weight_table
from fp8fn.ops.tuning.weight import weight_problem
from support.compilers import assert_no_spills
from support.operands.weights import CLASSES, exact, operands, weight
from support.products import planned, weight_product

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LABELS = [sample.label for sample in SAMPLES["mm_a16w8"]()]
# Small tiles, so that few elements make several along every axis; two, so that scales are vectors and numbers.
SMALL, NARROW = A16W8Config(32, 64, 32, 4, 2, GROUP=2), A16W8Config(16, 32, 32, 4, 2)
# Half a unit in the last place: what a scale for each element along K costs, where `w * scale` is rounded.
ROUNDED = {BF16: 2**-8, FP16: 2**-11, FP32: 0.0}

Function = Callable[..., Any]
op: Function = torch.ops.fp8fn.mm_a16w8


def assert_near(found: Tensor, x: Tensor, w: ScaledTensor, bias: Tensor | None = None) -> None:
    """Each element as near as float32 sums are, and the rounding of `w * scale` where there is one."""
    expected = exact(x, w, bias)
    magnitude = expected.abs() + x.double().abs() @ reference.dequantize(w.data, w.scale, w.block).double().abs()
    allowed = (1e-5 if x.is_cuda else 1e-6) + (ROUNDED[x.dtype] if w.block[0] == 1 else 0.0)
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= allowed * magnitude).all()


def interpreted(
    x: Tensor, w: ScaledTensor, bias: Tensor | None = None, config: A16W8Config | None = SMALL, wide: bool = False
) -> Tensor:
    out = torch.full((*(x.shape[:-2] or w.shape[:-2]), x.shape[-2], w.shape[-1]), 7.0)
    given = weight_product(x, w, out, bias=bias)
    (launch,) = plan_mm_a16w8(given, config or configure(given))
    launch.constexprs["WIDE"] |= wide  # type: ignore[index]
    launch.interpret()
    return out


@pytest.mark.parametrize("contiguous", ["K", "N"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_types_and_orders(block: Block, dtype: torch.dtype, contiguous: str) -> None:
    for fp8, scale, config in ((E4M3, "fp32", SMALL), (torch.float8_e5m2, "e8m0", NARROW), (E4M3, "pow2", None)):
        x, w = torch.randn(40, 300).to(dtype), weight(300, 70, block, dtype=fp8, scale=scale, contiguous=contiguous)
        assert_near(interpreted(x, w, config=config), x, w)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, -1)], ids=str)
def test_every_fp8_value(block: Block, fp8: torch.dtype) -> None:
    """All 256 of them by an identity: each is converted exactly, NaN and Inf too."""
    data = torch.arange(256, dtype=torch.uint8).view(fp8).reshape(16, 16)
    scale = torch.full((1 if block[0] == 128 else 16, 1), 0.25)
    for row, values in enumerate(data.float()):
        finite = values.isfinite()
        clean = torch.where(data.float().isfinite(), data.float(), 0.0).to(fp8)
        for dtype in (BF16, FP16):
            x = torch.eye(16, dtype=dtype)[row : row + 1]
            assert torch.equal(interpreted(x, ScaledTensor(clean, scale, block))[0, finite], values[finite] / 4)
            assert not interpreted(x, ScaledTensor(data, scale, block))[0, ~finite].isfinite().any()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 129), (64, 64, 128), (129, 65, 31), (3, 1, 257)], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_shapes_and_tails(block: Block, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w, bias = torch.randn(m, k).bfloat16(), weight(k, n, block), torch.randn(2 * n)[::2]
    for config in (SMALL, None):
        assert_near(interpreted(x, w, bias, config), x, w, bias)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_contracted_is_the_bias(device: str) -> None:
    x, bias = torch.randn(5, 0, device=device).bfloat16(), torch.randn(70, device=device)
    for block in BLOCKS:
        w = weight(0, 70, block, device=device)
        w = ScaledTensor(w.data, torch.full_like(w.scale, torch.nan), block)
        assert torch.equal(fp8fn.gemm(x, w, bias=bias), bias.bfloat16().expand(5, 70))
        assert torch.equal(fp8fn.gemm(x, w), torch.zeros(5, 70, device=device).bfloat16())
        assert fp8fn.gemm(x[:0], w).shape == (0, 70)
        assert fp8fn.gemm(x, weight(0, 0, block, device=device)).shape == (5, 0)


@pytest.mark.parametrize("batch", [((3,), (3,)), ((3,), ()), ((), (3,)), ((1,), (1,)), ((1,), ())], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (-1, 1)], ids=str)
def test_batches_and_biases(block: Block, batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, w = torch.randn(*batch[0], 20, 140).bfloat16(), weight(140, 70, block, batch=batch[1])
    (size,) = batch[0] or batch[1]
    for shape in ((), (70,), (size, 70), (size, 1, 70)):
        bias = torch.randn(shape).half() if shape else None
        assert_near(interpreted(x, w, bias), x, w, bias)
        assert_near(op(x, w.data, w.scale, block, bias, FP32), x, w, bias)
    for strided in (x.mT.contiguous().mT, x.movedim(0, -2).contiguous().movedim(-2, 0)):
        assert_near(interpreted(strided, w), x, w)


def test_wide_offsets_address_the_same_elements() -> None:
    for block in BLOCKS:
        x, w = torch.randn(40, 150).bfloat16(), weight(150, 70, block)
        assert torch.equal(interpreted(x, w, wide=True), interpreted(x, w))
    assert offline(SM90, (128, 128), 2**17).constexprs["WIDE"] is False
    assert offline(SM90, (128, 128), 2**19 + 1).constexprs["WIDE"] is True


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_huge_and_tiny_values(block: Block, dtype: torch.dtype) -> None:
    """Weights far outside of float16, activations up to its end or 1e25: only the sum has to fit float32."""
    for size, largest in ((1e-9, 6e4), (1e9, 6e4), (1.0, 6e4 if dtype == FP16 else 1e25), (1.0, 1e-4)):
        x, w = (largest * torch.rand(20, 150)).to(dtype), weight(150, 70, block, size=size)
        assert_near(interpreted(x, w), x, w)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_bad_scale_or_row_stays_where_it_is(block: Block, dtype: torch.dtype, poison: float) -> None:
    x, w = torch.randn(40, 150).to(dtype), weight(150, 140, block)
    x[3, 149] = torch.nan
    scale = w.scale.clone()
    scale[-1, -1] = poison
    found, clean = (interpreted(x, ScaledTensor(w.data, s, block)) for s in (scale, w.scale))
    touched = torch.zeros(40, 140, dtype=torch.bool)
    touched[:, {1: 139, 128: 128, 32: 128, -1: 0}[block[1]] :] = poison != 0.0
    touched[3] = True
    assert torch.equal(~found.isfinite(), touched)
    if poison == 0.0:
        assert_near(found[4:], x[4:], ScaledTensor(w.data, scale, block))
    else:
        assert torch.equal(found[~touched], clean[~touched])


@pytest.mark.parametrize("k", [1, 128, 129, 256])
def test_the_scale_that_is_loaded_ahead_is_one_of_the_weight(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, addresses = interpreter.InterpreterBuilder, set[int]()
    load = builder.create_masked_load

    def noted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses.update(pointers.data[mask.data].ravel().tolist())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", noted)
    x, w = torch.randn(40, k).bfloat16(), weight(k, 140, (128, 128))
    rows, columns = w.scale.shape
    among = torch.full((rows + 2, columns), torch.nan)
    scale = among[1:-1].copy_(w.scale)
    assert_near(interpreted(x, ScaledTensor(w.data, scale, w.block)), x, w)
    start, end = among.data_ptr(), among.data_ptr() + 4 * among.numel()
    read = {address for address in addresses if start <= address < end}
    assert read == set(range(scale.data_ptr(), scale.data_ptr() + 4 * scale.numel(), 4))


def offline(target: Target, block: Block, m: int, dtype: torch.dtype = BF16, n: int = 4096) -> TritonLaunch:
    """A weight's forward or, with N contiguous, the input's gradient."""
    x, out = (torch.empty(m, size, dtype=dtype, device="meta") for size in (4096, n))
    w = torch.empty(n, 4096, dtype=native_e4m3(target), device="meta").mT
    w = w.contiguous() if block[0] == 1 else w
    scaled = ScaledTensor(w, empty_scale(w, block, "e8m0" if 32 in block else "fp32"), block)
    given = weight_product(x, scaled, out, target)
    return plan_mm_a16w8(given, configure(given))[0]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in ((-1, -1), (128, 1))], ids=str)
@pytest.mark.parametrize("m", [16, 32, 64, 4096])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, GFX942, GFX950], ids=lambda target: target.name)
def test_no_configuration_spills(target: Target, m: int, block: Block) -> None:
    for dtype, n in ((BF16, 32768),) if m <= 64 else ((FP16, 4096), (FP32, 4096)):
        assert_no_spills(offline(target, block, m).resources(), target)
        assert_no_spills(offline(target, block, m, dtype, n).resources(), target)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block[0] != 1], ids=str)
@pytest.mark.parametrize(("m", "n", "rows"), [(40, 4112, 32), (40, 8208, 64), (300, 4112, 128)])
def test_no_tile_for_many_rows_spills_on_hopper(m: int, n: int, rows: int, block: Block) -> None:
    """Sizes that are multiples of 16 but not of the tile's, in each height that the rule of cores chooses."""
    for dtype, contiguous in ((BF16, "K"), (FP16, "N")):
        product = operands(m, n, 4112, block, contiguous=contiguous, x=dtype)
        config = configure(product)
        assert config == replace(config, BM=rows)
        assert_no_spills(plan_mm_a16w8(product, config)[0].resources(), SM90)


def test_no_product_of_float32_spills() -> None:
    """A scale that was loaded one tile ahead, which a product of float32 does not need, spilled 2 registers."""
    for target, k, n, contiguous, bias in ((SM120, 4112, 4112, "N", None), (SM90, 1030, 515, "K", FP32)):
        product = operands(40, n, k, (128, 128), contiguous=contiguous, x=FP32, fp8=torch.float8_e5m2, bias=bias)
        product = replace(product, target=target)
        assert_no_spills(plan_mm_a16w8(product, configure(product))[0].resources(), target)


def odd(target: Target, block: Block, m: int) -> WeightProduct:
    """Lines that are no multiples of 16."""
    x = torch.empty(m, 33, dtype=BF16, device="meta")
    w = torch.empty(130, 33, dtype=E4M3, device="meta").mT
    scaled = Quantized(w, empty_scale(w, block, "fp32"), block)
    return WeightProduct(x=x, w=scaled, out=x.new_empty(m, 130), target=target)


@pytest.mark.parametrize("block", [(128, 128), (128, 1), (-1, 1)], ids=str)
@pytest.mark.parametrize("target", [SM89, SM100, SM120], ids=lambda target: target.name)
def test_no_product_of_odd_sizes_spills(target: Target, block: Block) -> None:
    """The wide tile spilled 58 registers on sm89."""
    product = odd(target, block, 127)
    assert_no_spills(plan_mm_a16w8(product, configure(product))[0].resources(), target)
    # The default is among the candidates of tuning.
    problem = weight_problem(product)._replace(target=target)
    assert configure(product) in weight_table.candidates(problem)["triton_mm"]


@pytest.mark.parametrize(
    ("target", "block", "m", "contiguous", "x", "fp8"),
    [
        (SM89, (128, 128), 128, "K", BF16, E4M3),
        (SM120, (128, 128), 33, "K", BF16, E4M3),
        (SM120, (128, 128), 128, "N", BF16, torch.float8_e5m2),
        (SM120, (128, 1), 128, "N", BF16, E4M3),
        (SM120, (1, 128), 128, "N", FP16, torch.float8_e5m2),
    ],
)
def test_many_rows_of_odd_sizes_have_tiles_that_are_32_deep(
    target: Target, block: Block, m: int, contiguous: str, x: torch.dtype, fp8: torch.dtype
) -> None:
    """Tiles that were 64 deep, or 128 columns wide, spilled 2 to 16 registers with or without a bias."""
    for bias in (None, x):
        product = replace(operands(m, 515, 1030, block, contiguous=contiguous, x=x, fp8=fp8, bias=bias), target=target)
        config = configure(product)
        assert config == replace(config, BK=32)
        assert_no_spills(plan_mm_a16w8(product, config)[0].resources(), target)


@pytest.mark.parametrize("block", [(128, 128), (1, -1)], ids=str)
@pytest.mark.parametrize("m", [20, 64, 100])
def test_no_product_of_odd_sizes_spills_on_hopper(m: int, block: Block) -> None:
    """The tile of 64 rows, which batch-invariant products have for any number of rows, spilled 2 by 4 warps."""
    product = odd(SM90, block, m)
    (once,) = (kernel for kernel in MM_A16W8_INVARIANT.kernels if kernel.name == "triton_mm")
    for config in {configure(product), once.configure(product)}:
        assert_no_spills(plan_mm_a16w8(product, config)[0].resources(), SM90)


@pytest.mark.parametrize("block", [(128, 128), (-1, 1)], ids=str)
def test_no_product_of_rows_that_are_slices_of_wider_ones_spills_on_hopper(block: Block) -> None:
    """They are loaded by single elements, for which the tile of whole lines spilled registers."""
    product = operands(300, 4096, 2048, block)
    product = replace(product, x=torch.empty(300, 2056, dtype=BF16, device="meta")[:, :2048])
    assert_no_spills(plan_mm_a16w8(product, configure(product))[0].resources(), SM90)


@pytest.mark.parametrize(("block", "warps"), [((1, -1), 8), ((1, 128), 8), ((1, 32), 4)], ids=str)
def test_no_gradient_spills_on_cdna3(block: Block, warps: int) -> None:
    """By Triton 3.6, 4 warps fail to compile with one scale for each element of K; 8 spill with more than one."""
    for n, k in ((4096, 2048), (4094, 4090)):
        product = operands(200, n, k, block, contiguous="N", fp8=torch.float8_e4m3fnuz)
        product = replace(product, target=GFX942)
        config = configure(product)
        assert config.num_warps == warps
        assert configure(replace(product, target=GFX950)).num_warps == 4  # 8 spill 1 or 2 registers by Triton 3.8
        assert_no_spills(plan_mm_a16w8(product, config)[0].resources(), GFX942)


def test_machine_code_multiplies_16_bits_and_hopper_takes_the_weight_from_registers() -> None:
    ptx = offline(SM90, (128, 128), 4096).compile().asm["ptx"]
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \{[^}]*\}, \{", ptx)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in offline(SM89, (128, 128), 16).compile().asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::f16" in offline(SM100, (128, 128), 4096).compile().asm["ptx"]
    for target in (GFX942, GFX950):
        assert re.search(r"v_mfma_f32_16x16x(16|32)_bf16", offline(target, (128, 128), 4096).compile().asm["amdgcn"])


X, BIAS = torch.linspace(-1, 1, 3 * 5 * 64).view(3, 5, 64), torch.ones(48)
TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "vjp": lambda f: torch.func.vjp(lambda x: f(x, BIAS), X)[1](torch.ones(())),
    "jvp": lambda f: torch.func.jvp(f, (X, BIAS), (X, BIAS)),
    "grad": lambda f: grad(f, (0, 1))(X[0], BIAS),
    "hessian": lambda f: hessian(lambda x: f(x, BIAS))(X[0, :2]),
    "grad of grad": lambda f: grad(lambda x: grad(f)(x, BIAS).square().sum())(X[0]),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1)), (1, None))(X, BIAS),
    "grad of vmap": lambda f: grad(lambda x: vmap(f, (0, None))(x, BIAS).sum())(X),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, compiled: bool, fresh_dynamo: None) -> None:
    """The same as of a product with the dequantized weight."""
    w = weight(64, 48, (128, 128))
    run: Function = lambda linear: TRANSFORMS[name](lambda x, bias: linear(x, bias).sin().sum())  # noqa: E731
    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    found = call(lambda x, bias: fp8fn.gemm(x, w, bias=bias))
    torch.testing.assert_close(found, run(lambda x, bias: x @ fp8fn.dequantize(w, FP32) + bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("label", LABELS)
def test_values_and_gradients_are_those_of_float64(label: str, device: torch.device) -> None:
    sample = next(sample for sample in SAMPLES["mm_a16w8"](0, device) if sample.label == label)
    x, data, scale, block, *bias = sample.args
    leaves = [leaf.detach().requires_grad_() for leaf in (x, *bias)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = op(leaves[0], data, scale, block, *leaves[1:], **sample.kwargs)
    want = exact(doubles[0], ScaledTensor(data, scale, block), *doubles[1:])
    assert out.dtype == sample.kwargs.get("out_dtype", x.dtype)
    found = out, *torch.autograd.grad(out, leaves, torch.ones_like(out))
    for got, wanted in zip(found, (want, *torch.autograd.grad(want, doubles, torch.ones_like(want))), strict=True):
        if got.is_cuda:  # where scales change with each element along K, a kernel rounds the weight to the type of x
            assert (got.double() - wanted).norm() <= 2**-8 * wanted.norm()
        elif "activations" in sample.kwargs:  # activations and gradients are rounded to e4m3
            assert (got.double() - wanted).norm() <= 2**-4 * wanted.norm()
        else:
            torch.testing.assert_close(got, wanted.to(got.dtype), rtol=2**-7, atol=1e-4)
    assert [got.dtype for got in found[1:]] == [leaf.dtype for leaf in leaves]


def test_the_weight_is_a_constant() -> None:
    x, w = torch.randn(5, 64), weight(64, 48, (-1, 1))
    with pytest.raises(NotImplementedError, match="no derivative in w and w_scale: detach them"):
        fp8fn.gemm(x, ScaledTensor(w.data, w.scale.clone().requires_grad_(), w.block)).sum().backward()
    with pytest.raises(NotImplementedError, match="no derivative in w and w_scale"):
        torch.func.jvp(lambda s: op(x, w.data, s, w.block), (w.scale,), (w.scale,))
    with pytest.raises(NotImplementedError, match="jvp of jvp"):
        torch.func.jvp(lambda t: torch.func.jvp(lambda x: fp8fn.gemm(x, w), (t,), (t,))[1], (x,), (x,))


def test_compiled_with_symbolic_sizes_and_gradients(fresh_dynamo: None) -> None:
    w = weight(64, 48, (128, 128))
    step: Function = lambda x, bias, w: fp8fn.gemm(x.sin(), w, bias=bias).cos()  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for m in (5, 9, 33):
        leaves = torch.randn(m, 64, requires_grad=True), torch.randn(48, requires_grad=True)
        found, expected = (f(*leaves, w) for f in (compiled, step))
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.sum(), leaves) for out in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_gemm_and_linear() -> None:
    w, bias = weight(64, 48, (128, 128)), torch.randn(48)
    for lead in ((), (5,), (2, 5), (2, 3, 5), (2, 0, 5), (2, 3, 4, 5)):
        x = torch.randn(*lead, 64)
        expected = x @ fp8fn.dequantize(w, FP32)
        torch.testing.assert_close(fp8fn.gemm(x, w), expected)
        torch.testing.assert_close(fp8fn.linear(x, w.mT, bias), expected + bias)
        if lead:
            torch.testing.assert_close(fp8fn.gemm(w.mT, x.mT), expected.mT)
            rounded = fp8fn.gemm(w.mT, x.mT, bias=bias[: lead[-1]], out_dtype=BF16)
            torch.testing.assert_close(rounded, (expected.mT + bias[: lead[-1]]).bfloat16())
    x, batch = torch.randn(2, 5, 64), weight(64, 48, (-1, 1), batch=(3, 1))
    torch.testing.assert_close(fp8fn.gemm(x, batch), x @ fp8fn.dequantize(batch, FP32))
    with torch.autocast("cpu", BF16):
        assert torch.equal(fp8fn.gemm(x, w), fp8fn.gemm(x.bfloat16(), w))
    assert fp8fn.gemm(x.to("meta"), w.to("meta")).shape == (2, 5, 48)


ERRORS: list[tuple[str, Function, type[Exception], str]] = [
    ("K", lambda x, w: fp8fn.gemm(x, w.mT), ValueError, r"K=64 .* K=48; .* pass weight\.mT"),
    ("integers", lambda x, w: fp8fn.gemm(x.int(), w), TypeError, "a has dtype torch.int32; use bfloat16"),
    ("vector", lambda x, w: fp8fn.gemm(w.mT, x[0]), ValueError, r"b has shape \(64,\); it needs"),
    ("device", lambda x, w: fp8fn.gemm(x.to("meta"), w), ValueError, "a is on meta and b on cpu; move them"),
    ("bias", lambda x, w: fp8fn.gemm(x, w, bias=x[0]), ValueError, r"bias has shape \(64,\); it must be \(48,\)"),
    ("out_dtype", lambda x, w: fp8fn.gemm(x, w, out_dtype=torch.int8), TypeError, "out_dtype=torch.int8 .* use"),
    ("rank", lambda x, w: op(x[None, None], w.data, w.scale, w.block), ValueError, r"x has shape .* or \(B, M, K\)"),
]


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors(call: Function, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(torch.randn(5, 64), weight(64, 48, (-1, 1)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_rows_have_the_same_bits_in_any_company(block: Block, dtype: torch.dtype) -> None:
    """Whatever M is, and whatever the other rows hold, in one configuration; also where they take several tiles."""
    x, w, bias = torch.randn(70, 300).to(dtype), weight(300, 70, block), torch.randn(70)
    for rows, config in ((16, None), (70, SMALL)):
        expected = interpreted(x[:rows], w, bias, config)
        for m in (1, 2, 5, 16):
            assert torch.equal(interpreted(x[:m], w, bias, config), expected[:m])
        poisoned = x[:rows].clone()
        poisoned[1:-1] = torch.nan
        found = interpreted(poisoned, w, bias, config)
        assert torch.equal(found[[0, -1]], expected[[0, -1]])
        assert found[1:-1].isnan().all()


# The macros of `gemv_a16w8` that order a sum over K.
ORDERING = ("ROWS", "TILES", "WARPS_N", "WARPS_K", "CLUSTER", "K_CHUNK")


@pytest.mark.parametrize("rows", CLASSES, ids=str)
@pytest.mark.parametrize("size", [(512, 128), (128, 512), (2304, 3072), (4096, 3072), (14336, 2048), (1000, 1111)])
def test_which_numbers_of_rows_have_one_configuration(rows: range, size: tuple[int, int]) -> None:
    """As the docstring of `gemm` has it."""
    n, k = size
    for block, target, dtype in product(BLOCKS, (SM89, SM90, SM100, GFX942, GFX950), (BF16, FP32)):
        assert len({choose_config(m, n, block, dtype, target) for m in rows}) == 1
    for block, batch, column_major in product(SCALES, (1, 16), (True, False)):
        w = torch.empty(batch, n, -(-k // 16) * 16, dtype=E4M3, device="meta")[..., :k].mT
        w = w if column_major else torch.empty(batch, k, -(-n // 16) * 16, dtype=E4M3, device="meta")[..., :n]
        orders, scale = set(), empty_scale(w, block, "fp32")
        for m in rows:
            x, out = (torch.empty(batch, m, size, dtype=BF16, device="meta") for size in (k, n))
            given = weight_product(x, ScaledTensor(w, scale, block), out)
            if gemv_a16w8.accepts(given) is None:
                options = planned(gemv_a16w8, given).options
                orders.add(tuple(options[name] for name in ORDERING))
        assert len(orders) == (1 if column_major or rows.stop <= 33 else 0)  # else another kernel's, which has one


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_rows_have_the_same_bits_in_any_company_on_the_device(block: Block, dtype: torch.dtype) -> None:
    for n, k in ((4096, 2048), (512, 3072), (1000, 1111)):
        x, w = torch.randn(64, k, device="cuda").to(dtype), weight(k, n, block, device="cuda")
        for rows in CLASSES:
            expected = fp8fn.gemm(x[: rows.stop - 1], w)
            for m in (rows.start, (rows.start + rows.stop) // 2):
                assert torch.equal(fp8fn.gemm(x[:m], w), expected[:m])


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", ["K", "N"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_on_the_device(block: Block, dtype: torch.dtype, contiguous: str) -> None:
    for fp8 in FP8_DTYPES:
        for m, n, k, batch in ((1, 4096, 2048, ()), (33, 1000, 1111, ()), (64, 512, 256, (3,)), (777, 2304, 1536, ())):
            x, bias = torch.randn(*batch, m, k, device="cuda").to(dtype), torch.randn(n, device="cuda")
            w = weight(k, n, block, dtype=fp8, contiguous=contiguous, batch=batch, device="cuda")
            found = op(x, w.data, w.scale, block, bias, FP32)
            assert_near(found, x, w, bias)
            # Types of output have different kernels, so that sums have another order.
            torch.testing.assert_close(
                op(x, w.data, w.scale, block, bias).float(), found, rtol=2 * torch.finfo(dtype).eps, atol=2e-3
            )
            assert_near(op(found, w.mT.data, w.mT.scale, w.mT.block, None, FP32), found, w.mT)


@pytest.mark.gpu
def test_products_by_triton_in_turn_wait_for_each_other(hopper: Target) -> None:
    """The launches of a turn read the output of the turn before, and overwrite the operand of the turn before that.

    Kernels of PyTorch, which do not use programmatic dependent launch, stand among them.
    """
    size = 512
    w, outs = (
        weight(size, size, (128, 128), device="cuda"),
        [torch.empty(size, size, dtype=BF16, device="cuda") for _ in range(3)],
    )
    launches = []
    for turn in range(12):
        for rows in (1, 33, size):
            x, out = (outs[(turn + side) % 3][:rows] for side in (0, 1))
            product = weight_product(x, w, out, hopper)
            launches += plan_mm_a16w8(product, configure(product))
    assert all(launch.overlaps for launch in launches)
    first = torch.randn(size, size, device="cuda").bfloat16()

    def run(after: Callable[[], object] = lambda: None) -> None:
        outs[0].copy_(first)
        for place, launch in enumerate(launches):
            launch.run()
            after()
            if place % 5 == 0:
                outs[1].mul_(0.5)

    run(torch.cuda.synchronize)
    expected = [out.clone() for out in outs]
    assert all(out.isfinite().all() and out.float().std() > 0 for out in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for start in (*[graph.replay] * 100, *[run] * 20):
        for out in outs:
            out.fill_(torch.nan)
        start()
        assert all(map(torch.equal, outs, expected))


@pytest.mark.parametrize("prequant", [False, True])
def test_the_gradient_of_an_x_beside_a_batch_of_weights_is_rounded_once(prequant: bool, device: torch.device) -> None:
    """The two weights almost cancel: two terms rounded to bfloat16 before their sum would leave 20 dB."""
    one = fp8fn.quantize(torch.randn(1, 128, 128, device=device), (128, 128))
    data = one.data.view(torch.uint8)
    changed = (torch.rand(data.shape, device=device) < 1 / 64) & (data & 0x7F < 0x78)
    nearly = ((data ^ 0x80) + changed.to(torch.uint8)).view(one.data.dtype)
    w = fp8fn.ScaledTensor(
        torch.cat([data, nearly.view(torch.uint8)]).view(one.data.dtype), torch.cat([one.scale] * 2), (128, 128)
    )
    x = torch.randn(16, 128, device=device).bfloat16().requires_grad_()
    grad = torch.randn(16, 128, device=device).sign()  # which FP8 holds
    out = fp8fn.gemm(x, w, prequant=prequant)
    assert out.shape == (2, 16, 128)
    (dx,) = torch.autograd.grad(out, x, grad.bfloat16().expand(2, -1, -1))
    exact = grad.double() @ (w.data.double() * one.scale.double()).sum(0).mT
    assert dx.dtype == torch.bfloat16
    assert (dx - exact).norm() <= 2**-6 * exact.norm()
