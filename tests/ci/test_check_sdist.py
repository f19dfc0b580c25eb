"""What `check_sdist.py` says of a source distribution, and that the one that setuptools makes has no fault."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support.check_sdist import BESIDE, faults

pytestmark = pytest.mark.every_case


def test_faults(tmp_path: Path) -> None:
    for name in BESIDE:
        (tmp_path / name).write_text(name)
    sdist = tmp_path / "fp8fn-1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in BESIDE[1:]:
            archive.add(tmp_path / name, f"fp8fn-1/{name}")
        archive.add(tmp_path / BESIDE[0], "fp8fn-1/tests/test_gemm.py")
    assert faults(sdist, tmp_path) == [
        f"the source distribution lacks {BESIDE[0]}", "the source distribution has tests/test_gemm.py",
    ]  # fmt: skip
    (tmp_path / "README.md").write_text("changed")
    assert "the source distribution has another README.md" in faults(sdist, tmp_path)


def test_the_source_distribution_has_what_its_readme_names_and_no_tests(tmp_path: Path) -> None:
    root, checkout = Path(__file__).parents[2], tmp_path / "checkout"
    for name in (*BESIDE, "MANIFEST.in", "fp8fn/__init__.py", "fp8fn/version.py", "tests/test_layers.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, checkout / name)
    code = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert faults(sdist, root) == []
