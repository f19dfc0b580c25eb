"""The products and quantizers of a linear layer on this GPU, beside bf16: `python -m fp8fn bench dense`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fp8fn
from fp8fn.bench.record import write
from fp8fn.bench.shapes import ANCHORS


def cases(m: int, n: int, k: int) -> dict[str, tuple[Callable[[], Any], float, str]]:
    """For one layer: name → function, its operations or bytes, and the unit."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    x_row, x_col = fp8fn.quantize_dual(x)
    g_row, g_col = fp8fn.quantize_dual(g)
    w_q = fp8fn.quantize(w, (128, 128))
    x_whole, w_whole = fp8fn.quantize(x, (-1, -1)), fp8fn.quantize(w, (-1, -1))
    x_line, w_line = fp8fn.quantize(x, (1, -1)), fp8fn.quantize(w, (1, -1))
    operations, elements = 2.0 * m * n * k, float(m * k)
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()

    def step(linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(linear(leaf_x, leaf_w), (leaf_x, leaf_w), g)

    return {
        "bf16 forward": (lambda: x @ w.mT, operations, "TFLOP/s"),
        "forward 1x128·128x128": (lambda: fp8fn.gemm(x_row, w_q.mT), operations, "TFLOP/s"),
        "dgrad 1x128·128x128": (lambda: fp8fn.gemm(g_row, w_q), operations, "TFLOP/s"),
        "wgrad 1x128·128x1": (lambda: fp8fn.gemm(g_col.mT, x_col), operations, "TFLOP/s"),
        "forward rowwise": (lambda: fp8fn.gemm(x_line, w_line.mT), operations, "TFLOP/s"),
        "forward tensorwise": (lambda: fp8fn.gemm(x_whole, w_whole.mT), operations, "TFLOP/s"),
        "bf16 step": (step(torch.nn.functional.linear), 3 * operations, "TFLOP/s"),
        "step with quantization": (step(fp8fn.linear), 3 * operations, "TFLOP/s"),
        "copy": (lambda: x.clone(), 4 * elements, "TB/s"),
        "quantize (1,128)": (lambda: fp8fn.quantize(x, (1, 128)), 3 * elements, "TB/s"),
        "quantize (128,1)": (lambda: fp8fn.quantize(x, (128, 1)), 3 * elements, "TB/s"),
        "quantize (128,128)": (lambda: fp8fn.quantize(x, (128, 128)), 3 * elements, "TB/s"),
        "quantize_dual": (lambda: fp8fn.quantize_dual(x), 4 * elements, "TB/s"),
    }


def measure(shape: tuple[int, int, int], rounds: int = 3) -> list[dict[str, Any]]:
    """Medians over interleaved rounds, the L2 flushed between runs."""
    from triton.testing import do_bench

    functions = cases(*shape)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (function, _, _) in functions.items():
            times[name].append(do_bench(function, warmup=10, rep=50, return_mode="median"))
    rows = []
    for name, (_, work, unit) in functions.items():
        ms = statistics.median(times[name])
        rate = work / ms / 1e9  # operations, or bytes, in 1e12 a second
        rows.append({"shape": shape, "case": name, "ms": ms, "rate": rate, "unit": unit, "ms_all": times[name]})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(prog="fp8fn bench dense", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures and the environment to FILE")
    parser.add_argument("--shape", metavar="M,N,K", action="append", help="a shape; by default the five anchors")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU here; `bench overhead` measures the host's side on the CPU")
    shapes = [tuple(int(size) for size in text.split(",")) for text in args.shape or []] or list(ANCHORS)
    results = []
    for shape in shapes:
        for row in measure((shape[0], shape[1], shape[2])):
            results.append(row)
            print(
                f"{row['shape']!s:24} {row['case']:24} {row['ms']:9.4f} ms {row['rate']:8.2f} {row['unit']}", flush=True
            )
    if args.json:
        write(args.json, "dense", results)
    return 0
