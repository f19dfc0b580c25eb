"""The Triton grouped products: interpreted against the reference, and compiled offline without spills."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from fp8fn.ops import reference
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import Block, empty_data, empty_scale
from fp8fn.ops.operands import Quantized
from fp8fn.ops.scaled_grouped_mm import empty_grouped_output
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM100, SM120, Target, native_e4m3
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.triton.launch import TritonLaunch, resources
from fp8fn.ops.triton.scaled_grouped_mm import plan_scaled_grouped_mm
from support.compilers import assert_no_spills
from support.products import Parts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

# Small tiles, so that few elements make several tiles along every axis.
SMALL = GemmConfig(32, 64, 4, 2, GROUP=2)
ENDS = (0, 1, 1, 34, 161, 163, 170)  # two empty groups; one over several tiles; three rows belong to none

ROW_PAIRS: tuple[tuple[Block, Block], ...] = (
    ((1, 128), (128, 128)), ((1, 128), (128, 1)), ((1, 128), (-1, 1)), ((1, 128), (-1, -1)), ((1, -1), (-1, 1)),
    ((1, -1), (-1, -1)), ((1, -1), (128, 128)), ((-1, -1), (-1, -1)), ((1, 32), (32, 1)), ((1, 32), (128, 128)),
)  # fmt: skip

Operands = tuple[Tensor, Tensor, Block, Tensor, Tensor, Block, Tensor, "Tensor | None"]


def ends_of(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def by_rows(
    m: int, n: int, k: int, offsets: Tensor, a_block: Block = (1, 128), b_block: Block = (128, 128), *,
    scale: str = "fp32", dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), bias: torch.dtype | None = None,
) -> Operands:  # fmt: skip
    groups = offsets.shape[0]
    a = reference.quantize(torch.randn(m, k), a_block, dtypes[0], scale)
    b = reference.quantize(torch.randn(groups, n, k).mT, b_block, dtypes[1], scale)
    return *a, a_block, *b, b_block, offsets, None if bias is None else torch.randn(groups, n).to(bias)


def by_k(
    m: int, n: int, k: int, offsets: Tensor, block: int = 128, *, scale: str = "fp32",
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), bias: torch.dtype | None = None,
) -> Operands:  # fmt: skip
    a = reference.quantize_grouped(torch.randn(k, m), offsets, (block, 1), dtypes[0], scale)
    b = reference.quantize_grouped(torch.randn(k, n), offsets, (block, 1), dtypes[1], scale)
    rows = None if bias is None else torch.randn(offsets.shape[0], n).to(bias)
    return a[0].mT, a[1].mT, (1, block), *b, (block, 1), offsets, rows


def interpreted(
    operands: Operands, out_dtype: torch.dtype = torch.float32, config: GemmConfig = SMALL, wide: bool = False,
    target: Target = SM90,
) -> Tensor:  # fmt: skip
    *flat, offsets, bias = operands
    out = empty_grouped_output(flat[0], flat[3], offsets, out_dtype).fill_(7.0)
    product = Parts(*flat, bias, out).product(target, offsets=offsets)  # type: ignore[arg-type]
    (launch,) = plan_scaled_grouped_mm(product, config)
    if wide:
        launch.constexprs["WIDE"] = True  # type: ignore[index]
    launch.interpret()
    return out


def expected(operands: Operands, out_dtype: torch.dtype = torch.float32) -> Tensor:
    a, b = Quantized(*operands[:3]), Quantized(*operands[3:6])
    return reference.scaled_grouped_mm(a, b, *operands[6:], out_dtype)


def assert_near(operands: Operands, out_dtype: torch.dtype = torch.float32, **how: Any) -> Tensor:
    got, want = interpreted(operands, out_dtype, **how), expected(operands, out_dtype)
    if out_dtype == torch.float32:
        assert (got.double() - want.double()).norm() <= 1e-6 * want.double().norm()
    else:
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    return got


@pytest.mark.parametrize(("a_block", "b_block"), ROW_PAIRS, ids=str)
def test_rows_blocks(a_block: Block, b_block: Block) -> None:
    operands = by_rows(173, 70, 200, ends_of(*ENDS), a_block, b_block, bias=torch.float32)
    out = assert_near(operands)
    assert not out[170:].any()


@pytest.mark.parametrize("block", [128, -1, 32])
def test_k_blocks(block: int) -> None:
    out = assert_near(by_k(70, 130, 173, ends_of(*ENDS), block))
    assert not out[[0, 2]].any()
    assert_near(by_k(70, 130, 173, ends_of(*ENDS), block, bias=torch.bfloat16))
    assert_near(by_k(70, 130, 1030, ends_of(353, 1025), block))


@pytest.mark.parametrize(("k", "dtypes"), [(200, (E5M2, E4M3)), (320, (E4M3, E4M3))], ids=str)
def test_scales_of_the_matrix_instruction(k: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """MX where an instruction takes the scales of a K tile of several blocks: groups of rows, and of tokens."""
    mx: Any = {"scale": "rceil", "dtypes": dtypes, "bias": torch.float32}
    for operands in (
        by_rows(173, 70, k, ends_of(*ENDS), (1, 32), (32, 1), **mx),
        by_k(70, 130, 173, ends_of(*ENDS), 32, **mx),
        by_k(33, 40, 1030, ends_of(353, 353, 1025), 32, **mx),
    ):
        assert_near(operands, target=SM100, wide=k == 320)


sizes = st.lists(st.one_of(st.sampled_from([0, 1, 3, 127, 128, 129]), st.integers(0, 70)), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", ["rows", "k", "k_whole", "k_mx"])
def test_drawn_groups(kind: str) -> None:
    @settings(max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(sizes, st.one_of(st.integers(0, 130), st.just(700)), st.integers(1, 140), st.integers(1, 140))
    def check(counts: list[int], left: int, m: int, n: int) -> None:
        offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
        tokens = sum(counts) + left
        if tokens == 0:
            return
        if kind == "rows":
            assert_near(by_rows(tokens, n, m, offsets))
        else:
            assert_near(by_k(m, n, tokens, offsets, {"k": 128, "k_whole": -1, "k_mx": 32}[kind]))

    check()


@pytest.mark.parametrize(
    ("multiply", "size"),
    [("reference", 128), ("kernel", 128), ("reference", 32), ("kernel", 32), ("instruction", 32)],
)
@pytest.mark.parametrize(
    "sizes",
    [
        (0, 1, 31, 32, 33), (127, 128, 129, 260), (128, 128, 96, 32), (0, 300, 0), (3,) * 12,
        (673, 352), (384, 640), (0, 1500, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_nan_in_the_next_groups_first_token_stays_there(sizes: tuple[int, ...], multiply: str, size: int) -> None:
    """Each second group begins with one; the others are those of a loop in float64, and equal whatever the NaN."""
    offsets, tokens = ends_of(*itertools.accumulate(sizes)), sum(sizes) + 40
    clean = torch.randn(tokens, 33), torch.randn(tokens, 40)
    bad = clean[0].clone(), clean[1].clone()
    starts = [0, *offsets.tolist()[:-1]]
    for start in (*starts[1::2], offsets[-1]):
        for x in bad:
            x[start] = torch.nan
    outs, scale = [], "rceil" if size == 32 else "fp32"
    for x, y in (clean, bad):
        left, right = (reference.quantize_grouped(side, offsets, (size, 1), E4M3, scale) for side in (x, y))
        operands = (left[0].mT, left[1].mT, (1, size), *right, (size, 1), offsets, None)
        target = SM100 if multiply == "instruction" else SM90
        outs.append(expected(operands) if multiply == "reference" else interpreted(operands, target=target))
        rows, columns = (
            reference.dequantize_grouped(*side, offsets, (size, 1), tokens).double() for side in (left, right)
        )
        for group, (start, count) in enumerate(zip(starts, sizes, strict=True)):
            want = rows[start : start + count].mT @ columns[start : start + count]
            torch.testing.assert_close(outs[-1][group].double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(outs[0][::2], outs[1][::2])
    assert all(outs[1][group].isnan().all() for group in range(1, len(sizes), 2) if sizes[group])


def test_many_groups_of_three_tokens_and_one_with_all() -> None:
    offsets = torch.arange(3, 100, 3, dtype=torch.int32)
    assert_near(by_rows(100, 40, 70, offsets))
    assert_near(by_k(33, 40, 100, offsets))
    assert_near(by_k(33, 40, 100, offsets, -1))
    for ends in ((0, 0, 200), (200, 200, 200)):
        assert_near(by_rows(200, 40, 70, ends_of(*ends)))
        assert_near(by_k(33, 40, 200, ends_of(*ends)))


@pytest.mark.parametrize("b_contiguous", ["K", "N"])
@pytest.mark.parametrize("a_contiguous", ["K", "M"])
def test_storage(a_contiguous: str, b_contiguous: str) -> None:
    def stored(x: Tensor, along_last: bool) -> Tensor:
        view = x if along_last else x.mT
        copy = torch.empty(view.shape, dtype=x.dtype)
        copy.view(torch.uint8).copy_(view.view(torch.uint8))
        return copy if along_last else copy.mT

    for operands in (by_rows(100, 70, 200, ends_of(0, 30, 90)), by_k(70, 130, 100, ends_of(0, 30, 90))):
        a, b = stored(operands[0], a_contiguous == "K"), stored(operands[3], b_contiguous == "N")
        assert_near((a, *operands[1:3], b, *operands[4:]))


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3), FNUZ], ids=str)
@pytest.mark.parametrize("scale", ["pow2", "e8m0"])
def test_types_and_scale_formats(dtypes: tuple[torch.dtype, torch.dtype], scale: str) -> None:
    assert_near(by_rows(60, 40, 140, ends_of(5, 50), dtypes=dtypes, scale=scale))
    for block in (128, -1):
        assert_near(by_k(40, 33, 60, ends_of(5, 50), block, dtypes=dtypes, scale=scale))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
def test_bias_and_output_types(bias: torch.dtype | None, out_dtype: torch.dtype) -> None:
    assert_near(by_rows(60, 40, 140, ends_of(5, 50), bias=bias), out_dtype)
    assert_near(by_k(40, 33, 60, ends_of(5, 5, 50), bias=bias), out_dtype)


@pytest.mark.parametrize(
    "config", [GemmConfig(16, 64, 4, 2), GemmConfig(64, 128, 4, 2, HALVES=True), GemmConfig(256, 64, 8, 2)], ids=str
)
def test_configurations(config: GemmConfig) -> None:
    assert_near(by_rows(173, 200, 150, ends_of(*ENDS)), config=config)
    assert_near(by_k(150, 200, 173, ends_of(*ENDS)), config=config)


def test_wide_offsets_address_the_same_elements() -> None:
    for operands in (
        by_rows(100, 70, 200, ends_of(0, 30, 90), bias=torch.float32),
        by_k(70, 130, 100, ends_of(0, 30, 90)),
        by_k(70, 130, 100, ends_of(0, 30, 90), -1),
    ):
        assert torch.equal(interpreted(operands, wide=True), interpreted(operands))


def test_nothing_of_another_group_or_of_tokens_past_the_last_reaches_a_result() -> None:
    offsets = ends_of(20, 50, 50, 90)
    mine = slice(20, 50)
    for block in ((1, 128), (1, -1)):
        clean = by_rows(100, 40, 70, offsets, block, (128, 1))
        bad = tuple(t.clone() if isinstance(t, Tensor) else t for t in clean)
        others = torch.ones(100, dtype=torch.bool)
        others[mine] = False
        bad[0].view(torch.uint8)[others] = 0x7F
        bad[1][others] = float("nan")
        out = interpreted(bad)  # type: ignore[arg-type]
        assert torch.equal(out[mine], interpreted(clean)[mine])
        assert not out[90:].any()
        assert out[:20].isnan().all()
    x, y = torch.randn(100, 33), torch.randn(100, 40)
    for t in (x, y):
        t[:20] = t[50:90] = t[90:] = float("nan")
    for size in (128, -1):
        left = reference.quantize_grouped(x, offsets, (size, 1), E4M3, "fp32")
        right = reference.quantize_grouped(y, offsets, (size, 1), E4M3, "fp32")
        # Bytes of tokens past the last offset are zeros; what a caller made need not have them so.
        left[0].view(torch.uint8)[90:100] |= 0 if size == 128 else 0x7F
        if size == -1:
            left[1][2] = float("nan")  # of the group without tokens
        operands = (left[0].mT, left[1].mT, (1, size), *right, (size, 1), offsets, None)
        out = interpreted(operands)
        assert out[1].isfinite().all()
        assert not out[2].any()
        assert out[[0, 3]].isnan().all()
        torch.testing.assert_close(out[1], expected(operands)[1])


@pytest.mark.parametrize("ends", [(50, 20, 90), (-5, 300, 60), (2**31 - 1, -(2**31), 7)], ids=str)
def test_offsets_that_are_none_read_nothing_outside(ends: tuple[int, int, int]) -> None:
    """Before and behind the operands lie NaN, and a read of them would show."""

    def guarded(x: Tensor) -> Tensor:
        guard = 64 * x.stride(0) if x.stride(0) > x.stride(1) else 64 * x.stride(1)
        around = torch.full((x.untyped_storage().nbytes() + 2 * guard,), 0x7F, dtype=torch.uint8).view(x.dtype)
        return around[guard:].as_strided(x.shape, x.stride()).copy_(x)

    offsets = ends_of(*ends)
    for a, *rest, _, _ in (
        by_rows(100, 40, 70, offsets), by_k(33, 40, 100, ends_of(0, 0, 100)), by_k(33, 40, 100, ends_of(0, 0, 100), -1),
        by_k(33, 40, 1600, ends_of(0, 0, 1600)),
    ):  # fmt: skip
        operands: Any = (guarded(a), *rest, offsets, None)
        assert interpreted(operands).isfinite().all()
        assert expected(operands).isfinite().all()


KINDS = ("forward", "dgrad", "rowwise", "wgrad", "wgrad_few", "wgrad_rowwise")


def product(
    target: Target, kind: str, tokens: int = 8192, n: int = 4096, k: int = 2048, groups: int = 8, config: Any = None
) -> TritonLaunch:
    dtype = native_e4m3(target)
    offsets = torch.empty(groups, dtype=torch.int32, device="meta")
    scale = "rceil" if kind.endswith("mx") else "fp32"
    if kind.startswith("wgrad"):
        block: Block = (-1, 1) if kind.endswith("rowwise") else (32, 1) if kind.endswith("mx") else (128, 1)
        x, y = (torch.empty(tokens, size, device="meta") for size in (k, n))
        (a, a_scale), b = (empty_grouped(t, groups, block, dtype, scale) for t in (x, y))
        a_args, b_args = (a.mT, a_scale.mT, (1, block[0])), (*b, block)
    else:
        blocks = {"rowwise": ((1, -1), (-1, 1)), "mx": ((1, 32), (32, 1))}
        a_block, b_block = blocks.get(kind, ((1, 128), (128, 128)))
        x = torch.empty(tokens, k, device="meta")
        w = torch.empty(groups, k, n, device="meta")
        a_args = (empty_data(x, a_block, dtype), empty_scale(x, a_block, scale), a_block)
        along_k = kind != "dgrad"
        b_args = (empty_data(w, b_block, dtype, along_k), empty_scale(w, b_block, scale, along_k), b_block)
    out = empty_grouped_output(a_args[0], b_args[0], offsets, None)
    product = Parts(*a_args, *b_args, None, out).product(target, offsets=offsets)
    return plan_scaled_grouped_mm(product, config)[0]


INSTRUCTIONS = {
    "sm89": r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3",
    "sm90": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3",
    "sm100": r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
    "sm120": r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3",
    "gfx942": r"v_mfma_f32_16x16x32_fp8_fp8",
    "gfx950": r"v_mfma_f32_\d+x\d+x\d+_(f8f6f4|fp8_fp8)",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [SM89, SM90, SM100, SM120, GFX942, GFX950], ids=lambda target: target.name)
def test_fp8_instructions_and_wide_loads_without_spills(target: Target, kind: str) -> None:
    compiled = product(target, kind, tokens=2048 if kind == "wgrad_few" else 8192).compile()
    used = resources(compiled)
    assert (used.spills, used.scratch) == (0, 0), used
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert re.search(INSTRUCTIONS[target.name], text)
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10|_load_dwordx4", text)
    assert not re.search(r"ld\.global(\.\w+)*\.b8|_load_(u|s)byte", text)


SCALED = {
    "sm100": r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale",
    "sm120": r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale\.scale_vec::1X\.f32\.e4m3\.e4m3",
    "gfx950": r"v_mfma_scale_f32_32x32x64_f8f6f4",
}


@pytest.mark.parametrize("kind", ["mx", "wgrad_mx"])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, SM120, GFX942, GFX950], ids=lambda target: target.name)
def test_mx_takes_the_instruction_with_scales_where_there_is_one(target: Target, kind: str) -> None:
    compiled = product(target, kind).compile()
    used, text = resources(compiled), compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    assert (used.spills, used.scratch) == (0, 0), used
    assert re.search({**INSTRUCTIONS, **SCALED}[target.name], text)
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10|_load_dwordx4", text)


@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, SM120, GFX942, GFX950], ids=lambda target: target.name)
def test_few_tokens_an_expert_do_not_spill(target: Target, kind: str) -> None:
    used = product(target, kind, tokens=64).resources()
    assert (used.spills, used.scratch) == (0, 0), used


@pytest.mark.parametrize("kind", [*KINDS, "mx", "wgrad_mx"])
@pytest.mark.parametrize("target", [SM89, SM90, SM100, SM120], ids=lambda target: target.name)
def test_no_product_of_odd_sizes_spills(target: Target, kind: str) -> None:
    """1000 tokens in lines of 1000 bytes are loaded by bytes: the tile for aligned tokens spilled 104 to 1218."""
    for tokens, n, k in ((1000, 4096, 1008), (1000, 4100, 2052), (2048, 4096, 1008)):
        assert_no_spills(product(target, kind, tokens=tokens, n=n, k=k).resources(), target)


def test_offsets_are_wide_only_where_they_must_be() -> None:
    assert product(SM90, "forward").constexprs["WIDE"] is False
    # 256 experts are 2**31 elements of weights, each 2**23: the expert's own base is always of 64 bits.
    assert product(SM90, "forward", n=4096, k=2048, groups=256).constexprs["WIDE"] is False
    assert product(SM90, "wgrad", n=4096, k=2048, groups=512).constexprs["WIDE"] is False
    assert product(SM90, "forward", tokens=2**20, n=4096).constexprs["WIDE"] is True
    assert product(SM90, "wgrad", tokens=2**20).constexprs["WIDE"] is True
