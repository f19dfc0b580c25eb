"""`mx_mm`, the product of two MX-FP8 matrices: which kernel takes it, interpreted kernels, machine code, and `gemm`."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import mx_mm, reference
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.mx_mm import KERNELS, MX_MM, choose, problem_of
from fp8fn.ops.targets import CPU, GFX942, GFX950, SM89, SM90, SM100, SM120, Target, native_e4m3
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.tuning.mx import COLUMNS, MxConfig, Problem, Row, parse, shipped
from support.accuracy import snr
from support.called_ops import Names
from support.compilers import assert_no_spills, instructions
from support.mx_tables import mx_table
from support.operands.mx import DENSE, Batches, assert_near, dequantized, exact, on, operands
from support.products import mx_product, scaled_product
from support.quantizers import accepts_rms_norm, accepts_silu_mul

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Kernels that take any strides; test_tma.py has the other one.
TRITON = tuple(kernel for kernel in KERNELS if kernel.backend == "triton" and kernel.name != "triton_tma")
NAMES = [kernel.name for kernel in TRITON]
# Small tiles, so that few elements make several along every axis.
SMALL: Final = {
    "triton_few": MxConfig(16, 32, 64, 4, 2, SPLITS=3),
    "triton_scaled": MxConfig(32, 32, 64, 4, 2, GROUP=2),
    "triton_widened": MxConfig(32, 16, 64, 4, 2, GROUP=2),
}


def interpreted(
    name: str, a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None, config: MxConfig | None = None,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    out = torch.full((*(a.shape[:-2] or b.shape[:-2]), a.shape[-2], b.shape[-1]), 7.0)
    kernel = TRITON[NAMES.index(name)]
    for launch in kernel.plan(scaled_product(a, b, out, GFX950, bias=bias), config or SMALL[name]):
        launch.constexprs["WIDE"] |= wide  # type: ignore[index]
        launch.interpret()
    return out


def test_no_two_kernels_share_a_name() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(SMALL) == set(NAMES)


@pytest.mark.parametrize("shape", [(1, 40, 64), (1, 1, 1), (7, 70, 190), (16, 64, 256), (33, 65, 300), (64, 32, 31)])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_tails(name: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operands(m, n, k)
    bias = torch.randn(n)
    found = interpreted(name, a, b, bias)
    assert_near(found, a, b, bias)
    assert snr(interpreted(name, a, b), exact(a, b)) > 50


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("scale", ["e8m0", "rceil"])
@pytest.mark.parametrize("name", NAMES)
def test_types_and_formats(name: str, scale: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = operands(20, 40, 100, dtypes=dtypes, scale=scale)
    assert_near(interpreted(name, a, b), a, b)


@pytest.mark.parametrize("batch", [((3,), (3,)), ((3,), ()), ((), (3,)), ((1,), (1,))], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_batches(name: str, batch: Batches) -> None:
    a, b = operands(20, 40, 100, batch=batch)
    bias = torch.randn(40)
    assert_near(interpreted(name, a, b, bias), a, b, bias)


@pytest.mark.parametrize("name", NAMES)
def test_strides_and_wide_offsets(name: str) -> None:
    a, b = operands(20, 40, 100)
    other = [  # row-major weights, and scales the other way around
        ScaledTensor(turned(q.data), turned(q.scale), q.block) for q in (a, b)
    ]
    expected = interpreted(name, a, b)
    assert torch.equal(interpreted(name, *other), expected)
    assert torch.equal(interpreted(name, a, b, wide=True), expected)


def turned(x: Tensor) -> Tensor:
    return x.view(torch.uint8).mT.contiguous().view(x.dtype).mT if x.stride(-1) == 1 else contiguous(x)


def contiguous(x: Tensor) -> Tensor:
    return x.view(torch.uint8).contiguous().view(x.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_default_configurations_interpreted(name: str) -> None:
    a, b = operands(16, 96, 700)
    kernel = TRITON[NAMES.index(name)]
    assert_near(interpreted(name, a, b, config=kernel.configure(Problem(16, 96, 700, SM90))), a, b)


def test_every_fp8_value_by_every_scale_is_exact_in_bfloat16() -> None:
    """By an identity, of scales from `2 ** -124` on; below, to the nearest multiple of `2 ** -133`."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    scales = torch.arange(240, dtype=torch.uint8).view(torch.float8_e8m0fnu)[:, None]
    one = fp8fn.quantize(torch.eye(32), (32, 1), scale="e8m0")
    for part in codes.split(32):
        a = ScaledTensor(part.repeat(240, 1).view(E4M3), scales, (1, 32))
        found, expected = interpreted("triton_widened", a, one), dequantized(a).float()
        assert torch.equal(found[127 - 124 :], expected[127 - 124 :])
        assert ((found - expected).abs() <= 2.0**-134).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_stays_in_its_row_or_column(name: str) -> None:
    a, b = operands(20, 40, 100)
    for bad_a, bad_b in ((True, False), (False, True), (True, True)):
        scales = [q.scale.clone() for q in (a, b)]
        if bad_a:
            scales[0].view(torch.uint8)[3, 3] = 255
        if bad_b:
            scales[1].view(torch.uint8)[3, 5] = 255
        found = interpreted(name, *(ScaledTensor(q.data, s, q.block) for q, s in zip((a, b), scales, strict=True)))
        touched = torch.zeros(20, 40, dtype=torch.bool)
        touched[3] |= bad_a
        touched[:, 5] |= bad_b
        assert torch.equal(found.isnan(), touched)
        assert torch.equal(found[~touched], interpreted(name, a, b)[~touched])


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_blocks_of_zeros_and_not_finite_values(value: float) -> None:
    x, w = torch.randn(4, 96), torch.randn(96, 33)
    x[2, 32:64] = value
    a, b = fp8fn.quantize(x, (1, 32), scale="e8m0"), fp8fn.quantize(w, (32, 1), scale="e8m0")
    for name in NAMES:
        found = interpreted(name, a, b)
        assert found[[0, 1, 3]].isfinite().all()
        assert bool(found[2].isnan().all()) == (value != 0.0)
        if value == 0.0:
            assert_near(found, a, b)


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8])
def test_a_shared_sum_has_one_order(splits: int) -> None:
    a, b = operands(5, 40, 500)
    bias, config = torch.randn(40), replace(SMALL["triton_few"], SPLITS=splits)
    found = interpreted("triton_few", a, b, bias, config)
    assert_near(found, a, b, bias)
    assert torch.equal(found, interpreted("triton_few", a, b, bias, config))
    launches = TRITON[0].plan(scaled_product(a, b, torch.empty(5, 40), SM90, bias=bias), config)
    assert len(launches) == (1 if splits == 1 else 2)
    assert launches[0].args["steps"] * launches[0].grid[1] >= math.ceil(500 / 64)


