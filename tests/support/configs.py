"""Small configurations of each CUDA kernel that reach every division of its work."""

from __future__ import annotations

from typing import Final

import pytest

from fp8fn.ops.cuda.gemm.a16w8_tiles import Config as Tiles
from fp8fn.ops.cuda.gemm.gemv_a16w8 import Config as Gemv
from fp8fn.ops.cuda.gemm.mm_a16w8 import Config as ManyRows
from fp8fn.ops.cuda.gemm.mx_tiles import Config as MxTiles
from fp8fn.ops.cuda.gemm.scaled_mm import Config as GemmConfig
from fp8fn.ops.cuda.gemm.splitk_a16w8 import Config as SplitK
from fp8fn.ops.cuda.quantize.quantize_columns import ColumnsConfig
from fp8fn.ops.cuda.quantize.stream_columns import StreamConfig
from fp8fn.ops.cuda.quantize.walk_columns import WalkConfig
from fp8fn.ops.layout import Block

# Those that a tuning table may choose, and clusters.
SCALED_MM: dict[str, GemmConfig] = {
    "192x128": GemmConfig(MATH=3, DEPTH=1),
    "128x256": GemmConfig(BN=256, SLICES_N=2, DEPTH=1),
    "128x128": GemmConfig(),
    "128x64": GemmConfig(BN=64),
    "128x192": GemmConfig(BN=192, DEPTH=1),
    "64x128": GemmConfig(MATH=1),
    "64x64": GemmConfig(MATH=1, BN=64),
    "64x192": GemmConfig(MATH=1, BN=192, DEPTH=1),
    "64x256": GemmConfig(MATH=1, BN=256, SLICES_N=2, DEPTH=1),
    "192x128 cluster": GemmConfig(MATH=3, DEPTH=1, CLUSTER=2),
    "128x256 cluster": GemmConfig(BN=256, SLICES_N=2, DEPTH=1, CLUSTER=2),
    "split": GemmConfig(SPLIT=4),
    "128x64 split": GemmConfig(BN=64, SPLIT=8),
    "128x128 split depth 1": GemmConfig(DEPTH=1, SPLIT=4),
    "64x192 split": GemmConfig(MATH=1, BN=192, DEPTH=1, SPLIT=2),
    "64x64 split": GemmConfig(MATH=1, BN=64, SPLIT=4),
    "128x128 depth 1": GemmConfig(DEPTH=1),
    "128x192 depth 2": GemmConfig(BN=192),
    "192x128 depth 2": GemmConfig(MATH=3),
}

KINDS: dict[str, tuple[Block, Block]] = {
    "forward": ((1, 128), (128, 128)),
    "wgrad": ((1, 128), (128, 1)),
    "rowwise": ((1, -1), (-1, 1)),
    "tensorwise": ((-1, -1), (-1, -1)),
}

# Every other pair of blocks of 128 or all of K, by the names of both blocks.
OTHER_PAIRS: dict[str, tuple[Block, Block]] = {
    f"{a}x{b}": (a, b)
    for a in ((1, 128), (128, 128), (1, -1), (-1, -1))
    for b in ((128, 1), (128, 128), (-1, 1), (-1, -1))
    if (a, b) not in KINDS.values()
}

# Where registers spill, the configuration is not chosen: two temporaries cost none only where no scale changes along K.
SPILLING = {("192x128 cluster", "wgrad"), ("split", "wgrad")} | {
    (config, kind) for config in ("128x192 depth 2", "192x128 depth 2") for kind in ("forward", "wgrad")
}

VARIANTS = [(config, kind) for config in SCALED_MM for kind in KINDS if (config, kind) not in SPILLING]

every_variant = pytest.mark.parametrize(
    ("config", "kind"), VARIANTS, ids=[f"{config}-{kind}" for config, kind in VARIANTS]
)

# With the rows that a block keeps: a part, with the rest read twice; or all of them.
COLUMN_TILES: Final = (
    (ColumnsConfig(128, 1, 2), 32),
    (ColumnsConfig(64, 4, 2), 16),
    (ColumnsConfig(128, 3, 4), None),
    (ColumnsConfig(64, 1, 8), 576),
)

# Rings that hold a panel's chunks, and that do not; of one warp a piece, and of two; with chunks held in registers.
STREAMS: Final = (
    StreamConfig(1, 2), StreamConfig(2, 3, BOX=128), StreamConfig(3, 2, 16, BASE=128), StreamConfig(4, 8, BOX=16),
    StreamConfig(1, 3, 16), StreamConfig(2, 5, 16, BOX=64), StreamConfig(1, 6, HELD=2),
    StreamConfig(2, 4, BOX=64, HELD=3),
)  # fmt: skip

# Rings that hold most of the groups of the tests, and that hold hardly one.
WALKS: Final = (WalkConfig(13), WalkConfig(3, BOX=128), WalkConfig(2, BOX=16))

