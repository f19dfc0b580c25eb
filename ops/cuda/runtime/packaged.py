"""Cubins from the distribution `fp8fn-cubins`, which are there before anything has been compiled on this machine.

Its package `fp8fn_cubins` holds data: a cubin for each kernel, and `manifest.json`. The package is found like any
package, but never imported. It is trusted as the sources of kernels are: whoever can write there can change this
library, too. The manifest has a checksum of each file, which finds damage.

A cubin is named by the hash of its kernel's sources, macros and options, and the manifest has a hash of all sources: a
package that was made from other sources is not used. NVRTC's version is no part of a name, because machine code runs
whichever NVRTC made it. But a driver loads the machine code of its own major version of CUDA and of earlier ones only,
so that a package that was made by a later major version than PyTorch's is not used either.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from fp8fn.ops.code_cache import info_once, replace_whole, warn_once

DISTRIBUTION: Final = "fp8fn-cubins"
PACKAGE: Final = "fp8fn_cubins"
VARIABLE: Final = "FP8FN_CUBINS"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1


@dataclass(frozen=True)
class Package:
    """A folder of cubins.

    Args:
        version: the version of fp8fn that the cubins were made by.
        sources: the hash of all sources of kernels.
        nvrtc: the version of the compiler.
        arch: the architecture that the cubins are for.
        kernels: the checksum of each cubin, by its name.
    """

    folder: Path
    version: str
    sources: str
    nvrtc: tuple[int, int]
    arch: str
    kernels: Mapping[str, str]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.cubin"

    def fault(self, sources: str) -> str | None:
        """Why the cubins can't serve kernels whose sources have this hash, or None."""
        if self.sources != sources:
            return "it was made from the kernels of another version of fp8fn"
        cuda = torch.version.cuda
        if cuda is not None and int(cuda.split(".")[0]) < self.nvrtc[0]:
            return f"it was made for drivers of CUDA {self.nvrtc[0]} and later, and PyTorch is built for CUDA {cuda}"
        return None


def find(name: str, sources: str) -> bytes | None:
    """The cubin of this name, or None where the package is absent, unfit, damaged, or has no such kernel.

    Args:
        name: the kernel's entry and the hash of what it is compiled from.
        sources: the hash of all sources of kernels.
    """
    package = installed()
    if package is None:
        return None
    if (fault := package.fault(sources)) is not None:
        remedy = "pip install -U 'fp8fn[cubins]' brings the one that fits"
        if package.sources == sources:  # no release has cubins for drivers of an earlier CUDA
            remedy = f"a PyTorch for CUDA {package.nvrtc[0]} uses it"
        info_once(f"{DISTRIBUTION} {package.version} is not used, and NVRTC compiles the kernels: {fault}; {remedy}")
        return None
    if (checksum := package.kernels.get(name)) is None:
        return None
    try:
        content = package.path(name).read_bytes()
    except OSError as error:
        _warn_of_damage(package, f"{package.path(name)} can't be read ({error.strerror})")
        return None
    if _checksum(content) != checksum:
        _warn_of_damage(package, f"{package.path(name)} is damaged")
        return None
    return content


def describe(sources: str) -> str:
    """One line for `python -m fp8fn env`."""
    if os.environ.get(VARIABLE) == "0":
        return f"left out by {VARIABLE}=0"
    package = installed()
    if package is None:
        return "not installed"
    if (fault := package.fault(sources)) is not None:
        return f"{package.version}, not used: {fault}"
    compiler = ".".join(map(str, package.nvrtc))
    return f"{package.version}, {len(package.kernels)} kernels for {package.arch} by NVRTC {compiler}"


def installed() -> Package | None:
    """The package as Python finds it, read once in a process; None without one, or where `FP8FN_CUBINS=0`."""
    return None if os.environ.get(VARIABLE) == "0" else _installed()


def forget() -> None:
    """Looks for the package again when it is next asked for."""
    _installed.cache_clear()


def check_folder(folder: Path) -> None:
    """ValueError where `write` would remove cubins that no manifest claims, such as those of the user's cache."""
    if (folder / MANIFEST).exists() or not (strange := sorted(path.name for path in folder.glob("*.cubin"))):
        return
    raise ValueError(
        f"{folder} has {len(strange)} cubins, such as {strange[0]}, and no {MANIFEST}: they are not of {DISTRIBUTION}, "
        "whose files would replace them; name another folder"
    )


def write(package: Package, cubins: Mapping[str, bytes]) -> None:
    """Writes cubins and their manifest into the package's folder, and removes all other cubins there.

    The same cubins give the same files. OSError where one can't be written.
    """
    package.folder.mkdir(parents=True, exist_ok=True)
    for path in package.folder.glob("*.cubin"):
        if path.stem not in cubins:
            path.unlink()
    for name, content in cubins.items():
        replace_whole(package.path(name), content)
    document = {
        "format": FORMAT,
        "fp8fn": package.version,
        "sources": package.sources,
        "NVRTC": package.nvrtc,
        "arch": package.arch,
        "kernels": {name: _checksum(content) for name, content in sorted(cubins.items())},
    }
    replace_whole(package.folder / MANIFEST, (json.dumps(document, indent=1) + "\n").encode())


def read(folder: Path) -> Package:
    """The package in a folder; OSError or ValueError where there is none."""
    document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"it is no manifest of format {FORMAT}")
    version, sources, nvrtc, arch, kernels = map(document.get, ("fp8fn", "sources", "NVRTC", "arch", "kernels"))
    if not isinstance(version, str) or not isinstance(sources, str) or not isinstance(arch, str):
        raise ValueError("it lacks a version, a hash or an architecture")
    if not isinstance(kernels, dict):
        raise ValueError("it lacks its kernels")
    if not isinstance(nvrtc, list) or [type(number) for number in nvrtc] != [int, int]:
        raise ValueError("it lacks the version of NVRTC")
    return Package(folder, version, sources, (nvrtc[0], nvrtc[1]), arch, kernels)


@cache
def _installed() -> Package | None:
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        return None
    folder = Path(folders[0])
    try:
        return read(folder)
    except (OSError, ValueError) as error:
        warn_once(
            f"{folder / MANIFEST} can't be read ({error}), and NVRTC compiles the kernels: "
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
        )
        return None


def _warn_of_damage(package: Package, fault: str) -> None:
    warn_once(
        f"{fault}, and NVRTC compiles the kernel: "
        f"pip install --force-reinstall --no-deps {DISTRIBUTION}=={package.version}"
    )


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