@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_every_dense_shape_has_its_kernel_in_triton(shape: tuple[int, int]) -> None:
    k, n = shape
    for target in (SM89, SM90, SM100, SM120, GFX942, GFX950):
        for m in (1, 2, 3, 4, 8, 13, 16):
            choice = choose(on(target, m=m, n=n, k=k), {}, TRITON)
            assert (choice.name, choice.source, choice.refused) == ("triton_few", "default", ())
            assert choice.config is not None
            splits = choice.config.SPLITS
            assert splits in (1, 2, 4, 8)
            assert splits == 1 or k >= 2 * splits * choice.config.BK
        for m in (17, 32, 64, 128, 4096):
            choice = choose(on(target, m=m, n=n, k=k), {}, TRITON)
            assert choice.refused[0] == ("triton_few", f"M={m} is above 16")
            if target in (SM100, SM120, GFX950):
                assert choice.name == "triton_scaled"
            else:
                assert choice.name == "triton_widened"
                assert choice.refused[1][1] == f"Triton has no matrix instruction with scales for {target.name}"


def test_a_foreign_type_goes_to_pytorch_and_says_why() -> None:
    for target, dtype in ((SM90, torch.float8_e4m3fnuz), (GFX942, E4M3), (GFX950, torch.float8_e5m2fnuz)):
        choice = choose(replace(on(target), b_dtype=dtype), {})
        assert choice.kernel is None
        assert choice.name == "reference"
        assert [name for name, _ in choice.refused] == [kernel.name for kernel in KERNELS]
        assert f"triton_few: {dtype} has no kernel on {target.name}" in choice.describe()
    a, b = operands(4, 40, 64, dtypes=(torch.float8_e4m3fnuz, torch.float8_e4m3fnuz))
    assert MX_MM.plan(scaled_product(a, b, torch.empty(4, 40), SM90)) == ()


