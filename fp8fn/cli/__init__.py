"""The command line, `python -m fp8fn COMMAND`: a table of commands, each a module with `main(argv) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Command:
    """A command; its module is imported only when it is run, so that help stays quick.

    `interrupted` is a sentence for whoever stops it with Ctrl-C: what is kept, and how to go on.
    """

    summary: str
    module: str
    interrupted: str = "nothing more is written"


@dataclass(frozen=True)
class Group:
    """A command whose next word names one of its own commands."""

    summary: str
    commands: Mapping[str, Command | Group]


# A shell reports this status for a process that SIGINT ended. Status 1 is a command's own verdict: in the demo, that
# FP8 is worse.
INTERRUPTED: Final = 130

COMMANDS: Final = Group(
    "FP8 matrix multiplication for PyTorch.",
    {
        "demo": Command("train a small GPT with and without FP8, and compare", "fp8fn.demo.command"),
        "env": Command("print versions, devices and the kernels that serve them", "fp8fn.cli.environment"),
        "tune": Command(
            "time the products of your shapes, and keep the fastest configurations", "fp8fn.cli.tune",
            "what is tuned is kept; run the same command again to resume",
        ),
        "aot": Command(
            "compile a model's kernels ahead of time, with no GPU", "fp8fn.cli.aot",
            "what is compiled is kept; run the same command again to resume",
        ),
        "convert": Command(
            "write a bf16 checkpoint in FP8, as DeepSeek-V3's are", "fp8fn.cli.convert",
            "run the same command again to resume",
        ),
        "isa": Command("read AMD's machine code: instructions, registers, modelled cycles", "fp8fn.cli.isa"),
        "bench": Group(
            "Measurements.",
            {
                "overhead": Command("the cost of a call, apart from its kernels", "fp8fn.bench.overhead"),
                "docs": Command("make the tables in docs/ from the committed results", "fp8fn.bench.docs"),
                "dense": Command("the forward product, beside its peers", "fp8fn.bench.dense"),
                "wgrad": Command("the product of a weight's gradient, beside its peers", "fp8fn.bench.wgrad"),
                "linear": Command("a linear layer's forward and backward, beside its peers", "fp8fn.bench.linear"),
                "moe": Command("products of groups and experts' MLPs, beside their peers", "fp8fn.bench.moe"),
                "decode": Command("few rows by an FP8 weight, and batches, beside bf16", "fp8fn.bench.decode"),
                "decoder": Command("a decoder layer under torch.compile, in bf16 and FP8", "fp8fn.bench.decoder"),
                "generate": Command("tokens a second of a compiled decoding loop", "fp8fn.bench.generate"),
                "compile": Command("what torch.compile takes with and without the passes", "fp8fn.bench.compile_time"),
                "host": Command("the launch of a call on a GPU, and the first one", "fp8fn.bench.host"),
                "quant": Command("quantizers against a plain copy, beside their peers", "fp8fn.bench.quant"),
                "isa": Command("AMD's machine code beside Primus-Turbo's claims, with no GPU", "fp8fn.bench.isa"),
                "plot": Command("draw a run that one of these wrote", "fp8fn.bench.plot"),
            },
        ),
    },
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (the process's own arguments unless given) names, and return its exit status."""
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
    # What is left for argparse: --help, --version, and the error for an unknown command.
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
