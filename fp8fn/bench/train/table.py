"""The figures as tables: for the terminal, and in Markdown for `docs/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8fn.bench import tables
from fp8fn.bench.train.kinds import KINDS
from fp8fn.bench.train.models import Size, operations, peak_rate
from fp8fn.bench.train.runs import best_torchao, milliseconds, speedup

HEADERS = (
    "variant",
    "forward+backward, ms",
    "over bf16",
    "over torchao's best",
    "step with AdamW, ms",
    "over bf16",
    "tokens/s",
    "MFU, %",
    "peak memory, GB",
    "of bf16's",
    "peak of a step, GB",
    "kept, KB a token and layer",
    "of bf16's",
    "first step, s",
    "loss",
)


def of_run(run: Mapping[str, Any]) -> str:
    """A Markdown table of a run, and below it why variants have no figures, the attention, and the provenance."""
    rows = run["rows"]
    body = [_cells(run, row) for row in rows if "losses" in row]
    lines = [title(run), "", tables.markdown(body, HEADERS), "", *_profiles(rows)]
    lines += [f"{row['variant']}: n/a: {row[key]}." for row in rows for key in ("unavailable", "failed") if key in row]
    environment = run["environment"]
    versions = f"torch {environment['torch']}, Triton {environment['triton']}"
    found = run["setting"]["attention"]
    lines += [f"Attention: {found['implementation']}, kernel {found['kernel']}.", ""]
    return "\n".join([*lines, f"{run['device']}; {versions}; {run['commit']}; {run['date']}."])


def _profiles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The milliseconds of a step with AdamW by kind of kernel, for the variants that have a profile."""
    profiles = [(row["variant"], row["profile"]) for row in rows if "profile" in row]
    if not profiles:
        return []
    body = [
        [
            f"`{name}`",
            *(f"{profile[kind]['ms']:.1f}" for kind in KINDS),
            f"{sum(p['ms'] for p in profile.values()):.1f}",
        ]
        for name, profile in profiles
    ]
    return [tables.markdown(body, ("ms of a step by kind of kernel", *KINDS, "all")), ""]


def title(run: Mapping[str, Any]) -> str:
    setting = run["setting"]
    size = Size(**setting["size"])
    experts = f", {size.experts} experts of which {size.active}" if size.experts else ""
    return (
        f"{setting['model']}, {size.layers} layers of {size.hidden} x {size.intermediate}{experts}, vocabulary"
        f" {size.vocabulary}, {setting['batch']} x {setting['sequence']} tokens"
    )


def of_document(document: dict[str, Any]) -> str:
    """The tables of all runs of a file."""
    return "\n\n".join(of_run(run) for run in document["results"]["runs"])


def utilisation(run: Mapping[str, Any], ms: float) -> float | None:
    """The model's operations in `ms` as a share of the card's bf16 peak."""
    setting, peak = run["setting"], peak_rate(run["device"])
    done = operations(Size(**setting["size"]), setting["batch"], setting["sequence"])
    return done / (ms / 1e3) / peak if peak else None


def _cells(run: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    bf16: Mapping[str, Any] = next((each for each in run["rows"] if each["variant"] == "bf16" and "losses" in each), {})
    setting = run["setting"]
    forward_backward, step = milliseconds(row, "forward_backward_ms"), milliseconds(row, "step_ms")
    tokens = setting["batch"] * setting["sequence"]
    used = utilisation(run, forward_backward) if forward_backward else None
    return [
        f"`{row['variant']}`",
        tables.number(forward_backward, "{:.2f}"),
        tables.number(speedup(row, "forward_backward_ms"), "{:.3f}x"),
        tables.number(best_torchao(row, "forward_backward_ms"), "{:.3f}x"),
        tables.number(step, "{:.2f}"),
        tables.number(speedup(row, "step_ms"), "{:.3f}x"),
        tables.number(1e3 * tokens / step if step else None, "{:.0f}"),
        tables.number(100 * used if used else None, "{:.1f}"),
        tables.number(_scaled(row.get("peak_bytes"), 1e-9), "{:.2f}"),
        tables.number(_ratio(row, bf16, "peak_bytes"), "{:.3f}x"),
        tables.number(_scaled(row.get("step_peak_bytes"), 1e-9), "{:.2f}"),
        tables.number(_scaled(row.get("kept_bytes_per_token_and_layer"), 1 / 1024), "{:.1f}"),
        tables.number(_ratio(row, bf16, "kept_bytes_per_token_and_layer"), "{:.3f}x"),
        f"{row['first_step_s']:.1f}" + (" (cached)" if row["cached_graphs"] else ""),
        f"{row['losses'][-1]:.4f}",
    ]


def _ratio(row: Mapping[str, Any], other: Mapping[str, Any], figure: str) -> float | None:
    mine, theirs = row.get(figure), other.get(figure)
    return mine / theirs if mine is not None and theirs else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