TABLE = """
sm90,6144,2304,8,triton_widened,BN=64 num_warps=8
sm90,6144,2304,16,triton_few,SPLITS=8
sm90,6144,2304,32,triton_few,
sm90,6144,2304,64,hip_mfma,n_sub=2
"""


def test_a_table_comes_before_the_default_and_is_no_way_around_an_envelope() -> None:
    table = mx_table(TABLE)
    assert table["sm90", 6144, 2304, 64] == Row("hip_mfma", {"n_sub": 2})
    choice = choose(on(SM90, m=8), table)
    assert (choice.name, choice.source) == ("triton_widened", "the table")
    assert choice.config == replace(TRITON[2].configure(on(SM90, m=8)), BN=64, num_warps=8)
    shared = choose(on(SM90, m=16), table).config
    assert shared is not None
    assert shared.SPLITS == 8
    refused = choose(on(SM90, m=32), table, TRITON)
    assert refused.name == "triton_widened"
    assert refused.refused[0] == ("triton_few", "the table names it, but M=32 is above 16")
    assert choose(on(SM90, m=64), table, TRITON).refused[0] == (
        "hip_mfma",
        "the table names it, but no kernel has the name",
    )
    for other in (on(SM90, m=8, batch=2), on(SM100, m=8), on(SM90, m=4), on(SM90, m=8, k=3072)):
        assert choose(other, table).source == "default"
    with pytest.raises(ValueError, match="columns arch,K,N,M,kernel,options,source, this one"):
        parse({"format": 2, "columns": ["K", "N", "M"], "rows": [[1, 2, 3]]})
    with pytest.raises(ValueError, match="names the source 'x'; its sources are a, b"):
        parse({
            "format": 2, "columns": list(COLUMNS), "sources": {"a": {"name": "a's table"}, "b": {"name": "b's"}},
            "rows": [["gfx950", 128, 64, 1, "hip_gemv", {}, "a"], ["gfx950", 128, 64, 2, "hip_gemv", {}, "x"]],
        })  # fmt: skip


def offline(
    target: Target, name: str, m: int, n: int = 4096, k: int = 4096, column_major: bool = True,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> tuple[TritonLaunch, ...]:  # fmt: skip
    a_dtype, b_dtype = dtypes or (native_e4m3(target),) * 2
    a = torch.empty(m, k, dtype=a_dtype, device="meta")
    b = torch.empty(n, k, dtype=b_dtype, device="meta").mT if column_major else a.new_empty((k, n), dtype=b_dtype)
    scales = empty_scale(a, (1, 32), "e8m0"), empty_scale(b, (32, 1), "e8m0")
    kernel = TRITON[NAMES.index(name)]
    config = kernel.configure(problem_of(a, b, target, *scales))
    out = torch.empty(m, n, dtype=BF16, device="meta")
    return kernel.plan(mx_product((a, b), scales, out, target), config)


@pytest.mark.parametrize("m", [16, 32, 64, 4096])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, SM120, GFX942, GFX950], ids=lambda target: target.name)
def test_no_configuration_spills(target: Target, m: int) -> None:
    for kernel in TRITON:
        if kernel.accepts(on(target, m=m)) is None:
            for n, k in ((4096, 4096), (32768, 4096), (4097, 4001), (4096, 1008)):
                for launch in offline(target, kernel.name, m, n, k):
                    assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("n", [4096, 4097])
@pytest.mark.parametrize("m", [32, 64, 4096])
@pytest.mark.parametrize("target", [SM100, SM120], ids=lambda target: target.name)
def test_no_product_by_a_row_major_matrix_spills(target: Target, m: int, n: int) -> None:
    """On sm120 its tiles are turned around in registers: 128x128x128 spilled 16, and 162 where N is odd."""
    for launch in offline(target, "triton_scaled", m, n, column_major=False):
        assert_no_spills(launch.resources(), target)


