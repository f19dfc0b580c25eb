"""Small configurations of each CUDA kernel that reach every division of its work."""

from __future__ import annotations

from typing import Final

import pytest

from fp8fn.ops.cuda.gemm.a16w8_tiles import A16W8TilesConfig
from fp8fn.ops.cuda.gemm.gemv_a16w8 import GemvConfig
from fp8fn.ops.cuda.gemm.mm_a16w8 import ManyRowsConfig
from fp8fn.ops.cuda.gemm.mx_tiles import MxTilesConfig
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.gemm.splitk_a16w8 import SplitKConfig
from fp8fn.ops.cuda.quantize.quantize_columns import ColumnsConfig
from fp8fn.ops.cuda.quantize.stream_columns import StreamConfig
from fp8fn.ops.cuda.quantize.walk_columns import WalkConfig
from fp8fn.ops.layout import Block
from fp8fn.ops.tuning.model import tiles
from fp8fn.ops.tuning.problem import Problem

# Configurations that a tuning table may choose, and other clusters.
SCALED_MM: dict[str, ScaledMmConfig] = {
    "192x128": ScaledMmConfig(MATH=3, DEPTH=1),
    "128x256": ScaledMmConfig(BN=256, SLICES_N=2, DEPTH=1),
    "128x128": ScaledMmConfig(),
    "128x64": ScaledMmConfig(BN=64),
    "128x192": ScaledMmConfig(BN=192, DEPTH=1),
    "64x128": ScaledMmConfig(MATH=1),
    "64x64": ScaledMmConfig(MATH=1, BN=64),
    "64x192": ScaledMmConfig(MATH=1, BN=192, DEPTH=1),
    "64x256": ScaledMmConfig(MATH=1, BN=256, SLICES_N=2, DEPTH=1),
    "256x128": ScaledMmConfig(SLICES_M=2, DEPTH=1),
    "256x128 cluster": ScaledMmConfig(SLICES_M=2, DEPTH=1, CLUSTER=2, SHARE_B=False),
    "192x128 cluster": ScaledMmConfig(MATH=3, DEPTH=1, CLUSTER=2),
    "128x256 cluster": ScaledMmConfig(BN=256, SLICES_N=2, DEPTH=1, CLUSTER=2),
    "split": ScaledMmConfig(SPLIT=4),
    "128x64 split": ScaledMmConfig(BN=64, SPLIT=8),
    "128x128 split depth 1": ScaledMmConfig(DEPTH=1, SPLIT=4),
    "64x192 split": ScaledMmConfig(MATH=1, BN=192, DEPTH=1, SPLIT=2),
    "64x64 split": ScaledMmConfig(MATH=1, BN=64, SPLIT=4),
    "128x128 depth 1": ScaledMmConfig(DEPTH=1),
    "128x192 depth 2": ScaledMmConfig(BN=192),
    "192x128 depth 2": ScaledMmConfig(MATH=3),
    **{f"{config.BM}x{config.BN} depth 0": config for config in tiles(Problem(1, 1, 1, "LINE", "LINE", fast=True))},
    "64x64 split depth 0": ScaledMmConfig(MATH=1, BN=64, DEPTH=0, SPLIT=4),
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

# Variants that are never chosen. With scales along K two temporaries may spill, and there has to be one.
UNFIT = {("192x128 cluster", "wgrad"), ("split", "wgrad")} | {
    (config, kind)
    for config in SCALED_MM
    if config in ("128x192 depth 2", "192x128 depth 2") or config.endswith("depth 0")
    for kind in ("forward", "wgrad")
}

VARIANTS = [(config, kind) for config in SCALED_MM for kind in KINDS if (config, kind) not in UNFIT]

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
    GemvConfig(8, 1, 1, 8, 4, 1), GemvConfig(8, 1, 2, 2, 1, 2), GemvConfig(8, 2, 1, 4, 3, 4),
    GemvConfig(16, 1, 1, 2, 2, 8), GemvConfig(16, 4, 2, 1, 1, 2), GemvConfig(32, 2, 2, 2, 2, 1),
    GemvConfig(64, 1, 4, 1, 1, 1),
]  # fmt: skip

ROW_MAJOR = [GemvConfig(8, 8, 1, 8, 2, 1, 1), GemvConfig(8, 8, 2, 1, 3, 4, 1), GemvConfig(16, 8, 1, 2, 1, 8, 1)]

