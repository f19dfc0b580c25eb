"""The help of a command as data, from which argparse formats it for the terminal's width, without PyTorch.

`python -m fp8fn.cli.help` writes the data. `import torch`, which a command's own parser needs, takes seconds.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Final

_USAGE: Final = "usage: "
_COLORS: Final = re.compile(r"\x1b\[[\d;]*m")  # of Python 3.14


class Help(argparse.HelpFormatter):
    """Paragraphs and items of lists fill the terminal; paragraphs with indented lines stay as they are."""

    def _format_usage(self, *args: Any, **kwargs: Any) -> str:
        """argparse's lines, which begin below the name of the program where the terminal is wide enough for that."""
        text = super()._format_usage(*args, **kwargs)
        first, *others = text.rstrip("\n").split("\n")
        if all(len(_COLORS.sub("", line)) <= self._width for line in others):
            return text
        return "\n".join([first, *(" " * len(_USAGE) + line.strip() for line in others)]) + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._filled(each, width, indent) for each in text.strip().split("\n\n"))

    def _filled(self, paragraph: str, width: int, indent: str) -> str:
        if re.search(r"^- ", paragraph, re.MULTILINE):
            items = re.split(r"\n(?=- )", paragraph)
            return "\n".join(textwrap.fill(re.sub(r"\s+", " ", each), width, subsequent_indent="  ") for each in items)
        return paragraph if re.search("^ ", paragraph, re.MULTILINE) else super()._fill_text(paragraph, width, indent)


def kept(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The arguments and texts that a parser's help shows, as JSON holds them."""
    return {
        "prog": parser.prog,
        "description": parser.description,
        "epilog": parser.epilog,
        "arguments": [_kept_action(parser, action) for action in parser._actions],
        "exclusive": [
            {"required": group.required, "of": [action.dest for action in group._group_actions]}
            for group in parser._mutually_exclusive_groups
        ],
    }


def _kept_action(parser: argparse.ArgumentParser, action: argparse.Action) -> dict[str, Any]:
    """An argument without what only parsing needs: its type, its action and its default, which the help text spells."""
    whole: dict[str, Any] = {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "nargs": action.nargs,
        "metavar": action.metavar,
        "choices": None if action.choices is None else list(map(str, action.choices)),
        "required": action.required,
        "help": action.help and parser._get_formatter()._expand_help(action),
    }
    return {key: value for key, value in whole.items() if value is not None}


def parser_of_kept(found: Mapping[str, Any]) -> argparse.ArgumentParser:
    """A parser that shows the help of the one that `kept` was given; it parses nothing."""
    parser = argparse.ArgumentParser(
        prog=found["prog"],
        description=found["description"],
        epilog=found["epilog"],
        formatter_class=Help,
        add_help=False,
    )
    exclusive = {
        dest: group
        for each in found["exclusive"]
        for group in [parser.add_mutually_exclusive_group(required=each["required"])]
        for dest in each["of"]
    }
    groups = parser._positionals, parser._optionals
    for each in found["arguments"]:
        action = _Shown(
            option_strings=each["flags"],
            dest=each["dest"],
            nargs=each.get("nargs"),
            metavar=tuple(each["metavar"]) if isinstance(each.get("metavar"), list) else each.get("metavar"),
            choices=each.get("choices"),
            required=each["required"],
            help=each["help"].replace("%", "%%") if "help" in each else None,
        )
        exclusive.get(each["dest"], groups[bool(each["flags"])])._add_action(action)
    return parser


class _Shown(argparse.Action):
    """An argument that is shown and not parsed."""

    def __call__(self, *_: object) -> None:
        raise NotImplementedError