def test_machine_code_multiplies_with_scales_or_in_bfloat16() -> None:
    for m, product in ((32, "16x16x128"), (4096, "32x32x64")):
        ptx = offline(SM100, "triton_scaled", m)[0].compile().asm["ptx"]
        assert re.search(r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale", ptx)
        text = offline(GFX950, "triton_scaled", m)[0].compile().asm["amdgcn"]
        assert set(re.findall(r"v_mfma\w+", text)) == {f"v_mfma_scale_f32_{product}_f8f6f4"}
        assert m == 32 or set(re.findall(r"buffer_store\w+", text)) == {"buffer_store_dwordx4"}
    ptx = offline(SM90, "triton_widened", 4096)[0].compile().asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
    ptx = offline(SM90, "triton_few", 1)[0].compile().asm["ptx"]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx


def lowered_by_triton_3_7() -> bool:
    return tuple(int(part) for part in version("triton").split(".")[:2]) >= (3, 7)


@pytest.mark.skipif(not lowered_by_triton_3_7(), reason="whether an older Triton has the instruction was not tried")
@pytest.mark.parametrize("shape", [(32, 4096, 4096), (64, 4096, 4096), (4096, 4096, 4096), (4095, 4093, 4001)])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_sm120_multiplies_with_scales(
    dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int], tmp_path: Path
) -> None:
    """In every type and at every size by `mma.sync` with scales, which is `QMMA.SF` in SASS."""
    (launch,) = offline(SM120, "triton_scaled", *shape, dtypes=dtypes)
    compiled = launch.compile()
    a, b = ("e4m3" if dtype == E4M3 else "e5m2" for dtype in dtypes)
    products = set(re.findall(r"mma\.sync\.[\w.:]+", compiled.asm["ptx"]))
    scaled = "row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
    assert products == {f"mma.sync.aligned.m16n8k32.{scaled}.f32.{a}.{b}.f32.ue8m0"}
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text} == {f"QMMA.SF.16832.F32.{a}.{b}.E8".upper()}


def test_sm121_multiplies_in_bfloat16() -> None:
    """Triton 3.7.1 lowers `dot_scaled` to the instruction with scales for sm120 alone."""
    assert choose(on(replace(SM120, arch=121), m=64), {}).name == "triton_widened"


@pytest.mark.parametrize("batch", [((), ()), ((2, 3), ()), ((3,), (3,)), ((2, 3), (3,)), ((), (2, 1))], ids=str)
def test_gemm_of_two_mx_operands_is_this_op(batch: Batches, device: torch.device) -> None:
    a, b = operands(20, 40, 100, batch=batch, device=device)
    bias = torch.randn(40, device=device)
    with Names() as names:
        found = fp8fn.gemm(a, b, bias=bias, out_dtype=FP32)
    assert names.called == ["mx_mm"]
    assert_near(found, a, b, bias)
    assert fp8fn.gemm(a, b).dtype == BF16
    assert torch.equal(fp8fn.linear(a, b.mT, bias, out_dtype=FP32), found)


def test_other_formats_are_not(device: torch.device) -> None:
    a, b = operands(20, 40, 128, device=device)
    for left, right in (
        [ScaledTensor(q.data, q.scale.float(), q.block) for q in (a, b)],
        [fp8fn.quantize(torch.randn(20, 128, device=device), (1, 128), scale="e8m0"), b],
    ):
        with Names() as names:
            fp8fn.gemm(left, right)
        assert names.called == ["scaled_mm"]


@pytest.mark.parametrize("shape", [(1, 40, 64), (16, 70, 1000), (33, 65, 190), (200, 136, 384)], ids=str)
def test_values_on_a_device(shape: tuple[int, int, int], device: torch.device) -> None:
    m, n, k = shape
    a, b = operands(m, n, k, device=device)
    assert_near(fp8fn.gemm(a, b, out_dtype=FP32), a, b)
    assert snr(fp8fn.gemm(a, b, out_dtype=FP32), exact(a, b)) > 50
    expected = exact(a, b)
    assert (fp8fn.gemm(a, b).double() - expected).norm() < 3e-3 * expected.norm()


def test_nothing_contracted_is_the_bias(device: torch.device) -> None:
    a, b = operands(5, 40, 0, device=device)
    bias = torch.randn(40, device=device)
    assert torch.equal(fp8fn.gemm(a, b, bias=bias), bias.bfloat16().expand(5, 40))
    for m, n in ((0, 40), (5, 0)):
        assert fp8fn.gemm(*operands(m, n, 64, device=device)).shape == (m, n)
    for name in NAMES:
        assert torch.equal(interpreted(name, *operands(5, 40, 0)), torch.zeros(5, 40))


