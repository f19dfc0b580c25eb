"""`bench invariant` on a CPU: the promise is checked, and a cost is the ratio of two times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tabulate")

from fp8fn import cli
from fp8fn.bench import invariant, record, tables
from fp8fn.bench.measure import Row

CASES = {
    f"{kind}{promise}": "fp8fn" for kind in ("x in bf16", "prequant", "x in FP8") for promise in ("", ", invariant")
} | {"bf16": "torch"}


def test_shapes() -> None:
    shapes = invariant.SUITES["layer"].shapes
    assert len(shapes) == len(set(shapes)) == 4 * 12
    assert {(1, 4096, 4096), (256, 28672, 4096), (4096, 4096, 14336), (64, 6144, 4096)} < set(shapes)
    assert min(n * k for _, n, k in shapes) * invariant.COPIES > 4 * 50 * 2**20  # 50 MB are the L2 of an H200


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    shapes = ["--shape", "1,128,256", "--shape", "3,128,256"]
    assert cli.main(["bench", "invariant", *shapes, "--device", "cpu", "--rounds", "1", "--json", str(path)]) == 0
    run = record.read(path)
    rows = tables.rows_of(run)
    assert [(row.case, row.peer) for row in rows] == 2 * list(CASES.items())
    assert all(row.us is not None and not row.wrong for row in rows)
    assert set(invariant.costs(run, "prequant")) == {(1, 128, 256), (3, 128, 256)}
    assert capsys.readouterr().out.endswith(f"{invariant.table(run)}\n")


def test_other_bits_are_told() -> None:
    rows = invariant.Rows((3, 64, 128), torch.device("cpu"))
    found = torch.cat([rows.x @ rows.one(1)])
    with pytest.raises(ArithmeticError, match="3 of 3 rows have other bits among 8, row 0 first"):
        rows.accuracy(found, "x in bf16", promised=True)
    assert rows.accuracy(found, "x in bf16", promised=False)["out"] > 50


def _run(measured: dict[tuple[int, int, int], tuple[float | None, ...]]) -> dict[str, Any]:
    """µs of a product without the promise, with it, and of bf16; two weights a call."""
    rows = []
    for shape, times in measured.items():
        elements = 2.0 * shape[1] * shape[2]
        for (peer, case, size), us in zip(
            (("fp8fn", "x in bf16", 1), ("fp8fn", "x in bf16, invariant", 1), ("torch", "bf16", 2)), times, strict=True
        ):
            graph_us = None if us is None else 2 * us
            row = Row(shape, peer, case, "TB/s", 0.0, size * elements, graph_us=graph_us, us=graph_us)
            rows.append(vars(row))
    return {"date": "x", "environment": {"cpu device": "x", "torch": "x", "triton": "x"}, "results": {"rows": rows}}


def test_the_table_of_costs() -> None:
    run = _run({
        (512, 64, 128): (8.0, 16.0, 8.0), (1, 64, 128): (2.0, 2.5, 5.0), (256, 64, 128): (4.0, 3.2, 6.4),
        (1, 128, 64): (1.0, 1.25, 5.0), (256, 128, 64): (4.0, None, 5.0),
    })  # fmt: skip
    text = invariant.table(run).splitlines()
    assert text[0].split("|")[1].strip() == "x in bf16: M"
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[2:6]]
    assert found == [
        ["1", "2.0 → 2.5 (1.25x)", "1.0 → 1.2 (1.25x)", "1.25x", "1.25x to 1.25x", "2.83x"],
        ["256", "4.0 → 3.2 (0.80x)", "n/a", "0.80x", "0.80x to 0.80x", "2.00x"],
        ["512", "8.0 → 16.0 (2.00x)", "n/a", "2.00x", "2.00x to 2.00x", "0.50x"],
        ["up to 256", "", "", "1.08x", "0.80x to 1.25x", "2.52x"],  # (1.25 * 1.25 * 0.8)**(1/3), (2 * 4 * 2)**(1/3)
    ]
