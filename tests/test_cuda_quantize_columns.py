"""Whole columns quantized in CUDA C++: bits in the emulator, a block alone; machine code; clusters on a GPU."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cuda_emulator import hopper_on_cpu, needs_compiler

import fp8fn
from fp8fn.ops import reference, targets
from fp8fn.ops.cuda import nvrtc
from fp8fn.ops.cuda import quantize_columns as columns
from fp8fn.ops.cuda.launch import CudaLaunch
from fp8fn.ops.cuda.quantize import Quantized, batched
from fp8fn.ops.cuda.quantize_columns import _LARGE_GPCS, _TALL, _TILES, Tile, default_tile
from fp8fn.ops.groups import empty_grouped
from fp8fn.ops.layout import empty_data, empty_scale
from fp8fn.ops.quantize import quantize_kernel
from fp8fn.ops.quantize_grouped import quantize_grouped_kernel
from fp8fn.ops.targets import SM90, SM100

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

# With the rows that a block keeps: a part, with the rest read twice; or all of them.
SMALL: Final = ((Tile(128, 1, 2), 32), (Tile(64, 4, 2), 16), (Tile(128, 3, 4), None), (Tile(64, 1, 8), 576))


def same(found: Any, wanted: Any) -> bool:
    for got, want in zip(found, wanted, strict=True):
        if got.shape != want.shape or got.stride() != want.stride() or got.dtype != want.dtype:
            return False
        if not torch.equal(got.float().cpu().nan_to_num(12345.0), want.float().cpu().nan_to_num(12345.0)):
            return False
    return True


def quantized(
    x: Tensor, dtype: torch.dtype, scale: str, tile: Tile | None = None, kept: int | None = None
) -> Quantized:
    out = Quantized(empty_data(x, (-1, 1), dtype), empty_scale(x, (-1, 1), scale))
    out.data.view(torch.uint8).fill_(0x55)
    run(columns.plan(batched(x), out.batch, scale, SM90, tile=tile, kept=kept))
    return out


def grouped(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, tile: Tile | None = None, kept: int | None = None
) -> Quantized:
    out = Quantized(*empty_grouped(x, offsets.shape[0], (-1, 1), dtype, scale))
    out.data.view(torch.uint8).fill_(0x55)
    run(columns.plan(x, out, scale, SM90, offsets, tile, kept))
    return out


def run(launch: CudaLaunch) -> None:
    from fp8fn.ops.cuda.launch import pointers

    launch.prepare().launch(pointers(launch.args))


@needs_compiler
@pytest.mark.parametrize(("tile", "kept"), SMALL, ids=str)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_matrices_have_the_references_bits(tile: Tile, kept: int | None, backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards):
        for shape, dtype, scale, fp8 in (
            ((1, 1), BF16, "fp32", E4M3),
            ((100, 136), BF16, "pow2", E4M3),
            ((77, 99), FP16, "fp32", E5M2),
            ((130, 33), FP32, "e8m0", E4M3),
            ((2, 3, 33, 70), BF16, "fp32", E4M3),
        ):
            x = torch.randn(shape, dtype=dtype)
            assert columns.accepts(x, (-1, 1), fp8, SM90) is None
            wanted = reference.quantize(x, (-1, 1), fp8, scale)
            assert same(quantized(x, fp8, scale, tile, kept), wanted), (shape, dtype)


@needs_compiler
@pytest.mark.parametrize(("tile", "kept"), SMALL, ids=str)
def test_groups_have_the_references_bits(tile: Tile, kept: int | None) -> None:
    with hopper_on_cpu():
        for sizes, rest in (([0, 1, 15, 16, 17, 60], 5), ([3] * 9, 0), ([150], 0), ([0, 0, 40, 0], 30), ([0], 20)):
            offsets = torch.tensor(sizes).cumsum(0).int()
            for width, dtype, scale in ((72, BF16, "fp32"), (37, FP32, "pow2"), (8, FP16, "fp32")):
                x = torch.randn(sum(sizes) + rest, width, dtype=dtype)
                x[sum(sizes) :] = torch.nan
                found = grouped(x, offsets, E4M3, scale, tile, kept)
                assert same(found, reference.quantize_grouped(x, offsets, (-1, 1), E4M3, scale)), (sizes, dtype)


@needs_compiler
def test_hard_values_stay_in_their_columns() -> None:
    x = torch.randn(90, 48, dtype=BF16)
    x[3, 5], x[89, 6], x[40, 7] = torch.nan, torch.inf, -torch.inf
    x[:, 8:16] = 0
    x[:, 16:24] *= 1e-39
    x[:, 24:32] *= 1e38
    with hopper_on_cpu():
        for tile, kept in SMALL:
            found = quantized(x, E4M3, "fp32", tile, kept)
            assert same(found, reference.quantize(x, (-1, 1), E4M3, "fp32"))
            assert found.scale.isfinite().sum() == 45


@needs_compiler
def test_offsets_that_sink_or_pass_the_rows_touch_nothing_outside() -> None:
    x = torch.randn(100, 40, dtype=BF16)
    with hopper_on_cpu():
        for values in ([70, 20, 300], [-5, 10, 2**31 - 1], [100, 0, 0], [1000, 1000, 1000]):
            grouped(x, torch.tensor(values, dtype=torch.int32), E4M3, "fp32", *SMALL[0])


@needs_compiler
def test_the_ops_take_it() -> None:
    """Along the rows of a column-major matrix too, which is the same."""
    x = torch.randn(200, 72, dtype=BF16)
    offsets = torch.tensor([50, 170], dtype=torch.int32)
    with hopper_on_cpu() as launches:
        assert same(quantize_kernel(x, (-1, 1)), reference.quantize(x, (-1, 1), E4M3, "fp32"))
        assert same(quantize_kernel(x.mT, (1, -1)), reference.quantize(x.mT, (1, -1), E4M3, "fp32"))
        wanted = reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32")
        assert same(quantize_grouped_kernel(x, offsets, (-1, 1)), wanted)
    assert [launch.name for launch in launches] == ["quantize_columns"] * 3
    meta = torch.empty(200, 72, device="meta", dtype=BF16)
    assert columns.accepts(meta.mT, (-1, 1), E4M3, SM90) is None  # as rows
    assert "no whole column" in str(columns.accepts(meta, (-1, -1), E4M3, SM90))
    assert columns.accepts(meta, (1, -1), E4M3, SM90) is None
    assert "not sm90" in str(columns.accepts(meta, (-1, 1), E4M3, SM100))
    assert "no type" in str(columns.accepts(meta, (-1, 1), torch.float8_e4m3fnuz, SM90))


def test_the_tile_keeps_the_rows_where_a_cluster_can() -> None:
    for rows, cores in product((1, 512, 513, 1040, 4000, 6500, 8192, 13056, 16640, 27000), (114, 132)):
        tile = default_tile(rows, cores)
        assert rows <= tile.rows(rows) * tile.CLUSTER
        assert tile.overhead + tile.rows(rows) * tile.PANEL <= 227 << 10
    assert default_tile(10**6, 132) == _TALL
    assert (default_tile(8192, 114).CLUSTER, default_tile(8192, 132).CLUSTER) == (8, 16)
    assert _TALL.rows(10**6) * _TALL.CLUSTER == _TALL.most_rows
    for most, tile in (
        *_TILES,
        *_LARGE_GPCS,
    ):  # blocks that share the 228 KB of a multiprocessor, which keeps 1 of each
        assert tile.RESIDENT * (tile.overhead + tile.rows(most) * tile.PANEL + 1024) <= 228 << 10
    x = torch.empty(640, 64, device="meta", dtype=BF16)
    offsets = torch.empty(4, device="meta", dtype=torch.int32)
    launch = columns.plan(x, Quantized(*empty_grouped(x, 4, (-1, 1), E4M3, "fp32")), "fp32", SM90, offsets)
    assert launch.args["kept"] == 224  # of 160, an eighth more, and what a group's first sector may hold of another


@needs_nvrtc
@pytest.mark.parametrize("tile", [*(tile for _, tile in (*_TILES, *_LARGE_GPCS)), _TALL], ids=str)
def test_machine_code(tile: Tile) -> None:
    for dtype, width in ((BF16, 512), (FP32, 500)):
        x = torch.empty(1000, width, device="meta", dtype=dtype)
        offsets = torch.empty(4, device="meta", dtype=torch.int32)
        out = Quantized(empty_data(x, (-1, 1), E4M3), empty_scale(x, (-1, 1), "fp32"))
        groups = Quantized(*empty_grouped(x, 4, (-1, 1), E4M3, "fp32"))
        for launch in (
            columns.plan(x, out, "fp32", SM90, tile=tile),
            columns.plan(x, groups, "fp32", SM90, offsets, tile),
        ):
            used = launch.resources()
            assert used.spills == 0
            assert used.registers * launch.threads * tile.RESIDENT <= 65536


@pytest.mark.gpu
def test_clusters_have_the_references_bits() -> None:
    target = targets.target_of(torch.device("cuda"))
    if target.name != "sm90" or nvrtc.unavailable() is not None:
        pytest.skip("the kernel is Hopper's, compiled by NVRTC")
    tiles = [(tile, None) for _, tile in (*_TILES, *_LARGE_GPCS)] + [
        (_TALL, None),
        (Tile(128, 4, 2), 32),
        (Tile(64, 8, 4), 48),
    ]
    for tile, kept in tiles:
        for shape, dtype in (((3000, 136), BF16), ((2, 1000, 99), FP16), ((700, 64), FP32), ((5, 8), BF16)):
            x = torch.randn(shape, device="cuda", dtype=dtype)
            wanted = reference.quantize(x, (-1, 1), E4M3, "fp32")
            assert same(quantized(x, E4M3, "fp32", tile, kept), wanted), (tile, shape)
        for sizes, rest in (([0, 1, 1000, 17, 500], 5), ([3] * 40, 0), ([3000], 0), ([0, 0, 40, 0], 130)):
            offsets = torch.tensor(sizes, device="cuda").cumsum(0).int()
            x = torch.randn(sum(sizes) + rest, 200, device="cuda", dtype=BF16)
            x[sum(sizes) :] = torch.nan
            wanted = reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32")
            assert same(grouped(x, offsets, E4M3, "fp32", tile, kept), wanted), (tile, sizes)


@pytest.mark.gpu
def test_a_tall_matrix_through_the_op() -> None:
    x = torch.randn(40000, 1000, device="cuda", dtype=BF16)
    found = fp8fn.quantize(x, (-1, 1))
    assert same((found.data, found.scale), reference.quantize(x, (-1, 1), E4M3, "fp32"))
