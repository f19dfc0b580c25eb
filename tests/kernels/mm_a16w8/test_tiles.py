"""Few rows by an FP8 weight by TMA and wgmma, x as sums of FP8: emulated on the CPU, as machine code, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.bench.shapes import DECODE
from fp8fn.ops import mm_a16w8 as op
from fp8fn.ops import reference
from fp8fn.ops.cuda.gemm import a16w8_tiles
from fp8fn.ops.cuda.gemm.a16w8_tiles import A16W8TilesConfig, accepts, choose_config, untuned
from fp8fn.ops.cuda.operands import PARTS
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import Target
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import snr
from support.compilers import assert_well_compiled, instructions, needs_nvrtc
from support.configs import WEIGHT_TILES, WEIGHT_TILES_HELD
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.weights import BLOCKS, CLASSES, POISON, assert_right, exact, on_gpu, operand, operands
from support.products import planned, weight_product, with_parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
plan = partial(planned, a16w8_tiles)
SHORT = ((256, 16384), (384, 2048), (512, 4096), (1008, 4096), (1024, 16384))  # (K, N)
CROWDED = ((2048, 4096), (1024, 14336), (5120, 5120))  # (K, N), whose launches would not find room at once
LARGE = ((4096, 28672), (14336, 4096), (4096, 4096), (28672, 8192))  # (K, N)


def emulated(
    x: Tensor, w: ScaledTensor, bias: Tensor | None = None, config: A16W8TilesConfig | None = None, *,
    out: torch.dtype = FP32, constant: bool = False, backwards: bool = False,
) -> Tensor:  # fmt: skip
    """Into memory that was 7 before; what lies behind it must be as it was."""
    memory = torch.full((x.shape[-2] * w.shape[-1] + 64,), 7.0, dtype=out)
    found = memory[:-64].view(x.shape[-2], w.shape[-1])
    given = weight_product(x, w, found, bias=bias, constant=constant)
    assert accepts(replace(given, out=found.bfloat16())) is None or config is not None
    emulate(plan(given, config), backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


def unwritten(*args: Any, out: torch.dtype | None = None, **kwargs: Any) -> WeightProduct:
    given = operands(*args, **kwargs)
    return replace(given, out=given.out.to(out or given.out.dtype))


@needs_compiler
@pytest.mark.parametrize("config", WEIGHT_TILES, ids=str)
def test_every_division_of_the_work(config: A16W8TilesConfig) -> None:
    """Blocks along K with more and with less, stages filled anew, N ragged, rows in several tiles; types and scales."""
    for (m, n), x_dtype, fp8, block in (
        ((5, 70), BF16, E4M3, (128, 128)), ((13, 130), FP16, E5M2, (128, 1)), ((21, 40), BF16, E5M2, (-1, 1)),
    ):  # fmt: skip
        x, w = torch.randn(m, 1152).to(x_dtype), operand(1152, n, block, dtype=fp8)
        found = emulated(x, w, config=config)
        assert_right(found, x, w)
        assert torch.equal(emulated(x, w, config=config, constant=True, backwards=True), found)


@needs_compiler
@pytest.mark.parametrize("config", WEIGHT_TILES_HELD, ids=str)
def test_a_weight_in_registers_gives_the_bits_of_one_in_shared_memory(config: A16W8TilesConfig) -> None:
    k = config.STAGES * config.CLUSTER * 128
    for (m, n), x_dtype, fp8, block in (
        ((5, 70), BF16, E4M3, (128, 128)), ((13, 200), FP16, E5M2, (128, 1)), ((1, 40), BF16, E5M2, (-1, 1)),
    ):  # fmt: skip
        x, w = torch.randn(m, k).to(x_dtype), operand(k, n, block, dtype=fp8)
        found = emulated(x, w, config=config, constant=True)
        assert_right(found, x, w)
        assert torch.equal(emulated(x, w, config=replace(config, HELD=0, READY=0, X_OVER=False), constant=True), found)
        assert torch.equal(emulated(x, w, config=replace(config, READY=0), backwards=True), found)
        assert torch.equal(emulated(x, w, config=config, constant=True, backwards=True), found)


@needs_compiler
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_number_of_rows(dtype: torch.dtype, block: tuple[int, int]) -> None:
    for m in range(1, 17):
        x, w = torch.randn(m, 256).to(dtype), operand(256, 48, block)
        assert_right(emulated(x, w, constant=m % 2 == 0), x, w)


@needs_compiler
@pytest.mark.parametrize("n", [1, 3, 16, 63, 64, 65, 130])
def test_columns_at_the_edge(n: int) -> None:
    x, w = torch.randn(4, 384).bfloat16(), operand(384, n, (128, 1))
    assert_right(emulated(x, w), x, w)


@needs_compiler
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("k", [16, 64, 80, 112, 144, 192, 400])
def test_zeros_follow_k(k: int, block: tuple[int, int]) -> None:
    """Up to a multiple of 128: what lies in memory behind the last of K, of x and of w, is read as zeros."""
    for m, dtype, fp8 in ((1, BF16, E4M3), (16, FP16, E5M2)):
        rows = torch.full((m, k + 136), torch.nan, dtype=dtype)
        rows[:, :k] = torch.randn(m, k)
        w = operand(k, 70, block, dtype=fp8)
        columns = torch.full((70, k + 144), POISON[fp8], dtype=torch.uint8)
        columns[:, :k] = w.data.mT.view(torch.uint8)
        x, w = rows[:, :k], ScaledTensor(columns.view(fp8)[:, :k].mT, w.scale, w.block)
        for constant in (False, True):
            found = emulated(x, w, constant=constant)
            assert_right(found, x, w)
            assert torch.equal(emulated(x, w, constant=constant, backwards=True), found)


@needs_compiler
@pytest.mark.parametrize(
    "config", [A16W8TilesConfig(8, 4, 2, HELD=2), A16W8TilesConfig(16, 8, 1, 2, HELD=1, READY=1)], ids=str
)
def test_zeros_follow_k_in_registers(config: A16W8TilesConfig) -> None:
    for k in (136, 192, 240):
        x, w = torch.randn(7, k).bfloat16(), operand(k, 130, (128, 128))
        found = emulated(x, w, config=config, constant=True)
        assert_right(found, x, w)
        other = replace(config, HELD=0, READY=0, STAGES=2)
        assert torch.equal(emulated(x, w, config=other, constant=True), found)


@needs_compiler
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
def test_outputs_and_biases(out: torch.dtype) -> None:
    """Each output is the sum rounded once."""
    x, w = torch.randn(5, 256).bfloat16(), operand(256, 71, (128, 128))
    for bias in (None, torch.randn(71), torch.randn(142).bfloat16()[::2], torch.randn(71).half()):
        wide, found = (emulated(x, w, bias, out=dtype) for dtype in (FP32, out))
        assert_right(wide, x, w, bias)
        assert torch.equal(found, wide.to(out))


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_of_x_is_exact(dtype: torch.dtype) -> None:
    """Beside nothing larger, by an identity: normal ones of all exponents and signs, and those 2 ** 14 smaller."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.int16).view(dtype)
    normal = every[every.float().isfinite() & (every.float().abs() >= torch.finfo(dtype).tiny * 2**10)]
    one = ScaledTensor(torch.eye(128).to(E4M3).mT, torch.ones(1, 1), (128, 128))
    picked = normal[torch.randperm(normal.numel())[: 128 * 16]].view(16, 128)
    for row in range(16):  # one value in each 128: its exponent is the row's
        x = torch.zeros(16, 128, dtype=dtype)
        x[torch.arange(16), torch.arange(16) * 7 + row % 8] = picked[:, row]
        assert torch.equal(emulated(x, one), x.float())
    scaled = torch.tensor([1.0, 2.0**-5, 2.0**-10, 2.0**-14])
    x = (torch.randint(128, 256, (16, 32, 4)) * scaled * (torch.rand(16, 32, 1) - 0.5).sign()).flatten(1).to(dtype)
    x[:, 0] = 255.0
    assert torch.equal(emulated(x, one), x.float())
    tiny = torch.finfo(dtype).smallest_normal * torch.randint(0, 2, (16, 128)).to(dtype)
    assert torch.equal(emulated(tiny, one), tiny.float())


