"""Primus-Turbo's own report of its machine code on MI355X, beside the machine code of fp8fn's kernels.

`python -m fp8fn bench isa` compiles offline, with no GPU, and writes `isa-gfx942.json` and `isa-gfx950.json` to
`docs/results`. Cycles and TFLOP/s are modelled from the machine code (`fp8fn/ops/tuning/amd_model.py`), not measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fp8fn.bench import record, tables
from fp8fn.bench.shapes import LLM84
from fp8fn.cli import options
from fp8fn.cli.isa import (
    NEEDS_TRITON,
    OPS,
    SHAPE,
    TARGETS,
    architecture,
    architectures,
    assembly,
    figures,
    of_layer,
    product_launch,
)
from fp8fn.ops.targets import Target
from fp8fn.ops.triton.launch import TritonLaunch
from fp8fn.ops.tuning import amd
from fp8fn.ops.tuning.amd_isa import Mix
from fp8fn.ops.tuning.compare import geomean

PRODUCTS: Final = ("forward", "dgrad", "wgrad")
THEIR_DGRAD: Final = "256x128w8s3n32"
# TFLOP/s that Primus-Turbo reports for the 84 layers with its own kernels, quantization included, and the kind of mean.
MEASURED: Final = {
    "gfx942": ("639 forward and 496 backward", "mean"),
    "gfx950": ("1474 forward and 1200 backward", "geometric mean"),
}
# The figures that the results keep of each kernel.
_FIGURES: Final = (
    "configuration", "matrix", "loads", "stores", "v_accvgpr", "VGPR", "AGPR", "spills", "scratch", "LDS bytes",
    "waves a SIMD", "masks in the loop", "cycles a step", "bound of a step", "% of the peak",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the results of both architectures, or of the one that is named."""
    parser = options.parser_of(
        "bench isa",
        __doc__,
        "--arch gfx950",
    )
    parser.add_argument(
        "--arch",
        type=architecture,
        metavar="NAME",
        help="the only one to compile for: gfx942 or gfx950 (default: both)",
    )
    parser.add_argument(
        "--folder",
        type=options.output_folder,
        default=str(record.RESULTS),
        help="where to write (default: docs/results of the checkout)",
    )
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        parser.error(NEEDS_TRITON)
    for arch in architectures(parser, args.arch):
        path = args.folder / f"isa-{arch}.json"
        record.write(path, "isa", results(arch))
        print(table(record.read(path)), end="\n\n")
        print(f"wrote {path}")
    return 0


def results(arch: str) -> dict[str, Any]:
    """The figures of every op at 4096,4096,4096, the claims, and the modelled times of the 84 layers."""
    target = TARGETS[arch]
    ops = {name: [_kept_figures(figures(launch)) for launch in plan(target, *SHAPE)] for name, plan in OPS.items()}
    return {"arch": arch, "modelled": True, "claims": claims(target), "ops": ops, "layers": layers(arch)}


def _kept_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    wanted = (*_FIGURES, "cycles of a program", "peak, TFLOP/s")
    return {"kernel": found["kernel"], **{name: found[name] for name in wanted if name in found}}


