"""Time to the first product of a process, by where its kernels come from: `python -m fp8fn bench cold`.

Three settings: an empty cache, in which NVRTC compiles each kernel; the cache that `aot` fills; and an empty cache
beside the distribution `fp8fn-cubins`. In each, new processes import PyTorch and fp8fn, start CUDA and make a layer's x
and w. Then the first forward without gradients is timed, until the GPU has its result, and after it the first training
step.

With `--device cpu` no kernel is loaded or started: the processes only get the machine code that the shipped table of
an H200 asks for, of the forward and then of all that the layer needs else.

Exit status 1 where a first product without a compilation takes 0.5 s or more on a GPU, or a kernel was compiled that
should have been there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fp8fn.bench.record import write
from fp8fn.bench.tables import markdown, provenance
from fp8fn.cli import options
from fp8fn.cli.environment import device_name
from fp8fn.cli.tune import sizes
from fp8fn.ops.code_cache import VARIABLE as CACHE_VARIABLE
from fp8fn.ops.cuda.runtime import nvrtc, packaged
from fp8fn.ops.recipe import parse_recipe

# Seconds of a first product whose kernels are there.
BAR: Final = 0.5
EMPTY: Final = "empty cache"
AOT: Final = "aot"
PACKAGE: Final = packaged.DISTRIBUTION
# Where the kernels of each setting come from.
ORIGINS: Final = {EMPTY: nvrtc.COMPILER, AOT: nvrtc.CACHE, PACKAGE: packaged.DISTRIBUTION}

# Prints seconds of the first product and of the first step, and the origin of each kernel where `--count` asks for it:
# the log costs time. Nothing is imported beforehand that a first call imports.
_HEAD: Final = """
import json, logging, sys, time
import torch
import fp8fn
shape, recipe, count = json.loads(sys.argv[1])
origins = []
class Origins(logging.Handler):
    def emit(self, record):
        if record.msg == "kernel %s comes from %s":
            origins.append(record.args[1])
if count:
    logging.getLogger("fp8fn").setLevel(logging.DEBUG)
    logging.getLogger("fp8fn").addHandler(Origins())
