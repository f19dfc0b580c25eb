"""Products of groups along K by TMA on Blackwell: interpreted, which products they take, and their machine code."""

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
from fp8fn.ops.groups import STEP, empty_grouped, unit_of
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.operands import Quantized, ScaledProduct
from fp8fn.ops.scaled_grouped_mm import SCALED_GROUPED_MM
from fp8fn.ops.targets import SM90, SM100, SM120, Chip, Target
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.grouped_tma import accepts, candidates, plan_grouped_tma
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.scaled_grouped_mm import plan_scaled_grouped_mm
from fp8fn.ops.tuning import grouped_mm_table
from fp8fn.ops.tuning.grouped_mm_table import GroupsProblem
from support.compilers import assert_no_spills, instructions, skip_frames_of_calls

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
COLUMNS, SQUARES = (128, 1), (128, 128)
BY_TMA: Final = (SM100, SM120)
each_target = pytest.mark.parametrize("target", BY_TMA, ids=lambda target: target.name)
# Blocks of the tokens of a and of b, as the quantizer names them.
PAIRS: Final = ((COLUMNS, COLUMNS), (COLUMNS, SQUARES), (SQUARES, COLUMNS))
MX: Final = ((32, 1), (32, 1))
NAMES: Final = ("columns", "squares of b", "squares of a", "MX")
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=NAMES[:-1])
with_mx = pytest.mark.parametrize("pair", [*PAIRS, MX], ids=NAMES)
one_and_mx = pytest.mark.parametrize("pair", [PAIRS[0], MX], ids=(NAMES[0], NAMES[-1]))
# Empty groups, one token, whole blocks, and tokens of no group; then groups that begin at multiples of 128.
SMALL, LARGE = ((0, 1, 0, 140, 255, 128, 3), 10), ((673, 0, 1200), 5)
CONFIG: Final = GemmConfig(128, 128, 8, 3, GROUP=2)


def operands(
    pair: tuple[Block, Block], sizes: tuple[int, ...], rest: int, m: int = 140, n: int = 150,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), tokens: tuple[Tensor, Tensor] | None = None,
    scale: str | None = None,
) -> ScaledProduct:  # fmt: skip
    """Groups of random tokens, or of those given, with a bias."""
    scale = scale or scale_of(pair)
    offsets = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
    x, y = tokens or (torch.randn(sum(sizes) + rest, width) for width in (m, n))
    (a, a_scale), b = (
        reference.quantize_grouped(values, offsets, block, dtype, scale)
        for values, block, dtype in zip((x, y), pair, dtypes, strict=True)
    )
    return ScaledProduct(
        a=Quantized(a.mT, a_scale.mT, swap(pair[0])), b=Quantized(*b, pair[1]), offsets=offsets,
        bias=torch.randn(len(sizes), y.shape[1]), out=torch.full((len(sizes), x.shape[1], y.shape[1]), 7.0),
        target=SM100,
    )  # fmt: skip


def scale_of(pair: tuple[Block, Block]) -> str:
    return "rceil" if pair == MX else "fp32"


def interpreted(
    product: ScaledProduct, target: Target = SM100, plan: Any = plan_grouped_tma, config: GemmConfig = CONFIG
) -> Tensor:
    out = product.out.clone()
    for launch in plan(replace(product, out=out, target=target), config):
        launch.interpret()
    return out


