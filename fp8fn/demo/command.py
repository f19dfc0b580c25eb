"""`python -m fp8fn demo`: options, checks of what must be installed, and the order of the output."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

import fp8fn
from fp8fn.bench import record
from fp8fn.bench.plot import format_fault
from fp8fn.cli import options
from fp8fn.cli.environment import device_name, missing_for_inductor
from fp8fn.demo.compare import build, compare, in_fp8
from fp8fn.demo.corpus import standard_library
from fp8fn.demo.model import GPT, GPTConfig
from fp8fn.demo.presets import MODELS, PRESETS, default_size
from fp8fn.demo.report import conclusion, left_alone, plot, table, verdict
from fp8fn.demo.results import results
from fp8fn.demo.train import Plan
from fp8fn.extras import installed_by
from fp8fn.ops.recipe import BACKEND_DEFAULT, parse_recipe
from fp8fn.ops.recipe import PRESETS as RECIPES
from fp8fn.ops.targets import check_supported, target_of

_PACKAGES = ("matplotlib", "tabulate", "tqdm")


def main(argv: Sequence[str]) -> int:
    """Run the demo. Returns 0 if the final validation loss in FP8 is no more above the baseline's than allowed, else 1.

    With several seeds, the mean of the pairs' relative differences decides. The status is 2 if the demo can't run.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    device: torch.device = arguments.device
    presets, size = MODELS[arguments.model], arguments.size or default_size(arguments.model, device.type)
    if size not in presets:
        parser.error(f"--size {size} is not one of --model {arguments.model}: use {' or '.join(presets)}")
    problem = (
        missing_packages()
        or _missing_backend()
        or (missing_for_inductor() if device.type == "cpu" else _unsupported_device(device))
    )
    if problem:
        parser.exit(2, f"{parser.prog}: {problem}\n")
    if fault := format_fault(arguments.plot):
        parser.error(f"--plot {fault}")

    preset = presets[size]
    plan = Plan(
        device=device,
        steps=arguments.steps or preset.steps,
        batch=arguments.batch or preset.batch,
        learning_rate=arguments.learning_rate or preset.learning_rate,
        seed=arguments.seed,
    )
    corpus = standard_library()
    model = build(preset.model, plan)
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M parameters on {device_name(device)}; "
        f"{plan.steps} steps of {plan.batch} x {model.config.context} bytes; "
        f"{_precision(preset.model, device)} against FP8 ({arguments.recipe}){_changed_settings(arguments)}\n",
        flush=True,
    )
    explanation = _explain(model, plan, arguments.recipe, arguments.where)
    if not explanation.substituted:
        parser.exit(2, f"{parser.prog}: no product is in FP8, so nothing is compared; --where '*' takes all products\n")
    left = left_alone(explanation)
    fp8 = in_fp8(arguments.recipe, arguments.where)
    pairs = compare(model, corpus, plan, fp8, progress=_progress(), seeds=arguments.seeds)
    if arguments.json:
        record.write(arguments.json, "demo", results(pairs, plan, arguments.model, size, arguments.recipe, left))

    print(f"\n{table(pairs, speed=device.type == 'cuda')}\n")
    if left:
        print(f"Not in FP8: {'; '.join(left)}")
    if device.type == "cpu":
        print("A CPU has no FP8 instructions: the reference dequantizes and multiplies in float32. The losses and the")
        print("saved bytes are those of a GPU's formats. The speed would say nothing about FP8, and is not shown.")
    plot(pairs, arguments.plot, preset.deviation)
    print(f"Loss curves: {arguments.plot}")
    print(conclusion(pairs, preset.deviation))
    return verdict(pairs, preset.deviation)


