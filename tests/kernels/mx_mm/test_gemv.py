"""Few rows by an MX-FP8 weight in CUDA C++: emulated on the CPU, as machine code, and through the op on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops import moe_gemm as moe
from fp8fn.ops import mx_mm, reference
from fp8fn.ops.cuda.gemm import gemv_mx, mx_tiles
from fp8fn.ops.cuda.gemm.gemv_a16w8 import GemvConfig
from fp8fn.ops.cuda.gemm.gemv_mx import accepts, configure, plan
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.mx_mm import MX_MM, choose, problem_of
from fp8fn.ops.operands import Quantized, RoutedProduct, Routing
from fp8fn.ops.sort_tokens import most_tiles
from fp8fn.ops.targets import GFX950, SM89, SM90, SM100, Target, target_of
from fp8fn.ops.tuning.mx import MoeProblem, Problem
from support.accuracy import snr
from support.compilers import assert_well_compiled, instructions, needs_nvrtc
from support.configs import MX_GEMVS
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.experts import assert_near as near_by_hand
from support.operands.experts import by_hand
from support.operands.experts import operands as of_experts
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
from support.operands.weights import POISON, framed
from support.products import mx_product, routed_product, scaled_product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu


def laid_out(q: ScaledTensor) -> ScaledTensor:
    """The same operand with K in lines from multiples of 16, and what is not finite between and around them."""
    data, scale = q.data.view(torch.uint8), q.scale.view(torch.uint8)
    turn = q.block == (32, 1)
    lines = framed(data.mT if turn else data, POISON[q.data.dtype])
    scales = framed(scale.mT if turn else scale, NAN_SCALE)
    lines, scales = (lines.mT, scales.mT) if turn else (lines, scales)
    return ScaledTensor(lines.view(q.data.dtype), scales.view(E8M0), q.block)


def given(m: int, n: int, k: int, **kwargs: Any) -> tuple[ScaledTensor, ScaledTensor]:
    a, b = operands(m, n, k, **kwargs)
    return laid_out(a), laid_out(b)


def emulated(
    a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None, config: GemvConfig | None = None, *,
    out: torch.dtype = FP32, backwards: bool = False,
) -> Tensor:  # fmt: skip
    """Into memory that was 7 before; what lies behind it must be as it was."""
    shape = (*(a.shape[:-2] or b.shape[:-2]), a.shape[-2], b.shape[-1])
    memory = torch.full((torch.Size(shape).numel() + 64,), 7.0, dtype=out)
    found = memory[:-64].view(shape)
    problem = problem_of(a.data, b.data, SM90, a.scale, b.scale)
    assert accepts(problem) is None
    (launch,) = plan(scaled_product(a, b, found, SM90, bias=bias), config or configure(problem))
    emulate(launch, backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


@needs_compiler
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("scale", ["e8m0", "rceil"])
def test_types_and_formats(scale: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """N and K ragged, M of one and of two groups of eight rows."""
    for m, backwards in ((3, False), (11, True)):
        a, b = given(m, 150, 300, dtypes=dtypes, scale=scale)
        assert_near(emulated(a, b, backwards=backwards), a, b)


@needs_compiler
@pytest.mark.parametrize("m", [*range(1, 18), 31, 32, 33, 64])
def test_every_number_of_rows(m: int) -> None:
    a, b = given(m, 48, 128)
    assert_near(emulated(a, b), a, b)


@needs_compiler
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 40), (17, 15), (16, 32), (130, 129), (40, 520), (300, 64), (33, 97)])
def test_ragged_shapes(n: int, k: int) -> None:
    for m in (1, 2, 9):
        a, b = given(m, n, k)
        assert_near(emulated(a, b), a, b)


@needs_compiler
@pytest.mark.parametrize("config", MX_GEMVS, ids=str)
def test_every_division_of_the_work(config: GemvConfig) -> None:
    """Warps and blocks along K with much, little and nothing to do; rows in several tiles."""
    for m, n, k in ((5, 70, 700), (19, 33, 200), (70, 20, 96)):
        a, b = given(m, n, k)
        out, launches = torch.empty(2, m, n), []
        for found, backwards in zip(out, (False, True), strict=True):
            launches += plan(scaled_product(a, b, found, SM90), config)
            emulate(launches[-1], backwards=backwards)
        assert_near(out[0], a, b)
        assert torch.equal(out[0], out[1])


@needs_compiler
def test_a_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An a too large for shared memory is read part of K after part."""
    monkeypatch.setattr("fp8fn.ops.cuda.gemm.gemv_a16w8.SHARED_LIMIT", 12 << 10)
    for config in (GemvConfig(8, 1, 1, 4, 2, 2, 1), GemvConfig(16, 1, 2, 2, 4, 1, 1), GemvConfig(32, 1, 4, 2, 1, 1, 1)):
        a, b = given(config.ROWS - 1, 40, 1500)
        assert_near(emulated(a, b, config=config), a, b)


