"""`fp8fn.bench.beside`: what it compares, and on which machines."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.bench import beside
from fp8fn.ops.targets import SM90
from fp8fn.ops.tuning.problem import Problem, empty_product


def test_both_ways_are_one_launch_with_counters_and_without() -> None:
    for shape in beside.SHAPES:
        for config in beside.TILES.values():
            found = beside.ways(empty_product(Problem(*shape), "meta", SM90), config)
            assert {name: launch.counted for name, launch in found.items()} == {"in advance": "", "lists": "counters"}
            assert found["in advance"].grid == found["lists"].grid
    assert beside.ways(empty_product(Problem(m=512, n=512, k=4096), "meta", SM90), beside.TILES["128x128"]) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["beside"])
    with pytest.raises(SystemExit, match="needs a Hopper GPU: no GPU is there"):
        beside.main()
