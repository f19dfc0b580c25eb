"""`python -m fp8fn isa`: what every kernel compiles to for AMD GPUs, read offline, with no GPU.

For each kernel of an op: matrix instructions, loads and stores by width, registers, spills, LDS, waves in a SIMD, the
cycles of one step along K by unit, and what bounds the product. Cycles and bounds are modelled from the instructions'
rates (`fp8fn/ops/tuning/amd_model.py`), never measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fp8fn.bench.shapes import LLM84
from fp8fn.cli.options import output_file, parser_of
from fp8fn.cli.tune import sizes
from fp8fn.ops import tuning
from fp8fn.ops.layout import WHOLE, Block, empty_scale
from fp8fn.ops.operands import Quantization, Quantized, ScaledProduct
from fp8fn.ops.targets import GFX942, GFX950, Target, named_target, native_e4m3
from fp8fn.ops.triton.launch import TritonLaunch, takes_architectures
from fp8fn.ops.tuning.amd_isa import Assembly, Mix, parse
from fp8fn.ops.tuning.amd_model import (
    PROCESSORS,
    Kernel,
    Processor,
    cost_of,
    cycles,
    groups_per_cu,
    kernel_of,
    waves_per_simd,
)
from fp8fn.ops.tuning.tile_space import LAYOUTS as PRODUCTS
from fp8fn.ops.tuning.tile_space import TileProblem
from fp8fn.ops.tuning.weight import WeightProblem
from fp8fn.version import __version__

TARGETS: Final[Mapping[str, Target]] = {"gfx942": GFX942, "gfx950": GFX950}
SHAPE: Final = (4096, 4096, 4096)
_EXPERTS: Final = 8
NEEDS_TRITON: Final = "needs Triton, whose compiler writes the machine code: pip install triton (on Linux)"

_QUANTIZED: Final[tuple[Block, ...]] = ((1, 128), (128, 1), (128, 128), (1, WHOLE), (WHOLE, 1), (WHOLE, WHOLE), (1, 32))


def main(argv: Sequence[str]) -> int:
    """Print the figures of the ops that the options name. With --write-tables, write the tables of ops/tuning."""
    parser = _parser()
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        parser.error(NEEDS_TRITON)
    if args.write_tables:
        for arch in architectures(parser, args.arch):
            path = Path(tuning.__path__[0]) / "tables" / f"amd_{arch}.json"
            write_table(path, arch)
            print(f"wrote {path}")
        return 0
    target = TARGETS[args.arch or "gfx950"]
    try:
        other = None if args.compare is None else _config_of(args.compare)
    except ValueError as error:
        parser.error(f"--compare: {error}")
    ops = args.op or tuple(OPS)
    if other is not None and not set(ops) <= set(PRODUCTS):
        if args.op:
            parser.error(f"--compare is for the products {', '.join(PRODUCTS)}; leave out --op, or name one of them")
        ops = tuple(PRODUCTS)
    found = {}
    for op in ops:
        launches = OPS[op](target, *args.shape)
        reports = [figures(launch) for launch in launches]
        columns = [reports]
        if other is not None:
            columns.append([figures(product_launch(op, *of_layer(op, *args.shape), target, other))])
        where = f"{target.name} ({PROCESSORS[target.name].name})"
        print(f"{op}, {','.join(map(str, args.shape))}, {where}; cycles are modelled")
        shown = text(columns, ("chosen", args.compare) if other is not None else ())
        print(shown or "no kernel in Triton: kernels in HIP serve this shape", end="\n\n", flush=True)
        found[op] = reports
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def figures(launch: TritonLaunch) -> dict[str, Any]:
    """The figures of a launch by name, as they are printed and written to JSON. Compiles the launch."""
    processor = PROCESSORS[launch.target.name]
    found = assembly(launch)
    warps = int(launch.options["num_warps"])
    waves = waves_per_simd(found.vgprs, found.lds, warps, processor)
    report: dict[str, Any] = {
        "kernel": launch.name,
        "configuration": launch.describe(),
        "matrix": {matrix.name: count for matrix, count in found.whole.matrix.items()},
        "loads": _widths(found.whole, "load"),
        "stores": _widths(found.whole, "store"),
        "LDS instructions": found.whole.count("ds_"),
        "v_accvgpr": found.whole.count("v_accvgpr"),
        "VGPR": found.vgprs,
        "AGPR": found.agprs,
        "SGPR": found.sgprs,
        "spills": found.spills,
        "scratch": found.scratch,
        "LDS bytes": found.lds,
        "waves a SIMD": waves,
    }
    if found.loop.operations and {"BM", "BN", "BK"} <= launch.constexprs.keys():
        bm, bn, bk = (int(launch.constexprs[size]) for size in ("BM", "BN", "BK"))
        kernel = kernel_of(found, bm, bn, bk, warps, processor)
        report |= _step(kernel, found, processor)
        report |= _intensity(launch, kernel, processor)
    else:
        units = cycles(cost_of(found.whole, processor), warps, max(waves * 4 // warps, 1))
        report["cycles of a program"] = {unit: round(count) for unit, count in units.items() if count}
    return report


def assembly(launch: TritonLaunch) -> Assembly:
    """The machine code of a launch for its own target."""
    compiled = launch.compile()
    return parse(compiled.asm["amdgcn"], int(compiled.metadata.shared))


def _widths(mix: Mix, direction: str) -> dict[str, int]:
    return {f"{width} B": count for width, count in mix.widths(direction).items()}


def _step(kernel: Kernel, found: Assembly, processor: Processor) -> dict[str, Any]:
    """Cycles of one K tile on a CU by unit, the unit that bounds them, and the share of the peak that it allows."""
    units = cycles(kernel.step, kernel.warps, groups_per_cu(kernel, processor))
    largest = max(units, key=lambda unit: units[unit])
    fastest = max(processor.rates[matrix.type] for matrix in found.loop.matrix)
    peak = kernel.operations / (4 * fastest)
    return {
        "masks in the loop": found.loop.count("v_cmp") + found.loop.count("v_cndmask"),
        "cycles a step": {unit: round(count) for unit, count in units.items()},
        "bound of a step": largest,
        "% of the peak": round(100 * peak / units[largest], 1),
        "peak, TFLOP/s": round(4 * fastest * processor.cus * processor.hertz / 1e12),
    }


def _intensity(launch: TritonLaunch, kernel: Kernel, processor: Processor) -> dict[str, Any]:
    """Operations per byte that a tile loads and that the whole product moves, and the bound by HBM."""
    m, n, k = (int(launch.args[size]) for size in ("M", "N", "K"))  # type: ignore[arg-type]
    moved = 0
    for arg in launch.args.values():
        if isinstance(arg, Tensor):
            moved += arg.numel() * arg.element_size()
    operations = 2.0 * m * n * k
    tile = kernel.operations / ((kernel.bm + kernel.bn) * kernel.bk)
    return {
        "operations a byte": {"tile": round(tile), "product": round(operations / moved)},
        "HBM allows, TFLOP/s": round(operations / moved * processor.hbm / 1e12),
    }


def product_launch(product: str, m: int, n: int, k: int, target: Target, config: Any = None) -> TritonLaunch:
    """A scaled product of `PRODUCTS` on meta tensors, in the chosen configuration unless one is given."""
    from fp8fn.ops.triton.scaled_mm import plan_scaled_mm

    return plan_scaled_mm(TileProblem(product, m, n, k, target).product(), config)[0]


def _grouped(target: Target, m: int, n: int, k: int) -> list[TritonLaunch]:
    """The grouped product over the rows of `m` tokens in 8 groups, and the one along K over the same tokens."""
    from fp8fn.ops.triton.scaled_grouped_mm import plan_scaled_grouped_mm
    from fp8fn.ops.tuning.grouped_mm_table import GroupsProblem

    rows = GroupsProblem("rows", m, n, k, _EXPERTS, target)
    wgrad = GroupsProblem("tokens", n, k, m, _EXPERTS, target)
    return [launch for problem in (rows, wgrad) for launch in plan_scaled_grouped_mm(problem.product())]


def _a16w8(target: Target, m: int, n: int, k: int) -> list[TritonLaunch]:
    from fp8fn.ops.triton.mm_a16w8 import configure, plan_mm_a16w8

    product = WeightProblem(m, n, k, cores=target.cores, target=target).product()
    return list(plan_mm_a16w8(product, configure(product)))


def _mx(target: Target, m: int, n: int, k: int) -> list[TritonLaunch]:
    """The launches of an MX product that Triton serves. MX needs OCP's FP8 types, which gfx942 lacks."""
    from fp8fn.ops.mx_mm import MX_MM

    a = torch.empty(m, k, dtype=native_e4m3(target), device="meta")
    b = torch.empty(n, k, dtype=native_e4m3(target), device="meta").mT
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    left = Quantized(a, empty_scale(a, (1, 32), "e8m0"), (1, 32))
    right = Quantized(b, empty_scale(b, (32, 1), "e8m0"), (32, 1))
    launches = MX_MM.plan(ScaledProduct(a=left, b=right, out=out, target=target))
    return [launch for launch in launches if isinstance(launch, TritonLaunch)]


