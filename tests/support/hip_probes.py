"""Arguments of the kernels that probe `wave.h`, on the host and in the emulator, and what they must write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8fn.ops.hip.build import HipKernel
from fp8fn.ops.hip.launch import HipLaunch
from fp8fn.ops.targets import GFX950
from support.mx_decode import (
    BF16,
    E4M3,
    E8M0,
    FP16,
    values,
)


def probe(entry: str, *args: Tensor | int, threads: int = 64, **macros: int) -> HipLaunch:
    named = {str(i): arg for i, arg in enumerate(args)}
    return HipLaunch(
        HipKernel("probes.hip", entry, "gfx950", tuple(macros.items())), (1, 1, 1), threads, named, target=GFX950
    )


def probes() -> dict[str, tuple[Sequence[Tensor | int], dict[int, Tensor]]]:
    """Arguments of each kernel of `probes.hip`, and what it must leave in those that it writes, by `wave.h`'s words."""
    torch.manual_seed(1)
    lane = torch.arange(64)
    a, b = (torch.randint(0, 0x7F, (16, 128), dtype=torch.uint8) for _ in range(2))
    a_scale, b_scale = (torch.randint(120, 134, (16, 4), dtype=torch.uint8) for _ in range(2))
    start = torch.randn(16, 16)
    left, right = (
        values(x.view(E4M3)) * values(s.view(E8M0)).repeat_interleave(32, 1) for x, s in ((a, a_scale), (b, b_scale))
    )
    product = (start.double() + left @ right.mT).float()
    row, group = lane % 16, lane // 16
    k = torch.cat([16 * group[:, None] + torch.arange(16), 64 + 16 * group[:, None] + torch.arange(16)], 1)
    held = 4 * group[:, None] + torch.arange(4), row[:, None].expand(64, 4)

    low, high = torch.randn(64), torch.randn(64)
    across = {32: lane ^ 32, 16: lane ^ 16, 8: lane ^ 8, 4: lane ^ 7, 2: lane ^ 2, 1: lane ^ 1}
    folds = [torch.where(lane & m != 0, high + high[to], low + low[to]) for m, to in across.items()]
    exchanges = [low[across[m]] for m in (8, 4, 2, 1)]

    every = torch.arange(256, dtype=torch.uint8)
    e4m3 = every.view(E4M3).float().view(64, 4)
    sums = e4m3[:, :2].double() * e4m3[:, 2:].double() + e4m3[:, :2].double()
    numbers, exponents = torch.randn(64), torch.randint(-160, 128, (64,), dtype=torch.int32)

    data = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    offsets = torch.cat([16 * torch.arange(62), torch.tensor([-1, 960])]).int()
    size = 660  # ends within a piece
    inside = torch.cat([data[:size], torch.zeros(2000, dtype=torch.uint8)])
    at = torch.where(offsets < 0, 1500, offsets.long())
    pieces = inside[at[:, None] + torch.arange(16)].view(torch.int32)
    bounds = torch.cat([pieces, inside[at][:, None].int()], 1).int()

    floats = torch.cat([torch.randn(60) * 1000, torch.tensor([0.0, torch.inf, -1e-9, 70000.0])])
    pair = torch.randn(128)
    return {
        "matrix": (
            (a[row[:, None], k], b[row[:, None], k], a_scale[row, group], b_scale[row, group], start[held]),
            {4: product[held]},
        ),
        "lanes_of_a_wave": ((low, high, torch.empty(10, 64)), {2: torch.stack([*folds, *exchanges])}),
        "numbers": (
            (every, numbers, exponents, torch.empty(64, 6), torch.empty(64)),
            {3: torch.cat([e4m3, sums.float()], 1), 4: torch.ldexp(numbers.double(), exponents).float()},
        ),
        "bounds": ((data, offsets, torch.empty(64, 5, dtype=torch.int32), size), {2: bounds}),
        "rounded": (
            (floats, torch.empty(64, dtype=BF16), torch.empty(64, dtype=FP16), torch.empty(64)),
            {1: floats.bfloat16(), 2: floats.half(), 3: floats.bfloat16().float() + floats.half().float()},
        ),
        "local_memory": (
            (pair, torch.empty(128)),
            {1: (pair[:64] + pair[64:].flip(0)).repeat(2)},
        ),
    }  # fmt: skip


def check_probe(entry: str, start: Any) -> None:
    args, expected = probes()[entry]
    start(probe(entry, *args, threads=128 if entry == "local_memory" else 64))
    for i, right in expected.items():
        found = args[i]
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, right, rtol=1e-6 if entry == "matrix" else 0, atol=0, equal_nan=True)
