"""9 rows or more split into FP8 parts, by an FP8 weight: emulated on the CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.ops import mm_a16w8 as op
from fp8fn.ops.cuda.gemm import parts_a16w8
from fp8fn.ops.cuda.gemm.parts_a16w8 import TILES, accepts, accepts_beside, choose_config, untuned
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.operands import PARTS
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.launch import described
from fp8fn.ops.layout import WHOLE, Block
from fp8fn.ops.operands import Beside, WeightProduct
from fp8fn.ops.targets import SM100
from fp8fn.ops.tuning.weight import WeightProblem
from support.accuracy import snr
from support.compilers import assert_no_spills, needs_nvrtc
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.operands.weights import assert_right, by_block, exact, on_gpu, operand, operands
from support.products import quantized, weight_product, with_parts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL = ScaledMmConfig(MATH=1, BN=64)


def emulated(
    x: Tensor, w: ScaledTensor, bias: Tensor | None = None, config: ScaledMmConfig | None = None, *,
    out: torch.dtype = FP32, backwards: bool = False,
) -> Tensor:  # fmt: skip
    """Into memory that was 7 before; what lies behind it must be as it was."""
    shape = (x.shape[-2], w.shape[-1])
    memory = torch.full((torch.Size(shape).numel() + 64,), 7.0, dtype=out)
    found = memory[:-64].view(shape)
    given = weight_product(x, w, found, bias=bias)
    assert accepts(given) is None
    for launch in parts_a16w8.plan(given, config or parts_a16w8.configure(given)):
        emulate(launch, backwards=backwards)
    assert (memory[-64:] == 7.0).all()
    return found


def parts_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The parts in float64, and the scales of each 128 columns, as the kernel leaves them."""
    w = operand(k=x.shape[1], n=16, block=(128, 128))
    split, _ = parts_a16w8.plan(weight_product(x, w, out=torch.empty(len(x), 16)), config=SMALL)
    emulate(split)
    data, scale = split.args["data"], split.args["scale"]
    assert isinstance(data, Tensor)
    assert isinstance(scale, Tensor)
    return data[:, : len(x)].double(), scale[: len(x)].double()


def joined(x: Tensor) -> Tensor:
    """The rows that the parts add up to."""
    data, scale = parts_of(x)
    return data.sum(0) * scale.repeat_interleave(128, 1)[:, : x.shape[1]]


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("columns", [8, 120, 136, 384])
def test_parts_add_up_to_the_rows(dtype: torch.dtype, columns: int) -> None:
    """Exactly, as long as no value is smaller than 2**-7 of the largest in its block."""
    x = ((1 + torch.rand(5, columns)) * torch.exp2(torch.randint(-3, 4, (5, columns)))).to(dtype)
    x = torch.where(torch.rand(5, columns) < 0.5, -x, x)
    for size in (1.0, 2.0**-9, 2.0**9):
        assert torch.equal(joined(x * size), (x * size).double())


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_small_values_are_off_by_a_part_of_the_largest(dtype: torch.dtype) -> None:
    x = (torch.randn(8, 512) * torch.exp2(torch.randint(-14, 1, (8, 512)))).to(dtype)
    largest = x.double().abs().unflatten(1, (4, 128)).amax(2).repeat_interleave(128, 1)
    assert ((joined(x) - x.double()).abs() <= 2.0**-17 * largest).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_zeros_subnormals_and_the_largest_values(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.zeros(5, 256)
    x[1], x[2], x[3, 7], x[4, ::2] = info.smallest_normal / 8, info.max, info.max, -info.max
    x = x.to(dtype)
    assert torch.equal(joined(x), x.double())


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_an_inf_stays_an_inf_in_its_row(dtype: torch.dtype) -> None:
    x, w = torch.randn(20, 408).to(dtype), operand(408, 70, (128, 128))
    x[3, 5], x[7, 300], x[9, 407] = torch.inf, -torch.inf, torch.nan
    found, expected = emulated(x, w), exact(x, w)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found.sign()[[3, 7]].nan_to_num(), expected.float().sign()[[3, 7]].nan_to_num())
    finite = expected.isfinite()
    assert snr(found[finite], expected[finite]) > 100


@needs_compiler
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: ScaledMmConfig) -> None:
    """Rows in several tiles, N and K ragged; alone, and by blocks that share K."""
    n = tile.BN + 22
    for dtype, fp8, block in ((BF16, E4M3, (128, 128)), (FP16, E5M2, (-1, 1)), (BF16, E5M2, (128, 1))):
        if not parts_a16w8.fits(tile, PARTS[dtype]):
            continue
        for split in (1, 2) if parts_a16w8.shares_k(tile) else (1,):
            x, w = torch.randn(tile.BM + 5, 1032).to(dtype), operand(1032, n, block, dtype=fp8)
            config = replace(tile, SPLIT=split)
            found = emulated(x, w, config=config)
            assert_right(found, x, w)
            assert torch.equal(emulated(x, w, config=config, backwards=True), found)


