"""Products of few rows by an FP8 weight, beside bf16: `python -m fp8fn bench decode`.

Suites:
- "decode": 1, 4 and 16 rows by the weights of an MLP and of attention's projections.
- "rows": 32, 64 and 128 rows, one of each sequence, by larger weights too.
- "batched": a batch of products, each with its own weight; also by the kernel in Triton.
- "mx": both operands in MX-FP8, also beside Triton's `tl.dot_scaled`.
- "mx_moe": tokens by the MX-FP8 weights of their experts.
- "qkv": 1, 8 and 16 rows by three weights of one matrix, in one launch and one by one; "gate_up": by two weights.

A call multiplies by several weights in turn, so that no product finds its weight in the L2. Figures are µs of one
product (of all tokens in "mx_moe"), from a CUDA graph where there is one. The L2 is flushed by reads: after a flush by
writes, dirty lines would be written back during the first products, which write little themselves.

In a CUDA graph, a product knows that the fp8fn kernel ahead of it does not write its weight. "behind others" are
products that take the kernel ahead for one of another library. With one row, a copy of the weights' bytes is measured
too, with a launch for each weight. TB/s count the weights' bytes; for a large batch, TFLOP/s are given. SNR compares
the bf16 output with the float64 product of the bf16 operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from statistics import geometric_mean
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

import fp8fn
from fp8fn import ScaledTensor
from fp8fn.bench import command, siblings, tables
from fp8fn.bench.accuracy import snr_db, worst
from fp8fn.bench.command import Suite
from fp8fn.bench.layer import normal
from fp8fn.bench.measure import Case, Row
from fp8fn.bench.shapes import BATCH_DECODE, BATCHED, DECODE, GATE_UP, MX_DECODE, MX_MOE, QKV
from fp8fn.ops.cuda.runtime import graph_capture
from fp8fn.ops.operands import Quantized, WeightProduct
from fp8fn.ops.targets import target_of
from fp8fn.timing import Call, Schedule

BLOCK: Final = (128, 128)
ROWS: Final = (1, 4, 16)
BATCH_ROWS: Final = (32, 64, 128)
MX_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
EXPERTS: Final = 128
TOP_K: Final = 4
BLOCK_M: Final = 16
COPIES: Final = 64  # copies of a weight of at least 1.2 MB are together larger than the L2
BATCHES: Final = 8
_LARGE: Final = 2**36  # B * M * N * K from which one batch of weights is larger than the L2
_SAMPLES: Final = 256
BEHIND_OTHERS: Final = ", behind others"
BY_TRITON: Final = ", by Triton"
COPY: Final = "copy of as much"
T = TypeVar("T")
# A call takes some hundred microseconds, and there are a hundred shapes: turns are shorter than for large products.
SCHEDULE: Final = Schedule(rounds=3, burst_ms=10.0, warm_s=0.2, flush="reads")


def behind_others(x: Any, w: Any) -> Tensor:
    graph_capture.forget()
    return fp8fn.gemm(x, w)


def by_triton(x: Tensor, w: ScaledTensor) -> Tensor:
    """The product by the kernel in Triton, also where one in CUDA C++ serves."""
    from fp8fn.ops.triton.mm_a16w8 import configure, plan_mm_a16w8

    out = x.new_empty(*x.shape[:-1], w.shape[-1])
    product = WeightProduct(x=x, w=Quantized(w.data, w.scale, w.block), out=out, target=target_of(x.device))
    for launch in plan_mm_a16w8(product, configure(product)):
        launch.run()
    return out


class Weights:
    """`x (B, M, K) @ w (B, K, N)` for each of several w, stored as `(B, N, K)`. With `batch` 0 there is no B."""

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

    def round(self, multiply: Callable[[Any, Any], Tensor], weights: Sequence[Any], x: Any = None) -> Call:
        """The call that multiplies x by each weight and returns the last product.

        For `behind_others`, a kernel of PyTorch runs ahead of the first product as well.
        """
        x = self.x if x is None else x
        before = torch.empty(1, device=self.device) if multiply is behind_others else None

        def call() -> Tensor:
            if before is not None:
                before.zero_()
            for w in weights:
                out = multiply(x, w)
            return out

        return call

    @property
    def elements(self) -> float:
        """Elements of all weights together."""
        return float(self.matrices) * self.N * self.K

    def case(self, peer: str, name: str, size: int, build: Callable[[], Call], operations: float = 0.0) -> Case:
        """A case that reads `size` bytes for each element of the weights."""
        return Case(peer, name, build, lambda out: {"out": self.snr_db(out)}, operations, size * self.elements)

    def snr_db(self, found: Tensor) -> float:
        """SNR of the product by the last weight, over at most `_SAMPLES` rows and three matrices of a batch."""
        rows = torch.linspace(0, self.M - 1, min(self.M, _SAMPLES)).long().to(self.device)
        picked = self.x.index_select(-2, rows)
        pairs = [(picked, self.one(self.copies - 1), found.index_select(-2, rows))]
        if self.lead:
            pairs = [(pairs[0][0][i], pairs[0][1][i], pairs[0][2][i]) for i in (0, self.lead[0] // 2, self.lead[0] - 1)]
        return min(snr_db(x.double() @ w.double(), out) for x, w, out in pairs)


def cases(weights: Weights) -> list[Case]:
    products = weights.M * weights.elements
    operations = 2 * products if weights.lead and products >= _LARGE else 0.0
    multiply = torch.bmm if weights.lead else torch.mm
    found = [
        weights.case("fp8fn", "w in 128x128", 1, lambda: weights.round(fp8fn.gemm, weights.quantized), operations),
        weights.case("torch", "bf16", 2, lambda: weights.round(multiply, weights.w), operations),
    ]
    if not weights.lead:
        behind = weights.case(
            "fp8fn", f"w in 128x128{BEHIND_OTHERS}", 1, lambda: weights.round(behind_others, weights.quantized)
        )
        found.insert(1, behind)
    else:

        def dequantized(x: Tensor, w: ScaledTensor) -> Tensor:
            return torch.bmm(x, fp8fn.dequantize(w, torch.bfloat16))

        name = "dequantize, then bf16"
        found.append(weights.case("torch", name, 1, lambda: weights.round(dequantized, weights.quantized), operations))
        if weights.device.type == "cuda":  # Triton does not compile for a CPU
            name = f"w in 128x128{BY_TRITON}"
            found.append(
                weights.case("fp8fn", name, 1, lambda: weights.round(by_triton, weights.quantized), operations)
            )
    return found


def decode_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`."""
    weights = Weights(0, shape, COPIES if device.type == "cuda" else 2, device)
    found = cases(weights)
    if weights.M == 1:
        found.append(Case("torch", COPY, partial(_copy, weights), bytes=2 * weights.elements))
    return found