@needs_compiler
def test_rows_of_several_magnitudes() -> None:
    """A scale for each row and 128 of K: what is small beside another row, or another part of K, keeps its bits."""
    for dtype, largest in ((BF16, 30), (FP16, 12)):
        x = torch.randn(16, 512) * 2.0 ** torch.randint(-largest, largest // 2, (16, 4)).repeat_interleave(128, 1)
        x, w = x.to(dtype), operand(512, 40, (128, 128))
        found, expected = emulated(x, w).double(), exact(x, w)
        assert ((found - expected).norm(dim=1) < 1e-5 * expected.norm(dim=1)).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_what_is_not_finite_stays_in_its_rows_and_columns(dtype: torch.dtype) -> None:
    for fp8 in (E4M3, E5M2):
        x, w = torch.randn(9, 256).to(dtype), operand(256, 140, (128, 128), dtype=fp8)
        x[3, 199], x[5, 7], x[8, 0] = torch.nan, torch.inf, -torch.inf
        x[5, 8] = torch.finfo(dtype).max
        w.data.view(torch.uint8)[199, 130] = POISON[fp8]
        found, column = emulated(x, w), torch.arange(140) != 130
        rows = torch.tensor([i not in (3, 5, 8) for i in range(9)])
        assert found[rows][:, column].isfinite().all()
        assert not found[:, 130].isfinite().any()
        assert found[3].isnan().all()
        values = w.data.float()
        assert torch.equal(found[5][column].isnan(), (values[7] == 0)[column])
        some = column & (values[7] != 0) & (values[0] != 0)
        assert torch.equal(found[5][some], values[7][some].sign() * torch.inf)
        assert torch.equal(found[8][some], values[0][some].sign() * -torch.inf)


@needs_compiler
@pytest.mark.parametrize("constant", [False, True])
def test_gated_rows_longer_than_what_a_thread_loads_at_once(constant: bool) -> None:
    """Its pointers to gate and up, which have different strides, are moved on; K ends within a K tile."""
    config = A16W8TilesConfig(8, 4, 3, 1)
    gate, up = torch.randn(8, 2000).bfloat16()[:, 64:1888], torch.randn(8, 1824).bfloat16()
    w = operand(1824, 70, (128, 128))
    found = torch.full((8, 70), 7.0)
    launch = plan(weight_product(gate, w, found, up=up, constant=constant), config)
    assert launch.options["AHEAD"] * (128 // launch.options["LANES"]) // 8 < 15 == -(-1824 // 128)
    emulate(launch)
    assert_right(found, reference.silu_mul(gate, up).bfloat16(), w)


@needs_compiler
def test_strides_of_x_and_of_scales() -> None:
    wide = torch.randn(6, 400).bfloat16()
    w = operand(256, 40, (128, 1))
    scale = torch.stack([w.scale.mT] * 3, -1)[..., 1].mT
    assert scale.stride() != w.scale.stride()
    x = wide[:, 8:264]
    assert_right(emulated(x, ScaledTensor(w.data, scale, w.block)), x, w)


@needs_compiler
def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    x, w = torch.randn(16, 1024).bfloat16(), operand(1024, 40, (128, 128))
    for counts in ((1, 2, 5, 8), (9, 16)):
        rows = [emulated(x[:m], w)[:1] for m in counts]
        assert all(torch.equal(found, rows[0]) for found in rows)


@needs_compiler
def test_the_op_keeps_its_call_and_takes_pointers_in_order() -> None:
    """On a second call nothing is planned: the launch of the first takes the new tensors; a constant w has its own."""
    for bias in (False, True):
        with hopper_on_cpu() as launches:
            for constant in (False, True, False, True):
                x, w = torch.randn(3, 256).bfloat16(), operand(256, 40, (128, 128))
                extra = torch.randn(40) if bias else None
                found = op.mm_a16w8_kernel(x, w.data, w.scale, w.block, extra, constant=constant)
                assert found.dtype == BF16
                assert snr(found, exact(x, w, extra)) > 45
            assert [launch.name for launch in launches] == ["a16w8_tiles"] * 2
            assert [launch.options["W_CONSTANT"] for launch in launches] == [0, 1]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"m": 17}, "x has 17 rows, more than 16"),
        ({"contiguous": "N"}, "columns of w are not contiguous"),
        ({"out": FP32}, "out of float32"),
        ({"batch": (3,)}, "a batch of 3"),
        ({"n": 64, "k": 1 << 20}, "x of K=1048576 does not fit into shared memory"),
    ],
)
def test_what_another_kernel_takes(given: dict[str, Any], reason: str) -> None:
    found = accepts(unwritten(**({"m": 4} | given)))
    assert found is not None
    assert reason in found


