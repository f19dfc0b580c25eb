"""The command line, `python -m fp8fn COMMAND`: a table of commands, each of them a module with `main(argv) -> int`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from fp8fn.cli.kept_help import Help, parser_of_kept


class Command(NamedTuple):
    """A command. Its module is imported only when the command runs, so that help stays fast.

    `interrupted` is printed after Ctrl-C: what is kept, and how to resume.
    """

    summary: str
    module: str
    interrupted: str = "nothing more is written"


class Group(NamedTuple):
    """A group of commands, one of which the next word names."""

    summary: str
    commands: Mapping[str, Command | Group]
    examples: tuple[str, ...] = ()


HELP: Final = Path(__file__).with_name("help.json")  # written by `fp8fn.cli.help`

# The status that a shell reports for a process that SIGINT ended. Status 1 is a command's own verdict: in the demo, FP8
# is worse.
INTERRUPTED: Final = 130
# The same for SIGPIPE, as where the output goes to `head`.
READER_LEFT: Final = 141

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
            "write a checkpoint in FP8, or in another FP8 format",
            "fp8fn.cli.convert",
            "run the same command again to resume",
        ),
        "isa": Command("what AMD kernels compile to: instructions, registers, modelled cycles", "fp8fn.cli.isa"),
        "bench": Group(
            "measure kernels and models, beside PyTorch and other libraries",
            {
                "dense": Command("the forward product, beside its peers", "fp8fn.bench.dense"),
                "wgrad": Command("the product for a weight's gradient, beside its peers", "fp8fn.bench.wgrad"),
                "linear": Command("a linear layer's forward and backward, beside its peers", "fp8fn.bench.linear"),
                "moe": Command("grouped products, quantizers and MLPs, beside their peers", "fp8fn.bench.moe"),
                "quant": Command("quantizers, beside their peers and a copy", "fp8fn.bench.quant"),
                "decode": Command("products of few rows by an FP8 weight, beside bf16", "fp8fn.bench.decode"),
                "invariant": Command("what batch invariance costs, from 1 to 4096 rows", "fp8fn.bench.invariant"),
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
                "seeds": Command(
                    "published protocols on this machine, beside their published figures",
                    "fp8fn.bench.seeds.command",
                    "finished figures are in the file of --json; run the same command again to resume",
                ),
                "decoder": Command("a decoder layer under torch.compile, in bf16 and FP8", "fp8fn.bench.decoder"),
                "prefill": Command("a prefill by FP8 weights, beside bf16 and torchao", "fp8fn.bench.prefill"),
                "generate": Command("tokens per second of a compiled decoding loop", "fp8fn.bench.generate"),
                "host": Command("host time of calls on a GPU, and of the first call", "fp8fn.bench.host"),
                "cold": Command(
                    "time to a process's first product: compiled, after aot, by fp8fn-cubins", "fp8fn.bench.cold"
                ),
                "overhead": Command("host time of a call beyond its work, on a CPU", "fp8fn.bench.overhead"),
                "compile": Command("compile time with and without the passes", "fp8fn.bench.compile_time"),
                "isa": Command("AMD's machine code beside Primus-Turbo's claims, with no GPU", "fp8fn.bench.isa"),
                "plot": Command("draw a run that one of these commands wrote", "fp8fn.bench.plot"),
                "docs": Command("make the tables in docs/ from the committed results", "fp8fn.bench.docs"),
            },
            ("bench train --model tiny --device cpu", "bench dense"),
        ),
    },
    ("env", "demo", "convert Llama-3.1-8B Llama-3.1-8B-FP8"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names (default: the process's arguments), and return its exit status."""
    found, names, rest = _find(sys.argv[1:] if argv is None else argv)
    program = " ".join(("python -m fp8fn", *names))
    if isinstance(found, Command):
        if _asks_for_help(rest):
            _show_help(" ".join(names))
            raise SystemExit(0)  # as argparse does
        try:
            status = int(importlib.import_module(found.module).main(rest))
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            if not _reader_left():
                raise
            return READER_LEFT
        except KeyboardInterrupt:
            _say_interrupted(program, found)
            return INTERRUPTED
    parser = _parser(found, program)
    if not rest:
        parser.print_help(sys.stderr)
        return 2
    # argparse handles the rest: --help, --version, and the error for an unknown command.
    parser.parse_args(rest)
    return 2


def _reader_left() -> bool:
    """Whether the output is a pipe that nobody reads any more; what is still printed then goes nowhere."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def needs_torch() -> bool:
    """Whether this process may use PyTorch: False if it is the command line and names no command.

    `import torch` takes seconds, and `--help`, `--version` and the error for an unknown command do without it.
    """
    found, _, rest = _find(sys.argv[1:])
    return not _is_command_line() or (isinstance(found, Command) and not _asks_for_help(rest))


def watch_import() -> None:
    """Lets the command line say what Ctrl-C means while PyTorch is imported, before `main` is called.

    Python then ends the process by SIGINT, which a shell reports as status 130.
    """
    found, names, _ = _find(sys.argv[1:])
    if not _is_command_line() or not isinstance(found, Command):
        return

    def said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _say_interrupted(" ".join(("python -m fp8fn", *names)), found)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = said


def _is_command_line() -> bool:
    """Whether this process is `python -m fp8fn` or the script `fp8fn`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # runpy's placeholder while it imports the package; `python -m other.module` has it as well
        return sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])][-2:] == ["-m", "fp8fn"]
    return os.path.basename(program) == "fp8fn"


def _say_interrupted(program: str, command: Command) -> None:
    print(f"\n{program}: interrupted; {command.interrupted}", file=sys.stderr)


def _asks_for_help(rest: Sequence[str]) -> bool:
    return [*rest] in (["-h"], ["--help"])


def _show_help(name: str) -> None:
    """Prints what a command's parser does for `--help`."""
    parser_of_kept(json.loads(HELP.read_text(encoding="utf-8"))[name]).print_help()


def _find(argv: Sequence[str]) -> tuple[Command | Group, list[str], list[str]]:
    """The command or group that the first words of `argv` name, these words, and the other words."""
    found: Command | Group = COMMANDS
    count = 0
    while isinstance(found, Group) and count < len(argv) and argv[count] in found.commands:
        found = found.commands[argv[count]]
        count += 1
    return found, list(argv[:count]), list(argv[count:])


def _parser(group: Group, program: str) -> argparse.ArgumentParser:
    examples = "".join(f"\n  python -m fp8fn {example}" for example in group.examples)
    parser = argparse.ArgumentParser(
        prog=program,
        description=group.summary,
        epilog=f"{program} COMMAND --help shows the options of a command\n\nExamples:{examples}",
        formatter_class=Help,
    )
    if group is COMMANDS:
        from fp8fn.version import __version__

        parser.add_argument("--version", action="version", version=f"fp8fn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in group.commands.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser
