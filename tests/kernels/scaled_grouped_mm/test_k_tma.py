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
from fp8fn.ops.operand import Quantized
from fp8fn.ops.products import ScaledProduct
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
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=["columns", "squares of b", "squares of a"])
# Empty groups, one token, whole blocks, and tokens of no group; then groups that begin at multiples of 128.
SMALL, LARGE = ((0, 1, 0, 140, 255, 128, 3), 10), ((673, 0, 1200), 5)
CONFIG: Final = GemmConfig(128, 128, 8, 3, GROUP=2)


def operands(
    pair: tuple[Block, Block], sizes: tuple[int, ...], rest: int, m: int = 140, n: int = 150,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), tokens: tuple[Tensor, Tensor] | None = None,
    scale: str = "fp32",
) -> ScaledProduct:  # fmt: skip
    """Groups of random tokens, or of those given, with a bias."""
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
@each_pair
@each_target
def test_values(target: Target, pair: tuple[Block, Block], groups: tuple[tuple[int, ...], int]) -> None:
    """As the reference; and the same bits as by pointers, which multiply the same tiles in the same order."""
    product = operands(pair, *groups)
    assert (unit_of(product.k, len(groups[0])) == STEP) == (groups is SMALL)
    found = interpreted(product, target)
    assert_near(product, found)
    assert torch.equal(found, interpreted(product, target, plan_scaled_grouped_mm))
    assert product.bias is not None
    for group, size in enumerate(groups[0]):
        assert size or torch.equal(found[group], product.bias[group].expand_as(found[group]))


@pytest.mark.parametrize("sizes", [(0, 0), (1,), (300,), (0, 300, 0), (3,) * 12, (127, 1, 128, 129)], ids=str)
def test_where_groups_end(sizes: tuple[int, ...]) -> None:
    for rest in (0, 200):
        if sum(sizes) + rest:
            product = operands(PAIRS[0], sizes, rest, m=70, n=40)
            assert_near(product, interpreted(product))


@pytest.mark.parametrize("sizes", [(0, 1, 31, 32, 33), (127, 128, 129, 260), (3,) * 12, (673, 1200)], ids=str)
def test_a_nan_in_the_next_groups_first_token_stays_there(sizes: tuple[int, ...]) -> None:
    """Both operands have one there, so that a zero in one of them would not do."""
    clean = [torch.randn(sum(sizes) + 40, width) for width in (33, 40)]
    bad = [x.clone() for x in clean]
    ends = list(itertools.accumulate(sizes))
    for start in (*[0, *ends][1 : len(ends) : 2], ends[-1]):
        for x in bad:
            x[start] = torch.nan
    outs = []
    for x, y in (clean, bad):
        product = replace(operands(PAIRS[0], sizes, 40, tokens=(x, y)), bias=None)
        outs.append(interpreted(product))
        assert_near(product, outs[-1])
    assert torch.equal(outs[0][::2], outs[1][::2])
    assert all(outs[1][group].isnan().all() for group in range(1, len(sizes), 2) if sizes[group])


@pytest.mark.parametrize("ends", [(50, 20, 90), (-5, 300, 60), (2**31 - 1, -(2**31), 7)], ids=str)
@pytest.mark.parametrize("tokens", [100, 1600])
def test_offsets_that_are_none_read_nothing_outside(ends: tuple[int, ...], tokens: int) -> None:
    product = operands(PAIRS[0], (0, 0, tokens), 0, m=33, n=40)
    found = interpreted(replace(product, offsets=torch.tensor(ends, dtype=torch.int32)))
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
    for dtypes, scale in (((E4M3, E5M2), "pow2"), ((E5M2, E4M3), "e8m0")):
        product = operands(PAIRS[1], (150, 140), 0, n=270, dtypes=dtypes, scale=scale)
        for config in candidates(replace(product, target=target)):
            assert_near(product, interpreted(product, target, config=config))


def planned(
    target: Target, pair: tuple[Block, Block] = PAIRS[0], m: int = 4096, n: int = 2048, tokens: int = 8192, *,
    out: torch.dtype = torch.bfloat16, bias: bool = False, scale: str = "fp32",
) -> ScaledProduct:  # fmt: skip
    """A product of tokens in 8 groups as the quantizer lays them out."""
    (a, a_scale), b = (
        empty_grouped(torch.empty(tokens, width, device="meta"), 8, block, E4M3, scale)
        for width, block in zip((m, n), pair, strict=True)
    )
    return ScaledProduct(
        a=Quantized(a.mT, a_scale.mT, swap(pair[0])), b=Quantized(*b, pair[1]), target=target,
        offsets=torch.empty(8, dtype=torch.int32, device="meta"), bias=a.new_empty(8, n, dtype=out) if bias else None,
        out=a.new_empty(8, m, n, dtype=out),
    )  # fmt: skip


def test_what_it_takes() -> None:
    for target, pair in itertools.product((*BY_TMA, replace(SM100, arch=103)), PAIRS):
        choice = SCALED_GROUPED_MM.choose(planned(target, pair))
        assert choice.name == "triton_tma"
        assert [launch.name for launch in choice.plan(planned(target, pair))] == ["grouped_k_tma"]
    assert accepts(planned(SM90)) == "sm90 is none of sm100, sm103, sm120"
    few = SCALED_GROUPED_MM.choose(planned(SM100, m=64))
    assert few.name == "triton"
    assert few.describe().endswith("not triton_tma: M is 64, below 65")
    for block, scale in ((32, "rceil"), (-1, "fp32")):
        product = planned(SM100, ((block, 1), (block, 1)), scale=scale)
        reason = f"blocks (1, {block}) and ({block}, 1): groups along K are taken in blocks of 128 tokens"
        assert accepts(product) == reason
        assert SCALED_GROUPED_MM.choose(product).name == "triton"
    far = "an element of out or of the scales lies at an offset of more than 32 bits"
    assert accepts(planned(SM100, m=2**16, n=2**16)) == far


@each_pair
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
                (launch,) = plan_grouped_tma(product, config)
                assert_no_spills(launch.resources(), target)


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
