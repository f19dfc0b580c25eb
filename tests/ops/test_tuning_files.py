"""Tables in files: whose precedes whose, what is corrupt, and what a plan takes of them."""

from __future__ import annotations

import json
import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8fn.ops.cuda.gemm.cublaslt import LibraryLaunch
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.targets import SM89, SM90, SM100, Chip, Target, chip_of
from fp8fn.ops.tuning import compare, table
from fp8fn.ops.tuning.model import W, candidates, config_name, config_of, pairs, ranked
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.table import Entry, Table
from support.products import dispatched
from support.tuning import CHIP, ENTRY, GOOD, PROBLEM, choose_config, operands, row, save

pytestmark = pytest.mark.usefixtures("cache")


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    entries = {
        PROBLEM: ENTRY,
        Problem(64, 2304, 6144, "VECTOR", "VECTOR", 3, torch.float8_e5m2, torch.float8_e4m3fn, torch.float32): Entry(
            "64x64d2s2", {"64x64d2s2": 9.5}, 0.25
        ),
    }
    written = Table(CHIP, entries, {"torch": "2.13.0"}, "file.json")
    table.write(tmp_path / "file.json", written)
    assert table.read(tmp_path / "file.json") == written
    lines = (tmp_path / "file.json").read_text().splitlines()
    assert sum("128x256d1" in line for line in lines) == 1  # a row a line
    assert json.loads("\n".join(lines))["columns"] == list(table.COLUMNS)


def test_the_shipped_tables_are_valid() -> None:
    for chip, name in table.SHIPPED.items():
        shipped = table.read(table._FOLDER / name)
        assert shipped.chip == chip
        for problem, entry in shipped.entries.items():
            assert entry.us > 0
            assert problem.operations / entry.us / 1e6 < 2000, "no Hopper is that fast"
            offered = (*candidates(problem, chip.multiprocessors), *pairs(problem))
            assert replace(config_of(entry.config), GROUP=8, TURNS=True) in offered


def test_a_second_sweep_agrees_with_the_first() -> None:
    """Both are of the same products on one H200, one right after the other, by the kernel of 2026-11-23."""
    first, second = (table.read(Path(__file__).parent / f"h200_{which}_sweep.json") for which in ("first", "second"))
    found = compare.agreement(first, second)
    assert found.problems == len(first.entries) == len(second.entries) == 237
    assert found.within >= 0.95 * found.problems
    assert found.carried > 0.995
    for sweep in (first, second):
        assert compare.regret(sweep, unseen=True).mean > 0.95


def test_the_models_choices_are_near_the_best_of_the_shipped_tables() -> None:
    for chip, name in table.SHIPPED.items():
        assert compare.regret(table.read(table._FOLDER / name), unseen=True).mean > 0.95, chip


def test_lookup_is_exact_then_by_plain_types() -> None:
    known = Table(CHIP, {PROBLEM: ENTRY})
    gradient = replace(PROBLEM, a_type=torch.float8_e5m2, out_type=torch.float16)
    exact, plain = table.lookup(PROBLEM, (known,)), table.lookup(gradient, (known,))
    assert exact is not None
    assert plain is not None
    assert (exact.entry, exact.exact, plain.entry, plain.exact) == (ENTRY, True, ENTRY, False)
    assert table.lookup(replace(PROBLEM, out_type=torch.float32), (known,)) is None
    assert table.lookup(replace(PROBLEM, batch=2), (known,)) is None
    assert table.lookup(PROBLEM, ()) is None


def test_a_peer_wins_by_more_than_the_spread() -> None:
    assert not ENTRY.peer_wins
    assert not replace(ENTRY, peer_us=298.5).peer_wins
    assert replace(ENTRY, peer_us=297.5).peer_wins
    assert not replace(ENTRY, peer_us=None).peer_wins
    fast = Table(CHIP, {PROBLEM: replace(ENTRY, peer_us=200.0)}, name="t.json")
    assert choose_config(PROBLEM, 132, (fast,)).peer_wins
    assert not choose_config(replace(PROBLEM, a_type=torch.float8_e5m2), 132, (fast,)).peer_wins


