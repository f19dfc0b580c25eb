"""Products of groups of rows by TMA on Blackwell: interpreted, which products they take, and their machine code."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference
from fp8fn.ops.layout import Block, empty_data, empty_scale, turned
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.scaled_grouped_mm import SCALED_GROUPED_MM
from fp8fn.ops.targets import GFX950, SM89, SM90, SM100, SM120, Chip, Target
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.grouped_tma import accepts, candidates, plan_grouped_tma
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scaled_grouped_mm import plan_scaled_grouped_mm
from fp8fn.ops.tuning import grouped_mm_table
from fp8fn.ops.tuning.grouped_mm_table import GroupsProblem
from fp8fn.ops.tuning.measured import candidate_name
from support.compilers import assert_no_spills, instructions, skip_frames_of_calls

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
BY_TMA: Final = (SM100, SM120)
each_target = pytest.mark.parametrize("target", BY_TMA, ids=lambda target: target.name)

Pair = tuple[Block, Block, str]
MX: Final[Pair] = ((1, 32), (32, 1), "e8m0")
PAIRS: Final[tuple[Pair, ...]] = (
    ((1, 128), (128, 128), "fp32"), ((1, 128), (128, 1), "fp32"), ((1, 128), (-1, 1), "pow2"),
    ((1, -1), (-1, 1), "fp32"), ((1, -1), (128, 128), "fp32"), ((-1, -1), (-1, -1), "fp32"), MX,
)  # fmt: skip
# Empty groups, one of one row, borders inside of tiles, and rows of no group.
SIZES, REST = (0, 1, 0, 140, 255, 128, 3), 10
CONFIG: Final = GemmConfig(128, 128, 8, 3, GROUP=2)


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)


def operands(
    pair: Pair, sizes: tuple[int, ...] = SIZES, rest: int = REST, n: int = 150, k: int = 300,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
) -> ScaledProduct:  # fmt: skip
    """Groups of rows of random values, with a bias."""
    a_block, b_block, scale = pair
    x = empty_data(torch.empty(sum(sizes) + rest, k), a_block, dtypes[0])
    data, a_scale = reference.quantize(torch.randn(x.shape), a_block, dtypes[0], scale)
    b = reference.quantize(torch.randn(len(sizes), n, k).mT, b_block, dtypes[1], scale)
    return ScaledProduct(
        a=Quantized(data, a_scale, a_block), b=Quantized(*b, b_block), offsets=ends_of(sizes),
        bias=torch.randn(len(sizes), n), out=torch.full((len(x), n), 7.0), target=SM100,
    )  # fmt: skip


def counted(
    pair: Pair, counts: tuple[int, ...], room: int, *, zeros: bool, n: int = 150, k: int = 300
) -> ScaledProduct:
    """The first rows of each expert's matrix; those past a count are NaN, where a row has scales of its own."""
    a_block, b_block, scale = pair
    x = torch.randn(len(counts), room, k)
    for matrix, count in zip(x, counts, strict=True):
        matrix[max(count, 0) :] = torch.nan if a_block[0] == 1 else 0.0
    a, b = (
        reference.quantize(values, block, E4M3, scale)
        for values, block in ((x, a_block), (torch.randn(len(counts), n, k).mT, b_block))
    )
    return ScaledProduct(
        a=Quantized(*a, a_block), b=Quantized(*b, b_block), counts=torch.tensor(counts, dtype=torch.int32),
        bias=torch.randn(len(counts), n), zeros=zeros, out=torch.full((len(counts), room, n), torch.nan), target=SM100,
    )  # fmt: skip


def interpreted(
    product: ScaledProduct, target: Target, plan: Any = plan_grouped_tma, config: GemmConfig = CONFIG
) -> Tensor:
    out = product.out.clone()
    for launch in plan(replace(product, out=out, target=target), config):
        launch.interpret()
    return out


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    difference = (found - wanted).nan_to_num().double()
    assert difference.norm() <= 1e-6 * wanted.nan_to_num().double().norm()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@each_target
