"""`python -m fp8fn aot`: compiles a model's kernels into the disk cache ahead of time, with no GPU.

For Hopper, each linear layer has three products, in the configurations that the tables and the model choose, and the
quantizers of its input, weight and gradient, for training and for inference. The tables are those of this machine's
GPU, or of the product that `--arch` names (h100, h200 and others), by default the H200. `--bias` adds the forward with
a bias, `--fused` the quantizers that compiled models launch, which also compute a norm or an MLP's activation. For
gfx950 without layers, all HIP kernels are compiled: they serve every shape.

A process that runs the layer later finds the kernels in FP8FN_CACHE_DIR (default: ~/.cache/fp8fn). The folder may be
copied to another machine. A process takes kernels only from files of its own user or of root that nobody else may
write. Exit status 1 where a kernel does not compile, or is not in the cache at the end.

For other processors (b200, rtx5090, l40s, mi300x and others) the layers' kernels in Triton are compiled into Triton's
own cache, TRITON_CACHE_DIR (default: ~/.triton/cache). A process finds them there with the same build of Triton, the
folder at the same path. Tables that `tune` has made count where the machine has that GPU and --arch names it as sm100.

`--out FOLDER` leaves the cache alone and writes the package of the distribution fp8fn-cubins: the kernels of the
layers, with `--bias` and `--fused`, by every recipe and shipped table.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from fp8fn.cli import cubins, options
from fp8fn.cli.layer_kernels import LayerSetting, Shape, kernels_of, launches_of
from fp8fn.cli.options import parser_of
from fp8fn.cli.progress import in_threads
from fp8fn.cli.tune import SUITES, sizes
from fp8fn.ops import code_cache, targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.hip import build, variants
from fp8fn.ops.recipe import parse_recipe
from fp8fn.ops.targets import Chip, Target, chip_of
from fp8fn.ops.tuning.rates import NAMED
from fp8fn.ops.tuning.table import SHIPPED

_INPUTS: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_Kernel = TypeVar("_Kernel")


def main(argv: Sequence[str]) -> int:
    """Compile the kernels that the options name, and print where they are; return 1 where a kernel was not kept."""
    parser = _parser()
    args = parser.parse_args(argv)
    layers = bool(args.shapes or args.suite or args.model)
    named = targets.named_target(args.arch)
    assert named is not None
    if targets.hopper_fault(named[1]) is None:
        way, problem = _cuda, nvrtc.unavailable()
    elif named[1].name == "gfx950" and not layers:
        way, problem = _hip, build.unavailable()
    else:
        way, problem = _triton, None if importlib.util.find_spec("triton") else "needs Triton: pip install triton"
    if problem is not None:
        parser.error(problem)
    if not layers and way is not _hip:
        parser.error("one of the arguments --shapes --suite --model is required")
    if importlib.util.find_spec("tqdm") is None:
        parser.error("needs tqdm: pip install tqdm")
    try:
        outcome = way(parser, args)
    except (nvrtc.CompilationError, build.CompilationError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(outcome)
    if isinstance(outcome, cubins.Written):
        return 0
    if outcome.lost:
        print(
            f"{parser.prog}: {outcome.folder} does not keep kernels: set {code_cache.VARIABLE} to a folder that you "
            "can write and others can't",
            file=sys.stderr,
        )
    return int(outcome.lost > 0)


@dataclass(frozen=True)
class Outcome:
    """Numbers of kernels: asked for, in the cache before, in the cache now; and the cache's folder."""

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


