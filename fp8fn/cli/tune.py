"""`python -m fp8fn tune`: times configurations for the user's shapes on the user's GPU, into the user's cache.

Each product of each shape is timed in turn, on a chip warmed before it: the model's best configurations and cuBLASLt,
in random order, behind an emptied L2. What is found is kept in FP8FN_CACHE_DIR (by default ~/.cache/fp8fn) after every
product, so that a run that is interrupted goes on where it was; later calls of the library read it, and none of them
times anything itself. With `--op` the kernels and divisions of another op's products are timed; on other processors
than Hopper that is Triton's `scaled_mm` by default. `--dry-run` lists the candidates, and needs no GPU with `--arch`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Final, cast

import torch

from fp8fn.bench.shapes import ANCHORS, LLM84, SMALL
from fp8fn.cli import tune_loop, tune_op
from fp8fn.cli.environment import describe
from fp8fn.cli.options import ARCHS, arch, gpu, output_file, parser_of
from fp8fn.cli.tune_loop import NotKept, Outcome
from fp8fn.ops import targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.targets import Chip, Target, chip_of, named_target
from fp8fn.ops.tuning import compare, table
from fp8fn.ops.tuning.device import DeviceBench
from fp8fn.ops.tuning.model import config_name, microseconds, ranked
from fp8fn.ops.tuning.op_sweep import OpBench
from fp8fn.ops.tuning.problem import PRODUCTS, Problem, linear_problems
from fp8fn.ops.tuning.rates import NAMED
from fp8fn.ops.tuning.sweep import Bench, Clock, shortlist, tune
from fp8fn.ops.tuning.table import Entry
from fp8fn.timing import clock_of

SUITES: Final[Mapping[str, tuple[tuple[int, ...], ...]]] = {
    "llm84": tuple(dict.fromkeys((s.M, s.N, s.K) for s in LLM84)),
    "anchors": (*ANCHORS, *SMALL),
}


def main(argv: Sequence[str], bench: Bench | OpBench | None = None) -> int:
    """Tunes, exports or compares; `bench` is the current GPU unless given."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.compare:
        try:
            print(comparison(*map(_exported, args.compare)))
        except ValueError as error:
            parser.error(f"--compare: {error}")
        return 0
    if args.suite and args.op not in (None, "scaled_mm"):
        parser.error(f"--suite {args.suite} is of scaled_mm; --op {args.op} has its own shapes, or give --shapes")
    chip = bench.chip if bench else _chip(parser, args)
    target = targets.target_of_chip(chip)
    try:
        targets.check_supported(target)
    except ValueError as error:
        parser.error(f"{chip.name} can't be tuned: {error}")
    if not args.op and targets.hopper_fault(target):
        args.op = "scaled_mm"
    if args.op:
        return _tune_op(parser, args, chip, cast("OpBench | None", bench), _origin(argv))
    if not (args.shapes or args.suite or args.export):
        parser.error("give --shapes M,N,K ... or --suite, or --export to write what the cache has")
    try:
        problems = problems_of(args.shapes or SUITES.get(args.suite, ()), args.products, parse_recipe(args.recipe))
    except ValueError as error:
        parser.error(f"--recipe {args.recipe}: {error}")
    if args.dry_run:
        print("\n".join(f"{problem}: {listed(problem, chip)}" for problem in problems))
        return 0
    _check_tqdm(parser)
    bench = cast(Bench, bench) if bench else DeviceBench(*_gpu(parser, args.device, "cuda", warm=bool(problems)))
    try:
        outcome = sweep(problems, bench, force=args.force, budget=args.budget)
    except NotKept as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    found = table.users(bench.chip)
    if problems:
        print(report({p: found.entries[p] for p in problems if p in found.entries}, bench.chip.multiprocessors))
        print(
            f"\n{len(problems) - outcome.left} of {len(problems)} products are tuned, in {table.user_path(bench.chip)}"
        )
    if args.export:
        table.write(args.export, found)
        print(f"{len(found.entries)} products of the {bench.chip.name} written to {args.export}")
    return outcome.tell(parser.prog)


def listed(problem: Problem, chip: Chip) -> str:
    """Every configuration of the kernel in CUDA C++, and which of them the model leaves out."""
    best = ranked(problem, chip.multiprocessors)
    timed = shortlist(problem, chip.multiprocessors)
    least = microseconds(problem, best[0], chip.multiprocessors)
    every = (*best, *(config for config in timed if config not in best))
    lines = [f"{len(timed)} of {len(every)} candidates are timed, and cuBLASLt where it takes the operands"]
    for config in every:
        times = microseconds(problem, config, chip.multiprocessors) / least
        lines.append(f"  {config_name(config):24}  {'timed' if config in timed else f'modelled at {times:.2f}x'}")
    return "\n".join(lines)


