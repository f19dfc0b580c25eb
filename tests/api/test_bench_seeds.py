"""`python -m fp8fn bench seeds`: the seeds' shapes, published figures, means by hand, the report, and resumption."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8fn import cli
from fp8fn.bench import record, shapes
from fp8fn.bench.measure import Row
from fp8fn.bench.seeds import command, decoding, figures, layers, protocols
from fp8fn.bench.seeds.command import Unit, units
from fp8fn.bench.seeds.protocols import SEEDS, Shape
from fp8fn.bench.seeds.published import COLUMNS, FORMAT, Published, published
from fp8fn.bench.seeds.report import report
from fp8fn.timing import CpuClock

CPU = torch.device("cpu")
RUN: dict[str, Any] = {
    "device": "a GPU", "commit": "commit 1", "date": "2026-11-26", "setting": {"scaled_down": False},
    "environment": {"torch": "2.11", "triton": "3.6"}, "rows": [],
}  # fmt: skip


def entry(seed: str, part: str, shape: Shape, times: dict[str, float | None]) -> dict[str, Any]:
    """A shape's figures by label, in µs; a backward has 4MNK operations."""
    *_, m, n, k = shape
    rows = []
    for label, us in times.items():
        peer, _, case = label.partition(" ")
        operations = 2.0 * (2 if "backward" in case else 1) * m * n * k
        row = Row(shape, peer, case, "TFLOP/s", operations, 0.0, us=us, snr_db={"out": 28.5})
        row = replace(row, unavailable="no such kernel") if us is None else replace(row, rate=operations / us / 1e6)
        rows.append(asdict(row))
    return {"variant": f"{seed} {part} {shape}", "seed": seed, "part": part, "shape": list(shape), "rows": rows}


def layer(id: int, forward: float, backward: float, bf16: float = 1.0) -> dict[str, Any]:
    """A layer's entry: bf16 takes `bf16` times as long."""
    times: dict[str, float | None] = {
        "fp8fn forward": forward, "fp8fn backward": backward, "fp8fn square forward": forward,
        "fp8fn square backward": backward / 2, "torch bf16 forward": bf16 * forward,
        "torch bf16 backward": bf16 * backward,
    }  # fmt: skip
    return entry("000", "layers", shapes.shape(id)[2:], times)


# The protocols.


def test_every_seed_has_a_protocol_and_a_report() -> None:
    assert sorted(SEEDS) == ["000", "001", "002", "003", "004"]


def test_84_layers_have_69_sizes() -> None:
    (part,) = SEEDS["000"].parts.values()
    assert len(shapes.LLM84) == 84
    assert {layer[2:] for layer in shapes.LLM84} == set(part.shapes)
    assert len(part.shapes) == 69
    assert shapes.shape(1) == (1, "Llama-2-7B", 4096, 12288, 4096)
    assert shapes.shape(47) == (47, "Llama-3.1-405B", 32768, 106496, 16384)
    assert shapes.shape(84) == (84, "Mistral-7B", 16384, 4096, 14336)
    assert [
        sum(layer.model == name for layer in shapes.LLM84) for name in dict.fromkeys(s.model for s in shapes.LLM84)
    ] == [12] * 7


def test_shapes_of_the_other_seeds() -> None:
    # E,M,K,N as torchao prints them.
    printed = """
    8 2048 1024 1024|8 4096 2048 2048|8 4096 4096 4096|8 8192 4096 4096|16 4096 2048 2048|16 8192 4096 4096
    |8 16384 4096 4096|8 4096 5120 5120|8 16640 5120 8192
    """
    layers = [tuple(map(int, each.split())) for each in printed.split("|")]
    assert [(e, m, n, k) for e, m, k, n in layers] == list(SEEDS["001"].parts["layers"].shapes)

    batched = {(b, m, *nk) for b in (16, 32, 64, 128) for nk in ((512, 128), (128, 512)) for m in (1, 32, 128)}
    assert set(SEEDS["002"].parts["products"].shapes) == {*batched, (16, 8192, 8192, 8192)}
    assert len(SEEDS["002"].parts["products"].shapes) == 25

    llama = {(e, *sides) for e in (1, 16, 128) for sides in ((8192, 5120), (5120, 8192))}
    assert set(SEEDS["003"].parts["weights"].shapes) == {*llama, (8, 2048, 1408), (8, 1408, 2048)}
    tokens = {(groups, 16640, columns) for groups in (1, 16, 64) for columns in (8192, 5120)}
    assert set(SEEDS["003"].parts["tokens"].shapes) == tokens


