"""The command line, `python -m fp8fn COMMAND`: a table of commands, each of them a module with `main(argv) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Command:
    """A command. Its module is imported only when the command runs, so that help stays fast.

    `interrupted` is printed after Ctrl-C: what is kept, and how to resume.
    """

    summary: str
    module: str
    interrupted: str = "nothing more is written"


@dataclass(frozen=True)
class Group:
    """A group of commands, one of which the next word names."""

    summary: str
    commands: Mapping[str, Command | Group]


# The status that a shell reports for a process that SIGINT ended. Status 1 is a command's own verdict: in the demo, FP8
# is worse.
INTERRUPTED: Final = 130

COMMANDS: Final = Group(
    "FP8 matrix multiplication for PyTorch.",
    {
        "demo": Command("train a small GPT with and without FP8, and compare", "fp8fn.demo.command"),
        "env": Command("print versions, devices and the kernels that serve them", "fp8fn.cli.environment"),
        "tune": Command(
            "time configurations for your shapes, and keep the fastest ones",
            "fp8fn.cli.tune",
            "what is tuned is kept; run the same command again to resume",
        ),
        "aot": Command(
            "compile a model's kernels ahead of time, with no GPU",
            "fp8fn.cli.aot",
            "what is compiled is kept; run the same command again to resume",
        ),
        "convert": Command(
            "write a bf16 checkpoint in FP8, in DeepSeek-V3's format",
            "fp8fn.cli.convert",
            "run the same command again to resume",
        ),
        "isa": Command("what AMD kernels compile to: instructions, registers, modelled cycles", "fp8fn.cli.isa"),
        "bench": Group(
            "Benchmarks.",
            {
                "dense": Command("the forward product, beside its peers", "fp8fn.bench.dense"),
                "wgrad": Command("the product for a weight's gradient, beside its peers", "fp8fn.bench.wgrad"),
                "linear": Command("a linear layer's forward and backward, beside its peers", "fp8fn.bench.linear"),
                "moe": Command("grouped products, quantizers and MLPs, beside their peers", "fp8fn.bench.moe"),
                "quant": Command("quantizers, beside their peers and a copy", "fp8fn.bench.quant"),
                "decode": Command("products of few rows by an FP8 weight, beside bf16", "fp8fn.bench.decode"),
                "train": Command(
                    "training steps of transformers' models, beside bf16 and torchao",
                    "fp8fn.bench.train.command",
                    "finished figures are in the file of --json; run the same command again to resume",
                ),
                "loss": Command(
                    "losses of the demo's model after training, in bf16 and FP8, paired by seed",
                    "fp8fn.bench.loss",
                    "finished seeds are in the file of --json; run the same command again to resume",
                ),
                "decoder": Command("a decoder layer under torch.compile, in bf16 and FP8", "fp8fn.bench.decoder"),
                "generate": Command("tokens per second of a compiled decoding loop", "fp8fn.bench.generate"),
                "host": Command("host time of calls on a GPU, and of the first call", "fp8fn.bench.host"),
                "overhead": Command("host time of a call beyond its work, on a CPU", "fp8fn.bench.overhead"),
                "compile": Command("compile time with and without the passes", "fp8fn.bench.compile_time"),
                "isa": Command("AMD's machine code beside Primus-Turbo's claims, with no GPU", "fp8fn.bench.isa"),
                "plot": Command("draw a run that one of these commands wrote", "fp8fn.bench.plot"),
                "docs": Command("make the tables in docs/ from the committed results", "fp8fn.bench.docs"),
            },
        ),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names (default: the process's arguments), and return its exit status."""
    return _dispatch(COMMANDS, list(sys.argv[1:] if argv is None else argv), "python -m fp8fn")


def _dispatch(group: Group, argv: list[str], program: str) -> int:
    command = group.commands.get(argv[0]) if argv else None
    if isinstance(command, Group):
        return _dispatch(command, argv[1:], f"{program} {argv[0]}")
    if isinstance(command, Command):
        try:
            return int(importlib.import_module(command.module).main(argv[1:]))
        except KeyboardInterrupt:
            print(f"\n{program} {argv[0]}: interrupted; {command.interrupted}", file=sys.stderr)
            return INTERRUPTED
    parser = _parser(group, program)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    # argparse handles the rest: --help, --version, and the error for an unknown command.
    parser.parse_args(argv)
    return 2


def _parser(group: Group, program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=group.summary, epilog=f"{program} COMMAND --help shows the options of a command"
    )
    if group is COMMANDS:
        from fp8fn.version import __version__

        parser.add_argument("--version", action="version", version=f"fp8fn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in group.commands.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser
