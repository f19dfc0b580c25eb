"""Processes that `torchrun` starts for a benchmark."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist


def join() -> str:
    """Joins the processes, by NCCL where there are GPUs, and returns the type of this one's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return device


def described(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`rows` with the device, the number of ranks and the arguments of the run, as results on disk have them."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ranks": dist.get_world_size(),
        "arguments": {key: value for key, value in vars(args).items() if key not in ("json", "beside")},
        "rows": rows,
    }
