"""The emulator of CUDA is an adversary: what it says of kernels out of which something was taken that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from support import cuda_emulator

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops.cuda.gemm import a16w8_tiles, gemv_a16w8, mm_a16w8, mx_tiles
from fp8fn.ops.cuda.gemm import scaled_mm as products
from fp8fn.ops.cuda.quantize import quantize_rows, stream_columns
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.targets import SM90
from support.cuda_emulator import emulate, hopper_on_cpu, needs_compiler
from support.products import planned, quantized, scaled_product, weight_product
from support.quantizers import quantization

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = needs_compiler


@contextmanager
def changed(file: str, old: str, new: str) -> Iterator[None]:
    """Inside, kernels are compiled from sources in one of which `new` stands for `old`."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in nvrtc.sources().values()}
    assert texts[file].count(old) == 1, f"{old!r} in {file}"
    texts[file] = texts[file].replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "_text", texts.__getitem__)
        patch.setattr(nvrtc, "_headers", lambda: {name: text for name, text in texts.items() if name.endswith("h")})
        cuda_emulator._built.cache_clear()
        try:
            yield
        finally:
            cuda_emulator._built.cache_clear()


def rows_by_weight(kernel: Any, config: Any, m: int, n: int, k: int, out: torch.dtype = FP32) -> Tensor:
    """Emulates a product of 16-bit rows by an FP8 weight."""
    torch.manual_seed(0)
    x, w = torch.randn(m, k).bfloat16(), fp8fn.quantize(torch.randn(n, k), (128, 128)).mT
    found = torch.full((m, n), 7.0, dtype=out)
    emulate(planned(kernel, weight_product(x, w, found), config))
    return found


def gemv(*, cluster: int = 1, limit: int = 200 << 10) -> Tensor:
    config = gemv_a16w8.GemvConfig(8, 1, 1, 4, 2, cluster, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemv_a16w8, "SHARED_LIMIT", limit)
        return rows_by_weight(gemv_a16w8, config, 7, 64, 1536)


def gemv_in_chunks() -> Tensor:
    return gemv(limit=12 << 10)


def gemv_of_a_cluster() -> Tensor:
    return gemv(cluster=2)


def tiles(*, late: bool = False, cluster: int = 1) -> Tensor:
    config = a16w8_tiles.A16W8TilesConfig(8, 4, 2, cluster, LATE=late)
    return rows_by_weight(a16w8_tiles, config, 5, 64, 768)


def late_tiles() -> Tensor:
    return tiles(late=True)


def many() -> Tensor:
    config = mm_a16w8.ManyRowsConfig(32, 1, 1, MATH=1, RESIDENT=4)
    return rows_by_weight(mm_a16w8, config, 32, 64, 256, BF16)


def gated(*, backwards: bool = False) -> Tensor:
    """Tiles of more parts than there are pairs of buffers."""
    torch.manual_seed(0)
    x = (torch.randn(330, 256) / 8).to(BF16)
    w, up = (fp8fn.quantize(torch.randn(72, 256), (128, 128)).mT for _ in range(2))
    out = torch.full((330, 72), 7.0, dtype=BF16)
    given = weight_product(x, w, out, replace(SM90, multiprocessors=1), w_up=quantized(up))
    (launch,) = mm_a16w8.plan(given, mm_a16w8.ManyRowsConfig(160, TURNS=True, GATED=True))
    emulate(launch, backwards=backwards)
    return out


def silu_first() -> Tensor:
    return gated(backwards=True)


def mx(depth: int = 2) -> Tensor:
    torch.manual_seed(0)
    a = fp8fn.quantize(torch.randn(5, 512), (1, 32), scale="e8m0")
    b = fp8fn.quantize(torch.randn(512, 64), (32, 1), scale="e8m0")
    out = torch.full((5, 64), 7.0)
    (launch,) = mx_tiles.plan(scaled_product(a, b, out, SM90), mx_tiles.MxTilesConfig(8, 4, 1, 2, DEPTH=depth))
    emulate(launch)
    return out


def mx_one_by_one() -> Tensor:
    return mx(1)