def missing_packages() -> str | None:
    """How to install the packages that the demo needs beyond fp8fn's own, or None."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: {installed_by('demo')}" if missing else None


def _parser() -> argparse.ArgumentParser:
    lists = ("; ".join(f"{name}: {preset.summary}" for name, preset in presets.items()) for presets in MODELS.values())
    sizes = " | ".join(f"of {model}, {names}" for model, names in zip(MODELS, lists, strict=True))
    parser = options.parser_of(
        "demo",
        "Train a byte-level GPT on the sources of Python's standard library twice, from the same weights "
        "on the same batches: compiled by Inductor, and compiled by fp8fn with its products in FP8. Prints which "
        "products are in FP8, the final losses, the speeds and the bytes saved for the backward.",
        "--size tiny --steps 40",
        "--model moe --where '*' --seeds 4",
        epilog="Exit status: 0 if the final validation loss in FP8 is at most 1 % above the baseline's (with --seeds, "
        "in the mean over the pairs), with two standard errors besides at sizes where they were measured, else 1; "
        "2 if the demo could not run; 130 if it was interrupted.",
    )
    parser.add_argument(
        "--device",
        type=options.device,
        default=_default_device(),
        help="cpu, cuda or cuda:N (default: cuda where there is a GPU)",
    )
    parser.add_argument(
        "--model", choices=MODELS, default="gpt", help="gpt, or moe: with 8 experts in each layer (default: gpt)"
    )
    parser.add_argument("--size", choices=PRESETS, help=f"{sizes} (default: 1b on a GPU, small for moe, tiny on a CPU)")
    parser.add_argument("--steps", type=options.positive, metavar="N", help="training steps (default: the size's own)")
    parser.add_argument(
        "--batch", type=options.positive, metavar="N", help="sequences a step (default: the size's own)"
    )
    parser.add_argument(
        "--recipe",
        type=_recipe,
        default=BACKEND_DEFAULT.key,
        help=f"one of {', '.join(RECIPES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--where",
        metavar="PATTERN",
        help="the products in FP8, by their weights' names; * is all (default: the backend's)",
    )
    parser.add_argument(
        "--learning-rate", type=_positive_number, metavar="RATE", help="peak rate (default: the size's own)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    parser.add_argument(
        "--seeds",
        type=options.positive,
        default=1,
        metavar="N",
        help="train N pairs, with seeds SEED, SEED + 1 and so on, and compare the means (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        type=options.output_file,
        default=Path("fp8fn-demo.png"),
        metavar="PATH",
        help="picture to write, in the format of its ending or in PNG (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=options.output_file, metavar="PATH", help="write the figures and the environment to PATH"
    )
    return parser


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _positive_number(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return rate


def _recipe(text: str) -> str:
    try:
        return parse_recipe(text).key
    except ValueError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None


def _precision(config: GPTConfig, device: torch.device) -> str:
    """The type that the baseline multiplies in."""
    if device.type == "cuda":
        return "bf16 autocast"
    return "float32, and its experts in bf16," if config.experts else "float32"


def _changed_settings(arguments: argparse.Namespace) -> str:
    """The options that change the size's own settings, for the first line of the output."""
    rate = f"; learning rate {arguments.learning_rate:g}" if arguments.learning_rate else ""
    last = arguments.seed + arguments.seeds - 1
    return rate + (f"; {arguments.seeds} pairs, of seeds {arguments.seed} to {last}" if arguments.seeds > 1 else "")


def _missing_backend() -> str | None:
    # The backend's name is an entry point of the installed package. A bare checkout has none.
    known = "fp8fn" in torch.compiler.list_backends()
    return None if known else "torch.compile does not know the backend 'fp8fn': install the package (pip install -e .)"


def _unsupported_device(device: torch.device) -> str | None:
    try:
        check_supported(target_of(device), device)
    except ValueError as reason:
        return str(reason)
    return None


def _explain(model: GPT, plan: Plan, recipe: str, where: str | None) -> fp8fn.lowering.explanation.Explanation:
    """Print the table of the products."""
    tokens = torch.zeros(plan.batch, model.config.context, dtype=torch.int64, device=plan.device)
    with plan.autocast:
        explanation = fp8fn.explain(model, tokens, recipe=recipe, where=where)
    print(flush=True)
    return explanation


def _progress() -> Callable[[str, Iterable[int]], Iterator[int]]:
    """A bar for each run. The first step of a variant compiles the model, and the bar says so."""
    from tqdm import tqdm

    compiled: set[str] = set()

    def progress(name: str, steps: Iterable[int]) -> Iterator[int]:
        variant, _, _ = name.partition(", seed")
        bar = tqdm(steps, desc=f"{name:<16}", unit="step")
        for step in bar:
            if variant not in compiled:
                bar.set_postfix_str("compiling…")
            yield step
            if variant not in compiled:
                compiled.add(variant)
                bar.set_postfix_str("")

    return progress