def _copy(weights: Weights) -> Call:
    sources = [w.data for w in weights.quantized]
    targets = [torch.empty_like(source) for source in sources]

    def call() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return call


def batched_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(B, M, N, K)`."""
    batch, m, n, k = shape
    return cases(Weights(batch, (m, n, k), 1 if batch * m * n * k >= _LARGE else BATCHES, device))


def mx_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(M, N, K)`, on operands that are quantized beforehand."""
    weights = Weights(0, shape, COPIES if device.type == "cuda" else 2, device)
    a = cached(lambda: fp8fn.quantize(weights.x, (1, 32), scale="e8m0"))
    b = cached(lambda: [fp8fn.quantize(w, (32, 1), scale="e8m0") for w in weights.w])

    def dot_scaled() -> Call:
        from fp8fn.bench.dot_scaled import plan_dense

        out, target = weights.x.new_empty(weights.M, weights.N), target_of(device)
        launches = [plan_dense(a(), w, out, target) for w in b()]

        def call() -> Tensor:
            for launch in launches:
                launch.run()
            return out

        return call

    found = [
        weights.case("fp8fn", "MX-FP8", 1, lambda: weights.round(fp8fn.gemm, b(), a())),
        weights.case("fp8fn", f"MX-FP8{BEHIND_OTHERS}", 1, lambda: weights.round(behind_others, b(), a())),
        weights.case("torch", "bf16", 2, lambda: weights.round(torch.mm, weights.w)),
    ]
    if device.type == "cuda":  # Triton does not compile for a CPU
        found.append(weights.case("triton", "dot_scaled", 1, dot_scaled))
    return found


def cached(make: Callable[[], T]) -> Callable[[], T]:
    """`make`, called once: later calls return the first result."""
    return lru_cache(maxsize=1)(make)


class Tokens:
    """`T` tokens, each with `TOP_K` of `experts` experts of weights `(K, N)`; the output has `T * TOP_K` rows.

    `a_div` is `TOP_K` where the experts of a token share its row, as in an MLP's first product, and 1 where each has a
    row of its own, as in the second. Without `weighted`, rows are not multiplied by their tokens' weights.
    """

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, *, experts: int = EXPERTS, a_div: int = TOP_K,
        weighted: bool = True,
    ) -> None:  # fmt: skip
        self.T, self.N, self.K = shape
        self.device, self.experts, self.a_div, self.weighted = device, experts, a_div, weighted
        generator = torch.Generator().manual_seed(0)
        chosen = torch.rand(self.T, experts, generator=generator).topk(TOP_K).indices
        self.chosen = chosen.to(device)
        factors = torch.rand(self.T * TOP_K, generator=generator).to(device)
        self.factors = factors if weighted else torch.ones_like(factors)
        self.used = len(chosen.unique())

    @cached_property
    def x(self) -> Tensor:
        return normal(self.T * TOP_K // self.a_div, self.K, self.device, 0)

    @cached_property
    def w(self) -> Tensor:
        return normal(self.experts * self.N, self.K, self.device, 1).view(self.experts, self.N, self.K).mT

    @cached_property
    def layout(self) -> tuple[Tensor, Tensor, Tensor]:
        return fp8fn.sort_tokens(self.chosen, self.experts, BLOCK_M)

    @cached_property
    def a(self) -> ScaledTensor:
        return fp8fn.quantize(self.x, (1, 32), scale="e8m0")

    @cached_property
    def b(self) -> ScaledTensor:
        return fp8fn.quantize(self.w, (32, 1), scale="e8m0")

    def ours(self) -> Call:
        given = self.a, self.b, *self.layout
        factors = self.factors if self.weighted else None
        return lambda: fp8fn.moe_gemm(*given, top_k=TOP_K, a_div=self.a_div, token_weights=factors)

    def dot_scaled(self) -> Call:
        from fp8fn.bench.dot_scaled import plan_routed

        out = self.x.new_zeros(self.T * TOP_K, self.N)
        launch = plan_routed(self.a, self.b, self.layout, self.a_div, self.factors, out, target_of(self.device))

        def call() -> Tensor:
            launch.run()
            return out

        return call

    def bf16(self) -> Call:
        """Gather the rows by expert, multiply them in one grouped product, and scatter the results."""
        order = self.chosen.flatten().sort(stable=True).indices
        counts = torch.bincount(self.chosen.flatten(), minlength=self.experts)
        offsets, w = counts.cumsum(0).to(torch.int32), self.w
        factors, source = self.factors[order, None], order // self.a_div
        out = self.x.new_empty(self.T * TOP_K, self.N)

        def call() -> Tensor:
            product = torch._grouped_mm(self.x[source], w, offs=offsets)
            out[order] = (product * factors).to(out.dtype)
            return out

        return call

    def snr_db(self, found: Tensor) -> float:
        """SNR over the rows of the first and of the last token, the lower of both."""
        least = []
        for token in (0, self.T - 1):
            rows = slice(token * TOP_K, (token + 1) * TOP_K)
            source = (torch.arange(rows.start, rows.stop) // self.a_div).tolist()
            pairs = zip(source, self.chosen[token].tolist(), strict=True)
            exact = torch.stack([self.x[row].double() @ self.w[expert].double() for row, expert in pairs])
            least.append(snr_db(exact * self.factors[rows, None], found[rows]))
        return min(least)


def mx_moe_cases(shape: tuple[int, ...], device: torch.device) -> list[Case]:
    """The cases of one shape `(T, N, K)`."""
    return routed_cases(Tokens(shape, device))


def routed_cases(tokens: Tokens) -> list[Case]:
    elements = float(tokens.used) * tokens.N * tokens.K

    def case(peer: str, name: str, size: int, build: Callable[[], Call]) -> Case:
        return Case(peer, name, build, lambda out: {"out": tokens.snr_db(out)}, 0.0, size * elements)

    found = [case("fp8fn", "MX-FP8", 1, tokens.ours), case("torch", "bf16", 2, tokens.bf16)]
    if tokens.device.type == "cuda":
        found.append(case("triton", "dot_scaled", 1, tokens.dot_scaled))
    return found


def microseconds(row: Row) -> float | None:
    """Microseconds of one product of a call."""
    per_call = row.graph_us or row.us
    sizes = 1.0
    for size in (*row.shape[:-3], *row.shape[-2:]):
        sizes *= size
    copies = row.bytes / sizes / (2 if row.case in ("bf16", COPY) else 1)
    return None if per_call is None else per_call / copies


def table(run: dict[str, Any]) -> str:
    """A line for each shape: µs of a product, TB/s of the weight's bytes (or TFLOP/s), and speedups over the others."""
    rows = tables.rows_of(run)
    copies = {row.shape[1:]: microseconds(row) for row in rows if row.case == COPY}  # measured at the lowest M only
    labels = list(dict.fromkeys(row.label for row in rows))
    mine = next(label for label in labels if label.startswith("fp8fn "))
    others = [label for label in labels if label in ("torch bf16", "triton dot_scaled")]
    ways = [label for label in labels if label.endswith((BEHIND_OTHERS, BY_TRITON))]
    of_call = run["results"].get("suite") == "mx_moe"
    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        found = {row.label: row for row in rows if row.shape == shape}
        times = {label: (row.graph_us or row.us) if of_call else microseconds(row) for label, row in found.items()}
        if shape[1:] in copies:
            times[f"torch {COPY}"] = copies[shape[1:]]
        ours, rate = times.get(mine), ""
        if ours is not None:
            row = found[mine]
            rate = f"{tables.rate((row.operations or row.bytes) / (row.graph_us or row.us or 1.0) / 1e6)} {row.unit}"
        cells = ["n/a" if (time := times.get(label)) is None else f"{time:.1f}" for label in labels]
        faster = ["" if not ours or (time := times.get(label)) is None else f"{time / ours:.2f}x" for label in others]
        for way in ways:
            time, bf16 = times.get(way), times.get("torch bf16")
            faster.append(f"{bf16 / time:.2f}x" if time and bf16 else "")
        least = worst(value for row in found.values() for value in row.snr_db.values())
        lines.append([",".join(map(str, shape)), *cells, rate, *faster, "" if least is None else f"{least:.1f}"])
    over = [f"speedup over {label.split(maxsplit=1)[1]}" for label in others]
    over += [f"{way.rsplit(', ', 1)[1]}, speedup over bf16" for way in ways]
    headers = ("shape", *(f"{label}, µs" for label in labels), "fp8fn", *over, "worst SNR, dB")
    return "\n".join([tables.markdown(lines, headers), "", tables.provenance(run)])