def test_k_of_pieces_of_x() -> None:
    whole = unwritten(4, k=6160)

    def first(k: int) -> WeightProduct:
        return with_parts(whole, x=whole.x[:, :k], data=whole.w.data[:k])

    assert accepts(first(6152)) is None
    assert accepts(first(6148)) == "K=6148 is no multiple of 8"


def test_one_row_by_short_columns_is_left_to_registers() -> None:
    assert "one row" in (untuned(unwritten(1, 6144, 2048)) or "")
    assert untuned(unwritten(1, 6144, 2048, constant=True)) is None
    assert untuned(unwritten(2, 6144, 2048)) is None


@pytest.mark.parametrize(
    ("m", "n", "k", "left"), [(8, 512, 128, True), (8, 4096, 112, True), (8, 4096, 128, False), (9, 512, 64, False)]
)
def test_no_more_than_a_stage_is_left_to_registers(m: int, n: int, k: int, left: bool) -> None:
    assert ("no more than a stage" in (untuned(unwritten(m, n, k)) or "")) == left
    assert untuned(unwritten(m, n, k, constant=True)) is None


def test_the_default_configuration() -> None:
    """At the shapes of decoding, what was the fastest on an H200 or close to it."""
    for (m, n, k, constant), name in {
        (1, 1536, 6144, True): "8x192 stages6 cluster8 resident1 held6 ready0",
        (16, 1536, 6144, True): "16x128 stages6 cluster8 resident2 late held4 ready2 over",
        (1, 6144, 192, True): "8x64 stages2 cluster1 resident2 held2 ready2",
        (16, 6144, 192, True): "16x192 stages2 cluster1 resident1 held2 ready2",
        (8, 6144, 384, True): "8x192 stages3 cluster1 resident1 held3 ready3",
        (16, 6144, 384, True): "16x192 stages3 cluster1 resident1 held3 ready3",
        (8, 6144, 768, True): "8x192 stages6 cluster1 resident1 held6 ready6",
        (16, 6144, 768, True): "16x128 stages2 cluster3 resident2 held2 ready2",
        (8, 3072, 1536, True): "8x128 stages6 cluster2 resident1 held6 ready6",
        (16, 1536, 768, True): "16x64 stages2 cluster3 resident2 late held2 ready0",
        (16, 2304, 768, True): "16x128 stages2 cluster3 resident2 late held2 ready0",
        (16, 6144, 1024, True): "16x128 stages2 cluster4 resident2 held1 ready1",
        (8, 16384, 1024, True): "8x64 stages4 cluster2 resident2 held2 ready2",
        (1, 2304, 6144, True): "8x128 stages6 cluster8 resident2 held4 ready0 over",
        (4, 4096, 4096, False): "8x128 stages5 cluster4 resident2 late",
        (8, 6144, 1536, True): "8x192 stages6 cluster2 resident1 held6 ready0",
        (8, 6144, 2048, True): "8x128 stages4 cluster4 resident2 held2 ready2 over",
        (16, 6144, 1536, True): "16x192 stages6 cluster2 resident1 late held4 ready2",
        (16, 6144, 2048, True): "16x192 stages8 cluster2 resident1 late held6 ready2 over",
        (16, 2304, 6144, True): "16x256 stages6 cluster8 resident1 late held3 ready0 over",
        (16, 2048, 2048, True): "16x128 stages2 cluster8 resident2 held2 ready2",
        (16, 4096, 4096, True): "16x128 stages3 cluster8 resident3 late",
        (4, 4096, 4096, True): "8x128 stages3 cluster8 resident3",
        (4, 4096, 14336, True): "8x128 stages4 cluster6 resident2",
        (4, 28672, 4096, True): "8x128 stages5 cluster4 resident2",
        (4, 1536, 6144, False): "8x128 stages5 cluster8 resident2 late",
        (4, 6144, 2048, False): "8x64 stages6 cluster2 resident3 late",
        (4, 6144, 1536, False): "8x64 stages6 cluster2 resident3 late",
        (4, 2304, 6144, False): "8x128 stages5 cluster6 resident2",
        (4, 2304, 3072, False): "8x64 stages4 cluster6 resident2 late",
        (4, 384, 6144, False): "8x64 stages3 cluster16 resident2 late held3 ready0",
        (4, 1536, 2048, False): "8x64 stages2 cluster8 resident2 late held2 ready0",
        (16, 2304, 6144, False): "16x128 stages4 cluster6 resident2",
        (16, 768, 6144, False): "16x64 stages6 cluster8 resident2 late",
        (16, 1024, 8192, False): "16x128 stages4 cluster8 resident2 late",
        (16, 768, 2048, False): "16x64 stages2 cluster8 resident2 late held2 ready0",
        (4, 1536, 3072, True): "8x192 stages4 cluster6 resident1 held4 ready4",
        (4, 768, 6144, True): "8x128 stages6 cluster8 resident1 held6 ready6",
        (4, 3072, 2048, True): "8x128 stages8 cluster2 resident1 held8 ready8",
        (4, 2304, 3072, True): "8x128 stages8 cluster3 resident1 held8 ready0",
        (1, 192, 6144, True): "8x64 stages3 cluster16 resident2 held3 ready3",
        (2, 576, 6144, True): "8x192 stages4 cluster12 resident1 held4 ready4",
        (16, 1536, 1536, True): "16x192 stages2 cluster6 resident1 held2 ready2",
        (16, 192, 6144, True): "16x64 stages3 cluster16 resident2 late held3 ready3",
        (16, 768, 1536, True): "16x64 stages2 cluster6 resident2 late held2 ready0",
        (16, 3072, 1536, True): "16x128 stages2 cluster6 resident2 held2 ready2",
        (16, 1536, 3072, True): "16x128 stages4 cluster6 resident1 late held4 ready0",
        (16, 3072, 2048, True): "16x128 stages2 cluster8 resident2 held1 ready1",
        (4, 4096, 2048, False): "8x128 stages3 cluster4 resident3 late",
        (16, 2048, 4096, False): "16x128 stages3 cluster8 resident3 late",
        (4, 14336, 1024, False): "8x64 stages4 cluster1 resident4 late",
        (4, 7168, 2048, False): "8x64 stages4 cluster2 resident4 late",
        (16, 5120, 5120, False): "16x192 stages4 cluster4 resident1 late",
        (4, 4608, 4608, False): "8x128 stages5 cluster6 resident2 late",
    }.items():
        assert str(choose_config(WeightProblem(m, n, k, constant=constant))) == name
    assert choose_config(WeightProblem(16, 1536, 7168, constant=True)).CLUSTER == 14
    fewer = choose_config(WeightProblem(16, 1536, 7168, constant=True, cores=114))
    assert fewer.CLUSTER <= 8  # GPCs may be too small for 16
    assert choose_config(WeightProblem(4, 384, 6144, cores=114)).CLUSTER == 8


