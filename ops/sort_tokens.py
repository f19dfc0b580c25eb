"""The decode-time layout of a mixture of experts: the ids of routed tokens by expert, each expert's in whole tiles.

An id is `token * top_k + choice`, one of `R = T * top_k`. Tile `t` is `block_m` ids from `t * block_m` on, all of them
of expert `expert_ids[t]`; its free places hold `R`. Sizes depend on shapes alone, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def most_tiles(ids: int, num_experts: int, block_m: int) -> int:
    """`⌊(R + E (block_m - 1)) / block_m⌋`, for `⌈n / b⌉ <= (n + b - 1) / b`; at most `R` experts have a token."""
    tiles: int = (ids + torch.sym_min(num_experts, ids) * (block_m - 1)) // block_m
    return tiles


def sort_tokens(topk_ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """`topk_ids (T, top_k)` → ids `(tiles * block_m,)`, experts `(tiles,)` and the padded number of ids `(1,)`; int32.

    A stable sort, so that an expert's ids ascend. An id whose expert is none of `0 … num_experts - 1` is left out.
    """
    _check(topk_ids, num_experts, block_m)
    expert = topk_ids.reshape(-1)
    ids = expert.shape[0]
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    by_expert, order = torch.sort(expert, stable=True)
    # The start of each expert's ids, and the end of the last expert's.
    borders = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=expert.device, dtype=expert.dtype))
    start, end = borders[:-1], borders[1:]
    last_tile = ((end - start + block_m - 1) // block_m).cumsum(0)

    tile = torch.arange(most_tiles(ids, num_experts, block_m), device=expert.device)
    owner = torch.searchsorted(last_tile, tile, right=True)  # `num_experts` past the last tile
    used = owner < num_experts
    owner = owner.clamp_max(num_experts - 1)
    first_tile = torch.where(owner > 0, last_tile[(owner - 1).clamp_min(0)], 0)
    first = start[owner] + (tile - first_tile) * block_m
    place = first[:, None] + torch.arange(block_m, device=expert.device)
    inside = used[:, None] & (place < end[owner][:, None])
    sorted_ids = torch.where(inside, order[place.clamp_max(ids - 1)], ids)
    return (
        sorted_ids.flatten().to(torch.int32),
        torch.where(used, owner, -1).to(torch.int32),
        (last_tile[-1:] * block_m).to(torch.int32),
    )


def _check(topk_ids: Tensor, num_experts: int, block_m: int) -> None:
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sort_tokens: topk_ids has dtype {topk_ids.dtype}; use int32 or int64, of torch.topk")
    if topk_ids.ndim != 2:
        raise ValueError(f"sort_tokens: topk_ids has shape {tuple(topk_ids.shape)}; it must be (T, top_k)")
    if num_experts < 1:
        raise ValueError(f"sort_tokens: num_experts={num_experts}; give the number of experts, 1 at least")
    if block_m < 1:
        raise ValueError(f"sort_tokens: block_m={block_m}; give the rows of a tile, 16 or another power of two")
