"""`tune` on every target: its candidates, what prunes them, the search on a drifting clock, and who reads the table."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("tqdm")

from fp8fn.cli import tune, tune_op
from fp8fn.cli.options import ARCHS
from fp8fn.lowering.explain import explain
from fp8fn.ops import moe_gemm, mx_mm, targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.kernel import choose
from fp8fn.ops.mx_mm import choose as choose_mx
from fp8fn.ops.quantize_grouped import QUANTIZE_GROUPED
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import Chip, Target, chip_of, named_target, target_of, target_of_chip
from fp8fn.ops.triton import scaled_mm, scaled_mm_tma
from fp8fn.ops.triton.gemm_config import GemmConfig
from fp8fn.ops.tuning import (
    amd,
    chain_device,
    grouped_table,
    measured,
    op_sweep,
    tile_space,
    triton_table,
    weight_table,
)
from fp8fn.ops.tuning.measured import candidate_name
from fp8fn.ops.tuning.mx_table import MX_FORM
from fp8fn.ops.tuning.rates import NAMED
from fp8fn.ops.tuning.sweep import decide, measure, turns_for
from fp8fn.ops.tuning.tile_space import TileProblem, seeds_space, space
from fp8fn.timing import clock_of
from support.tuning import DriftingBench, DriftingClock

pytestmark = pytest.mark.usefixtures("cache")

MI355X = Chip("AMD Instinct MI355X", 256)
SHAPE = (4096, 6144, 4096)
LAYOUTS = ("forward", "dgrad", "wgrad")
US = 300.0


def target(arch: str) -> Target:
    found = named_target(arch)
    assert found is not None
    return found[1]


# The candidates.


def test_the_seeds_spaces_have_their_sizes() -> None:
    sizes = {layout: len({*seeds_space(layout)}) for layout in LAYOUTS}
    assert sizes == {"forward": 96, "dgrad": 144, "wgrad": 96}
    assert max(config.num_stages for config in seeds_space("wgrad")) == 2
    narrow = [c for c in seeds_space("dgrad") if ("matrix_instr_nonkdim", 16) in c.options]
    assert {config.BM for config in narrow} == {256}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_candidate_of_amd_is_timed_or_has_a_reason(arch: str, layout: str) -> None:
    found = space(TileProblem(layout, *SHAPE, target(arch)))
    configs = [candidate.config for candidate in found]
    assert len(set(configs)) == len(configs)
    assert set(seeds_space(layout)) <= set(configs)
    reasons = {candidate.pruned.split()[0] for candidate in found if candidate.pruned}
    assert reasons <= {"needs", "modelled", "spills", "kpack"}
    assert ("kpack" in reasons) == (arch == "gfx950")
    assert ("needs" in reasons) == (arch == "gfx942" and layout != "wgrad")  # a third stage is a second tile in LDS
    assert found[0].pruned is None  # the default
    timed = [candidate for candidate in found if candidate.pruned is None]
    assert 8 < len(timed) <= len(found)


def test_names_of_configurations_are_read_back() -> None:
    for config in seeds_space("dgrad"):
        read = amd.config_of(str(config))
        assert replace(read, options=tuple(sorted(read.options))) == replace(
            config, options=tuple(sorted(config.options))
        )
        assert str(config) == f"{config.code}g{config.GROUP}x{config.XCDS}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", [None, *tune_op.OPS])
def test_a_dry_run_needs_no_device_and_lists_all(arch: str, op: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["64,512,1024", *(["--op", op] if op else ["16384,4096,4096"])]  # bands of tiles are of large products
    argv = ["--arch", arch, "--dry-run", "--shapes", *shapes]
    assert tune.main(argv) == 0
    heads, lines = [], []
    for line in capsys.readouterr().out.splitlines():
        (lines if line.startswith("  ") else heads).append(line)
    counts = [head.partition(" candidates are timed")[0].rpartition(": ")[2].split(" of ") for head in heads]
    assert sum(int(timed) for timed, _ in counts) == sum(line.endswith("  timed") for line in lines)
    assert sum(int(count) for _, count in counts) >= len(lines) > 0
    assert all(len(line.split("  ")) >= 2 for line in lines)


def test_the_target_of_a_chip_is_by_its_name() -> None:
    assert target_of_chip(MI355X) == replace(target("gfx950"), multiprocessors=256)
    assert target_of_chip(Chip("NVIDIA H100 80GB HBM3", 132)).name == "sm90"
    assert target_of_chip(Chip("NVIDIA GeForce RTX 5090", 170)).name == "sm120"


def launches(arch: str, layout: str) -> Iterator[Any]:
    """A launch of each machine code that is timed on an architecture."""
    problem, seen = TileProblem(layout, 4096, 4096, 4096, target(arch)), set()
    for kernel, config, pruned in space(problem):
        code = (kernel, config.code if isinstance(config, GemmConfig) else config)
        if pruned is None and code not in seen:
            seen.add(code)
            plan = scaled_mm.plan_scaled_mm if kernel == "triton" else scaled_mm_tma.plan_scaled_mm_tma
            yield plan(problem.product(), config)[0]  # type: ignore[arg-type]


def check_compiles(launch: Any) -> None:
    used = launch.resources()
    assert (used.spills, used.scratch) == (0, 0), launch.describe()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sample_of_the_candidates_compiles_without_spills(arch: str) -> None:
    for layout in ("forward", "wgrad"):
        check_compiles(random.Random(f"{arch} {layout}").choice(list(launches(arch, layout))))


# Shapes by which the ops of decoding and of experts have all their candidates.
OTHERS = {
    "mm_a16w8": ((1, 512, 1024), (16, 512, 1024), (64, 4096, 4096), (128, 4096, 4096)),
    "mx_mm": ((4, 512, 1024), (16, 2304, 6144), (64, 2304, 6144), (4096, 4096, 4096)),
    "moe_gemm": ((1, 1536, 6144), (16, 1536, 6144)),
    "quantize_grouped": ((16640, 8192, 5120),),
}


def launches_of_others(arch: str, op: str) -> Iterator[tuple[Any, ...]]:
    """The launches of each candidate in Triton of another op than `scaled_mm`."""
    here, tuned, seen = target(arch), tune_op.OPS[op], set()
    parts = tuned.bench.keywords  # type: ignore[attr-defined]
    kernels = {kernel.name: kernel for kernel in parts["op"].kernels}
    for key in tune_op.keys_of(op, OTHERS[op], tune_op.Wanted(here)):
        problem = tuned.form.problem(key, Chip(arch, here.cores))
        product = parts["make"](problem, torch.device("meta"), here)
        for name, configs in tuned.form.candidates(problem).items():
            for config in configs:
                code = (name, config, key[0] if op == "quantize_grouped" else None)
                if name.startswith("triton") and code not in seen:
                    seen.add(code)
                    yield kernels[name].plan(product, config)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sample_of_the_candidates_of_other_ops_compiles_without_spills(arch: str) -> None:
    for launch in random.Random(arch).choice([each for op in OTHERS for each in launches_of_others(arch, op)]):
        check_compiles(launch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OTHERS)
def test_all_candidates_of_other_ops_compile_without_spills(arch: str, op: str) -> None:
    for each in launches_of_others(arch, op):
        for launch in each:
            check_compiles(launch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_candidates_compile_without_spills(arch: str, layout: str) -> None:
    if (arch, layout) == ("sm90", "dgrad"):
        pytest.skip("on Hopper both operands of dgrad lie as those of the forward product")
    for launch in launches(arch, layout):
        check_compiles(launch)


# The search.


def space_of_144(seed: int) -> tuple[dict[str, float], str]:
    """True times of Primus-Turbo's candidates of dgrad, the first the default, and the one that is 8 % faster."""
    order = random.Random(seed)
    names = [str(config) for config in seeds_space("dgrad")]
    times = {name: US * order.uniform(1.05, 1.55) for name in names}
    best = order.choice(names[1:])
    return {**times, names[0]: 1.08 * US, best: US}, best


