"""`bench decode` on a CPU: every case is right, and a product's time is the call's time over its number of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import fp8fn
from fp8fn import cli
from fp8fn.bench import decode, dot_scaled, record, siblings, tables
from fp8fn.bench.measure import Row
from fp8fn.bench.shapes import BATCHED, DECODE
from fp8fn.ops.targets import SM90
from support.operands.experts import assert_near as near_by_hand
from support.operands.experts import by_hand
from support.operands.experts import operands as of_experts
from support.operands.mx import assert_near, operands


def test_shapes() -> None:
    assert len(DECODE) == len(set(DECODE)) == 27  # (1536, 1536) is a part of two
    assert {(6144, 288), (256, 6144), (768, 1536)} < set(DECODE)
    assert decode.SUITES["decode"].shapes[:3] == ((1, 2304, 6144), (4, 2304, 6144), (16, 2304, 6144))
    assert decode.SUITES["rows"].shapes[:2] == ((32, 2304, 6144), (64, 2304, 6144))
    assert len(decode.SUITES["rows"].shapes) == 7 * 3
    assert decode.SUITES["mx"].shapes[:2] == ((1, 2304, 6144), (2, 2304, 6144))
    assert len(decode.SUITES["mx"].shapes) == 4 * 7
    assert decode.SUITES["mx_moe"].shapes[-1] == (64, 1536, 6144)
    assert decode.SUITES["batched"].shapes == BATCHED
    assert len(BATCHED) == 4 * 2 * 3 + 1


def test_operations_are_counted_of_large_batches_alone() -> None:
    def counted(batch: int, *shape: int, copies: int) -> set[float]:
        return {case.operations for case in decode.cases(decode.Weights(batch, shape, copies, torch.device("cpu")))}

    assert counted(0, 128, 14336, 4096, copies=64) == counted(16, 32, 128, 512, copies=8) == {0.0}
    assert counted(16, 4096, 4096, 4096, copies=1) == {2.0 * 16 * 4096**3}


def test_the_l2_is_emptied_by_reads() -> None:
    assert {suite.schedule.flush for suite in decode.SUITES.values()} == {"reads"}


@pytest.mark.parametrize(
    ("suite", "shape", "cases", "copies"),
    [
        ("decode", "3,96,128", 3, 2),
        ("decode", "1,96,128", 4, 2),
        ("batched", "2,3,96,128", 3, 8),
        ("mx", "3,96,128", 3, 2),
        ("mx_moe", "5,32,64", 2, 1),
    ],
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
        if suite != "mx_moe":  # whose figures are those of a call
            assert decode.microseconds(row) == pytest.approx(row.us / copies)
    assert capsys.readouterr().out.endswith(f"{decode.table(run)}\n")


def test_products_with_scales_of_the_peer() -> None:
    """The kernels run in Triton's interpreter, against float64, and compile without a device."""
    a, b = operands(5, 200, 256)
    out = torch.zeros(5, 200)
    launch = dot_scaled.plan_dense(a, b, out, SM90)
    launch.interpret()
    assert_near(out, a, b)
    assert launch.resources().spills == 0
    with pytest.raises(ValueError, match="K=100"):
        dot_scaled.plan_dense(*operands(5, 200, 100), out, SM90)


def test_routed_products_with_scales_of_the_peer() -> None:
    a, w = of_experts(11, 200, 256, 4)
    layout, weights = fp8fn.sort_tokens(torch.randint(0, 4, (11, 2)), 4, 16), torch.randn(22)
    out = torch.zeros(22, 200)
    launch = dot_scaled.plan_routed(a, w, layout, 2, weights, out, SM90)
    launch.interpret()
    near_by_hand(out, by_hand(a, w, layout, 2, weights))
    assert launch.resources().spills == 0