@pytest.mark.parametrize("rows", CLASSES[:3], ids=str)
@pytest.mark.parametrize(
    "size",
    [(512, 80), (512, 128), (2304, 6144), (6144, 192), (6144, 1536), (4096, 7168), (14336, 2048)],
)
def test_which_numbers_of_rows_have_one_configuration(rows: range, size: tuple[int, int]) -> None:
    for block in BLOCKS:
        for dtype in PARTS:
            for constant in (False, True):
                problems = [WeightProblem(m, *size, 1, block, dtype, constant=constant) for m in rows]
                assert len(set(map(choose_config, problems))) == 1


def launches(m: int) -> Iterator[CudaLaunch]:
    """The kernels of the shapes that are measured, by `m` rows, and of other types of some."""
    for k, n in (*DECODE, *SHORT, *LARGE, (3072, 3072)):
        yield plan(unwritten(m, n, k))
        yield plan(unwritten(m, n, k, constant=True))
        if (k, n) not in LARGE:
            for constant in (False, True):
                yield plan(unwritten(m, n, k, x=FP16, constant=constant))
    for k, n in CROWDED:
        for x in (BF16, FP16):
            yield plan(unwritten(m, n, k, x=x))
    for k, n in (*DECODE, *SHORT, *LARGE) if m in (1, 8) else ():
        for constant in (False, True):
            given = unwritten(m, n, k, x=BF16 if m == 1 else FP16, constant=constant)
            yield plan(replace(given, up=torch.empty_like(given.x)))
    if m in (1, 16):
        for block in BLOCKS:
            yield plan(unwritten(m, 2300, 6144, block, x=FP16, fp8=E5M2, bias=FP32, constant=True))


