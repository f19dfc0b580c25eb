"""Few rows by an FP8 weight, beside bf16: `python -m fp8fn bench decode`.

Suites: "decode", the weights of an MLP and of attention's projections by 1, 4 and 16 rows; "batched", a weight for each
matrix of a batch. A call goes round several weights, so that neither finds its weight in L2, and figures are those of
one product: µs of a CUDA graph's replay, else of launches. TB/s counts the weight's bytes, of a large batch the
operations are counted. SNR is that of the way from a bf16 weight to a bf16 output, against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.bench import command, tables
from fp8fn.bench.accuracy import snr_db, worst
from fp8fn.bench.command import Suite
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case, Row
from fp8fn.bench.shapes import BATCHED, DECODE
from fp8fn.bench.timing import Call, Schedule

BLOCK: Final = (128, 128)
ROWS: Final = (1, 4, 16)
COPIES: Final = 64  # of a weight of at least 1.2 MB: more than the L2
BATCHES: Final = 8
_LARGE: Final = 2**36  # of M * N * K over a batch: one copy is more than the L2
_SAMPLES: Final = 256
# A hundred shapes, of which a call takes some hundred microseconds: shorter turns than those of large products.
SCHEDULE: Final = Schedule(rounds=3, burst_ms=10.0, warm_s=0.2)


class Weights:
    """`x (B, M, K) @ w (B, K, N)` for each of several w, stored as `(B, N, K)`; without `batch` of one matrix."""

    def __init__(self, batch: int, shape: tuple[int, ...], copies: int, device: torch.device) -> None:
        self.lead = (batch,) if batch else ()
        self.M, self.N, self.K = shape
        self.copies, self.device = copies, device

    @property
    def matrices(self) -> int:
        return self.copies * (self.lead[0] if self.lead else 1)

    @cached_property
    def x(self) -> Tensor:
        rows = self.M * (self.lead[0] if self.lead else 1)
        return normal(rows, self.K, self.device, 0).view(*self.lead, self.M, self.K)

    def one(self, seed: int) -> Tensor:
        rows = self.N * (self.lead[0] if self.lead else 1)
        return normal(rows, self.K, self.device, seed + 1).view(*self.lead, self.N, self.K).mT

    @cached_property
    def w(self) -> list[Tensor]:
        return [self.one(seed) for seed in range(self.copies)]

    @cached_property
    def quantized(self) -> list[ScaledTensor]:
        return [fp8fn.quantize(self.one(seed), BLOCK) for seed in range(self.copies)]

    def round(self, multiply: Callable[[Tensor, Any], Tensor], weights: Sequence[Any]) -> Call:
        """`multiply` by each weight, of which the last product is returned."""
        x = self.x

        def call() -> Tensor:
            for w in weights:
                out = multiply(x, w)
            return out

        return call

    def snr_db(self, found: Tensor) -> float:
        """Of the last weight's product; of a large one, of some rows and matrices."""
        rows = torch.linspace(0, self.M - 1, min(self.M, _SAMPLES)).long().to(self.device)
        picked = self.x.index_select(-2, rows)
        pairs = [(picked, self.one(self.copies - 1), found.index_select(-2, rows))]
        if self.lead:
            pairs = [(pairs[0][0][i], pairs[0][1][i], pairs[0][2][i]) for i in (0, self.lead[0] // 2, self.lead[0] - 1)]
        return min(snr_db(x.double() @ w.double(), out) for x, w, out in pairs)


def cases(weights: Weights) -> list[Case]:
    elements = float(weights.matrices) * weights.N * weights.K
    operations = 2 * weights.M * elements if weights.M * elements >= _LARGE else 0.0

    def case(peer: str, name: str, size: int, build: Callable[[], Call]) -> Case:
        return Case(peer, name, build, lambda out: {"out": weights.snr_db(out)}, operations, size * elements)

    multiply = torch.bmm if weights.lead else torch.mm
    found = [
        case("fp8fn", "w in 128x128", 1, lambda: weights.round(fp8fn.gemm, weights.quantized)),
        case("torch", "bf16", 2, lambda: weights.round(multiply, weights.w)),
    ]
    if weights.lead:

        def dequantized(x: Tensor, w: ScaledTensor) -> Tensor:
            return torch.bmm(x, fp8fn.dequantize(w, torch.bfloat16))

        name = "dequantize, then bf16"
        found.append(case("torch", name, 1, lambda: weights.round(dequantized, weights.quantized)))
    return found


def decode_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """Of one `(M, N, K)`."""
    return cases(Weights(0, shape, COPIES if device.type == "cuda" else 2, device))


def batched_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """Of one `(B, M, N, K)`."""
    batch, m, n, k = shape
    return cases(Weights(batch, (m, n, k), 1 if batch * m * n * k >= _LARGE else BATCHES, device))


def microseconds(row: Row) -> float | None:
    """Of one product."""
    per_call = row.graph_us or row.us
    sizes = 1.0
    for size in (*row.shape[:-3], *row.shape[-2:]):
        sizes *= size
    copies = row.bytes / sizes / (2 if row.case == "bf16" else 1)
    return None if per_call is None else per_call / copies


def table(run: dict[str, Any]) -> str:
    """A line for each shape: µs of a product, TB/s of the weight's bytes (or TFLOP/s), bf16's time over ours."""
    rows = tables.rows_of(run)
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        found = {row.label: row for row in rows if row.shape == shape}
        times = {label: microseconds(row) for label, row in found.items()}
        ours, bf16 = times.get("fp8fn w in 128x128"), times.get("torch bf16")
        rate = ""
        if ours is not None:
            row = found["fp8fn w in 128x128"]
            rate = f"{tables.rate((row.operations or row.bytes) / (row.graph_us or row.us or 1.0) / 1e6)} {row.unit}"
        cells = ["n/a" if times.get(label) is None else f"{times[label]:.1f}" for label in labels]
        faster = "" if ours is None or bf16 is None else f"{bf16 / ours:.2f}x"
        least = worst(value for row in found.values() for value in row.snr_db.values())
        lines.append([",".join(map(str, shape)), *cells, rate, faster, "" if least is None else f"{least:.1f}"])
    from tabulate import tabulate

    headers = ("shape", *(f"{label}, µs" for label in labels), "fp8fn", "over bf16", "worst SNR, dB")
    aligned = ("left", *["right"] * (len(headers) - 1))
    body = str(tabulate(lines, headers, tablefmt="pipe", disable_numparse=True, colalign=aligned))
    return "\n".join([body, "", tables.provenance(run)])


SUITES = {
    "decode": Suite(
        tuple((m, n, k) for k, n in DECODE for m in ROWS), decode_cases, table, SCHEDULE, graphs=True, axes="M,N,K"
    ),
    "batched": Suite(BATCHED, batched_cases, table, SCHEDULE, graphs=True, axes="B,M,N,K"),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("decode", __doc__, SUITES, argv)