def test_decoding_is_at_tensor_parallelism_1_to_8() -> None:
    sides = {(weight.k, weight.n) for weight in decoding.WEIGHTS}
    assert len(decoding.WEIGHTS) == 16
    assert len(sides) == 15  # gate_up and mlp_down are equal at TP 1, as aiter's tests have 15 shapes for a GPU
    four = [(weight.k, weight.n) for weight in decoding.WEIGHTS if weight.parallel == 4]
    assert four == [(6144, 2304), (2048, 6144), (6144, 1536), (1536, 6144)] == list(shapes.MX_DECODE)
    dense = SEEDS["004"].parts["dense"].shapes
    assert {(k, n, m) for m, n, k in dense} == {(*side, m) for side in sides for m in (1, 2, 4, 8, 16, 32, 64)}
    assert len(dense) == 105
    experts = SEEDS["004"].parts["experts"].shapes
    assert {(e, n, k) for e, _, n, k in experts} == {
        (e, *nk) for e in (128, 64, 32) for nk in ((1536, 6144), (768, 6144), (6144, 768))
    }
    assert {ids for _, ids, *_ in experts} == {4, 8, 16, 32, 64}


def test_sizes_on_a_cpu() -> None:
    assert protocols.scaled_down((4096, 12288, 4096)) == (64, 192, 64)
    assert protocols.scaled_down((128, 64, 768, 6144)) == (16, 64, 32, 96)
    assert protocols.scaled_down((1, 512, 128)) == (1, 32, 16)
    for unit in units(None):
        assert all(0 < size <= 1664 for size in protocols.scaled_down(unit.shape))


# Published figures.


def test_every_published_cell_names_its_source() -> None:
    found = published()
    for name, source in found.sources.items():
        assert name[:3] in SEEDS
        assert source.gpu in ("MI355X", "MI300X", "MI350X", "MI250X", "H100")
        assert "pull request" in source.where
        assert found.of(name)
    with pytest.raises(ValueError, match="name the source 'x'"):
        Published({"format": FORMAT, "columns": list(COLUMNS), "sources": {}, "cells": [["x", "all", "ms", 1.0]]})
    with pytest.raises(ValueError, match="have the columns source, of, figure, value"):
        Published({"format": FORMAT, "columns": ["of"], "sources": {}, "cells": []})


def test_published_layers_are_those_of_the_suite() -> None:
    found = published()
    seen = 0
    for source, _ in found.sources_of("000"):
        for of, cells in found.of(source).items():
            if "M" in cells:
                assert (cells["M"], cells["N"], cells["K"]) == shapes.shape(int(of))[2:]
                seen += 1
            before, after = (cells.get(f"combined TFLOP/s{end}") for end in (", main", ""))
            if before and after and "combined change %" in cells:
                assert 100 * (after / before - 1) == pytest.approx(cells["combined change %"], abs=0.02)
    assert seen == 8 + 5 + 5 + 1 + 10 + 10
    assert set(found.of("000-models")) == {layer.model for layer in shapes.LLM84}
    assert sum(cells["layers"] for cells in found.of("000-models").values()) == 83


