"""9 to 128 rows by an FP8 weight, K shared by clusters: emulated on the CPU, as machine code, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from fp8fn.ops.cuda.gemm import splitk_a16w8
from fp8fn.ops.cuda.gemm.splitk_a16w8 import SplitKConfig, accepts, choose_config, untuned
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import SM100, Target
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import snr
from support.compilers import assert_well_compiled, instructions, needs_nvrtc
from support.configs import SPLITS
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.weights import BATCHES, BLOCKS, POISON, assert_right, by_block, exact, on_gpu, operand, operands
from support.products import entry_without_parts, planned, weight_product, with_parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
plan = partial(planned, splitk_a16w8)
LARGE = ((4096, 14336), (14336, 4096), (5120, 5120), (7168, 512), (8192, 8192))  # (K, N)


def emulated(
    x: Tensor, w: ScaledTensor, bias: Tensor | None = None, config: SplitKConfig | None = None, *,
    out: torch.dtype = FP32, constant: bool = False, backwards: bool = False,
) -> Tensor:  # fmt: skip
    """Into memory that was 7 before; what lies behind it must be as it was."""
    shape = (*(x.shape[:-2] or w.shape[:-2]), x.shape[-2], w.shape[-1])
    memory = torch.full((torch.Size(shape).numel() + 64,), 7.0, dtype=out)
    found = memory[:-64].view(shape)
    given = weight_product(x, w, found, bias=bias, constant=constant)
    assert accepts(given) is None
    emulate(plan(given, config), backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


def depth(config: SplitKConfig, k: int) -> int:
    """A ragged K for a configuration whose parts are in flight as a whole (`HELD`), `k` for another."""
    return config.STAGES * config.CLUSTER * 128 - 112 if config.HELD else k


@needs_compiler
@pytest.mark.parametrize("config", SPLITS, ids=str)
def test_every_division_of_the_work(config: SplitKConfig) -> None:
    """Blocks along K with more and with less, stages filled anew, N and K ragged, rows in several tiles."""
    for x_dtype, fp8, block in ((BF16, E4M3, (128, 128)), (FP16, E5M2, (128, 1)), (BF16, E5M2, (-1, 1))):
        m, n, k = min(config.ROWS + 5, 128), 70, depth(config, 1160)
        x, w = torch.randn(m, k).to(x_dtype), operand(k, n, block, dtype=fp8)
        found = emulated(x, w, config=config)
        assert_right(found, x, w)
        assert torch.equal(emulated(x, w, config=config, constant=True, backwards=True), found)


@needs_compiler
@pytest.mark.parametrize("m", [17, 31, 32, 33, 64, 65, 127, 128])
def test_rows_have_the_same_bits_in_any_number_of_them(m: int) -> None:
    x, w = torch.randn(128, 768).bfloat16(), operand(768, 72, (128, 128))
    for config in (SplitKConfig(32, 4, 2, 3), SplitKConfig(64, 4, 3, 2), SplitKConfig(32, 4, 3, 2, HELD=3)):
        assert torch.equal(emulated(x[:m], w, config=config), emulated(x, w, config=config)[:m])
    assert_right(emulated(x[:m], w), x[:m], w)


@needs_compiler
@by_block
@pytest.mark.parametrize("n", [1, 3, 16, 63, 65, 130])
def test_ragged_shapes(n: int, block: Block) -> None:
    for k in (8, 136, 640, 1032):
        x, w = torch.randn(20, k).half(), operand(k, n, block)
        bias = torch.randn(n)
        assert_right(emulated(x, w, bias, constant=k > 640), x, w, bias)


@needs_compiler
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
def test_outputs_and_biases(out: torch.dtype) -> None:
    """Each output is the sum rounded once."""
    x, w = torch.randn(18, 704).bfloat16(), operand(704, 70, (128, 128))
    for config in (SplitKConfig(32, 4, 2, 3), SplitKConfig(32, 4, 3), SplitKConfig(16, 4, 2, 3, HELD=2)):
        for bias in (None, torch.randn(70), torch.randn(140).bfloat16()[::2], torch.randn(70).half()):
            wide, found = (emulated(x, w, bias, config, out=dtype) for dtype in (FP32, out))
            assert_right(wide, x, w, bias)
            assert torch.equal(found, wide.to(out))


@needs_compiler
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batches(batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    (size,) = batch[0] or batch[1]
    ring, whole = SplitKConfig(32, 4, 2, 2), SplitKConfig(16, 4, 3, 1, HELD=3)
    for block, m, config in (((128, 128), 18, ring), ((-1, 1), 33, ring), ((128, 1), 18, whole)):
        x, w = torch.randn(*batch[0], m, 328).bfloat16(), operand(328, 40, block, batch=batch[1])
        for bias in (None, torch.randn(40), torch.randn(size, 40).half(), torch.randn(size, 1, 40)):
            for view in (x, x.movedim(0, -2).contiguous().movedim(-2, 0)):
                assert_right(emulated(view, w, bias, config), x, w, bias)


@needs_compiler
@by_block
def test_what_is_not_finite_stays_in_its_row_and_column(block: Block) -> None:
    for fp8 in (E4M3, E5M2):
        x, w = torch.randn(40, 648).bfloat16(), operand(648, 140, block, dtype=fp8)
        x[3, 647], x[38, 0] = torch.nan, torch.inf
        w.data.view(torch.uint8)[647, 130] = POISON[fp8]
        for config in (SplitKConfig(64, 4, 3, 2), SplitKConfig(32, 4, 3, 2, HELD=3)):
            finite = emulated(x, w, config=config).isfinite()
            touched = torch.zeros_like(finite)
            touched[[3, 38]] = touched[:, 130:131] = True
            assert torch.equal(~finite, touched)


@needs_compiler
def test_the_op_takes_it_and_keeps_its_call() -> None:
    for batch, bias in (((), torch.randn(72)), ((2,), torch.randn(2, 72).bfloat16()), ((2,), None)):
        with hopper_on_cpu() as launches:
            for _ in range(2):  # the second call plans nothing
                x, w = torch.randn(*batch, 20, 704).bfloat16(), operand(704, 72, (128, 128), batch=batch)
                found = op.mm_a16w8_kernel(x, w.data, w.scale, w.block, bias, constant=True)
                assert snr(found, exact(x, w, bias)) > 45
            assert [launch.name for launch in launches] == ["splitk_a16w8"]


def test_what_is_refused() -> None:
    def refusal(change: dict[str, Any], **kwargs: Any) -> str | None:
        return accepts(with_parts(operands(32, **kwargs), **change))

    assert refusal({}) is None
    for change, kwargs, message in (
        ({"target": SM100}, {}, "sm100 is not sm90"),
        ({}, {"x": FP32}, "x has dtype torch.float32"),
        ({}, {"block": (1, -1)}, r"blocks of \(1, -1\)"),
        ({}, {"contiguous": "N"}, "w.mT "),
        ({"x": torch.empty(32, 6148, dtype=BF16, device="meta")[:, :6144]}, {}, "x has a stride of 12296 bytes"),
        ({}, {"k": 1 << 24, "block": (128, 1)}, "the scales of K=16777216 do not fit into shared memory"),
    ):
        assert re.search(message, refusal(change, **kwargs) or ""), message  # type: ignore[arg-type]
    assert "129 rows a matrix" in (accepts(operands(129)) or "")


def test_the_default_configuration() -> None:
    """The fastest on an H200, or close to it: in chains of products, and rings of 64 rows behind other kernels."""
    for (m, n, k, constant), name in {
        (32, 2304, 6144, True): "32x64 stages3 cluster8 resident3",
        (32, 6144, 2048, False): "32x64 stages3 cluster3 resident3 late",
        (32, 6144, 1536, True): "32x64 stages6 cluster2 resident2 held5",
        (32, 768, 2048, True): "16x64 stages2 cluster8 resident3 held2",
        (32, 14336, 4096, True): "32x64 stages7 cluster1 resident2 late",
        (32, 1536, 6144, False): "32x64 stages6 cluster4 resident2 late",
        (64, 2304, 6144, True): "64x64 stages3 cluster6 resident2",
        (64, 2048, 1024, True): "32x64 stages4 cluster2 resident2 late held4",
        (128, 2304, 6144, True): "64x64 stages3 cluster3 resident2",
        (64, 1536, 6144, True): "64x64 stages4 cluster4 resident2 late",
        (64, 6144, 512, True): "64x64 stages4 cluster1 resident2 late held4",
        (64, 8192, 8192, True): "64x64 stages4 cluster2 resident2",
        (64, 4096, 4096, True): "64x64 stages4 cluster2 resident2 late",
        (64, 4096, 14336, False): "64x64 stages4 cluster2 resident2 late",
        (40, 3584, 3584, True): "64x64 stages4 cluster2 resident2 late",
        (40, 3584, 18944, True): "64x64 stages4 cluster4 resident2",
        (64, 1024, 4096, True): "64x64 stages3 cluster6 resident2 late",
        (64, 2048, 2048, True): "32x64 stages6 cluster2 resident2 late",
        (64, 6144, 4096, True): "64x64 stages4 cluster2 resident2",
        (96, 2048, 2048, False): "64x64 stages4 cluster2 resident2 late",
        (96, 288, 6144, True): "32x64 stages6 cluster8 resident2 late held5",
        (128, 1536, 2048, True): "64x64 stages4 cluster2 resident2 late",
        (128, 2048, 384, True): "32x64 stages3 cluster1 resident2 late held3",
        (128, 2304, 1024, True): "64x64 stages4 cluster1 resident2 late",
        (64, 2304, 1024, True): "32x64 stages4 cluster2 resident2 late held4",
        (96, 768, 768, True): "32x64 stages6 cluster1 resident2 held5",
        (128, 4096, 4096, True): "64x64 stages4 cluster1 resident2 late",
        (16, 1536, 768, True): "16x64 stages2 cluster3 resident2 held2",
        (16, 6144, 192, True): "16x128 stages2 cluster1 resident1 held2",
        (16, 384, 6144, True): "16x64 stages4 cluster12 resident2 held4",
        (16, 768, 1536, False): "16x64 stages2 cluster6 resident2 late held2",
        (9, 6144, 768, True): "16x128 stages6 cluster1 resident1 held6",
        (32, 1536, 768, True): "16x64 stages2 cluster3 resident3 held2",
        (32, 2304, 3072, True): "32x64 stages4 cluster6 resident2 held4",
        (32, 768, 1536, False): "16x64 stages2 cluster6 resident3 late held2",
        (64, 2304, 1536, True): "32x64 stages6 cluster2 resident2 late held5",
        (64, 6144, 256, True): "32x64 stages2 cluster1 resident2 held2",
        (128, 1536, 1536, True): "32x64 stages6 cluster2 resident2 late held5",
        (32, 192, 14336, True): "16x64 stages7 cluster16 resident2 held6",
    }.items():
        assert str(choose_config(WeightProblem(m, n, k, constant=constant))) == name
    for k, n in (*DECODE, *LARGE):
        for m in (17, 64, 128):
            for block in BLOCKS:
                chosen = choose_config(WeightProblem(m, n, k, 4, block))
                assert chosen.shared(k, block) <= (227 << 10) // chosen.RESIDENT - (1 << 10)
                assert (1 if chosen.HELD else 2) <= chosen.STAGES
                assert max(1, k // (128 if chosen.HELD else 256)) >= chosen.CLUSTER


@needs_nvrtc
def test_which_products_it_serves() -> None:
    """Where rows are not split: more than 16, or more than 8 in a batch or by a small weight, unless larger blocks have
    enough tiles; as timed on an H200."""

    def entry(m: int, n: int, k: int, *batch: int, **kwargs: Any) -> str:
        return entry_without_parts(operands(m, n, k, batch=batch, **kwargs))

    few, many, tiles, split = "gemv_a16w8", "mm_a16w8", "a16w8_tiles", "splitk_a16w8"
    assert [entry(m, 2304, 6144) for m in (16, 17, 64, 128, 129)] == [tiles, split, split, split, many]
    assert [entry(m, 1536, 6144) for m in (32, 64, 256)] == [split, split, many]
    assert [entry(m, 6144, 2048) for m in (32, 33, 64, 128)] == [split, split, split, many]
    assert [entry(m, 256, 512) for m in (32, 33)] == [split] * 2
    assert [entry(m, 6144, 1536) for m in (32, 64, 65)] == [split, split, many]
    assert [entry(m, 7168, k) for m in (32, 64) for k in (512, 2048, 6144)] == [split] * 3 + [split, many, split]
    assert [entry(m, 2048, k) for m in (17, 128) for k in (128, 256, 640)] == [split] * 3 + [many, split, split]
    assert [entry(m, 1536, 768) for m in (8, 9, 16, 32)] == [tiles, split, split, split]
    assert [entry(m, 14336, 4096) for m in (32, 33)] == [split, many]
    assert entry(32, 28672, 4096) == many
    assert [entry(m, 512, 1024, 8) for m in (8, 9, 17)] == [few, split, split]
    assert [entry(m, 128, 512, 64) for m in (8, 16, 64, 128)] == [few, split, split, many]
    assert [entry(m, 128, 512, 16) for m in (8, 9, 128)] == [few, split, split]
    assert [entry(m, 512, 1024, 64) for m in (16, 17)] == [few, many]
    assert entry(32, 2300, 6144) == entry(32, 2300, 256) == split  # rows of the output are no multiple of 16 bytes
    assert entry(32, 2304, 6144, contiguous="N") == few
    assert untuned(operands(32, 8192, 120, batch=(8,))) == "K=120 is one stage"
    assert untuned(operands(8, 2304, 6144)) == "M=8 is few rows"
    assert untuned(operands(32, 28672, 4096)) == "448 tiles of 64 columns keep most multiprocessors busy"


def launches() -> Iterator[CudaLaunch]:
    for i, (k, n) in enumerate((*DECODE, *LARGE)):
        for m in (16, 32, 64, 128):
            yield plan(operands(m, n, k, constant=i % 2 == 0))
    for m in (32, 64):
        for block in BLOCKS:
            yield plan(operands(m, 2300, 6144, block, x=FP16, fp8=E5M2, bias=FP32))


@needs_nvrtc
def test_no_configuration_spills_or_waits_for_each_product() -> None:
    for launch in {launch.kernel: launch for launch in launches()}.values():
        assert_well_compiled(launch.compile(verbose=True).log, launch.shared)


@needs_nvrtc
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("m", [32, 64])
def test_machine_code_waits_before_it_reads_what_may_be_written(m: int, constant: bool, tmp_path: Path) -> None:
    launch = plan(operands(m, bias=FP32, constant=constant))
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    multiplying, copying = [i for i, text in enumerate(sass) if "ACQBULK" in text]  # those who wait

    def count(pattern: str, start: int, stop: int | None) -> int:
        return sum(re.search(pattern, text) is not None for text in sass[start:stop])

    assert (count(r"\bLDG\.", 0, multiplying) > 0) is constant  # scales
    assert count(r"\bSTG|UTMALDG", 0, multiplying) == 0
    assert count(r"\bLDG\.", multiplying, copying) > 0  # the bias
    assert (count("UTMALDG", multiplying, copying) > 0) is constant
    assert count("UTMALDG", copying, None) > 0
    assert count(f"HGMMA.64x{m}x16.F32.BF16", 0, None) == 16
    assert not any("QGMMA" in text for text in sass)


@needs_nvrtc
@pytest.mark.parametrize("constant", [False, True])
def test_machine_code_of_a_whole_part_has_a_constant_weight_widened_before_it_waits(
    constant: bool, tmp_path: Path
) -> None:
    launch = plan(operands(16, 1536, 768, bias=FP32, constant=constant), SplitKConfig(16, 4, 3, 2, HELD=3))
    sass = [text for _, text in instructions(launch.compile().cubin, tmp_path)]
    (waiting,) = [i for i, text in enumerate(sass) if "ACQBULK" in text]  # no warp that copies waits by itself
    for pattern in (r"UTMALDG", r"\bLDG\.", "F2FP.F16.E4M3"):  # the weight, its scales, its values widened
        before = [re.search(pattern, text) is not None for text in sass[:waiting]]
        assert any(before) is constant, pattern
        assert constant or any(re.search(pattern, text) for text in sass[waiting:]), pattern
    assert not any(re.search(r"\bSTG|GMMA", text) for text in sass[:waiting])
    assert any("UTMALDG" in text for text in sass[waiting:])  # x
    assert sum("HGMMA.64x16x16.F32.BF16" in text for text in sass) == 3 * 8


@pytest.mark.gpu
@by_block
@pytest.mark.parametrize("m", [9, 16, 17, 32, 63, 100, 128])
def test_values_on_a_gpu(m: int, block: Block, hopper: Target) -> None:
    for k, n in (*DECODE, *LARGE):
        x_dtype, fp8 = (BF16, E4M3) if n % 256 else (FP16, E5M2)
        x, w = on_gpu(m, n, k, block, x=x_dtype, fp8=fp8)
        expected = exact(x, w)
        for constant in (False, True):
            out = torch.full((m, n), torch.nan, device="cuda")
            plan(weight_product(x, w, out, hopper, constant=constant)).run()
            assert snr(out, expected) > 100
        found = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block)
        assert snr(found, expected) > (45 if x_dtype == BF16 else 60)


@pytest.mark.gpu
@by_block
@pytest.mark.parametrize("config", SPLITS, ids=str)
def test_every_division_of_the_work_on_a_gpu(config: SplitKConfig, block: Block, hopper: Target) -> None:
    for m, n, k, batch in ((config.ROWS + 5, config.BN + 6, 2064, ()), (20, 200, 4096, (3,)), (3, 1000, 1168, ())):
        x, w = on_gpu(m, n, depth(config, k), block, batch=batch)
        bias = torch.randn(n, device="cuda")
        for constant in (False, True):
            out = torch.full((*batch, m, n), torch.nan, device="cuda")
            plan(weight_product(x, w, out, hopper, bias=bias, constant=constant), config).run()
            assert snr(out, exact(x, w, bias)) > 100


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(17, 2304, 6144), (64, 2304, 6144), (128, 2304, 6144), (16, 1536, 2048)])
def test_a_thousand_runs_and_a_graph_give_one_bit_pattern(m: int, n: int, k: int, hopper: Target) -> None:
    x, w = on_gpu(m, n, k, (128, 128))

    def run() -> Tensor:
        found: Tensor = torch.ops.fp8fn.mm_a16w8(x, w.data, w.scale, w.block, None, None, True)
        return found

    first, differing = run(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (run() != first).sum()
    assert int(differing) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(10):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, run())