@needs_compiler
@by_block
@pytest.mark.parametrize("m", [1, 17, 63, 64, 65, 127, 129, 200])
def test_ragged_shapes(m: int, block: Block) -> None:
    for n, k in ((1, 8), (3, 136), (16, 640), (63, 1032), (130, 264)):
        x, w = torch.randn(m, k).bfloat16(), operand(k, n, block)
        bias = torch.randn(n)
        assert_right(emulated(x, w, bias), x, w, bias)


@needs_compiler
@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
def test_outputs_and_biases(out: torch.dtype) -> None:
    """Each output is the sum rounded once."""
    x, w = torch.randn(18, 704).bfloat16(), operand(704, 70, (128, 128))
    for config in (SMALL, ScaledMmConfig(MATH=1, BN=64, SPLIT=2)):
        for bias in (None, torch.randn(70), torch.randn(70).bfloat16()):
            wide, found = (emulated(x, w, bias, config, out=dtype) for dtype in (FP32, out))
            assert_right(wide, x, w, bias)
            assert torch.equal(found, wide.to(out))


@needs_compiler
def test_views_of_rows_and_weights() -> None:
    wide = torch.randn(40, 1040).bfloat16()
    w = operand(512, 70, (128, 128))
    for x in (wide[:, 8:520], wide[::2, :512], wide[4:]):
        given = x[:, :512]
        assert_right(emulated(given, w), given, w)


@needs_compiler
@by_block
@pytest.mark.parametrize("widths", [(1, 300), (136, 64, 136), (72, 9, 300)], ids=str)
def test_siblings_are_products_alone(widths: tuple[int, ...], block: Block) -> None:
    """With the same bits; also where two have one weight, and where rows are stored by 16 bytes or by pairs."""
    k, config = 264, ScaledMmConfig(MATH=1, BN=64, SPLIT=1 if len(widths) == 2 else 2)
    x, weights = torch.randn(70, k).bfloat16(), [with_own_strides(operand(k, n, block)) for n in widths]
    weights[-1] = weights[0] if widths[-1] == widths[0] else weights[-1]
    for dtype in (None, FP32):
        biases = [None if dtype is None else torch.randn(n) for n in widths]
        memories = [torch.full((70 * n + 128,), 7.0, dtype=BF16) for n in widths]
        outs = [memory[64:-64].view(70, -1) for memory in memories]
        _, *beside = map(Beside, map(quantized, weights), biases, outs)
        given = weight_product(x, weights[0], outs[0], bias=biases[0], beside=tuple(beside))
        assert accepts_beside(given) is None
        for launch in parts_a16w8.plan(given, config):
            emulate(launch)
        for w, bias, out, memory in zip(weights, biases, outs, memories, strict=True):
            assert torch.equal(out, emulated(x, w, bias, config, out=BF16))
            assert (memory[:64] == 7.0).all()
            assert (memory[-64:] == 7.0).all()


def with_own_strides(w: ScaledTensor) -> ScaledTensor:
    """The scales of 128 x 128 blocks lie as those of a layer's weight, whose strides do not depend on N."""
    return ScaledTensor(w.data, w.scale.mT.contiguous().mT, w.block) if w.block == (128, 128) else w


def planned_launches(product: WeightProduct) -> tuple[CudaLaunch, CudaLaunch]:
    return parts_a16w8.plan(product, parts_a16w8.configure(product))


def test_what_it_refuses() -> None:
    good = operands(64)
    assert accepts(good) is None
    odd = operands(64, k=6140)
    for given, reason in (
        (operands(64, x=FP32), "16 bits"),
        (operands(64, batch=(2,)), "batch"),
        (operands(64, contiguous="N"), "columns of w are not contiguous"),
        (odd, "multiple of 8"),
        (with_parts(good, x=torch.empty(6144, 64, dtype=BF16, device="meta").mT), "stride"),
        (with_parts(good, bias=torch.empty(2 * good.n, dtype=BF16, device="meta")[::2]), "bias"),
        (with_parts(good, target=SM100), "sm100"),
        (operands((1 << 31) - 1024), "rows"),
        (operands(64, 8, k=1 << 26), "past the blocks"),  # 1024 elements a block
        (with_parts(good, x=torch.empty(64, 1 << 31, dtype=BF16, device="meta")[:, :6144]), "apart"),
        (operands(64, k=6152), "w.mT has a stride of 6152 bytes"),
    ):
        assert reason in str(accepts(given)), (reason, accepts(given))


