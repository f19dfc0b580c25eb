"""Host time of calls on a GPU, and of the first call of a process: `python -m fp8fn bench host`.

Calls are timed back to back, without waiting for the device. Their products are small, so that the device keeps up with
the host. The first call is timed in new processes, the first of which fills the cache of compiled kernels.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

import fp8fn
from fp8fn.bench.record import write
from fp8fn.cli import options

# Microseconds, and seconds for the first call and the import.
BARS: Final = {
    "gemm, quantized operands": 25.0,
    "linear, forward and backward": 280.0,
    "first call, warm cache": 0.5,
    "import fp8fn over import torch": 0.3,
}
_SIZE: Final = 256

_FIRST_CALL: Final = """
import time, torch
start = time.perf_counter()
import fp8fn
imported = time.perf_counter()
torch.empty(1, device="cuda")
ready = time.perf_counter()
x = torch.randn({0}, {0}, device="cuda", dtype=torch.bfloat16)
y = fp8fn.gemm(fp8fn.quantize(x, (1, 128)), fp8fn.quantize(x, (128, 128)))
torch.cuda.synchronize()
print(imported - start, time.perf_counter() - ready)
"""


def calls(size: int = _SIZE) -> dict[str, Callable[[], Any]]:
    """The calls that are timed, on square bf16 operands of `size`."""
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    x_row, w_square = fp8fn.quantize(x, (1, 128)), fp8fn.quantize(w, (128, 128)).mT
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()

    def inference() -> Any:
        with torch.no_grad():
            return fp8fn.linear(x, w)

    def step(linear: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(linear(*leaves), leaves, x)

    return {
        "gemm, quantized operands": lambda: fp8fn.gemm(x_row, w_square),
        "quantize (1,128)": lambda: fp8fn.quantize(x, (1, 128)),
        "quantize_dual": lambda: fp8fn.quantize_dual(x),
        "linear, no_grad": inference,
        "linear, forward and backward": step(fp8fn.linear),
        "bf16 linear, forward and backward": step(torch.nn.functional.linear),
        "torch.mm": lambda: torch.mm(x, w),
    }


def launch_us(call: Callable[[], Any], rounds: int = 20, repeats: int = 100) -> float:
    """Median microseconds of a call over rounds of `repeats` calls. The wait after a round is not timed."""
    for _ in range(10):
        call()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - start) / repeats * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def first_call(runs: int = 4) -> tuple[float, float]:
    """Median seconds of `import fp8fn` after torch, and of the first call, in new processes after a first one."""
    times = []
    for _ in range(runs):
        command = [sys.executable, "-c", _FIRST_CALL.format(_SIZE)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        times.append(tuple(float(text) for text in output.split()))
    imports, calls_ = zip(*times[1:], strict=True)
    return statistics.median(imports), statistics.median(calls_)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a bar is exceeded."""
    parser = options.parser_of(
        "bench host",
        __doc__,
        "--json host.json",
    )
    options.add_json(parser)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU here; `bench overhead` measures the host's side on the CPU")
    results: dict[str, dict[str, Any]] = {}
    for name, call in calls().items():
        results[name] = {"value": launch_us(call), "unit": "µs", "bar": BARS.get(name)}
    imported, called = first_call()
    for name, value in (("import fp8fn over import torch", imported), ("first call, warm cache", called)):
        results[name] = {"value": value, "unit": "s", "bar": BARS[name]}
    for name, row in results.items():
        bar = "" if row["bar"] is None else f"  (bar {row['bar']:g})"
        print(f"{name:36} {row['value']:8.3g} {row['unit']}{bar}", flush=True)
    if args.json:
        write(args.json, "host", results)
    return int(any(row["bar"] is not None and row["value"] > row["bar"] for row in results.values()))