def test_what_a_problem_is_and_that_its_offsets_are_wide_past_32_bits() -> None:
    a, b = torch.empty(64, 2**26, dtype=E4M3, device="meta"), torch.empty(64, 2**26, dtype=E4M3, device="meta").mT
    assert mx_mm.problem_of(a, b, SM90) == Problem(64, 64, 2**26, SM90, largest=2**32)
    assert mx_mm.problem_of(a[:, :32], b[:32], SM90).largest == 63 * 2**26 + 32
    assert mx_mm.problem_of(a[None], b[None].expand(3, -1, -1)[:1], SM90).batch == 1
    for name in ("triton_scaled", "triton_widened"):
        assert offline(SM90, name, 64, 64, 2**20)[0].constexprs["WIDE"] is False
        assert offline(SM90, name, 64, 64, 2**26)[0].constexprs["WIDE"] is True


def test_the_log_says_which_kernel_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        a, b = operands(70, 40, 64)
        launches = MX_MM.plan(scaled_product(a, b, torch.empty(70, 40), SM90))
    assert "triton_widened by default; not hip_gemv: sm90 is not gfx950; not hip_mfma: sm90 is not" in caplog.text
    assert "not cuda_gemv: M=70 is above 64" in caplog.text
    assert "M=70 is above 16" in launches[0].describe()
    assert choose(Problem(1, 1, 32, CPU)).name == "triton_few"


@pytest.mark.parametrize("scale", ["e8m0", "rceil"])
def test_fused_producers_in_blocks_of_32(scale: Any, device: torch.device) -> None:
    """No kernel in CUDA C++ has such blocks: what it would compute is composed, and has the same bits."""
    gate, up, weight = (torch.randn(*s, device=device).bfloat16() for s in ((2, 33, 100), (2, 33, 100), (100,)))
    options: dict[str, Any] = {"scale": scale}
    cases = (
        (reference.silu_mul(gate, up), fp8fn.quantize_silu_mul, fp8fn.quantize_silu_mul_dual, (gate, up)),
        (reference.rms_norm(gate, weight, 1e-5), fp8fn.quantize_rms_norm, fp8fn.quantize_rms_norm_dual,
         (gate, weight, 1e-5)),
    )  # fmt: skip
    for value, one, both, args in cases:
        expected = fp8fn.quantize(value, (1, 32), **options), fp8fn.quantize(value, (32, 1), **options)
        for found, wanted in zip((one(*args, (1, 32), **options), *both(*args, (1, 32), **options)),
                                 (expected[0], *expected), strict=True):  # fmt: skip
            assert (found.block, found.scale.dtype) == (wanted.block, torch.float8_e8m0fnu)
            assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
            assert torch.equal(found.scale.view(torch.uint8), wanted.scale.view(torch.uint8))
    for reason in (
        accepts_silu_mul(gate, up, (1, 32), E4M3, SM90),
        accepts_rms_norm(gate, weight, (1, 32), E4M3, SM90),
    ):
        assert reason is not None
        assert "block (1, 32)" in reason


def test_compiled_on_quantized_inputs(fresh_dynamo: None) -> None:
    """Dynamo may make the blocks of quantized inputs symbolic."""
    compiled = torch.compile(lambda a, b: fp8fn.gemm(a, b), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 18):
        a, b = operands(m, 48, 160)
        assert torch.equal(compiled(a, b), fp8fn.gemm(a, b))


def test_compiled_with_symbolic_sizes(fresh_dynamo: None) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        a, b = fp8fn.quantize(2 * x, (1, 32), scale="e8m0"), fp8fn.quantize(w, (32, 1), scale="rceil")
        return fp8fn.gemm(a, b).float().cos()

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for m in (5, 18, 33):
        x, w = torch.randn(m, 160), torch.randn(160, 48)
        torch.testing.assert_close(compiled(x, w), call(x, w), rtol=1e-5, atol=1e-5)