@needs_compiler
def test_more_of_a_than_is_asked_for_at_once() -> None:
    a, b = given(32, 20, 1100)
    assert_near(emulated(a, b, config=GemvConfig(32, 1, 1, 1, 1, 1, 1)), a, b)


@needs_compiler
def test_strides_of_scales() -> None:
    """Every third byte, and the other axis contiguous."""
    a, b = given(5, 70, 300)
    expected = emulated(a, b)

    def apart(q: ScaledTensor) -> ScaledTensor:
        codes = q.scale.view(torch.uint8)
        nan = torch.full_like(codes, NAN_SCALE)
        return ScaledTensor(q.data, torch.stack([nan, codes, nan], -1)[..., 1].view(E8M0), q.block)

    def turned(q: ScaledTensor) -> ScaledTensor:
        codes = q.scale.view(torch.uint8)
        codes = codes.contiguous() if q.block == (32, 1) else codes.mT.contiguous().mT
        return ScaledTensor(q.data, codes.view(E8M0), q.block)

    for change in (apart, turned):
        other = change(a), change(b)
        assert other[0].scale.stride() != a.scale.stride()
        assert other[1].scale.stride() != b.scale.stride()
        assert torch.equal(emulated(*other), expected)


@needs_compiler
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
def test_outputs_and_biases(out: torch.dtype) -> None:
    """Each output is the sum rounded once."""
    a, b = given(5, 70, 192)
    for bias in (None, torch.randn(70), torch.randn(70).bfloat16(), torch.randn(70).half()):
        wide, found = (emulated(a, b, bias, out=dtype) for dtype in (FP32, out))
        assert_near(wide, a, b, bias)
        assert torch.equal(found, wide.to(out))