def test_groups_of_rows(target: Target, pair: Pair) -> None:
    """As the reference, and but in MX, whose operands NumPy multiplies in another order, as the kernel by pointers."""
    product = operands(pair)
    found = interpreted(product, target)
    wanted = reference.scaled_grouped_mm(product.a, product.b, product.group_ends, product.bias, FP32)
    assert_near(found, wanted)
    assert not found[-REST:].any()
    by_pointers = interpreted(product, target, plan_scaled_grouped_mm)
    assert torch.equal(found, by_pointers) or (pair == MX and torch.allclose(found, by_pointers, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3], MX], ids=str)
@each_target
def test_counted_rows(target: Target, pair: Pair, zeros: bool) -> None:
    """Rows past a count become zeros; without `zeros` those of tiles without a row stay unwritten."""
    counts, room = (0, 1, 130, 128, 300, 260, -5), 260
    product = counted(pair, counts, room, zeros=zeros)
    found = interpreted(product, target)
    wanted = reference.scaled_masked_mm(product.a, product.b, product.counts, product.bias, FP32)  # type: ignore[arg-type]
    for group, count in enumerate(counts):
        rows = min(max(count, 0), room)
        written = room if zeros else min(-(-rows // 128) * 128, room)
        assert_near(found[group, :written], wanted[group, :written])
        assert not found[group, rows:written].any()
        assert found[group, written:].isnan().all()


@pytest.mark.parametrize("sizes", [(0, 0), (1,), (300,), (0, 300, 0), (3,) * 20, (127, 1, 128, 129)], ids=str)
@pytest.mark.parametrize("pair", [PAIRS[0], MX], ids=str)
def test_where_groups_end(pair: Pair, sizes: tuple[int, ...]) -> None:
    for rest in (0, 200):
        if not sum(sizes) + rest:
            continue
        product = operands(pair, sizes, rest, n=40, k=130)
        wanted = reference.scaled_grouped_mm(product.a, product.b, product.group_ends, product.bias, FP32)
        assert_near(interpreted(product, SM100), wanted)


@pytest.mark.parametrize("ends", [(50, 20, 90), (-5, 300, 60), (2**31 - 1, -(2**31), 7)], ids=str)
@pytest.mark.parametrize("pair", [PAIRS[0], MX], ids=str)
def test_offsets_that_are_none_read_nothing_outside(pair: Pair, ends: tuple[int, ...]) -> None:
    product = replace(operands(pair, (30, 30, 30), 10), offsets=torch.tensor(ends, dtype=torch.int32))
    assert interpreted(product, SM100).isfinite().all()


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3], MX], ids=str)
@each_target
def test_a_nan_stays_in_its_row_or_column(target: Target, pair: Pair) -> None:
    """In the first row of a group, whose neighbours share its tile's boxes, and in a column of one expert."""
    product = operands(pair)
    clean = interpreted(product, target)
    row, ends = sum(SIZES[:4]), product.group_ends.tolist()
    product.a.data.view(torch.uint8)[row, 299] = 0x7F
    product.b.data.view(torch.uint8)[3, 5, 17] = 0x7F
    found = interpreted(product, target)
    touched = torch.zeros(found.shape, dtype=torch.bool)
    touched[row] = True
    touched[ends[2] : ends[3], 17] = True
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


def test_nothing_of_rows_past_the_last_group_reaches_a_result() -> None:
    for pair in (PAIRS[0], PAIRS[3], MX):
        product = operands(pair)
        clean = interpreted(product, SM100)
        product.a.data.view(torch.uint8)[-REST:] = 0x7F
        product.a.scale[-REST:].view(torch.uint8 if pair == MX else torch.int32).fill_(-1 if pair != MX else 255)
        assert torch.equal(interpreted(product, SM100), clean)


@pytest.mark.parametrize("pair", PAIRS[:-1], ids=str)
def test_on_sm100_weights_may_lie_along_n(pair: Pair) -> None:
    """As the input gradient of experts in squares multiplies them; K ends within a tile, before the next expert."""
    product = operands(pair, n=144)
    b = turned(product.b.data, column_major=False)
    b.view(torch.uint8)[4, 0] = 0x7F  # the first line of the expert behind
    product.b.data.view(torch.uint8)[4, 0] = 0x7F
    along_n = replace(product, b=product.b._replace(data=b), target=SM100)
    launch = plan_grouped_tma(along_n, CONFIG)[-1]
    assert launch.constexprs["B_TURNED"] is True
    assert_near(interpreted(along_n, SM100), interpreted(product, SM100))


