"""The report of a run in Markdown: a section for each seed with its tables and the sources of its published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fp8fn.bench.seeds import decoding, experts, layers, quantizers
from fp8fn.bench.seeds.figures import Figures, of_run, paragraphs
from fp8fn.bench.seeds.protocols import SEEDS

TABLES: Final[dict[str, Callable[[Figures], str]]] = {
    "000": layers.of_figures,
    "001": experts.of_figures,
    "002": decoding.of_batched,
    "003": quantizers.of_figures,
    "004": decoding.of_decoding,
}
SCALED: Final = (
    "**Scaled down for a CPU: each shape stands for a smaller one, and no time says anything of a GPU. Nothing is "
    "compared with published figures.**"
)


def report(run: Mapping[str, Any], level: int = 1) -> str:
    """The sections of the seeds that the run has figures of; headings begin at `level`."""
    heading = "#" * level
    measured = [seed for seed in sorted(SEEDS) if any(entry["seed"] == seed for entry in run["rows"])]
    return paragraphs(
        f"{heading} The seeds' protocols on {run['device']}",
        SCALED if run["setting"]["scaled_down"] else "",
        provenance(run),
        *(section(run, seed, f"{heading}#") for seed in measured),
    )


def section(run: Mapping[str, Any], seed: str, heading: str) -> str:
    """A seed's section: what was measured, the tables, failures, and the sources of the published figures."""
    found, protocol = of_run(run, seed), SEEDS[seed]
    counts = [
        f"{_timed(found, name)} of {len(part.shapes)} shapes {part.axes}" for name, part in protocol.parts.items()
    ]
    return paragraphs(
        f"{heading} Seed {seed}: {protocol.title}",
        f"{protocol.about} Measured: {', '.join(counts)}.",
        TABLES[seed](found),
        _missing(found),
        _sources(found, seed),
    )


def provenance(run: Mapping[str, Any]) -> str:
    environment = run["environment"]
    versions = f"torch {environment['torch']}, Triton {environment['triton']}"
    return f"{run['device']}; {versions}; {run['commit']}; {run['date']}."


def of_document(document: dict[str, Any]) -> str:
    """The reports of all runs of a file, for a page of `docs/`."""
    return paragraphs(*(report(run, 3) for run in document["results"]["runs"]))


def _timed(found: Figures, part: str) -> int:
    """The number of shapes with a time of fp8fn's."""
    rows = found.rows[part].values()
    return sum(any(row.peer == "fp8fn" and row.us is not None for row in each.values()) for each in rows)


def _missing(found: Figures) -> str:
    """Each reason for a missing figure, once, with its labels and the number of shapes."""
    reasons: dict[str, dict[str, int]] = {}
    for by_shape in found.rows.values():
        for by_label in by_shape.values():
            for label, row in by_label.items():
                if row.unavailable is not None:
                    labels = reasons.setdefault(row.unavailable, {})
                    labels[label] = labels.get(label, 0) + 1
    lines = []
    for reason, labels in reasons.items():
        counted = [f"{label} ({count} {'shape' if count == 1 else 'shapes'})" for label, count in labels.items()]
        lines.append(f"- {', '.join(counted)}: n/a: `{reason}`")
    return "\n".join(lines)


def _sources(found: Figures, seed: str) -> str:
    if found.published is None:
        return ""
    lines = [f"- {source.gpu}: {source.where}." for _, source in found.published.sources_of(seed)]
    return paragraphs("Published figures are those of:", "\n".join(lines))
