"""`bench decode` on a CPU: a product's time is a call's over the weights it goes round, and every case is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8fn import cli
from fp8fn.bench import decode, record, tables
from fp8fn.bench.shapes import BATCHED, DECODE


def test_shapes() -> None:
    assert len(DECODE) == len(set(DECODE)) == 27  # (1536, 1536) is a part of two
    assert {(6144, 288), (256, 6144), (768, 1536)} < set(DECODE)
    assert decode.SUITES["decode"].shapes[:3] == ((1, 2304, 6144), (4, 2304, 6144), (16, 2304, 6144))
    assert decode.SUITES["batched"].shapes == BATCHED
    assert len(BATCHED) == 4 * 2 * 3 + 1


@pytest.mark.parametrize(
    ("suite", "shape", "cases", "copies"), [("decode", "3,96,128", 2, 2), ("batched", "2,3,96,128", 3, 8)]
)
def test_a_run_on_the_cpu(
    suite: str, shape: str, cases: int, copies: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    argv = ["bench", "decode", "--suite", suite, "--shape", shape, "--device", "cpu", "--rounds", "1"]
    assert cli.main([*argv, "--json", str(path)]) == 0
    run = record.read(path)
    rows = tables.rows_of(run)
    assert len(rows) == cases
    for row in rows:
        assert row.us is not None
        assert row.unit == "TB/s"
        assert not row.wrong
        assert decode.microseconds(row) == pytest.approx(row.us / copies)
    assert capsys.readouterr().out.endswith(f"{decode.table(run)}\n")
