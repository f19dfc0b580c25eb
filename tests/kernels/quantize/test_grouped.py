"""Quantization of grouped tokens: reference and kernels against a loop over the groups, every byte and every scale."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import fp8fn
from fp8fn import GroupedScaledTensor, ScaledTensor
from fp8fn.ops import reference, targets
from fp8fn.ops.formats import FP8_DTYPES, SCALE_FORMATS
from fp8fn.ops.groups import empty_grouped, most_tokens, spread_blocks, spread_rows, unit_of
from fp8fn.ops.layout import Block, swap
from fp8fn.ops.operands import empty_grouped_dual
from fp8fn.ops.quantize_grouped import (
    GROUPED_BLOCKS,
    quantize_grouped_dual_kernel,
    quantize_grouped_kernel,
)
from fp8fn.ops.targets import GFX942, GFX950, SM89, SM90, SM120, Target, native_e4m3
from fp8fn.ops.triton.launch import TritonLaunch, resources
from fp8fn.ops.triton.quantize_grouped import default_tile
from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped as plan
from support.compilers import assert_no_spills
from support.gpu import nothing_waits
from support.operands.groups import ends
from support.operands.values import random
from support.quantizers import plan_quantize_grouped, plan_quantize_grouped_dual, quantization

E4M3 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPREAD, WHOLE, MX, SQUARES = GROUPED_BLOCKS
# The block of rows of a dual form, and that of its columns where it is not the transpose.
DUALS: tuple[tuple[Block, Block | None], ...] = (((1, 128), None), ((1, 32), None), ((1, 128), SQUARES))
Quantize = Callable[[Tensor, Tensor, Block, torch.dtype, str], tuple[Tensor, Tensor]]
T = TypeVar("T", bound=tuple[Tensor, ...])


def unit_for(tokens: int, groups: int, block: int = 128) -> int:
    """At multiples of how many rows groups begin."""
    return 128 if block == 128 and tokens // 128 >= 4 * groups else 32


def by_loop(x: Tensor, sizes: Sequence[int], block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    """The definition: `quantize` of each group's rows alone, put where `fp8fn.ops.groups` says, zeros elsewhere."""
    (m, n), rows = x.shape, block[0]
    unit, spread = unit_for(m, len(sizes), rows), block != WHOLE
    nothing = reference.quantize(torch.zeros(1, -(-n // block[1])), (-1, 1), dtype, scale)[1].float()
    data = torch.zeros(unit * (m // unit + len(sizes)) if spread else m, n, dtype=torch.uint8)
    scales = nothing.repeat((m // rows if spread else 0) + len(sizes), 1)
    start = 0
    for group, size in enumerate(sizes):
        values, group_scales = reference.quantize(x[start : start + size], block, dtype, scale)
        at = unit * (start // unit + group) if spread else start
        data[at : at + size] = values.view(torch.uint8)
        at = (start // rows if spread else 0) + group
        if size:
            scales[at : at + group_scales.shape[0]] = group_scales.float()
        start += size
    return data.view(dtype), scales


def bits(scale: Tensor) -> Tensor:
    return scale.float().view(torch.int32)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, or NaN in both; scales in the values that they store."""
    assert actual.shape == expected.shape
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    got, want = (t.view(torch.uint8) if t.dtype in FP8_DTYPES else bits(t) for t in (actual, expected))
    differing = int(((got != want) & ~nan).sum())
    assert differing == 0, f"{differing} of {actual.numel()} differ"


def interpreted(x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, scale: str) -> tuple[Tensor, Tensor]:
    out = poisoned(empty_grouped(x, offsets.shape[0], block, dtype, scale))
    for launch in plan_quantize_grouped(x, offsets, out, block, scale, SM90):
        launch.interpret()
    return out


def interpreted_dual(
    x: Tensor, offsets: Tensor, block: Block, dtype: torch.dtype, scale: str, dual_block: Block | None
) -> tuple[Tensor, ...]:
    out = poisoned(empty_grouped_dual(x, offsets.shape[0], block, dtype, scale, dual_block))
    plan_quantize_grouped_dual(x, offsets, out, scale, SM90, block, dual_block).interpret()
    return out


def poisoned(out: T) -> T:
    """Nothing that a kernel leaves unwritten is right by chance."""
    for tensor in out:
        (tensor if tensor.dtype == FP32 else tensor.view(torch.uint8)).fill_(85)
    return out


def assert_all_equal_the_loop(x: Tensor, sizes: Sequence[int], dtype: torch.dtype, scale: str) -> None:
    """The reference, and where there is something to launch the kernels, in each block and the dual forms."""
    offsets = ends(sizes)
    for block in GROUPED_BLOCKS:
        expected = by_loop(x, sizes, block, dtype, scale)
        ways: list[Quantize] = [reference.quantize_grouped, *([interpreted] if x.numel() else [])]
        for quantize in ways:
            found = quantize(x, offsets, block, dtype, scale)
            layout = empty_grouped(x, len(sizes), block, dtype, scale)
            for got, want, like in zip(found, expected, layout, strict=True):
                assert_same_bits(got, want)
                assert (got.dtype, got.stride()) == (like.dtype, like.stride())
    for dual, columns in DUALS if x.numel() else ():
        both = (*reference.quantize(x, dual, dtype, scale), *by_loop(x, sizes, columns or swap(dual), dtype, scale))
        for found in (
            interpreted_dual(x, offsets, dual, dtype, scale, columns),
            reference.quantize_grouped_dual(x, offsets, dual, dtype, scale, columns),
        ):
            for got, want in zip(found, both, strict=True):
                assert_same_bits(got, want)


def stored(x: Tensor, storage: str) -> Tensor:
    """The same values with other strides."""
    if storage == "column-major":
        return x.mT.contiguous().mT
    if storage == "strided":
        wide = x.new_full((x.shape[0] + 3, 2 * x.shape[1] + 5), float("nan"))
        wide[2 : 2 + x.shape[0], 3 : 3 + 2 * x.shape[1] : 2] = x
        return wide[2 : 2 + x.shape[0], 3 : 3 + 2 * x.shape[1] : 2]
    return x


def with_content(x: Tensor, content: str, seed: int) -> Tensor:
    if content == "zeros":
        return torch.zeros_like(x)
    if content == "subnormal":
        return x * (torch.finfo(x.dtype).smallest_normal / 2)
    if content in ("nan", "inf") and x.numel():
        x[seed % x.shape[0], seed % x.shape[1]] = float(content)
    return x


# An interpreted program takes 30 ms, of any size.
@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 31, 32, 33, 95, 97, 127, 128, 129, 200, 700]), min_size=1, max_size=4),
    st.sampled_from([0, 0, 1, 128, 150, 600]),
    st.sampled_from([0, 1, 7, 16, 33, 130]),
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from(["row-major", "column-major", "strided"]),
    st.sampled_from(["normal", "normal", "zeros", "subnormal", "nan", "inf"]),
    st.sampled_from(FP8_DTYPES),
    st.sampled_from(SCALE_FORMATS),
    st.integers(0, 2**20),
)
def test_drawn_groups(
    sizes: list[int], tail: int, n: int, dtype: torch.dtype, storage: str, content: str, fp8: torch.dtype, scale: str,
    seed: int,
) -> None:  # fmt: skip
    x = with_content(random(sum(sizes) + tail, n, dtype=dtype, seed=seed), content, seed)
    assert_all_equal_the_loop(stored(x, storage), sizes, fp8, scale)


# The sizes of the groups, and how many tokens follow the last.
GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "one group": ((260,), 0),
    "one group of nothing": ((0,), 130),
    "everything in the first": ((259, 0, 0), 0),
    "everything in the last": ((0, 0, 259), 1),
    "empty groups between": ((0, 1, 0, 128, 0, 129, 0), 0),
    "very different sizes": ((1, 300, 2), 140),
    "multiples of the block": ((128, 256), 128),
    "one past a border": ((129, 127, 1, 127), 0),
    "around a unit": ((31, 32, 33, 0, 1, 95, 96, 97), 33),
    "around a block": ((127, 128, 129, 260), 31),
    "a gap behind each": ((128, 128, 96, 32), 0),
    "groups of three": ((3,) * 50, 0),
    "one token too few for large units": ((3, 1020), 0),
    "just enough for large units": ((3, 1020), 1),
    "large": ((700, 450), 10),
    "large, a gap behind each": ((640, 512, 384), 0),
    "large and nothing": ((0, 1500, 0), 40),
    "many tiny groups": (tuple(i % 3 for i in range(15)), 5),
}


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("groups", [1, 2, 3, 64])
def test_the_extents_tell_the_unit(groups: int, block: int) -> None:
    for tokens in range(0, 1024 * groups, 1 if groups < 3 else 31):
        unit, rows = unit_for(tokens, groups, block), spread_rows(tokens, groups, block)
        assert rows == unit * (tokens // unit + groups)
        assert unit_of(rows, groups, block) == unit
        assert 0 <= most_tokens(rows, groups, block) - tokens < unit
        assert spread_blocks(rows - unit * groups, groups, block) == spread_blocks(tokens, groups, block)


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str) -> None:
    sizes, tail = GROUPS[name]
    assert_all_equal_the_loop(random(sum(sizes) + tail, 40), sizes, E4M3, "fp32")


def test_1024_groups() -> None:
    """A program loads all offsets. The first of the programs: the interpreter takes half a minute for all."""
    sizes = tuple(int(i % 5 == 0) for i in range(1024))
    x, offsets, blocks = random(sum(sizes), 1), ends(sizes), 50
    out = poisoned(empty_grouped(x, 1024, SPREAD, E4M3, "pow2"))
    (launch,) = plan_quantize_grouped(x, offsets, out, SPREAD, "pow2", SM90)
    assert launch.grid == (1024 + sum(sizes) // 128, 1, 1)
    dataclasses.replace(launch, grid=(blocks, 1, 1)).interpret()
    data, scales = by_loop(x, sizes, SPREAD, E4M3, "pow2")
    # The first tokens are fewer than a block: each of these programs has a group of its own.
    assert_same_bits(out[0][: 32 * blocks], data[: 32 * blocks])
    assert_same_bits(out[1][:blocks], scales[:blocks])


@pytest.mark.parametrize("block", GROUPED_BLOCKS, ids=str)
@pytest.mark.parametrize("quantize", [reference.quantize_grouped, interpreted], ids=["reference", "kernel"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("tail", "spread"), [(10, slice(160, 192)), (1400, slice(256, 384))], ids=["small", "large"])
def test_a_nan_or_inf_stays_inside_its_group(
    tail: int, spread: slice, quantize: Quantize, value: float, block: Block
) -> None:
    """The seed's kernels stored past the end of a group; a value beyond the last offset belongs to none."""
    sizes, n = (130, 5, 60), 20
    clean = random(sum(sizes) + tail, n)
    x = clean.clone()
    x[132, 7] = value
    x[-tail:] = value
    offsets = ends(sizes)
    data, scales = quantize(x, offsets, block, E4M3, "fp32")
    expected, expected_scales = quantize(clean, offsets, block, E4M3, "fp32")
    rows = {SPREAD: spread, WHOLE: slice(130, 135), MX: slice(160, 192), SQUARES: spread}[block]
    row = {SPREAD: 2, WHOLE: 1, MX: 5, SQUARES: 2}[block]
    columns, column = (slice(0, n), 0) if block == SQUARES else (slice(7, 8), 7)
    hit, hit_scales = torch.zeros(data.shape, dtype=torch.bool), torch.zeros(scales.shape, dtype=torch.bool)
    hit[rows, columns], hit_scales[row, column] = True, True
    assert torch.equal(scales[~hit_scales], expected_scales[~hit_scales])
    assert torch.equal(data.view(torch.uint8)[~hit], expected.view(torch.uint8)[~hit])
    assert not scales[row, column].isfinite()
    tokens = data.float()[rows, 7][:5]
    assert tokens.isnan().all() if value != value else tokens[2].isnan()
    # Rows without a token are zero bytes, also beside a NaN.
    assert not data.view(torch.uint8)[rows, 7][5:].any()
    if block == WHOLE:
        assert not data.view(torch.uint8)[-tail:].any()


@pytest.mark.parametrize("block", GROUPED_BLOCKS, ids=str)
def test_every_row_of_very_different_groups_is_written(block: Block) -> None:
    """The seed chose a kernel from the mean size of a group, and left rows of larger ones unwritten."""
    sizes = (3, 600, 0, 1)
    x, offsets = torch.ones(sum(sizes), 3, dtype=BF16), ends(sizes)
    data, scales = interpreted(x, offsets, block, E4M3, "fp32")
    assert torch.equal(reference.dequantize_grouped(data, scales, offsets, block, x.shape[0]).to(BF16), x)
    assert int((data.float() != 0).sum()) == x.numel()


def test_a_block_stores_its_own_tokens_alone() -> None:
    """The seed's mask let the last block of a group write into the next one, which here would store over it again."""
    sizes = (5, 200)
    x, offsets = random(sum(sizes), 16), ends(sizes)
    whole = empty_grouped(x, 2, WHOLE, E4M3, "fp32")
    both = empty_grouped_dual(x, 2, (1, 128), E4M3, "fp32")
    planned = (
        *plan_quantize_grouped(x, offsets, whole, WHOLE, "fp32", SM90),
        plan_quantize_grouped_dual(x, offsets, both, "fp32", SM90),
    )
    for launch in planned:
        launch.interpret()
    expected = whole[0].clone(), both[0].clone(), both[1].clone()
    poisoned((*whole, *both))
    for launch in planned[-2:]:
        dataclasses.replace(launch, grid=(1, 1, 1)).interpret()
    for got, want in zip((whole[0], both[0], both[1]), expected, strict=True):
        assert torch.equal(got[:5].float(), want[:5].float())
        left = got[5:] if got.dtype == FP32 else got.view(torch.uint8)[5:]
        assert bool((left == 85).all())


def test_an_empty_group_has_the_scale_of_zeros() -> None:
    q = fp8fn.quantize_grouped(random(10, 4), ends((0, 10, 0)), block=-1)
    zeros = fp8fn.quantize(torch.zeros(3, 4), (-1, 1)).scale
    assert torch.equal(q.scale[[0, 2]], zeros.expand(2, 4))


@pytest.mark.parametrize("block", GROUPED_BLOCKS, ids=str)
def test_no_tokens_and_no_columns(block: Block) -> None:
    for m, n in ((0, 5), (0, 0), (130, 0)):
        sizes = (m // 2, m - m // 2)
        assert_all_equal_the_loop(random(m, n), sizes, E4M3, "fp32")
        x, out = random(m, n), empty_grouped(random(m, n), 2, block, E4M3, "fp32")
        assert plan_quantize_grouped(x, ends(sizes), out, block, "fp32", SM90) == ()


@pytest.mark.parametrize("block", GROUPED_BLOCKS, ids=str)
def test_offsets_past_the_tokens_count_as_their_number(block: Block) -> None:
    """So no kernel reads or writes out of bounds."""
    x, past, offsets = random(140, 5), ends((130, 50, 1000)), ends((130, 10, 0))
    expected = reference.quantize_grouped(x, offsets, block, E4M3, "fp32")
    quantizers: list[Quantize] = [reference.quantize_grouped, interpreted]
    for quantize in quantizers:
        for got, want in zip(quantize(x, past, block, E4M3, "fp32"), expected, strict=True):
            assert_same_bits(got, want)


def test_offsets_of_any_stride() -> None:
    x, offsets = random(140, 5), ends((100, 0, 30))
    apart = torch.full((6,), -7, dtype=torch.int32)
    apart[::2] = offsets
    for block in GROUPED_BLOCKS:
        expected = reference.quantize_grouped(x, offsets, block, E4M3, "fp32")
        quantizers: list[Quantize] = [reference.quantize_grouped, interpreted]
        for quantize in quantizers:
            for got, want in zip(quantize(x, apart[::2], block, E4M3, "fp32"), expected, strict=True):
                assert_same_bits(got, want)


def launches(target: Target, x: Tensor, groups: int) -> list[TritonLaunch]:
    """Every kernel's launch on `x`, whose values no planner reads."""
    offsets = torch.empty(groups, dtype=torch.int32, device=x.device)
    dtype = native_e4m3(target)
    planned: list[TritonLaunch] = []
    for block in GROUPED_BLOCKS:
        out = empty_grouped(x, groups, block, dtype, "fp32")
        planned += plan_quantize_grouped(x, offsets, out, block, "fp32", target)
    for dual, columns in DUALS:
        both = empty_grouped_dual(x, groups, dual, dtype, "fp32", columns)
        planned.append(plan_quantize_grouped_dual(x, offsets, both, "fp32", target, dual, columns))
    return planned


@pytest.mark.parametrize("block", GROUPED_BLOCKS, ids=str)
def test_the_op_of_a_device_runs_these_kernels(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """And plain PyTorch for a type that the device lacks, and for nothing."""
    names: list[str] = []

    def run(launch: TritonLaunch) -> None:
        names.append(launch.name)
        launch.interpret()

    monkeypatch.setattr(targets, "target_of", lambda device: SM89)
    monkeypatch.setattr(TritonLaunch, "run", run)
    tokens, offsets, dual = random(140, 33), ends((100, 0, 30)), (1, block[0])
    columns = SQUARES if block == SQUARES else None
    for x, dtype in ((tokens, E4M3), (tokens, torch.float8_e4m3fnuz), (tokens[:0], E4M3)):
        out = quantize_grouped_kernel(x, offsets, block, dtype)
        both = quantize_grouped_dual_kernel(x, offsets, dual, dtype, dual_block=columns)
        expected = (
            *reference.quantize_grouped(x, offsets, block, dtype, "fp32"),
            *reference.quantize_grouped_dual(x, offsets, dual, dtype, "fp32", columns),
        )
        for got, want in zip((*out, *both), expected, strict=True):
            assert_same_bits(got, want)
            assert got.stride() == want.stride()
    whole = ["block_amax", "group_scales", "quantize_by_group"]
    assert names == (
        ["quantize_spread", "quantize_spread_dual"] if block != WHOLE else [*whole, "quantize_rows", *whole]
    )


# Ragged for two targets, even for two, and of either the first in large units: nine kernels take 4 s each time.
@pytest.mark.parametrize(
    ("target", "shape"),
    [(SM89, (2**19, 2048)), (SM90, (2**19 + 1, 2045)), (GFX942, (8192, 4096)), (GFX950, (8191, 4093))],
    ids=lambda value: getattr(value, "name", None),
)
def test_compiles_without_spills(target: Target, shape: tuple[int, int]) -> None:
    for launch in launches(target, torch.empty(shape, dtype=BF16, device="meta"), 1024):
        used = resources(launch.compile())
        assert (used.spills, used.scratch) == (0, 0), (launch.describe(), used)


@pytest.mark.parametrize(
    ("target", "rows", "dtype"), [(SM90, 4096, FP32), (SM90, 2**20, FP32), (SM120, 4096, FP32), (SM120, 2**20, BF16)],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_scales_of_whole_groups_spill_nothing(target: Target, rows: int, dtype: torch.dtype) -> None:
    """The tile of 128 columns spilled 44 registers past 2**31 elements, and 14 of float32 on sm120."""
    x, offsets = torch.empty(rows, 4096, dtype=dtype, device="meta"), torch.empty(8, dtype=torch.int32, device="meta")
    q = quantization(x, (-1, 1), scale="e8m0", target=target, offsets=offsets)
    assert default_tile(q).columns == (128 if (target, rows) == (SM90, 4096) else 64)
    for launch in plan(q):
        assert_no_spills(launch.resources(), target)


def test_launches_and_their_grids_depend_on_shapes_alone() -> None:
    x = torch.empty(1000, 300, dtype=BF16, device="meta")
    kernels = [(launch.name, launch.grid[0]) for launch in launches(SM90, x, 8)]
    blocks, mx_blocks = spread_blocks(1000, 8), spread_blocks(1000, 8, 32)
    assert kernels == [
        ("quantize_spread", 5 * blocks), ("block_amax", 5 * blocks), ("group_scales", 5 * 8),
        ("quantize_by_group", 5 * blocks), ("quantize_spread", 3 * mx_blocks), ("quantize_spread", 3 * blocks),
        ("quantize_spread_dual", 3 * blocks), ("quantize_spread_dual", 3 * mx_blocks),
        ("quantize_spread_dual", 3 * blocks),
    ]  # fmt: skip


def test_offsets_are_wide_only_where_they_must_be() -> None:
    for rows in (2**14, 2**17):
        for launch in launches(SM90, torch.empty(rows, 2**15, dtype=BF16, device="meta"), 8):
            assert launch.constexprs["WIDE"] is (rows == 2**17), launch.describe()


def test_wide_offsets_address_the_same_elements() -> None:
    x, sizes = random(300, 70), (100, 0, 130)
    offsets = ends(sizes)
    for block in GROUPED_BLOCKS:
        out = poisoned(empty_grouped(x, 3, block, E4M3, "fp32"))
        for launch in plan_quantize_grouped(x, offsets, out, block, "fp32", SM90):
            launch.constexprs["WIDE"] = True  # type: ignore[index]
            launch.interpret()
        for got, want in zip(out, by_loop(x, sizes, block, E4M3, "fp32"), strict=True):
            assert_same_bits(got, want)
    both = poisoned(empty_grouped_dual(x, 3, (1, 128), E4M3, "fp32"))
    launch = plan_quantize_grouped_dual(x, offsets, both, "fp32", SM90)
    launch.constexprs["WIDE"] = True  # type: ignore[index]
    launch.interpret()
    for got, want in zip(both, reference.quantize_grouped_dual(x, offsets, (1, 128), E4M3, "fp32"), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("storage", ["row-major", "column-major", "strided"])
@pytest.mark.parametrize("name", GROUPS)
def test_on_the_device(name: str, storage: str, scale: str) -> None:
    """The op's own choice of a kernel, without a wait for the device: it can be captured."""
    sizes, tail = GROUPS[name]
    x, offsets = stored(random(sum(sizes) + tail, 300), storage), ends(sizes)
    there, there_ends = stored(x.cuda(), storage), offsets.cuda()
    for block in GROUPED_BLOCKS:
        dual, columns = (1, block[0]), SQUARES if block == SQUARES else None
        with nothing_waits():
            one = torch.ops.fp8fn.quantize_grouped(there, there_ends, block, E4M3, scale)
            both = torch.ops.fp8fn.quantize_grouped_dual(there, there_ends, dual, E4M3, scale, columns)
        expected = (
            *reference.quantize_grouped(x, offsets, block, E4M3, scale),
            *reference.quantize_grouped_dual(x, offsets, dual, E4M3, scale, columns),
        )
        for got, want in zip((*one, *both), expected, strict=True):
            assert got.stride() == want.stride()
            assert_same_bits(got.cpu(), want)


@pytest.mark.gpu
def test_on_the_device_past_int32() -> None:
    x = torch.randn(2**16 + 300, 2**15 + 64, device="cuda", dtype=BF16)
    assert x.numel() > 2**31
    offsets = ends((5, 2**16, 200), "cuda")
    q = fp8fn.quantize_grouped(x, offsets)
    data, scale = reference.quantize(x[5 + 2**16 : 205 + 2**16], SPREAD, q.dtype, "fp32")
    first_block = (5 + 2**16) // 128 + 2
    first = 128 * first_block
    assert torch.equal(q.data[first : first + 200].float(), data.float())
    assert torch.equal(q.scale[first_block:][:2], scale)
    row, col = fp8fn.quantize_grouped_dual(x, offsets)
    assert torch.equal(col.data.view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(row.data[-3:].float(), reference.quantize(x[-3:], (1, 128), row.dtype, "fp32")[0].float())
    whole = fp8fn.quantize_grouped(x, offsets, block=-1)
    data, scale = reference.quantize(x[5 + 2**16 : 205 + 2**16], WHOLE, q.dtype, "fp32")
    assert torch.equal(whole.data[5 + 2**16 : 205 + 2**16].float(), data.float())
    assert torch.equal(whole.scale[2:], scale)
    assert not whole.data[205 + 2**16 :].float().any()


# The functions of `fp8fn`.

SIZES = (0, 130, 1, 0, 69)
# The number of tokens that follow: too few for large units, and enough.
EACH_TAIL = pytest.mark.parametrize("tail", [9, 2360], ids=["small", "large"])


def tokens(tail: int = 9, n: int = 40, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return random(sum(SIZES) + tail, n, dtype=dtype), ends(SIZES)


@pytest.mark.parametrize("scale", SCALE_FORMATS)
@pytest.mark.parametrize("block", [128, -1, 32])
@pytest.mark.parametrize("axis", [0, 1])
@EACH_TAIL
def test_dequantize_gives_the_tokens_back(tail: int, axis: int, block: int, scale: str) -> None:
    x, offsets = tokens(tail)
    taken = sum(SIZES)
    q = fp8fn.quantize_grouped(x.mT if axis else x, offsets, axis, block=block, scale=scale)  # type: ignore[arg-type]
    back = q.dequantize(FP32).mT if axis else q.dequantize(FP32)
    assert q.shape == (x.mT.shape if axis else x.shape)
    assert not back[taken:].any()
    start = 0
    for size in SIZES:
        group = x[start : start + size]
        expected = fp8fn.dequantize(fp8fn.quantize(group, (block, 1), scale=scale), FP32)  # type: ignore[arg-type]
        assert torch.equal(back[start : start + size], expected)
        start += size
    assert q.dequantize().dtype == BF16


@pytest.mark.parametrize("block", [128, -1, 32])
@EACH_TAIL
def test_groups_of_columns_are_those_of_rows_transposed(tail: int, block: int) -> None:
    x, offsets = tokens(tail)
    rows = fp8fn.quantize_grouped(x, offsets, block=block)
    columns = fp8fn.quantize_grouped(x.mT, offsets, 1, block=block)
    assert (columns.axis, columns.block, columns.size) == (1, block, x.shape[0])
    assert columns.data.stride() == rows.data.mT.stride()
    assert columns.scale.stride() == rows.scale.mT.stride()
    assert_same_bits(columns.data, rows.data.mT)
    assert_same_bits(columns.scale, rows.scale.mT)
    again = columns.mT
    assert again.data.data_ptr() == columns.data.data_ptr()
    assert_same_bits(again.data, rows.data)


@pytest.mark.parametrize("block", [128, -1, 32])
def test_dual(block: int) -> None:
    """The rows past the last offset are quantized as any, and are zeros in the groups."""
    x, offsets = tokens()
    row, col = fp8fn.quantize_grouped_dual(x, offsets, block=block, scale="pow2")
    for got, want in (
        (row, fp8fn.quantize(x, (1, block), scale="pow2")),
        (col, fp8fn.quantize_grouped(x, offsets, block=block, scale="pow2")),
    ):
        assert_same_bits(got.data, want.data)
        assert_same_bits(got.scale, want.scale)
    assert row.data.float()[sum(SIZES) :].any()


@EACH_TAIL
def test_a_group_alone_is_a_scaled_tensor(tail: int) -> None:
    """With the zeros that follow it up to the next group; no row of the data is left over."""
    x, offsets = tokens(tail)
    unit = unit_for(x.shape[0], len(SIZES))
    q = fp8fn.quantize_grouped(x, offsets, dtype=torch.float8_e5m2)
    starts = [0, *offsets.tolist()[:-1]]
    firsts = [unit * (start // unit + group) for group, start in enumerate(starts)]
    blocks = [start // 128 + group for group, start in enumerate(starts)]
    back, seen = q.dequantize(FP32), 0
    for group, (first, until) in enumerate(itertools.pairwise([*firsts, q.data.shape[0]])):
        data = q.data[first:until]
        scale = q.scale[blocks[group] :][: -(-data.shape[0] // 128)]
        values = fp8fn.dequantize(ScaledTensor(data, scale, (128, 1)), FP32)
        assert torch.equal(values[: SIZES[group]], back[starts[group] :][: SIZES[group]])
        assert not data.view(torch.uint8)[SIZES[group] :].any()
        assert group == len(SIZES) - 1 or data.shape[0] <= SIZES[group] + 2 * unit - 1
        seen += data.shape[0]
    assert seen == q.data.shape[0]


def test_pytree_and_copies() -> None:
    x, offsets = tokens()
    q = fp8fn.quantize_grouped(x, offsets, block=-1, scale="e8m0")
    leaves, spec = pytree.tree_flatten(q)
    assert [leaf is part for leaf, part in zip(leaves, (q.data, q.scale, q.offsets), strict=True)] == [True] * 3
    again = pytree.tree_unflatten(leaves, spec)
    assert (again.axis, again.block, again.size) == (0, -1, x.shape[0])
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert pytree.tree_structure(q) != pytree.tree_structure(q.mT)
    paths, _ = pytree.tree_flatten_with_path(q)
    assert [pytree.keystr(path) for path, _ in paths] == [".data", ".scale", ".offsets"]
    for twin in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), q.to("cpu")):
        assert (twin.axis, twin.block, twin.size, twin.shape) == (q.axis, q.block, q.size, q.shape)
        assert torch.equal(twin.data.view(torch.uint8), q.data.view(torch.uint8))
        assert torch.equal(twin.scale.float(), q.scale.float())
        assert twin.data.stride() == q.data.stride()
    assert repr(q) == "GroupedScaledTensor(e4m3fn[209, 40], groups=5, axis=0, block=-1, scale=e8m0)"
    assert (q.mT.groups, q.dtype, q.device.type, q.to("meta").device.type) == (5, E4M3, "cpu", "meta")


@EACH_TAIL
def test_copies_of_either_unit_dequantize_alike(tail: int) -> None:
    q = fp8fn.quantize_grouped(*tokens(tail))
    leaves, spec = pytree.tree_flatten(q)
    twins = (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), q.to("cpu"), q.mT.mT, pytree.tree_unflatten(leaves, spec))
    for twin in twins:
        assert torch.equal(twin.dequantize(), q.dequantize())


@EACH_TAIL
@pytest.mark.filterwarnings("ignore:torch.searchsorted.* non-contiguous:UserWarning")  # of PyTorch's own vmap rule
def test_vmap_over_tokens_and_offsets(tail: int) -> None:
    xs = torch.stack([tokens(tail)[0], random(sum(SIZES) + tail, 40, seed=1)])
    offsets = torch.stack([ends(SIZES), ends((50, 50, 50, 0, 0))])
    q = torch.vmap(fp8fn.quantize_grouped)(xs, offsets)
    back = torch.vmap(lambda q: q.dequantize())(q)
    for i in range(2):
        assert torch.equal(back[i], fp8fn.quantize_grouped(xs[i], offsets[i]).dequantize())
    columns = torch.vmap(lambda x: fp8fn.quantize_grouped(x, offsets[1], 1).dequantize(), in_dims=-1)
    shared = columns(xs.mT.movedim(0, -1))
    assert torch.equal(shared[0], fp8fn.quantize_grouped(xs[0], offsets[1]).dequantize().mT)
    empty = torch.vmap(fp8fn.quantize_grouped)(xs[:0], offsets[:0])
    assert empty.data.shape == (0, *q.data.shape[1:])


@pytest.mark.parametrize("how", ["backward", "grad", "jvp"])
def test_has_no_derivative(how: str) -> None:
    x, offsets = tokens(dtype=FP32)

    def loss(x: Tensor) -> Tensor:
        _, col = fp8fn.quantize_grouped_dual(x, offsets)
        return col.dequantize(FP32).sum()

    ways: dict[str, Callable[[], Any]] = {
        "backward": lambda: loss(x.clone().requires_grad_()).backward(),
        "grad": lambda: torch.func.grad(loss)(x),
        "jvp": lambda: torch.func.jvp(loss, (x,), (x,)),
    }
    with pytest.raises(NotImplementedError, match=r"fp8fn\.quantize_grouped_dual has no derivative"):
        ways[how]()


def test_needs_no_values_of_the_offsets() -> None:
    """The reference runs on fake tensors, which have none to read."""
    x, offsets = tokens()
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(x), mode.from_tensor(offsets)
        for block in GROUPED_BLOCKS:
            data, scale = reference.quantize_grouped(*fakes, block, E4M3, "pow2")
            back = reference.dequantize_grouped(data, scale, fakes[1], block, x.shape[0])
            assert back.shape == x.shape


@pytest.mark.parametrize("block", [128, -1, 32])
def test_one_graph_serves_every_number_of_tokens(block: int, fresh_dynamo: None) -> None:
    def call(x: Tensor, offsets: Tensor) -> tuple[GroupedScaledTensor, Tensor]:
        row, _ = fp8fn.quantize_grouped_dual(x * 2, offsets, block=block)
        q = fp8fn.quantize_grouped(x * 2, offsets, block=block)
        return q.mT, q.dequantize(FP32) + fp8fn.dequantize(row, FP32)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    # As those of `quantize`, leading dimensions of a multiple of 16 are another graph: contiguity is a guard.
    small = (((200, 0, 130), 5), ((1, 130, 300), 18), ((0, 900, 5), 0), ((129, 127, 3), 400))
    for sizes, tail in (*small, ((129, 1270, 3), 408), *small):
        x, offsets = random(sum(sizes) + tail, 203), ends(sizes)
        (q, out), (expected, expected_out) = compiled(x, offsets), call(x, offsets)
        assert (q.axis, q.block, q.size, q.shape) == (1, block, x.shape[0], (203, x.shape[0]))
        assert_same_bits(q.data, expected.data)
        assert_same_bits(q.scale, expected.scale)
        assert q.data.stride() == expected.data.stride()
        assert torch.equal(out, expected_out)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_function_takes_one(fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda q: q.mT.dequantize(FP32) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for block, sizes in itertools.product((128, -1, 32), ((100, 30, 70), (5, 0, 300), (5, 800, 900))):
        q = fp8fn.quantize_grouped(random(sum(sizes) + 3, 40), ends(sizes), block=block)
        assert torch.equal(compiled(q), q.mT.dequantize(FP32) * 2)


def test_same_bits_every_run() -> None:
    x, offsets = tokens()
    for block in GROUPED_BLOCKS:
        first = interpreted(x, offsets, block, E4M3, "fp32")
        for quantize in (interpreted, reference.quantize_grouped):
            for got, want in zip(quantize(x, offsets, block, E4M3, "fp32"), first, strict=True):
                assert_same_bits(got, want)


X, ENDS = random(10, 4), ends((4, 6))
MADE = fp8fn.quantize_grouped(X, ENDS)
FAULTS: list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    ("block", lambda: fp8fn.quantize_grouped(X, ENDS, block=64), ValueError, ("block=64", "use 128, 32, or -1")),
    ("dual block", lambda: fp8fn.quantize_grouped_dual(X, ENDS, block=1), ValueError, ("block=1 ", "128, 32, or -1")),
    (
        "block of the op",
        lambda: torch.ops.fp8fn.quantize_grouped(X, ENDS, (1, 128)),
        ValueError,
        ("quantize_grouped: block=(1, 128)", "use one of ((128, 1), (-1, 1), (32, 1), (128, 128))"),
    ),
    (
        "second block",
        lambda: torch.ops.fp8fn.quantize_grouped_dual(X, ENDS, (1, 32), dual_block=(128, 128)),
        ValueError,
        ("quantize_grouped_dual: dual_block=(128, 128)", "use (32, 1)"),
    ),
    ("axis", lambda: fp8fn.quantize_grouped(X, ENDS, 2), ValueError, ("axis=2", "use 0", "1 for columns")),
    ("integers", lambda: fp8fn.quantize_grouped(X.int(), ENDS), TypeError, ("x has dtype torch.int32", "use bfloat16")),
    ("vector", lambda: fp8fn.quantize_grouped(X[0], ENDS, 1), ValueError, ("x has shape (4,)", "two dimensions")),
    ("batch", lambda: fp8fn.quantize_grouped(X[None], ENDS), ValueError, ("x has shape (1, 10, 4)", "must be (M, N)")),
    ("dtype", lambda: fp8fn.quantize_grouped(X, ENDS, dtype=BF16), TypeError, ("dtype=torch.bfloat16", "use one of")),
    ("scale", lambda: fp8fn.quantize_grouped(X, ENDS, scale="up"), ValueError, ("scale='up'", "'pow2'")),  # type: ignore[arg-type]
    ("int64", lambda: fp8fn.quantize_grouped(X, ENDS.long()), TypeError, ("offsets has dtype torch.int64", "int32")),
    ("matrix", lambda: fp8fn.quantize_grouped(X, ENDS[None]), ValueError, ("offsets has shape (1, 2)", "must be (E,)")),
    ("no group", lambda: fp8fn.quantize_grouped(X, ENDS[:0]), ValueError, ("offsets has shape (0,)", "E >= 1")),
    ("device", lambda: fp8fn.quantize_grouped(X, ENDS.to("meta")), ValueError, ("x is on cpu", "offsets on meta")),
    ("dequantized", lambda: MADE.dequantize(torch.int8), TypeError, ("dtype=torch.int8", "use bfloat16")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), [fault[1:] for fault in FAULTS], ids=[name for name, *_ in FAULTS])
def test_errors_name_the_argument_and_the_remedy(
    call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"data": MADE.data.float()}, TypeError, "data has dtype torch.float32"),
        ({"scale": MADE.scale.half()}, TypeError, "scale has dtype torch.float16"),
        ({"offsets": ENDS.long()}, TypeError, "offsets has dtype torch.int64"),
        ({"offsets": ENDS[:1]}, ValueError, r"size=10 in 1 groups and blocks of 128 needs 32 along axis 0"),
        ({"size": 128}, ValueError, "needs 192 along axis 0"),
        ({"size": 1024}, ValueError, "needs 1280 along axis 0"),
        ({"scale": MADE.scale[:1]}, ValueError, r"scale has shape \(1, 4\); data \(64, 4\) needs \(2, 4\)"),
        ({"block": -1}, ValueError, "needs 10 along axis 0"),
        ({"block": 64}, ValueError, "block=64 is no block of grouped tokens; use 128, 32, or -1"),
        ({"axis": 1}, ValueError, "along axis 1"),
        ({"axis": 2}, ValueError, "axis=2 is none of a matrix"),
        ({"data": MADE.data[0]}, ValueError, r"data has shape \(4,\)"),
    ],
)
def test_invariants(change: dict[str, Any], error: type[Exception], words: str) -> None:
    fields = {"data": MADE.data, "scale": MADE.scale, "offsets": ENDS, "axis": 0, "block": 128, "size": 10}
    with pytest.raises(error, match=words):
        GroupedScaledTensor(**{**fields, **change})


# Seed 003: the quantizers of torchao's mixture of experts, whose scales are FP8_MAX / amax.


def forward_scale(amax: Tensor, pow2: bool) -> Tensor:
    scale = (torch.finfo(E4M3).max / amax.double().clamp_min(1e-12)).float()
    return torch.exp2(torch.floor(torch.log2(scale.double()))).float() if pow2 else scale


def forward_quantized(x: Tensor, dim: int, pow2: bool) -> tuple[Tensor, Tensor]:
    """The seed's data, and its scales with `dim` kept."""
    scale = forward_scale(x.float().abs().amax(dim, keepdim=True), pow2)
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale


def assert_same_as_forward(data: Tensor, scale: Tensor, seed_data: Tensor, seed_scale: Tensor, pow2: bool) -> None:
    """Powers of two: reciprocals, and equal bytes. Else two roundings apart, and neighbours in FP8."""
    assert data.shape == seed_data.shape
    if pow2:
        assert torch.equal(1 / scale, seed_scale)
        assert torch.equal(1 / (1 / scale), scale)
        assert_same_bits(data, seed_data)
    else:
        torch.testing.assert_close(1 / scale, seed_scale, rtol=2**-22, atol=0)
        assert (data.view(torch.uint8).int() - seed_data.view(torch.uint8).int()).abs().max() <= 1


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("storage", ["row-major", "column-major", "strided"])
def test_the_seeds_3d_and_2d_quantizers_are_quantize(storage: str, pow2: bool) -> None:
    e, k, n, scale = 3, 48, 80, "pow2" if pow2 else "fp32"
    x = torch.stack([random(k, n, seed=i) for i in range(e)])
    x = x.mT.contiguous().mT if storage == "column-major" else x[:, ::2, ::2] if storage == "strided" else x
    e, k, n = x.shape
    # rowwise_3d_transpose_rhs: (E, K, N) → (E, N, K) with strides (N·K, 1, N), scales (E, K), amax over N.
    q = fp8fn.quantize(x, (1, -1), scale=scale).mT  # type: ignore[arg-type]
    seed, seed_scale = forward_quantized(x, -1, pow2)
    assert_same_as_forward(q.data, q.scale.squeeze(-2), seed.mT, seed_scale.squeeze(-1), pow2)
    lead = -(-n // 16) * 16
    assert (q.shape, q.data.stride()) == ((e, n, k), (lead * k, 1, lead))
    # colwise_3d_scale_and_cast: (E, K, N) column-major → the same layout, scales (E, 1, N).
    q = fp8fn.quantize(x, (-1, 1), scale=scale)  # type: ignore[arg-type]
    assert_same_as_forward(q.data, q.scale, *forward_quantized(x, -2, pow2), pow2)
    lead = -(-k // 16) * 16
    assert (q.shape, q.data.stride()) == ((e, k, n), (lead * n, 1, lead))
    # rowwise_2d_scale_and_cast: (M, K), scales (M, 1).
    q = fp8fn.quantize(x[0], (1, -1), scale=scale)  # type: ignore[arg-type]
    assert_same_as_forward(q.data, q.scale, *forward_quantized(x[0], -1, pow2), pow2)


@pytest.mark.parametrize("pow2", [False, True])
def test_the_seeds_per_group_quantizers_are_quantize_grouped(pow2: bool) -> None:
    """Scales there are flat, group-major; `reshape(-1)` of ours is a view where N is a multiple of four."""
    sizes, n, scale = (30, 2, 200), 40, "pow2" if pow2 else "fp32"
    x, offsets = random(sum(sizes), n), ends(sizes)
    parts = [forward_quantized(group, 0, pow2) for group in x.split(sizes)]
    seed = torch.cat([data.view(torch.uint8) for data, _ in parts]).view(E4M3)
    seed_scale = torch.cat([scales.squeeze(0) for _, scales in parts])
    # per_group_colwise_scales: x (K, N), offsets along rows, y (K, N) strides (1, K), scales (N·G) at g·N + col.
    q = fp8fn.quantize_grouped(x, offsets, block=-1, scale=scale)  # type: ignore[arg-type]
    assert_same_as_forward(q.data, q.scale.reshape(-1), seed, seed_scale, pow2)
    assert q.scale.reshape(-1).data_ptr() == q.scale.data_ptr()
    assert q.data.stride() == (1, 240)
    # per_group_rowwise_scales: x (M, K), offsets along columns, y (M, K), scales (M·G) at g·M + row.
    q = fp8fn.quantize_grouped(x.mT, offsets, 1, block=-1, scale=scale)  # type: ignore[arg-type]
    assert_same_as_forward(q.data, q.scale.mT.reshape(-1), seed.mT, seed_scale, pow2)
    assert q.data.stride() == (240, 1)


def test_the_reciprocal_of_a_power_of_two_is_exact() -> None:
    """At every amax near a power of two times FP8's largest value, where a rounding could pass it."""
    exponents = torch.arange(-60, 60).float()
    around = (448 * torch.exp2(exponents)).view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    amax = torch.cat([around.view(torch.float32).flatten(), random(1000, dtype=FP32).abs(), torch.zeros(1)])
    ours = fp8fn.quantize(amax[:, None], (1, -1), scale="pow2").scale.squeeze(1)
    theirs = forward_scale(amax, pow2=True)
    assert torch.equal(1 / ours, theirs)
    assert torch.equal(1 / theirs, ours)
