"""Published protocols on this machine, beside their published figures: `python -m fp8fn bench seeds`.

fp8fn started from the protocols of five pull requests, the seeds.

Seeds:
- 000: Primus-Turbo's 84 layers, forward and backward, beside bf16.
- 001: torchao's blockwise layers of experts.
- 002: aiter's batched products by FP8 weights.
- 003: torchao's quantizers for mixtures of experts.
- 004: aiter's MX-FP8 products for decoding, at tensor parallelism 1 to 8, and of experts.

Figures are printed as they come. With --json, they are written after each shape, and the same command resumes an
interrupted run: shapes that the file has for this machine and commit are not measured again, and a shape at which the
process itself ended is measured last. The report has the
published figures beside those measured here, with their GPU and source. On a CPU the shapes are scaled down, and
nothing is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fp8fn.bench.command import measured
from fp8fn.bench.measure import Row
from fp8fn.bench.seeds.figures import paragraphs
from fp8fn.bench.seeds.protocols import SEEDS, Part, Shape, scaled_down
from fp8fn.bench.seeds.report import report
from fp8fn.bench.train.runs import Runs, check_file, key_of, merge, read_runs, revision
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.timing import Clock, clock_of, reason

_PEERS: Final = ("fp8fn", "torch", "triton")
# The bar on a CPU. Results have so few elements there that one saturated block of MX takes up to 5 dB.
_SMALL_BAR_DB: Final = 20.0


class Unit(NamedTuple):
    """A shape of a part, which is measured at once."""

    seed: str
    name: str
    part: Part
    shape: Shape

    @property
    def label(self) -> str:
        return f"{self.seed} {self.name} {','.join(map(str, self.shape))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each shape that the file does not have, then print and write the report; 1 where fp8fn failed."""
    began = time.perf_counter()
    args = _parsed(argv)
    if args.add:
        return _added(args)
    device: torch.device = args.device
    if device.index is not None:
        torch.cuda.set_device(device)
    small = device.type == "cpu"
    key = key_of(device_name(device), args.commit or revision(), {"scaled_down": small})
    runs = Runs(args.json, key, "seeds")
    known = {row["variant"] for row in runs.rows if not row.get("ended")}
    ended = {row["variant"] for row in runs.rows} - known
    wanted = list(units(args.seed))
    waiting = [unit for unit in wanted if args.again or unit.label not in known]
    waiting.sort(key=lambda unit: unit.label in ended)  # last, so that a process which ends again has the others
    print(f"{runs.run['device']}; {runs.run['commit']}: {len(waiting)} of {len(wanted)} shapes to measure", flush=True)

    clock = clock_of(device)
    if waiting:
        clock.warm(1.0)
    for done, unit in enumerate(waiting):
        seconds = time.perf_counter() - began
        if args.minutes and seconds > 60 * args.minutes:
            print(f"{len(waiting) - done} shapes not begun, as the time of --minutes is over", flush=True)
            break
        former = next((row for row in runs.rows if row["variant"] == unit.label), None)
        runs.put(_entry(unit, [dataclasses.replace(_UNFINISHED, shape=unit.shape)], ended=True))
        try:
            rows = _measured(unit, clock, small)
        except KeyboardInterrupt:
            runs.restore(unit.label, former)
            raise
        runs.put(_entry(unit, rows))
        print(f"[{seconds:4.0f} s] {unit.label}: {_shown(rows)}", flush=True)
        try:
            clock.synchronize()
        except RuntimeError as error:  # after which every other call of this process would fail too
            print(f"the device has failed ({reason(error)}); run the same command again to go on", flush=True)
            break
    text = report(runs.run)
    print(f"\n{text}", flush=True)
    if args.report:
        args.report.write_text(f"{text}\n", encoding="utf-8")
    asked = {unit.label for unit in wanted}
    return int(any(_failed(entry) for entry in runs.rows if entry["variant"] in asked))