def summary(run: dict[str, Any]) -> str:
    """A line for each M and for whole and divided weights: speedup over bf16, and shares of two copies' bandwidths.

    The copies are a large one, and one launch for each weight's bytes. Figures are geometric means, with the lowest in
    brackets.
    """
    rows, copy = tables.rows_of(run), run["results"]["copy_tb_s"]
    lines = []
    as_much = {row.shape[1:]: row.bytes / row.graph_us / 1e6 for row in rows if row.case == COPY and row.graph_us}
    for divided, m in sorted({((k, n) not in MX_DECODE, m) for m, n, k in (row.shape for row in rows)}):
        of = [row for row in rows if row.shape[0] == m and ((row.shape[2], row.shape[1]) not in MX_DECODE) == divided]
        bf16 = {row.shape: row.graph_us for row in of if row.case == "bf16"}
        cells = []
        for label in dict.fromkeys(row.label for row in of if row.peer == "fp8fn"):
            times = {row.shape: row.graph_us for row in of if row.label == label}
            faster = [theirs / ours for shape, ours in times.items() if ours and (theirs := bf16[shape])]
            rates = {row.shape[1:]: row.bytes / row.graph_us / 1e6 for row in of if row.label == label and row.graph_us}
            cells.append(f"{geometric_mean(faster):.2f}x ({min(faster):.2f}x)")
            cells.append(_shares([rate / copy for rate in rates.values()]))
            cells.append(_shares([rate / as_much[weight] for weight, rate in rates.items() if weight in as_much]))
        lines.append([str(m), f"{len(bf16)} {'divided' if divided else 'whole'}", *cells])
    figures = "speedup over bf16", "of a copy", "of a copy of as much"
    headers = ("M", "weights", *figures, *(f"behind others, {name}" for name in figures))
    return "\n".join([tables.markdown(lines, headers, left=1), "", tables.provenance(run)])


def _shares(shares: Sequence[float]) -> str:
    """The geometric mean, with the lowest in brackets; empty without shares."""
    return f"{100 * geometric_mean(shares):.0f} % ({100 * min(shares):.0f} %)" if shares else ""


_suite = partial(Suite, table=table, schedule=SCHEDULE, graphs=True)
SUITES = {
    "decode": _suite(tuple((m, n, k) for k, n in DECODE for m in ROWS), decode_cases),
    "rows": _suite(tuple((m, n, k) for k, n in BATCH_DECODE for m in BATCH_ROWS), decode_cases),
    "mx": _suite(tuple((m, n, k) for k, n in MX_DECODE for m in MX_ROWS), mx_cases),
    "mx_moe": _suite(MX_MOE, mx_moe_cases, axes="T,N,K"),
    "batched": _suite(BATCHED, batched_cases, axes="B,M,N,K"),
    "qkv": _suite(QKV, siblings.qkv, table=siblings.table, axes="M,N,B,K"),
    "gate_up": _suite(GATE_UP, siblings.gate_up, table=siblings.table),
}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main("decode", __doc__, SUITES, argv)