@needs_compiler
@pytest.mark.parametrize("batch", [((3,), (3,)), ((3,), ()), ((), (3,)), ((1,), (1,)), ((1,), ())], ids=str)
def test_batches(batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for m in (4, 9):
        a, b = given(m, 40, 140, batch=batch)
        bias = torch.randn(40)
        assert_near(emulated(a, b, bias), a, b, bias)


@needs_compiler
def test_every_fp8_value_by_every_scale_is_exact() -> None:
    """By an identity, on either side: what float32 gives, subnormals too."""
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(239, dtype=torch.uint8)[:, None]  # beyond, some values are Inf
    for dtype in (E4M3, E5M2):
        values = torch.where(codes.view(dtype).float().isfinite(), codes, torch.zeros_like(codes))
        one = torch.eye(32).to(dtype).view(torch.uint8), torch.full((1, 32), 127, dtype=torch.uint8)
        for part in values.split(32):
            many = part.repeat(239, 1)
            row = ScaledTensor(many.view(dtype), scales.view(E8M0), (1, 32))
            expected = dequantized(row).float()
            unit_b = laid_out(ScaledTensor(one[0].view(dtype), one[1].view(E8M0), (32, 1)))
            unit_a = laid_out(ScaledTensor(one[0].view(dtype), one[1].mT.contiguous().view(E8M0), (1, 32)))
            column = ScaledTensor(many.mT.view(dtype), scales.mT.view(E8M0), (32, 1))
            for m in range(0, 239, 64):
                rows = ScaledTensor(row.data[m : m + 64], row.scale[m : m + 64], row.block)
                assert torch.equal(emulated(laid_out(rows), unit_b), expected[m : m + 64])
            assert torch.equal(emulated(unit_a, laid_out(column)).mT, expected)


@needs_compiler
@pytest.mark.parametrize("config", [GemvConfig(8, 1, 1, 2, 1, 1), GemvConfig(8, 1, 4, 2, 1, 1)], ids=str)
def test_scales_that_are_far_apart(config: GemvConfig) -> None:
    """The scales of a and b cancel in every block."""
    a, b = given(5, 40, 256)
    expected = emulated(a, b, config=config)
    turns = torch.tensor([100, -100] * 4)
    for q, by in ((a, turns), (b, -turns[:, None])):
        codes = q.scale.view(torch.uint8)
        codes.copy_((codes.int() + by).to(torch.uint8))
    assert torch.equal(emulated(a, b, config=config), expected)
    # The product of the largest scales is Inf, but zeros times it are zeros.
    for q in (a, b):
        q.data.view(torch.uint8).zero_()
        q.scale.view(torch.uint8).fill_(254)
    assert torch.equal(emulated(a, b, config=config), torch.zeros(5, 40))


@needs_compiler
@pytest.mark.parametrize("config", [GemvConfig(8, 1, 1, 2, 1, 1), GemvConfig(8, 1, 4, 2, 1, 1)], ids=str)
def test_infinities_of_data_are_infinities_of_the_sum(config: GemvConfig) -> None:
    a, b = given(3, 20, 100, dtypes=(E5M2, E5M2))
    a.data.view(torch.uint8)[1, 70], b.data.view(torch.uint8)[70, 5] = 0x7C, 0x40
    b.data.view(torch.uint8)[70] = torch.where(b.data.view(torch.uint8)[70] == 0, 0x40, b.data.view(torch.uint8)[70])
    found, sign = emulated(a, b, config=config), b.data[70].float().sign()
    assert torch.equal(found[1], sign * torch.inf)
    assert found[[0, 2]].isfinite().all()


@needs_compiler
def test_a_nan_stays_in_its_row_or_column() -> None:
    for where in ("scale", "data"):
        for m, k in ((9, 200), (2, 40)):
            a, b = given(m, 40, k)
            clean = emulated(a, b)
            if where == "scale":
                a.scale.view(torch.uint8)[1, -1] = b.scale.view(torch.uint8)[-1, 5] = NAN_SCALE
            else:
                a.data.view(torch.uint8)[1, -1] = b.data.view(torch.uint8)[-1, 5] = POISON[E4M3]
            found = emulated(a, b)
            touched = torch.zeros(m, 40, dtype=torch.bool)
            touched[1] = touched[:, 5] = True
            assert torch.equal(found.isnan(), touched)
            assert torch.equal(found[~touched], clean[~touched])


@needs_compiler
@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_blocks_of_zeros_and_of_what_is_not_finite(value: float) -> None:
    x, w = torch.randn(4, 96), torch.randn(96, 33)
    x[2, 32:64] = value
    a, b = laid_out(fp8fn.quantize(x, (1, 32), scale="e8m0")), laid_out(fp8fn.quantize(w, (32, 1), scale="e8m0"))
    found = emulated(a, b)
    assert found[[0, 1, 3]].isfinite().all()
    assert bool(found[2].isnan().all()) == (value != 0.0)
    if value == 0.0:
        assert_near(found, a, b)


@needs_compiler
def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    """Up to 8 rows, 16, 32: one division of the work."""
    a, b = given(32, 40, 2080)
    for counts in ((2, 3, 8), (9, 16), (17, 32)):
        rows = [emulated(laid_out(ScaledTensor(a.data[:m], a.scale[:m], a.block)), b)[:2] for m in counts]
        assert all(torch.equal(found, rows[0]) for found in rows)


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On the second call nothing is planned: the launch of the first takes the new tensors."""
    for bias in (False, True):
        with hopper_on_cpu() as launches:
            for _ in range(2):
                a, b = given(5, 40, 140, batch=((2,), (2,)))
                extra = torch.randn(40) if bias else None
                found = mx_mm.mx_mm_kernel(a.data, a.scale, b.data, b.scale, extra, FP32)
                assert_near(found, a, b, extra)
            assert [launch.name for launch in launches] == ["gemv_mx"]


@needs_compiler
def test_a_bias_with_strides() -> None:
    with hopper_on_cpu() as launches:
        for _ in range(2):
            a, b = given(3, 40, 96)
            bias = torch.randn(80)[::2]
            assert_near(mx_mm.mx_mm_kernel(a.data, a.scale, b.data, b.scale, bias, FP32), a, b, bias)
        assert len(launches) == 1


def routed(
    rows: int, top_k: int, n: int, k: int, experts: int, block_m: int, *, a_div: int | None = None, device: Any = "cpu"
) -> tuple[ScaledTensor, ScaledTensor, tuple[Tensor, Tensor, Tensor], int]:
    """Operands, layout and `a_div`; some tokens have an expert of nobody."""
    a, w = of_experts(rows, n, k, experts, device=device)
    a_div = top_k if a_div is None else a_div
    chosen = torch.randint(-1, experts + 1, (rows * a_div // top_k, top_k))
    layout = fp8fn.sort_tokens(chosen.to(device), experts, block_m)
    return a, w, layout, a_div


def emulated_moe(
    a: ScaledTensor, w: ScaledTensor, layout: tuple[Tensor, Tensor, Tensor], a_div: int,
    weights: Tensor | None = None, config: GemvConfig | None = None, *,
    out: torch.dtype = FP32, backwards: bool = False,
) -> Tensor:  # fmt: skip
    """Into zeros; what lies behind them must be as it was."""
    shape = (a.shape[0] * a_div, w.shape[-1])
    memory = torch.full((shape[0] * shape[1] + 64,), 7.0, dtype=out)
    found = memory[:-64].view(shape).zero_()
    given = routed_product(a, w, layout, a_div, found, SM90, weights)
    problem = moe.problem_of(given)
    assert gemv_mx.accepts_moe(problem) is None
    (launch,) = gemv_mx.plan_moe(given, config or gemv_mx.configure_moe(problem))
    emulate(launch, backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


@needs_compiler
@pytest.mark.parametrize("block_m", [4, 8, 16, 24, 64])
@pytest.mark.parametrize("shape", [(11, 2, None, 40, 96), (22, 2, 1, 33, 190), (1, 3, None, 17, 31)], ids=str)
def test_routed_tokens(shape: tuple[int, int, int | None, int, int], block_m: int) -> None:
    rows, top_k, a_div, n, k = shape
    a, w, layout, a_div = routed(rows, top_k, n, k, 4, block_m, a_div=a_div)
    a, w = laid_out(a), laid_out(w)
    weights = torch.randn(rows * a_div)
    for factor, backwards in ((None, False), (weights, True)):
        found = emulated_moe(a, w, layout, a_div, factor, backwards=backwards)
        near_by_hand(found, by_hand(a, w, layout, a_div, factor))


MOE_CONFIGS = [GemvConfig(8, 1, 1, 8, 4, 1, 2), GemvConfig(16, 1, 2, 2, 1, 4, 2), GemvConfig(32, 2, 4, 1, 2, 2, 2)]


@needs_compiler
@pytest.mark.parametrize("config", MOE_CONFIGS, ids=str)
def test_tiles_of_every_kind(config: GemvConfig) -> None:
    """A full one, one with a gap, without an id, of no expert, and past the last; ids that are padding of any kind."""
    a, w = of_experts(40, 50, 200, 3)
    ids = torch.full((6, 24), 40, dtype=torch.int32)
    ids[0] = torch.arange(24)
    ids[1, [0, 5, 11, 20]] = torch.tensor([30, 31, 29, 28], dtype=torch.int32)
    ids[1, 1], ids[1, 2] = -1, 2**31 - 1
    ids[3, 0], ids[5, 0] = 35, 36
    ids[4, 23] = 37
    owners = torch.tensor([2, 0, 1, -1, 1, 1], dtype=torch.int32)
    layout = ids.flatten(), owners, torch.tensor([5 * 24], dtype=torch.int32)
    for out in (FP32, BF16, FP16):
        found = emulated_moe(a, w, layout, 1, torch.rand(40) if out == FP32 else None, config, out=out)
        used = sorted([*range(24), 30, 31, 29, 28, 37])
        assert (found[used] != 0).any(-1).all()
        assert (found[[i for i in range(40) if i not in used]] == 0).all()
    wide = emulated_moe(a, w, layout, 1, None, config)
    near_by_hand(wide, by_hand(a, w, layout, 1))
    assert torch.equal(found, wide.half())


@needs_compiler
def test_what_is_not_finite_stays_in_its_row() -> None:
    a, w, layout, a_div = routed(6, 2, 20, 96, 3, 16)
    clean = emulated_moe(a, w, layout, a_div)
    a.scale.view(torch.uint8)[2, 1] = NAN_SCALE
    found = emulated_moe(a, w, layout, a_div)
    touched = torch.zeros_like(found, dtype=torch.bool)
    touched[4:6] = (clean[4:6] != 0).any(-1, keepdim=True)
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


@needs_compiler
def test_the_op_of_routed_tokens_keeps_its_launch() -> None:
    for weighted in (False, True):
        with hopper_on_cpu() as launches:
            for _ in range(2):
                a, w, layout, a_div = routed(9, 2, 40, 96, 4, 16)
                a, w = laid_out(a), laid_out(w)
                weights = torch.randn(18) if weighted else None
                found = moe.moe_gemm_kernel(
                    a.data, a.scale, a.block, w.data, w.scale, w.block, *layout, 2, a_div, weights, FP32
                )  # fmt: skip
                near_by_hand(found, by_hand(a, w, layout, a_div, weights))
            assert [launch.name for launch in launches] == ["gemv_mx"]
            assert launches[0].reason == "cuda_moe by default; not hip_moe: sm90 is not gfx950"


def unwritten_moe(tokens: int, n: int = 1536, k: int = 6144, experts: int = 128) -> RoutedProduct:
    ids = tokens * 4
    tiles = most_tiles(ids, experts, 16)
    a, w = (torch.empty(*shape, dtype=E4M3, device="meta") for shape in ((tokens, k), (experts, n, k)))
    layout = [torch.empty(size, dtype=torch.int32, device="meta") for size in (tiles * 16, tiles, 1)]
    scales = empty_scale(a, (1, 32), "e8m0"), empty_scale(w.mT, (32, 1), "e8m0")
    out = torch.empty(ids, n, dtype=BF16, device="meta")
    left, right = Quantized(a, scales[0], (1, 32)), Quantized(w.mT, scales[1], (32, 1))
    return RoutedProduct(a=left, w=right, routing=Routing(*layout), a_div=4, out=out, target=SM90)


@needs_nvrtc
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512, 4096])
def test_routed_tokens_spill_nothing(tokens: int) -> None:
    (launch,) = moe.MOE_GEMM.plan(unwritten_moe(tokens))
    assert isinstance(launch, CudaLaunch)
    assert launch.resources().spills == 0, launch.describe()
    assert launch.shared <= 227 << 10


def test_what_routed_tokens_are_refused() -> None:
    problem = MoeProblem(ids=8, n=1536, k=6144, experts=128, tiles=8, block_m=16, target=SM90)
    assert gemv_mx.accepts_moe(problem) is None
    for changed, reason in (
        ({"target": GFX950}, "gfx950 is not sm90"),
        ({"a_block": (1, 128)}, "are not those of MX"),
        ({"k_lines": False}, "not in consecutive bytes"),
        ({"tiles": 70000}, "70000 tiles of 16 ids"),
        ({"longest_step": 2**31}, "a stride of 2147483648"),
    ):
        assert reason in str(gemv_mx.accepts_moe(replace(problem, **changed)))
    near = unwritten_moe(2)
    far = torch.empty_strided((2, 192), (2**31, 1), dtype=E8M0, device="meta")
    for part in ("a", "w"):
        moved = replace(near, **{part: getattr(near, part)._replace(scale=far)})
        assert moe.problem_of(moved).longest_step == 2**31
    assert moe.problem_of(near).longest_step == 1536 * 6144


def test_the_choice_and_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    for k, n in DENSE:
        for m in (1, 4, 16, 33, 64):
            for constant in (False, True):
                problem = replace(on(SM90, m=m, n=n, k=k), constant=constant)
                choice = choose(problem)
                tiles = mx_tiles.accepts(problem) is None and mx_tiles.untuned(problem) is None
                assert (choice.name, choice.source) == ("cuda_tiles" if tiles else "cuda_gemv", "default")
                assert tiles == (k % 128 == 0) or m <= 16
                assert not tiles or constant or m >= 16
    for problem, reason in (
        (on(SM90, m=65), "M=65 is above 64"),
        (on(SM89), "sm89 is not sm90"),
        (on(SM100), "sm100 is not sm90"),
        (on(GFX950), "gfx950 is not sm90"),
        (on(SM90, k=0), "K=0"),
        (replace(on(SM90), k_lines=False), "not in consecutive bytes from a multiple of 16"),
        (on(SM90, largest=2**31), "spans 2147483648 bytes"),
        (on(SM90, batch=70000), "a batch of 70000"),
        (replace(on(SM90), b_dtype=torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz is not an FP8 type of sm90"),
    ):
        assert reason in str(accepts(problem))
        assert choose(problem).name != "cuda_gemv"
    assert choose(on(SM90), faults={"cuda_gemv": "no NVRTC"}).name == "triton_few"
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no libnvrtc.so is here")
    a, a_scale, b, b_scale, bias, out = unwritten(1)
    launch, *_ = MX_MM.plan(mx_product((a, b), (a_scale, b_scale), out, SM90, bias=bias))
    assert launch.name == "mx_mm"
    assert "not cuda_gemv: no libnvrtc.so is here" in launch.reason


def test_the_default_configuration() -> None:
    """At the shapes of decoding each warp has something to do, and the rule gives what was the fastest on an H200."""
    for (m, k, n), name in {
        (1, 2048, 6144): "8x32 warps1x8 unroll1 cluster1 resident2",
        (4, 6144, 1536): "8x32 warps1x8 unroll1 cluster4 resident2",
        (4, 6144, 2304): "8x64 warps4x2 unroll2 cluster8 resident3",
        (16, 2048, 6144): "16x128 warps4x2 unroll1 cluster4 resident2",
        (16, 6144, 1536): "16x64 warps4x2 unroll2 cluster8 resident2",
        (64, 2048, 6144): "64x128 warps8x1 unroll1 cluster4 resident2",
        (64, 6144, 2304): "64x64 warps4x2 unroll1 cluster6 resident2",
    }.items():
        assert str(configure(Problem(m, n, k, SM90))) == name
    for k, n in DENSE:
        for m in (1, 2, 8, 16, 32, 64):
            chosen = configure(Problem(m, n, k, SM90))
            rows, depth, width = chosen.ROWS, 64 * chosen.WARPS_K * chosen.CLUSTER, chosen.BN
            assert rows == min(max(1 << (m - 1).bit_length(), 8), 64)
            assert rows <= 16 or chosen.WARPS_N % 4 == 0
            assert depth <= max(k, 64)
            assert width - 16 < n
            assert configure(Problem(m, n, k, SM90, batch=200)).CLUSTER == 1


def planned(*args: Any, **kwargs: Any) -> CudaLaunch:
    a, a_scale, b, b_scale, bias, out = unwritten(*args, **kwargs)
    problem = problem_of(a, b, SM90, a_scale, b_scale)
    return plan(mx_product((a, b), (a_scale, b_scale), out, SM90, bias=bias), configure(problem))[0]


def launches() -> Iterator[CudaLaunch]:
    """The kernels of the shapes that are measured, and of other types and ragged shapes of some."""
    for k, n in DENSE:
        for m in (1, 2, 8, 16, 32, 64):
            yield planned(m, n, k)
    for dtypes in ((E4M3, E5M2), (E5M2, E4M3)):
        for m in (1, 8, 16, 32):
            yield planned(m, 2300, 6130, dtypes=dtypes, out=FP32, bias=FP32)


@needs_nvrtc
def test_no_configuration_spills() -> None:
    for launch in {launch.kernel: launch for launch in launches()}.values():
        assert launch.resources().spills == 0, launch.describe()
        assert launch.shared <= 227 << 10


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 4, 16])
def test_weights_load_by_16_bytes_before_a_is_waited_for(m: int, tmp_path: Path) -> None:
    """And their scales with them: between the loads of a, which come first, and what is done with those."""
    launch = planned(m)
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    (meets, *_) = [i for i, text in enumerate(sass) if "BAR.SYNC" in text and "@" not in text]
    before = sass[:meets]
    pieces, scales = (
        [i for i, text in enumerate(before) if re.search(kind, text)] for kind in (r"LDG\.E\.NA\.128", r"LDG\.E\.U8")
    )
    in_flight, ahead = 2 * launch.options["TILES"] * launch.options["UNROLL"], launch.options["AHEAD"]
    assert len(pieces) == len(scales) == in_flight + 2 * ahead  # of a: before the loop over its pieces, and within
    last_of_a = [i for i, text in enumerate(before) if "STS" in text and i > max(*pieces, *scales)]
    assert len(last_of_a) == 5 * ahead  # and a scale


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 4, 16, 32, 64])
def test_values_are_multiplied_as_fp8_or_widened_by_one_instruction(m: int, tmp_path: Path) -> None:
    launch = planned(m)
    assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    together = launch.options["WARPS_N"] % 4 == 0
    assert any(f"QGMMA.64x{launch.options['ROWS']}x32.F32.E4M3.E4M3" in text for text in sass) == together
    assert any("HMMA.16816.F32 " in text for text in sass) != together
    assert any("LDSM.16.M88.4" in text for text in sass) != together
    assert any("F2FP.F16.E4M3.UNPACK_B" in text for text in sass) != together
    assert not any(re.search(r"HMUL2|HFMA2\.(MMA\.)?BF16|HADD2\.F32", text) for text in sass)


def product(a: ScaledTensor, b: ScaledTensor, bias: Tensor | None = None, out_dtype: torch.dtype = FP32) -> Tensor:
    found: Tensor = torch.ops.fp8fn.mx_mm(a.data, a.scale, b.data, b.scale, bias, out_dtype)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_values_at_the_shapes_of_decoding(shape: tuple[int, int], hopper: Target) -> None:
    k, n = shape
    for m in (1, 3, 16, 32, 64):
        for dtypes in ((E4M3, E4M3), (E5M2, E4M3)):
            a, b = operands(m, n, k, dtypes=dtypes, device="cuda")
            bias = torch.randn(n, device="cuda", dtype=BF16)
            assert choose(problem_of(a.data, b.data, SM90, a.scale, b.scale)).name.startswith("cuda_")
            assert_near_on_a_gpu(product(a, b, bias), a, b, bias)
            assert snr(product(a, b, out_dtype=BF16), exact(a, b)) > 45


@pytest.mark.gpu
def test_values_of_ragged_shapes_and_batches_on_a_gpu(hopper: Target) -> None:
    for m, n, k in ((1, 16, 16), (5, 48, 304), (9, 144, 4112), (16, 1040, 1040), (31, 81, 208), (64, 208, 400)):
        for batch in (((), ()), ((3,), (3,)), ((3,), ())):
            a, b = operands(m, n, k, batch=batch, device="cuda")
            assert_near_on_a_gpu(product(a, b), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("config", MX_GEMVS, ids=str)
def test_every_division_of_the_work_on_a_gpu(config: GemvConfig, hopper: Target) -> None:
    for m, n, k in ((5, 80, 704), (19, 272, 208), (33, 1040, 6160)):
        a, b = operands(m, n, k, device="cuda")
        out = torch.full((m, n), torch.nan, device="cuda")
        plan(scaled_product(a, b, out, target_of(out.device)), config)[0].run()
        assert_near_on_a_gpu(out, a, b)


@pytest.mark.gpu
def test_extremes_on_a_gpu(hopper: Target) -> None:
    """The values are the CPU's float32, for subnormal scales too; NaN scales give NaN."""
    codes = torch.arange(254, dtype=torch.uint8)[:, None].repeat(1, 4)
    a = ScaledTensor(torch.full((254, 128), 1.0).to(E4M3), codes.view(E8M0), (1, 32))
    b = fp8fn.quantize(torch.eye(128), (32, 1), scale="e8m0")
    for start in range(0, 254, 64):
        rows = ScaledTensor(a.data[start : start + 64], a.scale[start : start + 64], a.block)
        found = product(*(ScaledTensor(q.data.cuda(), q.scale.cuda(), q.block) for q in (rows, b))).cpu()
        assert torch.equal(found, reference.dequantize(rows.data, rows.scale, rows.block))
    nan = ScaledTensor(rows.data, torch.full_like(rows.scale.view(torch.uint8), NAN_SCALE).view(E8M0), rows.block)
    assert product(*(ScaledTensor(q.data.cuda(), q.scale.cuda(), q.block) for q in (nan, b))).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_a_thousand_runs_give_one_bit_pattern(m: int, hopper: Target) -> None:
    a, b = operands(m, 1040, 6144, device="cuda")
    run = partial(product, a, b)
    first, differing = run(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (run() != first).sum()
    assert int(differing) == 0


@pytest.mark.gpu
def test_a_row_has_the_same_bits_whatever_is_beside_it_on_a_gpu(hopper: Target) -> None:
    for k, n in DENSE:
        a, b = operands(64, n, k, device="cuda")
        for counts in ((2, 3, 8), (9, 16), (17, 32), (33, 64)):
            rows = [product(ScaledTensor(a.data[:m], a.scale[:m], a.block), b)[:2] for m in counts]
            assert all(torch.equal(found, rows[0]) for found in rows)


@pytest.mark.gpu
def test_a_launch_that_begins_early_sees_what_the_ones_before_it_wrote(hopper: Target) -> None:
    """Each product's operands were written just then: the same with waits."""
    pairs = [operands(4, 2048, 2048, device="cuda") for _ in range(8)]

    def run(wait: Callable[[], None]) -> Tensor:
        a, b = (ScaledTensor(q.data.clone(), q.scale.clone(), q.block) for q in pairs[0])
        outs = []
        for pair in pairs:
            wait()
            for mine, other in zip((a, b), pair, strict=True):
                mine.data.view(torch.uint8).copy_(other.data.view(torch.uint8))
                mine.scale.view(torch.uint8).copy_(other.scale.view(torch.uint8))
            wait()
            outs.append(product(a, b))
        return torch.stack(outs)

    expected = run(torch.cuda.synchronize)
    for _ in range(20):
        assert torch.equal(run(lambda: None), expected)


@pytest.mark.gpu
def test_replayed_as_a_graph(hopper: Target) -> None:
    a, b = operands(4, 2304, 6144, device="cuda")
    expected = product(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(a, b)
    for add in (0, 1):
        a.scale.view(torch.uint8).add_(add)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, 2.0**add * expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_routed_tokens_on_a_gpu(tokens: int, hopper: Target) -> None:
    for n, k, experts, block_m in ((1536, 6144, 16, 16), (40, 320, 5, 64), (1040, 1040, 128, 8)):
        a, w, layout, a_div = routed(tokens, 4, n, k, experts, block_m, device="cuda")
        weights = torch.rand(tokens * 4, device="cuda")
        found = fp8fn.moe_gemm(a, w, *layout, top_k=4, token_weights=weights, out_dtype=FP32)
        near_by_hand(found, by_hand(a, w, layout, a_div, weights))
        for _ in range(20):
            again = fp8fn.moe_gemm(a, w, *layout, top_k=4, token_weights=weights, out_dtype=FP32)
            assert torch.equal(again, found)


@pytest.mark.gpu
def test_routed_tokens_replayed_as_a_graph_with_another_layout(hopper: Target) -> None:
    a, w, layout, _ = routed(8, 4, 1536, 2048, 16, 16, device="cuda")
    run = partial(fp8fn.moe_gemm, a, w, *layout, top_k=4, out_dtype=FP32)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    other = fp8fn.sort_tokens(torch.randint(0, 16, (8, 4), device="cuda"), 16, 16)
    for mine, new in zip(layout, other, strict=True):
        mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    near_by_hand(found, by_hand(a, w, layout, 4))
