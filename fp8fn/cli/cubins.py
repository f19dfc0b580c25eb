"""Writes the package of the distribution `fp8fn-cubins`: `python -m fp8fn aot --suite llm84 --out cubins/fp8fn_cubins`.

The package has the kernels that layers launch on the chips with a shipped table, with and without a bias, compiled or
in eager mode. The user's own tables and cache are not read, so that the package depends on the sources and on NVRTC
only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from fp8fn.cli.layer_kernels import LayerSetting, Shape, kernels_of
from fp8fn.cli.progress import in_threads
from fp8fn.ops import targets
from fp8fn.ops.cuda.gemm import cublaslt
from fp8fn.ops.cuda.runtime import nvrtc, packaged
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.cuda.runtime.packaged import Package
from fp8fn.ops.recipe import MXFP8, PRESETS, Recipe
from fp8fn.ops.tuning import table
from fp8fn.version import __version__

# Hopper multiplies no MX-FP8 in CUDA C++ but for few rows.
RECIPES: Final = tuple(preset for preset in PRESETS.values() if preset != MXFP8)


@dataclass(frozen=True)
class Written:
    """The contents of a package: the count of kernels by entry, and their bytes."""

    package: Package
    kernels: Counter[str]
    bytes: int

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {entry}" for entry, count in sorted(self.kernels.items()))
        return (
            f"{packaged.DISTRIBUTION} {self.package.version} in {self.package.folder}:\n"
            f"{self.kernels.total()} kernels ({counts}), {self.bytes / 1e6:.2f} MB before the wheel's compression"
        )


def shipped_kernels(shapes: Sequence[Shape], recipes: Sequence[Recipe], dtype: torch.dtype) -> tuple[CudaKernel, ...]:
    """The kernels of layers by each recipe on each chip that has a shipped table, each once.

    Where a table says that cuBLASLt is faster, the kernel is there for the builds of PyTorch whose cuBLASLt does not
    take the product.
    """
    found: dict[CudaKernel, None] = {}
    with table.shipped_only(), cublaslt.left_out():
        for chip in table.SHIPPED:
            target = replace(targets.SM90, multiprocessors=chip.multiprocessors)
            for recipe in recipes:
                setting = LayerSetting(recipe, dtype, target, chip, bias=True, fused=True)
                found |= dict.fromkeys(kernels_of(shapes, setting))
    return tuple(found)


def write(folder: Path, shapes: Sequence[Shape], recipes: Sequence[Recipe], dtype: torch.dtype) -> Written:
    """Compiles the kernels of layers, and writes them with their manifest into the folder.

    ValueError where the folder has other cubins.
    """
    packaged.check_folder(folder)
    kernels, arch = shipped_kernels(shapes, recipes, dtype), targets.SM90.cubin
    compiled = in_threads(lambda kernel: nvrtc.compile_anew(kernel, arch).cubin, kernels, "kernel")
    cubins = {nvrtc.cubin_name(kernel, arch): cubin for kernel, cubin in zip(kernels, compiled, strict=True)}
    package = Package(folder, __version__, nvrtc.sources_hash(), nvrtc.version(), arch, dict.fromkeys(cubins, ""))
    packaged.write(package, cubins)
    return Written(packaged.read(folder), Counter(kernel.entry for kernel in kernels), sum(map(len, compiled)))
