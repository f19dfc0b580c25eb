"""What `check_wheel.py` says of a wheel that lacks a file, has another one, or is too large; imports without extras."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.check_wheel import faults


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (["fp8fn/a.py", "fp8fn/ops/b.cu", "fp8fn/ops/tuning/tables/c.json", "fp8fn-1.dist-info/RECORD"], []),
        (["fp8fn/a.py"], ["the wheel lacks fp8fn/ops/b.cu"]),
        (["fp8fn/a.py", "fp8fn/ops/b.cu", "fp8fn/h100.json"], ["the wheel has fp8fn/h100.json"]),
    ],
)
def test_files(held: list[str], found: list[str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "fp8fn").mkdir(parents=True)
    (source / "fp8fn/a.py").touch()
    (source / "ops").mkdir()
    (source / "ops/b.cu").touch()
    (source / "fp8fn/ops").symlink_to("../ops")
    wheel = tmp_path / "fp8fn.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in held:
            archive.writestr(name, "")
    assert faults(wheel, source) == found


def test_size(tmp_path: Path) -> None:
    wheel = tmp_path / "fp8fn.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", bytes(1_500_000))
    (fault,) = faults(wheel, tmp_path)
    assert fault.endswith("at most 1500000 are allowed")


def test_type_checkers_follow_an_editable_install(tmp_path: Path) -> None:
    """It is a path to the checkout. An import hook, which setuptools makes otherwise, is known to Python alone."""
    root, checkout = Path(__file__).parents[2], tmp_path / "checkout"
    for name in ("pyproject.toml", "README.md", "LICENSE", "fp8fn/version.py", "ops/__init__.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, checkout / name)
    (checkout / "fp8fn/__init__.py").touch()
    (checkout / "fp8fn/ops").symlink_to("../ops")
    code = f"from setuptools.build_meta import build_editable; print('\\n' + build_editable({str(tmp_path)!r}))"
    process = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / process.stdout.splitlines()[-1]) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(path).decode().strip() == str(checkout)


def test_a_checkout_without_symlinks_says_what_to_do(tmp_path: Path) -> None:
    """git then writes a file with the link's target; nothing else finds the folders for this process."""
    package = Path(__file__).parents[2] / "fp8fn"
    links = ("ops", "meta", "lowering")
    shutil.copytree(package, tmp_path / "fp8fn", ignore=lambda folder, names: links if Path(folder) == package else [])
    for name in links:
        (tmp_path / "fp8fn" / name).write_text(f"../{name}")
    code = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f)]\nimport fp8fn"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 1
    assert "git clone -c core.symlinks=true" in process.stderr.splitlines()[-1]


def test_an_import_without_extras_prints_nothing() -> None:
    extras = ("matplotlib", "numpy", "safetensors", "tabulate", "tqdm", "transformers")
    code = f"import sys\nsys.modules.update(dict.fromkeys({extras}))\nimport torch\nprint('|')\nimport fp8fn"
    filters = "ignore:Failed to initialize NumPy"  # PyTorch's own, wherever it is imported first
    process = subprocess.run([sys.executable, "-W", filters, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "|\n"
    assert process.stderr == ""