def problems_of(shapes: Iterable[tuple[int, ...]], products: Sequence[str], recipe: Recipe) -> tuple[Problem, ...]:
    """The problems of some products of linear layers `(M, N, K)`, each once, the small ones first."""
    found = {linear_problems(m, n, k, recipe)[product] for m, n, k in shapes for product in products}
    if any(problem.fast for problem in found):
        raise ValueError(
            "no table has products with accumulate='fast', whose tile the model chooses; leave accumulate out, or give "
            "--products dgrad,wgrad"
        )
    return tuple(sorted(found, key=lambda p: (p.operations, str(p))))


def sweep(problems: Sequence[Problem], bench: Bench, *, force: bool = False, budget: float | None = None) -> Outcome:
    """Tunes the problems that the user's table has not yet, saving each."""
    known = {} if force else table.users(bench.chip).entries
    todo = [problem for problem in problems if problem not in known]
    origin = _origin()

    def keep(problem: Problem, entry: Entry) -> None:
        table.add(bench.chip, {problem: entry}, origin)

    measure = partial(tune, bench=bench)
    outcome = tune_loop.each(todo, str, measure, keep, bench.clock, table.user_path(bench.chip), budget)
    table.forget()
    return outcome


def _origin(argv: Sequence[str] | None = None) -> dict[str, str]:
    """Versions and date, and the command where its arguments are given."""
    wanted = ("fp8fn", "torch", "triton", "CUDA", "ROCm")
    versions = {key: value for key, value in describe().items() if key in wanted and value != "none"}
    if nvrtc.unavailable() is None:
        versions["NVRTC"] = ".".join(map(str, nvrtc.version()))
    command = {} if argv is None else {"command": " ".join(["python -m fp8fn tune", *argv])}
    return {**versions, "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), **command}


def report(entries: Mapping[Problem, Entry], cores: int) -> str:
    """A line for each problem: what was chosen, its speed, what the model would have had, and cuBLASLt's time."""
    lines = [("M,N,K and blocks", "chosen", "µs", "TFLOP/s", "spread", "the model's", "gain", "cuBLASLt")]
    for problem, entry in entries.items():
        models = config_name(ranked(problem, cores)[0])
        gain = f"{100 * (entry.times[models] / entry.us - 1):.1f} %" if models in entry.times else ""
        peer = "" if entry.peer_us is None else f"{entry.peer_us:.1f}{' faster' if entry.peer_wins else ''}"
        lines.append((
            str(problem), entry.config, f"{entry.us:.1f}", f"{problem.operations / entry.us / 1e6:.0f}",
            f"{100 * entry.spread / entry.us:.1f} %", models, gain, peer,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _exported(path: Path) -> table.Table:
    """The table of a file of `--export`; ValueError, naming the file, where it is none."""
    try:
        return table.read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def comparison(first: table.Table, second: table.Table) -> str:
    """The text that `--compare` prints."""
    both = compare.agreement(first, second)
    count = max(both.problems, 1)
    lines = [
        f"{both.problems} products in both of {first.name} and {second.name} ({first.chip.name})",
        f"the same choice: {both.same} ({100 * both.same / count:.0f} %); the same or within the spread: {both.within} "
        f"({100 * both.within / count:.0f} %)",
        f"time of the choices, second over first: {both.ratio:.3f} in the geometric mean",
        f"the first's choices by the second's times: {100 * both.carried:.1f} % of the best",
    ]
    for found in (first, second):
        for unseen, which in ((False, "all products"), (True, "shapes that the model was not fitted to")):
            regret = compare.regret(found, unseen=unseen)
            lines.append(
                f"the model by {found.name}, {which}: {100 * regret.mean:.1f} % of the best in the geometric mean of "
                f"{regret.problems}, at least {100 * regret.least:.1f} %"
                + (f" ({regret.worst})" if regret.worst is not None else "")
            )
        beside = compare.left_out(found)
        lines.append(
            f"the model corrected by {found.name} without a shape's own rows: {100 * beside.mean:.1f} % of the best in "
            f"the geometric mean of {beside.problems}, at least {100 * beside.least:.1f} %"
        )
    return "\n".join(lines)


def _tune_op(
    parser: argparse.ArgumentParser, args: argparse.Namespace, chip: Chip, bench: OpBench | None, origin: dict[str, str]
) -> int:
    """`--op`: the candidates' names, or their times."""
    shapes = args.shapes or SUITES.get(args.suite)
    wanted = tune_op.Wanted(targets.target_of_chip(chip), args.products, args.recipe)
    try:
        tune_op.check_options(args.op, wanted)
        keys, refused = tune_op.looked_up(args.op, tune_op.keys_of(args.op, shapes, wanted), chip)
        text = tune_op.dry_run(args.op, keys if args.dry_run else keys[:1], chip)
        backends = tune_op.backends(args.op, keys[0], chip)
    except ValueError as error:
        parser.error(str(error))
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        parser.error(f"--op {args.op} needs Triton, whose kernels are candidates: pip install triton (on Linux)")
    for reason in refused:
        print(f"{parser.prog}: left out: {reason}", file=sys.stderr)
    if args.dry_run:
        print(text)
        return 0
    _check_tqdm(parser)
    bench = bench or tune_op.OPS[args.op].bench(*_gpu(parser, args.device, *backends, warm=True))
    return tune_op.run(args, parser.prog, bench, origin, keys)


def _check_tqdm(parser: argparse.ArgumentParser) -> None:
    if importlib.util.find_spec("tqdm") is None:
        parser.error("needs tqdm: pip install tqdm")


def _chip(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Chip:
    """The chip of `--device`, or of `--arch` for a dry run."""
    named = named_target(args.arch) if args.arch else None
    if named is not None and args.dry_run:
        product, target = named
        return NAMED[product] if product in NAMED and product != target.name else Chip(args.arch, target.cores)
    device = _present(parser, args.device)
    chip, target = chip_of(device, targets.target_of(device)), targets.target_of(device)
    if args.arch and target.name != targets.target_of_chip(Chip(args.arch, 0)).name:
        parser.error(f"{device} is {target.name}; --arch {args.arch} lists candidates with --dry-run")
    assert chip is not None
    return chip


def _present(parser: argparse.ArgumentParser, device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        parser.error(
            "no GPU here; `--dry-run --arch gfx950` lists candidates without one, and `python -m fp8fn aot` compiles"
        )
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _gpu(
    parser: argparse.ArgumentParser, device: torch.device, *backends: str, warm: bool
) -> tuple[torch.device, Target, Chip, Clock]:
    """The device, where this machine can compile the kernels of `backends`."""
    device = _present(parser, device)
    target, chip = targets.target_of(device), chip_of(device, targets.target_of(device))
    assert chip is not None
    if "cuda" in backends and (problem := nvrtc.unavailable()) is not None:
        parser.error(
            f"the kernels in CUDA C++ can't be tuned: {problem}; --op scaled_mm and --op quantize_grouped time Triton's"
        )
    torch.cuda.set_device(device)
    clock = clock_of(device)
    if warm:
        clock.warm(1.0)
    return device, target, chip, clock


def sizes(text: str) -> tuple[int, int, int]:
    """`"8192,6144,4096"` → `(8192, 6144, 4096)`."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no M,N,K such as 8192,6144,4096")
    return int(parts[0]), int(parts[1]), int(parts[2])


def _products(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PRODUCTS:
            raise argparse.ArgumentTypeError(f"{name!r} is no product; choose from {', '.join(PRODUCTS)}")
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "tune",
        __doc__,
        "--shapes 8192,6144,4096 8192,4096,6144",
        "--suite llm84 --budget 600",
        "--op mm_a16w8",
        "--arch gfx950 --dry-run --shapes 8192,6144,4096",
    )
    parser.add_argument(
        "--op", choices=tune_op.OPS, metavar="OP",
        help=f"whose kernels are timed: {', '.join(tune_op.OPS)} (default: scaled_mm)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shapes", type=sizes, nargs="+", metavar="M,N,K", help="layers x (M, K) @ w (N, K)ᵀ of your model"
    )
    which.add_argument("--suite", choices=SUITES, help="the shapes of the benchmarks")
    parser.add_argument(
        "--products",
        type=_products,
        default=PRODUCTS,
        metavar="NAMES",
        help=f"of a layer; by default {','.join(PRODUCTS)}; dgrad is the forward product with N and K exchanged",
    )
    parser.add_argument("--recipe", default="blockwise", help="whose blocks (default: %(default)s)")
    parser.add_argument("--budget", type=_seconds, metavar="SECONDS", help="start no further product after this time")
    parser.add_argument("--force", action="store_true", help="measure again what the cache has")
    parser.add_argument("--device", type=gpu, default=torch.device("cuda"), help="by default %(default)s")
    parser.add_argument("--arch", type=arch, metavar="NAME", help=f"a processor: {', '.join(ARCHS)}, or a product")
    parser.add_argument("--dry-run", action="store_true", help="list every candidate, and why it is not timed")
    parser.add_argument(
        "--export", type=output_file, metavar="FILE", help="then write all that the cache has for the chip"
    )
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar="FILE", help="how far two exported tables agree; measures nothing"
    )
    return parser
