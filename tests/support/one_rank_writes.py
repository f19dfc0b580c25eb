"""A program for `torchrun`: the first rank alone writes a weight, and each rank notes how its next forward ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8fn.distributed import gather_fp8, update_scales


def main(device: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(device)
    gather_fp8(model)
    fully_shard(model)
    update_scales(model)
    x = torch.ones(4, 256, device=device)
    model(x)
    model.reshard()
    if rank == 0:
        with torch.no_grad():
            next(model[1].parameters()).mul_(2)
    try:
        model(x).sum().item()
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
        raise
    Path(folder, str(rank)).write_text("no error")


if __name__ == "__main__":
    main(*sys.argv[1:])
