"""Command-line options that several commands share: a device, a count, a file or a folder to write to."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from fp8fn.cli.kept_help import Help
from fp8fn.ops.targets import named_target

ARCHS: Final = ("sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950")


def parser_of(
    command: str, description: str | None, *examples: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The parser of a command, whose help ends with `epilog` and with examples: the arguments of each."""
    program = f"python -m fp8fn {command}"
    calls = "\n".join(["Examples:", *(f"  {program} {arguments}".rstrip() for arguments in examples)])
    return argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=calls if epilog is None else f"{epilog}\n\n{calls}",
        formatter_class=Help,
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def arch(text: str) -> str:
    """The name of a processor or of a product that `named_target` knows."""
    if named_target(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no processor; choose from {', '.join(ARCHS)}, or name a product")
    return text


def device(text: str) -> torch.device:
    """`"cpu"`, `"cuda"` or `"cuda:N"`, if this machine has GPU N."""
    return _device(text, ("cpu", "cuda"), "cpu, cuda or cuda:N")


def gpu(text: str) -> torch.device:
    """`"cuda"` or `"cuda:N"`, if this machine has GPU N."""
    return _device(text, ("cuda",), "cuda or cuda:N")


def _device(text: str, types: tuple[str, ...], usual: str) -> torch.device:
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use {usual}") from None
    if found.type not in types:
        raise argparse.ArgumentTypeError(f"fp8fn has no kernels for {text!r} here; use {usual}")
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        others = f"cuda:0 to cuda:{count - 1}" if count else "cpu" if "cpu" in types else "a machine with a GPU"
        raise argparse.ArgumentTypeError(f"{text!r} does not exist: torch sees {count} GPUs; use {others}")
    return found


def output_file(text: str) -> Path:
    """A file that can be written. This check runs before a measurement, not after it."""
    path = Path(text)
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a name that is too long, or a file in the place of a folder
        raise argparse.ArgumentTypeError(f"{text!r} can't be written: {error.strerror}") from None
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} can't be written: it must be a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written: permission denied")
    return path


def output_folder(text: str) -> Path:
    """A folder that exists and can be written to."""
    path = Path(text)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written to: it must be a folder that exists")
    return path


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device` of a benchmark."""
    parser.add_argument("--device", type=device, default=torch.device("cuda"), help="where to measure (default: cuda)")


def add_json(parser: argparse.ArgumentParser, text: str = "write the figures and the environment to FILE") -> None:
    """`--json` of a benchmark."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help=text)


def check_machine(parser: argparse.ArgumentParser, wanted: torch.device, packages: Sequence[str]) -> None:
    """Ends with the parser's error where the packages of a benchmark are not installed, or its GPU is not there."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        parser.error(f"needs {', '.join(absent)}: pip install {' '.join(absent)}")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu with small sizes shows what is measured")
