"""Products of a gathered sequence: `torchrun --nproc-per-node 4 -m fp8fn.bench.async_tp --json OUT`.

Two NCCL all-gathers and then the product, beside `fp8fn::gather_scaled_mm`, which multiplies while it gathers.
`--graph` captures each, so that the host's time does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fp8fn.bench import ranks, record
from fp8fn.ops.gather_scaled_mm import gather_scaled_mm_reference
from fp8fn.ops.symmetric_memory import not_pipelined

# N of all ranks: gate and up as one, and q, k, v as one, of Llama 3 8B; K is its width.
WIDTH: Final = 4096
WIDE: Final = {"gate_up": 28672, "qkv": 6144}


def run(tokens: int, width: int, n: int, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of both ways to compute one product, in turn; of the ranks' times the largest counts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(tokens // world, width, device=device, generator=generator).bfloat16()
    weight = torch.randn(n // world, width, device=device, generator=generator).bfloat16()
    a, b = torch.ops.fp8fn.quantize(x, (1, 128)), torch.ops.fp8fn.quantize(weight.mT, (128, 128))
    group: Any = dist.group.WORLD
    form = torch.bfloat16, world, group.group_name
    arguments = (a[0], a[1].contiguous(), [b[0]], [b[1]], (128, 128), [None], *form)
    ways: dict[str, Callable[..., tuple[Tensor, Tensor, list[Tensor]]]] = {
        "synchronous": gather_scaled_mm_reference, "pipelined": torch.ops.fp8fn.gather_scaled_mm,
    }  # fmt: skip
    (data, scale, outs), (other, other_scale, others) = (way(*arguments) for way in ways.values())
    equal = torch.equal(data.view(torch.uint8), other.view(torch.uint8)) and torch.equal(scale, other_scale)
    error = (outs[0].float() - others[0].float()).norm() / outs[0].float().norm()
    same = torch.tensor([equal, torch.equal(outs[0], others[0]), error < 1e-3], device=device).int()
    dist.all_reduce(same, dist.ReduceOp.MIN)
    if not (same[0] and same[2]):
        raise AssertionError(f"the pipelined op has other values: gathered {bool(same[0])}, relative error {error}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    calls: dict[str, Callable[[], object]] = {name: partial(way, *arguments) for name, way in ways.items()}
    if args.graph and device == "cuda":
        calls = {name: _captured(call) for name, call in calls.items()}
    for _ in range(args.warmup + args.repeats):
        for name, call in calls.items():
            dist.barrier()
            times[name].append(_milliseconds(call, device))
    medians = {name: statistics.median(values[args.warmup :]) for name, values in times.items()}
    slowest = torch.tensor(list(medians.values()), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = dict(zip((f"{name}_ms" for name in medians), slowest.tolist(), strict=True))
    first = "runs on the CPU" if device == "cpu" else not_pipelined(group.group_name, world)
    return {**found, "gain": slowest[0].item() / slowest[1].item(), "same_bits": bool(same[1]), "gathered_first": first}


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _milliseconds(call: Callable[[], object], device: str) -> float:
    """The time of one call, by the GPU's clock where there is one."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    elapsed: float = begin_event.elapsed_time(end_event)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 16384], help="of all ranks")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"K; N is in proportion to that of K={WIDTH}")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--graph", action="store_true", help="each call as a CUDA graph")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = ranks.join()
    rows = []
    for tokens in args.tokens:
        for name, n in WIDE.items():
            wide = n * args.width // WIDTH
            row = run(tokens, args.width, wide, device, args)
            rows.append({"product": name, "tokens": tokens, "k": args.width, "n": wide // dist.get_world_size(), **row})
            if dist.get_rank() == 0:
                print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                               for key, value in rows[-1].items()), flush=True)  # fmt: skip
    if dist.get_rank() == 0 and args.json is not None:
        record.write(args.json, "async_tp", ranks.described(args, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