A, B = operands(32, 48, 64)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((A.data, A.scale.float(), B.data, B.scale), TypeError, ("a_scale has dtype torch.float32", "scale='e8m0'")),
        ((A.data, A.scale, B.data, B.scale.float()), TypeError, ("b_scale has dtype torch.float32", "(32, 1)")),
        ((A.data.float(), A.scale, B.data, B.scale), TypeError, ("mx_mm: a", "torch.float32", "FP8")),
        ((A.data, A.scale.mT, B.data, B.scale), ValueError, ("mx_mm: a", "(2, 32)", "needs (32, 2)")),
        ((A.data, A.scale, B.data.mT, B.scale.mT), ValueError, ("mx_mm: b", "needs")),
        ((A.data, A.scale, A.data, A.scale.view(torch.uint8)[:1, :1].expand(1, 64).view(A.scale.dtype)), ValueError,
         ("K=64", "K=32", "pass weight.mT")),
        ((A.data, A.scale, B.data.to("meta"), B.scale.to("meta")), ValueError, ("a is on cpu", "move them")),
        ((A.data, A.scale.to("meta"), B.data, B.scale), ValueError, ("a_scale on meta", "move them")),
        ((A.data[None, None], A.scale[None, None], B.data, B.scale), ValueError, ("4 dimensions", "flatten")),
        ((A.data, A.scale, B.data, B.scale, torch.zeros(47)), ValueError, ("bias has shape (47,)", "(48,)")),
        ((A.data, A.scale, B.data, B.scale, None, torch.int8), TypeError, ("out_dtype=torch.int8", "use bfloat16")),
    ],
    ids=range(11),
)  # fmt: skip
def test_errors(args: tuple[Any, ...], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        torch.ops.fp8fn.mx_mm(*args)
    for word in words:
        assert word in str(raised.value)


def test_a_device_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx_mm.targets, "target_of", lambda device: Target("cuda", 80, 32))
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        mx_mm.mx_mm_kernel(A.data, A.scale, B.data, B.scale)


MX_RECIPES: Final = [fp8fn.MXFP8, replace(fp8fn.MXFP8, scale="rceil"), replace(fp8fn.MXFP8, gradient_dtype=E5M2)]


@pytest.mark.parametrize("weight_major", ["row", "column"])
@pytest.mark.parametrize("recipe", MX_RECIPES, ids=lambda recipe: recipe.key)
def test_all_three_products_of_a_recipe_are_this_op(
    recipe: fp8fn.Recipe, weight_major: str, device: torch.device
) -> None:
    a, bias = torch.randn(2, 20, 100, device=device, requires_grad=True), torch.randn(40, device=device)
    b = torch.randn(100, 40, device=device) if weight_major == "row" else torch.randn(40, 100, device=device).mT
    b.requires_grad_()
    grad = torch.randn(2, 20, 40, device=device)
    with Names() as names:
        out = fp8fn.gemm(a, b, bias=bias, recipe=recipe)
        of_a, of_b = torch.autograd.grad(out, (a, b), grad)
    assert [name for name in names.called if not name.startswith("quantize")] == ["mx_mm"] * 3

    def scaled(x: Tensor, block: tuple[int, int], dtype: torch.dtype | None = None) -> ScaledTensor:
        return fp8fn.quantize(x.detach(), block, dtype=dtype, scale=recipe.scale)

    rows, grads, e5m2 = a.flatten(0, 1), grad.flatten(0, 1), recipe.gradient_dtype
    for found, left, right, added in (
        (out.flatten(0, 1), scaled(rows, (1, 32)), scaled(b, (32, 1)), bias),
        (of_a.flatten(0, 1), scaled(grads, (1, 32), e5m2), scaled(b.mT, (32, 1)), None),
        (of_b, scaled(rows.mT, (1, 32)), scaled(grads, (32, 1), e5m2), None),
    ):
        assert_near(found, left, right, added)
        assert torch.equal(found, fp8fn.gemm(left, right, bias=added, out_dtype=FP32)) or found.is_cuda


@pytest.mark.parametrize(
    ("values", "products"),
    [
        ({"scale": "fp32"}, ["scaled_mm"] * 3),
        ({"weight_block": (128, 128)}, ["scaled_mm"] * 2 + ["mx_mm"]),
        ({"gradient_block": (1, 128)}, ["mx_mm", "scaled_mm", "scaled_mm"]),
    ],
    ids=str,
)
def test_of_mixed_recipes_the_products_that_fit_are(values: dict[str, Any], products: list[str]) -> None:
    a, b = torch.randn(20, 100, requires_grad=True), torch.randn(100, 40, requires_grad=True)
    with Names() as names:
        fp8fn.gemm(a, b, recipe=replace(fp8fn.MXFP8, **values)).sum().backward()
    assert [name for name in names.called if name.endswith("_mm")] == products