def test_the_summary_of_whole_and_divided_weights() -> None:
    def row(shape: tuple[int, ...], peer: str, case: str, size: int, graph_us: float) -> dict[str, Any]:
        elements = 2.0 * shape[1] * shape[2]  # of two weights
        return vars(Row(shape, peer, case, "TB/s", 0.0, size * elements, graph_us=graph_us, us=1.0))

    rows = []
    measured = {(1, 2304, 6144): (20, 10, 40), (1, 6144, 1536): (20, 10, 10), (1, 192, 6144): (8, 4, 2)}
    for shape, times in measured.items():
        for (peer, case, size), time in zip(
            (("fp8fn", "w", 1), ("fp8fn", f"w{decode.BEHIND_OTHERS}", 1), ("torch", "bf16", 2)), times, strict=True
        ):
            rows.append(row(shape, peer, case, size, float(time)))
    rows.append(row((1, 192, 6144), "torch", decode.COPY, 2, 4.0))
    environment = {"cpu device": "x", "torch": "x", "triton": "x"}
    run = {"date": "x", "environment": environment, "results": {"copy_tb_s": 4.0, "rows": rows}}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in decode.summary(run).splitlines()[2:4]]
    # Bytes of both over µs, 1.42 and 0.94 TB/s, are 35 and 24 % of 4.
    assert lines == [
        ["1", "2 whole", "1.00x (0.50x)", "29 % (24 %)", "", "2.00x (1.00x)", "58 % (47 %)", ""],
        ["1", "1 divided", "0.25x (0.25x)", "7 % (7 %)", "25 % (25 %)", "0.50x (0.50x)", "15 % (15 %)", "50 % (50 %)"],
    ]


def test_a_product_by_triton_is_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("fp8fn.ops.triton.launch").TritonLaunch
    monkeypatch.setattr(launch, "run", launch.interpret)
    monkeypatch.setattr(decode, "target_of", lambda _: SM90)
    weights = decode.Weights(2, (3, 96, 128), 1, torch.device("cpu"))
    assert weights.snr_db(decode.by_triton(weights.x, weights.quantized[0])) > 25


def test_a_table_has_the_speedup_by_triton() -> None:
    run = record.committed("decode_batched")
    rows = run["results"]["rows"]
    first, second = ({row["case"]: row for row in rows if row["shape"] == shape} for shape in map(list, BATCHED[:2]))
    rows.remove(second["w in 128x128, by Triton"])
    head, _, one, other, *_ = (line.split("|") for line in decode.table(run).splitlines())
    at = [cell.strip() for cell in head].index("by Triton, speedup over bf16")
    ratio = first["bf16"]["graph_us"] / first["w in 128x128, by Triton"]["graph_us"]
    assert one[at].strip() == f"{ratio:.2f}x"
    assert other[at].strip() == ""


@pytest.mark.parametrize(("suite", "shape", "columns"), [("qkv", "3,96,64,128", 224), ("gate_up", "3,96,128", 192)])
def test_siblings_on_the_cpu(
    suite: str, shape: str, columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure is the time of one set of products, of which a call has two."""
    file = tmp_path / "run.json"
    given = ["--suite", suite, "--shape", shape, "--device", "cpu", "--rounds", "1", "--json", str(file)]
    assert cli.main(["bench", "decode", *given]) == 0
    run = record.read(file)
    rows = [Row.of_json(row) for row in run["results"]["rows"]]
    assert [row.label for row in rows] == ["fp8fn in one launch", "fp8fn one by one", "torch bf16"]
    assert [row.bytes for row in rows] == [2 * columns * 128, 2 * columns * 128, 4 * columns * 128]
    assert all(row.snr_db["out"] > 28 for row in rows)
    (line,) = [line for line in siblings.table(run).splitlines() if line.startswith(f"| {shape}")]
    times = [float(cell) for cell in line.split("|")[2:5]]
    assert times == pytest.approx([(row.us or 0) / 2 for row in rows], abs=0.06)
    assert shape in capsys.readouterr().out