def swept(times: dict[str, float], seed: int) -> tuple[str, float]:
    """The choice of a sweep, and its launches over those of a full sweep."""
    clock, default, turns = DriftingClock(times, seed), next(iter(times)), turns_for(US)
    entry = decide(measure({name: clock.call(name) for name in times}, clock, turns, default), default)
    return entry.config, clock.launches / (len(times) * turns.rounds * (turns.repeats + 1))


def naive(times: dict[str, float], seed: int) -> str:
    """The fastest of candidates that are timed one after another."""
    clock, turns = DriftingClock(times, seed), turns_for(US)
    repeats = turns.rounds * turns.repeats
    return min(times, key=lambda name: median(clock.samples(clock.call(name), repeats, 0.0)))


def test_the_best_of_144_is_found_in_a_quarter_of_a_full_sweep() -> None:
    fooled = 0
    for seed in range(20):
        times, best = space_of_144(seed)
        chosen, cost = swept(times, seed)
        assert chosen == best, seed
        assert cost <= 0.25
        fooled += naive(times, seed) != best
    assert fooled >= 5  # the clock drifts by more than the candidates differ


def test_a_sweep_whose_default_does_not_run_costs_no_more() -> None:
    for seed in range(10):
        times, best = space_of_144(seed)
        default = next(iter(times))
        clock, turns = DriftingClock(times, seed), turns_for(US)
        calls = {name: clock.call(name) for name in times if name != default}
        assert decide(measure(calls, clock, turns, default), default).config == best, seed
        assert clock.launches / (len(times) * turns.rounds * (turns.repeats + 1)) <= 0.25