def test_published_rates_are_those_of_the_published_times() -> None:
    """torchao counts 2·E·M·N·K operations of M tokens, and 5 bytes an element of weights."""
    found = published()
    for source, products in (("001-product", 2), ("001-step", 6)):
        for of, cells in found.of(source).items():
            e, m, k, n = map(int, of.split(","))
            assert (e, m, n, k) in SEEDS["001"].parts["layers"].shapes
            assert products * e * m * n * k / cells["ms"] / 1e9 == pytest.approx(cells["TFLOP/s"], rel=0.002)
    for source in ("003-mi250x", "003-mi300x", "003-h100"):
        assert len(found.of(source)) == 6
        for of, cells in found.of(source).items():
            e, n, k = map(int, of.split(","))
            assert (e, n, k) in SEEDS["003"].parts["weights"].shapes
            for name, gb_s in cells.items():
                if "GB/s" in name:
                    us = cells[name.replace("GB/s", "µs")]
                    assert 5 * e * n * k / us / 1e3 == pytest.approx(gb_s, rel=1e-4)
    for of, cells in found.of("004-us").items():
        over = found.figure("004-dense", of, "over Triton")
        assert cells["Triton µs"] / cells["HIP µs"] == pytest.approx(over, abs=0.01)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("002-batched", "products"), ("002-large", "products"), ("003-single", "weights"), ("003-rowwise", "tokens"),
        ("003-colwise", "tokens"), ("004-dense", "dense"), ("004-us", "dense"),
    ],
)  # fmt: skip
def test_published_shapes_are_those_of_the_protocol(source: str, part: str) -> None:
    of = {tuple(map(int, name.split(","))) for name in published().of(source)}
    assert of <= set(SEEDS[source[:3]].parts[part].shapes)


# The report.


def test_means_are_those_computed_by_hand() -> None:
    """Layers 2 and 26 have 2MNK = 137.4 and 274.9 GFLOP; 47 is left out of geometric means."""
    run = {**RUN, "rows": [layer(2, 100.0, 300.0, 1.5), layer(26, 400.0, 400.0, 1.5), layer(47, 1e6, 1e6, 1.5)]}
    found = layers.measured(figures.of_run(run, "000"))
    # Sizes that several layers have: 4096,4096,4096 is 2 and 74; 8192,4096,4096 is 6, 26 and 78.
    assert [each.layer.id for each in found] == [2, 6, 26, 47, 74, 78]
    without = [each for each in found if each.layer.id != 47]
    # Forward: 1374.4 twice and 687.2 three times, TFLOP/s.
    assert layers.geomean(without, "fp8fn", "forward") == pytest.approx((1374.39**2 * 687.195**3) ** 0.2, rel=1e-4)
    # Combined: 3 · 137.4 GFLOP in 400 µs is 1030.8, 3 · 274.9 GFLOP in 800 µs the same.
    assert layers.geomean(without, "fp8fn", "combined") == pytest.approx(1030.79, rel=1e-4)
    assert layers.geomean(without, "bf16", "combined") == pytest.approx(1030.79 / 1.5, rel=1e-4)
    # With half of the backward's time: 250 and 600 µs.
    square = (3 * 137.439 / 0.25) ** 2 * (3 * 274.878 / 0.6) ** 3
    assert layers.geomean(without, "square", "combined") == pytest.approx(square**0.2, rel=1e-4)
    text = report(run)
    assert _cells(text, "combined, geometric mean") == ["1031", "1478", "687", "MI355X", "1134", "1278"]
    assert _cells(text, "Llama-2-7B (2)")[:3] == ["1031", "1506", "687"]  # layers 2 and 6
    # Over six layers: (2 · 1374.4 + 3 · 687.2 + 114.3) / 6.
    assert _cells(text, "forward, mean") == ["821", "821", "547", "MI300X", "628", "639"]


def test_changes_are_those_computed_by_hand() -> None:
    found = layers.spread([-6.0, -1.0, 0.0, 2.0, 10.0])
    assert list(found.values()) == [0.0, 1.0, -1.0, 2.0, 2, 2, 1, 1]
    assert layers.spread([3.0])["first quartile %"] == 3.0
    text = report({**RUN, "rows": [layer(2, 100.0, 300.0, 1.1)]})
    assert _cells(text, "fp8fn over bf16, combined")[:2] == ["+10.00", "+10.00"]
    assert _cells(text, "MI355X, Primus-Turbo over main, combined") == [
        "+13.13", "+12.75", "+10.95", "+15.30", "83", "0", "82", "0",
    ]  # fmt: skip