def _hip(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Outcome | cubins.Written:
    if args.bias or args.fused or args.out:
        parser.error(
            "--arch gfx950 without layers compiles the kernels in HIP, which serve every shape: leave --bias, --fused "
            "and --out out, or name layers"
        )
    kernels = variants.kernels(_INPUTS[args.dtype])
    what = f"every kernel in HIP for gfx950, with outputs in {args.dtype}"
    return _compile(what, kernels, build.compile_kernel, build.cache_path)


def _cuda(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Outcome | cubins.Written:
    try:
        shapes = _shapes(args)
        if args.out:
            recipes = cubins.RECIPES if args.recipe is None else (parse_recipe(args.recipe),)
            return cubins.write(args.out, shapes, recipes, _INPUTS[args.dtype])
        setting = _setting(args)
        kernels = kernels_of(shapes, setting)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    arch = setting.target.cubin
    compile_ = partial(nvrtc.compile_into_cache, arch=arch)
    return _compile(_what(shapes, setting), kernels, compile_, partial(nvrtc.cache_path, arch=arch))


def _triton(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Outcome | cubins.Written:
    """Compile layers' kernels into Triton's cache; one that is there was compiled before."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    from fp8fn.ops.triton.launch import TritonLaunch

    if args.out:
        parser.error("--out writes kernels for Hopper alone")
    try:
        shapes, setting = _shapes(args), _setting(args)
        launches = [launch for launch in launches_of(shapes, setting) if isinstance(launch, TritonLaunch)]
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    folder = Path(knobs.cache.dir)
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def compiled(launch: TritonLaunch) -> Path:
        return Path(get_cache_manager(launch.compile(setting.target).hash).cache_dir)

    found = set(in_threads(compiled, launches, "launch", threads=1))
    before = sum(path.name in there for path in found)
    kept = sum(any(path.glob("*.json")) for path in found)
    return Outcome(_what(shapes, setting), len(found), before, kept, folder)


def _shapes(args: argparse.Namespace) -> Sequence[Shape]:
    return args.shapes or (SUITES[args.suite] if args.suite else shapes_of_model(args.model))


def _setting(args: argparse.Namespace) -> LayerSetting:
    chip, target = chip_and_target(args.arch)
    recipe = parse_recipe(args.recipe or "blockwise")
    return LayerSetting(recipe, _INPUTS[args.dtype], target, chip, args.bias, args.fused)


def _what(shapes: Sequence[Shape], setting: LayerSetting) -> str:
    chip = setting.chip
    return (
        f"{len(shapes)} layers, recipe {setting.recipe.key}, for the {chip.name} of {chip.multiprocessors} "
        "multiprocessors"
    )


def chip_and_target(processor: str = "sm90") -> tuple[Chip, Target]:
    """The chip that a name stands for; for an architecture this machine's GPU, else one that has it.

    For "sm90" that is the first with a shipped table.
    """
    named = targets.named_target(processor)
    assert named is not None
    product, target = named
    if product != target.name:
        return NAMED.get(product, Chip(product, target.cores)), target
    if torch.cuda.is_available():
        device = torch.device("cuda")
        found = targets.target_of(device)
        chip = chip_of(device, found)
        if found.name == target.name and chip is not None:
            return chip, found
    chip = next(iter(SHIPPED)) if targets.hopper_fault(target) is None else Chip(product, target.cores)
    return chip, replace(target, multiprocessors=chip.multiprocessors)


def _compile(
    what: str,
    kernels: Sequence[_Kernel],
    compile_: Callable[[_Kernel], object],
    path_of: Callable[[_Kernel], Path],
) -> Outcome:
    """Compile kernels into the cache, with a progress bar.

    A kernel counts as kept when it can be read back from the cache, not when its compilation returns.
    """

    def compiled(kernel: _Kernel) -> tuple[bool, bool]:
        path = path_of(kernel)
        before = code_cache.read_whole(path) is not None
        if not before:
            compile_(kernel)
        return before, before or code_cache.read_whole(path) is not None

    found = in_threads(compiled, kernels, "kernel")
    before, kept = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    folder = path_of(kernels[0]).parent if kernels else code_cache.cache_dir()
    return Outcome(what, len(kernels), before, kept, folder)


def shapes_of_model(name: str) -> tuple[Shape, ...]:
    """The `(M, N, K)` of the products that `backend="fp8fn"` substitutes in a model, each once.

    `name` is `module:callable`. The callable returns `(model, args)` or `(model, args, kwargs)`, and the model runs
    once.
    """
    from fp8fn.lowering.explain import explain

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--model {name!r} is no module:callable such as train:example")
    sys.path.insert(0, str(Path.cwd()))  # `python -m` has this entry, the script `fp8fn` does not
    try:
        made: Any = getattr(importlib.import_module(module), attribute)()
    finally:
        sys.path.pop(0)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise TypeError(f"{name} returned {type(made).__name__}; it must return (model, args) or (model, args, kwargs)")
    model, args, kwargs = (*made, {})[:3]
    rows = explain(model, *args, show=False, **kwargs).rows
    # A grouped product has four sizes, and kernels that are not compiled here.
    shapes = (row.shape for row in rows if row.reason is None)
    return tuple(dict.fromkeys((shape[0], shape[1], shape[2]) for shape in shapes if len(shape) == 3))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "aot",
        __doc__,
        "--shapes 8192,6144,4096",
        "--suite llm84 --arch h100",
        "--suite llm84 --out cubins/fp8fn_cubins",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shapes", type=sizes, nargs="+", metavar="M,N,K", help="layers x (M, K) @ w (N, K)ᵀ")
    which.add_argument("--suite", choices=SUITES, help="the shapes of the benchmarks")
    which.add_argument(
        "--model", metavar="MODULE:CALLABLE", help="the layers of a model; the callable returns (model, args)"
    )
    parser.add_argument("--recipe", help="recipe of the products (default: blockwise; with --out all that are shipped)")
    parser.add_argument("--bias", action="store_true", help="also the forward with a bias")
    parser.add_argument("--fused", action="store_true", help="also the fused quantizers of compiled models")
    parser.add_argument(
        "--out", type=options.output_folder, metavar="FOLDER", help="write the package of fp8fn-cubins into FOLDER"
    )
    parser.add_argument("--dtype", choices=_INPUTS, default="bfloat16", help="the model's dtype (default: %(default)s)")
    parser.add_argument(
        "--arch",
        type=_processor,
        default="sm90",
        metavar="NAME",
        help="sm90 (the default) or another architecture, or a product such as h100, b200 or mi300x",
    )
    return parser


def _processor(text: str) -> str:
    if targets.named_target(text) is None:
        known = sorted({target.name for target, _ in targets.PRODUCTS.values()})
        raise argparse.ArgumentTypeError(
            f"{text!r} is no processor to compile for; choose {', '.join(known)}, or a product such as h100 or b200"
        )
    return text