def test_near_ties_never_flip_in_100_sweeps() -> None:
    times, best = space_of_144(0)
    names = list(times)
    ties = {names[20]: 1.001 * US, names[50]: 1.0 * US, names[90]: 1.002 * US}
    times = {**times, best: 1.2 * US, **ties}
    assert {swept(times, seed)[0] for seed in range(100)} == {names[20]}  # the first of them
    # A default among them stays.
    times[names[0]] = 1.002 * US
    assert {swept(times, seed)[0] for seed in range(100)} == {names[0]}
    assert len({naive(times, seed) for seed in range(10)}) > 1


def test_a_handicap_has_to_be_won() -> None:
    samples = {"hip_mfma a": [98.0] * 5, "triton b": [100.0] * 5}
    assert decide(samples, "triton b").config == "hip_mfma a"
    assert decide(samples, "triton b", {"hip_mfma a": 1.03}).config == "triton b"
    assert decide({**samples, "hip_mfma a": [96.0] * 5}, "triton b", {"hip_mfma a": 1.03}).config == "hip_mfma a"


# The bench.


@pytest.mark.parametrize("layout", [*LAYOUTS, "TN", "rowwise"])
def test_operands_of_a_bench_are_in_their_layout_and_checked(layout: str) -> None:
    gfx942 = target("gfx942")
    product = chain_device._scaled_product(TileProblem(layout, 256, 384, 512, gfx942), torch.device("cpu"), gfx942)
    assert amd.product_of(product.a.data, product.a.block, product.b.data, product.b.block) == layout
    check = chain_device.by_corners(SCALED_MM, product)
    check.clear()
    assert math.isnan(check.error())
    product.out.copy_(SCALED_MM.reference(product)[0])
    assert check.error() < 5e-3


@pytest.mark.parametrize("form", grouped_table.FORMS)
def test_quantized_tokens_of_a_bench_are_checked_by_their_bytes(form: str) -> None:
    problem = grouped_table.GroupedProblem(form, 300, 256, 5, target("sm89"))
    quantization = chain_device._grouped_tokens(problem, torch.device("cpu"), problem.target)
    check = chain_device.by_bytes(QUANTIZE_GROUPED, quantization)
    check.clear()
    assert check.error() == math.inf
    outs = [x for out in quantization.outs for x in (out.data, out.scale)]
    for x, y in zip(outs, QUANTIZE_GROUPED.reference(quantization), strict=True):
        x.copy_(y)
    assert check.error() == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "shape"), [("scaled_mm", (512, 768, 1024)), ("quantize_grouped", (1024, 256, 512))])
