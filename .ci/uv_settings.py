"""Prints pip's settings as lines of shell for uv, which doesn't read them; fails if uv has no such setting.

The lines export variables that uv reads, and set the array `uv_constraints`: uv drops a variable's constraints where a
command has `-c`, and pip adds them up.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

# A setting of pip, the variable that uv reads, and what separates its values there.
NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}
# Settings that change no result.
WITHOUT_EFFECT = {
    *("break-system-packages", "cache-dir", "default-timeout", "disable-pip-version-check", "no-cache-dir", "no-color"),
    *("no-compile", "no-input", "progress-bar", "quiet", "retries", "root-user-action", "timeout", "verbose"),
}


def lines_for_uv(listed: str) -> list[str]:
    """The lines for what `pip config list` prints. The environment wins over [install], and [install] over [global]."""
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listed.splitlines()]
    for section in ("global", "install", ":env:"):
        for key, _, value in lines:
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = ast.literal_eval(value)
    constraints = [word for path in settings.pop("constraint", "").split() for word in ("-c", shlex.quote(path))]
    if others := settings.keys() - NAMES.keys() - WITHOUT_EFFECT:
        raise ValueError(f"uv is told nothing of pip's {', '.join(sorted(others))}")
    exports = [
        f"export {name}={shlex.quote(separator.join(settings[key].split()))}"
        for key, (name, separator) in NAMES.items()
        if key in settings and name not in os.environ
    ]
    return [*exports, f"uv_constraints=({' '.join(constraints)})"]


if __name__ == "__main__":
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    try:
        print("\n".join(lines_for_uv(listed)))
    except ValueError as error:
        sys.exit(f".ci/run: pip installs, not uv: {error}")
