"""`load_weights` of a sharded FP8 checkpoint to a GPU beside a plain safetensors load, and its peak host memory.

    python tests/stress/measure_load.py [--gigabytes 8] [--shards 4] [--folder FOLDER]

It writes the checkpoint, reads it once into the page cache, and times both loads in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fp8fn

N, K = 4096, 14336


def module(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(K, N, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def write(folder: Path, layers: int, shards: int) -> None:
    """A checkpoint in DeepSeek's layout: the same random bytes in each weight, which no load can know."""
    from fp8fn.weights import save

    with torch.device("meta"):
        model = module(layers)
    q = fp8fn.quantize(torch.randn(N, K, device="cuda", dtype=torch.bfloat16), (128, 128))
    for layer in model:
        copy = fp8fn.ScaledTensor(q.data.clone(), q.scale.clone(), q.block).to("cpu")
        layer.weight = nn.Parameter(fp8fn.FP8Weight(copy), requires_grad=False)
    save._SHARD_BYTES = -(-layers // shards) * (N * K + N * K // 4096)  # type: ignore[misc]
    fp8fn.save_weights(model, folder)


def host_bytes() -> int:
    """Memory of the process that lies on the host, mapped files included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


def timed(load: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the most host memory beyond that before the load."""
    before, peak, done = host_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, host_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    kept = load()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    del kept
    torch.cuda.empty_cache()
    return seconds, peak


def main() -> None:
    from safetensors.torch import load_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    layers = max(int(args.gigabytes * 1e9 / (N * K)), args.shards)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write(folder, layers, args.shards)
        files = sorted(folder.glob("*.safetensors"))
        largest = max(file.stat().st_size for file in files)

        def plain() -> object:
            return [load_file(file, device="cuda") for file in files]

        def ours() -> object:
            with torch.device("meta"):
                model = module(layers)
            fp8fn.load_weights(model, folder, device="cuda")
            return model

        for load in (plain, ours):  # the page cache, and CUDA's own memory
            timed(load)
        times: dict[str, list[float]] = {"plain": [], "load_weights": []}
        most = 0
        for _ in range(5):
            times["plain"].append(timed(plain)[0])
            seconds, peak = timed(ours)
            times["load_weights"].append(seconds)
            most = max(most, peak)
    best = {name: min(found) for name, found in times.items()}
    print(f"{len(files)} files, {layers * N * K / 1e9:.1f} GB, on {torch.cuda.get_device_name()}")
    print(f"plain {best['plain']:.2f} s, load_weights {best['load_weights']:.2f} s: "
          f"{best['plain'] / best['load_weights']:.2f} of its rate")  # fmt: skip
    print(f"peak host memory {most / 1e9:.2f} GB, the largest file {largest / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