@needs_nvrtc
@pytest.mark.parametrize("m", [1, 4, 8, 16])
def test_no_configuration_spills_or_waits_for_each_product(m: int) -> None:
    for launch in {launch.kernel: launch for launch in launches(m)}.values():
        assert_well_compiled(launch.compile(verbose=True).log, launch.shared)
        assert launch.shared <= (227 << 10) // launch.options["RESIDENT"] - (1 << 10), launch.describe()


@needs_nvrtc
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_machine_code_waits_before_it_reads_what_may_be_written(m: int, constant: bool, tmp_path: Path) -> None:
    launch = plan(unwritten(m, bias=FP32, constant=constant))
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    waits = [i for i, text in enumerate(sass) if "ACQBULK" in text]
    assert len(waits) == (1 if constant else 2)  # the warp that copies a constant weight needs none
    before, after = sass[: waits[0]], sass[waits[0] :]
    of_x = r"\bLDG\.E\.128\.STRONG"
    assert not any(re.search(rf"\bSTG|{of_x}" if constant else r"\bSTG|UTMALDG|\bLDG\.", text) for text in before)
    assert any(re.search(of_x, text) for text in after)
    assert any("QGMMA" in text for text in after)
    assert not any("HGMMA" in text for text in sass)
    if constant:
        assert any(re.search(r"\bLDG\.", text) for text in before)  # scales