def test_published_figures_stand_beside_ours() -> None:
    loop = "fp8fn product, expert by expert"
    rows = [
        layer(43, 1000.0, 2000.0),
        entry("001", "layers", (8, 16640, 8192, 5120), {"fp8fn product": 2000.0, "fp8fn forward": None, loop: 3000.0}),
        entry("003", "weights", (16, 8192, 5120), {"fp8fn a scale for each row of N": 500.0, "torch copy": 400.0}),
        entry("003", "tokens", (16, 16640, 5120), {"fp8fn one scale a group and column": 100.0}),
        entry("004", "experts", (128, 16, 1536, 6144), {"fp8fn MX-FP8": 50.0, "triton dot_scaled": 100.0}),
    ]
    text = report({**RUN, "rows": rows})
    assert _cells(text, "43")[-2:] == ["1291.9 → 1334.4", "+3.48 / +3.22 / +3.29"]
    assert _cells(text, "8,16640,8192,5120", "rowwise, ms")[-3:] == ["55.225", "40.689", "1.36x"]
    assert "Geometric means: 1.50x expert by expert." in text
    assert _cells(text, "16,8192,5120", "MI300X later")[:4] == ["500.0", "400.0", "4604.8 → 2940.5", "1762.8 → 1453.5"]
    assert _cells(text, "16,16640,5120")[-1] == "292.4 → 248.4"
    assert _cells(text, "128,1536,6144") == ["", "", "50.0 (100.0, 2.00x)", "", "", "up to 64 rows"]
    assert "- fp8fn forward (1 shape): n/a: `no such kernel`" in text
    assert "- H100: torchao pull request 3952, a comment: after gating." in text
    assert "a GPU; torch 2.11, Triton 3.6; commit 1; 2026-11-26." in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## Seed {seed}: {SEEDS[seed].title}" for seed in ("000", "001", "003", "004")
    ]
    assert "Measured: 1 of 8 shapes E,N,K, 1 of 6 shapes G,M,N." in text


@pytest.mark.parametrize("snr_db", [24.9, -3.0, float("nan")])
def test_a_wrong_result_has_no_time_in_the_report(snr_db: float) -> None:
    """Neither in a table nor in a mean; the report says of how many shapes."""
    loop = "fp8fn product, expert by expert"
    rows = [
        layer(2, 100.0, 300.0, 1.5),
        layer(26, 400.0, 400.0, 1.5),
        entry("001", "layers", (8, 16640, 8192, 5120), {"fp8fn product": 2000.0, loop: 3000.0}),
        entry("001", "layers", (8, 16384, 4096, 4096), {"fp8fn product": 10.0, loop: 3000.0}),
    ]
    for wrong in (rows[1]["rows"][1], rows[3]["rows"][0]):
        wrong["snr_db"] = {"out": 28.5, "dA": snr_db}
    text = report({**RUN, "rows": rows})
    assert [each.layer.id for each in layers.measured(figures.of_run({**RUN, "rows": rows}, "000"))] == [2, 74]
    assert _cells(text, "forward, geometric mean")[0] == "1374"
    assert "Geometric means: 1.50x expert by expert." in text
    assert _cells(text, "8,16384,4096,4096", "rowwise, ms")[:2] == ["", ""]
    assert "- fp8fn backward (1 shape): n/a: `a wrong result, under 25 dB`" in text
    assert "- fp8fn product (1 shape): n/a: `a wrong result, under 25 dB`" in text


def test_the_same_gpu_is_compared_in_one_figure() -> None:
    """On an H100 torchao's kernels take 1171.2 and 1466.27 µs, and 9374.42 and 9786.64."""
    label = "fp8fn a scale for each row of N"
    rows = [entry("003", "weights", (e, *sides), {label: 585.6}) for e, *sides in ((16, 8192, 5120), (8, 1408, 2048))]
    rows.append(entry("003", "weights", (128, 5120, 8192), {label: 9374.42}))
    mean = "published for the same model of GPU: 1.41x, geometric mean (lowest 1.00x)."
    assert f"Over the faster of torchao's two kernels at each of 2 shapes, {mean}" in report(
        {**RUN, "device": "NVIDIA H100 80GB HBM3", "rows": rows}
    )
    assert "same model" not in report({**RUN, "device": "NVIDIA H200", "rows": rows})