def test_the_users_table_precedes_the_shipped_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    second, third = Problem(4096, 4096, 4096), Problem(256, 256, 256)
    table.write(tmp_path / "shipped.json", Table(CHIP, {PROBLEM: ENTRY, second: ENTRY}))
    monkeypatch.setattr(table, "SHIPPED", {CHIP: str(tmp_path / "shipped.json")})
    mine = Entry("64x256d1", {"64x256d1": 1.0}, 0.1)
    path = save({PROBLEM: mine})
    known = table.tables(CHIP)
    found = [choose_config(problem, 132, known) for problem in (PROBLEM, second, third)]
    assert [config_name(choice.config) for choice in found] == [
        "64x256d1", "128x256d1", config_name(ranked(third, 132)[0]),
    ]  # fmt: skip
    assert [choice.source for choice in found] == [path.name, "shipped.json", "the model"]
    # The file says nothing about another chip, or about one with other multiprocessors.
    for other in (Chip("NVIDIA Test", 78), Chip("NVIDIA H100", 132)):
        assert choose_config(PROBLEM, 132, table.tables(other)).source == "the model"


def test_tables_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    save({PROBLEM: ENTRY})
    reads: list[Path] = []
    read = table.read
    monkeypatch.setattr(table, "read", lambda path, *more: (reads.append(path), read(path, *more))[1])
    for _ in range(3):
        assert choose_config(PROBLEM, 132, table.tables(CHIP)).config == W
    assert reads == [table.user_path(CHIP)]
    assert table.tables(None) == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "\xff\xfe",
        GOOD.replace('"format": 1', '"format": 2'),
        GOOD.replace('"times_us"', '"us"'),
        GOOD.replace("[]", "3"),
        GOOD.replace("[]", "[[1, 2]]"),
        row("BLOCK", "9x9d1", {"9x9d1": 1}),
        row("LINE", "64x64d2", {"64x64d2": 1}),
        row("BLOCK", "64x64d2", {}),
        row("BLOCK", "64x64d2", 5),
        GOOD.replace("NVIDIA Test", "NVIDIA Other"),
    ],
)
def test_a_corrupt_users_table_is_left_out_with_a_warning(content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = table.user_path(CHIP)
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING, logger="fp8fn"):
        assert table.tables(CHIP) == ()
        assert choose_config(PROBLEM, 132, table.tables(CHIP)).source == "the model"
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    save({PROBLEM: ENTRY})  # and tuning replaces it
    assert table.users(CHIP).entries == {PROBLEM: ENTRY}


def test_an_unreadable_users_table_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    table.user_path(CHIP).mkdir(parents=True)  # for root may read any file
    with caplog.at_level(logging.WARNING, logger="fp8fn"):
        assert table.tables(CHIP) == ()
    assert "IsADirectory" in caplog.text or "Is a directory" in caplog.text


def test_a_good_table_of_this_form_is_taken() -> None:
    path = table.user_path(CHIP)
    path.parent.mkdir(parents=True)
    path.write_text(row("BLOCK", "64x64d2", {"64x64d2": 1}))
    entry = Entry("64x64d2", {"64x64d2": 1.0}, 1.0)
    assert table.tables(CHIP) == (Table(CHIP, {Problem(1, 1, 1): entry}, {}, path.name),)


def _add_ten(start: int) -> None:
    for i in range(start, start + 10):
        table.add(CHIP, {Problem(i, 128, 128): replace(ENTRY, spread=float(i))}, {})


def test_two_processes_that_tune_keep_each_others_rows(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_ten, args=(start,)) for start in (1, 101)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    found = table.users(CHIP).entries
    assert {problem.m: entry.spread for problem, entry in found.items()} == {
        i: float(i) for i in (*range(1, 11), *range(101, 111))
    }
    left = {path.name for path in table.user_path(CHIP).parent.iterdir()}
    assert left == {"nvidia-test-132.json", "nvidia-test-132.lock"}


