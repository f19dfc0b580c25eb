"""The times of collectives in a profile."""

from __future__ import annotations

import pytest

from fp8fn.bench.wire import Kernel, merged, summary

KERNELS = [
    Kernel("ncclDevKernel_AllGather_RING_LL", 0.0, 100.0),
    Kernel("gemm", 20.0, 60.0),
    Kernel("gemm", 50.0, 70.0),
    Kernel("ncclDevKernel_ReduceScatter_Sum_f32", 90.0, 120.0),
    Kernel("norm", 95.0, 97.0),
    Kernel("ncclDevKernel_AllGather_RING_LL", 130.0, 150.0),
    Kernel("norm", 140.0, 200.0),
]


def test_spans_of_kernels_that_overlap_count_once() -> None:
    assert merged(reversed(KERNELS)) == [(0.0, 120.0), (130.0, 200.0)]
    assert merged([]) == []


def test_collectives_are_covered_by_other_kernels_alone() -> None:
    found = summary(KERNELS, longest=1)
    assert found["busy_ms"] == pytest.approx(0.112)
    gathers, sums = found["collectives"]["AllGather"], found["collectives"]["ReduceScatter"]
    assert (gathers["count"], gathers["ms"]) == (2, pytest.approx(0.12))
    assert gathers["covered"] == pytest.approx((50 + 2 + 10) / 120)
    assert (sums["count"], sums["ms"], sums["covered"]) == (1, pytest.approx(0.03), pytest.approx(2 / 30))
    assert found["kernels"] == {"norm": {"count": 2, "ms": pytest.approx(0.062)}}
    assert "AllReduce" not in found["collectives"]
