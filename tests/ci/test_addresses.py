"""A build names the project's addresses where the environment does, and none otherwise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parents[2]
CODE = "from setuptools.build_meta import prepare_metadata_for_build_wheel as made; made('..')"


def built(folder: Path, repository: str | None) -> subprocess.CompletedProcess[str]:
    checkout = folder / "checkout"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "fp8fn/__init__.py", "fp8fn/version.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    environment = {name: value for name, value in os.environ.items() if name != "FP8FN_REPOSITORY"}
    if repository is not None:
        environment["FP8FN_REPOSITORY"] = repository
    command = [sys.executable, "-W", "error", "-c", CODE]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("repository", "urls"),
    [
        (None, []),
        ("", []),
        (
            "https://example.org/owner/fp8fn/",
            [
                "Source, https://example.org/owner/fp8fn",
                "Issues, https://example.org/owner/fp8fn/issues",
                "Changelog, https://example.org/owner/fp8fn/blob/main/CHANGELOG.md",
            ],
        ),
    ],
)
def test_addresses(repository: str | None, urls: list[str], tmp_path: Path) -> None:
    process = built(tmp_path, repository)
    assert process.returncode == 0, process.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert re.findall(r"^Project-URL: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE) == urls


def test_a_word_is_no_address(tmp_path: Path) -> None:
    process = built(tmp_path, "fp8fn")
    assert process.returncode != 0
    assert "FP8FN_REPOSITORY='fp8fn' is no address; it must begin with https://" in process.stderr