def _quantization(target: Target, m: int, k: int, block: Block, **rest: Any) -> Quantization:
    x, scale = torch.empty(m, k, dtype=torch.bfloat16, device="meta"), "e8m0" if 32 in block else "fp32"
    return Quantization(x=x, block=block, dtype=native_e4m3(target), scale=scale, target=target, **rest)


def _quantize(target: Target, m: int, n: int, k: int) -> list[TritonLaunch]:
    from fp8fn.ops.triton.quantize import plan_quantize

    return [launch for block in _QUANTIZED for launch in plan_quantize(_quantization(target, m, k, block))]


def _quantize_dual(target: Target, m: int, n: int, k: int) -> list[TritonLaunch]:
    from fp8fn.ops.triton.quantize_dual import plan_quantize_dual

    return [*plan_quantize_dual(_quantization(target, m, k, (1, 128), dual=True))]


def _quantize_grouped(target: Target, m: int, n: int, k: int) -> list[TritonLaunch]:
    from fp8fn.ops.triton.quantize_grouped import plan_quantize_grouped, plan_quantize_grouped_dual

    offsets = torch.empty(_EXPERTS, dtype=torch.int32, device="meta")
    one = _quantization(target, m, k, (128, 1), offsets=offsets)
    dual = _quantization(target, m, k, (1, 128), offsets=offsets, dual=True)
    return [*plan_quantize_grouped(one), *plan_quantize_grouped_dual(dual)]