# The file has this of a shape while it is measured, and keeps it where the process ends, as by a memory fault.
_UNFINISHED: Final = Row(
    (), "fp8fn", "all", "TFLOP/s", 0.0, 0.0, unavailable="the process ended while the shape was measured"
)


def _entry(unit: Unit, rows: Sequence[Row], **more: bool) -> dict[str, Any]:
    """A shape's figures as they stand in the file."""
    found = {"variant": unit.label, "seed": unit.seed, "part": unit.name, "shape": list(unit.shape)}
    return {**found, "rows": [dataclasses.asdict(row) for row in rows], **more}


def _added(args: argparse.Namespace) -> int:
    """Add other files' runs to that of --json, and print the reports; nothing is measured."""
    text = paragraphs(*(report(run) for run in merge(args.json, args.add, "seeds")))
    print(text, flush=True)
    if args.report:
        args.report.write_text(f"{text}\n", encoding="utf-8")
    return 0


def units(seeds: Sequence[str] | None) -> Iterator[Unit]:
    """Every shape of the seeds, in the order in which they are measured."""
    for seed, protocol in SEEDS.items():
        if not seeds or seed in seeds:
            for name, part in protocol.parts.items():
                yield from (Unit(seed, name, part, shape) for shape in part.shapes)


def _measured(unit: Unit, clock: Clock, small: bool) -> list[Row]:
    """The rows of a shape; one row with the reason where the shape's tensors don't fit in memory."""
    part = unit.part
    shape = scaled_down(unit.shape) if small else unit.shape
    try:
        cases = [case for case in part.cases(shape, clock.device) if case.peer in _PEERS]
    except RuntimeError as error:
        return [Row(shape, "fp8fn", "all", "TFLOP/s", 0.0, 0.0, unavailable=reason(error))]
    if small:
        cases = [dataclasses.replace(case, snr_bar_db=_SMALL_BAR_DB) for case in cases]
    return measured(shape, cases, part.schedule, clock, part.graphs)


def _shown(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        us = row.graph_us or row.us
        cells.append(f"{row.label} {f'{us:.1f} µs' if us else 'n/a'}{' WRONG' if row.wrong else ''}")
    return "; ".join(cells)


def _failed(entry: Mapping[str, Any]) -> bool:
    rows = [Row.of_json(row) for row in entry["rows"]]
    return any(row.wrong or (row.peer == "fp8fn" and row.us is None) for row in rows)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser_of(
        "bench seeds",
        __doc__,
        "--seed 000 --minutes 10 --json seeds.json --report seeds.md",
        "--add other.json --json seeds.json",
        epilog="Exit status 1 where a case of fp8fn did not run, or a result is under 25 dB (on a CPU 20).",
    )
    parser.add_argument(
        "--seed", choices=sorted(SEEDS), action="append", help="a seed to measure; repeatable (default: all)"
    )
    parser.add_argument(
        "--minutes", type=options.positive, metavar="M", help="begin nothing new after M minutes (default: no limit)"
    )
    parser.add_argument(
        "--commit", metavar="NAME", help="the code's name in the file (default: git's, or a digest of the sources)"
    )
    parser.add_argument("--again", action="store_true", help="measure shapes again that the file already has")
    options.add_device(parser)
    options.add_json(parser, "add the figures to FILE, and go on from those in it")
    parser.add_argument(
        "--report", type=options.output_file, metavar="FILE", help="write the report to FILE, in Markdown"
    )
    parser.add_argument(
        "--add", type=Path, metavar="FILE", action="append",
        help="add the runs of FILE, which another machine wrote, to --json, and measure nothing; repeatable",
    )  # fmt: skip
    args = parser.parse_args(argv)
    check_file(parser, args.json, "seeds")
    if args.add:
        _check_added(parser, args)
    else:
        options.check_machine(parser, args.device, ("tabulate",))
    return args


def _check_added(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.json is None:
        parser.error("--add needs --json, the file that the runs are added to")
    for file in args.add:
        try:
            read_runs(file, "seeds")
        except ValueError as error:
            parser.error(f"--add: {error}; use a file that bench seeds wrote")