def assert_near(product: ScaledProduct, found: Tensor) -> None:
    wanted = reference.scaled_grouped_mm(product.a, product.b, product.group_ends, product.bias, torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert (found - wanted).nan_to_num().double().norm() <= 1e-6 * wanted.nan_to_num().double().norm()


@pytest.mark.parametrize("groups", [SMALL, LARGE], ids=["units of 32", "units of 128"])
@with_mx
@each_target
def test_values(target: Target, pair: tuple[Block, Block], groups: tuple[tuple[int, ...], int]) -> None:
    """As the reference; and the same bits as by pointers, which multiply the same tiles in the same order."""
    product = operands(pair, *groups)
    assert (unit_of(product.k, len(groups[0])) == STEP) == (groups is SMALL)  # but in MX, where it always is
    found = interpreted(product, target)
    assert_near(product, found)
    assert torch.equal(found, interpreted(product, target, plan_scaled_grouped_mm))
    assert product.bias is not None
    for group, size in enumerate(groups[0]):
        assert size or torch.equal(found[group], product.bias[group].expand_as(found[group]))


@pytest.mark.parametrize("sizes", [(0, 0), (1,), (300,), (0, 300, 0), (3,) * 12, (127, 1, 128, 129)], ids=str)
@one_and_mx
@each_target
def test_where_groups_end(target: Target, pair: tuple[Block, Block], sizes: tuple[int, ...]) -> None:
    for rest in (0, 200):
        if sum(sizes) + rest:
            product = operands(pair, sizes, rest, m=70, n=40)
            assert_near(product, interpreted(product, target))


@pytest.mark.parametrize("m", [1, 128])
@each_target
def test_in_mx_one_row_and_zeros(target: Target, m: int) -> None:
    """All-zero tokens have a finite scale: the smallest there is."""
    x, y = torch.randn(300, m), torch.zeros(300, 40)
    product = operands(MX, (100, 7, 193), 0, tokens=(x, y))
    assert product.bias is not None
    assert torch.equal(interpreted(product, target), product.bias[:, None].expand_as(product.out))


@pytest.mark.parametrize("sizes", [(0, 1, 31, 32, 33), (127, 128, 129, 260), (3,) * 12, (673, 1200)], ids=str)
@one_and_mx
@each_target
def test_a_nan_in_the_next_groups_first_token_stays_there(
    target: Target, pair: tuple[Block, Block], sizes: tuple[int, ...]
) -> None:
    """Both operands have one there, so that a zero in one of them would not do; its scales are NaN too."""
    clean = [torch.randn(sum(sizes) + 40, width) for width in (33, 40)]
    bad = [x.clone() for x in clean]
    ends = list(itertools.accumulate(sizes))
    for start in (*[0, *ends][1 : len(ends) : 2], ends[-1]):
        for x in bad:
            x[start] = torch.nan
    outs = []
    for x, y in (clean, bad):
        product = replace(operands(pair, sizes, 40, tokens=(x, y)), bias=None)
        outs.append(interpreted(product, target))
        assert_near(product, outs[-1])
    assert torch.equal(outs[0][::2], outs[1][::2])
    assert all(outs[1][group].isnan().all() for group in range(1, len(sizes), 2) if sizes[group])


@pytest.mark.parametrize("ends", [(50, 20, 90), (-5, 300, 60), (2**31 - 1, -(2**31), 7)], ids=str)
@pytest.mark.parametrize("tokens", [100, 1600])
@one_and_mx
@each_target
def test_offsets_that_are_none_read_nothing_outside(
    target: Target, pair: tuple[Block, Block], ends: tuple[int, ...], tokens: int
) -> None:
    product = operands(pair, (0, 0, tokens), 0, m=33, n=40)
    found = interpreted(replace(product, offsets=torch.tensor(ends, dtype=torch.int32)), target)
    assert found.isfinite().all()


@each_pair
def test_on_sm100_tokens_may_lie_in_rows(pair: tuple[Block, Block]) -> None:
    """The last group's box ends behind the last token there is."""
    product = operands(pair, *SMALL, m=144, n=160)
    in_rows = [x.contiguous() for x in (product.a.data.mT.view(torch.uint8), product.b.data.view(torch.uint8))]
    a, b = in_rows[0].view(E4M3).mT, in_rows[1].view(E4M3)
    along_rows = replace(product, a=product.a._replace(data=a), b=product.b._replace(data=b))
    assert accepts(along_rows) is None
    (launch,) = plan_grouped_tma(along_rows, CONFIG)
    assert (launch.constexprs["A_TURNED"], launch.constexprs["B_TURNED"]) == (True, True)
    assert torch.equal(interpreted(along_rows), interpreted(product))
    assert accepts(replace(along_rows, target=SM120)) == "a has stride 144 along its contiguous axis, not 1"


@each_target
def test_types_scales_and_every_configuration(target: Target) -> None:
    for pair, dtypes, scale in (
        (PAIRS[1], (E4M3, E5M2), "pow2"), (PAIRS[1], (E5M2, E4M3), "e8m0"),
        (MX, (E4M3, E5M2), "rceil"), (MX, (E5M2, E4M3), "e8m0"),
    ):  # fmt: skip
        product = operands(pair, (150, 140), 0, n=270, dtypes=dtypes, scale=scale)
        for config in candidates(replace(product, target=target)):
            assert_near(product, interpreted(product, target, config=config))


def planned(
    target: Target, pair: tuple[Block, Block] = PAIRS[0], m: int = 4096, n: int = 2048, tokens: int = 8192, *,
    out: torch.dtype = torch.bfloat16, bias: bool = False, scale: str | None = None, groups: int = 8,
) -> ScaledProduct:  # fmt: skip
    """A product of tokens in groups as the quantizer lays them out."""
    scale = scale or scale_of(pair)
    (a, a_scale), b = (
        empty_grouped(torch.empty(tokens, width, device="meta"), groups, block, E4M3, scale)
        for width, block in zip((m, n), pair, strict=True)
    )
    return ScaledProduct(
        a=Quantized(a.mT, a_scale.mT, swap(pair[0])), b=Quantized(*b, pair[1]), target=target,
        offsets=torch.empty(groups, dtype=torch.int32, device="meta"), out=a.new_empty(groups, m, n, dtype=out),
        bias=a.new_empty(groups, n, dtype=out) if bias else None,
    )  # fmt: skip


def test_what_it_takes() -> None:
    for target, pair in itertools.product((*BY_TMA, replace(SM100, arch=103)), (*PAIRS, MX)):
        choice = SCALED_GROUPED_MM.choose(planned(target, pair))
        assert choice.name == "triton_tma"
        before = ["swizzle_scales"] if pair == MX and target is not SM120 else []
        assert [launch.name for launch in choice.plan(planned(target, pair))] == [*before, "grouped_k_tma"]
    assert accepts(planned(SM90)) == "sm90 is none of sm100, sm103, sm120"
    few = SCALED_GROUPED_MM.choose(planned(SM100, m=64))
    assert few.name == "triton"
    assert few.describe().endswith("not triton_tma: M is 64, below 65")
    for block in (32, -1):
        product = planned(SM100, ((block, 1), (block, 1)), scale="fp32")
        reason = f"blocks (1, {block}) and ({block}, 1): groups along K are taken in blocks of 128 tokens, or in MX"
        assert accepts(product) == reason
        assert SCALED_GROUPED_MM.choose(product).name == "triton"
    far = "an element of out or of the scales lies at an offset of more than 32 bits"
    assert accepts(planned(SM100, m=2**16, n=2**16)) == far


def test_what_it_takes_in_mx() -> None:
    """Tokens in lines alone; on sm120 scales as the quantizer stores them, on sm100 enough K tiles to swizzle for."""
    short = planned(SM100, MX, 512, 512)
    choice = SCALED_GROUPED_MM.choose(short)
    assert choice.name == "triton"
    assert "9 K tiles a multiprocessor are too few for a launch that swizzles the scales" in choice.describe()
    assert SCALED_GROUPED_MM.choose(replace(short, target=SM120)).name == "triton_tma"
    product = planned(SM120, MX)
    a, b = product.a, product.b
    rows = replace(product, b=b._replace(data=torch.empty(b.data.shape, dtype=E4M3, device="meta")))
    for target in BY_TMA:
        assert accepts(replace(rows, target=target)) == "b.mT has stride 2048 along its contiguous axis, not 1"
    turned = torch.empty(a.scale.shape, dtype=torch.float8_e8m0fnu, device="meta")
    lines = replace(product, a=a._replace(scale=turned))
    assert accepts(lines) == "a_scale.mT has stride 264 along its contiguous axis, not 1"
    assert accepts(replace(lines, target=SM100)) is None


@with_mx
@each_target
def test_no_configuration_spills(target: Target, pair: tuple[Block, Block]) -> None:
    """At full tiles and at partial ones, in groups that begin at multiples of 128 and of 32."""
    skip_frames_of_calls(target)
    for tokens in (8192, 2048):
        for product in (
            planned(target, pair, tokens=tokens),
            planned(target, pair, 4093, 2045, tokens, out=torch.float32, bias=True),
        ):
            for config in candidates(product):
                for launch in plan_grouped_tma(product, config):
                    assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("groups", [64, 1000])
def test_scales_of_many_groups_are_swizzled_without_spills(groups: int) -> None:
    for m, n in ((4096, 2048), (4093, 2045)):
        assert_no_spills(plan_grouped_tma(planned(SM100, MX, m, n, 131072, groups=groups))[0].resources(), SM100)


# The product in PTX and in SASS.
INSTRUCTIONS: Final = {
    "sm100": (r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", "UTCQMMA"),
    "sm120": (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", "QMMA.16832.F32.E4M3.E4M3"),
}


@pytest.mark.parametrize("tokens", [8192, 2048])
@each_target
def test_machine_code(target: Target, tokens: int, tmp_path: Path) -> None:
    launch = SCALED_GROUPED_MM.plan(planned(target, PAIRS[1], tokens=tokens))[-1]
    assert isinstance(launch, TritonLaunch)
    assert launch.name == "grouped_k_tma"
    compiled = launch.compile()
    ptx, (pattern, name) = compiled.asm["ptx"], INSTRUCTIONS[target.name]
    assert re.search(pattern, ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", ptx)
    assert not re.search(r"cp\.async\.c[ag]\.shared\.global", ptx)
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", ptx)
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text.split()[0]} == {name}
    assert any("UTMALDG.2D" in text for text in sass)


def test_tune_times_its_tiles_beside_those_by_pointers() -> None:
    for (name, target), layout in itertools.product(
        (("NVIDIA B200", SM100), ("NVIDIA GeForce RTX 5090", SM120)), ("tokens", "squares", "squares of a")
    ):
        problem = GroupsProblem(layout, 1024, 2048, 8192, 4, target)
        product = problem.product()
        assert grouped_mm_table.FORM.candidates(problem)["triton_tma"] == list(candidates(product))
        assert SCALED_GROUPED_MM.choose(replace(product, chip=Chip(name, 1))).name == "triton_tma"


# As `INSTRUCTIONS`, with scales.
SCALED_INSTRUCTIONS: Final = {
    "sm100": (r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale", "UTCQMMA"),
    "sm120": (
        r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale\.scale_vec::1X\.f32\.e4m3\.e4m3",
        "QMMA.SF.16832.F32.E4M3.E4M3.E8",
    ),
}


@each_target
def test_machine_code_in_mx(target: Target, tmp_path: Path) -> None:
    """Operands and scales by TMA: threads load offsets alone."""
    launch = SCALED_GROUPED_MM.plan(planned(target, MX))[-1]
    assert isinstance(launch, TritonLaunch)
    compiled = launch.compile()
    ptx, (pattern, name) = compiled.asm["ptx"], SCALED_INSTRUCTIONS[target.name]
    assert re.search(pattern, ptx)
    ranks = {int(rank) for rank in re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared", ptx)}
    assert ranks == ({2, 4} if target is SM100 else {2})
    assert ("tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx) == (target is SM100)
    assert not re.search(r"cp\.async\.c[ag]\.shared\.global", ptx)
    assert len(re.findall(r"ld\.global", ptx)) == 2  # where the group begins and ends
    sass = [text for _, text in instructions(compiled.asm["cubin"], tmp_path)]
    assert {text.split()[0] for text in sass if "MMA" in text.split()[0]} == {name}
    assert any("UTMALDG.2D" in text for text in sass)
