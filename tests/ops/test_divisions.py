"""The shipped tables of divisions: what a row says, and that each of theirs can be computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from fp8fn.ops.cuda.gemm import a16w8_tiles, splitk_a16w8
from fp8fn.ops.cuda.limits import RESERVED, SHARED_LIMIT, largest_cluster
from fp8fn.ops.tuning.divisions import COLUMNS, CORES, Division, parse


def test_a_row_is_a_division() -> None:
    options = {"ROWS": 16, "WARPS_N": 8, "HELD": 2}
    rows = [[True, 8, 10, 20, [4, 2], [3, 5], options], [True, 8, 1, 2, [1, 1], [2, 2], options]]
    table = parse({"format": 1, "columns": list(COLUMNS), "rows": rows}, splitk_a16w8.SplitKConfig)
    config = splitk_a16w8.SplitKConfig(16, 8, HELD=2)
    first = Division(10, 20, range(4, 1, -1), range(3, 6), config)
    assert table == {(True, 8): (first, Division(1, 2, range(1, 2), range(2, 3), config))}
    assert list(first.parts(12)) == [(4, 3), (3, 4)]
    assert [first.has(blocks, CORES) for blocks in (9, 10, 20, 21)] == [False, True, True, False]
    assert [first.has(blocks, CORES // 2) for blocks in (4, 5, 10, 11)] == [False, True, True, False]


@pytest.mark.parametrize("change", [{"format": 2}, {"columns": ["rows"]}])
def test_another_format_is_refused(change: dict[str, Any]) -> None:
    document = {"format": 1, "columns": list(COLUMNS), "rows": []}
    with pytest.raises(ValueError, match="no table of divisions of format 1"):
        parse(document | change, a16w8_tiles.A16W8TilesConfig)


def test_each_shipped_division_finds_room() -> None:
    tiles, splits = a16w8_tiles.divisions(), splitk_a16w8.divisions()
    assert [sum(map(len, table.values())) for table in (tiles, splits)] == [40, 56]
    kernels: tuple[tuple[Any, tuple[int, ...]], ...] = ((tiles, (2,)), (splits, ()))
    for table, parts in kernels:
        for (_, rows), divisions in table.items():
            for division in divisions:
                config, fits = division.config, []
                assert max(rows, 16) >= config.ROWS
                for cluster, stages in product(division.along, division.stages):
                    assert 1 <= cluster <= largest_cluster(CORES)
                    shared = replace(config, STAGES=stages, CLUSTER=cluster).shared(
                        128 * stages * cluster, (128, 128), *parts
                    )  # fmt: skip
                    fits.append(shared <= SHARED_LIMIT // config.RESIDENT - RESERVED)
                assert any(fits), division
