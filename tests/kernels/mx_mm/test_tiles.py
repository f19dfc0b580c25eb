"""Few rows by an MX-FP8 weight by TMA and wgmma: emulated on the CPU, as machine code, and through the op on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import mx_mm, reference
from fp8fn.ops.cuda.gemm.mx_tiles import MxTilesConfig, accepts, configure, plan
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.mx_mm import choose, problem_of
from fp8fn.ops.targets import GFX950, SM90, SM100, Target, target_of
from fp8fn.ops.tuning.mx import Problem
from support.accuracy import snr
from support.compilers import assert_well_compiled, instructions, needs_nvrtc
from support.configs import MX_TILES
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.mx import (
    DENSE,
    NAN_SCALE,
    assert_near,
    assert_near_on_a_gpu,
    dequantized,
    exact,
    on,
    operands,
    unwritten,
)
from support.products import mx_product, scaled_product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu


def along_k(q: ScaledTensor) -> ScaledTensor:
    """The same operand whose scales of a row or column are consecutive bytes, as checkpoints have them."""
    codes = q.scale.view(torch.uint8)
    codes = codes.mT.contiguous().mT if q.block == (32, 1) else codes.contiguous()
    return ScaledTensor(q.data, codes.view(E8M0), q.block)


def emulated(
    a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None, config: MxTilesConfig | None = None, *,
    out: torch.dtype = FP32, backwards: bool = False, constant: bool = False,
) -> Tensor:  # fmt: skip
    """Into memory that was 7 before; what lies behind it must be as it was."""
    shape = (*(a.shape[:-2] or b.shape[:-2]), a.shape[-2], b.shape[-1])
    memory = torch.full((torch.Size(shape).numel() + 64,), 7.0, dtype=out)
    found = memory[:-64].view(shape)
    problem = problem_of(a.data, b.data, SM90, a.scale, b.scale, constant=constant)
    if config is None:
        assert accepts(problem) is None
        config = configure(problem)
    (launch,) = plan(scaled_product(a, b, found, SM90, bias=bias, constant=constant), config)
    emulate(launch, backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


@needs_compiler
@pytest.mark.parametrize("config", MX_TILES, ids=str)
def test_every_division_of_the_work(config: MxTilesConfig) -> None:
    """Blocks along K with much, little and nothing to do, stages filled anew, N ragged, rows in several tiles."""
    for m, n, k in ((5, 70, 896), (70, 130, 256)):
        a, b = operands(m, n, k)
        first = emulated(a, b, config=config)
        assert_near(first, a, b)
        assert torch.equal(emulated(a, b, config=config, backwards=True, constant=True), first)
        assert torch.equal(emulated(along_k(a), along_k(b), config=config), first)


@needs_compiler
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 50, 63, 64])
def test_every_number_of_rows(m: int) -> None:
    """Scales in either order of memory give the same bits."""
    a, b = operands(m, 48, 256)
    found = emulated(a, b, constant=m % 2 == 0)
    assert_near(found, a, b)
    assert torch.equal(emulated(along_k(a), b, constant=m % 2 == 0), found)


@needs_compiler
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("scale", ["e8m0", "rceil"])
def test_types_and_formats(scale: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = operands(19, 150, 384, dtypes=dtypes, scale=scale)
    assert_near(emulated(a, b), a, b)


@needs_compiler
@pytest.mark.parametrize("n", [1, 3, 16, 63, 64, 65, 130])
def test_columns_at_the_edge(n: int) -> None:
    for q in (lambda q: q, along_k):
        a, b = (q(x) for x in operands(20, n, 384))
        assert_near(emulated(a, b), a, b)


@needs_compiler
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
def test_outputs_and_biases(out: torch.dtype) -> None:
    """Each output is the sum rounded once."""
    a, b = operands(21, 71, 256)
    for bias in (None, torch.randn(71), torch.randn(71).bfloat16(), torch.randn(71).half()):
        wide, found = (emulated(a, b, bias, out=dtype) for dtype in (FP32, out))
        assert_near(wide, a, b, bias)
        assert torch.equal(found, wide.to(out))


@needs_compiler
@pytest.mark.parametrize("batch", [((3,), (3,)), ((3,), ()), ((), (3,)), ((1,), (1,)), ((1,), ())], ids=str)
def test_batches(batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = operands(20, 40, 256, batch=batch)
    bias = torch.randn(40)
    assert_near(emulated(a, b, bias), a, b, bias)


@needs_compiler
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_fp8_value_by_every_scale_is_exact(dtype: torch.dtype) -> None:
    """By an identity, on either side: what float32 gives, subnormals too."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes.view(dtype).float().isfinite(), codes, torch.zeros_like(codes))
    one = torch.eye(128).to(dtype), torch.full((4, 128), 127, dtype=torch.uint8)
    scales = torch.arange(0, 240).clamp(max=238).to(torch.uint8)[:, None].expand(240, 4).contiguous()
    for half in codes.split(128):
        many = half.repeat(240, 1)
        for first in range(0, 240, 60):
            part = ScaledTensor(many[first : first + 60].view(dtype), scales[first : first + 60].view(E8M0), (1, 32))
            expected = dequantized(part).float()
            unit = ScaledTensor(one[0].mT, one[1].view(E8M0), (32, 1))
            assert torch.equal(emulated(part, unit), expected)
            turned = ScaledTensor(part.data.mT, part.scale.view(torch.uint8).mT.view(E8M0), (32, 1))
            rows = ScaledTensor(one[0][:64], one[1].mT.contiguous()[:64].view(E8M0), (1, 32))
            assert torch.equal(emulated(rows, turned).mT, expected[:, :64])