@pytest.mark.gpu
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_on_a_gpu(block: tuple[int, int], constant: bool, hopper: Target) -> None:
    """A tensor core keeps 14 bits of a sum: 1e-4 at most, of which 16 bits of output show little."""
    for k, n in (DECODE[0], (4096, 4096), (384, 40), (128, 1000), (192, 6144), (80, 300), (720, 4096)):
        for m in (1, 8, 13):
            for dtype, fp8 in ((BF16, E4M3), (FP16, E5M2)):
                x, w = on_gpu(m, n, k, block, x=dtype, fp8=fp8)
                bias = torch.randn(n, device="cuda")
                torch.cuda.synchronize()
                given = (x, w.data, w.scale, w.block, bias)
                wide = torch.full((m, n), torch.nan, device="cuda")
                plan(weight_product(x, w, wide, bias=bias, constant=constant)).run()
                expected = exact(x, w, bias)
                assert snr(wide, expected) > 75
                found = torch.ops.fp8fn.mm_a16w8(*given, None, constant)
                assert snr(found, expected) > (50 if dtype == BF16 else 65)


@pytest.mark.gpu
@pytest.mark.parametrize("config", WEIGHT_TILES, ids=str)
def test_every_division_of_the_work_on_a_gpu(config: A16W8TilesConfig, hopper: Target) -> None:
    for m, n, k in ((5, 80, 1152), (16, 272, 2048), (33, 1040, 1152)):
        for dtype in (BF16, FP16):
            x, w = on_gpu(m, n, k, (128, 128), x=dtype)
            out = torch.full((m, n), torch.nan, device="cuda")
            torch.cuda.synchronize()
            plan(weight_product(x, w, out, constant=True), config).run()
            assert snr(out, exact(x, w)) > 75


