"""The help of every command, kept in `help.json`, so that `COMMAND --help` does without PyTorch.

`python -m fp8fn.cli.help` writes the file again from the commands' parsers; a test compares.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from collections.abc import Iterator
from unittest.mock import patch

from fp8fn import cli
from fp8fn.cli.kept_help import kept


def text() -> str:
    """The content of the file: what each command's `--help` shows, by the words that name the command."""
    found = {" ".join(names): kept(parser(command)) for names, command in commands(cli.COMMANDS)}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def commands(group: cli.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], cli.Command]]:
    """Every command with the words that name it."""
    for name, found in group.commands.items():
        if isinstance(found, cli.Group):
            yield from commands(found, (*names, name))
        else:
            yield (*names, name), found


def parser(command: cli.Command) -> argparse.ArgumentParser:
    """A command's own parser: the one that prints when the command is asked for help."""
    found: list[argparse.ArgumentParser] = []
    asked = patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self))
    with asked, contextlib.suppress(SystemExit):
        importlib.import_module(command.module).main(["--help"])
    (only,) = found
    return only


if __name__ == "__main__":
    cli.HELP.write_text(text(), encoding="utf-8")
    print(f"wrote {cli.HELP}")