# Persistent; a block a tile, with all of K in flight or not; of two parts of K.
MANY = [
    ManyRowsConfig(), ManyRowsConfig(128, 1, 2), ManyRowsConfig(64, 2, 3, GROUP=3), ManyRowsConfig(160, TURNS=True),
    ManyRowsConfig(256, 1, TURNS=True), ManyRowsConfig(64, 4, 2, TURNS=True), ManyRowsConfig(64, 1, 4, TURNS=True),
    ManyRowsConfig(160, 1, 3, TURNS=True), ManyRowsConfig(96, 2, 3, TURNS=True), ManyRowsConfig(192, 1, 3, TURNS=True),
    ManyRowsConfig(224, 1, TURNS=True), ManyRowsConfig(96, 3, TURNS=True), ManyRowsConfig(32, 2, 2, MATH=1),
    ManyRowsConfig(32, 1, 1, MATH=1, RESIDENT=4),
    ManyRowsConfig(64, 1, 4, MATH=1, RESIDENT=2), ManyRowsConfig(128, 1, 2, MATH=1, RESIDENT=2),
    ManyRowsConfig(64, 2, 2, RESIDENT=1), ManyRowsConfig(32, 1, 4, K_PARTS=2, RESIDENT=2),
    ManyRowsConfig(64, 2, 2, K_PARTS=2, RESIDENT=1), ManyRowsConfig(128, 1, 4, K_PARTS=2, RESIDENT=1),
    ManyRowsConfig(64, 1, 2, K_PARTS=2, RESIDENT=1), ManyRowsConfig(32, 1, 3, RESIDENT=2),
]  # fmt: skip

# A product by two weights; without turns, too.
GATED = [
    ManyRowsConfig(160, TURNS=True, GATED=True), ManyRowsConfig(256, 1, TURNS=True, GATED=True),
    ManyRowsConfig(128, 1, 4, TURNS=True, GATED=True), ManyRowsConfig(64, 2, 3, GROUP=3, GATED=True),
    ManyRowsConfig(160, 1, 3, TURNS=True, GATED=True), ManyRowsConfig(224, 1, TURNS=True, GATED=True),
    ManyRowsConfig(128, 2, TURNS=True, GATED=True),
]  # fmt: skip

WEIGHT_TILES = [
    A16W8TilesConfig(8, 4, 2, 3), A16W8TilesConfig(8, 4, 3, 1), A16W8TilesConfig(8, 8, 2, 2),
    A16W8TilesConfig(16, 4, 4, 1), A16W8TilesConfig(16, 8, 2, 5), A16W8TilesConfig(16, 4, 2, 7, LATE=True),
    A16W8TilesConfig(16, 12, 3, 4, 2), A16W8TilesConfig(8, 16, 2, 3, 2, LATE=True),
]  # fmt: skip

WEIGHT_TILES_HELD = [
    A16W8TilesConfig(8, 12, 6, 2, 1, HELD=6, READY=2), A16W8TilesConfig(16, 8, 4, 3, 2, True, 4),
    A16W8TilesConfig(8, 4, 3, 1, 2, HELD=1, READY=1), A16W8TilesConfig(16, 12, 6, 2, 1, HELD=4, X_OVER=True),
    A16W8TilesConfig(8, 8, 1, 2, HELD=1, X_OVER=True), A16W8TilesConfig(16, 8, 6, 1, 2, True, 3, 2, True),
    A16W8TilesConfig(16, 16, 3, 1, 1, True, 2, 0, True),
]  # fmt: skip

SPLITS_HELD = [
    SplitKConfig(16, 4, 1, 5, HELD=1), SplitKConfig(16, 8, 2, 3, 1, HELD=2),
    SplitKConfig(32, 4, 6, 2, LATE=True, HELD=5), SplitKConfig(64, 4, 3, 1, LATE=True, HELD=2),
]  # fmt: skip

SPLITS = [
    SplitKConfig(32, 4, 3, 1), SplitKConfig(32, 4, 2, 3, 3), SplitKConfig(64, 4, 2, 4, LATE=True),
    SplitKConfig(64, 8, 3, 2, 1), SplitKConfig(16, 4, 4, 2), SplitKConfig(128, 4, 2, 8, 1),
    SplitKConfig(32, 8, 2, 7, 1, LATE=True), *SPLITS_HELD,
]  # fmt: skip

MX_GEMVS = [
    GemvConfig(8, 1, 1, 8, 4, 1), GemvConfig(8, 1, 2, 2, 1, 2), GemvConfig(8, 2, 1, 4, 3, 4),
    GemvConfig(16, 1, 1, 2, 2, 8), GemvConfig(16, 4, 2, 1, 1, 2), GemvConfig(32, 2, 2, 2, 2, 1),
    GemvConfig(32, 1, 8, 1, 1, 8), GemvConfig(8, 1, 4, 4, 2, 3), GemvConfig(16, 2, 4, 2, 3, 1),
    GemvConfig(32, 2, 4, 1, 1, 7), GemvConfig(64, 1, 4, 2, 4, 2, 1), GemvConfig(64, 2, 8, 2, 1, 1, 1),
    GemvConfig(64, 1, 2, 2, 1, 1, 1),
]  # fmt: skip

MX_TILES = [
    MxTilesConfig(8, 4, 1, 3), MxTilesConfig(8, 4, 2, 2, 3), MxTilesConfig(16, 8, 1, 2, 2),
    MxTilesConfig(16, 4, 2, 4, 5, 1), MxTilesConfig(32, 4, 1, 2, 7, LATE=True), MxTilesConfig(32, 8, 1, 3, 1, 2, 1),
    MxTilesConfig(64, 4, 1, 2, 2, 3), MxTilesConfig(64, 4, 2, 3, 1, 2, 1), MxTilesConfig(64, 8, 1, 2, 8, 1),
]  # fmt: skip
