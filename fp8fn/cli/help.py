"""The help of every command as text, kept in `help.json`, so that `COMMAND --help` does without PyTorch.

`python -m fp8fn.cli.help` writes the file again from the commands' parsers; a test compares.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Iterator
from typing import Final
from unittest.mock import patch

from fp8fn import cli

_WIDTH: Final = "80"  # columns


def text() -> str:
    """The content of the file: the output of each command's `--help`, by the words that name the command."""
    with patch.dict(os.environ, COLUMNS=_WIDTH):
        found = {" ".join(names): _printed(command) for names, command in commands(cli.COMMANDS)}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def commands(group: cli.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], cli.Command]]:
    """Every command with the words that name it."""
    for name, found in group.commands.items():
        if isinstance(found, cli.Group):
            yield from commands(found, (*names, name))
        else:
            yield (*names, name), found


def _printed(command: cli.Command) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(command.module).main(["--help"])
    return out.getvalue()


if __name__ == "__main__":
    cli.HELP.write_text(text(), encoding="utf-8")
    print(f"wrote {cli.HELP}")
