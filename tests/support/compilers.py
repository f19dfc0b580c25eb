"""Offline compilers: whether NVRTC is there, and a kernel's SASS, spills and shared memory."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest

from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.hip import build
from fp8fn.ops.launch import Resources
from fp8fn.ops.targets import Target
from support import build_cache

SHARED_LIMIT: Final = 227 << 10

needs_hip_compiler = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


def assert_well_compiled(log: str, shared: int) -> None:
    """No registers in memory, no wgmma that waits for the one before it (C7510 and its like), and it fits."""
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log) == ["0", "0", "0"], log
    assert not re.search(r"\bC75\d\d\b", log), log
    assert shared <= SHARED_LIMIT


def instructions(cubin: bytes, folder: Path) -> list[tuple[int, str]]:
    """Address and text of each SASS instruction."""
    from triton import knobs

    def disassemble() -> bytes:
        file = folder / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool.path, "-sass", file], capture_output=True, check=True).stdout

    tool = knobs.nvidia.cuobjdump
    text = build_cache.kept("sass", (cubin, tool.version), disassemble).decode()
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)
    return [(int(address, 16), instruction.strip()) for address, instruction in found]


# Shared memory a program may have, in bytes.
SHARED = {
    "sm89": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "sm103": 227 << 10, "sm120": 99 << 10,
    "gfx942": 64 << 10, "gfx950": 160 << 10,
}  # fmt: skip


def skip_frames_of_calls(target: Target) -> None:
    """Skips a test of spills of kernels with TMA where Triton's older compiler puts a call's argument on the stack."""
    if target.arch == 120 and tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 7):
        pytest.skip("Triton 3.6 gives kernels with TMA on sm120 a frame of 8 bytes, for a call in a branch")


def assert_no_spills(used: Resources, target: Target) -> None:
    """No registers in memory, and it fits. `FP8FN_TEST_SPILLS=allowed` is for other releases than the pinned Triton."""
    if os.environ.get("FP8FN_TEST_SPILLS") != "allowed":
        assert (used.spills, used.scratch) == (0, 0), used
    assert used.shared <= SHARED[target.name], used