def test_the_graph_of_a_recipe(fresh_dynamo: None) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    step: Any = lambda a, b: fp8fn.gemm(a, b, recipe="mxfp8")  # noqa: E731
    a, b = torch.randn(20, 96, requires_grad=True), torch.randn(96, 48, requires_grad=True)
    out = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(a, b)
    found = torch.autograd.grad(out.sum(), (a, b))
    called = [
        [str(node.target) for node in graph.graph.find_nodes(op="call_function", target=op)]
        for graph in graphs
        for op in (torch.ops.fp8fn.mx_mm.default, torch.ops.fp8fn.scaled_mm.default)
    ]
    assert called == [["fp8fn.mx_mm.default"], [], ["fp8fn.mx_mm.default"] * 2, []]
    expected = step(a, b)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, found, torch.autograd.grad(expected.sum(), (a, b))))


def test_vmap_of_a_recipe_and_of_its_gradient() -> None:
    a, b = torch.randn(3, 20, 96), torch.randn(3, 96, 48)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return fp8fn.gemm(a, b, recipe="mxfp8").square().sum()

    mapped = torch.vmap(torch.func.grad(loss, (0, 1)))
    with Names() as names:
        found = mapped(a, b)
    assert [name for name in names.called if name.endswith("_mm")] == ["mx_mm"] * 3
    for i in range(3):
        for got, want in zip(found, torch.func.grad(loss, (0, 1))(a[i], b[i]), strict=True):
            torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_in_any_company(name: str) -> None:
    """Whatever M is, and whatever the other rows hold, in one configuration; also where they take several tiles."""
    a, b = operands(70, 70, 300)
    bias = torch.randn(70)
    default: Any = TRITON[NAMES.index(name)].configure(Problem(16, 70, 300, GFX950))
    for rows, config in ((16, default), (70, SMALL[name])):
        first = ScaledTensor(a.data[:rows], a.scale[:rows], a.block)
        expected = interpreted(name, first, b, bias, config)
        for m in (1, 2, 5, 16):
            few = ScaledTensor(a.data[:m], a.scale[:m], a.block)
            assert torch.equal(interpreted(name, few, b, bias, config), expected[:m])
        codes = contiguous(a.data).view(torch.uint8)[:rows].clone()
        codes[1:-1] = 0x7F  # NaN
        poisoned = interpreted(name, ScaledTensor(codes.view(E4M3), a.scale[:rows], a.block), b, bias, config)
        assert torch.equal(poisoned[[0, -1]], expected[[0, -1]])
        assert poisoned[1:-1].isnan().all()


def test_up_to_16_rows_there_is_one_configuration() -> None:
    """As docs/numerics.md has it: on gfx950, one up to 7 rows and one from 8; on sm90 1, 2 to 8, 9 to 16.

    For the weights of the shipped table, on gfx950 8 rows have one of their own.
    """
    for target in (SM89, SM90, SM100, SM120, GFX942, GFX950):
        for k, n in DENSE:
            choices = [choose(on(target, m=m, n=n, k=k)) for m in range(1, 17)]
            divisions = [(choice.name, getattr(choice.config, "k_splits", 0)) for choice in choices]
            if target == SM90:
                constant = [choose(replace(on(target, m=m, n=n, k=k), constant=True)) for m in range(1, 17)]
                for part in (choices[1:8], choices[8:], constant[1:8], constant[8:]):
                    assert len({(choice.name, choice.config) for choice in part}) == 1
                    assert part[0].name in ("cuda_gemv", "cuda_tiles")
            elif target != GFX950:
                assert {(choice.name, choice.config) for choice in choices} == {("triton_few", choices[0].config)}
            else:
                assert len(set(divisions[:7])) == 1
                measured = ("gfx950", k, n, 8) in shipped()
                for part in (divisions[7:8], divisions[8:]) if measured else (divisions[7:],):
                    assert len(set(part)) == 1
