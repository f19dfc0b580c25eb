"""Losses after training in bf16 and in FP8, paired by seed: `python -m fp8fn bench loss`.

The model and the text are the demo's. A pair of runs begins from the same weights and reads the same batches. Each
variant compiles once and trains with all seeds. Figures are printed and written as they come: with --json, the same
command goes on from the seeds that the file has for this machine, commit and setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import torch

from fp8fn.bench import tables
from fp8fn.bench.train.runs import Runs, check_file, key_of, revision
from fp8fn.bench.train.variants import BF16, Variant, listed
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.demo.compare import build
from fp8fn.demo.corpus import standard_library
from fp8fn.demo.pairs import relative_difference, standard_error
from fp8fn.demo.presets import PRESETS
from fp8fn.demo.train import Plan, train

# The largest mean of the relative differences from bf16's loss, to which one standard error is added.
BAR: Final = 0.005
_PRESETS: Final = ("BLOCKWISE", "BLOCKWISE_SQUARE", "TENSORWISE", "ROWWISE", "BLOCKWISE,save=fp8")
_DEFAULT: Final = " ".join((BF16, *(f"fp8fn:{preset},where=*" for preset in _PRESETS)))


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line for each run and the table at the end; return 1 where a mean difference is over the bar."""
    parser = _parser()
    args = parser.parse_args(argv)
    check_file(parser, args.json, "loss")
    began, preset, device = time.perf_counter(), PRESETS[args.size], args.device
    plan = Plan(
        device=device, steps=args.steps or preset.steps, batch=args.batch or preset.batch,
        learning_rate=preset.learning_rate,
    )  # fmt: skip
    setting = {"size": args.size, "steps": plan.steps, "batch": plan.batch, "learning_rate": plan.learning_rate}
    runs = Runs(args.json, key_of(device_name(device), args.commit or revision(), setting), "loss")
    corpus, model = standard_library(), build(preset.model, plan)
    for variant in _with_bf16(args.variants):
        row = next((each for each in runs.rows if each["variant"] == variant.name), None)
        row = row or {"variant": variant.name, "losses": {}}
        seeds = [seed for seed in range(args.seeds) if str(seed) not in row["losses"]]
        torch.compiler.reset()
        compiled = variant.compile(model, device)
        for seed in seeds:
            if args.minutes and time.perf_counter() - began > 60 * args.minutes:
                print(f"{variant.name}, seed {seed}: not begun, as the time of --minutes is over", flush=True)
                break
            seeded = dataclasses.replace(plan, seed=seed)
            on_cpu = dataclasses.replace(seeded, device=torch.device("cpu"))
            model.load_state_dict(build(model.config, on_cpu).state_dict())
            run = train(model, compiled, variant.name, corpus, seeded)
            model.zero_grad(set_to_none=True)
            row["losses"][str(seed)] = run.final_loss
            runs.put(row)
            seconds = time.perf_counter() - began
            print(f"[{seconds:4.0f} s] {variant.name}, seed {seed}: {run.final_loss:.4f}", flush=True)
    print(f"\n{of_run(runs.run)}", flush=True)
    return int(any(verdict.startswith("over") for *_, verdict in _body(runs.run)))


def of_run(run: Mapping[str, Any]) -> str:
    """A Markdown table of a run: the mean loss of each variant, and its difference from bf16 over the same seeds."""
    headers = (
        "variant",
        "seeds",
        "mean validation loss, nats/byte",
        "difference from bf16, mean ± standard error",
        "bar",
    )
    setting, environment = run["setting"], run["environment"]
    versions = f"torch {environment['torch']}, Triton {environment['triton']}"
    return "\n".join([
        f"The demo's GPT, size {setting['size']}, {setting['steps']} steps of {setting['batch']} sequences:", "",
        tables.markdown(_body(run), headers), "",
        f"{run['device']}; {versions}; {run['commit']}; {run['date']}.",
    ])  # fmt: skip


def of_document(document: dict[str, Any]) -> str:
    """The tables of all runs of a file."""
    return "\n\n".join(of_run(run) for run in document["results"]["runs"])


def _body(run: Mapping[str, Any]) -> list[list[str]]:
    losses = {row["variant"]: row["losses"] for row in run["rows"]}
    found = []
    for variant, of_seeds in losses.items():
        cells = [f"`{variant}`", str(len(of_seeds)), f"{fmean(of_seeds.values()):.4f}"]
        pairs = [(losses[BF16][seed], loss) for seed, loss in of_seeds.items() if seed in losses.get(BF16, {})]
        found.append([*cells, *(("", "") if variant == BF16 or not pairs else _compared(pairs))])
    return found


def _compared(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """The mean difference with its standard error, and whether it keeps to the bar. NaN does not."""
    differences = [relative_difference(*pair) for pair in pairs]
    mean, error = fmean(differences), standard_error(differences) if len(pairs) > 1 else 0.0
    kept = mean <= BAR + error and math.isfinite(mean)
    spread = f" ± {error:.2%}" if len(pairs) > 1 else ""
    return f"{mean:+.2%}{spread}", f"{'within' if kept else 'over'} {BAR:.1%} plus one standard error"


def _with_bf16(variants: Sequence[Variant]) -> list[Variant]:
    """The variants, bf16 first."""
    return [*listed(BF16), *(variant for variant in variants if variant.name != BF16)]


def _variants(text: str) -> list[Variant]:
    found = listed(text)
    peers = [variant.name for variant in found if variant.family not in (BF16, "fp8fn")]
    if peers:
        raise argparse.ArgumentTypeError(f"{peers[0]!r} replaces layers of the model; use {BF16} and fp8fn:PRESET")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = options.parser_of(
        "bench loss",
        __doc__,
        "--size 1b --seeds 2 --json loss.json",
        epilog="Exit status 1 where the mean difference of a variant from bf16 is over 0.5 % plus one standard error.",
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--size", choices=PRESETS, default="small", help="the demo's size (default: %(default)s)")
    add("--variants", type=_variants, default=_variants(_DEFAULT), metavar="NAMES",
        help=f"names with spaces between: bf16, fp8fn:PRESET,option=value (default: {_DEFAULT})")  # fmt: skip
    add("--seeds", type=options.positive, default=5, metavar="N", help="seeds 0 to N - 1 (default: %(default)s)")
    add("--steps", type=options.positive, metavar="N", help="training steps (default: the size's own)")
    add("--batch", type=options.positive, metavar="N", help="sequences a step (default: the size's own)")
    add("--minutes", type=options.positive, metavar="M", help="begin nothing new after M minutes (default: no limit)")
    add("--commit", metavar="NAME", help="the code's name in the file (default: git's, or a digest of the sources)")
    add("--device", type=options.device, default=default, help="default: cuda where there is a GPU, otherwise cpu")
    add("--json", type=options.output_file, metavar="FILE", help="add the figures to FILE, and go on from those in it")
    return parser
