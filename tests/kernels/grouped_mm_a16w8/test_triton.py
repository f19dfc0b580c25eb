"""The Triton product of groups of rows by FP8 experts: interpreted against float64, and compiled without spills."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ScaledTensor
from fp8fn.ops import reference
from fp8fn.ops.grouped_mm_a16w8 import GROUPED_MM_A16W8
from fp8fn.ops.layout import Block, empty_scale
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, Target, native_e4m3
from fp8fn.ops.triton.grouped_mm_a16w8 import configure, plan_grouped_mm_a16w8
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.triton.mm_a16w8 import A16W8Config
from support.accuracy import snr
from support.compilers import assert_no_spills
from support.operands.groups import SIZES, ends, spans
from support.operands.weights import exact, weight
from support.products import quantized, weight_product

BF16, FP16, FP32, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2
SMALL, NARROW = A16W8Config(32, 64, 32, 4, 2, GROUP=2), A16W8Config(16, 32, 32, 4, 2)
TARGETS = pytest.mark.parametrize("target", [SM89, SM90, SM100, GFX942, GFX950], ids=lambda target: target.name)


def interpreted(
    x: Tensor, w: ScaledTensor, offsets: Tensor, bias: Tensor | None = None, config: A16W8Config | None = SMALL,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    out = torch.full((x.shape[0], w.shape[-1]), 7.0)
    product = weight_product(x, w, out, offsets=offsets, bias=bias)
    (launch,) = plan_grouped_mm_a16w8(product, config or configure(product))
    launch.constexprs["WIDE"] |= wide  # type: ignore[index]
    launch.interpret()
    return out


def assert_near(x: Tensor, w: ScaledTensor, offsets: Tensor, bias: Tensor | None = None, **how: Any) -> None:
    """Each group is its own product, of float32 sums or of weights that are rounded; other rows are zeros."""
    out = interpreted(x, w, offsets, bias, **how)
    for group, (start, end) in enumerate(spans(offsets)):
        want = exact(x[start:end], w[group], None if bias is None else bias[group])
        assert snr(out[start:end], want) > (45 if w.block[0] == 1 and x.dtype != FP32 else 110)
    assert not out[offsets[-1] :].any()


@pytest.mark.parametrize(
    ("block", "dtype"), [((128, 128), BF16), ((1, 128), FP16), ((128, 1), FP32), ((-1, -1), BF16), ((32, 1), BF16)],
    ids=str,
)  # fmt: skip
def test_blocks_types_and_orders(block: Block, dtype: torch.dtype) -> None:
    """The tile itself is `mm_a16w8`'s, whose tests have every block with every type."""
    x, offsets, bias = torch.randn(80, 150).to(dtype), ends((0, 33, 1, 40)), torch.randn(4, 140)[:, ::2]
    for fp8, contiguous, config in ((torch.float8_e4m3fn, "K", SMALL), (E5M2, "N", NARROW)):
        w = weight(150, 70, block, dtype=fp8, contiguous=contiguous, batch=(4,))
        assert_near(x, w, offsets, bias, config=config)
    w = weight(150, 70, block, scale="e8m0", batch=(4,))
    assert_near(x.mT.contiguous().mT, w, offsets, config=None)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_of_groups(sizes: tuple[int, ...]) -> None:
    w = weight(130, 40, (128, 128), batch=(len(sizes),))
    assert_near(torch.randn(sum(sizes) + 5, 130).to(BF16), w, ends(sizes), config=None)


drawn = st.lists(st.one_of(st.sampled_from([0, 1, 3, 127, 128, 129]), st.integers(0, 70)), min_size=1, max_size=5)