@each_target
def test_types_and_every_configuration(target: Target) -> None:
    for pair, dtypes in itertools.product((PAIRS[0], PAIRS[3], MX), ((E4M3, E5M2), (E5M2, E4M3))):
        product = replace(operands(pair, (150, 140), 0, n=270, dtypes=dtypes), target=target)
        wanted = reference.scaled_grouped_mm(product.a, product.b, product.group_ends, product.bias, FP32)
        for config in candidates(product):
            assert_near(interpreted(product, target, config=config), wanted)


def planned(
    target: Target, pair: Pair = PAIRS[0], m: int = 8192, n: int = 4096, k: int = 2048, *, along_n: bool = False,
    counts: bool = False, out: torch.dtype = BF16, bias: bool = False, groups: int = 8,
) -> ScaledProduct:  # fmt: skip
    """A product of groups, or with `counts` of `m` rows of each expert, of operands as the quantizers lay them out."""
    a_block, b_block, scale = pair
    x = torch.empty(*((groups, m) if counts else (m,)), k, device="meta")
    w, ends = torch.empty(groups, k, n, device="meta"), torch.empty(groups, dtype=torch.int32, device="meta")
    a = Quantized(empty_data(x, a_block, E4M3), empty_scale(x, a_block, scale), a_block)
    b = Quantized(empty_data(w, b_block, E4M3, not along_n), empty_scale(w, b_block, scale, not along_n), b_block)
    where: dict[str, Any] = {"counts": ends, "expected_rows": 1000} if counts else {"offsets": ends}
    return ScaledProduct(
        a=a, b=b, out=x.new_empty(*x.shape[:-1], n, dtype=out), bias=x.new_empty(groups, n) if bias else None,
        target=target, **where,
    )  # fmt: skip


def test_what_it_takes() -> None:
    """Hopper's and AMD's choices stay; on Blackwell few rows and views of odd strides do too."""
    for target, counts, pair in itertools.product((*BY_TMA, replace(SM100, arch=103)), (False, True), (PAIRS[0], MX)):
        product = planned(target, pair, counts=counts)
        choice = SCALED_GROUPED_MM.choose(product)
        assert choice.name == "triton_tma"
        launches = choice.plan(product)
        names = ["swizzle_scales"] * (pair == MX) + ["grouped_rows_tma"]
        assert [launch.name for launch in launches] == names
        assert launches[-1].binds.get("offsets") == ("counts" if counts else None)  # type: ignore[attr-defined]
    for target in (SM89, SM90, GFX950):
        assert accepts(planned(target)) == f"{target.name} is none of sm100, sm103, sm120"
        assert SCALED_GROUPED_MM.choose(planned(target)).name in ("cuda", "triton")
    few = planned(SM100, m=512)
    assert accepts(few) is None
    choice = SCALED_GROUPED_MM.choose(few)
    assert choice.name == "triton"
    assert "not triton_tma: a group has 64 rows in the mean, below 65" in choice.describe()
    assert SCALED_GROUPED_MM.choose(planned(SM100, m=513)).name == "triton_tma"
    assert accepts(planned(SM100, ((1, 32), (128, 128), "fp32"))) == (
        "blocks (1, 32) and (128, 128): a scale must hold for 128 or all elements along K"
    )
    assert accepts(planned(SM100, k=0)) == "K is 0"
    assert accepts(planned(SM100, m=0)) == accepts(planned(SM100, m=0, counts=True)) == "M is 0"
    assert accepts(planned(SM100, along_n=True)) is None
    for of in (planned(SM120, along_n=True), planned(SM100, MX, along_n=True)):
        assert accepts(of) == "b.mT has stride 4096 along its contiguous axis, not 1"
    shifted = planned(SM100, k=2048 + 16)
    shifted = replace(shifted, a=shifted.a._replace(data=shifted.a.data[:, 1:]))
    assert accepts(shifted) == "a starts at an address that is no multiple of 16"
    short = planned(SM100, MX, m=1024, n=512, k=512)
    choice = SCALED_GROUPED_MM.choose(short)
    assert choice.name == "triton"
    assert "4 K tiles a multiprocessor are too few for a launch that swizzles the scales" in choice.describe()
    far = "an element of out or of the scales lies at an offset of more than 32 bits"
    assert accepts(planned(SM100, m=2**20, n=4096)) == far
    assert accepts(planned(SM100, m=2**19 - 128, n=4096)) is None