def cluster_of_products() -> Tensor:
    torch.manual_seed(0)
    a = fp8fn.quantize(torch.randn(256, 256), (1, 128))
    b = fp8fn.quantize(torch.randn(64, 256).mT, (128, 128))
    out = torch.full((256, 64), 7.0)
    config = products.ScaledMmConfig(MATH=1, BN=64, CLUSTER=2)
    emulate(products.plan(scaled_product(a, b, out, SM90), config)[0])
    return out


def walk_of_products() -> Tensor:
    """One block walks over nine tiles, and its warpgroups take turns."""
    torch.manual_seed(0)
    a, b = fp8fn.quantize(torch.randn(384, 128), (1, 128)), fp8fn.quantize(torch.randn(384, 128).mT, (128, 128))
    out = torch.full((384, 384), 7.0, dtype=BF16)
    product = scaled_product(a, b, out, replace(SM90, multiprocessors=1))
    emulate(products.plan(product, products.ScaledMmConfig())[0], backwards=True)
    return out


def rows() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(64, 512).bfloat16()
    q = quantization(x, (1, -1))
    with hopper_on_cpu():
        emulate(*quantize_rows.plan(q, quantize_rows.configure(q)))
    return q.out.data.float()


def second_of_two() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(130, 128).bfloat16()
    q = quantization(x, (-1, 1))
    for span in ((0, 64), (64, 128)):
        emulate(stream_columns.plan_part(q, stream_columns.StreamConfig(1, 2), 1, span))
    return q.out.data.float()