def test_drawn_groups() -> None:
    @settings(max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(drawn, st.one_of(st.integers(0, 130), st.just(700)), st.integers(1, 140), st.integers(1, 140))
    def check(sizes: list[int], left: int, k: int, n: int) -> None:
        if sum(sizes) + left:
            x, w = torch.randn(sum(sizes) + left, k).to(BF16), weight(k, n, (128, 1), batch=(len(sizes),))
            assert_near(x, w, ends(sizes), wide=left % 2 == 0)

    check()


@pytest.mark.parametrize("block", [(128, 128), (1, -1)], ids=str)
def test_nan_stays_in_its_group(block: Block) -> None:
    """NaN among one expert's rows, in an expert's scales and data, also of one without rows, and past the last."""
    offsets, w = ends((20, 30, 0, 40)), weight(70, 40, block, batch=(4,))
    x = torch.randn(100, 70).to(BF16)
    clean = interpreted(x, w, offsets)
    bad, scale, data = x.clone(), w.scale.clone(), w.data.clone()
    bad[20:50] = bad[90:] = torch.nan
    scale[2] = torch.nan
    data[2].view(torch.uint8).fill_(0x7F)
    out = interpreted(bad, ScaledTensor(data, scale, block), offsets)
    others = torch.ones(100, dtype=torch.bool)
    others[20:50] = False
    assert out[20:50].isnan().all()
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("end", [(50, 20, 90), (-5, 300, 60), (2**31 - 1, -(2**31), 7)], ids=str)
def test_offsets_that_are_none_read_nothing_outside(end: tuple[int, int, int]) -> None:
    """NaN lies before and after the rows."""
    around = torch.full((300, 70), torch.nan, dtype=BF16)
    x = around[100:200]
    x.copy_(torch.randn(100, 70))
    out = interpreted(x, weight(70, 40, (128, 128), batch=(3,)), torch.tensor(end, dtype=torch.int32))
    assert out.isfinite().all()
    assert around[:100].isnan().all()
    assert around[200:].isnan().all()


def offline(target: Target, block: Block, tokens: int, groups: int = 8, dtype: torch.dtype = BF16) -> WeightProduct:
    """The forward of experts `(E, N, K)`, or with N contiguous the gradient of their input."""
    x, out = (torch.empty(tokens, size, dtype=dtype, device="meta") for size in (2048, 4096))
    w = torch.empty(groups, 4096, 2048, dtype=native_e4m3(target), device="meta").mT
    w = w.contiguous() if block == (1, -1) else w
    scaled = ScaledTensor(w, empty_scale(w, block, "fp32"), block)
    offsets = torch.empty(groups, dtype=torch.int32, device="meta")
    return WeightProduct(x=x, w=quantized(scaled), offsets=offsets, out=out, target=target)


def triton_plan(product: WeightProduct) -> tuple[TritonLaunch]:
    """The launch, also of a product that another kernel serves."""
    return plan_grouped_mm_a16w8(product, configure(product))


@pytest.mark.parametrize("block", [(128, 128), (1, -1)], ids=str)
@pytest.mark.parametrize("tokens", [64, 512, 8192])
@TARGETS
def test_no_configuration_spills(target: Target, tokens: int, block: Block) -> None:
    (launch,) = triton_plan(offline(target, block, tokens))
    assert_no_spills(launch.resources(), target)


@pytest.mark.parametrize("block", [(128, 128), (1, -1)], ids=str)
@pytest.mark.parametrize("tokens", [64, 200, 400, 4000])
def test_no_experts_of_odd_sizes_spill_on_hopper(tokens: int, block: Block) -> None:
    """Tiles of 32 rows and 128 deep spilled 106 registers, and of 128 rows and columns 98."""
    x, out = (torch.empty(tokens, size, dtype=BF16, device="meta") for size in (4090, 4094))
    w = torch.empty(8, 4094, 4090, dtype=native_e4m3(SM90), device="meta").mT
    scaled, offsets = ScaledTensor(w, empty_scale(w, block, "fp32"), block), torch.empty(8, dtype=torch.int32)
    product = WeightProduct(x=x, w=quantized(scaled), offsets=offsets.to("meta"), out=out, target=SM90)
    (launch,) = triton_plan(product)
    assert_no_spills(launch.resources(), SM90)


def test_experts_whose_lines_run_along_n_do_not_spill_on_hopper() -> None:
    """By two warps 2 registers spilled."""
    x, out = (torch.empty(8, size, dtype=BF16, device="meta") for size in (768, 4112))
    w, bias = torch.empty(8, 768, 4112, dtype=E5M2, device="meta"), torch.empty(8, 4112, dtype=BF16, device="meta")
    scaled = ScaledTensor(w, empty_scale(w, (128, 1), "fp32"), (128, 1))
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    product = WeightProduct(x=x, w=quantized(scaled), offsets=offsets, bias=bias, out=out, target=SM90)
    config = configure(product)
    assert (config.BM, config.BN, config.BK) == (16, 64, 128)
    (launch,) = plan_grouped_mm_a16w8(product, config)
    assert_no_spills(launch.resources(), SM90)


@pytest.mark.parametrize(("tokens", "block"), [(1024, (128, 128)), (400, (-1, 1)), (1024, (128, 1))], ids=str)
def test_rows_that_are_slices_of_wider_ones_do_not_spill_on_hopper(tokens: int, block: Block) -> None:
    """They are loaded by single elements, for which the tile of whole lines spilled 60 to 602 registers."""
    x = torch.empty(tokens, 2056, dtype=BF16, device="meta")[:, :2048]
    product = replace(offline(SM90, block, tokens), x=x)
    (launch,) = plan_grouped_mm_a16w8(product, configure(product))
    assert_no_spills(launch.resources(), SM90)


def test_machine_code() -> None:
    """16-bit products by the matrix units, from wide loads."""
    for target, instruction, tokens in (
        (SM89, r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16", 64),
        (SM90, r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16 \{[^}]*\}, \{", 8192),
        (SM100, r"tcgen05\.mma\.cta_group::1\.kind::f16", 8192),
        (GFX942, r"v_mfma_f32_16x16x16_bf16", 8192),
        (GFX950, r"v_mfma_f32_16x16x32_bf16", 8192),
    ):
        (launch,) = triton_plan(offline(target, (128, 128), tokens))
        text = launch.compile().asm["ptx" if target.backend == "cuda" else "amdgcn"]
        assert re.search(instruction, text)
        assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10|_load_dwordx4", text)
        assert not re.search(r"ld\.global(\.\w+)*\.b8|_load_(u|s)byte", text)


def test_configurations_follow_the_mean_group() -> None:
    few, many = (configure(offline(SM90, (128, 128), tokens)) for tokens in (64, 8192))
    assert (few.BM, few.BN, few.num_warps) == (16, 64, 2)  # the tiles of all experts together keep the cores busy
    assert (many.BM, many.BN) == (128, 64)
    assert configure(offline(SM90, (128, 128), 1)).BN == 32
    (launch,) = GROUPED_MM_A16W8.plan(offline(SM90, (128, 128), 64, groups=256))
    # 256 experts are 2**31 elements, each 2**23: the expert's own base is always of 64 bits.
    assert launch.constexprs["WIDE"] is False  # type: ignore[attr-defined]


def test_the_reference_is_the_same_product() -> None:
    x, w, offsets = torch.randn(80, 150).to(BF16), weight(150, 70, (128, 128), batch=(3,)), ends((30, 0, 45))
    got = reference.grouped_mm_a16w8(x, quantized(w), offsets, None, FP32)
    assert snr(interpreted(x, w, offsets), got) > 110
