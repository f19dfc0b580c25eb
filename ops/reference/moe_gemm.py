"""The definition of the products of routed tokens, in plain PyTorch: each expert's rows are one float32 product."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8fn.ops.layout import Block
from fp8fn.ops.reference.quantize import dequantize


def moe_gemm(
    a: Tensor, a_scale: Tensor, a_block: Block, w: Tensor, w_scale: Tensor, w_block: Block,
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_post_padded: Tensor, a_div: int,
    token_weights: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`out[id] = weight[id] * (a[id // a_div] @ w[expert])` of each id in a tile, `(R * a_div, N)`; zeros elsewhere."""
    rows, experts = a.shape[0] * a_div, w.shape[0]
    out = a.new_zeros((rows, w.shape[2]), dtype=torch.float32)
    tiles = expert_ids.shape[0]
    if tiles > 0:
        block_m = sorted_token_ids.shape[0] // tiles
        place = torch.arange(tiles, device=a.device) * block_m
        live = place < num_tokens_post_padded
        ids = sorted_token_ids.view(tiles, block_m)
        activations = dequantize(a, a_scale, a_block)
        with torch.autocast(a.device.type, enabled=False):  # which would multiply in 16 bits
            for expert in range(experts):
                chosen = ids[live & (expert_ids == expert)].flatten().long()
                chosen = chosen[(chosen >= 0) & (chosen < rows)]
                if chosen.numel():
                    weight = dequantize(w[expert], w_scale[expert], w_block)
                    product = activations[chosen // a_div] @ weight
                    out[chosen] = product if token_weights is None else product * token_weights[chosen, None]
    return out.to(out_dtype)