GEMVS = [
    Gemv(8, 1, 1, 8, 4, 1), Gemv(8, 1, 2, 2, 1, 2), Gemv(8, 2, 1, 4, 3, 4), Gemv(16, 1, 1, 2, 2, 8),
    Gemv(16, 4, 2, 1, 1, 2), Gemv(32, 2, 2, 2, 2, 1), Gemv(64, 1, 4, 1, 1, 1),
]  # fmt: skip

ROW_MAJOR = [Gemv(8, 8, 1, 8, 2, 1, 1), Gemv(8, 8, 2, 1, 3, 4, 1), Gemv(16, 8, 1, 2, 1, 8, 1)]

# Persistent; a block a tile, with all of K in flight or not; of two parts of K.
MANY = [
    ManyRows(), ManyRows(128, 1, 2), ManyRows(64, 2, 3, GROUP=3), ManyRows(160, TURNS=True),
    ManyRows(256, 1, TURNS=True), ManyRows(64, 4, 2, TURNS=True), ManyRows(64, 1, 4, TURNS=True),
    ManyRows(32, 2, 2, MATH=1), ManyRows(32, 1, 1, MATH=1, RESIDENT=4), ManyRows(64, 1, 4, MATH=1, RESIDENT=2),
    ManyRows(128, 1, 2, MATH=1, RESIDENT=2), ManyRows(64, 2, 2, RESIDENT=1),
    ManyRows(32, 1, 4, K_PARTS=2, RESIDENT=2), ManyRows(64, 2, 2, K_PARTS=2, RESIDENT=1),
    ManyRows(128, 1, 4, K_PARTS=2, RESIDENT=1), ManyRows(64, 1, 3, K_PARTS=2, RESIDENT=1),
    ManyRows(32, 1, 3, RESIDENT=2),
]  # fmt: skip

WEIGHT_TILES = [
    Tiles(8, 4, 2, 3), Tiles(8, 4, 3, 1), Tiles(8, 8, 2, 2), Tiles(16, 4, 4, 1), Tiles(16, 8, 2, 5),
    Tiles(16, 4, 2, 7, LATE=True), Tiles(16, 12, 3, 4, 2), Tiles(8, 16, 2, 3, 2, LATE=True),
]  # fmt: skip

WEIGHT_TILES_HELD = [
    Tiles(8, 12, 6, 2, 1, HELD=6, READY=2), Tiles(16, 8, 4, 3, 2, True, 4), Tiles(8, 4, 3, 1, 2, HELD=1, READY=1),
    Tiles(16, 12, 6, 2, 1, HELD=4, X_OVER=True), Tiles(8, 8, 1, 2, HELD=1, X_OVER=True),
    Tiles(16, 8, 6, 1, 2, True, 3, 2, True), Tiles(16, 16, 3, 1, 1, True, 2, 0, True),
]  # fmt: skip

SPLITS_HELD = [
    SplitK(16, 4, 1, 5, HELD=1), SplitK(16, 8, 2, 3, 1, HELD=2), SplitK(32, 4, 6, 2, LATE=True, HELD=5),
    SplitK(64, 4, 3, 1, LATE=True, HELD=2),
]  # fmt: skip

SPLITS = [
    SplitK(32, 4, 3, 1), SplitK(32, 4, 2, 3, 3), SplitK(64, 4, 2, 4, LATE=True), SplitK(64, 8, 3, 2, 1),
    SplitK(16, 4, 4, 2), SplitK(128, 4, 2, 8, 1), SplitK(32, 8, 2, 7, 1, LATE=True), *SPLITS_HELD,
]  # fmt: skip

MX_GEMVS = [
    Gemv(8, 1, 1, 8, 4, 1), Gemv(8, 1, 2, 2, 1, 2), Gemv(8, 2, 1, 4, 3, 4), Gemv(16, 1, 1, 2, 2, 8),
    Gemv(16, 4, 2, 1, 1, 2), Gemv(32, 2, 2, 2, 2, 1), Gemv(32, 1, 8, 1, 1, 8), Gemv(8, 1, 4, 4, 2, 3),
    Gemv(16, 2, 4, 2, 3, 1), Gemv(32, 2, 4, 1, 1, 7), Gemv(64, 1, 4, 2, 4, 2, 1), Gemv(64, 2, 8, 2, 1, 1, 1),
    Gemv(64, 1, 2, 2, 1, 1, 1),
]  # fmt: skip

MX_TILES = [
    MxTiles(8, 4, 1, 3), MxTiles(8, 4, 2, 2, 3), MxTiles(16, 8, 1, 2, 2), MxTiles(16, 4, 2, 4, 5, 1),
    MxTiles(32, 4, 1, 2, 7, LATE=True), MxTiles(32, 8, 1, 3, 1, 2, 1), MxTiles(64, 4, 1, 2, 2, 3),
    MxTiles(64, 4, 2, 3, 1, 2, 1), MxTiles(64, 8, 1, 2, 8, 1),
]  # fmt: skip