def test_the_check_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any product is checked, also one of so many rows that the parts would take gigabytes."""
    x, w, devices = torch.randn(64, 4096).bfloat16(), operand(k=4096, n=16, block=(128, 128)), []
    given = weight_product(x, w, torch.empty(64, 16))
    empty = torch.empty
    monkeypatch.setattr(
        parts_a16w8.torch, "empty", lambda *size, **of: devices.append(of["device"]) or empty(*size, **of)
    )
    assert accepts(given) is None
    assert devices == ["meta", "meta"]


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (17, 4096, 4096), (64, 1024, 4096), (256, 8192, 8192), (512, 4096, 4096), (768, 4096, 14336), (9, 14336, 4096),
        (640, 8196, 8192),  # N is no multiple of 8
    ],
)  # fmt: skip
def test_the_op_takes_it(m: int, n: int, k: int) -> None:
    with hopper_on_cpu():
        choice = op.MM_A16W8.choose(operands(m, n, k))
    assert choice.name == "cuda_parts", choice.describe()


@pytest.mark.parametrize(
    ("m", "n", "k", "reason"),
    [
        (8, 14336, 4096, "few rows"), (16, 4096, 4096, "small"), (32, 512, 4096, "small"),
        (640, 8192, 8192, "the split rows take 143 µs, and tiles in 16 bits 112 µs, estimated"),
        (257, 8192, 8192, "estimated"), (769, 2048, 8192, "more than 768"), (769, 8196, 8192, "more than 768"),
    ],
)  # fmt: skip
def test_rows_for_which_another_is_faster(m: int, n: int, k: int, reason: str) -> None:
    assert reason in str(untuned(operands(m, n, k)))
    assert untuned(operands(64, x=FP16)) is None
    assert "float16" in str(untuned(operands(65, x=FP16)))
    assert "float32" in str(untuned(with_parts(operands(64), out=torch.empty(64, 2304, device="meta"))))
    assert "short" in str(untuned(operands(64, 8192, 1016)))


@pytest.mark.parametrize("constant", [False, True])
def test_the_weight_is_read_early_behind_a_split_that_begins_last(constant: bool) -> None:
    """All launches before the split have ended when it lets the next begin, whatever is said of the weight."""
    split, multiply = planned_launches(operands(64, constant=constant))
    assert (split.overlaps, split.late, split.constant) == (True, True, ())
    assert (multiply.overlaps, multiply.constant) == (True, ("b", "b_scale"))
    assert {multiply.binds[name] for name in multiply.constant} == {"w", "w_scale"}


def test_the_log_names_the_launch_that_multiplies() -> None:
    with hopper_on_cpu():
        choice, launches = op.MM_A16W8.loadable(operands(64))
    assert [launch.name for launch in launches] == ["split_rows", "scaled_mm"]
    assert described(launches) == launches[1].describe()
    assert f"({choice.describe()})" in described(launches)


def test_rows_of_one_class_have_one_configuration() -> None:
    """A row has the same bits, whatever the number of rows among 9 to 64."""
    for n, k in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 8192)):
        for dtype in (BF16, FP16):
            assert len({choose_config(WeightProblem(m, n, k, x_dtype=dtype)) for m in range(9, 65)}) == 1


@pytest.mark.parametrize("m", [9, 17, 64, 65, 128, 129, 256, 257, 512, 768])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_tile_of_a_problem(m: int, dtype: torch.dtype) -> None:
    """It fits, and is not half empty; every candidate is one that runs."""
    for n, k in ((8, 8), (4096, 4096), (28672, 8192), (512, 7168)):
        problem = WeightProblem(m, n, k, x_dtype=dtype)
        found = parts_a16w8.candidates(problem)
        assert found[0] == choose_config(problem)
        for config in found:
            assert parts_a16w8.fits(config, PARTS[dtype])
            assert config.BM <= 64 or 2 * m > config.BM
            assert all(isinstance(launch, CudaLaunch) for launch in parts_a16w8.plan(problem.product(), config))


@needs_nvrtc
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_no_tile_spills(dtype: torch.dtype) -> None:
    for tile in TILES:
        if parts_a16w8.fits(tile, PARTS[dtype]):
            for launch in parts_a16w8.plan(operands(tile.BM, x=dtype), tile):
                assert_no_spills(launch.resources(), launch.target)


@pytest.mark.gpu
@by_block
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_products_on_a_gpu(dtype: torch.dtype, block: Block, hopper: Any) -> None:
    """As near to the exact product as rounding to 16 bits; also in a CUDA graph, whose launches overlap."""
    bars = {BF16: 54.0, FP16: 62.0}
    for m, n, k in ((17, 4096, 4096), (64, 1024, 4096), (100, 2304, 6144), (300, 3608, 1040), (768, 4096, 14336)):
        x, w = on_gpu(m, n, k, block, x=dtype)
        given = weight_product(x, w, torch.empty(m, n, dtype=dtype, device="cuda"), hopper)
        by_tiles = m == 768 and block[0] == WHOLE  # which are estimated to be faster
        by_parts = m <= 64 or (dtype == BF16 and not by_tiles)
        assert (op.MM_A16W8.choose(given).name == "cuda_parts") == by_parts

        def run_parts(given: WeightProduct = given) -> Tensor:
            out = torch.empty_like(given.out)
            for launch in planned_launches(replace(given, out=out)):
                launch.run()
            return out

        of_op = partial(torch.ops.fp8fn.mm_a16w8, x, w.data, w.scale, block)
        for run in (of_op,) if by_parts else (of_op, run_parts):
            graph, outputs = torch.cuda.CUDAGraph(), []
            eager = run()
            with torch.cuda.graph(graph):
                for _ in range(8):
                    outputs.append(run())
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert snr(eager, exact(x, w)) > bars[dtype]
            assert all(torch.equal(found, eager) for found in outputs)
