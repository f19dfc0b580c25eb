"""A chip, a tuned problem, a bench without a GPU, and quantized operands of a problem."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops import reference
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.targets import Chip
from fp8fn.ops.tuning import table
from fp8fn.ops.tuning.model import config_name, microseconds, ranked
from fp8fn.ops.tuning.problem import Problem
from fp8fn.ops.tuning.sweep import Call
from fp8fn.ops.tuning.table import PEER, Entry, Measured, measured
from support.products import empty_operands

CHIP = Chip("NVIDIA Test", 132)

H200 = Chip("NVIDIA H200", 132)
H100 = Chip("NVIDIA H100 80GB HBM3", 132)


def operands(problem: Problem, device: str = "meta") -> Any:
    return empty_operands(problem, device)


PROBLEM = Problem(8192, 6144, 4096)

ENTRY = Entry("128x256d1", {"128x256d1": 300.0, "192x128d1": 310.0}, 2.0, 305.0)


def save(entries: dict[Problem, Entry], chip: Chip = CHIP) -> Path:
    table.add(chip, entries, {"date": "2026-01-01"})
    table.forget()
    return table.user_path(chip)


GOOD = json.dumps({"format": 1, "chip": CHIP.name, "multiprocessors": 132, "columns": list(table.COLUMNS), "rows": []})


def row(b_scale: str, config: str, times: Any) -> str:
    """A table with this row."""
    cells = [1, 1, 1, 1, "VECTOR", b_scale, "e4m3fn", "e4m3fn", "bfloat16", config, times, 1, None]
    return GOOD.replace("[]", json.dumps([cells]))


def quantized(problem: Problem) -> Any:
    (a_block, b_block), made = problem.blocks, operands(problem, "cpu")
    a, b = torch.randn(problem.m, problem.k), torch.randn(problem.n, problem.k).mT
    data, scale = reference.quantize(a, a_block, torch.float8_e4m3fn, "fp32")
    right, right_scale = reference.quantize(b, b_block, torch.float8_e4m3fn, "fp32")
    made.a.copy_(data)
    made.a_scale.copy_(scale)
    made.b.copy_(right)
    made.b_scale.copy_(right_scale)
    return made


def expected(made: Any) -> Tensor:
    left = reference.dequantize(made.a, made.a_scale, made.a_block).double()
    return left @ reference.dequantize(made.b, made.b_scale, made.b_block).double()


def choose_config(problem: Problem, cores: int, known: tuple[table.Table, ...] = ()) -> Measured:
    return measured(problem, known) or Measured(ranked(problem, cores)[0], "the model")


class FakeBench:
    """Times that a function of the problem and the name gives, with a little noise; counts what it was asked."""

    def __init__(self, chip: Chip = CHIP, fail_at: int | None = None) -> None:
        self.chip = chip
        self.clock = self
        self.asked: list[Problem] = []
        self.runs: list[str] = []
        self.warmed: list[int] = []
        self._fail_at = fail_at
        self._random = random.Random(0)

    def calls(self, problem: Problem, configs: Sequence[ScaledMmConfig]) -> dict[str, Call]:
        if self._fail_at is not None and len(self.asked) == self._fail_at:
            raise KeyboardInterrupt
        self.asked.append(problem)
        calls: dict[str, Call] = {}
        for config in configs:
            calls[config_name(config)] = self._call(config_name(config), microseconds(problem, config, 132))
        calls[PEER] = self._call(PEER, 1.05 * min(call() for call in calls.values()))
        return calls

    def _call(self, name: str, time: float) -> Call:
        def call() -> float:
            self.runs.append(name)
            return self.rate(name) * time

        return call

    def rate(self, name: str) -> float:
        """128x256 is 20 % faster than the model has it."""
        return 0.8 if name == "128x256d1" else 1.0

    def warm(self, seconds: float) -> None:
        assert seconds > 0
        self.warmed.append(len(self.runs))

    def samples(self, call: Call, repeats: int, lead_us: float) -> list[float]:
        return [call() * self._random.uniform(0.999, 1.001) for _ in range(repeats)]


class DriftingClock:
    """Times of a chip whose clock drifts by 10 % either way, as the seeds report of MI355X, with noise in each run.

    `times` are the true µs by name; `launches` counts the runs, those that are not counted as samples too.
    """

    DRIFT = 0.10
    PERIOD_US = 3e6
    FLUSH_US = 80.0

    def __init__(self, times: Mapping[str, float], seed: int, noise: float = 0.02) -> None:
        self.times, self.noise, self.launches = times, noise, 0
        self._random = random.Random(seed)
        self._now = self._random.uniform(0.0, self.PERIOD_US)

    def warm(self, seconds: float) -> None:
        """Warm or not, it drifts."""

    def call(self, name: str) -> Call:
        return lambda: self.times[name]

    def samples(self, call: Call, repeats: int, lead_us: float) -> list[float]:
        """As a GPU's, after one that is not counted."""
        return [self._run(call()) for _ in range(repeats + 1)][1:]

    def _run(self, us: float) -> float:
        self.launches += 1
        rate = 1.0 + self.DRIFT * math.sin(2.0 * math.pi * self._now / self.PERIOD_US)
        self._now += us * rate + self.FLUSH_US
        return us * rate * math.exp(self._random.gauss(0.0, self.noise))


class DriftingBench:
    """An `OpBench` on a drifting clock, whose candidates take what `time` says; may be interrupted at a problem."""

    def __init__(self, chip: Chip, time: Callable[[str], float], seed: int = 0, fail_at: int | None = None) -> None:
        self.chip, self.clock = chip, DriftingClock({}, seed)
        self.asked: list[Any] = []
        self.timed: list[set[str]] = []
        self._time, self._fail_at = time, fail_at

    def calls(self, problem: Any, candidates: Mapping[str, Any]) -> tuple[dict[str, Call], int]:
        if len(self.asked) == self._fail_at:
            raise KeyboardInterrupt
        self.asked.append(problem)
        self.timed.append(set(candidates))
        self.clock.times = {name: self._time(name) for name in candidates}
        return {name: self.clock.call(name) for name in candidates}, 1
