"""Whole columns quantized in CUDA C++: bits in the emulator, a block alone; machine code; clusters on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops import reference, targets
from fp8fn.ops.cuda.quantize import quantize_columns as columns
from fp8fn.ops.cuda.quantize import quantize_rows, stream_columns, walk_columns
from fp8fn.ops.cuda.quantize.quantize_columns import _CONFIGS, _LARGE_GPCS, _TALL, ColumnsConfig, default_config
from fp8fn.ops.cuda.quantize.stream_columns import (
    _BESIDE,
    _STREAMS,
    _STREAMS_OF_FEW,
    _STREAMS_OF_GROUPS,
    StreamConfig,
)
from fp8fn.ops.cuda.quantize.stream_columns import (
    default_config as default_stream,
)
from fp8fn.ops.cuda.quantize.walk_columns import WalkConfig
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.operands import Quantization
from fp8fn.ops.quantize import quantize_kernel
from fp8fn.ops.quantize_grouped import quantize_grouped_kernel
from fp8fn.ops.targets import SM100
from support.accuracy import same_bits
from support.compilers import needs_nvrtc
from support.configs import COLUMN_TILES, STREAMS, WALKS
from support.cuda_emulator import hopper_on_cpu, needs_compiler
from support.operands.columns import WholeColumnsConfig, planned, run
from support.quantizers import marked, quantization, tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


_OF_MATRICES: Final = tuple(dict.fromkeys((*(tile for _, tile in (*_STREAMS, *_STREAMS_OF_FEW)), _BESIDE)))
_OF_GROUPS: Final = tuple(tile for _, tile in _STREAMS_OF_GROUPS)
_ALL_STREAMS: Final = tuple(dict.fromkeys((*_OF_MATRICES, *_OF_GROUPS)))

_ALL_WALKS: Final = tuple(walk for _, walk in walk_columns._WALKS)


def referred(q: Quantization) -> Any:
    """The reference's data and scales."""
    form = q.block, q.dtype, q.scale
    if q.offsets is None:
        return reference.quantize(q.x, *form)
    return reference.quantize_grouped(q.x, q.offsets, *form)


def quantized(x: Tensor, dtype: torch.dtype, scale: str, config: WholeColumnsConfig = None) -> Sequence[Tensor]:
    q = marked(quantization(x, (-1, 1), dtype=dtype, scale=scale))
    run(planned(q, config))
    return tensors(q)


def grouped(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, scale: str, config: WholeColumnsConfig = None
) -> Sequence[Tensor]:
    q = marked(quantization(x, (-1, 1), dtype=dtype, scale=scale, offsets=offsets))
    run(planned(q, config))
    return tensors(q)


@needs_compiler
@pytest.mark.parametrize("config", COLUMN_TILES, ids=str)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_matrices_have_the_references_bits(config: WholeColumnsConfig, backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards):
        for shape, dtype, scale, fp8 in (
            ((1, 1), BF16, "fp32", E4M3),
            ((100, 136), BF16, "pow2", E4M3),
            ((77, 99), FP16, "fp32", E5M2),
            ((130, 33), FP32, "e8m0", E4M3),
            ((2, 3, 33, 70), BF16, "fp32", E4M3),
        ):
            x = torch.randn(shape, dtype=dtype)
            assert columns.accepts(quantization(x, (-1, 1), dtype=fp8)) is None
            wanted = reference.quantize(x, (-1, 1), fp8, scale)
            assert same_bits(quantized(x, fp8, scale, config), wanted), (shape, dtype)


@needs_compiler
@pytest.mark.parametrize("config", COLUMN_TILES, ids=str)
def test_groups_have_the_references_bits(config: WholeColumnsConfig) -> None:
    with hopper_on_cpu():
        for sizes, rest in (([0, 1, 15, 16, 17, 60], 5), ([3] * 9, 0), ([150], 0), ([0, 0, 40, 0], 30), ([0], 20)):
            offsets = torch.tensor(sizes).cumsum(0).int()
            for width, dtype, scale in ((72, BF16, "fp32"), (37, FP32, "pow2"), (8, FP16, "fp32")):
                x = torch.randn(sum(sizes) + rest, width, dtype=dtype)
                x[sum(sizes) :] = torch.nan
                found = grouped(x, offsets, E4M3, scale, config)
                assert same_bits(found, reference.quantize_grouped(x, offsets, (-1, 1), E4M3, scale)), (sizes, dtype)


