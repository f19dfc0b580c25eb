"""`bench decode` on a CPU: a product's time is a call's over the weights it goes round, and every case is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from test_moe_gemm import assert_near as near_by_hand
from test_moe_gemm import by_hand
from test_moe_gemm import operands as of_experts
from test_mx_mm import assert_near, operands

import fp8fn
from fp8fn import cli
from fp8fn.bench import decode, dot_scaled, record, tables
from fp8fn.bench.shapes import BATCHED, DECODE
from fp8fn.ops.targets import SM90


def test_shapes() -> None:
    assert len(DECODE) == len(set(DECODE)) == 27  # (1536, 1536) is a part of two
    assert {(6144, 288), (256, 6144), (768, 1536)} < set(DECODE)
    assert decode.SUITES["decode"].shapes[:3] == ((1, 2304, 6144), (4, 2304, 6144), (16, 2304, 6144))
    assert decode.SUITES["mx"].shapes[:2] == ((1, 2304, 6144), (2, 2304, 6144))
    assert len(decode.SUITES["mx"].shapes) == 4 * 7
    assert decode.SUITES["mx_moe"].shapes[-1] == (64, 1536, 6144)
    assert decode.SUITES["batched"].shapes == BATCHED
    assert len(BATCHED) == 4 * 2 * 3 + 1


@pytest.mark.parametrize(
    ("suite", "shape", "cases", "copies"),
    [
        ("decode", "3,96,128", 3, 2),
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
        if suite != "mx_moe":  # a call is all tokens
            assert decode.microseconds(row) == pytest.approx(row.us / copies)
    assert capsys.readouterr().out.endswith(f"{decode.table(run)}\n")


def test_products_with_scales_of_the_peer() -> None:
    """In Triton's interpreter, against float64; and compiled without a device."""
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