def test_triton_is_tuned_on_a_gpu_by_the_same_sweep(
    op: str, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    here, tuned = target_of(device), tune_op.OPS[op]
    chip = chip_of(device, here)
    assert chip is not None
    bench = tuned.bench(device, here, chip, clock_of(device))
    for key in tuned.keys(shape, tune_op.Wanted(here)):
        default = tuned.default(tuned.form.problem(key, chip))
        row = op_sweep.tune(tuned.form, key, bench, default)
        assert row.us <= row.times[default] + row.spread
    assert "is left out" not in caplog.text


# The command, its table, and the dispatch that reads it.


def fastest(name: str) -> Any:
    return lambda candidate: 100.0 if candidate == name else 150.0


def test_what_is_tuned_on_amd_is_what_the_dispatch_takes() -> None:
    m, n, k = SHAPE
    gfx950 = replace(target("gfx950"), multiprocessors=256)
    problem = TileProblem("dgrad", m, k, n, gfx950)
    product = replace(problem.product(), chip=MI355X)
    before = SCALED_MM.choose(product)
    assert before.config is None
    timed = triton_table.FORM.candidates(problem)["triton"]
    wanted = next(c for c in timed[1:] if c in set(seeds_space("dgrad")))
    bench = DriftingBench(MI355X, fastest(candidate_name("triton", wanted)))
    assert tune.main(["--shapes", ",".join(map(str, SHAPE)), "--products", "dgrad"], bench) == 0  # type: ignore[arg-type]
    assert bench.asked == [problem]
    assert bench.timed == [{candidate_name("triton", config) for config in timed}]
    choice = SCALED_MM.choose(product)
    path = measured.user_path(triton_table.FORM, MI355X)
    assert (choice.name, choice.config, choice.source) == ("triton", wanted, path.name)
    (launch,) = choice.plan(product)
    assert launch.options["num_warps"] == wanted.num_warps
    assert path.name in launch.reason  # type: ignore[attr-defined]
    for other in (
        replace(product, chip=Chip(MI355X.name, 128)), TileProblem("forward", m, k, n, gfx950).product(),
        TileProblem("dgrad", m + 1, k, n, gfx950).product(), TileProblem("dgrad", m, k, n + 8, gfx950).product(),
    ):  # fmt: skip
        assert SCALED_MM.choose(replace(other, chip=other.chip or MI355X)).config is None


class FailingBench(DriftingBench):
    """Problems of some sizes don't fit in memory; `dead`: the device works no more after the first of these."""

    def __init__(self, rows: int, dead: bool = False) -> None:
        super().__init__(MI355X, fastest(""))
        self.rows, self.dead, self.failed = rows, dead, False
        self.clock.warm = self.warm  # type: ignore[method-assign]

    def calls(self, problem: Any, candidates: Any) -> Any:
        if problem.m == self.rows:
            self.failed = True
            raise torch.OutOfMemoryError("no memory for it")
        return super().calls(problem, candidates)

    def warm(self, seconds: float) -> None:
        if self.dead and self.failed:
            raise RuntimeError("HIP error: an illegal memory access was encountered")


@pytest.mark.parametrize("dead", [False, True])
def test_a_problem_that_fails_is_reported(dead: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are tuned all the same, unless the device works no more."""
    shapes = ["--shapes", "256,512,512", "1024,512,512", "512,512,512"]
    bench = FailingBench(1024, dead)
    assert tune.main([*shapes, "--products", "forward"], bench) == 1  # type: ignore[arg-type]
    rows = measured.users(triton_table.FORM, MI355X).rows
    assert [key[1] for key in rows] == ([256] if dead else [256, 512])
    said = capsys.readouterr()
    assert f"{1 if dead else 2} of 3 products are tuned" in said.out
    why = "product=forward M=1024 N=512 K=512 batch=1 is not tuned: OutOfMemoryError: no memory for it"
    assert f"python -m fp8fn tune: {why}" in said.err
    assert ("the device has failed (RuntimeError: HIP error: an illegal memory access" in said.err) == dead
    # The same command goes on after what is tuned.
    again = FailingBench(0)
    assert tune.main([*shapes, "--products", "forward"], again) == 0  # type: ignore[arg-type]
    assert [problem.m for problem in again.asked] == ([512, 1024] if dead else [1024])
    assert sorted(key[1] for key in measured.users(triton_table.FORM, MI355X).rows) == [256, 512, 1024]


ENDING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support.tuning import DriftingBench
from fp8fn.cli import tune
from fp8fn.ops.targets import Chip

class Ending(DriftingBench):
    def calls(self, problem, candidates):
        if problem.m == 256:
            os.abort()  # as ROCm's runtime does after a memory fault
        return super().calls(problem, candidates)

bench = Ending(Chip("AMD Instinct MI355X", 256), lambda name: 100.0)
tune.main(["--shapes", "256,512,512", "512,512,512", "--products", "forward"], bench)
"""


def test_a_product_at_which_the_process_ended_comes_last(cache: Path) -> None:
    """Without that each run would end at the same product, and tune none after it."""
    command = [sys.executable, "-c", ENDING, str(Path(__file__).parents[1])]
    for tuned in ([], [512]):
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGABRT
        assert [key[1] for key in measured.users(triton_table.FORM, MI355X).rows] == tuned
    bench = DriftingBench(MI355X, fastest(""))
    argv = ["--shapes", "256,512,512", "512,512,512", "1024,512,512", "--products", "forward"]
    assert tune.main(argv, bench) == 0  # type: ignore[arg-type]
    assert [problem.m for problem in bench.asked] == [1024, 256]
    assert not list((cache / "tuning").glob("*.at"))
    # An interrupted product keeps its place.
    for _ in range(2):
        bench = DriftingBench(MI355X, fastest(""), fail_at=0)
        with pytest.raises(KeyboardInterrupt):
            tune.main([*argv, "--force"], bench)  # type: ignore[arg-type]
    assert not list((cache / "tuning").glob("*.at"))


def test_what_can_not_be_kept_ends_the_sweep(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    bench = DriftingBench(MI355X, fastest(""))
    assert tune.main(["--shapes", "512,512,512"], bench) == 1  # type: ignore[arg-type]
    assert len(bench.asked) == 1
    path = measured.user_path(triton_table.FORM, MI355X)
    why = f"{path} can't be written (No space left on device): set FP8FN_CACHE_DIR to a folder that you can write"
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", Target("cuda", 80, 32, 108), "compute capability 8.0; fp8fn's kernels need 8.9"),
        ("AMD Instinct MI250X", Target("hip", "gfx90a", 64, 110), "gfx90a; fp8fn's kernels need gfx942"),
        ("AMD Radeon RX 7900 XTX", Target("hip", "gfx1100", 32, 96), "gfx1100; fp8fn's kernels need gfx942"),
    ],
)
@pytest.mark.parametrize("op", [None, "quantize_grouped", "mx_mm"])
def test_a_gpu_without_fp8_is_refused_before_anything_is_timed(
    name: str, found: Target, reason: str, op: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    chip = Chip(name, found.multiprocessors)
    monkeypatch.setitem(targets._targets, chip, found)
    bench = DriftingBench(chip, fastest(""))
    with pytest.raises(SystemExit) as leave:
        tune.main(["--shapes", "512,512,512", *(["--op", op] if op else [])], bench)  # type: ignore[arg-type]
    assert (leave.value.code, bench.asked) == (2, [])
    assert f"{name} can't be tuned: the device " in (said := capsys.readouterr().err)
    assert reason in said


@pytest.mark.parametrize(
    ("op", "compiled"),
    [(None, True), ("scaled_mm", False), ("quantize_grouped", False), ("mm_a16w8", True), ("scaled_grouped_mm", True)],
)
def test_on_hopper_without_nvrtc_the_kernels_in_triton_are_tuned(
    op: str | None, compiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their tables serve there alone."""
    chip, benches = Chip("NVIDIA H200", 132), []

    def bench(*parts: Any) -> DriftingBench:
        benches.append(DriftingBench(chip, fastest("")))
        return benches[-1]

    device = torch.device("cuda", 0)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC here")
    monkeypatch.setattr(tune, "_present", lambda parser, device: torch.device("cuda", 0))
    monkeypatch.setattr(targets, "target_of", lambda device: target("sm90"))
    monkeypatch.setattr(tune, "chip_of", lambda device, target: chip)
    monkeypatch.setattr(tune, "gpu", lambda text: device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(tune, "clock_of", lambda device: DriftingClock({}, 0))
    if op is not None:
        monkeypatch.setattr(tune_op, "OPS", {op: replace(tune_op.OPS[op], bench=bench)})
    argv = ["--shapes", "512,512,512", *(["--op", op] if op else [])]
    if not compiled:
        assert tune.main(argv) == 0
        assert {name.partition(" ")[0] for names in benches[0].timed for name in names} <= {
            "triton", "triton_tma", "triton_blocks", "triton_dual",
        }  # fmt: skip
        return
    with pytest.raises(SystemExit) as leave:
        tune.main(argv)
    assert (leave.value.code, benches) == (2, [])
    message = "the kernels in CUDA C++ can't be tuned: no NVRTC here; --op scaled_mm and --op quantize_grouped time"
    assert message in capsys.readouterr().err


def test_products_that_no_call_looks_up_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A table's product has lines of whole 16 elements: another row would never be read."""
    bench = DriftingBench(MI355X, fastest(""))
    assert tune.main(["--shapes", "1000,512,256"], bench) == 0  # type: ignore[arg-type]
    assert [(problem.layout, problem.m, problem.n, problem.k) for problem in bench.asked] == [
        ("forward", 1000, 512, 256), ("dgrad", 1000, 256, 512),
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "2 of 2 products are tuned" in said.out
    assert "left out: product=wgrad M=512 N=256 K=1000 batch=1 has 1000 as K: products are found by mul" in said.err
    for key in measured.users(triton_table.FORM, MI355X).rows:
        product = triton_table.FORM.problem(key, MI355X).product()
        assert triton_table.key_of(product) == key
    for layout in triton_table.LAYOUTS:
        for sizes in ((17, 16, 16), (16, 17, 16), (16, 16, 17)):
            key = triton_table.key_of(TileProblem(layout, *sizes, target("gfx950")).product())
            if key is not None:
                triton_table.FORM.problem(key, MI355X)
                continue
            with pytest.raises(ValueError, match=r"has 17 as [MNK]: products are found by multiples of 16 alone"):
                triton_table.FORM.problem((layout, *sizes, 1), MI355X)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--shapes", "100,200,300"), "product=forward M=100 N=200 K=300 batch=1 has 200 as N: products are found by"),
        (("--op", "mx_mm", "--recipe", "rowwise"), "--recipe rowwise has no effect on --op mx_mm: leave it out"),
        (("--op", "mm_a16w8", "--products", "wgrad"), "--products wgrad has no effect on --op mm_a16w8: leave it out"),
        (("--recipe", "mxfp8"), "--recipe mxfp8: Triton's products are tuned for blockwise and rowwise"),
        (
            ("--arch", "h200", "--op", "scaled_grouped_mm", "--recipe", "rowwise", "--products", "wgrad"),
            "--op scaled_grouped_mm has no wgrad with --recipe rowwise: name another of forward,dgrad,wgrad",
        ),
    ],
)
def test_wrong_use_of_an_op_exits_2(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        tune.main(["--dry-run", "--arch", "gfx950", *argv])
    assert leave.value.code == 2
    assert message in capsys.readouterr().err


def test_tables_of_ops_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "exported.json"
    argv = ["--op", "mm_a16w8", "--shapes", "16,512,512", "--export", str(path)]
    assert tune.main(argv, DriftingBench(MI355X, fastest(""))) == 0  # type: ignore[arg-type]
    assert measured.read(weight_table.FORM, path).rows == measured.users(weight_table.FORM, MI355X).rows
    with pytest.raises(SystemExit):
        tune.main(["--compare", str(path), str(path)])
    message = f"--compare: {path}: it is a table of `tune --op mm_a16w8`, and no table of products in CUDA C++"
    assert message in capsys.readouterr().err


def test_an_op_is_not_tuned_without_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        tune.main(["--shapes", "512,512,512"], DriftingBench(MI355X, fastest("")))  # type: ignore[arg-type]
    assert "needs tqdm: pip install tqdm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "count"), [("l4", 58), ("h20", 78), ("mi300a", 228), ("rtx 5090", 170), ("b200", 148)]
)
def test_a_dry_run_for_a_product_is_for_its_own_processors(
    name: str, count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(tune_op, "dry_run", lambda op, keys, chip: seen.append(chip) or "")
    assert tune.main(["--op", "mm_a16w8", "--arch", name, "--dry-run"]) == 0
    assert seen == [NAMED.get(name, Chip(name, count))]
    assert seen[0].multiprocessors == count


@pytest.mark.parametrize(("arch", "most"), [(101, 227), (103, 227), (110, 227), (121, 99), (130, 99)])
def test_nvidia_processors_without_a_name_have_candidates(arch: int, most: int) -> None:
    """Shared memory is by the major compute capability, and of an unknown one the least."""
    found = space(TileProblem("forward", *SHAPE, Target("cuda", arch, 32, 48)))
    reasons = {candidate.pruned for candidate in found if candidate.pruned and "shared memory" in candidate.pruned}
    assert all(reason.endswith(f"a block has {most << 10}") for reason in reasons)
    assert any(candidate.pruned is None for candidate in found)
    assert bool(reasons) == (most == 99)


@pytest.mark.parametrize("chip", [MI355X, Chip("AMD Instinct MI300X", 304)], ids=lambda chip: chip.name)
def test_a_table_is_read_without_the_model(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the row of a configuration that the model would not have timed; one that can't run is none."""
    problem = TileProblem("dgrad", *SHAPE, target_of_chip(chip))
    pruned = [c for c in space(problem) if c.pruned is not None]
    slow = next(c.config for c in pruned if (c.pruned or "").startswith("modelled"))
    broken = next(c.config for c in pruned if not (c.pruned or "").startswith("modelled"))
    path = measured.user_path(triton_table.FORM, chip)
    for config, rows in ((slow, 1), (broken, 0), (space(problem)[0].config, 1)):
        key, name = ("dgrad", *SHAPE, 1), candidate_name("triton", config)
        row = measured.Row("triton", config, {name: 100.0}, 1.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        measured.write(path, measured.Table(triton_table.FORM, chip, {key: row}))
        with monkeypatch.context() as patch:
            for module in (amd, tile_space):
                patch.delattr(module, "product_time")
            assert len(measured.users(triton_table.FORM, chip).rows) == rows


def test_a_turned_store_is_not_taken_for_a_bias() -> None:
    m, n, k = SHAPE
    gfx950 = replace(target("gfx950"), multiprocessors=256)
    problem = TileProblem("wgrad", n, k, m, gfx950)
    turned = next(c for c in triton_table.FORM.candidates(problem)["triton"] if c.WGRAD_TRANS_STORE)
    bench = DriftingBench(MI355X, fastest(candidate_name("triton", turned)))
    tune.main(["--shapes", ",".join(map(str, SHAPE)), "--products", "wgrad"], bench)  # type: ignore[arg-type]
    product = replace(problem.product(), chip=MI355X)
    assert SCALED_MM.choose(product).config == turned
    assert SCALED_MM.choose(replace(product, bias=torch.empty(k, device="meta"))).config is None


def test_an_interrupted_sweep_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--shapes", "512,512,512", "1024,512,512"]
    with pytest.raises(KeyboardInterrupt):
        tune.main(argv, DriftingBench(MI355X, fastest(""), fail_at=2))  # type: ignore[arg-type]
    first = measured.users(triton_table.FORM, MI355X).rows
    assert len(first) == 2
    bench = DriftingBench(MI355X, fastest(""))
    assert tune.main(argv, bench) == 0  # type: ignore[arg-type]
    rows = measured.users(triton_table.FORM, MI355X).rows
    assert len(bench.asked) == len(rows) - 2 == 4
    assert {key: rows[key] for key in first} == first
    assert "6 of 6 products are tuned" in capsys.readouterr().out
    # Where all tie the default stays.
    for key, row in rows.items():
        default = triton_table.default(triton_table.FORM.problem(key, MI355X))
        assert candidate_name(row.kernel, row.config) == default


def test_quantizers_of_groups_are_tuned_by_the_number_of_groups() -> None:
    bench = DriftingBench(MI355X, lambda name: 100.0 if "columns=256" in name or "columns=32," in name else 150.0)
    assert tune.main(["--op", "quantize_grouped", "--shapes", "1000,512,512"], bench) == 0  # type: ignore[arg-type]
    assert [(problem.form, problem.groups) for problem in bench.asked[:4]] == [
        ("columns", 1), ("columns", 16), ("columns", 64), ("groups", 1),
    ]  # fmt: skip
    quantization = grouped_table.GroupedProblem("dual", 1000, 512, 16, target("gfx950")).quantization()
    key = grouped_table.key_of(quantization)
    assert key == ("dual", 1024, 512, 16)
    row = measured.users(grouped_table.FORM, MI355X).rows[key]
    assert (row.kernel, row.config.columns) == ("triton_dual", 256)
    kernel = next(kernel for kernel in QUANTIZE_GROUPED.kernels if kernel.name == row.kernel)
    (launch,) = kernel.plan(quantization, row.config)
    assert launch.constexprs["BN"] == 256  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", ["mx_mm", "moe_gemm"])
def test_mx_is_tuned_in_the_processors_own_types(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an MI300X, whose e4m3 is fnuz: what is timed is right, and what is tuned is what a call takes."""
    chip = Chip("AMD Instinct MI300X", 304)
    gfx942, form = target_of_chip(chip), tune_op.OPS[op].form
    (key,) = tune_op.keys_of(op, [(4, 64, 128)], tune_op.Wanted(gfx942))
    problem = form.problem(key, chip)
    if op == "moe_gemm":
        problem = replace(problem, experts=4)
    make = chain_device._mx_product if op == "mx_mm" else chain_device._routed_product
    product = make(problem, torch.device("cpu"), gfx942)
    dispatch = mx_mm.MX_MM if op == "mx_mm" else moe_gemm.MOE_GEMM
    assert product.a.data.dtype == torch.float8_e4m3fnuz
    check = chain_device.by_reference(dispatch, product)
    check.clear()
    assert check.error() == 1.0
    product.out.copy_(dispatch.reference(product)[0])
    assert check.error() == 0.0
    timed = form.candidates(form.problem(key, chip))
    kernel, config = [(kernel, config) for kernel, configs in timed.items() for config in configs][-1]
    bench = DriftingBench(chip, fastest(candidate_name(kernel, config)))
    assert tune.main(["--op", op, "--shapes", "4,64,128"], bench) == 0  # type: ignore[arg-type]
    asked = replace(dispatch.problem(product), chip=chip)
    if op == "moe_gemm":
        asked = replace(asked, experts=key[3])
    choice = choose(asked, dispatch.kernels, dispatch.named(asked))
    assert (choice.name, choice.config) == (kernel, config)


def test_products_in_mx_are_tuned_with_the_kernels_in_hip() -> None:
    key = (16, 2304, 6144, False)
    problem = MX_FORM.problem(key, MI355X)
    found = MX_FORM.candidates(problem)
    assert {config.n_sub for config in found["hip_mfma"]} == {1, 2, 4}
    assert {config.k_splits for config in found["hip_mfma"]} == {1, 2, 4, 8}
    assert {"hip_gemv", "hip_mfma", "triton_few", "triton_scaled"} <= found.keys()
    wanted = found["hip_mfma"][-1]
    bench = DriftingBench(MI355X, fastest(candidate_name("hip_mfma", wanted)))
    assert tune.main(["--op", "mx_mm", "--shapes", "16,2304,6144"], bench) == 0  # type: ignore[arg-type]
    choice = choose_mx(replace(problem, chip=MI355X, constant=True))  # which has no effect but on Hopper
    assert (choice.name, choice.config) == ("hip_mfma", wanted)


MXFP8 = {"recipe": "mxfp8", "where": "*", "show": False}


def explained(monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that `explain` names for 16 rows in MXFP8 on an MI355X, which the CPU stands for."""
    monkeypatch.setattr(targets, "target_of", lambda device: replace(target("gfx950"), multiprocessors=256))
    for module in (targets, mx_mm):
        monkeypatch.setattr(module, "chip_of", lambda device, target: MI355X)
    layer = torch.nn.Linear(6144, 2304, bias=False, dtype=torch.bfloat16)
    (row,) = explain(layer, torch.randn(16, 6144, dtype=torch.bfloat16), **MXFP8).rows  # type: ignore[arg-type]
    return row.kernel


def test_explain_reads_the_table_of_mx(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a call on the device does, though the operands that `explain` plans with are on no device."""
    monkeypatch.setattr(HipLaunch, "fault", lambda launch: None)
    assert "(hip_mfma by aiter's table)" in explained(monkeypatch)
    wanted = MX_FORM.candidates(MX_FORM.problem((16, 2304, 6144, False), MI355X))["triton_scaled"][0]
    bench = DriftingBench(MI355X, fastest(candidate_name("triton_scaled", wanted)))
    assert tune.main(["--op", "mx_mm", "--shapes", "16,2304,6144"], bench) == 0  # type: ignore[arg-type]
    path = measured.user_path(MX_FORM, MI355X)
    assert f"(triton_scaled by {path.name})" in explained(monkeypatch)


def test_explain_names_no_kernel_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HipLaunch, "fault", lambda launch: f"{launch.name} can't be loaded")
    try:
        found = explained(monkeypatch)
    finally:
        faults = dict(mx_mm.MX_MM.faults)
        mx_mm.MX_MM.faults.clear()
    assert faults == {"hip_mfma": "mxfp8_mfma can't be loaded"}
    assert found.startswith("mx_mm[")
    assert "(triton_few by default" in found
    assert "aiter's table names it, but mxfp8_mfma can't be loaded" in found
    # What another machine can load is not known.
    layer, x = torch.nn.Linear(6144, 2304, bias=False, dtype=torch.bfloat16), torch.randn(16, 6144).bfloat16()
    (row,) = explain(layer, x, target="gfx950", **MXFP8).rows  # type: ignore[arg-type]
    assert "hip_mfma" in row.kernel.partition(" by ")[0]
