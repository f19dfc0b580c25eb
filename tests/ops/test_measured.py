"""`tune --op`: the sweep by a fake timer, the user's table that it writes, and the choice that the table changes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tqdm")

from fp8fn import ScaledTensor
from fp8fn.cli import tune, tune_op
from fp8fn.ops import moe_gemm, mx_mm
from fp8fn.ops.kernel import choose
from fp8fn.ops.layout import empty_scale
from fp8fn.ops.mm_a16w8 import KERNELS
from fp8fn.ops.operands import WeightProduct
from fp8fn.ops.targets import SM90, Chip, Target, chip_of
from fp8fn.ops.tuning import measured, op_sweep, weight_table
from fp8fn.ops.tuning.chain_device import weight_bench
from fp8fn.ops.tuning.measured import Key, candidate_name
from fp8fn.ops.tuning.mx import MoeProblem, Problem
from fp8fn.ops.tuning.mx_table import moe_key, moe_named, mx_key, mx_named
from fp8fn.ops.tuning.op_sweep import Named
from fp8fn.ops.tuning.sweep import Call
from fp8fn.ops.tuning.weight_table import FORM
from fp8fn.timing import clock_of
from support.products import weight_product

CHIP = Chip("NVIDIA Test", 132)
KEY: Key = (4, 2304, 6144, 1, (128, 128), "bfloat16", True)
PRODUCTS = 10


class FakeBench:
    """Each candidate takes 20 µs a product but for one, which takes 10."""

    def __init__(self, fastest: str) -> None:
        self.chip, self.clock, self.fastest = CHIP, self, fastest
        self.asked: list[Any] = []

    def warm(self, seconds: float) -> None:
        pass

    def samples(self, call: Call, repeats: int, lead_us: float) -> list[float]:
        return [call()] * repeats

    def calls(self, problem: Any, candidates: Mapping[str, Named]) -> tuple[dict[str, Call], int]:
        self.asked.append(problem)
        times = {name: PRODUCTS * (10.0 if name == self.fastest else 20.0) for name in candidates}
        return {name: (lambda us=us: us) for name, us in times.items()}, PRODUCTS  # type: ignore[misc]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8FN_CACHE_DIR", str(tmp_path))
    measured.forget()
    return tmp_path


def product(m: int, n: int = 2304, k: int = 6144, *, constant: bool = True) -> WeightProduct:
    x, out = (torch.empty(m, size, dtype=torch.bfloat16, device="meta") for size in (k, n))
    w = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta").mT
    return weight_product(x, ScaledTensor(w, empty_scale(w, (128, 128), "fp32"), (128, 128)), out, constant=constant)


def other(key: Key = KEY) -> tuple[str, Any]:
    """A candidate of another kernel than the default one."""
    problem = FORM.problem(key, CHIP)
    default, configs = tune_op.OPS["mm_a16w8"].default(problem).split()[0], FORM.candidates(problem)
    kernel = next(name for name in configs if name != default)
    return kernel, configs[kernel][-1]


def test_the_written_table_is_read_back_and_changes_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    kernel, config = other()
    bench = FakeBench(candidate_name(kernel, config))
    argv = ["--op", "mm_a16w8", "--shapes", "4,2304,6144"]
    before = choose(product(4), KERNELS, weight_table.named(product(4), CHIP))
    assert tune.main(argv, bench) == 0
    assert [problem.constant for problem in bench.asked] == [True, False]
    printed = capsys.readouterr().out
    assert "2 of 2 products are tuned" in printed
    assert "100.0 %" in printed  # the gain over the default
    path = measured.user_path(FORM, CHIP)
    document = json.loads(path.read_text())
    assert document["origin"]["command"] == "python -m fp8fn tune --op mm_a16w8 --shapes 4,2304,6144"
    assert {"date", "torch"} <= document["origin"].keys()
    assert path.read_text().count("\n  [") == 2  # a row a line
    row = measured.users(FORM, CHIP).rows[KEY]
    assert (row.kernel, row.config, row.us) == (kernel, config, 10.0)
    for m in (3, 4):  # up to the next power of two
        choice = choose(product(m), KERNELS, weight_table.named(product(m), CHIP))
        assert (choice.name, choice.config, choice.source) == (kernel, config, path.name)
        assert choice.name != before.name
    for elsewhere in (product(8), product(4, 1536), product(2)):
        assert weight_table.named(elsewhere, CHIP) is None
    assert weight_table.named(product(4), Chip("NVIDIA Test", 114)) is None
    bench.asked.clear()
    assert tune.main(argv, bench) == 0
    assert bench.asked == []  # what the table has is not measured again
    assert tune.main([*argv, "--force"], bench) == 0
    assert len(bench.asked) == 2


def written() -> tuple[Path, dict[str, Any]]:
    tune.main(["--op", "mm_a16w8", "--shapes", "4,2304,6144"], FakeBench(candidate_name(*other())))
    path = measured.user_path(FORM, CHIP)
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("M", 0, "has 0 as M"),
        ("block", [1, 128], r"has \(1, 128\) as block"),
        ("x_type", "float32", "has 'float32' as x_type"),
        ("constant", 1, "has 1 as constant"),
        ("kernel", "cuda_other", "has the kernel 'cuda_other', which is not one of cuda_tiles, cuda_gemv"),
        ("config", {"ROWS": 64}, "in which cuda_gemv can't multiply its problem"),
        ("config", {}, "in which cuda_gemv can't multiply its problem"),
        ("config", None, "in which cuda_gemv can't multiply its problem"),
        ("times_us", {"cuda_gemv": -1.0}, "which have to be positive numbers"),
        ("times_us", {}, "has no time of its configuration"),
        ("spread_us", "little", "as spread_us"),
    ],
)
def test_a_broken_row_is_left_out_with_a_warning(
    column: str, value: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, document = written()
    broken = next(row for row in document["rows"] if row[6])
    broken[document["columns"].index(column)] = value
    path.write_text(json.dumps(document))
    measured.forget()
    with caplog.at_level(logging.WARNING, "fp8fn"):
        rows = measured.users(FORM, CHIP).rows
    assert [key[6] for key in rows] == [False]
    assert re.search(f"row . {words}|row . .*{words}", caplog.text)
    assert "it is left out. Run `python -m fp8fn tune --op mm_a16w8` again" in caplog.text
    with pytest.raises(ValueError, match=words):
        measured.read(FORM, path)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', "{}"])
def test_a_file_that_is_none_is_left_out(text: str) -> None:
    path, _ = written()
    path.write_text(text)
    measured.forget()
    assert measured.users(FORM, CHIP).rows == {}
    assert weight_table.named(product(4), CHIP) is None


def test_the_shapes_of_decoding_and_candidates_that_have_the_default() -> None:
    keys = tune_op.keys_of("mm_a16w8", None, tune_op.Wanted(SM90))
    assert len(keys) == len(set(keys)) > 100
    for key in keys:
        problem = FORM.problem(key, CHIP)
        names = {candidate_name(kernel, c) for kernel, configs in FORM.candidates(problem).items() for c in configs}
        assert tune_op.OPS["mm_a16w8"].default(problem) in names


def test_a_suite_of_scaled_mm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--op", "mm_a16w8", "--suite", "anchors"])
    assert "--op mm_a16w8 has its own shapes" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("constant", [True, False])
def test_the_bench_runs_each_candidate_on_a_gpu(
    constant: bool, hopper: Target, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    chip = chip_of(device, hopper)
    assert chip is not None
    bench = weight_bench(device, hopper, chip, clock_of(device))
    for m, n, k in ((4, 1536, 768), (16, 384, 6144), (64, 2304, 1024)):
        key = (m, n, k, 1, (128, 128), "bfloat16", constant)
        problem = FORM.problem(key, chip)
        candidates = {
            candidate_name(kernel, config): (kernel, config)
            for kernel, configs in FORM.candidates(problem).items()
            for config in configs
        }
        calls, _ = bench.calls(problem, candidates)
        assert calls.keys() == candidates.keys()
        row = op_sweep.tune(FORM, key, bench, tune_op.OPS["mm_a16w8"].default(problem))
        assert row.times.keys() <= calls.keys()  # those that `heats` leaves
        assert row.us <= row.times[tune_op.OPS["mm_a16w8"].default(problem)]
    assert "is left out" not in caplog.text


@pytest.mark.parametrize(
    ("op", "named", "problem", "elsewhere"),
    [
        (
            "mx_mm", mx_named, Problem(3, 2304, 6144, SM90, constant=True, chip=CHIP),
            ({"m": 9}, {"n": 1536}, {"k": 3072}, {"batch": 2}, {"chip": None}),
        ),
        (
            "moe_gemm", moe_named, MoeProblem(15, 1536, 6144, 128, 15, 16, SM90, chip=CHIP),
            ({"ids": 17}, {"experts": 64}, {"block_m": 32}, {"a_block": (1, 128)}, {"chip": None}),
        ),
    ],
)  # fmt: skip
def test_tables_of_mx_products(op: str, named: Any, problem: Any, elsewhere: Any) -> None:
    form = tune_op.OPS[op].form
    key = (mx_key if op == "mx_mm" else moe_key)(problem)
    measured_problem = form.problem(key, CHIP)
    default = tune_op.OPS[op].default(measured_problem)
    names = {candidate_name(k, c): (k, c) for k, cs in form.candidates(measured_problem).items() for c in cs}
    assert default in names
    kernel, config = next(given for name, given in names.items() if name != default)
    path = measured.user_path(form, CHIP)
    shape = f"4,{problem.n},{problem.k}"  # of tokens with 4 experts each
    assert tune.main(["--op", op, "--shapes", shape], FakeBench(candidate_name(kernel, config))) == 0
    kernels = (mx_mm if op == "mx_mm" else moe_gemm).KERNELS
    choice = choose(problem, kernels, named(problem))
    assert (choice.name, choice.config, choice.source) == (kernel, config, path.name)
    if op == "mx_mm":
        assert mx_mm.choose(problem).source == path.name
    for change in elsewhere:
        assert named(replace(problem, **change)) is None


@pytest.mark.parametrize("op", ["mx_mm", "moe_gemm"])
def test_the_shapes_of_mx_decoding(op: str) -> None:
    form = tune_op.OPS[op].form
    for key in tune_op.keys_of(op, None, tune_op.Wanted(SM90)):
        problem = form.problem(key, CHIP)
        names = {candidate_name(kernel, c) for kernel, configs in form.candidates(problem).items() for c in configs}
        assert tune_op.OPS[op].default(problem) in names


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["mx_mm", "moe_gemm"])
def test_the_bench_of_mx_products_runs_each_candidate_on_a_gpu(
    op: str, hopper: Target, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    chip, tuned = chip_of(device, hopper), tune_op.OPS[op]
    assert chip is not None
    for key in tuned.keys((4, 1536, 768), tune_op.Wanted(hopper)):
        default = tuned.default(tuned.form.problem(key, chip))
        row = op_sweep.tune(tuned.form, key, tuned.bench(device, hopper, chip, clock_of(device)), default)
        assert row.us <= row.times[default]
    assert "is left out" not in caplog.text