@needs_compiler
def test_scales_that_are_far_apart() -> None:
    """The scales of a and b cancel in every block; the product of the largest is Inf, but zeros stay zeros."""
    a, b = operands(20, 40, 256)
    expected = emulated(a, b)
    turns = torch.tensor([100, -100] * 4)
    for q, by in ((a, turns), (b, -turns[:, None])):
        codes = q.scale.view(torch.uint8)
        codes.copy_((codes.int() + by).to(torch.uint8))
    assert torch.equal(emulated(a, b), expected)
    for q in (a, b):
        q.data.view(torch.uint8).zero_()
        q.scale.view(torch.uint8).fill_(254)
    assert torch.equal(emulated(a, b), torch.zeros(20, 40))


@needs_compiler
def test_a_nan_stays_in_its_row_or_column() -> None:
    for where in ("scale", "data"):
        a, b = operands(20, 40, 256)
        clean = emulated(a, b)
        if where == "scale":
            a.scale.view(torch.uint8)[1, -1] = b.scale.view(torch.uint8)[-1, 5] = NAN_SCALE
        else:
            a.data.view(torch.uint8)[1, -1] = b.data.view(torch.uint8)[-1, 5] = 0x7F
        found = emulated(a, b)
        touched = torch.zeros(20, 40, dtype=torch.bool)
        touched[1] = touched[:, 5] = True
        assert torch.equal(found.isnan(), touched)
        assert torch.equal(found[~touched], clean[~touched])


