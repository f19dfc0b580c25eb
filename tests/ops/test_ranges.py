"""Named ranges around launches: off by default, and by the profiler's events where they are on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

pytest.importorskip("triton")

import fp8fn
from fp8fn.ops import quantize, ranges
from fp8fn.ops.cuda.runtime import call_cache


def profiled() -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for _ in range(2):
            quantize.quantize_kernel(torch.empty(256, 512, dtype=torch.bfloat16), (1, 128))
    return [event.name for event in profile.events() if event.name.startswith("fp8fn::")]


def test_a_range_says_op_shape_and_kernel(hopper_starts_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call and those that are kept, and none of them is joined with others."""
    monkeypatch.setattr(ranges, "ENABLED", True)
    with call_cache.record() as tape:
        names = profiled()
    assert len(names) == 2
    assert len(set(names)) == 1
    assert names[0].startswith("fp8fn::quantize (256, 512) ")
    assert "grid=" in names[0]
    assert " sm90 (" in names[0]
    assert tape == []


def test_no_range_by_default(hopper_starts_nothing: None) -> None:
    assert not ranges.ENABLED
    with call_cache.record() as tape:
        assert profiled() == []
    assert len(tape) == 2


@pytest.mark.parametrize(("value", "enabled"), [("1", True), ("0", False), ("", False)])
def test_the_variable(value: str, enabled: bool) -> None:
    code = "import fp8fn.ops.ranges as r; print(r.ENABLED)"
    environment = {**os.environ, "FP8FN_NVTX": value}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == f"{enabled}\n"


@pytest.mark.gpu
def test_nvtx_and_values_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda")
    expected = fp8fn.quantize(x, (1, 128))
    pushed: list[str] = []
    monkeypatch.setattr(ranges, "ENABLED", True)
    monkeypatch.setattr(call_cache, "_kept", OrderedDict())
    range_of = torch.cuda.nvtx.range
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda form, title: pushed.append(title) or range_of(form, title))
    found = fp8fn.quantize(x, (1, 128))
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert [title.split()[0] for title in pushed] == ["fp8fn::quantize"]
