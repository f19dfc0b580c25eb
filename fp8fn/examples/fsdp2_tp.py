"""FSDP2 beside tensor parallelism, FP8 on both wires: `torchrun --nproc-per-node 4 -m fp8fn.examples.fsdp2_tp`."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import fp8fn
from fp8fn.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel, gather_fp8, update_scales
from fp8fn.examples.fsdp2 import Block

RECIPE = fp8fn.BLOCKWISE_POW2  # what is gathered in FP8 is quantized again without rounding


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    sizes = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    block: nn.Module = Block(args.width).to(device)

    plan = {  # rows of x are sharded between the products
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
    }
    parallelize_module(block, mesh["tensor"], plan)
    report = gather_fp8(block, recipe=RECIPE)
    block.forward = fp8fn.fp8(block.forward, recipe=RECIPE)
    fully_shard(block, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: update_scales(block))
    update_scales(block)

    torch.manual_seed(1 + mesh["data"].get_local_rank())
    x = torch.randn(64, args.width, device=device)
    for step in range(5):
        loss = (block(x).full_tensor() - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, {len(report.quantized)} weights gathered in FP8", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
