"""Products alone and beside a kernel that holds processors, as NCCL's do: `python -m fp8fn.bench.beside --json OUT`.

Each by two ways to share out the tiles: in advance, and by lists of which those that are done take over the rest
(`deal.cuh`). It needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from fp8fn.bench import record
from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig, plan
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, pointers
from fp8fn.ops.operands import ScaledProduct
from fp8fn.ops.targets import Target, hopper_fault, target_of
from fp8fn.ops.tuning.problem import Problem, empty_product

SHAPES: Final = (
    (4096, 4096, 4096), (4096, 6144, 4096), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 7168, 2048),
    (4096, 2112, 7168), (8192, 6144, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 8192, 1024),
)  # fmt: skip
TILES: Final = {
    "256x128": ScaledMmConfig(SLICES_M=2, DEPTH=1),
    "256x128, a shared": ScaledMmConfig(SLICES_M=2, DEPTH=1, CLUSTER=2, SHARE_B=False),
    "128x256": ScaledMmConfig(BN=256, SLICES_N=2, DEPTH=1),
    "192x128": ScaledMmConfig(MATH=3, DEPTH=1),
    "128x128": ScaledMmConfig(),
}
_ROUNDS: Final = 400_000  # of the kernel beside: some milliseconds


@triton.jit
def _spin(out, rounds):  # type: ignore[no-untyped-def]
    x = tl.program_id(0) * 1.0
    for _ in range(rounds):
        x = x * 1.0001 + 0.5
    tl.store(out + tl.program_id(0), x)


def ways(product: ScaledProduct, config: ScaledMmConfig) -> dict[str, CudaLaunch]:
    """The launch by both ways; nothing where there are no more tiles than processors, or few K tiles."""
    (launch,) = plan(product, config)
    return {"in advance": replace(launch, counted=""), "lists": launch} if launch.counted else {}


def random_product(shape: tuple[int, int, int], target: Target) -> ScaledProduct:
    """A product of random operands in blocks of 1 x 128 and 128 x 128."""
    product = empty_product(Problem(*shape), "cuda", target)
    for operand in (product.a, product.b):
        operand.data.copy_(torch.randn(operand.data.shape, device="cuda").to(operand.data.dtype))
        operand.scale.fill_(1.0)
    return product


def compared(launches: dict[str, CudaLaunch], product: ScaledProduct, held: int, repeats: int) -> dict[str, float]:
    """Medians of each way in microseconds, alone and beside a kernel that holds `held` processors, in turn."""
    starts: dict[str, Callable[[], None]] = {}
    outs = []
    for name, launch in launches.items():
        starts[name] = partial(launch.prepare().launch, pointers(launch.args))
        product.out.fill_(float("nan"))
        starts[name]()
        outs.append(product.out.clone())
    if not torch.equal(*outs):
        raise AssertionError("the two ways have other values")
    beside, scratch = torch.cuda.Stream(), torch.empty(max(held, 1), device="cuda")
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for blocks in (0, held):
            for name, start in starts.items():
                torch.cuda.synchronize()
                if blocks:
                    with torch.cuda.stream(beside):
                        _spin[(blocks,)](scratch, _ROUNDS)
                torch.cuda._sleep(50_000)  # until it has begun, and the host is ahead
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                start()
                end.record()
                torch.cuda.synchronize()
                where = f"{name}, {'beside' if blocks else 'alone'}"
                times.setdefault(where, []).append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, default=24, help="processors that the other kernel holds")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = target_of(torch.device("cuda")) if torch.cuda.is_available() else None
    fault = "no GPU is there" if target is None else hopper_fault(target)
    if target is None or fault is not None:
        raise SystemExit(f"fp8fn.bench.beside needs a Hopper GPU: {fault}")
    # Launches have counters in a process of a group, of which NCCL's kernels run beside them.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        product = random_product(shape, target)
        for tile, config in TILES.items():
            if launches := ways(product, config):
                medians = compared(launches, product, args.held, args.repeats)
                rows.append({"shape": shape, "tile": tile, "us": medians})
                alone = medians["in advance, alone"]
                print(
                    *shape, tile, *(f"{name}: {us / alone:.3f}" for name, us in medians.items()), sep="  ", flush=True
                )
    if args.json is not None:
        record.write(args.json, "beside", {"held": args.held, "repeats": args.repeats, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
