"""The command that installs an extra, which depends on whether fp8fn itself is installed."""

from __future__ import annotations

from pathlib import Path


def installed_by(extra: str) -> str:
    """The command that installs the packages of an extra.

    pip takes the extra of an installed fp8fn from its metadata, whether a wheel or a checkout was installed. A checkout
    that is only on the path has no metadata, and pip would ask an index for a package called fp8fn.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("fp8fn")
    except PackageNotFoundError:
        return f"pip install -e '{Path(__file__).parents[1]}[{extra}]'"
    return f"pip install 'fp8fn[{extra}]'"
