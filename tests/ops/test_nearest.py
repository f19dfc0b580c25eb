"""Which table and which rates a chip gets, by the facts that its device reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8fn.ops import targets
from fp8fn.ops.recipe import BLOCKWISE
from fp8fn.ops.targets import Chip, Facts, facts_of, reported_facts
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.estimate import linear_times
from fp8fn.ops.tuning.nearest import nearest
from fp8fn.ops.tuning.rates import NAMED, rates_of

H200, H100 = NAMED["h200"], NAMED["h100"]


def device(name: str, count: int, memory_khz: int, bits: int, clock_khz: int = 1_980_000) -> Any:
    """The properties of a device, as PyTorch has them."""
    return SimpleNamespace(
        name=name, multi_processor_count=count, memory_clock_rate=memory_khz, memory_bus_width=bits,
        clock_rate=clock_khz, major=9, minor=0,
    )  # fmt: skip


SXM = device("NVIDIA H100 80GB HBM3", 132, 2_619_000, 5120)
PCIE = device("NVIDIA H100 PCIe", 114, 1_593_000, 5120, 1_755_000)
LARGE = device("NVIDIA H200", 132, 3_201_000, 6144)
SMALL = device("NVIDIA H20", 78, 2_619_000, 6144)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No device was asked, and there are no tables but the shipped ones."""
    monkeypatch.setattr(targets, "_asked", {})
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    table.forget()


def plugged_in(properties: Any, monkeypatch: pytest.MonkeyPatch) -> Chip:
    """The chip of a device with these properties."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return targets._chip_of_index.__wrapped__(0)


@pytest.mark.parametrize(
    ("properties", "bandwidth"), [(SXM, 3.35), (PCIE, 2.04), (LARGE, 4.92), (SMALL, 4.02)], ids=lambda x: str(x)[:40]
)
def test_the_bandwidth_is_that_of_clock_and_width(properties: Any, bandwidth: float) -> None:
    facts = reported_facts(properties)
    assert facts.multiprocessors == properties.multi_processor_count
    assert facts.bandwidth == pytest.approx(bandwidth, abs=0.01)
    assert facts.clock == pytest.approx(properties.clock_rate / 1e6)


def test_a_device_comes_before_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_of(H100) == Facts(132, 3.35, 1.98)
    assert facts_of(Chip("NVIDIA H200", 66)).multiprocessors == 66
    assert facts_of(Chip("another", 90)) == Facts(90)
    chip = plugged_in(device("NVIDIA H100 80GB HBM3", 132, 3_201_000, 6144), monkeypatch)
    assert facts_of(chip).bandwidth == pytest.approx(4.92, abs=0.01)
    chip = plugged_in(device("NVIDIA H100 80GB HBM3", 132, 0, 0), monkeypatch)  # a driver that does not say
    assert facts_of(chip).bandwidth == 3.35


@pytest.mark.parametrize(
    ("properties", "served"),
    [
        (LARGE, "h200.json"),
        (device("a renamed H200", 132, 3_201_000, 6144), "h200.json"),
        (device("NVIDIA H100 NVL of another name", 132, 2_619_000, 5120), "h200.json (nearest: 4.8 TB/s for 3.35)"),
        (PCIE, None),
        (SMALL, None),
        (device("NVIDIA H200", 66, 3_201_000, 6144), None),
        (device("silent", 132, 0, 0), None),
    ],
    ids=["H200", "renamed", "less memory", "PCIe", "H20", "a slice", "silent"],
)
def test_which_table_serves(properties: Any, served: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SHIPPED", {H200: "h200.json"})
    chip = plugged_in(properties, monkeypatch)
    assert [found.name for found in table.tables(chip)] == ([] if served is None else [served])
    times = linear_times(8192, 28672, 4096, BLOCKWISE, chip)
    assert times is not None
    assert times.source == (served or "the model")


def test_the_nearest_of_several() -> None:
    sxm = Chip("NVIDIA H100 80GB HBM3", 132)
    assert nearest(Chip("NVIDIA H800", 132), [H200, sxm]) == (sxm, "")
    assert nearest(Chip("NVIDIA GH200 480GB", 132), [H200, sxm]) == (sxm, " (nearest: 3.35 TB/s for 4)")
    assert nearest(H200, [sxm, H200]) == (H200, "")
    assert nearest(Chip("NVIDIA H20", 78), [H200, sxm]) is None
    assert nearest(H200, []) is None


def test_a_table_of_ones_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = plugged_in(SXM, monkeypatch)
    shipped = table.tables(H200)[-1]
    problem, entry = next(iter(shipped.entries.items()))
    table.add(chip, {problem: entry}, {"date": "2026-01-01"})
    table.forget()
    assert table.tables(chip)[0].name == table.user_path(chip).name


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    large, sxm, pcie, small = (rates_of(plugged_in(each, monkeypatch)) for each in (LARGE, SXM, PCIE, SMALL))
    assert (large.bf16, large.copy) == (696.0, 3.94)
    assert sxm.bf16 == 711.0
    assert sxm.copy == pytest.approx(3.94 * 3.35 / 4.8)
    assert pcie.bf16 == pytest.approx(696 * 114 / 132 * 1.755 / 1.98)
    assert pcie.copy == pytest.approx(3.94 * 2.04 / 4.8, rel=0.01)
    assert pcie.product == pytest.approx(1.98 / 1.755)
    assert small.bf16 == pytest.approx(0.9 * 148)  # its matrix instructions are a quarter as fast
    assert small.copy == pytest.approx(3.94 * 4.02 / 4.8, rel=0.01)
    assert small.product == pytest.approx(696 * 78 / 132 / (0.9 * 148))


@pytest.mark.parametrize("name", ["h200", "h100", "h100 pcie", "h20", "h800", "gh200"])
def test_a_large_layer_gains_on_every_hopper_and_no_more_than_twice(name: str) -> None:
    times = linear_times(16384, 14336, 4096, BLOCKWISE, NAMED[name])
    assert times is not None
    assert 1.1 < times.speedup < 2.0
