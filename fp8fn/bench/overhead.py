"""Host time of a call beyond its work: `python -m fp8fn bench overhead`.

A call on tiny CPU tensors, and the plain PyTorch functions that do its work, are timed in turn in many short rounds.
The fastest round of each counts, because other processes can only add time. The difference is the cost of dispatch,
checks and autograd's bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

import fp8fn
from fp8fn.bench.record import write
from fp8fn.cli import options
from fp8fn.ops import reference
from fp8fn.ops.operands import Quantized

# The largest overhead, in microseconds.
BARS: Final = {"quantize": 10.0, "gemm": 60.0}


class Overhead(NamedTuple):
    """Microseconds of a call and of its work alone."""

    call: float
    work: float

    @property
    def extra(self) -> float:
        return self.call - self.work


def measure(rounds: int = 2000, repeats: int = 10) -> dict[str, Overhead]:
    """The fastest of `rounds` of `repeats` calls, of `torch.ops.fp8fn.quantize` and of `fp8fn.gemm` under no_grad."""
    x, w = torch.randn(1, 32, dtype=torch.bfloat16), torch.randn(32, 32, dtype=torch.bfloat16)
    e4m3 = torch.float8_e4m3fn

    def gemm_work() -> None:
        a, a_scale = reference.quantize(x, (1, 128), e4m3, "fp32")
        b, b_scale = reference.quantize(w, (128, 128), e4m3, "fp32")
        reference.scaled_mm(Quantized(a, a_scale, (1, 128)), Quantized(b, b_scale, (128, 128)), None, torch.bfloat16)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would add their wake-up to both times
    try:
        with torch.no_grad():
            return {
                "quantize": _compare(
                    lambda: torch.ops.fp8fn.quantize(x, (1, 128)),
                    lambda: reference.quantize(x, (1, 128), e4m3, "fp32"),
                    rounds,
                    repeats,
                ),
                "gemm": _compare(lambda: fp8fn.gemm(x, w), gemm_work, rounds, repeats),
            }
    finally:
        torch.set_num_threads(threads)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a bar is exceeded."""
    parser = options.parser_of(
        "bench overhead",
        __doc__,
        "--json overhead.json",
    )
    options.add_json(parser)
    args = parser.parse_args(argv)
    results = measure()
    for name, result in results.items():
        print(
            f"{name:10} call {result.call:6.1f} µs  work {result.work:6.1f} µs  extra {result.extra:5.1f} µs"
            f"  (bar {BARS[name]:.0f})"
        )
    if args.json:
        figures = {name: {"call_us": r.call, "work_us": r.work, "extra_us": r.extra} for name, r in results.items()}
        write(args.json, "overhead", figures)
    return int(any(result.extra > BARS[name] for name, result in results.items()))


def _compare(call: Callable[[], object], work: Callable[[], object], rounds: int, repeats: int) -> Overhead:
    times: dict[Callable[[], object], list[float]] = {call: [], work: []}
    for _ in range(rounds):
        for function, samples in times.items():
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            samples.append((time.perf_counter() - start) / repeats * 1e6)
    return Overhead(min(times[call]), min(times[work]))