def of_layer(product: str, m: int, n: int, k: int) -> tuple[int, int, int]:
    """M, N, K of a product in the layer `x (m, k) @ w (n, k)ᵀ`."""
    return {"dgrad": (m, k, n), "wgrad": (n, k, m), "TN": (n, k, m)}.get(product, (m, n, k))


def _product(product: str) -> Callable[[Target, int, int, int], list[TritonLaunch]]:
    return lambda target, m, n, k: [product_launch(product, *of_layer(product, m, n, k), target)]


# Functions that return the launches of an op in the layer `x (M, K) @ w (N, K)ᵀ`.
OPS: Final[Mapping[str, Callable[[Target, int, int, int], list[TritonLaunch]]]] = {
    **{product: _product(product) for product in PRODUCTS},
    "grouped": _grouped,
    "a16w8": _a16w8,
    "mx": _mx,
    "quantize": _quantize,
    "quantize_dual": _quantize_dual,
    "quantize_grouped": _quantize_grouped,
}


def text(columns: Sequence[Sequence[Mapping[str, Any]]], headings: Sequence[str] = ()) -> str:
    """Reports, one below another, in one column or in several columns side by side."""
    blocks = []
    for reports in zip(*columns, strict=True):
        names = list(dict.fromkeys(name for report in reports for name in report))
        lines = [("", *headings)] if headings else []
        lines += [(name, *(_cell(report.get(name, "")) for report in reports)) for name in names]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        if headings:
            widths = [min(width, 60) for width in widths]
        for line in lines:
            blocks += _rows(line, widths)
        blocks.append("")
    return "\n".join(blocks).rstrip()


def _rows(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """A row of a table, wrapped onto as many lines as its longest cell takes."""
    parts = [textwrap.wrap(cell, max(width, 1)) or [""] for cell, width in zip(cells, widths, strict=True)]
    height = max(map(len, parts))
    padded = [part + [""] * (height - len(part)) for part in parts]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*padded, strict=True)]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    return str(value)