def test_a_plan_says_who_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    launch = dispatched(operands(PROBLEM).product(SM90, CHIP))
    assert isinstance(launch, CudaLaunch)
    assert launch.reason == "cuda by the model"
    assert (launch.options["BM"], launch.options["BN"]) == (192, 128)
    save({PROBLEM: replace(ENTRY, peer_us=305.0)})
    tuned = dispatched(operands(PROBLEM).product(SM90, CHIP))
    assert tuned.reason == "cuda by nvidia-test-132.json"
    assert tuned.describe().startswith("scaled_mm[BM=128,BN=256")
    # Without a device or a chip it is the model's.
    assert dispatched(operands(PROBLEM).product(SM90)).reason == "cuda by the model"


def test_a_plan_of_few_tiles_shares_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    problem = Problem(64, 512, 16384)
    launch = dispatched(operands(problem).product(SM90, CHIP))
    assert isinstance(launch, CudaLaunch)
    assert launch.options["SPLIT"] == ranked(problem, 132)[0].SPLIT > 1


def test_a_plan_is_the_librarys_where_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    save({PROBLEM: replace(ENTRY, peer_us=200.0)})
    launch = dispatched(operands(PROBLEM).product(SM90, CHIP))
    assert isinstance(launch, LibraryLaunch)
    assert launch.describe() == ("torch._scaled_mm_v2[1x128·128x128] sm90 (cublaslt by nvidia-test-132.json)")
    # With a bias cuBLASLt does not take these, and with e5m2 nothing was measured.
    biased = operands(PROBLEM)._replace(bias=torch.empty(6144, dtype=torch.bfloat16, device="meta"))
    assert isinstance(dispatched(biased.product(SM90, CHIP)), CudaLaunch)
    assert isinstance(dispatched(operands(replace(PROBLEM, a_type=torch.float8_e5m2)).product(SM90, CHIP)), CudaLaunch)


def test_what_cuda_does_not_take_goes_to_triton_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    problem = Problem(256, 256, 256)
    assert dispatched(operands(problem, "cpu").product(SM90)).name == "scaled_mm_tma"
    assert (
        dispatched(operands(problem, "cpu").product(SM90)).reason == "triton_tma by default; not cuda: a is on the CPU"
    )
    elsewhere = dispatched(operands(problem).product(SM100))
    assert (elsewhere.name, elsewhere.reason) == (
        "scaled_mm_tma", "triton_tma by default; not cuda: sm100 is not sm90",
    )  # fmt: skip
    elsewhere = dispatched(operands(problem).product(SM89))
    assert (elsewhere.name, elsewhere.reason) == (
        "scaled_mm",
        "triton by default; not cuda: sm89 is not sm90; not triton_tma: sm89 is none of sm90, sm100, sm103, sm120",
    )
    made = operands(problem)
    odd = made._replace(a=torch.empty_strided((256, 256), (257, 1), dtype=torch.float8_e4m3fn, device="meta"))
    assert dispatched(odd.product(SM90)).reason == (
        "triton by default; not cuda: a has a stride of 257 bytes, no multiple of 16; "
        "not triton_tma: a has a stride of 257 bytes, no multiple of 16"
    )
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no libnvrtc.so.13 is here")
    without = dispatched(made.product(SM90))
    assert (without.name, without.reason) == (
        "scaled_mm_tma", "triton_tma by default; not cuda: no libnvrtc.so.13 is here",
    )  # fmt: skip


def test_the_chip_of_a_plan() -> None:
    assert chip_of(torch.device("cpu"), SM90) is None
    assert chip_of(torch.device("meta"), SM90) is None
    if not torch.cuda.is_available():
        assert chip_of(torch.device("meta"), Target("cuda", 90, 32, 132)) is None