def test_scales_of_experts_may_lie_far_apart() -> None:
    """Each expert's scales begin 2**30 bytes and more behind those of the one before; the rest is never touched."""
    product = counted(((1, 128), (128, 128), "e8m0"), (70, 3, 70), 70, zeros=True)
    scale, step = product.a.scale.view(torch.uint8), 2**30 + 64
    far = torch.empty(2 * step + 4096, dtype=torch.uint8).as_strided(scale.shape, (step, *scale.stride()[1:]))
    far.copy_(scale)
    apart = replace(product, a=product.a._replace(scale=far.view(torch.float8_e8m0fnu)))
    assert torch.equal(interpreted(apart, SM100), interpreted(product, SM100))


@pytest.mark.parametrize("pair", [*PAIRS, ((-1, -1), (128, 1), "fp32")], ids=str)
@each_target
def test_no_default_spills(target: Target, pair: Pair) -> None:
    """At full tiles, and at partial ones, whose masks take registers."""
    skip_frames_of_calls(target)
    for along_n in (False, True) if target is SM100 and pair != MX else (False,):
        for product in (
            planned(target, pair, along_n=along_n),
            planned(target, pair, 8191, 4093, 2001, along_n=along_n, out=FP32, bias=True),
            planned(target, pair, 1000, 4093, counts=True, along_n=along_n, out=FP32, bias=True),
        ):
            for launch in plan_grouped_tma(product):
                assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3], MX], ids=str)
@each_target
def test_no_candidate_spills(target: Target, pair: Pair) -> None:
    skip_frames_of_calls(target)
    for along_n in (False, True) if target is SM100 and pair == PAIRS[0] else (False,):
        product = planned(target, pair, along_n=along_n)
        for config in candidates(product):
            for launch in plan_grouped_tma(product, config):
                assert_no_spills(launch.resources(), target)


# The product in PTX and in SASS.
INSTRUCTIONS: Final = {
    ("sm100", False): (r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", "UTCQMMA"),
    ("sm100", True): (r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale", "UTCQMMA"),
    ("sm120", False): (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", "QMMA.16832.F32.E4M3.E4M3"),
    ("sm120", True): (
        r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale\.scale_vec::1X\.f32\.e4m3\.e4m3",
        "QMMA.SF.16832.F32.E4M3.E4M3.E8",
    ),
}


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("kind", ["forward", "dgrad", "mx"])
@each_target
def test_machine_code(target: Target, kind: str, counts: bool, tmp_path: Path) -> None:
    """Operands by TMA, and in MX the scales too: threads load offsets, and other scales."""
    if target is SM120 and kind == "dgrad":
        pytest.skip("sm120 multiplies operands along K alone")
    product = planned(target, MX if kind == "mx" else PAIRS[0], along_n=kind == "dgrad", counts=counts)
    launch = SCALED_GROUPED_MM.plan(product)[-1]
    assert isinstance(launch, TritonLaunch)
    assert launch.name == "grouped_rows_tma"
    compiled = launch.compile()
    ptx, (pattern, name) = compiled.asm["ptx"], INSTRUCTIONS[target.name, kind == "mx"]
    assert re.search(pattern, ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.3d\.shared::\w+\.global", ptx)
    assert ("cp.async.bulk.tensor.4d" in ptx) == (kind == "mx")
    assert ("tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx) == (kind == "mx" and target is SM100)
    assert not re.search(r"cp\.async\.c[ag]\.shared\.global", ptx)
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", ptx)
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text.split()[0]} == {name}
    assert any("UTMALDG.3D" in text for text in sass)


def test_tune_times_its_tiles_beside_those_by_pointers() -> None:
    for name, target in (("NVIDIA B200", SM100), ("NVIDIA GeForce RTX 5090", SM120)):
        problem = GroupsProblem("rows", 8192, 1024, 1024, 4, target)
        found = grouped_mm_table.FORM.candidates(problem)
        product = problem.product()
        assert found["triton_tma"] == list(candidates(product))
        assert len(found["triton"]) > 10
        assert SCALED_GROUPED_MM.choose(replace(product, chip=Chip(name, 1))).name == "triton_tma"
        assert grouped_mm_table.default(problem) == candidate_name("triton_tma", candidates(product)[0])
