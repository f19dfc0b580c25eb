"""Options, run, JSON, table and plot that the benchmarks of suites share (`dense`, `wgrad`, `linear`, `quant`, …)."""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8fn.bench import plot, record, tables
from fp8fn.bench.measure import Case, Row, copy_rate, measure
from fp8fn.bench.peers import PEERS
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.timing import DEFAULT, Clock, Schedule, clock_of

_EXIT = "Exit status 1 where a case of fp8fn did not run, or a result is under 25 dB."


@dataclass(frozen=True)
class Suite:
    """Shapes, the cases that are measured on each shape, the table of the results, and the schedule."""

    shapes: tuple[tuple[int, ...], ...]
    cases: Callable[[tuple[int, ...], torch.device], list[Case]]
    table: Callable[[dict[str, Any]], str]
    schedule: Schedule = DEFAULT
    graphs: bool = False
    axes: str = ""
    """The names of a shape's sizes, unless they are M,N,K or M,N."""
    fault: Callable[[tuple[int, ...]], str | None] = lambda _: None
    """Why the suite has no cases of a shape, or None."""


def main(benchmark: str, doc: str | None, suites: Mapping[str, Suite], argv: Sequence[str] | None) -> int:
    """Measure each shape and print its rows, then print the table; write the files that --json and --plot name."""
    parser = _parser(benchmark, doc, suites)
    args = parser.parse_args(argv)
    suite = suites[args.suite]
    axes = len(suite.shapes[0])
    if any(len(shape) != axes for shape in args.shape or []):
        parser.error(f"--shape: {args.suite} needs {axes} sizes, {_axes(suite)}")
    if fault := next(filter(None, map(suite.fault, args.shape or [])), None):
        parser.error(f"--shape: {fault}")
    if args.plot and (fault := plot.format_fault(args.plot)):
        parser.error(f"--plot {fault}")
    device: torch.device = args.device
    options.check_machine(parser, device, ("tabulate", "matplotlib") if args.plot else ("tabulate",))
    if device.index is not None:
        torch.cuda.set_device(device)
    schedule = dataclasses.replace(suite.schedule, rounds=args.rounds) if args.rounds else suite.schedule

    clock = clock_of(device)
    clock.warm(1.0)
    results: dict[str, Any] = {
        "suite": args.suite,
        "device": device_name(device),
        "schedule": dataclasses.asdict(schedule),
        "copy_tb_s": copy_rate(clock, 512 if device.type == "cuda" else 1),
        "rows": [],
    }
    rows: list[Row] = []
    for shape in args.shape or suite.shapes:
        cases = [case for case in suite.cases(shape, device) if case.peer in ("fp8fn", *args.peers)]
        found = measured(shape, cases, schedule, clock, suite.graphs)
        rows += found
        print(tables.terminal(found), end="\n\n", flush=True)
        results["rows"] = [dataclasses.asdict(row) for row in rows]
        if args.json:
            record.write(args.json, benchmark, results)  # after each shape: an interrupted run leaves its figures
    run = record.make(benchmark, results)
    print(suite.table(run))
    if args.plot:
        plot.write(run, args.plot)
    return int(any(row.wrong or (row.peer == "fp8fn" and row.us is None) for row in rows))


def measured(
    shape: tuple[int, ...], cases: list[Case], schedule: Schedule, clock: Clock, graphs: bool = False
) -> list[Row]:
    """The rows of a shape. The list of cases is emptied, and the shape's tensors are freed."""
    with cublaslt.left_out():  # fp8fn's own kernels: cuBLASLt is measured as a peer
        rows = measure(shape, cases, clock, schedule, graphs)
    cases.clear()
    gc.collect()
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def sizes(text: str) -> tuple[int, ...]:
    """`"8192,6144,4096"` → `(8192, 6144, 4096)`."""
    try:
        found = tuple(int(size) for size in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 8192,6144,4096")
    return found


def peer_names(text: str) -> tuple[str, ...]:
    """`"torch,torchao"` → `("torch", "torchao")`; `"none"` → `()`."""
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a peer; choose from {', '.join(PEERS)}, or none")
    return names


def _axes(suite: Suite) -> str:
    return suite.axes or ("M,N,K" if len(suite.shapes[0]) == 3 else "M,N")


def _parser(benchmark: str, doc: str | None, suites: Mapping[str, Suite]) -> argparse.ArgumentParser:
    default = next(iter(suites))
    axes = _axes(suites[default])
    shape = ",".join(map(str, suites[default].shapes[0]))
    parser = options.parser_of(
        f"bench {benchmark}", doc, "--json run.json --plot run.png", f"--shape {shape} --peers torch", epilog=_EXIT
    )
    parser.add_argument(
        "--suite", choices=suites, default=default, metavar="SUITE",
        help=f"what to measure: {', '.join(suites)} (default: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--shape", type=sizes, metavar=axes, action="append", help="a shape in place of the suite's; repeatable"
    )
    parser.add_argument(
        "--peers",
        type=peer_names,
        default=PEERS,
        metavar="NAMES",
        help=f"implementations to measure beside fp8fn (default: {','.join(PEERS)}), or none",
    )
    parser.add_argument(
        "--rounds", type=options.positive, metavar="R", help="turns of each call (default: the suite's)"
    )
    options.add_device(parser)
    options.add_json(parser)
    parser.add_argument(
        "--plot", type=options.output_file, metavar="FILE", help="draw the figures to FILE (needs matplotlib)"
    )
    return parser
