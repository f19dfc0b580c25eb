"""Training steps on several GPUs with 16 bits and FP8 on the wire.

`torchrun --nproc-per-node 4 -m fp8fn.bench.scale_out --json OUT` times FSDP2; `--kinds` adds FSDP2 beside tensor and
sequence parallelism, experts on all ranks, and bare gathers. `--graph` captures each step as one CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

import fp8fn
import fp8fn.distributed as fp8_styles
from fp8fn.bench import ranks, record, wire
from fp8fn.distributed import combine, dispatch, gather_fp8, update_scales
from fp8fn.ops.sharded import local_of

HEAD: Final = 128
# What changes a model, and gives what runs after each step.
Prepare: TypeAlias = Callable[[nn.Module], Callable[[nn.Module], None]]


class Attention(nn.Module):
    """Attention of Llama 3 without rotary embeddings."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, hidden // 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """The feed-forward network of Llama 3."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden), FeedForward(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        out: Tensor = x + self.feed_forward(self.mlp_norm(x))
        return out


class Experts(nn.Module):
    """A norm and experts, two for each token; this rank holds its part of the experts.

    `capacity` is that of `dispatch`, as a multiple of the rows that a rank sends; 0 for any number.
    """

    def __init__(self, hidden: int, ffn: int, experts: int, *, fp8: bool, capacity: float = 0.0) -> None:
        super().__init__()
        self.experts, self.fp8, self.capacity, local = experts, fp8, capacity, experts // dist.get_world_size()
        self.norm, self.router = nn.RMSNorm(hidden), nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(local, hidden, 2 * ffn) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(local, ffn, hidden) / ffn**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        one = torch.ones_like(order)
        counts = order.new_zeros(self.experts).index_add(0, chosen.flatten(), one)  # `bincount` waits for the device
        sent = y.repeat_interleave(2, 0)[order]
        if self.fp8:
            rows, routing = dispatch(sent, counts, capacity=int(self.capacity * sent.shape[0]) or None)
            out = fp8fn.expert_mlp(rows, self.up, self.down, routing.offsets, recipe=fp8fn.BLOCKWISE_POW2)
            out = combine(out, routing)
        else:
            out = self._in_16_bits(sent, counts)
        mixed = (out * weights.flatten()[order, None]).to(x.dtype)
        return x.index_add(0, order // 2, mixed)

    def _in_16_bits(self, sent: Tensor, counts: Tensor) -> Tensor:
        """As `dispatch` and `combine` send, in the type of the rows."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all

        world, group = dist.get_world_size(), dist.group.WORLD
        assert group is not None
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        to_send, to_receive = (x.view(world, -1).sum(1).tolist() for x in (counts, theirs))
        rows = all_to_all(sent, to_receive, to_send, group)
        expert = torch.arange(counts.numel() // world, device=counts.device).repeat(world)
        order = expert.repeat_interleave(theirs, output_size=rows.shape[0]).argsort(stable=True)
        ends = theirs.view(world, -1).sum(0).cumsum(0).to(torch.int32)
        out = _mlp(rows[order], self.up, self.down, ends)
        back: Tensor = all_to_all(torch.empty_like(out).index_copy(0, order, out), to_send, to_receive, group)
        return back


def _mlp(rows: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    gate, value = torch._grouped_mm(rows, up, offs=ends).chunk(2, -1)
    return torch._grouped_mm(F.silu(gate) * value, down, offs=ends)


def _nothing(_: nn.Module) -> None:
    pass


def _as_it_is(_: nn.Module) -> Callable[[nn.Module], None]:
    return _nothing


def _torchao(model: nn.Module) -> Callable[[nn.Module], None]:
    float8 = import_module("torchao.float8")
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    after: Callable[[nn.Module], None] = float8.precompute_float8_dynamic_scale_for_fsdp
    return after


def _gathered(recipe: str) -> Prepare:
    def prepare(model: nn.Module) -> Callable[[nn.Module], None]:
        gather_fp8(model, where="*_proj.weight", recipe=recipe)
        return update_scales

    return prepare


class Variant(NamedTuple):
    """One way to train the model of a kind: `kind` is "fsdp", "fsdp-tp" or "experts"."""

    kind: str
    name: str
    prepare: Prepare = _as_it_is
    backend: str = "inductor"
    options: dict[str, Any] | None = None
    styles: Any = torch_styles
    capacity: bool = False
    captured: bool = False
    graphs_only: bool = False


_POW2: Final = {"recipe": "blockwise_pow2"}
_ASYNC: Final = {**_POW2, "async_tp": True}
_TP: Final = (_gathered("blockwise_pow2"), "fp8fn")
VARIANTS: Final = (
    Variant("fsdp", "bf16"),
    Variant("fsdp", "torchao, FP8 on the wire", _torchao),
    Variant("fsdp", "fp8fn, 16 bits on the wire", backend="fp8fn"),
    Variant("fsdp", "fp8fn, FP8 on the wire", _gathered("blockwise"), "fp8fn"),
    Variant("fsdp-tp", "bf16"),
    Variant("fsdp-tp", "fp8fn, 16 bits on the wires", backend="fp8fn", options=_POW2),
    Variant("fsdp-tp", "fp8fn, FP8 on both wires", *_TP, _POW2, fp8_styles),
    Variant("fsdp-tp", "fp8fn, FP8 on both wires, async TP", *_TP, _ASYNC, fp8_styles, graphs_only=True),
    Variant("experts", "bf16"),
    Variant("experts", "fp8fn, FP8 to the experts", backend="fp8fn"),
    Variant("experts", "fp8fn, a capacity", backend="fp8fn", capacity=True),
    Variant("experts", "fp8fn, a capacity, as a CUDA graph", backend="fp8fn", capacity=True, captured=True),
)


class Trained(NamedTuple):
    """A model, what runs after each of its steps, this rank's input, the output that is wanted, and its share of both.

    Ranks of tensor parallelism share a batch: each has a part of its sequences.
    """

    model: nn.Module
    after: Callable[[nn.Module], None]
    x: Tensor
    wanted: Tensor
    share: float = 1.0


def built(variant: Variant, args: argparse.Namespace, device: str) -> Trained:
    """The model of a variant, sharded, with its layers compiled."""
    world, replica = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    if variant.kind == "experts":
        fp8 = variant.backend == "fp8fn"
        sizes = (args.hidden, args.expert_ffn, args.experts)
        capacity = args.expert_capacity if variant.capacity else 0.0
        make = (Experts(*sizes, fp8=fp8, capacity=capacity) for _ in range(args.expert_layers))
        with torch.device(device):
            model = nn.Sequential(*make).bfloat16()
        torch.manual_seed(1 + replica)
        x = torch.randn(args.tokens, args.hidden, device=device, dtype=torch.bfloat16)
        return Trained(model, _nothing, x, x.flip(-1))
    with torch.device(device):
        model = nn.Sequential(*(Layer(args.hidden, args.ffn) for _ in range(args.layers)))
    sharding: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    tensor = args.tensor_parallel if variant.kind == "fsdp-tp" else 1
    if tensor > 1:
        mesh = init_device_mesh(device, (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
        sharding["mesh"], replica = mesh["data"], mesh["data"].get_local_rank()
        for layer in model:
            torch_styles.parallelize_module(layer, mesh["tensor"], _plan(variant.styles))
    after = variant.prepare(model)
    for layer in model:
        if args.compile:  # tensor parallelism in one graph needs constant sizes, with PyTorch's own backend too
            layer.compile(backend=variant.backend, options=variant.options, fullgraph=True, dynamic=False)
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    parts = []
    for number in range(args.replicas) if args.replicas else (replica,):
        torch.manual_seed(1 + number)
        parts.append(torch.randn(args.batch, args.tokens, args.hidden, device=device, dtype=torch.bfloat16))
    x = torch.cat(parts)
    if tensor > 1:
        x = x.chunk(tensor, 1)[mesh["tensor"].get_local_rank()].contiguous()
    return Trained(model, after, x, x.flip(-1), 1 / tensor)


def _plan(styles: Any) -> dict[str, Any]:
    """Tensor and sequence parallelism, with plain tensors at both ends of a layer: one graph then holds all of it."""
    norms = ("input_norm", "mlp_norm")
    plan: dict[str, Any] = {name: torch_styles.SequenceParallel(use_local_output=True) for name in norms}
    for name in ("attention", "feed_forward"):
        plan[name] = styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj"):
        plan[name] = styles.ColwiseParallel()
    for name in ("feed_forward.gate_proj", "feed_forward.up_proj"):
        plan[name] = styles.ColwiseParallel()
    for name in ("attention.o_proj", "feed_forward.down_proj"):
        plan[name] = styles.RowwiseParallel(output_layouts=Shard(1))
    return plan


class Training:
    """A variant's model in training."""

    def __init__(self, variant: Variant, args: argparse.Namespace, device: str) -> None:
        self.model, self.after, self.x, self.wanted, self.share = built(variant, args, device)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.after(self.model)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # a graph allocates when it is captured
        self._train = self._captured() if variant.captured and device == "cuda" else self._eager

    def step(self) -> float:
        """One step, and this rank's part of its loss."""
        loss = self._train()
        _wait(self.device)
        return float(loss)

    def _eager(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.share * (self.model(self.x).float() - self.wanted.float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.after(self.model)
        return loss.detach()

    def _captured(self) -> Callable[[], Tensor]:
        """A step as one CUDA graph, captured after two steps, which are then taken back."""
        shards = [local_of(parameter).detach() for parameter in self.model.parameters()]
        before = [value + 0 for value in shards]
        for group in self.optimizer.param_groups:
            group["capturable"] = True
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._eager()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._eager()
        with torch.no_grad():
            for local, value in zip(shards, before, strict=True):
                local.copy_(value)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self.after(self.model)

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay


def run(variant: Variant, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Times steps of one variant; the largest of the ranks' times counts."""
    training = Training(variant, args, device)
    times, losses = [], []
    for _ in range(args.warmup + args.steps):
        dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        losses.append(training.step())
        seconds = torch.tensor(time.perf_counter() - begin, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item())
    measured, of_all = times[args.warmup :], torch.tensor(losses, device=device)
    dist.all_reduce(of_all)
    return {
        "kind": variant.kind, "variant": variant.name, "median_ms": 1e3 * statistics.median(measured),
        "least_ms": 1e3 * min(measured), "losses": (of_all / (training.share * dist.get_world_size())).tolist(),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
    }  # fmt: skip


def profiled(variant: Variant, args: argparse.Namespace) -> dict[str, Any]:
    """The collectives and kernels of a step of one variant on a GPU."""
    training = Training(variant, args, "cuda")
    for _ in range(args.warmup):
        training.step()
    return wire.summary(wire.profiled(training.step))


def gathers(device: str, megabytes: Sequence[int]) -> list[dict[str, float]]:
    """Milliseconds of a gather of so many bytes in all, and of one of half as many, as FP8 sends for bf16.

    Ten follow one another, as in a step, where the host waits for none.
    """
    found, world = [], dist.get_world_size()
    for size in megabytes:
        row: dict[str, float] = {"megabytes": size}
        for name, bytes_sent in (("bf16_ms", size << 20), ("fp8_ms", size << 19)):
            part = torch.zeros(bytes_sent // world, dtype=torch.uint8, device=device)
            whole = torch.empty(part.numel() * world, dtype=torch.uint8, device=device)
            times = []
            for _ in range(15):
                dist.barrier()
                _wait(device)
                begin = time.perf_counter()
                for _ in range(10):
                    dist.all_gather_into_tensor(whole, part)
                _wait(device)
                times.append((time.perf_counter() - begin) / 10)
            worst = torch.tensor(statistics.median(times[5:]), device=device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            row[name] = 1e3 * worst.item()
        found.append(row)
    return found


def _forget(device: str) -> None:
    """Releases what the last variant held."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, value in (
        ("--hidden", 4096), ("--ffn", 14336), ("--layers", 12), ("--batch", 1), ("--tokens", 8192), ("--steps", 10),
        ("--warmup", 4), ("--tensor-parallel", 2), ("--experts", 8), ("--expert-ffn", 3584), ("--expert-layers", 4),
    ):  # fmt: skip
        parser.add_argument(option, type=int, default=value)
    parser.add_argument("--expert-capacity", type=float, default=1.5, help="times the rows that a rank sends")
    parser.add_argument("--kinds", nargs="+", choices=("fsdp", "fsdp-tp", "experts", "gathers"), default=["fsdp"])
    parser.add_argument("--megabytes", type=int, nargs="+", default=(16, 64, 128, 256), help="sizes of bare gathers")
    parser.add_argument("--replicas", type=int, default=0, help="one rank trains on the batches of so many ranks")
    parser.add_argument("--beside", type=Path, help="JSON of a run on other ranks, whose losses the rows take over")
    parser.add_argument("--graph", action="store_true", help="each step as one CUDA graph, except of experts")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = ranks.join()
    found = ranks.described(args, [])
    beside = _losses(args.beside)
    if "gathers" in args.kinds:
        found["gathers"] = gathers(device, args.megabytes)
        _show(found["gathers"], found, args.json)
    chosen = [each for each in VARIANTS if each.kind in args.kinds and (args.graph or not each.graphs_only)]
    if args.graph:
        chosen = [variant._replace(captured=variant.captured or variant.kind != "experts") for variant in chosen]
    for variant in chosen:
        try:
            row = run(variant, args, device)
        except ImportError as error:
            row = {"kind": variant.kind, "variant": variant.name, "skipped": str(error)}
        _forget(device)
        if (variant.kind, variant.name) in beside:
            row["losses_beside"] = beside[variant.kind, variant.name]
        found["rows"].append(row)
        _show(row, found, args.json)
    # Last, for after its first profile CUDA takes the host longer for each launch.
    if device == "cuda" and not args.graph:
        for variant, row in zip(chosen, found["rows"], strict=True):
            if "skipped" not in row:
                row["wire"] = profiled(variant, args)
                _forget(device)
                _show({"variant": variant.name, "busy_ms": row["wire"]["busy_ms"]}, found, args.json)
    dist.destroy_process_group()


def _losses(path: Path | None) -> dict[tuple[str, str], list[float]]:
    """The losses of an earlier run by kind and variant."""
    rows = [] if path is None else record.read(path)["results"]["rows"]
    return {(row["kind"], row["variant"]): row["losses"] for row in rows if "losses" in row}


def _show(new: Any, found: dict[str, Any], path: Path | None) -> None:
    """Prints what is new, and writes what was found so far."""
    if dist.get_rank() == 0:
        print(new, flush=True)
        if path is not None:
            record.write(path, "scale_out", found)


if __name__ == "__main__":
    main()
