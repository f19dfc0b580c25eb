"""`python -m fp8fn aot`: compiles a model's kernels into the disk cache ahead of time; no GPU is needed.

For sm90 and each linear layer: its three products, in the configurations that the tables and the model choose, and the
quantizers of its input, weight and gradient, for training and for inference. For gfx950: all kernels in HIP, which
serve every shape. A process that runs the layer later finds them in FP8FN_CACHE_DIR (by default ~/.cache/fp8fn), which
may be copied from one machine to another: it takes files of its own user and of root that nobody else may write. Exit
status 1 where a kernel does not compile, or is not in the cache at the end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fp8fn.cli.tune import SUITES, sizes
from fp8fn.ops import code_cache, targets
from fp8fn.ops.cuda.quantize import quantize
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.cuda.runtime.nvrtc import CudaKernel
from fp8fn.ops.formats import short_name
from fp8fn.ops.hip import build, variants
from fp8fn.ops.layout import Block, empty_data, empty_scale, is_square, swap
from fp8fn.ops.recipe import Recipe, parse_recipe
from fp8fn.ops.scaled_mm import SCALED_MM
from fp8fn.ops.targets import Chip, Target, chip_of
from fp8fn.ops.tuning.problem import empty_product, linear_problems
from fp8fn.ops.tuning.table import SHIPPED

ARCHITECTURES: Final = ("sm90", "gfx950")
_INPUTS: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_Kernel = TypeVar("_Kernel")


def main(argv: Sequence[str]) -> int:
    """Compiles what the options name, and prints how many kernels there are and where; 1 where one was not kept."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (problem := (build if args.arch == "gfx950" else nvrtc).unavailable()) is not None:
        parser.error(problem)
    if importlib.util.find_spec("tqdm") is None:
        parser.error("needs tqdm: pip install tqdm")
    try:
        outcome = (_hip if args.arch == "gfx950" else _cuda)(parser, args)
    except (nvrtc.CompilationError, build.CompilationError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(outcome)
    if outcome.lost:
        print(
            f"{parser.prog}: {outcome.folder} does not keep kernels: set {code_cache.VARIABLE} to a folder that you "
            "can write and others can't",
            file=sys.stderr,
        )
    return int(outcome.lost > 0)


@dataclass(frozen=True)
class Outcome:
    """How many kernels were asked for, how many of them the cache had before and has now, and where it is."""

    what: str
    asked: int
    before: int
    kept: int
    folder: Path

    @property
    def lost(self) -> int:
        return self.asked - self.kept

    def __str__(self) -> str:
        counts = f"{self.asked} kernels, {self.asked - self.before} compiled now, {self.before} there before"
        return f"{self.what}:\n{counts}, {f'{self.lost} not kept ' if self.lost else ''}in {self.folder}"


def _hip(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Outcome:
    if args.shapes or args.suite or args.model:
        parser.error("--arch gfx950 compiles kernels that serve every shape: leave --shapes, --suite and --model out")
    kernels = variants.kernels(_INPUTS[args.dtype])
    what = f"every kernel in HIP for {args.arch}, with outputs in {args.dtype}"
    return _compile(what, kernels, build.compile_kernel, build.cache_path)


def _cuda(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Outcome:
    if not (args.shapes or args.suite or args.model):
        parser.error("one of the arguments --shapes --suite --model is required")
    try:
        shapes = args.shapes or (SUITES[args.suite] if args.suite else shapes_of_model(args.model))
        recipe = parse_recipe(args.recipe)
        chip, target = chip_and_target()
        kernels = kernels_of(shapes, recipe, _INPUTS[args.dtype], target, chip)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    what = f"{len(shapes)} layers, recipe {args.recipe}, for the {chip.name} of {chip.multiprocessors} multiprocessors"
    compile_ = partial(nvrtc.compile_kernel, arch=target.cubin)
    return _compile(what, kernels, compile_, partial(nvrtc.cache_path, arch=target.cubin))


def chip_and_target() -> tuple[Chip, Target]:
    """The GPU here, if it is of Hopper, else the first chip that a table is shipped for."""
    if torch.cuda.is_available():
        device = torch.device("cuda")
        target = targets.target_of(device)
        chip = chip_of(device, target)
        if target.name == "sm90" and chip is not None:
            return chip, target
    chip = next(iter(SHIPPED))
    return chip, Target("cuda", 90, 32, chip.multiprocessors)


def kernels_of(
    shapes: Sequence[tuple[int, ...]], recipe: Recipe, dtype: torch.dtype, target: Target, chip: Chip
) -> tuple[CudaKernel, ...]:
    """The kernels in CUDA C++ of layers `(M, N, K)`, each once; what Triton or PyTorch serves is no part of them."""
    found: dict[CudaKernel, None] = {}
    for m, n, k in shapes:
        for launch in (*_products(m, n, k, recipe, dtype, target, chip), *_quantizers(m, n, k, recipe, dtype, target)):
            found[launch.kernel] = None
    return tuple(found)


def _compile(
    what: str,
    kernels: Sequence[_Kernel],
    compile_: Callable[[_Kernel], object],
    path_of: Callable[[_Kernel], Path],
) -> Outcome:
    """Into the cache, with a bar. Compilers release Python's lock: one thread a processor.

    A kernel counts as kept when it can be read back, not when its compilation returned.
    """
    from tqdm import tqdm

    def compiled(kernel: _Kernel) -> tuple[bool, bool]:
        path = path_of(kernel)
        before = code_cache.read_whole(path) is not None
        if not before:
            compile_(kernel)
        return before, before or code_cache.read_whole(path) is not None

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, tqdm(total=len(kernels), unit="kernel") as bar:
        found = []
        for each in pool.map(compiled, kernels):
            found.append(each)
            bar.update()
    before, kept = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    folder = path_of(kernels[0]).parent if kernels else code_cache.cache_dir()
    return Outcome(what, len(kernels), before, kept, folder)


def shapes_of_model(name: str) -> tuple[tuple[int, int, int], ...]:
    """The `(M, N, K)` of the products that `backend="fp8fn"` substitutes in a model, each once.

    `name` is `module:callable`; the callable returns `(model, args)` or `(model, args, kwargs)`. The model runs once.
    """
    from fp8fn.lowering.explain import explain

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--model {name!r} is no module:callable such as train:example")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it, and the command `fp8fn` has not
    try:
        made: Any = getattr(importlib.import_module(module), attribute)()
    finally:
        sys.path.pop(0)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise TypeError(f"{name} returned {type(made).__name__}; it must return (model, args) or (model, args, kwargs)")
    model, args, kwargs = (*made, {})[:3]
    rows = explain(model, *args, show=False, **kwargs).rows
    # A product of groups has its own kernels, and their number of sizes.
    shapes = (row.shape for row in rows if row.reason is None)
    return tuple(dict.fromkeys((shape[0], shape[1], shape[2]) for shape in shapes if len(shape) == 3))


def _products(
    m: int, n: int, k: int, recipe: Recipe, dtype: torch.dtype, target: Target, chip: Chip
) -> Iterator[CudaLaunch]:
    for problem in linear_problems(m, n, k, recipe).values():
        product = empty_product(replace(problem, out_type=short_name(dtype)), "meta", target, chip)
        for launch in SCALED_MM.plan(product):
            if isinstance(launch, CudaLaunch):
                yield launch


def _quantizers(m: int, n: int, k: int, recipe: Recipe, dtype: torch.dtype, target: Target) -> Iterator[CudaLaunch]:
    """Of x, w and g for training, and of x and w for inference."""
    x, w, g = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (n, k), (m, n)))
    for tensor, block, fp8 in (
        (x, recipe.activation_block, recipe.activation_dtype),
        (w.mT, recipe.weight_block, recipe.weight_dtype),
        (g, recipe.gradient_block, recipe.gradient_dtype),
    ):
        element = fp8 or torch.float8_e4m3fn
        if quantize.accepts(tensor, block, element, target) is not None:
            continue
        outs = [_empty(tensor, of, element, recipe.scale, side) for of, side in _sides(block)]
        yield quantize.plan_quantize_both(tensor, outs[0], outs[1], is_square(block), recipe.scale, target)
        if tensor is not g:
            out = _empty(tensor, block, element, recipe.scale, None)
            yield quantize.plan_quantize(tensor, out, block, recipe.scale, target)


def _sides(block: Block) -> tuple[tuple[Block, bool], tuple[Block, bool]]:
    """The blocks of a dual quantization, each with whether its data is column-major: the row-major one first."""
    first = block if block[0] <= block[1] else swap(block)
    return (first, False), (swap(first), True)


def _empty(x: Tensor, block: Block, dtype: torch.dtype, scale: str, column_major: bool | None) -> quantize.Quantized:
    return quantize.Quantized(empty_data(x, block, dtype, column_major), empty_scale(x, block, scale, column_major))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8fn aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shapes", type=sizes, nargs="+", metavar="M,N,K", help="layers x (M, K) @ w (N, K)ᵀ")
    which.add_argument("--suite", choices=SUITES, help="the shapes of the benchmarks")
    which.add_argument(
        "--model", metavar="MODULE:CALLABLE", help="the layers of a model: the callable returns (model, args)"
    )
    parser.add_argument("--recipe", default="blockwise", help="by default %(default)s")
    parser.add_argument("--dtype", choices=_INPUTS, default="bfloat16", help="of the model (default: %(default)s)")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, default="sm90", help="by default %(default)s; gfx950 takes no shapes"
    )
    return parser