# Sizes, what follows from the cells that are shown, and rates that count E times the operations.
NOT_SHOWN = {
    ("000", "M"), ("000", "N"), ("000", "K"), ("000", "layers"), ("000", "forward ms"), ("000", "backward ms"),
    ("000", "forward TFLOP/s"), ("000", "backward TFLOP/s"), ("001", "TFLOP/s"), ("001", "loop TFLOP/s"),
}  # fmt: skip


def test_every_published_cell_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, str, str]] = set()

    class Watched(Published):
        def figure(self, source: str, of: str, name: str) -> float | None:
            asked.add((source, of, name))
            return super().figure(source, of, name)

    watched = Watched({"format": FORMAT, "columns": list(COLUMNS), "sources": {}, "cells": []})
    watched.sources, watched._cells = published().sources, published()._cells
    monkeypatch.setattr(figures, "published", lambda: watched)
    labels = {
        "000": ("fp8fn forward", "fp8fn backward", "torch bf16 forward", "torch bf16 backward"),
        "001": ("fp8fn product", "fp8fn forward", "fp8fn forward and backward"), "002": ("fp8fn w in 128x128",),
        "003": (f"fp8fn {protocols.TRANSPOSED}", f"fp8fn {protocols.BY_GROUP}"),
        "004": ("fp8fn MX-FP8", "triton dot_scaled"),
    }  # fmt: skip
    rows = [entry(u.seed, u.name, u.shape, dict.fromkeys(labels[u.seed], 1.0)) for u in units(None)]
    for each in rows:
        for row in each["rows"]:
            row["bytes"] = 1e9
    report({**RUN, "rows": rows})
    cells = {(s, of, name) for s in watched.sources for of, found in watched.of(s).items() for name in found}
    experts = {(s, of, name) for s, of, name in cells if s.startswith("004-experts") and "over Triton" in name}
    # Section 4.4 has layers 6, 26 and 78 too, 6 with another change of the backward.
    twice = {cell for cell in cells if cell[0] == "000-slower" and cell[1] in watched.of("000-least")}
    missing = {(source, of, name) for source, of, name in cells - asked if (source[:3], name) not in NOT_SHOWN}
    assert missing - twice == experts  # which stand in the caption


def test_products_of_decoding() -> None:
    """A call of 4 products, and one of 8 batches of 16: µs are those of one."""
    times = {"fp8fn MX-FP8": 40.0, "triton dot_scaled": 80.0, "torch bf16": 60.0}
    dense = entry("004", "dense", (1, 2304, 6144), times)
    for row in dense["rows"]:
        row["bytes"] = 4.0 * 2304 * 6144 * (2 if row["case"] == "bf16" else 1)
        row["graph_us"] = row["us"] / 2
    batched = entry("002", "products", (16, 32, 512, 128), {"fp8fn w in 128x128": 16.0, "torch bf16": 32.0})
    for row in batched["rows"]:
        row["bytes"] = 8.0 * 16 * 512 * 128 * (2 if row["case"] == "bf16" else 1)
    text = report({**RUN, "rows": [dense, batched]})
    assert _cells(text, "qkv", "TP ")[2] == "5.00 (10.00)"
    assert _cells(text, "qkv")[-7] == "2.00x / 3.64x"
    assert _cells(text, "1,2304,6144") == ["5.00", "10.00", "7.50", "7.20", "26.21"]
    # 2 · 16 · 32 · 512 · 128 operations in 2 µs.
    assert _cells(text, "16,32,512,128") == ["2.00", "4.00", "", "2.00x", "33.6", "2.251"]


def _cells(text: str, first: str, header: str = "") -> list[str]:
    """The cells of the last line that begins with `first`, in a table whose head has `header`."""
    found: list[str] = []
    head = previous = ""
    for line in text.splitlines():
        if line.startswith("|:"):
            head = previous
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] == first and header in head:
            found = cells[1:]
        previous = line
    assert found, f"no line of {first!r}"
    return found


