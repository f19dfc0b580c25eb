"""Groups of rows that are split into FP8 parts, by experts in FP8: emulated on the CPU, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.ops.cuda.gemm import parts_a16w8
from fp8fn.ops.cuda.gemm.parts_a16w8 import accepts, configure_groups, untuned_groups
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.operands import PARTS
from fp8fn.ops.grouped_mm_a16w8 import GROUPED_MM_A16W8
from fp8fn.ops.layout import Block, empty_scale
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import SM90, SM100
from support.accuracy import snr
from support.compilers import assert_no_spills, needs_nvrtc
from support.cuda_emulator import emulate, needs_compiler
from support.gpu import FEW
from support.operands.groups import SIZES, ends, spans
from support.operands.weights import by_block, exact, operand
from support.products import weight_product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = ScaledMmConfig(MATH=1, BN=64)


def emulated(
    x: Tensor, w: ScaledTensor, offsets: Tensor, bias: Tensor | None = None, config: ScaledMmConfig | None = None
) -> Tensor:
    """Into memory that was 7 before; what lies behind it must be as it was."""
    shape = (x.shape[0], w.shape[-1])
    memory = torch.full((torch.Size(shape).numel() + 64,), 7.0)
    found = memory[:-64].view(shape)
    given = weight_product(x, w, found, FEW, offsets=offsets, bias=bias)
    assert accepts(given) is None
    for launch in parts_a16w8.plan(given, config or configure_groups(given)):
        emulate(launch)
    assert (memory[-64:] == 7.0).all()
    return found


def assert_each_is_right(
    found: Tensor, x: Tensor, w: ScaledTensor, offsets: Tensor, bias: Tensor | None = None
) -> None:
    for group, (start, stop) in enumerate(spans(offsets)):
        want = exact(x[start:stop], w[group], None if bias is None else bias[group])
        assert stop == start or snr(found[start:stop], want) > 100
    assert not found[offsets[-1] :].any()


@needs_compiler
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_of_groups(sizes: tuple[int, ...]) -> None:
    """Empty ones, rows in none, and more groups than tiles."""
    x, w, offsets = (
        torch.randn(sum(sizes) + 5, 136).bfloat16(),
        operand(136, 40, (128, 128), batch=(len(sizes),)),
        ends(sizes),
    )
    assert_each_is_right(emulated(x, w, offsets), x, w, offsets)


@needs_compiler
@by_block
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_blocks_types_and_biases(dtype: torch.dtype, block: Block) -> None:
    offsets = ends((0, 33, 1, 140))
    x, w, bias = torch.randn(180, 1032).to(dtype), operand(1032, 270, block, batch=(4,)), torch.randn(4, 270)
    for config in (None, ScaledMmConfig(MATH=2, BN=256, SLICES_N=2, DEPTH=1), ScaledMmConfig(MATH=2, BN=96)):
        if config is None or parts_a16w8.fits(config, PARTS[dtype]):
            assert_each_is_right(emulated(x, w, offsets, bias, config), x, w, offsets, bias)


@needs_compiler
def test_values_that_are_not_finite_stay_in_their_row() -> None:
    x, w, offsets = torch.randn(80, 264).bfloat16(), operand(264, 72, (128, 128), batch=(3,)), ends((7, 41, 20))
    x[3, 5], x[9, 200], x[75, 0] = torch.inf, torch.nan, torch.nan  # the last of these rows is in no group
    found = emulated(x, w, offsets)
    broken = ~found.isfinite().all(1)
    assert broken.nonzero().flatten().tolist() == [3, 9]
    clean = torch.where(torch.isfinite(x), x, 0)
    assert_each_is_right(torch.where(broken[:, None], emulated(clean, w, offsets), found), clean, w, offsets)


def experts(m: int, count: int, n: int, k: int, dtype: torch.dtype = BF16, block: Block = (128, 128)) -> WeightProduct:
    w = torch.empty(count, n, k, dtype=torch.float8_e4m3fn, device="meta").mT
    return WeightProduct(
        x=torch.empty(m, k, dtype=dtype, device="meta"), w=Quantized(w, empty_scale(w, block, "fp32"), block),
        out=torch.empty(m, n, dtype=dtype, device="meta"), target=SM90,
        offsets=torch.empty(count, dtype=torch.int32, device="meta"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("m", "count", "n", "k", "name"),
    [
        (8, 256, 4096, 7168, "cuda_parts"), (512, 256, 4096, 7168, "triton"), (4096, 256, 4096, 7168, "cuda_parts"),
        (8, 128, 2048, 768, "triton"), (2048, 128, 2048, 768, "cuda_parts"), (16384, 8, 28672, 4096, "cuda_parts"),
        (32, 8, 28672, 4096, "triton"), (1, 8, 4096, 14336, "cuda_parts"),
    ],
)  # fmt: skip
def test_the_rows_of_a_group_decide(m: int, count: int, n: int, k: int, name: str) -> None:
    choice = GROUPED_MM_A16W8.choose(experts(m, count, n, k))
    assert choice.name == name, choice.describe()


@pytest.mark.parametrize(("m", "rows"), [(1, 64), (8 * 128, 64), (8 * 128 + 1, 128), (1 << 17, 128)])
def test_the_tile_of_groups(m: int, rows: int) -> None:
    """By the mean, rounded up: one row is the mean of the one group that has it."""
    given = experts(m, 8, 4096, 4096)
    assert rows == configure_groups(given).BM
    assert configure_groups(given) in parts_a16w8.TILES


def test_offsets_are_read_before_the_rows_are_split() -> None:
    """All launches before the split have ended when it lets the next begin."""
    given = experts(4096, 8, 4096, 4096)
    split, multiply = parts_a16w8.plan(given, configure_groups(given))
    assert (split.overlaps, split.late, split.constant) == (True, True, ())
    assert (multiply.overlaps, multiply.constant) == (True, ("b", "b_scale", "offsets"))
    assert multiply.args["offsets"] is given.offsets
    assert "offsets" not in multiply.binds


@needs_compiler
def test_offsets_that_decrease_or_exceed_the_rows_cause_no_access_out_of_bounds() -> None:
    x, w = torch.randn(70, 136).bfloat16(), operand(136, 40, (128, 128), batch=(4,))
    found = emulated(x, w, torch.tensor([50, 20, 400, -3], dtype=torch.int32))
    assert_each_is_right(found, x, w, torch.tensor([50, 50, 70, 70], dtype=torch.int32))


def test_what_it_refuses() -> None:
    good = experts(4096, 8, 4096, 4096)
    assert accepts(good) is None
    assert untuned_groups(good) is None
    assert "bfloat16 alone" in str(untuned_groups(experts(4096, 8, 4096, 4096, FP16)))
    wide = WeightProduct(**{**vars(good), "out": good.out.float()})
    assert "bfloat16 alone" in str(untuned_groups(wide))
    for given, reason in (
        (experts(64, 8, 4096, 4100), "multiple of 8"),
        (experts(64, 8, 4096, 4096, FP32), "16 bits"),
        (experts(64, 8, 4096, 4096, block=(1, 128)), "blocks"),
    ):
        assert reason in str(accepts(given)), accepts(given)
    for changes, reason in (
        ({"target": SM100}, "sm100"), ({"bias": torch.empty(4096, 8, device="meta").mT}, "bias has strides"),
        ({"bias": torch.empty(4096, device="meta")}, "bias has shape"),
    ):  # fmt: skip
        given = WeightProduct(**{**vars(good), **changes})
        assert reason in str(accepts(given)), accepts(given)


@needs_nvrtc
@by_block
def test_no_tile_spills(block: Block) -> None:
    for rows in (16, 512):
        given = experts(8 * rows, 8, 4096, 4096, block=block)
        for launch in parts_a16w8.plan(given, configure_groups(given)):
            assert_no_spills(launch.resources(), launch.target)


@pytest.mark.gpu
@by_block
def test_products_on_a_gpu(block: Block, hopper: Any) -> None:
    """As near to the exact product as rounding to 16 bits, also in a CUDA graph, whose launches overlap."""
    for count, n, k, m in ((8, 4096, 4096, 2048), (64, 1536, 2048, 4096), (32, 4104, 2888, 30), (3, 512, 7168, 5)):
        x = torch.randn(m, k, device="cuda").bfloat16()
        sizes = torch.randint(0, 2 * m // count + 1, (count,)).cumsum(0).clamp(max=m)
        offsets = sizes.to("cuda", torch.int32)
        w = fp8fn.quantize(torch.randn(count, n, k, device="cuda").mT, block)
        assert (
            GROUPED_MM_A16W8.choose(
                weight_product(x, w, torch.empty(m, n, dtype=BF16, device="cuda"), hopper, offsets=offsets)
            ).name
            == "cuda_parts"
        )
        eager, graph, outputs = fp8fn.grouped_gemm(x, w, offsets), torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(4):
                outputs.append(fp8fn.grouped_gemm(x, w, offsets))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(found, eager) for found in outputs)
        for group, (start, stop) in enumerate(spans(offsets)):
            assert stop == start or snr(eager[start:stop], exact(x[start:stop], w[group])) > 54
        assert not eager[offsets[-1] :].any()
