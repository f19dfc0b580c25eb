"""The benchmarks' own parts that need no GPU: the shapes, the overhead measurement, the README's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8fn.bench import overhead, readme
from fp8fn.bench.shapes import LLM84, SAMPLE_IDS, shape


def test_the_84_shapes() -> None:
    """Ids as in the suite; every size a multiple of 128, and 47 alone past 2**31 elements."""
    assert [s.id for s in LLM84] == list(range(1, 85))
    assert shape(1)[2:] == (4096, 12288, 4096)
    assert shape(64)[2:] == (8192, 8192, 29568)
    assert shape(84)[2:] == (16384, 4096, 14336)
    assert all(size % 128 == 0 for s in LLM84 for size in (s.M, s.N, s.K))
    assert [s.id for s in LLM84 if max(s.M * s.N, s.N * s.K, s.M * s.K) > 2**31] == [47]
    assert 47 in SAMPLE_IDS


def test_overhead_is_measured() -> None:
    results = overhead.measure(rounds=3, repeats=2)
    assert set(results) == set(overhead.BARS)
    assert all(result.call > result.work > 0 for result in results.values())


def test_readme_has_the_committed_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert readme.main(["--check"]) == 0
