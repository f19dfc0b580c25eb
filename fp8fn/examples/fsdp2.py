"""FSDP2 with FP8 products and FP8 on the wire: `torchrun --nproc-per-node 2 -m fp8fn.examples.fsdp2`."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fp8fn
from fp8fn.distributed import gather_fp8, update_scales


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("--width", 256), ("--layers", 2), ("--steps", 5)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers))).to(device)

    report = gather_fp8(model)  # before fully_shard
    for block in model:
        block.forward = fp8fn.fp8(block.forward)
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: update_scales(model))
    update_scales(model)  # of the initial weights
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(64, args.width, device=device)
    for step in range(args.steps):
        loss = (model(x) - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, {len(report.quantized)} weights gathered in FP8", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