def write_table(path: Path, arch: str) -> None:
    """Compile the candidates of an architecture, and write its table: their figures, then the 84 layers' choices."""
    from fp8fn.ops.tuning import amd

    target, processor = TARGETS[arch], PROCESSORS[arch]
    kernels = []
    for product, names in amd.CANDIDATES[arch].items():
        for name in names:
            launch = product_launch(product, *SHAPE, target, amd.config_of(name))
            found = assembly(launch)
            if found.spills or found.scratch:
                raise RuntimeError(f"{product} by {name} spills {found.spills} registers on {arch}: leave it out")
            config = amd.config_of(name)
            kernel = kernel_of(found, config.BM, config.BN, launch.constexprs["BK"], config.num_warps, processor)
            kernels.append([
                product, name, kernel.bk, *map(_short, (*kernel.step, *kernel.rest, kernel.peeled)),
                kernel.vgprs, found.agprs, found.sgprs, kernel.lds,
            ])  # fmt: skip
    import triton

    document = {
        "format": amd.FORMAT, "arch": arch, "processor": processor.name, "modelled": True,
        "origin": {
            "fp8fn": __version__, "triton": triton.__version__,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        },
        "kernel_columns": list(amd.KERNEL_COLUMNS), "row_columns": list(amd.ROW_COLUMNS),
    }  # fmt: skip
    _write(path, document, kernels, [])
    amd.forget()  # the choices below use the kernels just written
    rows = []
    for product, m, n, k in layer_products():
        choice = amd.modelled(product, m, n, k, arch)
        assert choice.time is not None
        rows.append([product, m, n, k, choice.name, round(choice.time.us, 1), choice.time.bound])
    _write(path, document, kernels, rows)
    amd.forget()


def layer_products() -> tuple[tuple[str, int, int, int], ...]:
    """Forward, dgrad and wgrad of the 84 layers, each product once, with its own M, N and K."""
    found: dict[tuple[str, int, int, int], None] = {}
    for _, _, m, n, k in LLM84:
        found |= dict.fromkeys((product, *of_layer(product, m, n, k)) for product in ("forward", "dgrad", "wgrad"))
    return tuple(sorted(found))


def _short(value: float) -> float:
    return int(value) if value == int(value) else round(value, 3)


def _write(path: Path, head: Mapping[str, Any], kernels: Sequence[Any], rows: Sequence[Any]) -> None:
    def listed(name: str, lines: Sequence[Any]) -> str:
        body = ",\n".join("  " + json.dumps(line) for line in lines)
        return f' "{name}": [' + (f"\n{body}\n " if lines else "") + "]"

    text = json.dumps(head, indent=1)[:-2]
    path.write_text(f"{text},\n{listed('kernels', kernels)},\n{listed('rows', rows)}\n}}\n", encoding="utf-8")


def _config_of(name: str) -> Any:
    from fp8fn.ops.tuning.amd import config_of

    return config_of(name)


def architectures(parser: argparse.ArgumentParser, named: str | None) -> tuple[str, ...]:
    """The architecture that was named, or all, where Triton compiles for all in one process."""
    if named is not None:
        return (named,)
    if not takes_architectures():
        parser.error(
            "--arch is missing, and Triton before 3.7 compiles for one AMD architecture in a process; run the command "
            f"for each of {', '.join(TARGETS)}"
        )
    return tuple(TARGETS)


def architecture(name: str) -> str:
    """An architecture of `TARGETS`, by its name or by that of a product."""
    found = named_target(name)
    if found is None or found[1].name not in TARGETS:
        known = ", ".join(TARGETS)
        raise argparse.ArgumentTypeError(f"{name!r} is no AMD processor; choose from {known}, or name a product")
    return found[1].name


def _ops(names: str) -> tuple[str, ...]:
    found = tuple(names.split(","))
    for name in found:
        if name not in OPS:
            raise argparse.ArgumentTypeError(f"{name!r} is not an op; choose from {', '.join(OPS)}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "isa",
        __doc__,
        "",
        "--arch gfx950 --op forward --shape 8192,6144,4096",
    )
    parser.add_argument(
        "--arch", type=architecture, metavar="NAME", help="gfx950 (the default), gfx942, or a product such as MI300X"
    )
    parser.add_argument("--op", type=_ops, metavar="NAMES", help=f"ops to compile (default: {', '.join(OPS)})")
    parser.add_argument(
        "--shape", type=sizes, default=SHAPE, metavar="M,N,K", help="x (M, K) @ w (N, K)ᵀ (default: 4096,4096,4096)"
    )
    parser.add_argument(
        "--compare", metavar="CFG", help="a configuration beside a product's chosen one, such as 256x128w8s2n16h"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--write-tables", action="store_true", help="compile the candidates and write ops/tuning/tables/amd_*.json"
    )
    return parser
