"""A package of cubins as `pip` would install it, for tests of where kernels come from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8fn.ops.cuda.runtime import nvrtc, packaged
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.cuda.runtime.packaged import Package

ARCH = "sm_90a"
_NEVER_IMPORTED = 'raise ImportError("the package is data")\n'


def install(site: Path, cubins: Mapping[CudaKernel, bytes], version: tuple[int, int] = (13, 0)) -> Path:
    """Writes the package with these cubins into a folder of packages, and returns the package's own folder."""
    folder = site / packaged.PACKAGE
    named = {nvrtc.cubin_name(kernel, ARCH): cubin for kernel, cubin in cubins.items()}
    package = Package(folder, "1.2.3", nvrtc.sources_hash(), version, ARCH, dict.fromkeys(named, ""))
    packaged.write(package, named)
    (folder / "__init__.py").write_text(_NEVER_IMPORTED)
    return folder


def use(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process find the packages of a folder, which the tests otherwise leave out."""
    monkeypatch.delenv(packaged.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    packaged.forget()
