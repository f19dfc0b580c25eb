"""The tables in `docs/` from the committed results: `python -m fp8fn bench docs [--check]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8fn.bench import cold, compile_time, decode, generate, invariant, isa, loss, prefill, record, siblings, tables
from fp8fn.bench.overhead import BARS
from fp8fn.bench.seeds import report as seeds
from fp8fn.bench.tables import provenance
from fp8fn.bench.train import table as train
from fp8fn.cli.options import parser_of
from fp8fn.demo import results as demo
from fp8fn.ops import tuning
from fp8fn.ops.cuda.gemm.cublaslt import RECIPES
from fp8fn.ops.tuning import compare, table

FOLDER: Final = record.RESULTS.parent


def overhead(run: dict[str, Any]) -> str:
    """Microseconds of a call, of its work alone, and the difference beside its bar."""
    lines = ["| call | µs | its work alone, µs | overhead, µs | bar, µs |", "|---|---|---|---|---|"]
    names = {"quantize": "`torch.ops.fp8fn.quantize`", "gemm": "`fp8fn.gemm`, no_grad"}
    for name, row in run["results"].items():
        times = " | ".join(f"{row[key]:.1f}" for key in ("call_us", "work_us", "extra_us"))
        lines.append(f"| {names[name]} | {times} | {BARS[name]:.0f} |")
    return "\n".join([*lines, "", provenance(run)])


def host(run: dict[str, Any]) -> str:
    """Host microseconds of each call, and seconds of the import and the first call, beside their bars."""
    lines = ["| call | time | bar |", "|---|---|---|"]
    for name, row in run["results"].items():
        bar = "" if row["bar"] is None else f"{row['bar']:g} {row['unit']}"
        lines.append(f"| {name} | {row['value']:.3g} {row['unit']} | {bar} |")
    return "\n".join([*lines, "", provenance(run)])


def compiled(run: dict[str, Any]) -> str:
    """Median wall and processor seconds of a compilation, each with its growth over plain Inductor."""
    lines = ["| compiled by | wall time, s | growth | processor time, s | growth | bar |", "|---|---|---|---|---|---|"]
    names = {"inductor": "Inductor", "substitution": "Inductor inside `substitution()`", "fp8fn": '`backend="fp8fn"`'}
    seconds = run["results"]["seconds"]
    for name, samples in seconds.items():
        median, more = compile_time.medians(samples), compile_time.growth(seconds, name)
        grown = ["" if name == compile_time.PLAIN else f"{100 * each:+.1f} %" for each in more]
        bar = f"{100 * compile_time.BAR:.0f} %" if name == compile_time.CHECKED else ""
        cells = names[name], f"{median.wall:.1f}", grown[0], f"{median.processor:.1f}", grown[1], bar
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Medians of {len(seconds['inductor'])}. {provenance(run)}"])


def fsdp(run: dict[str, Any], kind: str = "fsdp") -> str:
    """Milliseconds of a training step on several GPUs, peak memory, and the loss of the last step, beside bf16."""
    found = run["results"]
    rows = [row for row in found["rows"] if row.get("kind", "fsdp") == kind and "skipped" not in row]
    lines = ["| variant | step, ms | over bf16 | peak memory, GB | last loss |", "|---|---|---|---|---|"]
    plain = rows[0]["median_ms"]
    for row in rows:
        ratio = f"{plain / row['median_ms']:.3f}x"
        cells = row["variant"], f"{row['median_ms']:.1f}", ratio, f"{row['peak_gb']:.2f}", f"{row['losses'][-1]:.4f}"
        lines.append(f"| {' | '.join(cells)} |")
    layers, tokens = (
        found["arguments"]["expert_layers" if kind == "experts" else "layers"],
        found["arguments"]["tokens"],
    )
    each = f"{found['arguments']['tensor_parallel']} ranks" if kind == "fsdp-tp" else "rank"
    setting = f"{layers} layers {found['arguments']['hidden']} wide, {tokens} tokens for each {each}"
    return "\n".join([*lines, "", f"{setting}; {found['ranks']} x {provenance(run)}"])


def losses(run: dict[str, Any]) -> str:
    """Losses of the last step, and the largest difference of any, beside those of one GPU on the same batches."""
    found = run["results"]
    several = f"{found['ranks']} GPUs"
    lines = [f"| variant | last loss, {several} | one GPU | largest difference |", "|---|---|---|---|"]
    for row in found["rows"]:
        pairs = list(zip(row["losses"], row["losses_beside"], strict=True))
        worst = max(abs(loss / other - 1) for loss, other in pairs)
        lines.append(f"| {row['variant']} | {pairs[-1][0]:.4f} | {pairs[-1][1]:.4f} | {100 * worst:.2f} % |")
    setting = f"{len(pairs)} steps of {found['arguments']['layers']} layers {found['arguments']['hidden']} wide"
    return "\n".join([*lines, "", f"{setting}; {provenance(run)}"])


def on_the_wire(run: dict[str, Any]) -> str:
    """Times of gathers and of sums of gradients in a profiled step, and the share that other kernels covered."""
    lines = [
        "| variant | gathers, ms | covered | sums, ms | covered | other kernels, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in run["results"]["rows"]:
        if row["kind"] == "fsdp":
            sent = row["wire"]["collectives"]
            both = sent["AllGather"], sent["ReduceScatter"]
            cells = [f"{each['ms']:.1f} | {100 * each['covered']:.0f} %" for each in both]
            lines.append(f"| {row['variant']} | {' | '.join(cells)} | {row['wire']['busy_ms']:.1f} |")
    return "\n".join([*lines, "", f"One step of rank 0; {provenance(run)}"])


def gathers(run: dict[str, Any]) -> str:
    """Milliseconds of a gather in bf16, and of half as many bytes, among ten that follow one another."""
    lines = ["| bf16, MB in all | bf16, ms | FP8, ms | ratio |", "|---|---|---|---|"]
    for row in run["results"]["gathers"]:
        ratio = row["fp8_ms"] / row["bf16_ms"]
        lines.append(f"| {row['megabytes']} | {row['bf16_ms']:.3f} | {row['fp8_ms']:.3f} | {ratio:.2f} |")
    return "\n".join([*lines, "", f"{run['results']['ranks']} x {provenance(run)}"])


def async_tp(run: dict[str, Any]) -> str:
    """Milliseconds of a gather and a product after it, and of the product while rows are gathered."""
    lines = ["| product | tokens | gather, then product, ms | pipelined, ms | gain |", "|---|---|---|---|---|"]
    for row in run["results"]["rows"]:
        times = f"{row['synchronous_ms']:.2f} | {row['pipelined_ms']:.2f} | {row['gain']:.2f}x"
        lines.append(f"| {row['product']}, {row['k']} x {row['n']} | {row['tokens']} | {times} |")
    return "\n".join([*lines, "", f"{run['results']['ranks']} x {provenance(run)}"])


def tuned(document: dict[str, Any]) -> str:
    """For each kind of scales in a tuning table: TFLOP/s of the configurations chosen, of cuBLASLt, and their ratio."""
    found = table.parse(document)
    lines = [
        "| scales | products | fp8fn, TFLOP/s | cuBLASLt, TFLOP/s | ratio | lowest ratio |",
        "|---|---|---|---|---|---|",
    ]
    for kinds, name in RECIPES.items():
        pairs = [
            (p.operations / e.us / 1e6, p.operations / e.peer_us / 1e6)
            for p, e in found.entries.items()
            if p.kinds == kinds and e.peer_us is not None
        ]
        ours, theirs = (compare.geomean(column) for column in zip(*pairs, strict=True))
        least = min(mine / other for mine, other in pairs)
        lines.append(f"| {name} | {len(pairs)} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.3f}x | {least:.2f}x |")
    origin = found.origin
    return "\n".join(
        [*lines, "", f"{found.chip.name}; torch {origin['torch']}, NVRTC {origin['NVRTC']}; {origin['date']}."]
    )


class Table(NamedTuple):
    """The text between `<!-- marker -->` and `<!-- /marker -->`, which `make` writes from the JSON of `path`.

    An `optional` table whose file does not exist says that there is no run yet.
    """

    marker: str
    path: Path
    make: Callable[[dict[str, Any]], str]
    optional: bool = False

    def text(self) -> str:
        if self.optional and not self.path.exists():
            return "No run of this version is committed yet."
        return self.make(record.read(self.path))


def _committed(marker: str, make: Callable[[dict[str, Any]], str], name: str = "", *, optional: bool = False) -> Table:
    return Table(marker, record.RESULTS / f"{name or marker.replace('-', '_')}.json", make, optional)


# The generated tables of each page of `docs/`.
PAGES: Final[Mapping[str, Sequence[Table]]] = {
    "benchmarks.md": (
        _committed("forward", tables.products),
        _committed("small", tables.small),
        _committed("wgrad", tables.products),
        _committed("quant", tables.quant),
        _committed("linear", tables.products),
        _committed("llm84", tables.llm84),
        _committed("llm84-h100", tables.llm84),
        _committed("decoder", tables.products),
        _committed("train", train.of_document, optional=True),
        _committed("train-masked", train.of_document, optional=True),
        _committed("loss", loss.of_document, optional=True),
        _committed("moe-forward", tables.products),
        _committed("moe-wgrad", tables.products),
        _committed("moe-mlp", tables.products),
        _committed("moe-layer", tables.layers),
        _committed("moe-few", tables.small),
        _committed("moe-few-h200", tables.small),
        _committed("moe-quant", tables.quant),
        _committed("moe-weights", tables.quant),
        _committed("deepgemm", tables.layers),
        _committed("deepgemm-h200", tables.layers),
        _committed("deepgemm-groups", tables.layers),
        _committed("deepgemm-groups-h200", tables.layers),
        _committed("deepgemm-masked", tables.layers),
        _committed("deepgemm-masked-h200", tables.layers),
        _committed("deepgemm-wgrad", tables.layers),
        _committed("deepgemm-wgrad-h200", tables.layers),
        _committed("decode-summary", decode.summary, "decode"),
        _committed("decode-summary-h100", decode.summary, "decode_h100"),
        _committed("decode", decode.table),
        _committed("decode-rows", decode.table),
        _committed("decode-qkv", siblings.table, optional=True),
        _committed("decode-gate-up", siblings.table, optional=True),
        _committed("decode-batched", decode.table),
        _committed("decode-batched-large", decode.table),
        _committed("decode-mx", decode.table),
        _committed("decode-mx-moe", decode.table),
        _committed("prefill", prefill.table, optional=True),
        _committed("invariant", invariant.table, optional=True),
        _committed("generate", generate.table),
        _committed("generate-batches", generate.table, optional=True),
        _committed("generate-whole", generate.table),
        _committed("host", host),
        _committed("host-h100", host),
        _committed("cold", cold.table, optional=True),
        _committed("overhead", overhead),
        _committed("compile", compiled),
        _committed("compile-dynamic", compiled),
        _committed("seeds", seeds.of_document, optional=True),
    ),
    "distributed.md": (
        _committed("fsdp", fsdp),
        _committed("fsdp-h200", fsdp),
        _committed("fsdp-one", fsdp),
        _committed("scale-out", fsdp),
        _committed("scale-out-h200", fsdp),
        _committed("scale-out-losses", losses),
        _committed("scale-out-wire", on_the_wire, "scale_out"),
        _committed("gathers", gathers, "scale_out_gathers"),
        _committed("gathers-h200", gathers, "scale_out_two_h200"),
        _committed("scale-out-tp-wide", partial(fsdp, kind="fsdp-tp")),
        _committed("scale-out-tp", partial(fsdp, kind="fsdp-tp")),
        _committed("scale-out-tp-h200", partial(fsdp, kind="fsdp-tp")),
        _committed("scale-out-experts", partial(fsdp, kind="experts"), "scale_out"),
        _committed("scale-out-experts-h200", partial(fsdp, kind="experts"), "scale_out_h200"),
        _committed("scale-out-experts-two-h200", partial(fsdp, kind="experts"), "scale_out_two_h200"),
        _committed("async-tp", async_tp),
        _committed("async-tp-graph", async_tp),
        _committed("async-tp-two-h200", async_tp),
        _committed("scale-out-tp-wide-graph", partial(fsdp, kind="fsdp-tp")),
        _committed("scale-out-tp-graph", partial(fsdp, kind="fsdp-tp")),
        _committed("scale-out-two-h200", partial(fsdp, kind="fsdp-tp")),
    ),
    "command_line.md": tuple(_committed(f"demo-{card}", demo.markdown, optional=True) for card in ("h100", "h200")),
    "tuning.md": (
        Table("tuned-h100", Path(tuning.__path__[0]) / "tables" / "h100.json", tuned),
        Table("tuned", Path(tuning.__path__[0]) / "tables" / "h200.json", tuned),
    ),
    "amd.md": (
        _committed("isa-gfx950", isa.table, "isa-gfx950"),
        _committed("isa-gfx942", isa.table, "isa-gfx942"),
    ),
}


def rewritten(text: str, tables: Sequence[Table]) -> str:
    """The text of a page with its tables made again."""
    for each in tables:
        marker = each.marker
        parts = re.split(rf"(<!-- /?{marker} -->\n)", text)
        if len(parts) != 5:
            raise ValueError(f"needs one place between <!-- {marker} --> and <!-- /{marker} -->")
        text = f"{parts[0]}{parts[1]}{each.text()}\n{parts[3]}{parts[4]}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the tables of every page of `docs/` in the checkout; with --check, only says which pages would change."""
    parser = parser_of(
        "bench docs",
        __doc__,
        "",
        "--check",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a table is stale")
    args = parser.parse_args(argv)
    stale = False
    for name, page_tables in PAGES.items():
        page = FOLDER / name
        try:
            text = page.read_text(encoding="utf-8")
            new = rewritten(text, page_tables)
        except OSError as error:
            parser.error(f"{error.filename} can't be read ({error.strerror}): run this command in a checkout of fp8fn")
        except ValueError as error:
            parser.error(f"{page} is not fp8fn's page ({error}): run this command in a checkout of fp8fn")
        if args.check:
            stale |= new != text
            print(f"{page} is stale: python -m fp8fn bench docs" if new != text else f"{page} is up to date")
        elif new != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page}")
    return int(stale)