def claims(target: Target) -> list[dict[str, Any]]:
    """Primus-Turbo's claims about its kernels' code beside fp8fn's code; `theirs` is None where there is no claim."""
    dgrad = product_launch("dgrad", *SHAPE, target)
    wgrad = product_launch("wgrad", *SHAPE, target)
    codes = {name: assembly(launch) for name, launch in (("dgrad", dgrad), ("wgrad", wgrad))}
    accumulators = max(matrix.m * matrix.n // 64 for matrix in codes["dgrad"].loop.matrix)
    straight = assembly(stored_straight(target)).whole
    turned = assembly(product_launch("wgrad", *SHAPE, target, _turned(wgrad, target)))
    wide = [store for name in PRODUCTS for store in _store_widths(assembly(product_launch(name, *SHAPE, target)).whole)]
    (dual,) = OPS["quantize_dual"](target, *SHAPE)
    read = assembly(dual).whole.widths("load")
    tile = dual.constexprs["BM"] * dual.constexprs["BN"] * 2
    lanes = 64 * int(dual.options["num_warps"])
    theirs_at = assembly(product_launch("dgrad", *SHAPE, target, amd.config_of(THEIR_DGRAD))).whole
    found: list[tuple[str, str, str]] = [
        (
            "`v_accvgpr` moves of NN at 256x128, 8 warps",
            "405 from 32x32 products in 3 stages",
            f"{codes['dgrad'].whole.count('v_accvgpr')}; {theirs_at.count('v_accvgpr')} in that configuration",
        ),
        ("accumulators of one matrix instruction of it", "16 of 32x32, 4 of 16x16", f"{accumulators}"),
        ("2-byte stores of wgrad", "64 before, 0 after", f"{codes['wgrad'].whole.widths('store').get(2, 0)}"),
        (
            "2-byte stores of wgrad into a transposed output",
            "64",
            f"{straight.widths('store').get(2, 0)} stored straight, {turned.whole.widths('store').get(2, 0)} turned",
        ),
        ("16-byte stores of wgrad", "4 to 8", f"{codes['wgrad'].whole.widths('store').get(16, 0)}"),
        ("registers that the turned store spills", "in large N", f"{turned.spills} of {turned.vgprs}"),
        ("width of the stores of forward, dgrad and wgrad", "16 B", f"{min(wide)} B"),
        ("masks in a step of K", "0, of 3 before", f"{sum(_masks(codes[name].loop) for name in codes)}"),
        ("reads of x for both quantized forms", "1", f"{lanes * sum(w * c for w, c in read.items()) / tile:.0f}"),
        ("bytes of a load of x", "", f"{min(read)}"),
    ]
    theirs = target.name == "gfx950"
    return [{"claim": name, "theirs": said if theirs else None, "ours": ours} for name, said, ours in found]


def stored_straight(target: Target) -> TritonLaunch:
    """The wgrad of a transposed output without `WGRAD_TRANS_STORE`: a lane holds neighbours along a column."""
    launch = product_launch("wgrad", *SHAPE, target, _turned(product_launch("wgrad", *SHAPE, target), target))
    return replace(launch, constexprs={**launch.constexprs, "WGRAD_TRANS_STORE": False})


def _turned(launch: TritonLaunch, target: Target) -> Any:
    """The candidate with a transposed store that has the tile of `launch`."""
    sizes = (launch.constexprs["BM"], launch.constexprs["BN"])
    for name in amd.CANDIDATES[target.name]["wgrad"]:
        config = amd.config_of(name)
        if config.WGRAD_TRANS_STORE and sizes == (config.BM, config.BN):
            return config
    raise ValueError(f"no candidate of wgrad on {target.name} turns a tile of {sizes}")


def _store_widths(mix: Mix) -> list[int]:
    return list(mix.widths("store"))


def _masks(mix: Mix) -> int:
    return mix.count("v_cmp") + mix.count("v_cndmask")


def layers(arch: str) -> list[dict[str, Any]]:
    """For each of the 84 layers, the configurations of its products and their modelled µs."""
    found = []
    for shape in LLM84:
        row: dict[str, Any] = {"id": shape.id}
        for product in PRODUCTS:
            sizes = of_layer(product, shape.M, shape.N, shape.K)
            choice = amd.modelled(product, *sizes, arch)
            assert choice.time is not None
            chosen = amd.choose(product, *sizes, arch)
            row[product] = {"config": chosen.name, "us": round(choice.time.us, 1), "bound": choice.time.bound}
        found.append(row)
    return found


def table(run: dict[str, Any]) -> str:
    """Each claim beside fp8fn's code, then what bounds the 84 layers. The bounds are modelled, not measured."""
    found = run["results"]
    theirs = any(row["theirs"] is not None for row in found["claims"])
    lines = ["| | Primus-Turbo | fp8fn |", "|---|---|---|"] if theirs else ["| | fp8fn |", "|---|---|"]
    for row in found["claims"]:
        cells = (row["claim"], row["theirs"] or "", row["ours"]) if theirs else (row["claim"], row["ours"])
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| product | configurations, over the 84 layers | bound by | modelled bound, TFLOP/s |",
        "|---|---|---|---|",
    ]
    shapes = {shape.id: shape for shape in LLM84}
    for product in PRODUCTS:
        rows = [(shapes[row["id"]], row[product]) for row in found["layers"]]
        speed = geomean(2.0 * s.M * s.N * s.K / row["us"] / 1e6 for s, row in rows)
        configurations, bounds = (_with_counts(row[key] for _, row in rows) for key in ("config", "bound"))
        lines.append(f"| {product} | {configurations} | {bounds} | {tables.rate(speed)} |")
    turned = sum(amd.config_of(row["wgrad"]["config"]).WGRAD_TRANS_STORE for row in found["layers"])
    rates, mean = MEASURED[found["arch"]]
    environment = run["environment"]
    return "\n".join([
        *lines, "",
        f"`WGRAD_TRANS_STORE` is chosen for {turned} of the 84 layers: a gradient is computed in the orientation of "
        "its output, so that its stores are wide without it. A bound is not a speed: Primus-Turbo measures "
        f"{rates} TFLOP/s with its kernels ({mean}, quantization included).", "",
        f"{found['arch']}, from machine code compiled offline: modelled, not measured, with the highest clock and no "
        f"latency. Triton {environment['triton']}; {run['date']}.",
    ])  # fmt: skip


def _with_counts(values: Any) -> str:
    """The distinct values, the most frequent first; with counts if there are several."""
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(name if len(ranked) == 1 else f"{name} ({count})" for name, count in ranked)