@needs_compiler
@pytest.mark.parametrize("config", STREAMS, ids=str)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_streamed_matrices_have_the_references_bits(config: WholeColumnsConfig, backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards):
        for shape, dtype, scale, fp8 in (
            ((1, 1), BF16, "fp32", E4M3),
            ((129, 136), BF16, "pow2", E4M3),
            ((77, 104), FP16, "fp32", E5M2),
            ((300, 36), FP32, "e8m0", E4M3),
            ((2, 3, 257, 72), BF16, "rceil", E4M3),
            ((1100, 64), BF16, "fp32", E4M3),
            ((400, 640), BF16, "pow2", E4M3),  # panel after panel
        ):
            x = torch.randn(*shape[:-1], -(-shape[-1] // 8) * 8, dtype=dtype)[..., : shape[-1]]
            wanted = reference.quantize(x, (-1, 1), fp8, scale)
            assert same_bits(quantized(x, fp8, scale, config), wanted), (shape, dtype)


@needs_compiler
@pytest.mark.parametrize("config", STREAMS, ids=str)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_streamed_groups_have_the_references_bits(config: WholeColumnsConfig, backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards):
        for sizes, rest in (
            ([0, 1, 15, 16, 17, 60, 31, 33], 5),
            ([3] * 9, 0),
            ([127, 2, 128, 129, 260, 1], 0),
            ([0, 0, 40, 0], 130),
            ([0], 20),
            ([700, 0, 90], 3),
        ):
            offsets = torch.tensor(sizes).cumsum(0).int()
            for width, dtype, scale in ((72, BF16, "fp32"), (36, FP32, "pow2"), (136, FP16, "fp32")):
                x = torch.randn(sum(sizes) + rest, width, dtype=dtype)
                x[sum(sizes) :] = torch.nan
                found = grouped(x, offsets, E4M3, scale, config)
                assert same_bits(found, reference.quantize_grouped(x, offsets, (-1, 1), E4M3, scale)), (sizes, dtype)


@needs_compiler
@pytest.mark.parametrize(
    "tiles",
    [(StreamConfig(2, 4, HELD=2), StreamConfig(3, 3)), (StreamConfig(1, 3), StreamConfig(1, 6, BOX=128, HELD=4))],
)
def test_two_launches_divide_the_columns(tiles: tuple[StreamConfig, StreamConfig]) -> None:
    """In either order: neither reads what the other writes."""
    for shape, border, dtype, sizes in (
        ((1100, 200), 128, BF16, None),
        ((3, 600, 72), 64, BF16, None),
        ((700, 100), 32, FP32, None),
        ((930, 136), 64, FP16, [900]),
        ((1000, 320), 192, BF16, [300, 0, 700]),
    ):
        x = torch.randn(shape, dtype=dtype)
        offsets = None if sizes is None else torch.tensor(sizes).cumsum(0).int()
        for order in (1, -1):
            q = marked(quantization(x, (-1, 1), offsets=offsets))
            spans = ((0, border), (border, shape[-1]))
            first, second = (
                stream_columns.plan_part(q, tile, 2, span) for tile, span in zip(tiles, spans, strict=True)
            )
            assert (first.overlaps, second.overlaps) == (False, True)
            with hopper_on_cpu():
                run((first, second)[::order])
            assert same_bits(tensors(q), referred(q)), (shape, sizes, order)


@needs_compiler
@pytest.mark.parametrize("config", WALKS, ids=str)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_walked_groups_have_the_references_bits(config: WholeColumnsConfig, backwards: bool) -> None:
    with hopper_on_cpu(backwards=backwards):
        for sizes, rest in (
            ([0, 1, 15, 16, 17, 60, 31, 33], 5),
            ([1] * 70 + [3] * 40, 0),
            ([127, 2, 128, 129, 260, 1], 0),
            ([260] * 6, 0),
            ([7, 900, 20, 0, 700, 300, 1], 0),  # one that is surveyed begins where another ends
            ([100, 120, 1900, 30], 90),
            ([300, 133, 40, 43, 97, 76, 73, 162, 1302, 20], 0),  # rows wait for a scale while one is surveyed
            ([0, 0, 40, 0], 300),
            ([0, 128, 128, 0, 0], 0),
            ([0], 20),
        ):
            offsets = torch.tensor(sizes).cumsum(0).int()
            for width, dtype, scale in (
                (72, BF16, "fp32"),
                (36, FP32, "pow2"),
                (136, FP16, "e8m0"),
                (203, BF16, "rceil"),
            ):
                x = torch.randn(sum(sizes) + rest, -(-width // 8) * 8, dtype=dtype)[:, :width]
                x[sum(sizes) :] = torch.nan
                found = grouped(x, offsets, E4M3, scale, config)
                assert same_bits(found, reference.quantize_grouped(x, offsets, (-1, 1), E4M3, scale)), (sizes, dtype)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2, 7, 9, 50])
def test_a_walk_may_be_cut_anywhere(blocks: int) -> None:
    for sizes, rest in (
        ([40, 0, 130, 129, 1, 16, 0, 15, 300, 128, 9, 0], 33),
        ([16, 128, 36, 0], 0),  # a share of the last group alone, and of the next panel
    ):
        offsets = torch.tensor(sizes).cumsum(0).int()
        x = torch.randn(sum(sizes) + rest, 136, dtype=BF16)
        q = marked(quantization(x, (-1, 1), dtype=E5M2, offsets=offsets))
        q.out.scale.fill_(-1)
        with hopper_on_cpu():
            run(walk_columns.plan(q, WalkConfig(4), blocks))
        assert same_bits(tensors(q), reference.quantize_grouped(x, offsets, (-1, 1), E5M2, "fp32"))


@needs_compiler
def test_a_walk_begins_at_the_right_one_of_many_groups() -> None:
    sizes = torch.randint(0, 5, (700,))
    offsets = sizes.cumsum(0).int()
    x = torch.randn(int(offsets[-1]), 64, dtype=BF16)
    with hopper_on_cpu():
        assert same_bits(
            grouped(x, offsets, E4M3, "fp32", WalkConfig(5)),
            reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32"),
        )


@needs_compiler
def test_hard_values_stay_in_their_columns() -> None:
    x = torch.randn(90, 48, dtype=BF16)
    x[3, 5], x[89, 6], x[40, 7] = torch.nan, torch.inf, -torch.inf
    x[:, 8:16] = 0
    x[:, 16:24] *= 1e-39
    x[:, 24:32] *= 1e38
    with hopper_on_cpu():
        for config in (*COLUMN_TILES, *STREAMS):
            found = quantized(x, E4M3, "fp32", config)
            assert same_bits(found, reference.quantize(x, (-1, 1), E4M3, "fp32"))
            assert found[1].isfinite().sum() == 45
        for values in ([3, 41, 90], [89, 90]):  # of rows of a group beside those of another in the same 16 bytes
            offsets = torch.tensor(values, dtype=torch.int32)
            found = grouped(x, offsets, E4M3, "fp32", WALKS[0])
            assert same_bits(found, reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32"))
            assert found[1].isfinite().sum() == 48 * len(values) - 3


@needs_compiler
def test_offsets_that_sink_or_pass_the_rows_touch_nothing_outside() -> None:
    x = torch.randn(100, 40, dtype=BF16)
    with hopper_on_cpu():
        for values in ([70, 20, 300], [-5, 10, 2**31 - 1], [100, 0, 0], [1000, 1000, 1000]):
            for config in (COLUMN_TILES[0], *STREAMS[:2], *WALKS):
                grouped(x, torch.tensor(values, dtype=torch.int32), E4M3, "fp32", config)


@needs_compiler
def test_the_ops_take_it() -> None:
    """Along the rows of a column-major matrix too, which is the same."""
    x = torch.randn(520, 72, dtype=BF16)
    offsets = torch.tensor([515], dtype=torch.int32)
    with hopper_on_cpu() as launches:
        assert same_bits(quantize_kernel(x, (-1, 1)), reference.quantize(x, (-1, 1), E4M3, "fp32"))
        assert same_bits(quantize_kernel(x.mT, (1, -1)), reference.quantize(x.mT, (1, -1), E4M3, "fp32"))
        wanted = reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32")
        with pytest.MonkeyPatch.context() as patch:  # of two blocks for the emulator, not of 16
            patch.setattr(stream_columns, "_STREAMS_OF_GROUPS", ((10**9, StreamConfig(2, 6)),))
            assert same_bits(quantize_grouped_kernel(x, offsets, (-1, 1)), wanted)
        for rest in (x[:, 1:], x[:1].expand(520, 72), x[:200]):
            assert same_bits(quantize_kernel(rest, (-1, 1)), reference.quantize(rest, (-1, 1), E4M3, "fp32"))
    assert [launch.name for launch in launches] == ["stream_columns"] * 3 + ["quantize_columns"] * 3
    meta = torch.empty(200, 72, device="meta", dtype=BF16)
    rows = quantization(meta.mT, (-1, 1)), quantization(meta, (1, -1))
    for q in rows:
        assert "are contiguous" in str(columns.accepts(q))
        assert quantize_rows.accepts(q) is None
    assert "no whole column" in str(columns.accepts(quantization(meta, (-1, -1))))
    assert "not sm90" in str(columns.accepts(quantization(meta, (-1, 1), target=SM100)))
    assert "no type" in str(columns.accepts(quantization(meta, (-1, 1), dtype=torch.float8_e4m3fnuz)))


def test_the_tile_keeps_the_rows_where_a_cluster_can() -> None:
    for rows, cores in product((1, 512, 513, 1040, 4000, 6500, 8192, 13056, 16640, 27000), (114, 132)):
        tile = default_config(rows, cores)
        assert rows <= tile.rows(rows) * tile.CLUSTER
        assert tile.overhead + tile.rows(rows) * tile.PANEL <= 227 << 10
    assert default_config(10**6, 132) == _TALL
    assert (default_config(8192, 114).CLUSTER, default_config(8192, 132).CLUSTER) == (8, 16)
    assert _TALL.rows(10**6) * _TALL.CLUSTER == _TALL.most_rows
    for most, tile in (
        *_CONFIGS,
        *_LARGE_GPCS,
    ):  # blocks that share the 228 KB of a multiprocessor, which keeps 1 of each
        assert tile.RESIDENT * (tile.overhead + tile.rows(most) * tile.PANEL + 1024) <= 228 << 10
    x = torch.empty(640, 64, device="meta", dtype=BF16)
    offsets = torch.empty(4, device="meta", dtype=torch.int32)
    q = quantization(x, (-1, 1), offsets=offsets)
    (launch,) = columns.plan(q, columns.configure(q))
    assert launch.args["kept"] == 224  # of 160, an eighth more, and what a group's first sector may hold of another


def launches_of(tile: ColumnsConfig | StreamConfig) -> Iterator[CudaLaunch]:
    """Launches for matrices and for groups, in 16 bits and in 32."""
    for dtype, width in ((BF16, 512), (FP32, 500)):
        x = torch.empty(1000, width, device="meta", dtype=dtype)
        offsets = torch.empty(4, device="meta", dtype=torch.int32)
        for q in (quantization(x, (-1, 1)), quantization(x, (-1, 1), offsets=offsets)):
            if isinstance(tile, StreamConfig):
                yield stream_columns.plan_part(q, tile)
            else:
                yield from columns.plan(q, tile)


@needs_nvrtc
@pytest.mark.parametrize("tile", [*(tile for _, tile in (*_CONFIGS, *_LARGE_GPCS)), _TALL], ids=str)
def test_machine_code(tile: ColumnsConfig) -> None:
    for launch in launches_of(tile):
        used = launch.resources()
        assert used.spills == 0
        assert used.registers * launch.threads * tile.RESIDENT <= 65536


@needs_nvrtc
@pytest.mark.parametrize("tile", _ALL_STREAMS, ids=str)
def test_machine_code_of_streams(tile: StreamConfig) -> None:
    for launch in launches_of(tile):
        if tile not in (_OF_MATRICES if launch.args["offsets"] is None else _OF_GROUPS):
            continue
        used = launch.resources()
        assert used.spills == 0
        assert used.registers * launch.threads * tile.RESIDENT <= 65536
        assert (launch.shared + 1024) * tile.RESIDENT <= 228 << 10


@needs_nvrtc
@pytest.mark.parametrize("tile", _ALL_WALKS, ids=str)
def test_machine_code_of_walks(tile: WalkConfig) -> None:
    for dtype, width in ((BF16, 512), (FP16, 512), (FP32, 500)):
        x = torch.empty(1000, width, device="meta", dtype=dtype)
        offsets = torch.empty(4, device="meta", dtype=torch.int32)
        (launch,) = walk_columns.plan(quantization(x, (-1, 1), offsets=offsets), tile)
        used = launch.resources()
        assert used.spills == 0
        assert used.registers * launch.threads * tile.RESIDENT <= 65536
        assert (launch.shared + 1024) * tile.RESIDENT <= 228 << 10


def test_the_ring_holds_the_rows_and_more() -> None:
    for rows, panels, grouped in product(
        (513, 1024, 1100, 2048, 4096, 5120, 7168, 8192, 16640, 23000), (80, 2048), (False, True)
    ):
        tile = default_stream(rows, panels, grouped)
        chunks = -(-(rows + (tile.BASE - 1) * grouped) // (128 * tile.CLUSTER))
        assert chunks < tile.STAGES, (rows, panels, grouped)
    assert default_stream(8192, 80, False).RESIDENT == 2
    assert default_stream(8192, 1280, False) == StreamConfig(16, BOX=128)


def test_what_clusters_of_16_leave_idle_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def launches(x: Tensor, resident: dict[int, int], groups: int = 0) -> list[tuple[int, int, int, int]]:
        """CLUSTER, blocks, and of which columns to which."""
        monkeypatch.setattr(
            stream_columns, "_resident", lambda kernel, tile, *_: resident[tile.CLUSTER] * tile.RESIDENT
        )
        offsets = torch.empty(groups, device="meta", dtype=torch.int32) if groups else None
        found = planned(quantization(x, (-1, 1), offsets=offsets))
        return [
            (launch.options["CLUSTER"], launch.grid[0], launch.args["begin"], launch.args["end"]) for launch in found
        ]

    h200 = {16: 7, 8: 15}
    x = torch.empty(16640, 5120, device="meta", dtype=BF16)
    assert launches(x, h200) == launches(x, h200, 1) == [(16, 112, 0, 4928), (8, 8, 4928, 5120)]
    assert launches(x, {16: 7, 8: 14}) == [(16, 112, 0, 5120)]  # nothing is idle
    assert launches(x, {16: 6, 8: 14}) == [(16, 96, 0, 4608), (8, 16, 4608, 5120)]
    assert launches(x[:8192], h200) == [(16, 224, 0, 4800), (8, 8, 4800, 5120)]
    assert launches(x[:, :5000].unflatten(0, (2, 8320)), h200) == [(16, 224, 0, 4736), (8, 8, 4736, 5000)]
    assert launches(x[:5120], h200) == [(8, 240, 0, 5120)]
    assert launches(torch.empty(17409, 5120, device="meta", dtype=BF16), h200) == [(16, 112, 0, 5120)]  # too long
    assert launches(x[:, :320], h200) == [(16, 80, 0, 320)]
    assert launches(torch.empty(16640, 28672, device="meta", dtype=BF16), h200) == [(16, 112, 0, 28672)]


def test_the_plan_streams_many_rows_that_the_copy_engine_takes() -> None:
    def name(x: Tensor, count: int = 0) -> str:
        offsets = torch.empty(count, device="meta", dtype=torch.int32) if count else None
        return " ".join(launch.name for launch in planned(quantization(x, (-1, 1), offsets=offsets)))

    x = torch.empty(16640, 72, device="meta", dtype=BF16)
    assert [name(x), name(x[:512]), name(x[:513])] == ["stream_columns", "quantize_columns", "stream_columns"]
    assert [name(x, 1), name(x, 16), name(x, 64)] == ["stream_columns", "stream_columns", "quantize_columns"]
    wide = torch.empty(16640, 4096, device="meta", dtype=BF16)
    names = [name(wide, groups) for groups in (1, 16, 32, 64, 256, 1000)]
    assert names == ["stream_columns"] * 2 + ["walk_columns"] * 3 + ["quantize_columns"]
    assert name(torch.empty(16640, 77, device="meta", dtype=BF16)) == "quantize_columns"  # rows of 154 bytes
    assert name(x[:1].expand(1000, 72)) == "quantize_columns"  # one row again and again


def default_walk(x: Tensor, groups: int) -> WalkConfig | None:
    """The walk over groups; None unless they are small and many enough."""
    q = quantization(x, (-1, 1), offsets=torch.empty(groups, device="meta", dtype=torch.int32))
    return walk_columns.configure(q) if walk_columns.untuned(q) is None else None


def test_blocks_walk_over_equal_parts_of_panels() -> None:
    x = torch.empty(16640, 8192, device="meta", dtype=BF16)
    assert default_walk(x, 64) == WalkConfig(4, BOX=128)  # its ring holds the mean group, wherever it begins
    assert default_walk(x, 32) == WalkConfig(7, RESIDENT=2)
    assert default_walk(x, 16) is None
    assert default_walk(x[:, :1024], 64) is None
    offsets = torch.empty(64, device="meta", dtype=torch.int32)
    for width, blocks in ((8192, 256), (5120, 240), (7168, 224), (6144, 264), (16384 + 8192, 264), (2048, 256)):
        x = torch.empty(16640, width, device="meta", dtype=BF16)
        (launch,) = walk_columns.plan(quantization(x, (-1, 1), offsets=offsets), WalkConfig())
        assert launch.grid == (blocks, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [0, 1])
def test_a_launch_after_two_that_divide_the_columns_waits_for_both(groups: int) -> None:
    """And both for what wrote x: eagerly, on a stream of their own, and replayed as a graph."""
    offsets = torch.tensor([16500], device="cuda", dtype=torch.int32) if groups else None
    inputs = [torch.randn(16640, 5120, device="cuda", dtype=BF16) * 2**i for i in range(3)]
    wanted = [referred(quantization(x, (-1, 1), offsets=offsets)) for x in inputs]
    x = torch.empty_like(inputs[0])
    right = torch.zeros((), device="cuda", dtype=torch.int64)

    def step(i: int) -> None:
        x.copy_(inputs[i])
        data, scale = quantize_kernel(x, (-1, 1)) if offsets is None else quantize_grouped_kernel(x, offsets, (-1, 1))
        x.zero_()
        right.add_((data.view(torch.uint8) == wanted[i][0].view(torch.uint8)).all() & (scale == wanted[i][1]).all())
        data.view(torch.uint8).zero_()

    for i in range(30):
        step(i % 3)
    assert right.item() == 30
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(30):
            step(i % 3)
    stream.synchronize()
    assert right.item() == 60
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(3):
            step(i)
    for _ in range(10):
        graph.replay()
    assert right.item() == 90


@pytest.mark.gpu
def test_clusters_have_the_references_bits() -> None:
    target = targets.target_of(torch.device("cuda"))
    if target.name != "sm90" or nvrtc.unavailable() is not None:
        pytest.skip("the kernel is Hopper's, compiled by NVRTC")
    tiles: list[WholeColumnsConfig] = [(tile, None) for _, tile in (*_CONFIGS, *_LARGE_GPCS)]
    tiles += [
        (_TALL, None),
        (ColumnsConfig(128, 4, 2), 32),
        (ColumnsConfig(64, 8, 4), 48),
        *STREAMS,
        *_ALL_STREAMS,
        None,
    ]
    for config in (*tiles, *WALKS, *_ALL_WALKS):
        for shape, dtype in (((3000, 136), BF16), ((2, 1000, 104), FP16), ((700, 64), FP32), ((5, 8), BF16)):
            if isinstance(config, WalkConfig):
                break  # of groups alone
            x = torch.randn(shape, device="cuda", dtype=dtype)
            wanted = reference.quantize(x, (-1, 1), E4M3, "fp32")
            assert same_bits(quantized(x, E4M3, "fp32", config), wanted), (config, shape)
        for sizes, rest in (([0, 1, 1000, 17, 500], 5), ([3] * 40, 0), ([3000], 0), ([0, 0, 40, 0], 130)):
            offsets = torch.tensor(sizes, device="cuda").cumsum(0).int()
            x = torch.randn(sum(sizes) + rest, 200, device="cuda", dtype=BF16)
            x[sum(sizes) :] = torch.nan
            wanted = reference.quantize_grouped(x, offsets, (-1, 1), E4M3, "fp32")
            assert same_bits(grouped(x, offsets, E4M3, "fp32", config), wanted), (config, sizes)


@pytest.mark.gpu
def test_a_tall_matrix_through_the_op() -> None:
    x = torch.randn(40000, 1000, device="cuda", dtype=BF16)
    found = fp8fn.quantize(x, (-1, 1))
    assert same_bits((found.data, found.scale), reference.quantize(x, (-1, 1), E4M3, "fp32"))