# (file, what stands there, what stands there instead, a product, the fault, or none where the result is wrong).
RACES: Final[dict[str, tuple[str, str, str, Callable[[], Tensor], str | None]]] = {
    "no wait for the launch before": (
        "gemv_a16w8.cu", "    wait_for_launches();\n", "", gemv, "without wait_for_launches",
    ),
    "a launch that ends before the launch before": (
        "stream_columns.cu", "    if constexpr (PART == Part::SECOND) wait_for_launches();\n", "", second_of_two,
        "a launch that overlaps ends without wait_for_launches",
    ),
    "a copy before the launch before has ended": (
        "decode_tiles.cuh", "    if constexpr (LOADS_ROWS || !W_CONSTANT) wait_for_launches();\n", "", tiles,
        "a copy reads .*, which a launch before may write, without wait_for_launches",
    ),
    "a late launch that has the next begin at once": (
        "a16w8_tiles.cu", "if constexpr (!LATE) let_next_begin();", "let_next_begin();", late_tiles,
        "a late launch has the next begin before the one before has ended",
    ),
    "shared memory used again while it is read": (
        "gemv_a16w8.cu", "if (first > block_start) __syncthreads();", "", gemv_in_chunks, None,
    ),
    "no barrier between what is written and read": (
        "gemv_a16w8.cu", "    __syncthreads();\n\n    out +=", "    out +=", gemv, None,
    ),
    "no wait for copies": ("gemv_a16w8.cu", "if (pieces > 0) wait_for_copies();", "", gemv, "copies may still write"),
    "copies that are not committed": ("gemv_a16w8.cu", "        end_copies();\n", "", gemv, "copies may still write"),
    "a block of the cluster that has not begun": (
        "few_rows.cuh", "if constexpr (CLUSTER > 1) cluster_wait();", "", gemv_of_a_cluster, "may not have begun",
    ),
    "a block of the cluster that has ended": (
        "scaled_mm.cu", "if constexpr (CLUSTER > 1) cluster_sync();\n    if constexpr (SPLIT", "if constexpr (SPLIT",
        cluster_of_products, "may have ended|under way",
    ),
    "no fence before products of what threads wrote": (
        "a16w8_tiles.cu", "    fence_async();\n", "", tiles, "wgmma reads what thread .* wrote without fence_async",
    ),
    "no fence before a bulk store": (
        "mm_a16w8.cu", "fence_async();\n                warpgroup_sync", "warpgroup_sync", many,
        "a bulk store reads what thread .* wrote without fence_async",
    ),
    "no wait for bulk stores": (
        "mm_a16w8.cu", "if (threadIdx.x % WARPGROUP == 0) tma_store_wait_read<0>();", "", many,
        "bulk stores may still read",
    ),
    "gate and up that are multiplied before they are there": (
        "mm_a16w8.cu", "barrier_wait(full_pair(pairs.stage), pairs.parity);", "", silu_first, "all threads wait",
    ),
    "gate and up that take the place of others not multiplied yet": (
        "mm_a16w8.cu", "barrier_wait(empty_pair(pairs.stage), pairs.parity ^ 1);", "", gated, "all threads wait",
    ),
    "gate and up that take the place of others not stored yet": (
        "mm_a16w8.cu", "tma_store_wait_read<0>();\n                            barrier_arrive",
        "barrier_arrive", gated, "bulk stores may still read shared memory",
    ),
    "a product in the place of a gate that another warp reads": (
        "mm_a16w8.cu", "named_sync<SILU_WARPS * 32>(1);\n#pragma", "#pragma", gated, None,
    ),
    "no fence before a bulk store of gate and up": (
        "mm_a16w8.cu", "fence_async();\n                        named_sync", "named_sync", gated,
        "a bulk store reads what thread .* wrote without fence_async",
    ),
    "no wait for a stage": (
        "mx_tiles.cu", "            barrier_wait(full(stage), ring.parity);\n", "", mx, "all threads wait",
    ),
    "a stage that is free too early": (
        "decode_tiles.cuh", "barrier_wait(empty(ring.stage), ring.parity);", "", mx, "more arrivals than its count",
    ),
    "fewer bytes expected than come": (
        "mx_tiles.cu", "A_BYTES + B_BYTES);\n                tma_load", "B_BYTES);\n                tma_load", mx,
        "all threads wait",
    ),
    "no wait for products": (
        "mx_tiles.cu", "    wgmma_wait<0>();\n                } else {", "                } else {",
        mx_one_by_one,
        "a thread ends while its products are in flight",
    ),
    "a tile's place that is free too early": (
        "scaled_mm.cu",
        "const Tile tile = Tile::at(base + AT_TILE + places.stage * TILE_BYTES);\n"
        "        barrier_arrive(empty_tile(places.stage));",
        "barrier_arrive(empty_tile(places.stage));\n"
        "        const Tile tile = Tile::at(base + AT_TILE + places.stage * TILE_BYTES);",
        walk_of_products, "all threads wait",
    ),
    "a turn that nobody takes": (
        "scaled_mm.cu", "if (IN_TURNS && warpgroup == 0) named_sync<2 * WARPGROUP>(turn_of(0));", "", walk_of_products,
        "a block ends before all have arrived at named barrier 3",
    ),
    "more named barriers than there are": (
        "scaled_mm.cu", "return 1 + MATH + of;", "return 15 + of;", walk_of_products, "there is no named barrier 16",
    ),
    "a named barrier of two counts": (
        "scaled_mm.cu", "(IN_TURNS) named_arrive<2 * WARPGROUP>", "(IN_TURNS) named_arrive<WARPGROUP>",
        walk_of_products, "named barrier 4 is of 256 threads, and of 128",
    ),
    "more shared memory than the launch asks for": (
        "scaled_mm.cu", "AT_TILE = AT_RUN + RUNS * RUN_BYTES;", "AT_TILE = AT_RUN + RUNS * RUN_BYTES + 128;",
        walk_of_products, "shared memory is written at .*, past the .* bytes of the launch",
    ),
    "a reciprocal without Newton's step": (
        "fp8_block.cuh", "inverse = __fmaf_rn(inverse, __fmaf_rn(-scale, inverse, 1.0f), inverse);", "inverse += 0;",
        rows, None,
    ),
}  # fmt: skip


def test_races_are_of_the_sources() -> None:
    """A quick run makes one of them."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in nvrtc.sources().values()}
    assert [name for name, (file, old, *_) in RACES.items() if texts[file].count(old) != 1] == []


@pytest.mark.parametrize("race", RACES)
def test_what_a_race_does(race: str) -> None:
    file, old, new, product, fault = RACES[race]
    right = product()
    assert right.isfinite().all()
    with changed(file, old, new):
        if fault is not None:
            with pytest.raises(AssertionError, match=fault):
                product()
        else:
            assert not torch.equal(product(), right)
