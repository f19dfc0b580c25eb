"""Steps of FSDP2 with 16 bits and FP8 on the wire: `torchrun --nproc-per-node 2 -m fp8fn.bench.fsdp --json OUT`."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8fn.bench import record
from fp8fn.distributed import gather_fp8, update_scales

HEAD: Final = 128


class Layer(nn.Module):
    """A decoder layer of Llama 3 without rotary embeddings."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_proj, self.o_proj = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(hidden, hidden // 4, bias=False),
            nn.Linear(hidden, hidden // 4, bias=False),
        )
        self.gate_proj, self.up_proj = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.input_norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        out: Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


def _nothing(_: nn.Module) -> None:
    pass


def _torchao(model: nn.Module) -> Callable[[nn.Module], None]:
    float8 = import_module("torchao.float8")
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    after: Callable[[nn.Module], None] = float8.precompute_float8_dynamic_scale_for_fsdp
    return after


def _fp8(model: nn.Module) -> Callable[[nn.Module], None]:
    gather_fp8(model, where="*_proj.weight")
    return update_scales


# What changes the model and gives what runs after each step, and the backend.
VARIANTS: Final[dict[str, tuple[Callable[[nn.Module], Callable[[nn.Module], None]], str]]] = {
    "bf16": (lambda _: _nothing, "inductor"),
    "torchao, FP8 on the wire": (_torchao, "inductor"),
    "fp8fn, 16 bits on the wire": (lambda _: _nothing, "fp8fn"),
    "fp8fn, FP8 on the wire": (_fp8, "fp8fn"),
}


def run(name: str, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Times steps of one variant; the largest of the ranks' times counts."""
    prepare, backend = VARIANTS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(Layer(args.hidden, args.ffn) for _ in range(args.layers)))
    after = prepare(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if args.compile:
            layer.compile(backend=backend)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    after(model)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(args.batch, args.tokens, args.hidden, device=device, dtype=torch.bfloat16)
    times, losses = [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.warmup + args.steps):
        dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        loss = (model(x).float() - x.float().roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        _wait(device)
        seconds = torch.tensor(time.perf_counter() - begin, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item())
        losses.append(loss.item())
    measured = times[args.warmup :]
    return {
        "variant": name, "median_ms": 1e3 * statistics.median(measured), "least_ms": 1e3 * min(measured),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None, "losses": losses,
    }  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, value in (
        ("--hidden", 4096), ("--ffn", 14336), ("--layers", 12), ("--batch", 1), ("--tokens", 8192), ("--steps", 10),
        ("--warmup", 4),
    ):  # fmt: skip
        parser.add_argument(option, type=int, default=value)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    results = []
    for name in args.variants:
        try:
            results.append(run(name, args, device))
        except ImportError as error:
            results.append({"variant": name, "skipped": str(error)})
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(results[-1], flush=True)
    if dist.get_rank() == 0 and args.json is not None:
        found = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "ranks": dist.get_world_size(),
            "arguments": {key: value for key, value in vars(args).items() if key != "json"}, "rows": results,
        }  # fmt: skip
        record.write(args.json, "fsdp", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