@pytest.mark.gpu
@pytest.mark.parametrize("config", WEIGHT_TILES_HELD, ids=str)
def test_a_weight_in_registers_on_a_gpu(config: A16W8TilesConfig, hopper: Target) -> None:
    k = config.STAGES * config.CLUSTER * 128
    for m, n, dtype in ((5, 80, BF16), (16, 1040, FP16), (33, 272, BF16)):
        x, w = on_gpu(m, n, k, (128, 128), x=dtype)
        held, shared = (torch.full((m, n), torch.nan, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        for out, each in ((held, config), (shared, replace(config, HELD=0, READY=0, X_OVER=False))):
            plan(weight_product(x, w, out, constant=True), each).run()
        assert snr(held, exact(x, w)) > 75
        assert torch.equal(held, shared)
        plan(weight_product(x, w, shared.fill_(torch.nan)), replace(config, READY=0)).run()
        assert torch.equal(held, shared)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_gate_on_a_gpu(dtype: torch.dtype, hopper: Target) -> None:
    """By an identity, so that the output is the rows as the kernel rounds them; up is 1."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.int16).view(dtype).view(8, 8192)
    gate = torch.where(every.isfinite(), every, 0).cuda()
    one = ScaledTensor(torch.eye(8192, device="cuda").to(E4M3).mT, torch.ones(64, 64, device="cuda"), (128, 128))
    found = torch.full((8, 8192), torch.nan, device="cuda")
    torch.cuda.synchronize()
    plan(weight_product(gate, one, found, up=torch.ones_like(gate))).run()
    wanted = torch.nn.functional.silu(gate.double()).to(dtype).double()
    # Values 2 ** 14 times smaller than the largest of their 128 lose bits, and the smallest are flushed to 0.
    largest = wanted.abs().unflatten(1, (-1, 128)).amax(-1).repeat_interleave(128, 1)
    lost = largest * 2.0**-20 + torch.finfo(dtype).tiny * 2**10
    assert ((found - wanted).abs() <= wanted.abs() * torch.finfo(dtype).eps + lost).all()
    assert (found == wanted)[wanted.abs() > 2**14 * lost].double().mean() > 0.98


@pytest.mark.gpu
def test_a_thousand_runs_give_the_same_bits(hopper: Target) -> None:
    for m in (1, 16):
        x, w = on_gpu(m, 2304, 6144, (128, 128))
        first = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block)
        for _ in range(1000):
            assert torch.equal(torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block), first)
    up, gate = torch.randn_like(x[:8]), x[:8]
    first = torch.ops.fp8fn.silu_mul_mm_a16w8(gate, up, w.data, w.scale, w.block)
    for _ in range(1000):
        assert torch.equal(torch.ops.fp8fn.silu_mul_mm_a16w8(gate, up, w.data, w.scale, w.block), first)