"""
_TAIL: Final = """
from fp8fn.ops.cuda.runtime import nvrtc, packaged
print(json.dumps([middle - start, end - middle, origins, packaged.describe(nvrtc.sources_hash())]))
"""
_ON_A_GPU: Final = """
m, n, k = shape
x, g = (torch.randn(m, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
w = torch.nn.Parameter(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
x.requires_grad_()
torch.cuda.synchronize()
start = time.perf_counter()
with torch.no_grad():
    fp8fn.linear(x, w, recipe=recipe)
torch.cuda.synchronize()
middle = time.perf_counter()
fp8fn.linear(x, w, recipe=recipe).backward(g)
torch.cuda.synchronize()
end = time.perf_counter()
"""
_ON_A_CPU: Final = """
from fp8fn.cli import aot, layer_kernels
from fp8fn.ops.cuda.runtime.nvrtc import compile_kernel
chip, target = aot.chip_and_target()
setting = layer_kernels.LayerSetting(fp8fn.ops.recipe.parse_recipe(recipe), torch.bfloat16, target, chip)
first = layer_kernels.first_product(shape, setting)
others = [kernel for kernel in layer_kernels.kernels_of([shape], setting) if kernel not in first]
start = time.perf_counter()
for kernel in first:
    compile_kernel(kernel, target.cubin)
middle = time.perf_counter()
for kernel in others:
    compile_kernel(kernel, target.cubin)
end = time.perf_counter()
"""


class ColdStart:
    """A layer and its recipe, on a GPU or a CPU; `cubins` is a folder that has the package `fp8fn_cubins`, or None."""

    def __init__(self, shape: Sequence[int], recipe: str, device: str, cubins: Path | None = None) -> None:
        self.shape, self.recipe, self.device, self.cubins = [*shape], recipe, device, cubins

    def environment(self, way: str, cache: Path) -> dict[str, str]:
        """The variables of a process."""
        found = {**os.environ, CACHE_VARIABLE: str(cache), packaged.VARIABLE: "1" if way == PACKAGE else "0"}
        if way == PACKAGE and self.cubins is not None:
            found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.cubins), os.environ.get("PYTHONPATH"))))
        return found

    def run(self, way: str, cache: Path, *, count: bool = False) -> list[Any]:
        """The text that a new process prints."""
        script = _HEAD + (_ON_A_GPU if self.device == "cuda" else _ON_A_CPU) + _TAIL
        command = [sys.executable, "-c", script, json.dumps([self.shape, self.recipe, count])]
        return list(json.loads(_output(command, self.environment(way, cache))))

    def fill(self, cache: Path) -> None:
        """Runs `aot` for the layer."""
        shape = ",".join(map(str, self.shape))
        command = [sys.executable, "-m", "fp8fn", "aot", "--shapes", shape, "--recipe", self.recipe]
        _output(command, self.environment(AOT, cache))


def measure(setting: ColdStart, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each process in each setting, and how many kernels came from where; or why a setting is missing.

    A first process of each setting counts. It also brings the files into the system's cache.
    """
    found: dict[str, dict[str, Any]] = {}
    for way in ORIGINS:
        with tempfile.TemporaryDirectory() as folder:
            filled = Path(folder, "filled")
            if way == AOT:
                setting.fill(filled)
            caches = [filled if way == AOT else Path(folder, str(number)) for number in range(rounds + 1)]
            *_, origins, package = setting.run(way, caches[0], count=True)
            if way == PACKAGE and PACKAGE not in origins:
                found[way] = {"unavailable": package}
                continue
            runs = [setting.run(way, cache) for cache in caches[1:]]
        first, step = ([run[place] for run in runs] for place in (0, 1))
        found[way] = {"first_s": first, "step_s": step, "kernels": dict(Counter(origins))}
    return found


def faults(results: Mapping[str, Any]) -> list[str]:
    """The faults of the figures."""
    found = []
    for way, row in results["ways"].items():
        if way == EMPTY or "unavailable" in row:
            continue
        if (compiled := row["kernels"].get(nvrtc.COMPILER, 0)) > 0:
            found.append(f"{way}: {compiled} kernels were compiled")
        if results["type"] == "cuda" and statistics.median(row["first_s"]) >= BAR:
            found.append(f"{way}: the first product takes {BAR} s or more")
    return found


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The cells of each setting."""
    found = []
    for way, row in results["ways"].items():
        if "unavailable" in row:
            found.append([way, row["unavailable"], "", "", ""])
            continue
        first, step = (f"{statistics.median(row[key]):.3f}" for key in ("first_s", "step_s"))
        kernels = ", ".join(f"{count} from {origin}" for origin, count in sorted(row["kernels"].items()))
        bar = "" if way == EMPTY or results["type"] != "cuda" else f"{BAR:g}"
        found.append([way, first, bar, step, kernels])
    return found


def headers(results: Mapping[str, Any]) -> tuple[str, ...]:
    if results["type"] == "cuda":
        return "setting", "first product, s", "bar, s", "first training step after it, s", "kernels"
    return "setting", "machine code of the first product, s", "bar, s", "of the layer's other kernels, s", "kernels"


def table(run: dict[str, Any]) -> str:
    """The settings as a table in Markdown, for the documentation."""
    found = run["results"]
    count = max((len(row["first_s"]) for row in found["ways"].values() if "first_s" in row), default=0)
    layer = f"Layer {'x'.join(map(str, found['shape']))}, {found['recipe']}; medians of {count} processes"
    return "\n".join([markdown(rows(found), headers(found)), "", f"{layer}. {provenance(run)}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a bar is exceeded or a kernel is missing."""
    parser = options.parser_of(
        "bench cold",
        __doc__,
        "--json cold.json",
        "--shape 8192,28672,4096 --recipe tensorwise --cubins cubins",
    )
    parser.add_argument(
        "--shape", type=sizes, default=(4096, 4096, 4096), metavar="M,N,K", help="the layer (default: 4096,4096,4096)"
    )
    parser.add_argument("--recipe", default="blockwise", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=options.positive, default=5, metavar="R", help="processes of each setting (default: 5)"
    )
    parser.add_argument(
        "--cubins",
        type=Path,
        metavar="FOLDER",
        help="a folder that has fp8fn_cubins, where that is not installed",
    )
    options.add_device(parser)
    options.add_json(parser)
    args = parser.parse_args(argv)
    options.check_machine(parser, args.device, ("tabulate", "tqdm"))
    if (problem := nvrtc.unavailable()) is not None:
        parser.error(problem)
    try:
        recipe = parse_recipe(args.recipe).key
    except ValueError as error:
        parser.error(str(error))
    if args.cubins is not None and not (args.cubins / packaged.PACKAGE).is_dir():
        parser.error(f"--cubins {args.cubins} has no folder {packaged.PACKAGE}")
    setting = ColdStart(args.shape, recipe, args.device.type, args.cubins and args.cubins.resolve())
    head = {"device": device_name(args.device), "type": setting.device, "shape": setting.shape, "recipe": recipe}
    results: dict[str, Any] = {**head, "ways": measure(setting, args.rounds)}
    print(markdown(rows(results), headers(results)))
    if args.json:
        write(args.json, "cold", results)
    for fault in (found := faults(results)):
        print(fault, file=sys.stderr)
    return int(bool(found))


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"a process failed:\n{process.stderr[-4000:]}")
    return process.stdout