# The command.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shapes that were measured; each takes 25 s of a clock, and none of a test."""
    found: list[str] = []

    def measured(unit: Unit, clock: Any, small: bool) -> list[Row]:
        assert small
        found.append(unit.label)
        return [Row(unit.shape, "fp8fn", "a", "TB/s", 0.0, 1.0, us=1.0)]

    monkeypatch.setattr(command, "_measured", measured)
    monkeypatch.setattr(command.time, "perf_counter", lambda: 25.0 * len(found))
    monkeypatch.setattr(command, "device_name", lambda device: "a machine")
    return found


def run(path: Path, *argv: str) -> int:
    return cli.main(["bench", "seeds", "--device", "cpu", "--commit", "one", "--json", str(path), *argv])


def test_an_interrupted_run_goes_on(clock: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "seeds.json"
    everything = [unit.label for unit in units(["001", "003"])]
    assert len(everything) == 8 + 6 + 9
    assert run(path, "--seed", "001", "--seed", "003", "--minutes", "1") == 0
    assert clock == everything[:3]
    assert "20 shapes not begun, as the time of --minutes is over" in capsys.readouterr().out
    assert run(path, "--seed", "001", "--seed", "003") == 0
    assert clock == everything
    assert "20 of 23 shapes to measure" in capsys.readouterr().out
    assert run(path, "--seed", "001", "--seed", "003") == 0
    assert clock == everything
    assert run(path, "--seed", "001", "--again") == 0
    assert clock == [*everything, *everything[14:]]
    (only,) = record.read(path)["results"]["runs"]
    assert (only["device"], only["commit"], only["setting"]) == ("a machine", "one", {"scaled_down": True})
    assert [row["variant"] for row in only["rows"]] == everything
    assert cli.main(["bench", "seeds", "--device", "cpu", "--commit", "two", "--seed", "001", "--json", str(path)]) == 0
    assert len(record.read(path)["results"]["runs"]) == 2


def test_runs_of_other_machines_are_added(clock: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes of the same machine and commit are added, and those of the other file are kept.

    The file says the machine and day of the newest run, not those of the addition.
    """
    first, second, third = (tmp_path / f"{name}.json" for name in ("first", "second", "third"))
    run(first, "--seed", "001")
    run(second, "--seed", "002")
    run(second, "--seed", "001", "--minutes", "1")
    other = record.read(second)
    for row in other["results"]["runs"][0]["rows"]:
        row["rows"][0]["us"] = 7.0
    second.write_text(json.dumps(other))
    cli.main(["bench", "seeds", "--device", "cpu", "--commit", "two", "--seed", "003", "--json", str(third)])
    latest = record.read(third)
    latest["results"]["runs"][0].update(
        date="2099-12-31", environment={"cuda:0 device": "their GPU", "torch": "9", "triton": "9"}
    )
    third.write_text(json.dumps(latest))
    capsys.readouterr()
    file = tmp_path / "all.md"
    added = [f for path in (second, third) for f in ("--add", str(path))]
    assert cli.main(["bench", "seeds", "--json", str(first), "--report", str(file), *added]) == 0
    document = record.read(first)
    assert (document["date"], document["environment"]["cuda:0 device"]) == ("2099-12-31", "their GPU")
    one, two = document["results"]["runs"]
    assert (one["commit"], two["commit"]) == ("one", "two")
    assert {row["variant"] for row in one["rows"]} == {unit.label for unit in units(["001", "002"])}
    again = {row["variant"] for row in other["results"]["runs"][0]["rows"]}
    assert {row["variant"] for row in one["rows"] if row["rows"][0]["us"] == 7.0} == again
    text = file.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert text.count("# The seeds' protocols on a machine") == 2
    assert text.count("## Seed 00") == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no file that bench seeds wrote (FileNotFoundError"),
        ("x", "is no file that bench seeds wrote (JSONDecodeError"),
        ('{"benchmark": "train"}', "has results of bench train; use a file that bench seeds wrote"),
        ('{"benchmark": "seeds", "results": {}}', "is no file that bench seeds wrote (KeyError: 'runs')"),
        ('{"benchmark": "seeds", "results": {"runs": [{"device": "x"}]}}', "(a run has no commit, date, environment,"),
    ],
)  # fmt: skip
def test_what_cannot_be_added_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    for argv, said in ((("--json", str(tmp_path / "a.json")), message), ((), "--add needs --json")):
        with pytest.raises(SystemExit) as leave:
            cli.main(["bench", "seeds", *argv, "--add", str(path)])
        assert leave.value.code == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("benchmark", ["seeds", "train", "loss"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"benchmark": "seeds", "resul', "wrote (JSONDecodeError: "),
        ("[1]", "wrote (TypeError: "),
        ('{"benchmark": "dense", "results": {"rows": []}}', "has results of bench dense; name another file, or one"),
        (None, "has results of bench memory; name another file, or one that does not exist yet"),
    ],
)  # fmt: skip
def test_a_file_that_another_benchmark_wrote_is_left_as_it_is(
    benchmark: str, content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one with runs, whose figures would be taken for this benchmark's."""
    path = tmp_path / "figures.json"
    path.write_text(content or json.dumps({"benchmark": "memory", "results": {"runs": [{**RUN, "rows": []}]}}))
    before = path.read_bytes()
    with pytest.raises(SystemExit) as leave:
        cli.main(["bench", benchmark, "--device", "cpu", "--json", str(path)])
    assert leave.value.code == 2
    said = capsys.readouterr().err
    assert f"--json: {path}" in said
    assert message in said
    assert path.read_bytes() == before


def test_nothing_is_added_to_a_file_of_another_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, added = tmp_path / "train.json", tmp_path / "seeds.json"
    path.write_text(before := json.dumps({"benchmark": "train", "results": {"runs": [RUN]}}))
    added.write_text(json.dumps({"benchmark": "seeds", "results": {"runs": [RUN]}}))
    with pytest.raises(SystemExit):
        cli.main(["bench", "seeds", "--json", str(path), "--add", str(added)])
    assert f"--json: {path} has results of bench train" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_run_that_ends_while_it_writes_leaves_the_file_before(
    clock: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seeds.json"
    run(path, "--seed", "001", "--minutes", "1")
    before, link = path.read_bytes(), tmp_path / "link.json"
    link.symlink_to(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(link, "--seed", "001") == 130  # interrupted
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if file not in (path, link)] == []
    run(link, "--seed", "001")
    assert link.is_symlink()
    assert len(record.read(path)["results"]["runs"][0]["rows"]) == 9


def test_a_wrong_result_is_the_exit_status(clock: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row((8, 8), "torch", "a", "TB/s", 0.0, 1.0, unavailable="not here")]
    monkeypatch.setattr(command, "_measured", lambda *_: rows)
    assert run(tmp_path / "a.json", "--seed", "001") == 0
    rows[0] = Row((8, 8), "fp8fn", "a", "TB/s", 0.0, 1.0, us=1.0, snr_db={"out": 24.0})
    assert run(tmp_path / "b.json", "--seed", "001") == 1
    assert run(tmp_path / "b.json", "--seed", "002", "--minutes", "1") == 1  # but 001's are not asked for
    rows[0] = Row((8, 8), "fp8fn", "a", "TB/s", 0.0, 1.0, unavailable="not here")
    assert run(tmp_path / "c.json", "--seed", "001") == 1


def test_a_shape_that_does_not_fit_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other shapes are measured all the same, and the report says why one is missing."""

    def cases(shape: Shape, device: torch.device) -> list[Any]:
        if shape[0] == 1:
            raise torch.OutOfMemoryError("no memory for it")
        return protocols.weight_cases(shape, device)

    part = replace(SEEDS["003"].parts["weights"], cases=cases, shapes=((1, 8192, 5120), (8, 2048, 1408)))
    monkeypatch.setitem(SEEDS, "003", replace(SEEDS["003"], parts={"weights": part}))
    file = tmp_path / "seeds.md"
    assert run(tmp_path / "seeds.json", "--seed", "003", "--report", str(file)) == 1
    text = file.read_text(encoding="utf-8")
    assert "- fp8fn all (1 shape): n/a: `OutOfMemoryError: no memory for it`" in text
    assert _cells(text, "1,8192,5120") == ["", ""]
    assert float(_cells(text, "8,2048,1408")[0]) >= 0


def test_a_device_that_fails_ends_the_run(
    clock: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def synchronize(self: CpuClock) -> None:
        if len(clock) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(CpuClock, "synchronize", synchronize)
    run(tmp_path / "seeds.json", "--seed", "001")
    assert "the device has failed (RuntimeError: CUDA error: an illegal memory access" in capsys.readouterr().out
    run(tmp_path / "seeds.json", "--seed", "001")  # from the third shape on
    assert clock == [unit.label for unit in units(["001"])]


def test_a_shape_at_which_the_process_ended_comes_last(
    clock: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ROCm's runtime after a memory fault: each run would end at the same shape, and measure none after it."""
    path, shapes_ = tmp_path / "seeds.json", [unit.label for unit in units(["001"])]
    measure = command._measured

    class Aborted(BaseException):
        """What no handler sees."""

    def faulty(unit: Unit, *rest: Any) -> list[Row]:
        if unit.label == shapes_[1]:
            raise Aborted
        return measure(unit, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(command, "_measured", faulty)
        for measured in (shapes_[:1], [shapes_[0], *shapes_[2:]]):
            with pytest.raises(Aborted):
                run(path, "--seed", "001")
            assert clock == measured
        (only,) = record.read(path)["results"]["runs"]
        text = report(only)
        assert "- fp8fn all (1 shape): n/a: `the process ended while the shape was measured`" in text
    before = path.read_bytes()
    with monkeypatch.context() as patch:  # an interrupted shape is as before
        patch.setattr(command, "_measured", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(path, "--seed", "001", "--again") == 130
        assert record.read(path)["results"] == json.loads(before)["results"]
        assert run(tmp_path / "new.json", "--seed", "001") == 130
        assert record.read(tmp_path / "new.json")["results"]["runs"][0]["rows"] == []
    run(path, "--seed", "001")
    assert clock == [shapes_[0], *shapes_[2:], shapes_[1]]
    (only,) = record.read(path)["results"]["runs"]
    assert not [row for row in only["rows"] if row.get("ended")]


def test_an_unknown_seed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        run(tmp_path / "x.json", "--seed", "005")
    assert leave.value.code == 2
    assert "argument --seed: invalid choice: '005' (choose from" in capsys.readouterr().err


def test_a_run_on_the_cpu_is_marked_and_compares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "seeds.md"
    assert run(tmp_path / "seeds.json", "--seed", "003", "--report", str(file)) == 0
    text = file.read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith(f"\n{text}")
    assert "**Scaled down for a CPU: " in text
    assert "Measured: 8 of 8 shapes E,N,K, 6 of 6 shapes G,M,N." in text
    assert len(_cells(text, "128,8192,5120")) == 2
    for gpu in ("MI300X", "MI250X", "H100", "Published figures"):
        assert gpu not in text
    (only,) = json.loads((tmp_path / "seeds.json").read_text())["results"]["runs"]
    shapes_ = {tuple(row["shape"]): tuple(row["rows"][0]["shape"]) for row in only["rows"]}
    assert shapes_[16, 8192, 5120] == (16, 128, 64)


@pytest.mark.parametrize(
    ("seed", "part", "shape", "cases"),
    [
        ("000", "layers", (4096, 4096, 4096), 6), ("001", "layers", (8, 2048, 1024, 1024), 8),
        ("002", "products", (16, 32, 512, 128), 3), ("003", "weights", (16, 8192, 5120), 2),
        ("004", "dense", (8, 1536, 6144), 3), ("004", "experts", (128, 64, 1536, 6144), 2),
        ("004", "experts", (32, 64, 6144, 768), 2),
    ],
)  # fmt: skip
def test_cases_of_each_part(seed: str, part: str, shape: Shape, cases: int) -> None:
    unit = Unit(seed, part, SEEDS[seed].parts[part], shape)
    assert shape in unit.part.shapes
    rows = command._measured(unit, CpuClock(CPU), True)
    assert len(rows) == cases
    for row in rows:
        if row.peer == "fp8fn":
            assert row.us is not None, row.unavailable
            assert row.snr_db or part == "tokens"
            assert not row.wrong
