"""Versions, devices and the kernels that serve each device: `python -m fp8fn env`.

With `--arch NAME` it names the kernels that serve another processor, which need not be here.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from fp8fn.cli.options import ARCHS, arch, parser_of
from fp8fn.ops.code_cache import cache_dir
from fp8fn.ops.cuda.runtime import nvrtc, packaged
from fp8fn.ops.formats import short_name
from fp8fn.ops.hip import build, envelope
from fp8fn.ops.targets import BY_TMA, Target, check_supported, hopper_fault, named_target, native_e4m3, target_of
from fp8fn.version import __version__


def describe(name: str | None = None) -> dict[str, str]:
    """Versions and tools, then the lines of the CPU and of each GPU, or of the processor that is named, all as text."""
    lines = {
        "fp8fn": __version__,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _triton_version() or "not installed",
        "CUDA": torch.version.cuda or "none",
        "ROCm": torch.version.hip or "none",
        "C++ compiler": cpp_compiler() or "not found",
        packaged.DISTRIBUTION: packaged.describe(nvrtc.sources_hash()),
        "kernel cache": kernel_cache(),
    }
    if name is not None and (named := named_target(name)) is not None:
        return lines | _kernels(name, named[1])
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        target = target_of(device)
        lines[f"{device} device"] = device_name(device)
        lines |= _kernels(str(device), target, device)
    return lines


def _kernels(name: str, target: Target, device: torch.device | None = None) -> dict[str, str]:
    return {
        f"{name} arch": target.name,
        f"{name} kernels": kernel_family(target, device),
        f"{name} native e4m3": f"float8_{short_name(native_e4m3(target))}",
    }


def device_name(device: torch.device) -> str:
    """The device's product name, as far as the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = [line for line in _cpu_information() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def kernel_family(target: Target, device: torch.device | None = None) -> str:
    """The kernels that serve a target, or why there are none."""
    if target.backend == "cpu":
        return "reference (PyTorch)"
    try:
        check_supported(target, device)
    except ValueError as reason:
        return f"none: {reason}"
    if _triton_version() is None:
        return "none: Triton is not installed"
    if target.name == envelope.ARCH:
        absent = build.unavailable()
        hip = "HIP for MX products of few rows" if absent is None else f"none in HIP: {absent}"
        return f"Triton, pointers ({hip})"
    if hopper_fault(target):
        return f"Triton, {'TMA descriptors' if target.arch in BY_TMA else 'pointers'}"
    missing = nvrtc.unavailable()
    if missing is not None:
        return f"Triton, TMA descriptors (none in CUDA C++: {missing})"
    return f"CUDA C++ by NVRTC {'.'.join(map(str, nvrtc.version()))}"


def kernel_cache() -> str:
    """The folders of machine code that this machine compiled, and how many kernels are in each."""
    counts = [(cache_dir() / "cubin", "*.cubin"), (cache_dir() / "hip", "*.hsaco")]
    lines = [f"{folder}, {sum(1 for _ in folder.glob(pattern))} kernels" for folder, pattern in counts]
    return "; ".join(lines if counts[1][0].is_dir() else lines[:1])


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that Inductor uses for CPU code, or None."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual))


def missing_for_inductor() -> str | None:
    """A sentence about what Inductor needs to build CPU code and does not find, or None."""
    if cpp_compiler() is None:
        return (
            "torch.compile on a CPU needs a C++ compiler, and none was found: install one "
            "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install; "
            "Windows: the Visual Studio Build Tools), or name it in the environment variable CXX"
        )
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        return (
            f"torch.compile on a CPU needs Python's headers, and {headers} does not exist: install them "
            f"(Debian, Ubuntu: apt install python{sys.version_info.major}.{sys.version_info.minor}-dev; "
            "Fedora: dnf install python3-devel)"
        )
    return None


def main(argv: Sequence[str]) -> int:
    """Print `describe()`, one line each."""
    parser = parser_of("env", __doc__, "", "--arch mi355x")
    parser.add_argument("--arch", type=arch, metavar="NAME", help=f"a processor: {', '.join(ARCHS)}, or a product")
    lines = describe(parser.parse_args(argv).arch)
    width = max(map(len, lines))
    for key, value in lines.items():
        print(f"{key:<{width}}  {value}")
    return 0


def _triton_version() -> str | None:
    # The module knows its version. The distribution has another name with ROCm's torch.
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _cpu_information() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
