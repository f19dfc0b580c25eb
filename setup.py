"""The project's addresses, which whoever publishes it names: `FP8FN_REPOSITORY=https://… pip wheel --no-deps .`.

pyproject.toml has all else. A build without the variable names no address.
"""

from __future__ import annotations

import os

from setuptools import setup


def urls(repository: str) -> dict[str, str]:
    """The entries of a package's metadata; the folders are those of GitHub's sites."""
    if not repository:
        return {}
    if not repository.startswith("https://"):
        raise ValueError(f"FP8FN_REPOSITORY={repository!r} is no address; it must begin with https://")
    root = repository.rstrip("/")
    return {"Source": root, "Issues": f"{root}/issues", "Changelog": f"{root}/blob/main/CHANGELOG.md"}


setup(project_urls=urls(os.environ.get("FP8FN_REPOSITORY", "")))