@needs_compiler
def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    a, b = operands(64, 40, 2048)
    for counts in ((17, 32), (33, 64)):
        rows = [emulated(ScaledTensor(a.data[:m], a.scale[:m], a.block), b)[:2] for m in counts]
        assert all(torch.equal(found, rows[0]) for found in rows)


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On a second call nothing is planned: the launch of the first takes the new tensors; a constant b has its own."""
    for bias in (False, True):
        with hopper_on_cpu() as launches:
            for constant in (False, True, False, True):
                a, b = operands(20, 40, 256, batch=((2,), (2,)))
                extra = torch.randn(40) if bias else None
                found = mx_mm.mx_mm_kernel(a.data, a.scale, b.data, b.scale, extra, FP32, constant)
                assert_near(found, a, b, extra)
            assert [launch.name for launch in launches] == ["mx_tiles"] * 2
            assert [launch.options["W_CONSTANT"] for launch in launches] == [0, 1]


def test_the_default_configuration() -> None:
    """At the shapes of decoding, what was the fastest on an H200 or close to it."""
    for (m, k, n, constant), name in {
        (1, 6144, 2304, True): "8x64 warps4x1 stages5 depth2 cluster8 resident4",
        (16, 2048, 6144, True): "16x64 warps4x1 stages4 depth2 cluster3 resident4 late",
        (16, 1536, 6144, True): "16x64 warps4x1 stages4 depth2 cluster3 resident4",
        (16, 2048, 6144, False): "16x64 warps4x2 stages6 depth2 cluster2 resident3",
        (32, 6144, 1536, False): "32x64 warps4x2 stages6 depth2 cluster8 resident2",
        (32, 2048, 6144, False): "32x64 warps4x2 stages4 depth1 cluster2 resident3",
        (32, 2048, 6144, True): "32x64 warps4x2 stages8 depth2 cluster1 resident2 late",
        (32, 6144, 1536, True): "32x64 warps4x2 stages7 depth2 cluster4 resident2 late",
        (32, 6144, 2304, True): "32x64 warps4x2 stages7 depth2 cluster4 resident2 late",
        (64, 6144, 2304, False): "64x64 warps4x1 stages2 depth2 cluster8 resident3",
        (64, 2048, 6144, False): "32x64 warps4x2 stages4 depth1 cluster2 resident3",
        (64, 1536, 6144, False): "64x64 warps4x2 stages12 depth2 cluster1 resident1",
        (64, 1536, 6144, True): "32x64 warps4x2 stages8 depth2 cluster1 resident2 late",
        (64, 1536, 4096, True): "64x64 warps4x2 stages6 depth2 cluster2 resident1",
        (64, 6144, 1536, False): "64x64 warps4x1 stages5 depth2 cluster8 resident2",
    }.items():
        assert str(configure(Problem(m, n, k, SM90, constant=constant))) == name
    for k, n in DENSE:
        for m in (1, 8, 9, 16, 17, 32, 33, 64):
            for constant in (False, True):
                problem = Problem(m, n, k, SM90, constant=constant)
                chosen = configure(problem)
                rows, depth = chosen.ROWS, 2 * 128 * chosen.CLUSTER
                in_two = n == 6144 and (k == 2048 or (constant and k <= 1536))
                assert rows == min(max(1 << (m - 1).bit_length(), 8), 32 if in_two else 64)
                assert depth <= max(k, 256)
                assert chosen.least_stages <= chosen.STAGES
                assert configure(replace(problem, batch=500)).CLUSTER == 1
                wide = configure(replace(problem, k=24 << 10))
                assert wide.least_stages <= wide.STAGES
                assert wide.shared(24 << 10) <= (227 << 10) // wide.RESIDENT - (1 << 10)


def planned(m: int, n: int = 2304, k: int = 6144, *, constant: bool = False, **kwargs: Any) -> CudaLaunch:
    a, a_scale, b, b_scale, bias, out = unwritten(m, n, k, **kwargs)
    problem = problem_of(a, b, SM90, a_scale, b_scale, constant=constant)
    assert accepts(problem) is None
    product = mx_product((a, b), (a_scale, b_scale), out, SM90, bias=bias, constant=constant)
    return plan(product, configure(problem))[0]


def launches() -> Iterator[CudaLaunch]:
    """The kernels of the shapes that are measured, and of other types of some."""
    for k, n in DENSE:
        for m in (1, 8, 16, 32, 64):
            for constant in (False, True):
                if k % 128 == 0:
                    yield planned(m, n, k, constant=constant)
    for dtypes in ((E4M3, E5M2), (E5M2, E4M3)):
        yield planned(64, 2300, 6144, dtypes=dtypes, out=FP32, bias=FP32)


@needs_nvrtc
def test_no_configuration_spills() -> None:
    for launch in {launch.kernel: launch for launch in launches()}.values():
        assert launch.resources().spills == 0, launch.describe()
        assert launch.shared <= (227 << 10) // launch.options["RESIDENT"] - (1 << 10)


@needs_nvrtc
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_machine_code(m: int, constant: bool, tmp_path: Path) -> None:
    """FP8 products of both operands in shared memory; only what is constant is loaded before the wait for launches."""
    launch = planned(m, constant=constant)
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    rows = launch.options["ROWS"]
    assert any(f"QGMMA.64x{rows}x32.F32.E4M3.E4M3" in text for text in sass)
    assert any("UTMAPF.L2.3D" in text for text in sass)
    waits = [i for i, text in enumerate(sass) if "ACQBULK" in text]
    assert len(waits) == 2  # of the threads that multiply, and of the one that copies
    words = [i for i, text in enumerate(sass) if "LDG.E R" in text]
    assert words
    assert (min(words) < waits[0]) == constant
    assert any(i > waits[0] for i in words)
    boxes = [i for i, text in enumerate(sass) if "UTMALDG.3D" in text]
    assert any(i > waits[1] for i in boxes)
    assert any(i < waits[1] for i in boxes) == constant


def test_what_is_refused() -> None:
    for problem, reason in (
        (on(SM90, m=65), "M=65 is above 64"),
        (on(SM100, m=32), "sm100 is not sm90"),
        (on(GFX950, m=32), "gfx950 is not sm90"),
        (on(SM90, m=32, k=192), "K=192 is no multiple of 128"),
        (replace(on(SM90, m=32), in_boxes=False), "does not lie as bulk copies take it"),
        (replace(on(SM90, m=32), words=False), "do not lie in words of four"),
        (on(SM90, m=64, k=128 << 10), "the scales of K=131072 do not fit"),
    ):
        assert reason in str(accepts(problem))
        assert choose(problem).name != "cuda_tiles"
    assert choose(on(SM90, m=32), faults={"cuda_tiles": "no NVRTC"}).name == "cuda_gemv"


def test_which_operands_lie_in_boxes() -> None:
    a, b = operands(20, 48, 256)

    def found(a: ScaledTensor, b: ScaledTensor) -> bool:
        problem = problem_of(a.data, b.data, SM90, a.scale, b.scale)
        return problem.in_boxes and problem.words

    assert found(a, b)
    assert found(along_k(a), along_k(b))
    row_major = ScaledTensor(b.data.view(torch.uint8).contiguous().view(E4M3), b.scale, b.block)
    assert not found(a, row_major)
    wide = torch.zeros(20, 8, 3, dtype=torch.uint8).view(E8M0)[..., 1]
    assert not found(ScaledTensor(a.data, wide, a.block), b)
    odd = torch.zeros(200, dtype=torch.uint8)[1:161].view(20, 8).view(E8M0)
    assert not found(ScaledTensor(a.data, odd, a.block), b)
    once = ScaledTensor(a.data[:1].expand(20, -1), a.scale, a.block)
    assert not found(once, b)


def product(
    a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None, out_dtype: torch.dtype = FP32, constant: bool = False
) -> Tensor:
    found: Tensor = torch.ops.fp8fn.mx_mm(a.data, a.scale, b.data, b.scale, bias, out_dtype, constant)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_values_at_the_shapes_of_decoding(shape: tuple[int, int], constant: bool, hopper: Target) -> None:
    k, n = shape
    for m in (1, 3, 16, 17, 32, 64):
        for dtypes in ((E4M3, E4M3), (E5M2, E4M3)):
            a, b = operands(m, n, k, dtypes=dtypes, device="cuda")
            bias = torch.randn(n, device="cuda", dtype=BF16)
            torch.cuda.synchronize()
            assert_near_on_a_gpu(product(a, b, bias, constant=constant), a, b, bias)
            assert snr(product(a, b, out_dtype=BF16, constant=constant), exact(a, b)) > 45


@pytest.mark.gpu
@pytest.mark.parametrize("config", MX_TILES, ids=str)
def test_every_division_of_the_work_on_a_gpu(config: MxTilesConfig, hopper: Target) -> None:
    for m, n, k in ((5, 80, 768), (19, 272, 256), (64, 1040, 6144)):
        a, b = operands(m, n, k, device="cuda")
        torch.cuda.synchronize()
        for x, y in ((a, b), (along_k(a), along_k(b))):
            for constant in (False, True):
                out = torch.full((m, n), torch.nan, device="cuda")
                torch.cuda.synchronize()
                on_device = target_of(out.device)
                plan(scaled_product(x, y, out, on_device, constant=constant), config)[0].run()
                assert_near_on_a_gpu(out, a, b)


@pytest.mark.gpu
def test_extremes_on_a_gpu(hopper: Target) -> None:
    """The values are the CPU's float32, for subnormal scales too; NaN scales give NaN."""
    codes = torch.arange(254, dtype=torch.uint8)[:, None].repeat(1, 4)
    a = ScaledTensor(torch.full((254, 128), 1.0).to(E4M3), codes.view(E8M0), (1, 32))
    b = fp8fn.quantize(torch.eye(128), (32, 1), scale="e8m0")
    for start in range(0, 254, 64):
        rows = ScaledTensor(a.data[start : start + 64], a.scale[start : start + 64], a.block)
        a_part, b_part = (ScaledTensor(q.data.cuda(), q.scale.cuda(), q.block) for q in (rows, b))
        found = product(a_part, b_part).cpu()
        assert torch.equal(found, reference.dequantize(rows.data, rows.scale, rows.block))
    nan = ScaledTensor(rows.data, torch.full_like(rows.scale.view(torch.uint8), NAN_SCALE).view(E8M0), rows.block)
    a_part, b_part = (ScaledTensor(q.data.cuda(), q.scale.cuda(), q.block) for q in (nan, b))
    assert product(a_part, b_part).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_a_chain_in_a_graph_reads_only_constant_weights_early(m: int, hopper: Target) -> None:
    """Each product's rows are made by the launches right before it, and differ from replay to replay."""
    weights = [operands(1, 1024, 1024, device="cuda")[1] for _ in range(8)]
    x, outs = torch.randn(m, 1024, device="cuda"), []
    torch.cuda.synchronize()

    def chain() -> list[Tensor]:
        h, found = x, []
        for w in weights:
            a = fp8fn.quantize(h, (1, 32), scale="e8m0")
            h = product(a, w, constant=True)
            h = h / h.abs().amax()
            found.append(h)
        return found

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for i in range(100):
        x.copy_(torch.randn(m, 1024, device="cuda") * (i + 1))
        graph.replay()
        torch.cuda.synchronize()
        if i % 20 == 0:
            h = x
            for w, out in zip(weights, outs, strict=True):
                a = fp8fn.quantize(h, (1, 32), scale="e8m0")
                h = product(a, w, constant=True)
                torch.cuda.synchronize()
                h = h / h.abs().amax()
                assert torch.equal(out, h)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_thousand_runs_give_one_bit_pattern(m: int, hopper: Target) -> None:
    a, b = operands(m, 1040, 6144, device="cuda")
    torch.cuda.synchronize()
    first, differing = product(a, b, constant=True), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (product(a, b, constant=True) != first).sum()
    assert int(differing) == 0
