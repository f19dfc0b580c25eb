"""The README's tables from the committed results: `python -m fp8fn bench docs [--check]`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8fn.bench import compile_time, decode, generate, isa, record, tables
from fp8fn.bench.overhead import BARS
from fp8fn.bench.tables import provenance
from fp8fn.ops import tuning
from fp8fn.ops.cuda.gemm.cublaslt import RECIPES
from fp8fn.ops.tuning import compare, table

RESULTS: Final = record.RESULTS


def overhead(run: dict[str, Any]) -> str:
    """Microseconds of a call, of its work alone, and the difference beside its bar."""
    lines = ["| call | µs | its work alone | above it | bar |", "|---|---|---|---|---|"]
    names = {"quantize": "`torch.ops.fp8fn.quantize`", "gemm": "`fp8fn.gemm`, no_grad"}
    for name, row in run["results"].items():
        times = " | ".join(f"{row[key]:.1f}" for key in ("call_us", "work_us", "extra_us"))
        lines.append(f"| {names[name]} | {times} | {BARS[name]:.0f} |")
    return "\n".join([*lines, "", provenance(run)])


def host(run: dict[str, Any]) -> str:
    """Microseconds that calls take of the host, and seconds of a first call."""
    lines = ["| call | time | bar |", "|---|---|---|"]
    for name, row in run["results"].items():
        bar = "" if row["bar"] is None else f"{row['bar']:g}"
        lines.append(f"| {name} | {row['value']:.3g} {row['unit']} | {bar} |")
    return "\n".join([*lines, "", provenance(run)])


def compiled(run: dict[str, Any]) -> str:
    """Seconds of a compilation by the clock and of the processor, medians, and by how much they grow."""
    lines = ["| compiled by | s | growth | s of the processor | growth | bar |", "|---|---|---|---|---|---|"]
    names = {"inductor": "Inductor", "substitution": "Inductor inside `substitution()`", "fp8fn": '`backend="fp8fn"`'}
    seconds = run["results"]["seconds"]
    for name, samples in seconds.items():
        middle, more = compile_time.medians(samples), compile_time.growth(seconds, name)
        grown = ["" if name == compile_time.PLAIN else f"{100 * each:+.1f} %" for each in more]
        bar = f"{100 * compile_time.BAR:.0f} %" if name == compile_time.CHECKED else ""
        cells = names[name], f"{middle.wall:.1f}", grown[0], f"{middle.processor:.1f}", grown[1], bar
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Medians of {len(seconds['inductor'])}. {provenance(run)}"])


def tuned(document: dict[str, Any]) -> str:
    """By the kinds of scales: TFLOP/s of fp8fn's choices and of cuBLASLt over a tuning table, and their ratio."""
    found = table.parse(document)
    lines = ["| product | of them | fp8fn, TFLOP/s | cuBLASLt | ratio | least |", "|---|---|---|---|---|---|"]
    for kinds, name in RECIPES.items():
        pairs = [(p.operations / e.us / 1e6, p.operations / e.peer_us / 1e6)
                 for p, e in found.entries.items() if p.kinds == kinds and e.peer_us is not None]  # fmt: skip
        ours, theirs = (compare.geomean(column) for column in zip(*pairs, strict=True))
        least = min(mine / other for mine, other in pairs)
        lines.append(f"| {name} | {len(pairs)} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.3f}x | {least:.2f}x |")
    origin = found.origin
    return "\n".join(
        [*lines, "", f"{found.chip.name}; torch {origin['torch']}, NVRTC {origin['NVRTC']}; {origin['date']}."]
    )


class Table(NamedTuple):
    """What stands between `<!-- marker -->` and `<!-- /marker -->`, from a file of `results/` or an absolute path."""

    marker: str
    result: str
    make: Callable[[dict[str, Any]], str]


# The tables of the README, each with the committed run that it is made from.
TABLES: Final = (
    Table("forward", "forward.json", tables.forward),
    Table("linear", "linear.json", tables.linear),
    Table("llm84", "llm84.json", tables.llm84),
    Table("tuned", str(Path(tuning.__path__[0]) / "tables" / "h200.json"), tuned),
    Table("small", "small.json", tables.small),
    Table("wgrad", "wgrad.json", tables.wgrad),
    Table("quant", "quant.json", tables.quant),
    Table("moe-forward", "moe_forward.json", tables.forward),
    Table("moe-wgrad", "moe_wgrad.json", tables.wgrad),
    Table("moe-mlp", "moe_mlp.json", tables.linear),
    Table("moe-layer", "moe_layer.json", tables.layers),
    Table("moe-quant", "moe_quant.json", tables.quant),
    Table("moe-weights", "moe_weights.json", tables.quant),
    Table("decoder", "decoder.json", tables.linear),
    Table("decode-summary", "decode.json", decode.summary),
    Table("decode", "decode.json", decode.table),
    Table("decode-rows", "decode_rows.json", decode.table),
    Table("decode-batched", "decode_batched.json", decode.table),
    Table("decode-batched-large", "decode_batched_large.json", decode.table),
    Table("decode-mx", "decode_mx.json", decode.table),
    Table("decode-mx-moe", "decode_mx_moe.json", decode.table),
    Table("generate", "generate.json", generate.table),
    Table("isa-gfx950", "isa-gfx950.json", isa.table),
    Table("isa-gfx942", "isa-gfx942.json", isa.table),
    Table("host", "host.json", host),
    Table("overhead", "overhead.json", overhead),
    Table("compile", "compile.json", compiled),
)


def rewritten(text: str, tables: Sequence[Table] = TABLES) -> str:
    """The README with its tables made anew."""
    for marker, result, make in tables:
        parts = re.split(rf"(<!-- /?{marker} -->\n)", text)
        if len(parts) != 5:
            raise ValueError(f"README needs one place between <!-- {marker} --> and <!-- /{marker} -->")
        text = f"{parts[0]}{parts[1]}{make(record.read(RESULTS / result))}\n{parts[3]}{parts[4]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites README.md in this folder; with --check, only says whether it would change."""
    parser = argparse.ArgumentParser(prog="fp8fn bench docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where a table is stale")
    args = parser.parse_args(argv)
    path = Path("README.md")
    try:
        text = path.read_text(encoding="utf-8")
        new = rewritten(text)
    except OSError as error:
        parser.error(f"{path.absolute()} can't be read ({error.strerror}): run it in a checkout of fp8fn")
    except ValueError as error:
        parser.error(f"{path.absolute()} is not fp8fn's ({error}): run it in a checkout of fp8fn")
    if args.check:
        print("README.md is up to date" if new == text else "README.md is stale: python -m fp8fn bench docs")
        return int(new != text)
    path.write_text(new, encoding="utf-8")
    return 0
